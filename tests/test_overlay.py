"""Coordinator and daemons with the broadcast tree between them: real but for the wire and the processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from cheats import Paced
from swarm_support import make_model, swarming

from barnraise.coordinator.origin import Origin
from barnraise.protocol import shards as shards_module

Clock = trio.testing.MockClock


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("overlay") / "model")


@pytest.fixture(autouse=True)
def _inline_file_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "INLINE_BYTES", 2**40)


async def test_versions_reach_all_daemons_down_the_tree(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    async with swarming(tmp_path, model, versions=3) as swarm:
        members = [await swarm.join(f"node-{number}", Paced(1.0)) for number in range(6)]
        await swarm.until(lambda: swarm.head >= 2)
        await swarm.until(lambda: all(member.tree["have_version"] >= 2 for member in members))
        tree = swarm.state()["tree"]
        assert len(tree["neighbours"]) == 6
        for member in members:
            mine = member.tree["tree"]
            assert len(mine["neighbours"]) == 6
            assert mine["eager"] + mine["lazy"] == 6
            assert mine["banned"] == []
            assert any(v["version"] == 2 and v["have"] == v["of"] for v in mine["versions"])
        assert any(v["bytes_out"] > 0 for v in tree["versions"])
        print(tree["versions"])
        assert tree["reports"] == []
        await swarm.finish()


async def test_what_the_operator_may_choose() -> None:
    with pytest.raises(ValueError, match="upload copies"):
        Origin(None, b"", None, None, None, 0.5)  # type: ignore[arg-type]

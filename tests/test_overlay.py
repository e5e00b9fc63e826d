"""Coordinator and daemons with the broadcast tree between them: real but for the wire and the processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from cheats import Paced
from swarm_support import make_model, swarming

from barnraise.coordinator import origin
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
        assert tree["reports"] == []
        await swarm.finish()


async def test_a_daemon_that_sends_corrupt_shards_is_banned_and_reported_and_nobody_misses_a_version(
    tmp_path: Path, model: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "SLOTS", 1)  # so that the others have to help
    async with swarming(tmp_path, model, versions=60) as swarm:
        swarm.memory._bandwidth = 60e3  # of each link from here on
        evil = await swarm.join("evil", Paced(1.0))
        honest = [await swarm.join(f"node-{number}", Paced(1.0)) for number in range(4)]
        assert evil.handle is not None
        store = evil.handle._ctx.store
        real = store.get

        def flipped(digest: bytes) -> bytes | None:
            data = real(digest)
            return None if data is None else bytes([data[0] ^ 1]) + data[1:]

        await swarm.until(lambda: evil.tree["have_version"] >= 0)
        evil.handle._ctx.treecast.gossiper.store = _Other(store, flipped)  # type: ignore[union-attr, assignment]

        def caught() -> set[str]:
            reports = swarm.state()["peer_reports"] + swarm.state()["tree"]["reports"]
            return {report["peer"] for report in reports if report["code"] == "corrupt"}

        await swarm.until(lambda: bool(caught()))  # who uploads to whom differs from version to version
        assert caught() == {evil.peer_id}
        head = swarm.head
        await swarm.until(lambda: all(member.tree["have_version"] > head for member in honest))


class _Other:
    """A store that reads otherwise."""

    def __init__(self, store: Any, get: Callable[[bytes], bytes | None]) -> None:
        self._store = store
        self.get = get

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def test_what_the_operator_may_choose() -> None:
    with pytest.raises(ValueError, match="upload copies"):
        Origin(None, b"", None, None, None, 0.5)  # type: ignore[arg-type]

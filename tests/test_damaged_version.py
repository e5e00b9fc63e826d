"""A version that its own coordinator published wrong: the fault is named, and no peer pays for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio.testing
from cheats import Paced
from swarm_support import make_model, swarming

from barnraise.coordinator import publisher
from barnraise.protocol.manifest import WEIGHTS_FILE
from barnraise.protocol.messages import Manifest

Clock = trio.testing.MockClock


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("damaged") / "model")


async def test_a_manifest_that_does_not_match_its_shards_is_its_coordinators_fault(
    tmp_path: Path, model: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shard has its digest; the SHA-256 of the whole weights file is another one."""
    real: Callable[..., Manifest] = publisher.build_manifest

    def damaged(*arguments: Any) -> Manifest:
        manifest = real(*arguments)
        if manifest.version != 1:
            return manifest
        files = tuple(
            msgspec.structs.replace(entry, sha256=b"\1" * 32) if entry.path == WEIGHTS_FILE else entry
            for entry in manifest.files
        )
        return msgspec.structs.replace(manifest, files=files)

    monkeypatch.setattr(publisher, "build_manifest", damaged)
    async with swarming(tmp_path, model, versions=60) as swarm:
        members = [await swarm.join(f"node-{number}", Paced(1.0)) for number in range(2)]
        await swarm.until(lambda: swarm.head >= 1)

        def told(member: Any) -> bool:
            return any("was published damaged" in notice["text"] for notice in member.tree["notices"])

        await swarm.until(lambda: all(told(member) for member in members))
        await swarm.until(lambda: bool(swarm.state()["peer_reports"]))
        for report in swarm.state()["peer_reports"]:
            assert report["peer"] == swarm.run.identity.peer_id  # the operator reads whose fault it is
            assert "published damaged" in report["text"]
        for member in members:
            assert member.tree["tree"]["banned"] == []
            assert member.tree["have_version"] == 0  # and keeps working with what is sound

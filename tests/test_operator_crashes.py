"""Killed at any durable step of what an operator does: what was answered holds, a rollback is made once."""

from __future__ import annotations

import os
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from coordinator_support import coordinating

from barnraise.coordinator import checkpoints
from barnraise.coordinator.admission import allow, make_invite, set_mode
from barnraise.coordinator.amending import amend
from barnraise.coordinator.bans import ban, unban
from barnraise.coordinator.core import Core
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import entries_of
from barnraise.coordinator.steering import pause, resume, roll_back
from barnraise.protocol import ledger
from barnraise.protocol.memory_network import MemorySwarm
from tests.test_steering import Recording, at_work, until, weights

Clock = trio.testing.MockClock
KEY = "ab" * 32


def all_files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".sock")
    return {
        str(path.relative_to(folder)): zlib.compress(path.read_bytes(), 1)
        for path in paths
        if not path.name.endswith(("-shm", "lock"))
    }


@dataclass
class Steps:
    """What is on the disk after each durable step, and what the operator had been answered by then."""

    folder: Path
    moments: list[tuple[str, dict[str, bytes], set[str]]] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    watching: bool = False

    def note(self, what: str) -> None:
        files = all_files(self.folder)
        if not self.moments or self.moments[-1][1] != files:
            self.moments.append((what, files, set(self.answered)))

    def back_to(self, files: dict[str, bytes]) -> None:
        shutil.rmtree(self.folder)
        for name, data in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(zlib.decompress(data))
        (self.folder / "run.key").chmod(0o600)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    found = Steps(tmp_path / "run")
    commit, rename = Journal.commit, os.rename

    def committing(self: Journal, writes: Any) -> None:
        listed = list(writes)
        commit(self, listed)
        if found.watching:
            found.note(", ".join(type(event).__name__ for write in listed for event in write.events))

    def renaming(source: Path, target: Path) -> None:
        if found.watching:
            found.note(f"before {Path(target).name}")
        rename(source, target)
        if found.watching:
            found.note(f"after {Path(target).name}")

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(Journal, "commit", committing)
    return found


async def test_killed_at_any_step_of_an_operators_acts_what_was_answered_holds(
    steps: Steps, tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = steps.folder
    async with at_work(tmp_path) as (_, core, _):
        await until(core, lambda state: state.head >= 3)
        await pause(core, {"reason": "to look at it"})
        await until(core, lambda state: not (state.batch or state.unpublished or state.waiting))
        await trio.sleep(5)
        steps.note("begin")
        steps.watching = True
        back, last = checkpoints.complete_versions(folder)[-2], core.state.head
        acts = {
            "amend": amend(core, {"changes": {"grpo.learning_rate": "0.25"}, "reason": "slower"}),
            "allow": allow(core, {"nodes": [KEY]}),
            "invite": make_invite(core, {"uses": 2, "seconds": 5000}),
            "ban": ban(core, {"node": "ann", "reason": "a try", "seconds": 10**7}),
            "rollback": roll_back(core, folder, {"version": back, "reason": "worse"}),
            "unban": unban(core, {"node": "ann"}),
            "mode": set_mode(core, {"mode": "invite", "keep_proven": True}),
            "resume": resume(core, {}),
        }
        for name, act in acts.items():
            if name in ("unban", "resume"):
                steps.answered.add(name)  # asked for: from now on either holds
            await act
            steps.answered.add(name)
            if name == "rollback":
                await until(core, lambda state: state.head == last + 1)
        steps.watching = False
        before = weights(folder, back)
    kinds = {what for what, _, _ in steps.moments}
    assert {"RollbackOrdered", f"after v{last + 1:06}", "VersionTrained", "VersionPublished"} <= kinds
    for what, files, answered in steps.moments:
        steps.back_to(files)
        await holds(folder, what, answered, before, last)


async def holds(folder: Path, what: str, answered: set[str], before: bytes, last: int) -> None:
    swarm = MemorySwarm()
    async with coordinating(swarm, folder, learner=Recording(folder)) as coordinator:
        core: Core = coordinator.state.args[0]
        mine, state = core.state.operations, core.state
        assert mine.paused is not None or "resume" in answered, what
        assert core.settings.grpo.learning_rate == 0.25 or "amend" not in answered, what
        assert bytes.fromhex(KEY) in mine.allowed or "allow" not in answered, what
        assert len(mine.invites) == 1 or "invite" not in answered, what
        banned = any(node.banned_until for node in state.nodes.values())
        assert banned or "ban" not in answered or "unban" in answered, what
        assert core.settings.admission == "invite" or "mode" not in answered, what
        assert mine.rollbacks == 1 or "rollback" not in answered, what
        await until(core, lambda state: state.operations.rollback is None and state.unpublished is None, 60)
        assert core.state.head == last + mine.rollbacks, what
        if mine.rollbacks:
            assert weights(folder, last + 1) == before, what
    journal = Journal(folder / "state.sqlite")
    ledger.balances(list(entries_of(journal.events(), core.state.max_lag)), core.spec)
    journal.close()

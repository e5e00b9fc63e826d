"""The restore drill: backed up under load, killed, restored elsewhere; and no history is signed twice."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import trio
import trio.testing
from coordinator_support import coordinating, make_run, node

from barnraise.coordinator.admission import allow, disallow
from barnraise.coordinator.amending import amend
from barnraise.coordinator.backup import back_up, check_backup
from barnraise.coordinator.bans import ban
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_place import journal_path
from barnraise.coordinator.migrate import migrate
from barnraise.coordinator.restore import restore
from barnraise.coordinator.run_file import operating
from barnraise.coordinator.steering import pause
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.memory_network import MemorySwarm
from tests.server_support import head_is, volunteer
from tests.test_ledger_inspect import call
from tests.test_migrate import database, some_versions

__all__ = ["database"]
Clock = trio.testing.MockClock


async def backed_up_under_load(folder: Path, backup: Path) -> None:
    """A backup in the middle of things, more of which happen before the kill."""
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator, trio.open_nursery() as nursery:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            nursery.start_soon(volunteer, ann, coordinator)
            nursery.start_soon(volunteer, bob, coordinator)
            await head_is(coordinator, 1)
            back_up(folder, backup, 5_000)
            await head_is(coordinator, 2)
            await trio.sleep(30)
            nursery.cancel_scope.cancel()


def balances(folder: Path) -> dict[bytes, int]:
    from barnraise.coordinator.state import fold

    with closing(Journal(journal_path(folder), reading=True)) as journal:
        return {key: item.credit for key, item in fold(journal.events(), 1).nodes.items()}


async def test_restored_elsewhere_the_swarm_goes_on_in_a_run_that_says_what_it_continues(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder, backup, elsewhere = make_run(tmp_path, versions=4), tmp_path / "backup", tmp_path / "elsewhere"
    await backed_up_under_load(folder, backup)
    seen = (folder / "log/checkpoint").read_bytes()  # as a node or a mirror has it
    made = check_backup(backup)
    earned = balances(backup)
    assert sum(earned.values()) > 0
    shutil.rmtree(folder)  # the machine is gone
    with pytest.raises(RunFolderError, match=r"entries were published after this backup"):
        restore(backup, elsewhere, 9_000, same_run=True, checkpoints=[seen])
    assert not elsewhere.exists()
    done = restore(backup, elsewhere, 9_000, checkpoints=[seen])
    assert done.missing > 0
    assert not done.same_run
    spec, _, run_id = read_spec(elsewhere)
    assert run_id == done.run_id
    assert run_id.hex() != made.run_id
    words = f"Continues run {made.run_id}, as of its ledger's first {made.ledger_size} entries"
    assert words in spec.description
    weights = (backup / f"checkpoints/v{made.trained:06}/model.safetensors").read_bytes()
    assert (elsewhere / "checkpoints/v000000/model.safetensors").read_bytes() == weights
    old = elsewhere / "before/ledger.bin"
    with open_ledger(old) as ledger:
        assert len(list(ledger.entries)) == made.ledger_size
    assert call("ledger", "verify", old, "--checkpoint", backup / "log/checkpoint") == 0
    await some_versions(elsewhere, 2)
    assert call("ledger", "verify", elsewhere) == 0


async def test_moved_after_a_stop_it_is_the_same_run_in_any_store(
    tmp_path: Path, database: str, autojump_clock: Clock
) -> None:
    folder, backup, elsewhere = make_run(tmp_path, versions=4), tmp_path / "backup", tmp_path / "elsewhere"
    await some_versions(folder, 1)
    migrate(folder, database)
    back_up(folder, backup, 5_000)  # out of PostgreSQL
    seen = (folder / "log/checkpoint").read_bytes()
    before = balances(folder)
    done = restore(backup, elsewhere, 9_000, same_run=True, checkpoints=[seen])
    assert done.missing == 0
    assert journal_path(elsewhere).name == "state.sqlite"
    assert balances(elsewhere) == before
    assert done.run_id == read_spec(folder)[2]
    await some_versions(elsewhere, 2)
    assert call("ledger", "verify", elsewhere, "--checkpoint", folder / "log/checkpoint") == 0
    again = tmp_path / "again"
    assert restore(backup, again, 9_000, same_run=True, store=database).place.startswith("postgresql://")
    await some_versions(again, 2)
    assert call("ledger", "verify", again, "--checkpoint", folder / "log/checkpoint") == 0


async def test_a_version_that_the_journal_does_not_know_is_not_restored(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder, backup = make_run(tmp_path, versions=4), tmp_path / "backup"
    await some_versions(folder, 1)
    shutil.copytree(folder / "checkpoints/v000001", folder / "checkpoints/v000009")
    back_up(folder, backup, 5_000)
    restore(backup, tmp_path / "elsewhere", 9_000, same_run=True)
    assert not (tmp_path / "elsewhere/checkpoints/v000009").exists()
    assert (tmp_path / "elsewhere/run.key").stat().st_mode & 0o777 == 0o600


async def test_a_damaged_backup_restores_nothing(tmp_path: Path, autojump_clock: Clock) -> None:
    folder, backup = make_run(tmp_path), tmp_path / "backup"
    with pytest.raises(RunFolderError, match="has not begun"):
        back_up(folder, backup, 5_000)
    await some_versions(folder, 1)
    weights = folder / "checkpoints/v000001/model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(RunFolderError, match=r"model.safetensors is damaged .* version 1 was published"):
        back_up(folder, backup, 5_000)
    weights.write_bytes(sound)
    assert not backup.exists()
    back_up(folder, backup, 5_000)
    with pytest.raises(RunFolderError, match="not an empty folder"):
        back_up(folder, backup, 5_000)
    with pytest.raises(RunFolderError, match="every backup would hold those before"):
        back_up(folder, folder / "backups/1", 5_000)
    assert not (folder / "backups").exists()
    with pytest.raises(RunFolderError, match="lies in the backup"):
        restore(backup, backup / "elsewhere", 9_000)
    assert [path.name for path in backup.glob("state.*")] == ["state.sqlite"]  # readers change nothing
    for name in ("state.sqlite", "run.key", "checkpoints/v000001/model.safetensors"):
        path = backup / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(RunFolderError, match=rf"{path.name} is damaged"):
            restore(backup, tmp_path / "elsewhere", 9_000)
        path.write_bytes(whole)
    assert not (tmp_path / "elsewhere").exists()
    other = make_run(tmp_path, "other", versions=2)
    await some_versions(other, 1)
    foreign = (other / "log/checkpoint").read_bytes()
    with pytest.raises(RunFolderError, match="not of this run"):
        restore(backup, tmp_path / "elsewhere", 9_000, same_run=True, checkpoints=[foreign])


async def test_a_run_that_took_not_everybody_takes_not_everybody_when_it_is_restored(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder, backup, elsewhere = make_run(tmp_path, versions=4), tmp_path / "backup", tmp_path / "elsewhere"
    swarm, known, gone = MemorySwarm(), "ab" * 32, "cd" * 32
    async with coordinating(swarm, folder) as coordinator, node(swarm, coordinator, b"a"):
        await head_is(coordinator, 0)
        core = coordinator.state.args[0]  # type: ignore[attr-defined]
        changes = {"admission": '"invite"', "rollout.versions": "9"}
        await amend(core, {"changes": changes, "reason": "a closed group"})
        await ban(core, {"node": "ann", "reason": "floods", "seconds": 10**7})
        await allow(core, {"nodes": [known, gone], "note": "the lab"})
        await disallow(core, {"nodes": [gone]})
        await pause(core, {"reason": "it collapsed"})
    (folder / "run.toml").write_text("[keep]\nrollouts = 'all'\n")
    back_up(folder, backup, 5_000)
    restore(backup, elsewhere, 9_000)
    spec = read_spec(elsewhere)[0]
    assert (spec.admission, spec.rollout.versions) == ("invite", 9)
    assert operating(elsewhere).keep.rollouts == "all"
    async with coordinating(MemorySwarm(), elsewhere) as coordinator:
        await head_is(coordinator, 0)
        state = coordinator.state.args[0].state  # type: ignore[attr-defined]
        mine = state.operations
        assert (mine.allowed, list(mine.taken_off)) == (
            {bytes.fromhex(known): "the lab"},
            [bytes.fromhex(gone)],
        )
        assert mine.paused is not None
        assert mine.paused.reason == "it collapsed"
        (ann,) = state.nodes.values()
        assert ann.ban_reason.startswith("by the operator: floods")
        assert ann.banned_until > 10**9
    assert call("ledger", "verify", elsewhere) == 0

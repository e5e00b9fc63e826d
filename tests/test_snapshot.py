"""Snapshots: whatever is cut, damaged, foreign or lost, the state is the one that the journal gives."""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from coordinator_history import MAX_LAG, RUN_ID, history
from coordinator_support import make_run, opened

from barnraise.coordinator import snapshot
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import Event, NodeJoined, encode_event
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.ledger_log import advance
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.snapshot import Fold, Snapshots, decode_state, encode_state, take_snapshot
from barnraise.coordinator.state import State, apply
from barnraise.protocol.errors import MalformedError, RunFolderError
from barnraise.protocol.identity import Identity
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.tlog_checkpoint import Checkpoint, Head, log_key, origin_of, sign_checkpoint

KEY = Identity.from_private_bytes(b"o" * 32)
EVENTS = history(5, 700)


def folded(events: Sequence[Event]) -> Fold:
    fold = Fold.empty(MAX_LAG)
    for event in events:
        advance(fold.state, fold.ledger, event)
        fold.events += 1
    return fold


def same(one: Fold, other: Fold) -> bool:
    sizes = (one.events, len(one.ledger), one.ledger.root()) == (
        other.events,
        len(other.ledger),
        other.ledger.root(),
    )
    return sizes and encode_state(one.state) == encode_state(other.state)


def goes_on(fold: Fold, journal: Journal) -> Fold:
    for event in journal.events(fold.events):
        advance(fold.state, fold.ledger, event)
        fold.events += 1
    return fold


def journal_of(path: Path, events: Sequence[Event]) -> Journal:
    journal = Journal(path / "state.sqlite")
    journal.commit([Write(events=events)])
    return journal


def published(path: Path, ledger: MerkleLog, entries: Sequence[bytes], size: int) -> LogFolder:
    folder = LogFolder(path / "log", log_key(RUN_ID, KEY.public_key))
    point = Checkpoint(origin_of(RUN_ID), size, ledger.root(size))
    folder.grow(
        ledger, Head(point, sign_checkpoint(point, KEY).encode()), folder.size, entries[folder.size : size]
    )
    return folder


def entries_of(events: Sequence[Event]) -> list[bytes]:
    fold = Fold.empty(MAX_LAG)
    made = (advance(fold.state, fold.ledger, event) for event in events)
    return [item[2] for item in made if item is not None]


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("seed", range(6))
def test_at_every_cut_a_snapshot_and_the_rest_give_the_whole(seed: int) -> None:
    events = history(seed, 250)
    whole = encode_state(folded(events).state)
    state = State(max_lag=MAX_LAG)
    for cut, event in enumerate(events):
        data = encode_state(state)
        again = decode_state(data)
        assert encode_state(again) == data
        if cut % 16 == seed:  # the rest from here, to the end
            for later in events[cut:]:
                apply(again, later)
            assert encode_state(again) == whole
        else:  # ... and otherwise one step: by induction the same
            apply(again, event)
        apply(state, event)
        if cut % 16 != seed:
            assert encode_state(again) == encode_state(state)


@pytest.mark.usefixtures("no_sync")
def test_a_start_from_a_snapshot_is_a_start_from_the_first_event(tmp_path: Path) -> None:
    journal, snapshots = journal_of(tmp_path, EVENTS), Snapshots(tmp_path / "snapshots", RUN_ID)
    whole, entries = folded(EVENTS), entries_of(EVENTS)
    for size in (1, 100, 256, 300, len(entries)):
        public = published(tmp_path, whole.ledger, entries, size)
        events = take_snapshot(journal, snapshots, public, MAX_LAG)
        assert events is not None
        base = snapshots.newest(journal, size)
        assert base is not None
        assert (base.events, len(base.ledger)) == (events, size)
        assert same(goes_on(base, journal), whole)
        assert take_snapshot(journal, snapshots, public, MAX_LAG) is None  # nothing new
    assert len(list((tmp_path / "snapshots").iterdir())) == 2
    assert snapshots.newest(journal, 299) is None  # more than is published here
    journal.close()


@pytest.mark.usefixtures("no_sync")
def test_a_flipped_bit_anywhere_in_a_snapshot_costs_a_replay_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, snapshots = journal_of(tmp_path, EVENTS[:200]), Snapshots(tmp_path / "snapshots", RUN_ID)
    path = snapshots.write(folded(EVENTS[:200]), journal)
    good = path.read_bytes()
    for place in [*range(80), *range(80, len(good), 211)]:
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        path.write_bytes(bad)
        assert snapshots.newest(journal, 1 << 40) is None
        assert not path.exists()
    for length in (0, 5, 60, len(good) - 1):
        path.write_bytes(good[:length])
        assert snapshots.newest(journal, 1 << 40) is None
    assert "replayed instead" in caplog.text
    path.write_bytes(good)
    assert same(snapshots.newest(journal, 1 << 40) or Fold.empty(0), folded(EVENTS[:200]))
    assert len(list(path.parent.glob("*.refused"))) <= 2
    journal.close()


@pytest.mark.usefixtures("no_sync")
def test_the_newest_damaged_leaves_the_one_before(tmp_path: Path) -> None:
    journal, snapshots = journal_of(tmp_path, EVENTS), Snapshots(tmp_path / "snapshots", RUN_ID)
    snapshots.write(folded(EVENTS[:200]), journal)
    snapshots.write(folded(EVENTS[:300]), journal).write_bytes(b"")
    base = snapshots.newest(journal, 1 << 40)
    assert base is not None
    assert base.events == 200
    journal.close()


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("other", ["older", "diverged", "another run", "another fold"])
def test_a_snapshot_of_something_else_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    journal = journal_of(tmp_path, EVENTS[:300])
    Snapshots(tmp_path / "snapshots", RUN_ID).write(folded(EVENTS[:300]), journal)
    run_id, why = RUN_ID, ""
    if other == "older":  # the journal was restored from a backup
        journal.close()
        (tmp_path / "old").mkdir()
        journal, why = journal_of(tmp_path / "old", EVENTS[:250]), "an older copy of the journal"
    elif other == "diverged":  # ... and went on from there
        journal.close()
        (tmp_path / "old").mkdir()
        joined = [NodeJoined(node=bytes([number]) * 32, name="x", at_ms=1) for number in range(100)]
        journal, why = journal_of(tmp_path / "old", [*EVENTS[:250], *joined]), "is not the journal's"
    elif other == "another run":
        run_id, why = b"q" * 32, "of another run"
    else:
        monkeypatch.setattr(snapshot, "fold_version", lambda: b"x" * 32)
        why = "another version"
    assert Snapshots(tmp_path / "snapshots", run_id).newest(journal, 1 << 40) is None
    assert why in caplog.text
    assert not list((tmp_path / "snapshots").glob("*.bin"))
    journal.close()


@pytest.mark.usefixtures("no_sync")
def test_killed_at_any_write_leaves_a_snapshot_that_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    journal, snapshots = journal_of(tmp_path, EVENTS), Snapshots(tmp_path / "snapshots", RUN_ID)
    snapshots.write(folded(EVENTS[:200]), journal)
    snapshots.write(folded(EVENTS[:300]), journal)
    saved = tmp_path / "saved"
    shutil.copytree(tmp_path / "snapshots", saved)
    calls = {"replace": Path.replace, "unlink": Path.unlink, "open": Path.open}
    seen, newest, left = 0, set(), 0

    for moment in range(1, 40):
        shutil.rmtree(tmp_path / "snapshots")
        shutil.copytree(saved, tmp_path / "snapshots")
        left = moment
        with monkeypatch.context() as patch:
            for name, real in calls.items():

                def step(self: Path, *args: object, real=real, name=name, **more: object) -> object:  # type: ignore[no-untyped-def]
                    nonlocal left
                    left -= 1
                    if left == 0:
                        if name == "open":  # it is there, and nothing in it
                            os.close(os.open(self, os.O_CREAT | os.O_WRONLY))
                        raise Killed
                    return real(self, *args, **more)

                patch.setattr(Path, name, step)
            try:
                snapshots.write(folded(EVENTS[:400]), journal)
            except Killed:
                seen += 1
            else:
                break
        base = snapshots.newest(journal, 1 << 40)
        assert base is not None
        assert same(base, folded(EVENTS[: base.events]))
        newest.add(base.events)
    assert seen >= 2
    assert newest <= {300, 400}
    journal.close()


@pytest.mark.usefixtures("no_sync")
def test_no_snapshot_is_made_of_a_journal_that_does_not_lead_to_what_was_published(tmp_path: Path) -> None:
    entries, whole = entries_of(EVENTS), folded(EVENTS)
    public = published(tmp_path, whole.ledger, entries, 300)
    journal = journal_of(tmp_path, EVENTS[:100])
    with pytest.raises(RunFolderError, match="does not lead to the 300 entries"):
        take_snapshot(journal, Snapshots(tmp_path / "snapshots", RUN_ID), public, MAX_LAG)
    assert not (tmp_path / "snapshots").exists()
    journal.close()


def test_the_state_has_one_encoding() -> None:
    data = encode_state(folded(EVENTS[:100]).state)
    for bad in (b"", data[:-1], data + b"\0", b"\x80", data.replace(b"max_lag", b"max_lug")):
        with pytest.raises(MalformedError):
            decode_state(bad)


def imports(name: str) -> set[str]:
    """Our modules that a module takes something from (annotations alone left out)."""
    source = Path(snapshot.__file__).parents[1] / f"{name.replace('.', '/')}.py"
    found = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("barnraise."):
            module = str(node.module).removeprefix("barnraise.")
            found |= {f"{module}.{item.name}" for item in node.names} if "." not in module else {module}
    return found


def test_the_fold_version_covers_every_module_of_the_fold() -> None:
    # Not of the fold: what signs, stores, exports or only names types.
    beside = {"coordinator.journal", "coordinator.ledger_uses", "coordinator.log_folder"}
    seen, queue = set[str](), ["coordinator.state", "coordinator.ledger_log"]
    while queue:
        name = queue.pop()
        if name not in seen | beside:
            seen.add(name)
            queue += [item for item in imports(name) if item.startswith("coordinator.")]
    assert seen <= set(snapshot.FOLD_MODULES)
    assert len(snapshot.fold_version()) == 32


def test_a_core_begins_with_the_snapshot_and_says_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(make_run(tmp_path)) as run:
        journal = Journal(run.journal_path)
        events = [event for event in EVENTS if not isinstance(event, type(EVENTS[0]))]
        opening = type(EVENTS[0])(run_id=run.run_id, operator=run.spec.operator, at_ms=1)  # type: ignore[call-arg]
        journal.commit([Write(events=[opening, *events])])

        def core(**options: object) -> Core:
            return Core(journal, run.spec, run.run_id, run.identity, lambda: 1, **options)  # type: ignore[arg-type]

        plain = core()
        size, root = len(plain.ledger), plain.ledger.root()
        journal.commit([Write(tree_head=plain._tree_head(size, root))])
        known = Snapshots(tmp_path / "snapshots", run.run_id)
        fold = Fold.empty(run.spec.rollout.max_lag)
        for event in journal.events():
            if len(fold.ledger) == size // 2:
                break
            advance(fold.state, fold.ledger, event)
            fold.events += 1
        path = known.write(fold, journal)

        thin = core(snapshots=known, published=size)
        assert thin.begun_at == fold.events > 0
        assert encode_state(thin.state) == encode_state(plain.state)
        assert thin.ledger.root() == root
        assert list(thin.entries_from(size - 3)) == list(plain.entries_from(size - 3))
        assert thin.fresh == []
        assert core(snapshots=known, published=size // 2).fresh == list(plain.entries_from(size // 2))
        assert core(snapshots=known).begun_at == 0  # nothing is published: the tiles are wanted whole

        with caplog.at_level(logging.INFO):
            assert core(snapshots=known, published=size, replay=True).begun_at == 0
        assert "agrees with the journal" in caplog.text

        # One that is whole in itself, and of another history: what was signed finds it out.
        body = snapshot._read(path)
        lie = decode_state(body.state)
        lie.accepted += 1
        wrong = MerkleLog()
        for _ in range(body.size):
            wrong.append(b"")
        known.write(Fold(lie, wrong, fold.events), journal)
        assert core(snapshots=known, published=size).begun_at == 0
        assert path.with_name(path.name + ".refused").exists()

        # One that says something else and has the right tree is found by a replay.
        known.write(Fold(lie, fold.ledger, fold.events), journal)
        again = core(snapshots=known, published=size, replay=True)
        assert encode_state(again.state) == encode_state(plain.state)
        assert not path.exists()
        assert hashlib.sha256(encode_event(events[-1])).digest() == journal.event_hash(journal.length - 1)
        journal.close()

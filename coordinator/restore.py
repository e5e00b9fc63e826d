"""A backup becomes a run folder again, and no history is signed twice.

What happened after a backup is gone from it, but not from the world: entries were published,
receipts were given. A coordinator that went on from the backup under the same run id would
sign other entries under their numbers, which is what witnesses raise the alarm for. So:

- By default the restored folder is a **new run** that says which one it continues: a run id, a
  ledger and a log of its own, the same operator's key, the settings in force, and as version 0
  the newest weights of the backup. The list of who may join, bans and a pause hold on. The ledger
  of the run before, up to the backup, lies beside it (``RUN/before``), signed and complete: what
  was earned until then stands there.
- As the **same run** it goes on only if the operator declares that nothing was acknowledged after
  the backup (a coordinator that was stopped first, a machine that is replaced), and if no
  checkpoint that anybody still has says otherwise.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import msgspec

from barnraise.coordinator.audit import is_banned
from barnraise.coordinator.backup import MANIFEST, Backup, check_backup, copy_file, fold_of
from barnraise.coordinator.clock_back import moved_bans, newest_ms
from barnraise.coordinator.events import Event, NodeBanned, NodeJoined, RunOpened
from barnraise.coordinator.folder import Settings, create_run, read_spec
from barnraise.coordinator.journal import Journal, Write, open_postgres
from barnraise.coordinator.journal_copy import Progress, copy_journal, quiet
from barnraise.coordinator.journal_mark import write_mark
from barnraise.coordinator.journal_place import SQLITE, place_for, write_place
from barnraise.coordinator.journal_sqlite import SqliteStore
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.coordinator.operator_events import NodeAllowed, NodeDisallowed
from barnraise.coordinator.run_file import RUN_FILE
from barnraise.coordinator.snapshot import Fold
from barnraise.coordinator.state import apply
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import BarnraiseError, RunFolderError, StorageError
from barnraise.protocol.identity import load_identity
from barnraise.protocol.log_messages import CHECKPOINT
from barnraise.protocol.notes import MAX_NOTE
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.tlog_checkpoint import log_key, open_checkpoint

BEFORE = "before"
_MAX_DESCRIPTION = 1000


class Restored(NamedTuple):
    """What ``restore`` made.

    ``run_id``: the new run's, or the same. ``missing``: ledger entries that are known to have been
    published after the backup, and are lost to it; 0 does not say that there were none.
    """

    run_id: bytes
    same_run: bool
    place: str
    backup: Backup
    missing: int


def restore(
    backup: Path,
    folder: Path,
    now_ms: int,
    *,
    same_run: bool = False,
    checkpoints: Sequence[bytes] = (),
    store: str = "",
    progress: Progress = quiet,
) -> Restored:
    """Make ``folder`` out of ``backup``, whole or not at all. Blocking.

    Args:
        same_run: the operator's word that nothing was acknowledged after the backup.
        checkpoints: of the run's log, as found with nodes, mirrors, witnesses, the old machine.
        store: ``postgresql://...`` for the journal; empty: SQLite.

    Raises:
        RunFolderError: the backup is damaged, the folder is in use, or (same run) something was
            published after the backup.
        StorageError: the disk or the database refused.
    """
    made = check_backup(backup, progress)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} exists and is not an empty folder: choose another, or remove it")
    if folder.resolve().is_relative_to(backup.resolve()):
        raise RunFolderError(f"{folder} lies in the backup, which is to stay what it is: choose another")
    spec, _, run_id = read_spec(backup)
    if run_id.hex() != made.run_id:
        raise RunFolderError(f"{backup} holds the spec of another run than {MANIFEST} says")
    fold = fold_of(backup, spec, progress=progress)
    if (len(fold.ledger), fold.ledger.root().hex()) != (made.ledger_size, made.ledger_root):
        raise RunFolderError(f"{backup}: its events do not lead to the ledger that was backed up")
    missing = _missing(backup, spec, run_id, fold, checkpoints)
    if same_run and missing:
        raise RunFolderError(
            f"{missing} ledger entries were published after this backup (it ends with entry "
            f"{len(fold.ledger) - 1}): going on as the same run would sign others in their place, which "
            "convicts its key before every node. Restore a newer backup, or leave out --same-run: then a new "
            "run continues this one"
        )
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        part = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.absolute().parent))
        try:
            if same_run:
                _same(backup, part, made)
            else:
                run_id = _new(backup, part, spec, fold, made, now_ms)
            place = _store(part, run_id, store, progress, folder)
            if folder.exists():
                folder.rmdir()
            part.rename(folder)
            sync_folder(folder.absolute().parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(f"cannot restore to {folder}: {error}") from error
    return Restored(run_id, same_run, place, made, missing)


def _missing(backup: Path, spec: RunSpec, run_id: bytes, fold: Fold, checkpoints: Sequence[bytes]) -> int:
    """How many entries beyond the backup anybody saw. Raises RunFolderError for another history."""
    key, most = log_key(run_id, spec.operator), len(fold.ledger)
    notes = list(checkpoints)
    own = backup / "log" / CHECKPOINT
    if own.is_file():
        notes.append(own.read_bytes()[: MAX_NOTE + 1])
    newest = most
    for note in notes:
        try:
            head = open_checkpoint(note, key)
        except BarnraiseError as error:
            raise RunFolderError(f"a checkpoint is not of this run, or damaged ({error})") from error
        if head.size <= most and fold.ledger.root(head.size) != head.root:
            raise RunFolderError(
                f"a checkpoint of {head.size} entries is of another history than this backup: the run's key "
                "has signed two already. Look at `barnraise ledger evidence` before anything else"
            )
        newest = max(newest, head.size)
    return newest - most


def _same(backup: Path, part: Path, made: Backup) -> None:
    for name in made.files:
        top, *below = Path(name).parts
        newer = top == "checkpoints" and below and _version(below[0]) > max(0, made.trained)
        if not newer:  # trained on what the journal does not know
            copy_file(backup / name, part / name)
    (part / "store").mkdir(exist_ok=True)
    write_mark(part / SQLITE, made.events)
    part.chmod(0o755)


def _version(name: str) -> int:
    return int(name[1:]) if name[:1] == "v" and name[1:].isdecimal() else 0


def _new(backup: Path, part: Path, spec: RunSpec, fold: Fold, made: Backup, now_ms: int) -> bytes:
    """A run that begins where the backup ends."""
    if spec.phase != "posttrain":
        raise RunFolderError(
            "a run that pretrains cannot be continued by a new one yet: its blocks are not one model. "
            "With --same-run it goes on, if nothing was acknowledged after the backup"
        )
    spec = fold.state.operations.settings(spec)
    version = max(0, made.trained)
    identity = load_identity(backup / "run.key")
    end = f"its ledger's first {made.ledger_size} entries and version {version}"
    words = f"Continues run {made.run_id}, as of {end}."
    run_id = create_run(
        part,
        checkpoint_folder(backup, version),
        Settings(
            environment=spec.environment,
            sampling=spec.sampling,
            rollout=spec.rollout,
            grpo=spec.grpo,
            evaluation=spec.evaluation,
            weights_dtype=spec.model.weights_dtype,
            compute_dtype=spec.model.compute_dtype,
            admission=spec.admission,
        ),
        spec.verify,
        name=spec.name,
        description=f"{spec.description[: _MAX_DESCRIPTION - len(words)]} {words}".strip(),
        model_name=spec.model.name,
        seed=spec.seed,
        now_ms=max(now_ms, spec.created_at + 1),
        identity=identity,
    )
    if (backup / RUN_FILE).is_file():  # what is this machine's to say: how to serve, what to keep, guards
        copy_file(backup / RUN_FILE, part / RUN_FILE)
    _carry_over(part, fold, RunOpened(run_id=run_id, operator=identity.public_key, at_ms=now_ms))
    before = part / BEFORE
    before.mkdir()
    copy_file(backup / MANIFEST, before / MANIFEST)
    _, signed, _ = read_spec(backup)
    with closing(Journal(backup / SQLITE, reading=True)) as journal:
        export_ledger(journal, signed, spec.rollout.max_lag, identity, now_ms, before / "ledger.bin")
    return run_id


def _carry_over(part: Path, fold: Fold, opened: RunOpened) -> None:
    """What an operator decided about people, and a pause, hold on: the first events of the new run."""
    now, operations = opened.at_ms, fold.state.operations
    # The new run knows nothing of the old one's clock: if that was ahead, this is the last who can tell.
    for moved in moved_bans(fold.state, newest_ms(fold.state), now):
        apply(fold.state, moved)
    events: list[Event] = []
    for node in fold.state.nodes.values():
        if is_banned(node, now):
            events.append(NodeJoined(node=node.key, name=node.name, at_ms=now))
            events.append(
                NodeBanned(
                    node=node.key, reason=node.ban_reason, until=node.banned_until, by_rule=False, at_ms=now
                )
            )
    for key in operations.taken_off:
        events += [NodeAllowed(node=key, note="", at_ms=now), NodeDisallowed(node=key, at_ms=now)]
    events += [NodeAllowed(node=key, note=note, at_ms=now) for key, note in operations.allowed.items()]
    if (paused := operations.paused) is not None:
        events.append(msgspec.structs.replace(paused, at_ms=now))
    if events:
        with closing(Journal(part / SQLITE)) as journal:
            journal.commit([Write(events=[opened, *events])])


def _store(part: Path, run_id: bytes, url: str, progress: Progress, folder: Path) -> str:
    """Put the journal where it is wanted, and say where that is."""
    if not url:
        return str(folder / SQLITE)
    place = place_for(url, run_id)
    with closing(open_postgres(place)) as target:
        if (part / SQLITE).is_file():
            with closing(SqliteStore(part / SQLITE, reading=True)) as source:
                copy_journal(source, target, progress)
        elif target.length():
            raise RunFolderError(f"{place.shown} holds events of that run already")
    for path in part.glob(f"{SQLITE}*"):
        if not path.name.endswith(".mark"):
            path.unlink()
    write_place(part, place)
    return place.shown

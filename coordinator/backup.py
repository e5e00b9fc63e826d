"""A run folder's copy, whole and proven, made while its coordinator writes or not.

::

    BACKUP/backup.json        what is in it: SHA-256 of every file, the events, the ledger's size and root
    BACKUP/state.sqlite       the journal, whichever store the run uses
    BACKUP/...                the run folder's own files, the run's key (0600) among them

The order makes it consistent: what was published (``log``) is copied before the journal, which
then knows at least as much; versions before and after it, so that the newest that the journal
speaks of is there whole. Kept rollouts come after it: what it has dropped is in them. What a restart
derives again (snapshots, the web page's index) is not there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from hashlib import file_digest
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal, NamedTuple

import msgspec

from barnraise.coordinator.checkpoints import TEMPORARY
from barnraise.coordinator.events import EventError
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_copy import Progress, copy_journal, digest_of, quiet
from barnraise.coordinator.journal_place import SQLITE, journal_begun, journal_path
from barnraise.coordinator.journal_sqlite import SqliteStore
from barnraise.coordinator.ledger_log import advance
from barnraise.coordinator.newcomer_book import NEWCOMERS
from barnraise.coordinator.rollout_files import ROLLOUTS, files_of, parts_of
from barnraise.coordinator.snapshot import SNAPSHOTS, Fold, Snapshots
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.durable import replace_file, sync_folder
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.log_messages import CHECKPOINT
from barnraise.protocol.messages import Manifest, TreeHead
from barnraise.protocol.spec import RunSpec

MANIFEST = "backup.json"
_LEFT_OUT = (
    "lock",
    "control.sock",
    "admin.token",
    "coordinator.log",
    "units.log",
    "verifier.log",
    "learner.log",
    SNAPSHOTS,
    NEWCOMERS,
    "web.sqlite",
    "state.",
    ".tmp-",
    ".saving-",
)
_MAX_MANIFEST = 256 * 1024 * 1024


class Backup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``backup.json``. Hashes in hex; ``events_digest``: ``journal_copy.Copied.digest``.

    ``ledger_size`` and ``ledger_root``: of all entries, signed or not. ``version``: the newest
    published; ``files``: path below the backup to size in bytes and SHA-256.
    """

    format: Literal[1] = 1
    run_id: str
    made_ms: int
    events: int
    events_digest: str
    ledger_size: int
    ledger_root: str
    version: int
    trained: int
    files: dict[str, tuple[int, str]]


class BackedUp(NamedTuple):
    """What ``back_up`` made."""

    path: Path
    size: int
    backup: Backup


def back_up(folder: Path, target: Path, now_ms: int, progress: Progress = quiet) -> BackedUp:
    """Copy the run in ``folder`` to ``target``, which appears whole or not at all. Blocking.

    Raises:
        RunFolderError: no run, or it is damaged: nothing of it would be worth keeping. Or ``target`` exists.
        StorageError: the disk or the database refused.
    """
    spec, _, run_id = read_spec(folder)
    if not journal_begun(folder):
        raise RunFolderError(f"{folder} has not begun: there is nothing to back up but the folder itself")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunFolderError(f"{target} exists and is not an empty folder: choose another")
    if target.resolve().is_relative_to(folder.resolve()):
        raise RunFolderError(f"{target} lies in the run folder, so that every backup would hold those before")
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        part = Path(mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
        try:
            _copy_files(folder, part, progress)
            with closing(Journal(journal_path(folder), reading=True)) as source:
                with closing(SqliteStore(part / SQLITE)) as copy:
                    copied = copy_journal(source.store, copy, progress)
                copy.in_one_file()
            _copy_versions(folder, part, progress)
            _copy_rollouts(folder, part)
            fold = fold_of(part, spec, Snapshots(folder / SNAPSHOTS, run_id), progress)
            trained = fold.state.made
            if not (checkpoint_folder(part, max(0, trained))).is_dir():
                raise RunFolderError(f"{folder} lacks version {trained}, which its journal speaks of")
            files = {str(path.relative_to(part)): _described(path) for path in sorted(_all_files(part))}
            _check_head(part, spec, fold.state.head, files)
            made = Backup(
                run_id=run_id.hex(),
                made_ms=now_ms,
                events=copied.events,
                events_digest=copied.digest.hex(),
                ledger_size=len(fold.ledger),
                ledger_root=fold.ledger.root().hex(),
                version=fold.state.head,
                trained=trained,
                files=files,
            )
            replace_file(part / MANIFEST, msgspec.json.format(msgspec.json.encode(made)))
            part.chmod(0o700)  # the key is in it
            for place, _, _ in os.walk(part):
                sync_folder(Path(place))
            part.rename(target)
            sync_folder(target.absolute().parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(f"cannot write the backup {target}: {error}") from error
    return BackedUp(target, sum(size for size, _ in made.files.values()), made)


def check_backup(backup: Path, progress: Progress = quiet) -> Backup:
    """Compare every file and every event of a backup with what was noted when it was made. Blocking.

    Raises:
        RunFolderError: it is not a backup, or something in it is missing or damaged.
    """
    path = backup / MANIFEST
    try:
        with path.open("rb") as file:
            made = msgspec.json.decode(file.read(_MAX_MANIFEST), type=Backup)
    except OSError as error:
        raise RunFolderError(f"{backup} is not a backup ({MANIFEST}: {error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise RunFolderError(f"{path} is damaged ({error})") from error
    for number, (name, told) in enumerate(made.files.items()):
        place = backup / name
        if not place.resolve().is_relative_to(backup.resolve()):
            raise RunFolderError(f"{path} names {name!r}, which is not in it")
        try:
            found = _described(place)
        except OSError as error:
            raise RunFolderError(f"{place} cannot be read ({error.strerror}): use another backup") from error
        if found != tuple(told):
            raise RunFolderError(f"{place} is damaged (its SHA-256 differs): use another backup")
        progress("checking files", number + 1, len(made.files))
    with closing(SqliteStore(backup / SQLITE, reading=True)) as store:
        events, digest = digest_of(store)
    if (events, digest.hex()) != (made.events, made.events_digest):
        raise RunFolderError(f"{backup / SQLITE} does not hold the events that were backed up")
    return made


def fold_of(
    folder: Path, spec: RunSpec, snapshots: Snapshots | None = None, progress: Progress = quiet
) -> Fold:
    """State and ledger of a folder's journal, held against its newest signed tree head. Blocking.

    Raises:
        RunFolderError: the journal is damaged, or not what was signed.
    """
    with closing(Journal(folder / SQLITE, reading=True)) as journal:
        signed = journal.last_tree_head()
        head = None if signed is None else open_signed(signed, TreeHead, spec.operator)
        base = None if snapshots is None or head is None else snapshots.newest(journal, head.size)
        fold = base or Fold.empty(spec.rollout.max_lag)
        for event in journal.events(fold.events):
            try:
                advance(fold.state, fold.ledger, event)
            except EventError as error:
                raise RunFolderError(
                    f"{journal.place}: event {fold.events} does not follow ({error})"
                ) from error
            fold.events += 1
            if not fold.events % 5000:
                progress("folding events", fold.events, journal.length)
        if head is not None and (head.size > len(fold.ledger) or fold.ledger.root(head.size) != head.root):
            raise RunFolderError(
                f"{journal.place}: its events are not those that its tree head was signed for"
            )
    return fold


def _check_head(part: Path, spec: RunSpec, head: int, files: dict[str, tuple[int, str]]) -> None:
    """That the newest version is what its signed manifest says: a disk may have changed it since."""
    with closing(Journal(part / SQLITE, reading=True)) as journal:
        signed = journal.manifest(head)
    if signed is None:
        return
    folder = checkpoint_folder(Path(), head)
    for entry in open_signed(signed, Manifest, spec.operator).files:
        name = str(folder / entry.path)
        if name in files and files[name][1] != entry.sha256.hex():
            raise RunFolderError(
                f"{name} is damaged (it is not what version {head} was published as): copy it from a node "
                "that has that version, or from an older backup"
            )


def copy_file(source: Path, target: Path) -> None:
    """A copy with bytes of its own, on the disk, as readable as the source. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(source.stat().st_mode & 0o777)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _copy_files(folder: Path, part: Path, progress: Progress) -> None:
    """Everything but the journal; the published checkpoint before the tiles that it speaks of."""
    first = folder / "log" / CHECKPOINT
    if first.is_file():
        copy_file(first, part / "log" / CHECKPOINT)
    _copy_versions(folder, part, progress)
    done = 0
    for path in _all_files(folder):
        name = path.relative_to(folder)
        if name.parts[0].startswith(_LEFT_OUT) or name.parts[0] in ("checkpoints", ROLLOUTS) or path == first:
            continue
        with suppress(FileNotFoundError):  # a tile that became whole meanwhile: a start writes it again
            copy_file(path, part / name)
            done += 1
            progress("copying files", done, 0)


def _copy_rollouts(folder: Path, part: Path) -> None:
    for kept in parts_of(folder):
        for path in files_of(kept):
            with suppress(FileNotFoundError):  # the oldest go when the budget is used up
                copy_file(path, part / ROLLOUTS / path.name)


def _copy_versions(folder: Path, part: Path, progress: Progress) -> None:
    for place in sorted((folder / "checkpoints").iterdir()):
        target = part / "checkpoints" / place.name
        if not place.is_dir() or place.name.startswith(TEMPORARY) or target.is_dir():
            continue
        temporary = target.with_name(f"{TEMPORARY}{target.name}")
        try:
            for path in _all_files(place):
                copy_file(path, temporary / path.relative_to(place))
            temporary.rename(target)
        except FileNotFoundError:  # its coordinator has no more use for it
            shutil.rmtree(temporary, ignore_errors=True)
        progress(f"copying version {place.name}", 1, 1)


def _all_files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders.sort()
        yield from (path for name in sorted(names) if (path := Path(place, name)).is_file())


def _described(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, file_digest(file, "sha256").hexdigest()

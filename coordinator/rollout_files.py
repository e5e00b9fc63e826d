"""``RUN/rollouts``: what volunteers drew, kept as Parquet when the journal has no more use for it.

::

    RUN/rollouts/v000012.parquet      all that was settled of policy version 12 when its payloads went
    RUN/rollouts/v000012-1.parquet    what was settled later (an appeal), if anything
    RUN/rollouts/v000012.sha256       its SHA-256, as sha256sum reads it; there before it is

A file appears whole or not at all, and before its payloads are dropped: after a crash in between, what
a file has already is not written again. Where the disk refuses, payloads stay in the journal and are
tried again with the next version, as long as they take no more than the budget. Oldest files go first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from barnraise.coordinator.journal import Journal
from barnraise.coordinator.operator_events import SettingsAmended
from barnraise.coordinator.rollout_fates import Fate, Story
from barnraise.coordinator.rollout_table import FORMAT, need_pyarrow, schema, to_table
from barnraise.coordinator.run_file import Keep
from barnraise.protocol.durable import replace_file, sync_folder
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.spec import RunSpec

log = logging.getLogger(__name__)

ROLLOUTS = "rollouts"
GB = 1e9
GROUP_BYTES = 8 * 1024 * 1024  # of payloads in one row group, about: in memory at a time, and one long step
_NAME = re.compile(r"v([0-9]{6,10})(?:-([0-9]{1,6}))?\.parquet")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, order=True)
class Part:
    """One file; parts of a version are numbered in the order in which they were written."""

    version: int
    number: int
    path: Path = field(compare=False)


@dataclass(frozen=True)
class Kept:
    """What was done. ``dropped``: submissions whose payloads may go; ``trouble``: why not all of them."""

    dropped: list[bytes]
    files: list[Path]
    trouble: str = ""


def parts_of(run_folder: Path) -> list[Part]:
    """The kept files of a run, oldest version first. Raises OSError, but not where there are none."""
    found = []
    with suppress(FileNotFoundError):
        for path in (run_folder / ROLLOUTS).iterdir():
            match = _NAME.fullmatch(path.name)
            if match is not None:
                found.append(Part(int(match[1]), int(match[2] or 0), path))
    return sorted(found)


def keep_rollouts(
    journal: Journal,
    run_folder: Path,
    spec: RunSpec,
    run_id: bytes,
    keep: Keep,
    settled: Sequence[bytes],
    amendments: Iterable[SettingsAmended] = (),
) -> Kept:
    """Write what ``settled`` submissions hold, and say which payloads may go. Blocking.

    Raises:
        StorageError, RunFolderError: the journal cannot be read.
    """
    told = _fates(journal, spec, settled, amendments)
    worth = [fate for fate in told if fate.accepted or keep.rollouts == "all"]
    waiting: dict[int, list[Fate]] = {}
    for fate in worth:
        waiting.setdefault(fate.lease.policy_version, []).append(fate)
    budget = round(keep.rollouts_gb * GB)
    files, trouble = [], ""
    for version in sorted(waiting):
        try:
            _make_room(run_folder, budget, sum(fate.size for fate in waiting[version]))
            written = _write_part(journal, run_folder, spec, run_id, keep, version, waiting[version])
            files += [written] if written is not None else []
        except OSError as error:
            trouble = (
                f"rollouts of version {version} cannot be written to {run_folder / ROLLOUTS} ({error}): they "
                "stay in the journal and are tried again; free some disk space, or lower keep.rollouts_gb"
            )
            break  # what refused this one will refuse the next
        except _defects() as error:  # another try would end the same way, and hold up everything after it
            log.error("rollouts of version %d are lost, they cannot be made rows of: %s", version, error)
        del waiting[version]
    with suppress(OSError):
        _make_room(run_folder, budget, 0)
    held = {fate.submission: fate.size for fates in waiting.values() for fate in fates}
    over = sum(held.values()) - budget if budget else 0
    if over > 0:
        trouble = f"{trouble}; the oldest are lost: more wait than keep.rollouts_gb allows"
    for submission, size in list(held.items()):
        if over <= 0:
            break
        del held[submission]
        over -= size
    return Kept([key for key in settled if key not in held], files, trouble)


def _fates(
    journal: Journal, spec: RunSpec, settled: Sequence[bytes], amendments: Iterable[SettingsAmended]
) -> list[Fate]:
    """What became of ``settled``, oldest first; read from the event that published the first version on."""
    newest = max((event.version for event in journal.versions(1 << 31, 1)), default=0)
    oldest = bisect_left(range(newest + 1), True, key=lambda v: bool(journal.payload_ids(v + 1)))
    story = Story(set(settled), spec, {event.number: event for event in amendments})
    story.read(journal.events(journal.published_at(oldest)))
    return [fate for fate in story.fates.values() if fate.verdict is not None]


def _write_part(
    journal: Journal,
    run_folder: Path,
    spec: RunSpec,
    run_id: bytes,
    keep: Keep,
    version: int,
    fates: Sequence[Fate],
) -> Path | None:
    """One more file of ``version`` with those of ``fates`` that no file has; None: all are there."""
    earlier = [part for part in parts_of(run_folder) if part.version == version]
    there: set[tuple[str, bool]] = set()
    for part in earlier:
        try:
            there |= contents(part.path)
        except (
            OSError,
            need_pyarrow().ArrowException,
        ) as error:  # an export says so; what comes now is kept beside it
            log.error("%s is damaged: %s", part.path, error)
    due = [fate for fate in fates if (fate.submission.hex(), fate.accepted) not in there]
    if not due:
        return None
    number = max((part.number for part in earlier), default=-1) + 1
    path = run_folder / ROLLOUTS / f"v{version:06d}{f'-{number}' if number else ''}.parquet"
    if not path.parent.is_dir():
        path.parent.mkdir()
        sync_folder(run_folder)
    said = {"format": FORMAT, "run": run_id.hex(), "policy_version": version, "part": number}
    with writing(path, schema(said), sealed=True) as writer:
        for table in tables(journal, due, spec.environment.name, keep.rollout_proofs):
            writer.write_table(table)
    return path


def tables(journal: Journal, fates: Sequence[Fate], environment: str, proofs: bool) -> Iterator[Any]:
    """The rows of ``fates``, read from their payloads; no more than ``GROUP_BYTES`` or so at a time."""
    for group in batches(fates):
        payloads = journal.payloads([fate.submission for fate in group])
        work = [(fate, payloads[fate.submission]) for fate in group if fate.submission in payloads]
        if work:
            yield to_table(work, environment, proofs)


def batches(fates: Sequence[Fate]) -> Iterator[list[Fate]]:
    """``fates`` in runs of ``GROUP_BYTES`` of payload, about."""
    group: list[Fate] = []
    size = 0
    for fate in fates:
        if group and size + fate.size > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(fate)
        size += fate.size
    if group:
        yield group


@contextmanager
def writing(path: Path, columns: Any, sealed: bool = False) -> Iterator[Any]:
    """A Parquet writer (zstd) whose file is at ``path``, whole and durable, when the block ends well.

    ``sealed``: with its hash beside it, for pages have checksums in Parquet, but their heads have none.
    The same rows give the same bytes, with one release of pyarrow. Raises OSError.
    """
    pa = need_pyarrow()
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    numbers = [name for name in ("reward", "advantage", "task_seed", "sample_index") if name in columns.names]
    plain = {"logprobs.list.element", "proofs", *numbers}
    try:
        with temporary.open("wb") as file:
            with pa.parquet.ParquetWriter(
                file,
                columns,
                compression="zstd",
                write_page_checksum=True,
                use_dictionary=[name for name in _leaves(columns) if name not in plain],
                use_byte_stream_split=["logprobs.list.element"],
            ) as writer:
                yield writer
            file.flush()
            os.fsync(file.fileno())
        if sealed:
            replace_file(_seal(path), f"{_sha256(temporary)}  {path.name}\n".encode())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _leaves(columns: Any) -> list[str]:
    lists = {field.name for field in columns if str(field.type).startswith("list")}
    return [f"{name}.list.element" if name in lists else name for name in columns.names]


def contents(path: Path) -> set[tuple[str, bool]]:
    """(submission, accepted) of every submission in a kept file."""
    with reading(path) as file:
        table = file.read(columns=["submission", "accepted"])
    return set(zip(table["submission"].to_pylist(), table["accepted"].to_pylist(), strict=True))


def files_of(part: Part) -> list[Path]:
    """A kept file and its hash: what a copy of it takes."""
    return [part.path, *([_seal(part.path)] if _seal(part.path).is_file() else [])]


def is_sound(path: Path) -> bool:
    """Whether a kept file has the hash that was noted with it, if one was. Raises OSError."""
    try:
        told = _seal(path).read_bytes()[:64].decode("ascii", "replace")
    except FileNotFoundError:
        return True
    return told == _sha256(path)


def _seal(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reading(path: Path) -> Any:
    """The Parquet file at ``path``, its checksums compared; a context. Raises OSError or ArrowException."""
    return need_pyarrow().parquet.ParquetFile(path, page_checksum_verification=True)


def _make_room(run_folder: Path, budget: int, coming: int) -> None:
    """Delete the oldest files until ``coming`` bytes fit into ``budget`` (0: no limit) beside the others."""
    for left in (run_folder / ROLLOUTS).glob(f"{_TEMPORARY}*"):
        left.unlink()
    if not budget:
        return
    sizes = {part: part.path.stat().st_size for part in parts_of(run_folder)}
    for part in list(sizes):
        if sum(sizes.values()) + coming <= budget:
            break
        part.path.unlink()
        _seal(part.path).unlink(missing_ok=True)
        del sizes[part]
        log.info("rollouts of version %d deleted: keep.rollouts_gb is used up", part.version)


def _defects() -> tuple[type[Exception], ...]:
    return (need_pyarrow().ArrowException, MalformedError)

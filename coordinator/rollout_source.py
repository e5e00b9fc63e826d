"""Where an export's rollouts come from: kept files first, then what the journal still holds, in pieces.

A piece is one row group of a kept file, or as many submissions as make about as much. It is planned by
what it says of each submission, and read when its turn comes, so that memory does not grow with the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_place import journal_begun, journal_path
from barnraise.coordinator.rollout_fates import Fate, Story
from barnraise.coordinator.rollout_files import Part, batches, contents, is_sound, parts_of, reading
from barnraise.coordinator.rollout_table import CLAWED_BACK, need_pyarrow, to_table
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.messages import TreeHead
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.standing import UNAUDITED

Tell = Callable[[str, float], None]
EVENTS_BETWEEN = 50_000


class Moved(Exception):
    """What was planned is elsewhere by now: its coordinator went on. Plan again."""


@dataclass(frozen=True)
class Wanted:
    """What to hand on. ``first`` to ``last``: policy versions, both included. ``license``: for the card."""

    first: int = 0
    last: int = 1 << 31
    text: bool = True
    refused: bool = False
    anonymous: bool = False
    proofs: bool = False
    shard_bytes: int = 256 * 1024 * 1024
    license: str = ""


@dataclass(frozen=True)
class Piece:
    """``rows`` rows of one policy version, ``size`` bytes unpacked. ``key``: what they are, in a word.

    ``read``: a table of ``rollout_table.COLUMNS``. Raises Moved.
    """

    version: int
    rows: int
    size: int
    key: str
    read: Callable[[], Any]


@dataclass(frozen=True)
class Source:
    """A run folder at a moment: what became of what the journal holds, and the newest signed tree head.

    ``void``: ids, in hex, of all submissions whose credit is clawed back.
    """

    folder: Path
    spec: RunSpec
    run_id: bytes
    story: Story
    void: frozenset[str]
    head: TreeHead | None

    def pieces(self, wanted: Wanted) -> list[Piece]:
        """Everything that is wanted, by policy version, then as it was kept or came in.

        Raises:
            Moved: see there.
            RunFolderError: a kept file is damaged.
        """
        pa = need_pyarrow()
        files: dict[int, list[Part]] = {}
        for part in parts_of(self.folder):
            files.setdefault(part.version, []).append(part)
        fates: dict[int, list[Fate]] = {}
        for fate in self.story.fates.values():
            if fate.verdict is not None:
                fates.setdefault(fate.lease.policy_version, []).append(fate)
        found: list[Piece] = []
        for version in sorted(files.keys() | fates.keys()):
            if not wanted.first <= version <= wanted.last:
                continue
            mine, rest = files.get(version, []), fates.get(version, [])
            try:
                owners = _owners([*(contents(part.path) for part in mine), _said(rest)])
                for place, part in enumerate(mine):
                    found += self._of_file(part, place, owners, wanted)
            except FileNotFoundError:
                raise Moved from None
            except (OSError, pa.ArrowException) as error:
                raise RunFolderError(
                    f"rollouts of version {version} cannot be read ({error}): restore the file from a "
                    "backup, or delete it to go on without"
                ) from error
            left = [
                fate
                for fate in rest
                if owners[fate.submission.hex()] == len(mine) and (fate.accepted or wanted.refused)
            ]
            found += [self._of_journal(version, group, wanted) for group in batches(left)]
        return found

    def _of_file(self, part: Part, place: int, owners: dict[str, int], wanted: Wanted) -> Iterable[Piece]:
        if not is_sound(part.path):
            raise OSError(f"{part.path} does not have the hash that was noted with it")
        with reading(part.path) as file:
            for group in range(file.num_row_groups):
                said = file.read_row_group(group, columns=["submission", "accepted", "check"])
                chosen, digest = [], hashlib.sha256(part.path.name.encode())
                for submission, accepted, check in zip(*said.to_pydict().values(), strict=True):
                    valid = submission not in self.void and (accepted or check == CLAWED_BACK)
                    chosen.append(owners[submission] == place and (valid or wanted.refused))
                    digest.update(f"{submission} {valid} {chosen[-1]}\n".encode())
                if any(chosen):
                    size = file.metadata.row_group(group).total_byte_size

                    def read(group: int = group, chosen: list[bool] = chosen) -> Any:
                        return self._read_file(part.path, group, chosen)

                    yield Piece(part.version, sum(chosen), size, digest.hexdigest(), read)

    def _read_file(self, path: Path, group: int, chosen: list[bool]) -> Any:
        pa = need_pyarrow()
        try:
            with reading(path) as file:
                table = file.read_row_group(group)
        except FileNotFoundError:
            raise Moved from None
        except (OSError, pa.ArrowException) as error:
            raise RunFolderError(f"{path} is damaged ({error}): restore it from a backup") from error
        return self._judged_now(pa, table.filter(pa.array(chosen)))

    def _judged_now(self, pa: Any, table: Any) -> Any:
        """The rows as they stand now: credit may have been clawed back, or restored, after they were kept."""
        accepted, checks = table["accepted"].to_pylist(), table["check"].to_pylist()
        for at, submission in enumerate(table["submission"].to_pylist()):
            if accepted[at] and submission in self.void:
                accepted[at], checks[at] = False, CLAWED_BACK
            elif checks[at] == CLAWED_BACK and submission not in self.void:
                accepted[at], checks[at] = True, UNAUDITED
        for name, values in (("accepted", accepted), ("check", checks)):
            place = table.schema.get_field_index(name)
            field = table.schema.field(place)
            table = table.set_column(place, field, pa.array(values, field.type))
        return table

    def _of_journal(self, version: int, fates: list[Fate], wanted: Wanted) -> Piece:
        digest = hashlib.sha256()
        for fate in fates:
            said = (fate.submission.hex(), fate.accepted, fate.trained, fate.normalised, fate.void)
            digest.update(json.dumps(said).encode())

        def read() -> Any:
            with closing(Journal(journal_path(self.folder), reading=True)) as journal:
                payloads = journal.payloads([fate.submission for fate in fates])
            if len(payloads) < len(fates):
                raise Moved
            work = [(fate, payloads[fate.submission]) for fate in fates]
            return to_table(work, self.spec.environment.name, wanted.proofs)

        rows = sum(fate.lease.prompts * fate.lease.group_size for fate in fates)
        return Piece(version, rows, sum(fate.size for fate in fates), digest.hexdigest(), read)


def _said(fates: Iterable[Fate]) -> set[tuple[str, bool]]:
    return {(fate.submission.hex(), fate.accepted) for fate in fates}


def _owners(sources: list[set[tuple[str, bool]]]) -> dict[str, int]:
    """Which source a submission is taken from: the first, or the first that has it accepted (an appeal)."""
    owners: dict[str, int] = {}
    good: set[str] = set()
    for place, said in enumerate(sources):
        for submission, accepted in said:
            if submission not in owners or (accepted and submission not in good):
                owners[submission] = place
            if accepted:
                good.add(submission)
    return owners


def open_source(folder: Path, tell: Tell) -> Source:
    """Read a run folder or a backup of one; its coordinator may be running. One pass over the events.

    Raises:
        RunFolderError: no run, or it has not begun, or is damaged.
        StorageError: the store refuses.
    """
    spec, _, run_id = read_spec(folder)
    if not journal_begun(folder):
        raise RunFolderError(f"{folder} has not begun: there are no rollouts yet")
    with closing(Journal(journal_path(folder), reading=True)) as journal:
        signed = journal.last_tree_head()
        story = Story(set(journal.payload_ids(1 << 31)), spec)
        for event in journal.events():
            story.note(event)
            if not story.length % EVENTS_BETWEEN:
                tell("reading the journal", story.length / max(1, journal.length))
    head = None if signed is None else open_signed(signed, TreeHead, spec.operator)
    return Source(folder, spec, run_id, story, frozenset(key.hex() for key in story.void), head)

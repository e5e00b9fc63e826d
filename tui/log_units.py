"""Which unit is meant, by any of the ids that people have of it, as its lines in the logs know it."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.unit_context import SHORT
from barnraise.tui.ledger_source import LEAST_OF_AN_ID
from barnraise.tui.log_file import Record, log_files, newest_first, records

OPTION = "--unit"
_BEGINNING = 256 * 1024  # bytes of a file, in which its first line is
_SEVERAL = 6  # named, where an id means several


@dataclass(frozen=True, slots=True)
class Meant:
    """A unit: its number and run if they are known, and the ids of all leases under which it was lent."""

    number: int
    run: str
    leases: frozenset[str]

    def may(self, line: bytes) -> bool:
        """Whether a line may be about it, by its bytes."""
        numbered = b'"number": %d,' % self.number
        if self.number >= 0 and numbered in line:
            return True
        return any(lease.encode() in line for lease in self.leases)

    def keep(self, record: Record) -> bool:
        """Whether a record is about it; also under leases that it is lent by later on."""
        same = self.number >= 0 and (record.number, record.run) == (self.number, self.run)
        return same or record.unit in self.leases


def find_unit(data: Path, names: Sequence[str], wanted: str, cure: str) -> Meant:
    """The unit whose number this is, or of whose lease's or submission's id it is the beginning.

    Raises:
        typer.BadParameter: no id, or one that several units have.
        BarnraiseError: no line is about it; ``cure`` says where else to look.
    """
    text = wanted.strip().lower()
    is_number = text.isascii() and text.isdigit() and len(text) <= 10
    is_hex = LEAST_OF_AN_ID <= len(text) <= 64 and set(text) <= set(string.hexdigits)
    if not is_number and not is_hex:
        raise typer.BadParameter(
            f"a unit is a number, or {LEAST_OF_AN_ID} or more hex digits of a lease's or submission's id",
            param_hint=OPTION,
        )
    found: dict[str, tuple[int, str]] = {}  # lease -> number, run
    if is_number:
        found = _by_number(data, names, int(text))
    if not found and is_hex:
        found = _by_beginning(data, names, text[:SHORT])
    if not found:
        reach = _reach(data, names)
        raise BarnraiseError(f"no line is about a unit {text} in the logs of {data}; {reach}{cure}")
    units = {item for item in found.values() if item[0] >= 0}
    if len(units) > 1 or (not units and len(found) > 1):
        numbers = sorted({number for number, _ in units})
        # A node's numbers repeat from run to run: there only the lease's id tells.
        several = [str(number) for number in numbers] if len(numbers) > 1 else sorted(found)
        shown = ", ".join(several[:_SEVERAL]) + (", ..." if len(several) > _SEVERAL else "")
        raise typer.BadParameter(f"several units are meant: {shown}", param_hint=OPTION)
    if not units:
        return Meant(-1, "", frozenset(found))
    number, run = units.pop()
    if not is_number:
        again = _by_number(data, names, number)
        found |= {lease: item for lease, item in again.items() if item[1] == run}
    return Meant(number, run, frozenset(found))


def _by_number(data: Path, names: Sequence[str], number: int) -> dict[str, tuple[int, str]]:
    mark = b'"number": %d,' % number
    lines = newest_first(data, names, lambda line: mark in line)
    return {record.unit: (number, record.run) for record in lines if record.number == number and record.unit}


def _by_beginning(data: Path, names: Sequence[str], text: str) -> dict[str, tuple[int, str]]:
    marks = b'"unit": "' + text.encode(), b'"submission": "' + text.encode()
    found: dict[str, tuple[int, str]] = {}
    for record in newest_first(data, names, lambda line: any(mark in line for mark in marks)):
        is_it = record.unit.startswith(text) or record.submission.startswith(text)
        if is_it and record.unit and (record.number >= 0 or record.unit not in found):
            found[record.unit] = record.number, record.run
    return found


def _reach(data: Path, names: Sequence[str]) -> str:
    """How far back the logs go, as half a sentence."""
    oldest = [record.at for name in names if (record := _oldest(data, name)) is not None]
    return f"they go back to {min(oldest)}; " if oldest else ""


def _oldest(data: Path, name: str) -> Record | None:
    for path in log_files(data, (name,)):
        with path.open("rb") as file:
            lines = file.read(_BEGINNING).split(b"\n")
        for record in records(line.decode("utf-8", "replace") for line in lines):
            return record
    return None

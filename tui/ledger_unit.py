"""``barnraise ledger unit``: one unit's whole story, from the lease to the version it went into."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.ledger import (
    ClawedBack,
    Judged,
    NodeJoined,
    Restored,
    Reviewed,
    Submitted,
    evidence_of,
)
from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.ledger_lines import line, peer_id, placed_fields
from barnraise.protocol.ledger_places import Place, placed
from barnraise.protocol.ledger_uses import UNUSED, uses_of
from barnraise.protocol.messages import Receipt, Verdict
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.standing import ALL, UNAUDITED
from barnraise.protocol.wire import decode, printable
from barnraise.tui.console import emit_json, examples
from barnraise.tui.ledger_source import LEAST_OF_AN_ID, SOURCE, ledger_file, usable
from barnraise.tui.ledger_verify import receipt_file

EXAMPLES = examples(
    "ledger unit ./my-run 17",
    "ledger unit ledger.bin 3fa9c1d2 --receipts ~/.local/share/barnraise",
    "ledger unit ./my-run 17 --json",
)
HEX = frozenset("0123456789abcdef")


def unit(
    source: Path = SOURCE,
    wanted: str = typer.Argument(
        ..., metavar="ID", help="A unit's number, or the beginning of a lease's or a submission's id."
    ),
    receipts: Path | None = typer.Option(
        None, "--receipts", metavar="DIR", help="A node's data folder: its receipts have the numbers."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Tell a unit's story: lent to whom, handed in, checked how, with what result, taken back, used.

    The public ledger has a verdict's numbers by their hash alone. A run folder has them,
    and so have a node's receipts; they are shown where they fit that hash. Which version
    used it is the operator's signed word beside the ledger.
    """
    with usable(), ledger_file(source) as path:
        names: dict[str, str] = {}
        places = _places(path, wanted, names)
        given = _from_receipts(path, receipts) if receipts is not None else []
        told = _told(path)
    submissions = {p.entry.submission_id for p in places if isinstance(p.entry, Submitted)}
    used: dict[bytes, dict[str, Any]] = {}
    if told is not None:
        for submission in submissions:
            version = told.get(submission)
            skipped = version == UNUSED
            used[submission] = {"used_in_version": None if skipped else version, "skipped": skipped}
    if source.is_dir():
        from barnraise.coordinator.unit_facts import facts_of

        for facts in facts_of(source, submissions).values():
            given += facts.verdicts
    verdicts = {evidence_of(verdict): verdict for verdict in given}
    rows = [_row(place, names, verdicts, used) for place in places]
    if as_json:
        emit_json({"unit": places[0].unit, "entries": rows, "uses": _uses(submissions, used)})
        return
    typer.echo(f"unit {places[0].unit}")
    for row in rows:
        typer.echo(line(row, names))
        for text in _numbers(row):
            typer.echo(f"{'':>8}{text}")
    for text in _ending(submissions, used, told is not None):
        typer.echo(text)


def _told(path: Path) -> dict[bytes, int] | None:
    """By submission, which version used it, as the operator says; None: the file does not tell of use."""
    with open_ledger(path) as ledger:
        if not ledger.uses:
            return None
        return uses_of(ledger.uses, open_run_spec(ledger.run_spec).operator, run_id(ledger.run_spec))


def _places(path: Path, wanted: str, names: dict[str, str]) -> list[Place]:
    """All entries of the unit that is meant, and those of work that was taken back because of it."""
    text = wanted.strip().lower()
    with open_ledger(path) as ledger:
        number = _number(placed(ledger.entries), text)
    leases: set[bytes] = set()
    submissions: set[bytes] = set()
    chosen: list[Place] = []
    with open_ledger(path) as ledger:
        for place in placed(ledger.entries):
            entry = place.entry
            if isinstance(entry, NodeJoined):
                names[peer_id(entry.node)] = printable(entry.name, 64)
            caused = isinstance(entry, ClawedBack | Restored) and entry.cause in submissions
            if place.unit == number:
                leases.add(getattr(entry, "lease_id", b""))
                if isinstance(entry, Submitted):
                    submissions.add(entry.submission_id)
            elif not caused:
                continue
            chosen.append(place)
    return chosen


def _number(places: Iterable[Place], text: str) -> int:
    """The unit that is meant: by its own number first, else by the id of one of its leases or submissions.

    Raises:
        typer.BadParameter: none, or several.
    """
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None
    begins = text if len(text) >= LEAST_OF_AN_ID and HEX.issuperset(text) and len(text) <= 64 else None
    if number is None and begins is None:
        raise typer.BadParameter(
            f"a unit is a number, or {LEAST_OF_AN_ID} or more hex digits of a lease's or submission's id",
            param_hint="ID",
        )
    meant: set[int] = set()
    for place in places:
        if place.unit is None:
            continue
        if place.unit == number:
            return number
        if begins is not None and len(meant) < 6:
            ids = (getattr(place.entry, name, b"") for name in ("lease_id", "submission_id"))
            if any(item.hex().startswith(begins) for item in ids):
                meant.add(place.unit)
    if len(meant) == 1:
        return meant.pop()
    if meant:
        raise typer.BadParameter(
            f"several units are meant: {', '.join(map(str, sorted(meant)))}", param_hint="ID"
        )
    raise typer.BadParameter(f"this ledger has no unit, lease or submission {text[:64]}", param_hint="ID")


def _from_receipts(path: Path, data: Path) -> list[Verdict]:
    from barnraise.node.receipts import read_receipts

    verdicts: list[Verdict] = []
    for signed in read_receipts(receipt_file(path, data)):
        try:
            verdicts.append(decode(signed.payload, Receipt).verdict)
        except MalformedError:
            continue  # the hash in the ledger decides what is believed
    return verdicts


def _row(
    place: Place,
    names: dict[str, str],
    verdicts: dict[bytes, Verdict],
    used: dict[bytes, dict[str, Any]],
) -> dict[str, Any]:
    row = placed_fields(place, names)
    entry = place.entry
    if isinstance(entry, Judged | Reviewed):
        verdict = verdicts.get(entry.evidence)
        row["audited"] = entry.check != UNAUDITED
        if verdict is not None:
            row["verdict"] = {
                "threshold": verdict.threshold,
                "value": verdict.value,
                "position": verdict.position,
                "message": verdict.message,
            }
    return row


def _numbers(row: dict[str, Any]) -> list[str]:
    if row["entry"] not in ("Judged", "Reviewed"):
        return []
    texts = (
        ["every check was made" if row["audited"] else "spared by draw: accepted without the model's checks"]
        if row["accepted"]
        else []
    )
    verdict = row.get("verdict")
    if verdict is None:
        return [*texts, f"numbers not here; their SHA-256 is {row['evidence']}"]
    if row["accepted"] and not verdict["position"] and not verdict["message"]:
        return texts
    if row["accepted"] and row["check"] == ALL:  # its numbers are of no check
        return [*texts, printable(verdict["message"], 500)]
    where = f" at {printable(verdict['position'], 200)}" if verdict["position"] else ""
    value = f"value {verdict['value']:g}, threshold {verdict['threshold']:g}"
    texts.append(f"check {printable(row['check'], 64)}: {value}{where}")
    if verdict["message"]:
        texts.append(printable(verdict["message"], 500))
    return texts


def _uses(submissions: Iterable[bytes], used: dict[bytes, dict[str, Any]]) -> dict[str, Any]:
    return {submission.hex(): used.get(submission) for submission in sorted(submissions)}


def _ending(submissions: set[bytes], used: dict[bytes, dict[str, Any]], told: bool) -> list[str]:
    if not submissions:
        return ["nothing was handed in for it"]
    if not told:
        return [
            "no policy version was made of anybody's work yet, or an older export left out which used what"
        ]
    texts = []
    for submission in sorted(submissions):
        facts = used.get(submission, {})
        if facts.get("used_in_version") is not None:
            end = f"used in policy version {facts['used_in_version']}"
        elif facts.get("skipped"):
            end = "not used: nothing in it that a policy could learn from"
        else:
            end = "not used in any policy version"
        texts.append(f"submission {submission.hex()[:16]}: {end}")
    return texts

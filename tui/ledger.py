"""``barnraise ledger``: read and audit a run's ledger, from a run folder or from an exported file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import typer

from barnraise.protocol.errors import BarnraiseError, MalformedError
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.ledger import LedgerEntry, LedgerReport
from barnraise.protocol.ledger_file import open_ledger, verify_ledger_file
from barnraise.protocol.messages import Signed
from barnraise.tui.console import emit_json

app = typer.Typer(help="Read and audit a run's contribution ledger.", no_args_is_help=True)

SOURCE = typer.Argument(
    ..., metavar="DIR|FILE", help="A run folder, or a file made by 'barnraise ledger export'."
)


@contextmanager
def ledger_file(source: Path) -> Iterator[Path]:
    """The ledger as one file: the given one, or a fresh export of a run folder (running or not)."""
    if source.is_file():
        yield source
        return
    if not source.is_dir():
        raise typer.BadParameter(f"{source} is neither a run folder nor a ledger file")
    from barnraise.coordinator.export import export_run

    with tempfile.TemporaryDirectory(prefix="barnraise-ledger-") as scratch:
        target = Path(scratch) / "ledger.bin"
        export_run(source, target)
        yield target


def shown(index: int, entry: LedgerEntry) -> dict[str, Any]:
    """An entry as plain values: hashes in hex, nodes by peer id, time in ISO 8601."""
    fields = msgspec.structs.asdict(entry)
    moment = datetime.fromtimestamp(fields.pop("at_ms") / 1000, UTC).isoformat(timespec="milliseconds")
    plain: dict[str, Any] = {"index": index, "at": moment, "entry": type(entry).__name__}
    for name, value in fields.items():
        if name == "node":
            plain[name] = peer_id_of(value)
        else:
            plain[name] = value.hex() if isinstance(value, bytes) else value
    return plain


def audit(source: Path, receipts: tuple[Signed, ...] = ()) -> LedgerReport:
    """Verify the ledger behind ``source`` offline."""
    with ledger_file(source) as path:
        return verify_ledger_file(path, receipts)


def report_fields(report: LedgerReport) -> dict[str, Any]:
    """A report as plain values."""
    return {
        "ok": report.ok,
        "run_id": report.run_id.hex(),
        "entries": report.size,
        "root": report.root.hex(),
        "accepted": report.accepted,
        "rejected": report.rejected,
        "receipts": report.receipts,
        "balances": {peer_id_of(node): credit for node, credit in sorted(report.balances.items())},
        "problems": [{"entry": p.index, "rule": p.rule, "text": p.text} for p in report.problems],
    }


@app.command(epilog="Example: barnraise ledger show ./my-run --limit 20")
def show(
    source: Path = SOURCE,
    limit: int = typer.Option(0, "--limit", min=0, help="Only the last N entries (0: all)."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per entry."),
) -> None:
    """Print the ledger's entries, oldest first."""
    with ledger_file(source) as path, open_ledger(path) as ledger:
        rows: Iterator[tuple[int, LedgerEntry]] = enumerate(ledger.entries)
        if limit:
            with open_ledger(path) as counted:
                total = sum(1 for _ in counted.entries)
            rows = islice(rows, max(0, total - limit), None)
        for index, entry in rows:
            fields = shown(index, entry)
            if as_json:
                emit_json(fields)
                continue
            head = f"{fields.pop('index'):>6}  {fields.pop('at')[:19]}  {fields.pop('entry'):16}"
            typer.echo(f"{head}  " + "  ".join(f"{key}={str(value)[:60]}" for key, value in fields.items()))


@app.command(epilog="Example: barnraise ledger verify ledger.bin --receipts ~/.local/share/barnraise")
def verify(
    source: Path = SOURCE,
    receipts: Path | None = typer.Option(
        None,
        "--receipts",
        metavar="DIR",
        help="A node's data folder: check its receipts against the ledger too.",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Re-derive every balance and check every rule, hash and signature. Exit 1 if anything is wrong."""
    given: tuple[Signed, ...] = ()
    if receipts is not None:
        from barnraise.node.receipts import read_receipts

        if not receipts.is_dir():
            raise typer.BadParameter(f"{receipts} is not a folder", param_hint="--receipts")
        given = tuple(
            signed for path in sorted(receipts.glob("runs/*/receipts.bin")) for signed in read_receipts(path)
        )
    try:
        report = audit(source, given)
    except MalformedError as error:
        raise BarnraiseError(f"the ledger cannot be believed: {error}") from error
    if as_json:
        emit_json(report_fields(report))
    else:
        typer.echo(f"run      {report.run_id.hex()}")
        typer.echo(f"entries  {report.size}, root {report.root.hex()}")
        typer.echo(f"verdicts {report.accepted} accepted, {report.rejected} rejected")
        if receipts is not None:
            typer.echo(f"receipts {report.receipts} checked")
        for node, credit in sorted(report.balances.items(), key=lambda item: -item[1]):
            typer.echo(f"credit   {peer_id_of(node)}  {credit} Mflop")
        for problem in report.problems:
            place = "ledger" if problem.index is None else f"entry {problem.index}"
            typer.echo(f"WRONG    {place}: {problem.rule}: {problem.text}")
        typer.echo("ledger verified" if report.ok else "ledger is wrong")
    raise typer.Exit(0 if report.ok else 1)


@app.command(epilog="Example: barnraise ledger export ./my-run ledger.bin")
def export(
    folder: Path = typer.Argument(..., metavar="DIR", help="A run folder."),
    target: Path = typer.Argument(..., metavar="FILE", help="The file to write."),
) -> None:
    """Write the whole ledger as one file that anybody can verify offline."""
    from barnraise.coordinator.export import export_run

    export_run(folder, target)
    typer.echo(f"ledger written to {target}")

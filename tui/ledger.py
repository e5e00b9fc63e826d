"""``barnraise ledger``: read and audit a run's ledger, from a run folder or from an exported file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import typer

from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.ledger import LedgerEntry, LedgerReport, NodeJoined
from barnraise.protocol.ledger_file import open_ledger, verify_ledger_file
from barnraise.protocol.messages import Receipt, Signed, TreeHead
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.wire import printable
from barnraise.tui.console import emit_json, examples, short_id, size

app = typer.Typer(
    help="Read and audit a run's contribution ledger.",
    epilog=examples("ledger export ./my-run ledger.bin", "ledger verify ledger.bin --receipts node-1"),
    no_args_is_help=True,
)

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
        raise typer.BadParameter(f"there is no {source}; name a run folder or a ledger file")
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


def line(fields: dict[str, Any], names: dict[str, str]) -> str:
    """An entry (see ``shown``) for a person: what happened, to whom; hashes by their first digits.

    ``names``: peer id -> the name it joined under.
    """
    peer = fields.get("node", "")
    who = f"{names.get(peer, '?')} {short_id(peer)}" if peer else ""
    lease = f"lease {fields.get('lease_id', '')[:8]}"
    kind = fields["entry"]
    if kind == "RunCreated":
        what, text = "run created", f"id {fields['run_id'][:16]}"
    elif kind == "NodeJoined":
        what, text = "joined", who
    elif kind == "LeaseIssued":
        work = f"{fields['prompts']} x {fields['group_size']} at version {fields['policy_version']}"
        what, text = "lent", f"{who}, {lease}, {work}"
    elif kind == "BlockLeased":
        work = f"block {fields['block']} place {fields['slot']} at version {fields['policy_version']}"
        what, text = "lent", f"{who}, {lease}, {work}"
    elif kind == "LeaseClosed":
        what, text = fields["reason"], lease
    elif kind == "Submitted":
        what, text = "submitted", f"{who}, {lease}"
    elif kind == "Judged" and fields["accepted"]:
        what, text = "accepted", f"{who}, {lease}, +{fields['credit']:,} Mflop"
    elif kind == "Judged":
        what, text = "REJECTED", f"{who}, {lease}, check {fields['check']}"
    elif kind == "Appealed":
        what, text = "appealed", f"{who}, {lease}"
    elif kind == "Reviewed":
        outcome = f"overturned, +{fields['credit']:,} Mflop" if fields["accepted"] else "upheld"
        what, text = "reviewed", f"{who}, {lease}, {outcome}, check {fields['check']}"
    elif kind in ("ClawedBack", "Restored"):
        sign, what = ("-", "CLAWED BACK") if kind == "ClawedBack" else ("+", "restored")
        text = f"{who}, {lease}, {sign}{fields['credit']:,} Mflop, because of {fields['cause'][:12]}"
    elif kind == "NodeBanned":
        until = datetime.fromtimestamp(fields["until"] / 1000, UTC).isoformat(" ", "minutes")[:16]
        what, text = "BANNED", f"{who}, until {until}: {fields['reason']}"
    elif kind == "BanLifted":
        what, text = "ban lifted", f"{who}: {fields['reason']}"
    elif kind == "AuditCommitted":
        what, text = "audit seed", f"{fields['epoch']} committed to: {fields['commitment'][:16]}"
    elif kind == "AuditRevealed":
        what, text = "audit seed", f"{fields['epoch']} published: {fields['seed'][:16]}"
    else:
        what, text = "published", f"version {fields['version']}, manifest {fields['manifest'][:16]}"
    moment = fields["at"][:19].replace("T", " ")
    return f"{fields['index']:>6}  {moment}  {what:11}  {text}"


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
        "spared": report.spared,
        "sealed": report.sealed,
        "clawed_back": report.clawed_back,
        "rejected": report.rejected,
        "receipts": report.receipts,
        "balances": {peer_id_of(node): credit for node, credit in sorted(report.balances.items())},
        "problems": [{"entry": p.index, "rule": p.rule, "text": p.text} for p in report.problems],
    }


@app.command(
    short_help="Print the entries, oldest first.",
    epilog=examples("ledger show ./my-run --limit 20", "ledger show ledger.bin --json"),
)
def show(
    source: Path = SOURCE,
    limit: int = typer.Option(
        0, "--limit", metavar="N", min=0, help="Only the last N entries (0: all of them)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per entry, nothing shortened."),
) -> None:
    """Print the ledger's entries, oldest first; times are UTC, ids are shortened (--json has them whole)."""
    try:
        with ledger_file(source) as path:
            _show(path, limit, as_json)
    except MalformedError as error:
        raise typer.BadParameter(str(error), param_hint="DIR|FILE") from error


def _show(path: Path, limit: int, as_json: bool) -> None:
    skipped = 0
    if limit:
        with open_ledger(path) as counted:
            skipped = max(0, sum(1 for _ in counted.entries) - limit)
    names: dict[str, str] = {}
    with open_ledger(path) as ledger:
        for index, entry in enumerate(ledger.entries):
            if isinstance(entry, NodeJoined):
                names[peer_id_of(entry.node)] = printable(entry.name)
            if index < skipped:
                continue
            fields = shown(index, entry)
            if as_json:
                emit_json(fields)
            else:
                typer.echo(line(fields, names))


@app.command(
    short_help="Check every rule, hash, signature and balance.",
    epilog=examples(
        "ledger verify ./my-run",
        "ledger verify ledger.bin --receipts ~/.local/share/barnraise",
    ),
)
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
    newer = 0
    try:
        with ledger_file(source) as path:
            if receipts is not None:
                given, newer = receipts_for(path, receipts)
            report = verify_ledger_file(path, given)
    except (MalformedError, SignatureError) as error:
        raise BarnraiseError(f"the ledger cannot be believed: {error}") from error
    if as_json:
        emit_json({**report_fields(report), "receipts_newer": newer})
    else:
        typer.echo(f"run      {report.run_id.hex()}")
        typer.echo(f"entries  {report.size}, root {report.root.hex()}")
        typer.echo(f"verdicts {report.accepted} accepted, {report.rejected} rejected")
        if report.spared:
            checked = report.spared - report.sealed
            typer.echo(f"audits   {report.spared} spared by draw, {checked} of those draws made again")
        if report.clawed_back:
            typer.echo(f"clawback {report.clawed_back:,} Mflop")
        if receipts is not None:
            later = f", {newer} newer than this ledger left out: export it again to check them"
            typer.echo(f"receipts {report.receipts} checked" + (later if newer else ""))
        for node, credit in sorted(report.balances.items(), key=lambda item: -item[1]):
            typer.echo(f"credit   {peer_id_of(node)}  {credit:,} Mflop")
        for problem in report.problems:
            place = "ledger" if problem.index is None else f"entry {problem.index}"
            typer.echo(f"WRONG    {place}: {problem.rule}: {problem.text}")
        typer.echo("ledger verified" if report.ok else "ledger is wrong")
    raise typer.Exit(0 if report.ok else 1)


def receipts_for(ledger: Path, data: Path) -> tuple[tuple[Signed, ...], int]:
    """A node's receipts for the run of a ledger file, and how many more are newer than the file.

    A node goes on earning while an auditor looks at an older export. A receipt is
    newer if it names an entry past the end and was issued after the last tree head
    was; one that names an entry past the end but is older stays in, and is found wrong.

    Raises:
        MalformedError, SignatureError: the ledger's beginning or the receipts are damaged.
        StorageError: a file cannot be read.
    """
    from barnraise.node.receipts import read_receipts

    with open_ledger(ledger) as opened:
        operator = open_run_spec(opened.run_spec).operator
        file = data / "runs" / run_id_of(opened.run_spec).hex()[:16] / "receipts.bin"
        heads = [open_signed(head, TreeHead, operator) for head in opened.heads]
    if not file.is_file():
        raise typer.BadParameter(
            f"{data} holds no receipts of this run; name the --data folder of a node that worked for it",
            param_hint="--receipts",
        )
    end = max((head.size for head in heads), default=0)
    moment = max((head.issued_at for head in heads), default=0)
    kept, newer = [], 0
    for signed in read_receipts(file):
        try:
            receipt = open_signed(signed, Receipt, operator)
        except (MalformedError, SignatureError):
            kept.append(signed)  # the audit names what is wrong with it
            continue
        if receipt.ledger_index >= end and receipt.issued_at >= moment:
            newer += 1
        else:
            kept.append(signed)
    return tuple(kept), newer


@app.command(
    short_help="Write the ledger as one file for an auditor.",
    epilog=examples("ledger export ./my-run ledger.bin"),
)
def export(
    folder: Path = typer.Argument(..., metavar="DIR", help="A run folder."),
    target: Path = typer.Argument(..., metavar="FILE", help="The file to write."),
) -> None:
    """Write the whole ledger as one file that anybody can verify offline."""
    from barnraise.coordinator.export import export_run

    if target.is_dir() or not target.parent.is_dir():
        raise typer.BadParameter(
            f"{target} is a folder" if target.is_dir() else f"there is no folder {target.parent}",
            param_hint="FILE",
        )
    export_run(folder, target)
    typer.echo(f"ledger written to {target}, {size(target.stat().st_size)}")

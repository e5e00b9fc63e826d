"""``barnraise ledger verify``: everything that can be checked offline, and exactly what is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, MalformedError, RunFolderError, SignatureError
from barnraise.protocol.ledger import LedgerReport
from barnraise.protocol.ledger_file import open_ledger, verify_ledger_file
from barnraise.protocol.ledger_lines import peer_id
from barnraise.protocol.ledger_problems import Problem, causes, in_order
from barnraise.protocol.ledger_public import Held, hold_against, look_at_files
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Receipt, Signed, TreeHead
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.signatures import process_pool
from barnraise.protocol.tlog_checkpoint import log_key, open_checkpoint
from barnraise.protocol.wire import decode, printable
from barnraise.tui.console import emit_json, examples
from barnraise.tui.ledger_fetch import fetched, is_url
from barnraise.tui.ledger_published import files_of, key_of, look_at_mark, published_in
from barnraise.tui.ledger_source import SlowProgress, ledger_file

PROBLEMS_SHOWN = 20
EXAMPLES = examples(
    "ledger verify ./my-run",
    "ledger verify https://run.example.org/",
    "ledger verify ledger.bin --receipts ~/.local/share/barnraise",
    "ledger verify ledger.bin --checkpoint checkpoint --checkpoint ~/.local/share/barnraise",
)
Also = Callable[[MerkleLog, int], Iterable[Problem]]


def audit(source: Path, receipts: tuple[Signed, ...] = ()) -> LedgerReport:
    """Verify the ledger behind ``source`` offline; signatures in several processes if there are many."""
    with ledger_file(source) as path:
        return _audit(path, receipts)


def _audit(path: Path, receipts: tuple[Signed, ...], also: Also | None = None) -> LedgerReport:
    progress = SlowProgress()
    with process_pool(done=lambda done, of: progress("checking signatures", done / of)) as check:
        return verify_ledger_file(
            path, receipts, check, lambda fraction: progress("checking entries", fraction), also
        )


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
        "signatures": report.signatures,
        "balances": {peer_id(node): credit for node, credit in sorted(report.balances.items())},
        "problems": [
            {"entry": one.index, "rule": one.rule, "text": one.text, "follows_from": cause}
            for one, cause in zip(report.problems, causes(report.problems, report.size), strict=True)
        ],
        "problems_left_out": report.unnamed,
    }


def verify(
    place: str = typer.Argument(
        ..., metavar="DIR|FILE|URL", help="A run folder, a ledger file, or the address of a public log."
    ),
    receipts: Path | None = typer.Option(
        None,
        "--receipts",
        metavar="DIR",
        help="A node's data folder: check its receipts against the ledger too.",
    ),
    checkpoint: list[Path] = typer.Option(
        [],
        "--checkpoint",
        metavar="FILE|DIR",
        help="A checkpoint that anybody was shown, or a node's data folder: is this the same ledger?",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Re-derive every balance and check every rule, hash and signature. Exit 1 if anything is wrong.

    In a run folder the published files (RUN/log) are held against the ledger as well.
    """
    with _here(place) as source:
        _verify(source, receipts, checkpoint, as_json)


@contextmanager
def _here(place: str) -> Iterator[Path]:
    """A public log is copied first, to a file that does not last."""
    if not is_url(place):
        yield Path(place)
        return
    with tempfile.TemporaryDirectory(prefix="barnraise-ledger-") as scratch:
        fetched(place, target := Path(scratch) / "ledger.bin")
        yield target


def _verify(source: Path, receipts: Path | None, checkpoint: list[Path], as_json: bool) -> None:
    given: tuple[Signed, ...] = ()
    newer, held = 0, Held()
    note, read = files_of(source)  # before the ledger, which may grow meanwhile
    try:
        with ledger_file(source) as path:
            if receipts is not None:
                given, newer = receipts_for(path, receipts)
            key = key_of(path)
            published = published_in(checkpoint, key)

            def also(log: MerkleLog, signed_ms: int) -> Iterator[Problem]:
                yield from hold_against(published, key, log, signed_ms, held)
                yield from look_at_files(read, note, key, log)
                yield from look_at_mark(source)

            report = _audit(path, given, also)
    except (MalformedError, SignatureError) as error:
        raise BarnraiseError(f"the ledger cannot be believed: {error}") from error
    except RunFolderError as error:
        from barnraise.coordinator.journal_place import journal_begun

        if not journal_begun(source):
            raise  # no run folder at all
        raise BarnraiseError(f"the ledger cannot be read: {error}") from error
    if as_json:
        checkpoints = {"checkpoints": held.fitting, "checkpoints_newer": held.newer}
        emit_json({**report_fields(report), "receipts_newer": newer, **checkpoints})
    else:
        if checkpoint:
            later = f", {held.newer} newer than this ledger left out" if held.newer else ""
            typer.echo(f"heads    {held.fitting} of {len(published)} checkpoints are of this ledger{later}")
        print_report(report, None if receipts is None else newer)
    raise typer.Exit(0 if report.ok else 1)


def print_report(report: LedgerReport, newer: int | None = None) -> None:
    """A report for people. ``newer``: receipts left out for being newer; None where none were given."""
    typer.echo(f"run      {report.run_id.hex()}")
    typer.echo(f"entries  {report.size}, root {report.root.hex()}")
    typer.echo(f"verdicts {report.accepted} accepted, {report.rejected} rejected")
    if report.spared:
        checked = report.spared - report.sealed
        typer.echo(f"audits   {report.spared} spared by draw, {checked} of those draws made again")
    if report.clawed_back:
        typer.echo(f"clawback {report.clawed_back:,} Mflop")
    if newer is not None:
        later = f", {newer} newer than this ledger left out: export or fetch it again to check them"
        typer.echo(f"receipts {report.receipts} checked" + (later if newer else ""))
    for node, credit in sorted(report.balances.items(), key=lambda item: -item[1]):
        typer.echo(f"credit   {peer_id(node)}  {credit:,} Mflop")
    _print_problems(report)
    typer.echo("ledger verified" if report.ok else "ledger is wrong")


def _print_problems(report: LedgerReport) -> None:
    """What follows from no other problem, the earliest entry's first: what only follows is counted there."""
    problems = in_order(report.problems, report.size)
    for number, (problem, following) in enumerate(problems[:PROBLEMS_SHOWN]):
        place = "ledger" if problem.index is None else f"entry {problem.index}"
        typer.echo(f"WRONG    {place}: {problem.rule}: {printable(problem.text, 1000)}")
        if following:
            typer.echo(f"         and {following:,} more that follow{'s' * (following == 1)} from it")
        if number == 0 and (len(problems) > 1 or report.unnamed):
            typer.echo("         ^ the first of them: look here, the others may follow from it")
    left = sum(1 + following for _, following in problems[PROBLEMS_SHOWN:]) + report.unnamed
    named = len(report.problems)
    if left:
        typer.echo(f"WRONG    {left:,} more problems (--json has the first {named:,})")
    elif named > len(problems):
        typer.echo(f"         (--json has all {named:,})")


def receipt_file(ledger: Path, data: Path) -> Path:
    """Where a node's data folder has its receipts of a ledger file's run.

    Raises:
        typer.BadParameter: it has none.
    """
    with open_ledger(ledger) as opened:
        file = data / "runs" / run_id_of(opened.run_spec).hex()[:16] / "receipts.bin"
    if not file.is_file():
        raise typer.BadParameter(
            f"{data} holds no receipts of this run; name the --data folder of a node that worked for it",
            param_hint="--receipts",
        )
    return file


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

    file = receipt_file(ledger, data)
    end = moment = 0
    with open_ledger(ledger) as opened:
        operator = open_run_spec(opened.run_spec).operator
        for signed in opened.heads:
            try:
                head = open_signed(signed, TreeHead, operator)
            except (MalformedError, SignatureError):
                continue  # the audit names what is wrong with it
            end, moment = max(end, head.size), max(moment, head.issued_at)
        if opened.checkpoint is not None:  # which has no date: what is past its end may be newer
            with suppress(MalformedError, SignatureError):
                key = log_key(run_id_of(opened.run_spec), operator)
                end = max(end, open_checkpoint(opened.checkpoint, key).size)
    kept, newer = [], 0
    for signed in read_receipts(file):
        try:
            receipt = decode(signed.payload, Receipt)
            left_out = receipt.ledger_index >= end and receipt.issued_at >= moment
            if (
                left_out
            ):  # only if it is one: the signatures of all others are checked by the audit, in parallel
                open_signed(signed, Receipt, operator)
        except (MalformedError, SignatureError):
            left_out = False  # the audit names what is wrong with it
        if left_out:
            newer += 1
        else:
            kept.append(signed)
    return tuple(kept), newer

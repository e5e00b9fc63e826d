"""``barnraise ledger evidence``: what a file of a split view proves, checked offline and put into words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError
from barnraise.protocol.evidence import MAX_EVIDENCE_FILE, Evidence, check_evidence
from barnraise.protocol.identity import fingerprint
from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.ledger_lines import peer_id
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.tlog_checkpoint import log_key
from barnraise.protocol.wire import printable
from barnraise.protocol.witness import Conflict
from barnraise.tui.console import emit_json, examples
from barnraise.tui.ledger_source import input_file, ledger_file, usable

EXAMPLES = examples(
    "ledger evidence evidence-split-view-0123456789abcdef.json",
    "ledger evidence evidence.json --run 3fa9c1d2 --json",
    "ledger evidence evidence.json --ledger ledger.bin",
)
RUN = typer.Option("", "--run", metavar="ID", help="The run it must be of, or how its id begins.")


def evidence(
    file: Path = typer.Argument(
        ..., metavar="FILE", help="What a node wrote (DATA/runs/*/witness/evidence-*.json); - for stdin."
    ),
    run: str = RUN,
    ledger: Path | None = typer.Option(
        None, "--ledger", metavar="DIR|FILE", help="A ledger of the run, where the file has no run spec."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Check evidence that an operator signed two ledgers, and say what was proven. Offline.

    Exit 0: it is proof. Exit 1: it proves nothing (a suspicion is no proof).
    """
    check_run(run)
    judge_evidence(input_file(file, "FILE", MAX_EVIDENCE_FILE), run, ledger, as_json)


def check_run(run: str) -> None:
    """Refuse what is no beginning of a run's id."""
    if run and not all(c in "0123456789abcdefABCDEF" for c in run):
        raise typer.BadParameter("a run's id is hexadecimal", param_hint="--run")


def judge_evidence(data: bytes, run: str, ledger: Path | None, as_json: bool) -> None:
    """Say what the evidence proves.

    Raises:
        BarnraiseError: nothing, or of another run than ``run`` (the beginning of an id).
    """
    try:
        found = check_evidence(data)
        run_id = _run_of(found, ledger)
    except (MalformedError, SignatureError) as error:
        raise BarnraiseError(f"this proves nothing: {error}") from error
    if not run_id.startswith(run.lower()):
        raise BarnraiseError(f"this is evidence against another run, {run_id}")
    trouble = found.trouble
    heads = [trouble.smaller, trouble.larger]
    if not isinstance(trouble, Conflict):
        raise BarnraiseError(
            f"a suspicion, no proof: the operator of run {run_id} signed heads of {heads[0].size} and "
            f"{heads[1].size} entries, and a proof that the one grew from the other was not to be had. "
            "That happens where a coordinator went away in between; ask it for the log up to the larger head"
        )
    if as_json:
        emit_json(_fields(found, trouble, run_id))
        return
    for text in _words(found, trouble, run_id):
        typer.echo(text)


def _run_of(found: Evidence, ledger: Path | None) -> str:
    """The id of the run whose operator's key it is."""
    spec = found.run_spec
    if spec is None and ledger is None:
        raise MalformedError(
            f"the file does not show that the key {fingerprint(found.key.public_key)} is the operator's: "
            "anybody can sign under a run's name. --ledger DIR|FILE brings the run's signed spec"
        )
    if ledger is not None:
        with usable("--ledger"), ledger_file(ledger) as path, open_ledger(path) as opened:
            spec = opened.run_spec
            open_run_spec(spec)
    assert spec is not None
    run_id = run_id_of(spec)
    if log_key(run_id, open_run_spec(spec).operator) != found.key:
        raise SignatureError("that ledger is another run's, or its operator has another key")
    return run_id.hex()


def _fields(found: Evidence, trouble: Conflict, run_id: str) -> dict[str, Any]:
    return {
        "ok": True,
        "proves": "split-view",
        "run_id": run_id,
        "operator": peer_id(found.key.public_key),
        "heads": [{"size": h.size, "root": h.root.hex()} for h in (trouble.smaller, trouble.larger)],
        "smaller_root_in_larger": trouble.root.hex(),
    }


def _words(found: Evidence, trouble: Conflict, run_id: str) -> list[str]:
    one, other = trouble.smaller, trouble.larger
    same = one.size == other.size
    beginning = (
        "no log has two roots at one size"
        if same
        else f"of which the first {one.size:,} have root {trouble.root.hex()}"
    )
    return [
        f"SPLIT VIEW of run {printable(run_id)}",
        f"head A: {one.size:,} entries, root {one.root.hex()}",
        f"head B: {other.size:,} entries, root {other.root.hex()}",
        f"        {beginning}",
        f"proven: the key {fingerprint(found.key.public_key)} ({peer_id(found.key.public_key)}),",
        f"  which the run spec of run {run_id} names as its operator's,",
        "  signed both, and no ledger that only grows can have both.",
        *([] if same else ["  A consistency proof (RFC 9162) leads from B's root to that of its beginning."]),
        "not proven: which of the two is true, which entries differ (barnraise ledger diff of two copies),",
        "  who was shown which, and why: an old copy of the run folder that was continued, a stolen key, or",
        "  intent.",
        "what follows: a balance of this run counts for no more than the receipts that go with it; whoever",
        "  works for it should hear what the operator says of this.",
    ]

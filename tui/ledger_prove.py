"""``barnraise ledger prove`` and ``ledger check``: one entry, proven offline from one small file."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError
from barnraise.protocol.identity import fingerprint
from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.ledger_lines import line, peer_id, shown
from barnraise.protocol.ledger_proof import (
    MAX_PROOF_FILE,
    Proven,
    check_proof,
    decode_proof,
    encode_proof,
    make_proof,
)
from barnraise.protocol.moments import minute, shown_moment
from barnraise.tui.console import emit_json, examples
from barnraise.tui.ledger_source import SOURCE, input_file, ledger_file, usable

PROVE_EXAMPLES = examples("ledger prove ./my-run 1234 > proof", "ledger prove ledger.bin 1234 > proof")
CHECK_EXAMPLES = examples("ledger check proof", "ledger check proof --run 3fa9c1d2 --json")


def prove(
    source: Path = SOURCE,
    index: int = typer.Argument(..., metavar="ENTRY", min=0, help="The entry's number in the ledger."),
) -> None:
    """Write a proof of one entry to standard output: small, self-contained, checked with 'ledger check'."""
    with usable(), ledger_file(source) as path, open_ledger(path) as ledger:
        try:
            proof = make_proof(ledger.entries, ledger.heads, ledger.run_spec, index)
        except IndexError as error:
            raise typer.BadParameter(str(error), param_hint="ENTRY") from error
    sys.stdout.write(encode_proof(proof).decode("ascii"))


def check(
    file: Path = typer.Argument(..., metavar="FILE", help="Made by 'barnraise ledger prove'; - for stdin."),
    run: str = typer.Option("", "--run", metavar="ID", help="The run it must be of, or how its id begins."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Check a proof offline; say exactly what it proves and what not. Exit 1 if it proves nothing."""
    if run and not all(c in "0123456789abcdefABCDEF" for c in run):
        raise typer.BadParameter("a run's id is hexadecimal", param_hint="--run")
    data = input_file(file, "FILE", MAX_PROOF_FILE)
    try:
        proven = check_proof(decode_proof(data))
    except (MalformedError, SignatureError) as error:
        raise BarnraiseError(f"this proves nothing: {error}") from error
    if not proven.run_id.hex().startswith(run.lower()):
        raise BarnraiseError(f"this proves something of another run, {proven.run_id.hex()}")
    fields = shown(proven.index, proven.entry)
    if as_json:
        emit_json(
            {
                "ok": True,
                "entry": fields,
                "run_id": proven.run_id.hex(),
                "operator": peer_id(proven.operator),
                "tree_head": {
                    "size": proven.head.size,
                    "root": proven.head.root.hex(),
                    "at": shown_moment(proven.head.issued_at),
                },
            }
        )
        return
    typer.echo(line(fields, {}))
    for text in _meaning(proven):
        typer.echo(text)


def _meaning(proven: Proven) -> list[str]:
    head = proven.head
    return [
        f"proven: the key {fingerprint(proven.operator)} ({peer_id(proven.operator)}),",
        f"  which the run spec of run {proven.run_id.hex()} names as its operator's,",
        f"  signed (dated {minute(head.issued_at)} UTC) a ledger of {head.size:,} entries",
        f"  with root {head.root.hex()}",
        f"  in which entry {proven.index} is this one, to the bit.",
        "not proven: that this is the run you mean (compare its id), that the entry follows the rules and",
        "  what credit stands in the end (barnraise ledger verify), that the date is true, or that nobody",
        "  was shown another ledger (barnraise ledger diff, and what witnesses say).",
    ]

"""``barnraise appeal``: have one rejected submission verified again."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from barnraise.protocol.control_client import send_command
from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError
from barnraise.protocol.messages import Receipt
from barnraise.tui.console import emit_json, examples
from barnraise.tui.receipts import data_folder, read_all, receipt_files

EXAMPLES = examples("receipts --rejected", "appeal '#412'", "appeal 3f9a02c1 node-1 --wait 300")
COMMAND_S = 150.0
LOOK_EVERY_S = 0.25


def appeal(
    receipt: str = typer.Argument(
        ..., metavar="RECEIPT", help="A ledger index (#412), or the start of the submission's id."
    ),
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="The running node's data folder (default: ~/.local/share/barnraise)."
    ),
    wait: float = typer.Option(
        60.0, "--wait", metavar="SECONDS", min=0.0, max=86_400.0, help="How long to wait for the outcome."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Have a rejected submission verified again, alone.

    The outcome is another signed receipt and stands in the ledger. If the verdict is overturned,
    credit, strikes and a ban that it led to are made good. Exit 0: overturned, or still to be
    heard; 1: upheld, or refused.
    """
    place = data_folder(folder)
    try:
        reply = send_command(place / "control.sock", "appeal", COMMAND_S, receipt=receipt)
    except (PeerError, OSError) as error:
        raise BarnraiseError(
            f"no node answers in {place} ({error}); start it with 'barnraise join MULTIADDR --data {place}'"
        ) from error
    found = _await(place, bytes.fromhex(str(reply["submission"])), int(reply["index"]), wait)
    if found is None:
        if as_json:
            emit_json({"submission": reply["submission"], "outcome": None})
        else:
            typer.echo(f"{reply['text']}: see 'barnraise receipts'")
        return
    from barnraise.node.receipt_words import words

    overturned = found.verdict.accepted
    if as_json:
        emit_json(
            {
                "submission": reply["submission"],
                "outcome": "overturned" if overturned else "upheld",
                "ledger_index": found.ledger_index,
                "credit": found.credit,
                "check": found.verdict.check,
                "threshold": found.verdict.threshold,
                "value": found.verdict.value,
                "position": found.verdict.position,
            }
        )
    else:
        typer.echo(
            f"{'overturned' if overturned else 'upheld'} (receipt #{found.ledger_index}): {words(found)}"
        )
    raise typer.Exit(0 if overturned else 1)


def _await(place: Path, submission_id: bytes, index: int, seconds: float) -> Receipt | None:
    """The receipt that follows number ``index`` for a submission, if it comes in time."""
    until = time.monotonic() + seconds
    while True:
        for path in receipt_files(place):
            try:
                known = read_all(path)
            except MalformedError:  # the node is writing to it
                continue
            for receipt in known:
                if receipt.submission_id == submission_id and receipt.ledger_index > index:
                    return receipt
        if time.monotonic() >= until:
            return None
        time.sleep(LOOK_EVERY_S)

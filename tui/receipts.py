"""``barnraise receipts``: the signed verdicts on this node's work, as the node keeps them (R16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from barnraise.protocol.errors import BarnraiseError, MalformedError
from barnraise.protocol.messages import Receipt
from barnraise.protocol.wire import decode
from barnraise.tui.console import emit_json, examples

EXAMPLES = examples("receipts", "receipts node-1 --rejected", "receipts node-1 --json")


def data_folder(folder: Path | None) -> Path:
    """A node's data folder; None is this user's.

    Raises:
        typer.BadParameter: there is no such folder.
    """
    if folder is None:
        from barnraise.node.config import default_data_path

        folder = default_data_path()
        if not folder.is_dir():
            raise typer.BadParameter(f"no node has run here yet: there is no {folder}; name a data folder")
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder; name a node's data folder")
    return folder


def receipt_files(folder: Path, run: str = "") -> list[Path]:
    """The receipt files in a node's data folder, of the runs whose id begins with ``run``."""
    return sorted(folder.glob(f"runs/{run.lower()[:16]}*/receipts.bin"))


def read_all(path: Path) -> list[Receipt]:
    """The receipts in a file, by ledger index; signatures are not checked (``ledger verify`` does that).

    Raises:
        MalformedError, StorageError: the file is damaged or cannot be read.
    """
    from barnraise.node.receipts import read_receipts

    found = [decode(signed.payload, Receipt) for signed in read_receipts(path)]
    return sorted(found, key=lambda receipt: receipt.ledger_index)


def receipts(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A node's data folder (default: ~/.local/share/barnraise)."
    ),
    rejected: bool = typer.Option(False, "--rejected", help="Only what was rejected or clawed back."),
    run: str = typer.Option("", "--run", metavar="ID", help="Only the run whose id begins so."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """List what this node's work earned, by its signed receipts.

    With what was found, and by which check. The last receipt for a submission counts. A rejection can
    be appealed once.
    """
    if run and not all(c in "0123456789abcdefABCDEF" for c in run):
        raise typer.BadParameter("a run's id is hexadecimal", param_hint="--run")
    place = data_folder(folder)
    files = receipt_files(place, run)
    if not files:
        raise BarnraiseError(f"{place} holds no receipts yet: they come with the first verdict")
    from barnraise.node.receipt_fields import fields as receipt_fields

    shown: list[dict[str, Any]] = []
    for path in files:
        try:
            shown += [
                fields for fields in receipt_fields(read_all(path)) if not rejected or not fields["accepted"]
            ]
        except MalformedError as error:
            raise BarnraiseError(f"{error}; the node repairs it when it starts") from error
    if as_json:
        emit_json({"receipts": shown})
        return
    for fields in shown:
        moment = fields["at"][:19].replace("T", " ")
        mark = " " if fields["counts"] else "-"  # superseded by a later one
        typer.echo(
            f"{mark}#{fields['ledger_index']:<7} {moment}  {fields['submission'][:12]}  {fields['words']}"
        )
    if not shown:
        typer.echo("no receipt" + (" of a rejection" if rejected else ""))

"""``barnraise ledger fetch``: the whole ledger from the public static log, with nobody's export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import trio
import typer

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.log_messages import CHECKPOINT
from barnraise.protocol.notes import MAX_NOTE
from barnraise.tui.console import examples, size
from barnraise.tui.ledger_evidence import RUN, check_run
from barnraise.tui.ledger_source import SlowProgress

if TYPE_CHECKING:  # an HTTP client is only loaded where a log is fetched
    from barnraise.node.ledger_copy import Copied
    from barnraise.node.log_site import LogDirectory, LogSite, LogSource

EXAMPLES = examples(
    "ledger fetch https://run.example.org/ ledger.bin",
    "ledger fetch https://bucket.example.org/my-run/log/ ledger.bin --run 3fa9c1d2",
)


def fetch(
    url: str = typer.Argument(
        ...,
        metavar="URL",
        help="The run's page (https://host/), its log (.../log/), or a folder like it.",
    ),
    target: Path = typer.Argument(..., metavar="FILE", help="The file to write, or to bring up to date."),
    run: str = RUN,
) -> None:
    """Take a run's whole ledger from its public log, checked as it comes, without asking the operator.

    Works with FILE as it was left: an interrupted download goes on, and of a ledger that grew only
    what is new is fetched. Exit 1 if what is served cannot be believed, or is another history than
    FILE has: then both are kept, with the proof.
    """
    check_run(run)
    if target.is_dir() or not target.parent.is_dir():
        raise typer.BadParameter(
            f"{target} is a folder" if target.is_dir() else f"there is no folder {target.parent}",
            param_hint="FILE",
        )
    found = fetched(url, target, run)
    if found.known == found.size:
        typer.echo(f"{target} has all of it already, {found.size:,} entries")
    else:
        typer.echo(
            f"run {found.run_id.hex()}: {found.size:,} entries ({found.size - found.known:,} new) "
            f"in {target}, {size(target.stat().st_size)}"
        )


def is_url(text: str) -> bool:
    """Whether a source is named by its address."""
    return text.startswith(("https://", "http://"))


def fetched(url: str, target: Path, run: str = "") -> Copied:
    """Copy the log at ``url`` to ``target`` (``copy_ledger``)."""
    return trio.run(_fetched, url, target, run)


async def _fetched(url: str, target: Path, run: str) -> Copied:
    from barnraise.node.ledger_copy import copy_ledger

    source = await _source(url)
    try:
        return await copy_ledger(source, target, SlowProgress(), run)
    finally:
        await source.close()


async def _source(url: str) -> LogSite | LogDirectory:
    """Where the checkpoint is: right there, or below ``log/``."""
    from barnraise.node.log_site import LogDirectory, LogSite

    if not is_url(url):
        folder = Path(url)
        if not folder.is_dir():
            raise typer.BadParameter(f"{url} is no https address, and no folder", param_hint="URL")
        return LogDirectory(folder if (folder / CHECKPOINT).is_file() else folder / "log")
    try:
        here = LogSite(url)
    except MalformedError as error:
        raise typer.BadParameter(str(error), param_hint="URL") from error
    if here.base.endswith("/log/") or await _has_log(here):
        return here
    await here.close()
    return LogSite(f"{here.base}log/")


async def _has_log(source: LogSource) -> bool:
    return await source.get(CHECKPOINT, MAX_NOTE) is not None

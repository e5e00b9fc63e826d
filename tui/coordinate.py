"""``barnraise coordinator``: serve a run."""

from __future__ import annotations

from pathlib import Path

import typer

from barnraise.protocol.errors import PeerError
from barnraise.tui.console import examples

app = typer.Typer(
    help="Serve a run to volunteers.", epilog=examples("coordinator run ./my-run"), no_args_is_help=True
)


@app.callback()
def group() -> None:
    """Serve a run to volunteers."""


@app.command(
    short_help="Serve a run folder until Ctrl-C.",
    epilog=examples("coordinator run ./my-run --listen /ip4/0.0.0.0/tcp/4001"),
)
def run(
    folder: Path = typer.Argument(..., metavar="DIR", help="A run folder made by 'barnraise run init'."),
    listen: list[str] = typer.Option(
        ["/ip4/0.0.0.0/tcp/4001"], "--listen", metavar="ADDR", help="Where to listen, TCP; may be repeated."
    ),
    threads: int = typer.Option(
        1, "--threads", metavar="N", min=1, max=1024, help="Threads each for verifier and learner."
    ),
) -> None:
    """Run the coordinator until Ctrl-C; started again, it goes on where it was."""
    from barnraise.coordinator.main import run_from_folder

    try:
        code = run_from_folder(folder, listen=tuple(listen), threads=threads)
    except PeerError as error:  # an address that is malformed or taken
        raise typer.BadParameter(str(error), param_hint="--listen") from error
    raise typer.Exit(code)

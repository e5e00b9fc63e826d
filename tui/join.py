"""``barnraise join``: lend this machine to a run."""

from __future__ import annotations

import os
from pathlib import Path

import typer

EXAMPLES = (
    "Example: barnraise join /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...   "
    "(the operator gives you the address; press Ctrl-C to leave)"
)


def default_threads() -> int:
    """Half of the cores: the machine stays usable (R14)."""
    return max(1, (os.cpu_count() or 2) // 2)


def join(
    address: str = typer.Argument(
        ..., metavar="MULTIADDR", help="The coordinator's address, ending in /p2p/<peer id>."
    ),
    data: Path | None = typer.Option(
        None, "--data", metavar="DIR", help="Where weights and receipts are kept."
    ),
    key: Path | None = typer.Option(None, "--key", metavar="FILE", help="Key file; made on first use."),
    name: str | None = typer.Option(
        None, "--name", help="What others see beside your credit (default: host name)."
    ),
    listen: list[str] = typer.Option(
        ["/ip4/0.0.0.0/tcp/0"], "--listen", metavar="ADDR", help="Where peers may fetch shards from you."
    ),
    threads: int = typer.Option(
        default_threads(), "--threads", min=1, max=1024, help="Threads for the engine."
    ),
    disk: int = typer.Option(20, "--disk-gb", min=1, max=100_000, help="Most disk to use for weights, GB."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask before joining."),
    leave_when_complete: bool = typer.Option(
        False, "--exit-when-complete", help="End when the run has published its last version."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print events as JSON lines."),
) -> None:
    """Join a run: fetch the weights, generate rollouts, earn credit."""
    from barnraise.node.config import NodeConfig, default_data_path, default_key_path
    from barnraise.node.main import run_from_config

    config = NodeConfig(
        address=address,
        data=data or default_data_path(),
        key=key or default_key_path(),
        name=name,
        listen=tuple(listen),
        threads=threads,
        disk_bytes=disk * 10**9,
        assume_yes=yes,
        exit_when_complete=leave_when_complete,
        json_lines=as_json,
    )
    raise typer.Exit(run_from_config(config))

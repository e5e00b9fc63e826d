"""``barnraise join``: lend this machine to a run."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from barnraise.protocol.errors import PeerError
from barnraise.tui.console import examples

MBIT = 125_000  # bytes/s
MIN_MBIT = 0.256  # slower, and others would take the node for one that has stalled

EXAMPLES = (
    examples(
        "join /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...",
        "join /ip4/127.0.0.1/tcp/4001/p2p/12D3KooW... --data node-2 --key node-2.key",
        "join /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW... --up-mbit 5 --monthly-gb 300",
    )
    + "\n\nThe operator gives you the address. Ctrl-C leaves the run; what was acknowledged stays yours."
)


def default_threads() -> int:
    """Half of the cores: the machine stays usable (R14)."""
    return max(1, (os.cpu_count() or 2) // 2)


def join(
    address: str = typer.Argument(
        ..., metavar="MULTIADDR", help="The coordinator's address, ending in /p2p/<peer id>."
    ),
    data: Path | None = typer.Option(
        None,
        "--data",
        metavar="DIR",
        help="Where weights and receipts are kept (default: ~/.local/share/barnraise).",
    ),
    key: Path | None = typer.Option(
        None,
        "--key",
        metavar="FILE",
        help="Key file, made on first use (default: ~/.config/barnraise/node.key).",
    ),
    name: str | None = typer.Option(
        None, "--name", metavar="TEXT", help="What others see beside your credit (default: host name)."
    ),
    listen: list[str] = typer.Option(
        ["/ip4/0.0.0.0/tcp/0"],
        "--listen",
        metavar="ADDR",
        help="Where peers may fetch shards from you; TCP port 0 takes any.",
    ),
    threads: int = typer.Option(
        default_threads(),
        "--threads",
        metavar="N",
        min=1,
        max=1024,
        help="Threads for the engine, by default half of the cores.",
    ),
    disk: int = typer.Option(
        20, "--disk-gb", metavar="GB", min=1, max=100_000, help="Most disk to use for weights."
    ),
    up: float | None = typer.Option(
        None,
        "--up-mbit",
        metavar="MBIT",
        min=MIN_MBIT,
        max=1_000_000,
        help="Cap on what is sent, serving others included, in Mbit/s (default: none).",
    ),
    down: float | None = typer.Option(
        None,
        "--down-mbit",
        metavar="MBIT",
        min=MIN_MBIT,
        max=1_000_000,
        help="Cap on what is received, in Mbit/s (default: none).",
    ),
    monthly: float | None = typer.Option(
        None,
        "--monthly-gb",
        metavar="GB",
        min=0.001,
        max=10_000_000,
        help="Most traffic a calendar month, up and down; then the node pauses (default: any).",
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask before joining."),
    leave_when_complete: bool = typer.Option(
        False, "--exit-when-complete", help="End when the run has published its last version."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print events as JSON lines."),
) -> None:
    """Join a run: fetch the weights, generate rollouts, earn credit."""
    from barnraise.node.config import NodeConfig, default_data_path, default_key_path
    from barnraise.node.main import run_from_config

    if data is not None and data.exists() and not data.is_dir():
        raise typer.BadParameter(f"{data} is a file; name a folder", param_hint="--data")
    config = NodeConfig(
        address=address,
        data=data or default_data_path(),
        key=key or default_key_path(),
        name=name,
        listen=tuple(listen),
        threads=threads,
        disk_bytes=disk * 10**9,
        up_bytes_s=None if up is None else up * MBIT,
        down_bytes_s=None if down is None else down * MBIT,
        monthly_bytes=None if monthly is None else round(monthly * 1e9),
        assume_yes=yes,
        exit_when_complete=leave_when_complete,
        json_lines=as_json,
    )
    try:
        code = run_from_config(config)
    except PeerError as error:  # an address to listen on that is malformed or taken
        raise typer.BadParameter(str(error), param_hint="--listen") from error
    raise typer.Exit(code)

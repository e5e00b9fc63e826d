"""``barnraise doctor``: what this machine can do for a run, and why what it has is not used (R11)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio
import typer

from barnraise.node.chosen import default_threads
from barnraise.protocol.errors import PeerError
from barnraise.tui.console import console, emit_json, examples, is_plain

if TYPE_CHECKING:
    from barnraise.node.bench import Measured
    from barnraise.node.findings import Finding

EXAMPLES = examples(
    "doctor",
    "doctor --coordinator /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...",
    "doctor --quick --data node-1 --key node-1.key --json",
)
MARKS = {"ok": "ok", "note": "note", "warning": "warn", "problem": "PROBLEM"}
STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


def doctor(
    coordinator: str | None = typer.Option(
        None,
        "--coordinator",
        metavar="MULTIADDR",
        help="Also try to reach this coordinator, be reached by it, and compare clocks. Joins nothing.",
    ),
    quick: bool = typer.Option(False, "--quick", help="Measure neither the disk nor the engine."),
    data: Path | None = typer.Option(
        None, "--data", metavar="DIR", help="The node's data folder (default: ~/.local/share/barnraise)."
    ),
    key: Path | None = typer.Option(
        None, "--key", metavar="FILE", help="The node's key file (default: ~/.config/barnraise/node.key)."
    ),
    threads: int = typer.Option(
        default_threads(), "--threads", metavar="N", min=1, max=1024, help="Threads meant for the engine."
    ),
    listen: str = typer.Option(
        "/ip4/0.0.0.0/tcp/0",
        "--listen",
        metavar="MULTIADDR",
        help="Where a node would listen, for --coordinator; no node may be running there.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Say what this machine can do, and measure the engine.

    Looks at processor, GPUs, memory, disk, key, clock and network. Takes about 20 seconds. Exit 1 if
    something keeps a node from working.
    """
    from barnraise.node.config import default_data_path, default_key_path

    places = data or default_data_path(), key or default_key_path()
    found, measured = trio.run(_look, *places, threads, quick, coordinator, listen, as_json)
    ok = all(finding.status != "problem" for finding in found)
    if as_json:
        emit_json(
            {
                "ok": ok,
                "findings": [msgspec.to_builtins(finding) for finding in found],
                "engine": None if measured is None else _engine(measured),
            }
        )
        raise typer.Exit(0 if ok else 1)
    wrong = sum(finding.status == "problem" for finding in found)
    typer.echo("this machine can join a run" if ok else f"{wrong} problem(s) keep a node from working here")
    raise typer.Exit(0 if ok else 1)


async def _look(
    data: Path, key: Path, threads: int, quick: bool, coordinator: str | None, listen: str, as_json: bool
) -> tuple[list[Finding], Measured | None]:
    from barnraise.node.doctor import examine

    found: list[Finding] = []
    results: list[Measured] = []
    say = _Progress(quiet=as_json)

    def show(finding: Finding) -> None:
        found.append(finding)
        if not as_json:
            say.clear()
            _print(finding)

    say("looking at this machine")
    async for finding in examine(data, key, threads, quick=quick, tell=say, on_measured=results.append):
        show(finding)
    if coordinator is not None:
        say("asking the coordinator; being dialled back takes up to 40 s")
        for finding in await _ask_coordinator(coordinator, listen):
            show(finding)
    say.clear()
    if results:
        _keep(data, results[0])
    return found, results[0] if results else None


async def _ask_coordinator(address: str, listen: str) -> list[Finding]:
    from barnraise.node.findings import Finding
    from barnraise.node.network_check import check_network
    from barnraise.protocol.addresses import parse_address
    from barnraise.protocol.identity import Identity
    from barnraise.protocol.libp2p_network import open_libp2p

    try:
        parse_address(address)
        async with open_libp2p(Identity.generate(), (listen,)) as network:
            return await check_network(network, address)
    except PeerError as error:
        return [Finding("network", "problem", str(error), "compare --coordinator and --listen")]
    except BaseExceptionGroup as group:
        peer, rest = group.split(PeerError)
        if rest is not None or peer is None:
            raise
        return [Finding("network", "problem", str(peer.exceptions[0]), "compare --coordinator and --listen")]


def _keep(data: Path, measured: Measured) -> None:
    """Leave the result for the node, if it has a folder already."""
    from barnraise.node.hardware import keep_measured

    if data.is_dir():
        keep_measured(data, measured)


def _engine(measured: Measured) -> dict[str, object]:
    return {
        **{name: value for name, value in msgspec.to_builtins(measured).items() if name != "type"},
        "tokens_per_s": round(measured.tokens_per_s, 1),
        "gflops": round(measured.gflops, 2),
    }


def _print(finding: Finding) -> None:
    from rich.table import Table
    from rich.text import Text

    if is_plain(False):
        cure = f" -> {finding.cure}" if finding.cure else ""
        typer.echo(f"{MARKS[finding.status]:7}  {finding.subject:9}  {finding.text}{cure}")
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(width=7)
    table.add_column(width=9)
    table.add_column(overflow="fold")
    text = finding.text + (f"\n-> {finding.cure}" if finding.cure else "")
    table.add_row(Text(MARKS[finding.status], STYLES[finding.status]), finding.subject, Text(text))
    console().print(table)


class _Progress:
    """What is being done, on stderr: one line that is overwritten on a terminal, else a line per step."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty() and not is_plain(False)
        self._last = ""

    def __call__(self, text: str) -> None:
        subject = text if self._terminal else text.partition(":")[0]
        if self._quiet or subject == self._last:
            return
        self._last = subject
        before = "\r\x1b[2K" if self._terminal else ""
        typer.echo(f"{before}{subject} ...", err=True, nl=not self._terminal)

    def clear(self) -> None:
        """Make room for a finding."""
        if self._terminal and self._last:
            typer.echo("\r\x1b[2K", err=True, nl=False)
            self._last = ""

"""``barnraise join``: lend this machine to a run.

At a terminal the node is started in the background, or found there, and the app shows it.
Else, and with ``--headless``, ``--plain``, ``--json`` or NO_COLOR, it runs in the foreground and
prints lines (R24). Exit codes are the same either way as far as the node's start goes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import typer

from barnraise.node.chosen import default_threads as default_threads
from barnraise.node.config import NodeConfig, default_data_path, default_key_path
from barnraise.node.engine_choice import ENGINES
from barnraise.protocol.errors import BarnraiseError, PeerError
from barnraise.tui import attached, background
from barnraise.tui.console import examples, is_plain
from barnraise.tui.given_invite import invite_word, keep_invite
from barnraise.tui.join_arguments import as_given
from barnraise.tui.limit_notes import note_disk, note_threads

MBIT = 125_000  # bytes/s
MIN_MBIT = 0.256  # slower, and others would take the node for one that has stalled

EXAMPLES = (
    examples(
        "join /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...",
        "join     (the run joined last, once more)",
        "join my-run     (one joined before, by its name or the beginning of its id)",
        "join /ip4/127.0.0.1/tcp/4001/p2p/12D3KooW... --data node-2 --key node-2.key",
        "join /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW... --up-mbit 5 --monthly-gb 300",
    )
    + "\n\nThe operator gives you the address. At a terminal the node works in the background and an app "
    "shows it; closing the app stops nothing, 'barnraise leave' does. With lines in the foreground Ctrl-C "
    "leaves the run. What was acknowledged stays yours."
)


def join(
    context: typer.Context,
    address: str | None = typer.Argument(
        None,
        metavar="[MULTIADDR|RUN]",
        show_default=False,
        help="The coordinator's address, ending in /p2p/<peer id>; or the name or id of a run joined "
        "before. Left out: the one joined last.",
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
        None,
        "--name",
        metavar="TEXT",
        help="What others see beside your credit (default: as before with this key, else by its key).",
    ),
    listen: list[str] = typer.Option(
        ["/ip4/0.0.0.0/tcp/0"],
        "--listen",
        metavar="ADDR",
        help="Where peers may fetch shards from you; TCP port 0 takes any.",
    ),
    engine: str = typer.Option(
        "auto",
        "--engine",
        metavar="|".join(ENGINES),
        help="What generates: vllm where it is installed and there is a GPU, else torch (auto).",
    ),
    threads: int | None = typer.Option(
        None,
        "--threads",
        metavar="N",
        min=1,
        max=1024,
        help="Threads for the engine (default: as set by 'barnraise limits set', else half of the cores).",
    ),
    disk: int | None = typer.Option(
        None,
        "--disk-gb",
        metavar="GB",
        min=1,
        max=100_000,
        help="Most disk to use for weights (default: as set by 'barnraise limits set', else 20).",
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
    invite: str | None = typer.Option(
        None,
        "--invite",
        metavar="WORD|FILE",
        help="What the operator of a run that is not open to everybody sent you; needed once per key. "
        "Arguments can be seen by all users of a machine: on a shared one give a file.",
    ),
    yes: bool = typer.Option(
        False, "--yes", "-y", help="Ask nothing: neither before joining, nor for limits at a first start."
    ),
    leave_when_complete: bool = typer.Option(
        False, "--exit-when-complete", help="End when the run has published its last version."
    ),
    headless: bool = typer.Option(
        False, "--headless", help="Run in the foreground with plain lines: for services and scripts."
    ),
    plain: bool = typer.Option(False, "--plain", help="Lines in the foreground, no app (also: NO_COLOR)."),
    as_json: bool = typer.Option(False, "--json", help="The same, each event a JSON line."),
    in_background: bool = typer.Option(
        False, "--background", hidden=True, help="How the node is started in the background: no output."
    ),
) -> None:
    """Join a run: fetch weights, generate rollouts, earn credit."""
    if engine not in ENGINES:
        raise typer.BadParameter(f"{engine!r} is none of {', '.join(ENGINES)}", param_hint="--engine")
    if data is not None and data.exists() and not data.is_dir():
        raise typer.BadParameter(f"{data} is a file; name a folder", param_hint="--data")
    place = Path(os.path.abspath(data or default_data_path()))
    person = not (headless or in_background) and sys.stdin.isatty() and sys.stdout.isatty()
    attaches = person and bool(background.state_in(place) is not None or background.waiting_in(place))
    # Without an address whatever runs is meant: it needs none to be shown.
    addresses = ("",) if attaches and address is None else known_addresses(address, place)
    config = NodeConfig(
        address=addresses[0],
        more_addresses=addresses[1:],
        data=place,
        key=Path(os.path.abspath(key or default_key_path())),
        name=name,
        listen=tuple(listen),
        engine=engine,
        threads=threads or 0,
        disk_bytes=(disk or 0) * 10**9,
        up_bytes_s=None if up is None else up * MBIT,
        down_bytes_s=None if down is None else down * MBIT,
        monthly_bytes=None if monthly is None else round(monthly * 1e9),
        invite="" if invite is None else invite_word(invite),
        assume_yes=yes,
        exit_when_complete=leave_when_complete,
        json_lines=as_json,
        background=in_background,
    )
    if not (in_background or attaches):
        note_disk("--disk-gb", place, config.disk_bytes or None)
        note_threads("--threads", threads)
    lines = plain or as_json or is_plain(False) or bool(os.environ.get("NO_COLOR"))
    if not person:
        raise typer.Exit(_foreground(config))
    if attaches:
        raise typer.Exit(_attach(config, lines, as_json))
    check_address(config.address)
    from barnraise.tui import first_start  # imports much

    if first_start.is_first(config) and not (yes or as_json):
        first_start.guide(config, typer.echo, first_start.ask_at_terminal)
    if lines:
        raise typer.Exit(_foreground(config))
    if invite is not None:
        keep_invite(invite, place)
    raise typer.Exit(_background(config, as_given(context)))


def _foreground(config: NodeConfig) -> int:
    from barnraise.node.main import run_from_config

    try:
        return run_from_config(config)
    except PeerError as error:  # an address to listen on that is malformed or taken
        raise typer.BadParameter(str(error), param_hint="--listen") from error


def known_addresses(given: str | None, data: Path) -> tuple[str, ...]:
    """An address as it is; for a run joined before, or None for the last one, where it was met.

    Raises:
        typer.BadParameter: no such run was joined from ``data``, or several may be meant.
        StorageError: what is remembered cannot be read.
    """
    if given is not None and "/" in given:
        return (given,)
    from barnraise.node.known import KnownRuns

    try:
        return KnownRuns(data / "known.json").lead(given).addresses
    except PeerError as error:
        raise typer.BadParameter(str(error), param_hint="MULTIADDR") from error


def check_address(address: str) -> None:
    """Find out before anything is made that the coordinator's address cannot be one.

    Raises:
        typer.BadParameter: it cannot.
    """
    from barnraise.protocol.addresses import parse_address

    try:
        parse_address(address)
    except PeerError as error:
        raise typer.BadParameter(str(error), param_hint="MULTIADDR") from error


def _background(config: NodeConfig, arguments: list[str]) -> int:
    started, _ = background.start(arguments, config.data, typer.echo)
    try:
        code = attached.ask_once(config.data, config.assume_yes, typer.echo, started)
    except (KeyboardInterrupt, typer.Abort):
        started.terminate()  # no answer is no consent
        attached.complain("the node in the background is ended, too")
        raise
    return attached.show(config.data, started) if code is None else code


def _attach(config: NodeConfig, lines: bool, as_json: bool) -> int:
    """Show the node that runs in the folder already."""
    state = _awaited(config.data)
    serves, wanted = str(state.get("coordinator") or ""), config.address.rpartition("/")[2]
    if state.get("kind") != "node" or (serves and wanted and serves != wanted):
        raise BarnraiseError(
            f"what runs in {config.data} works for coordinator {serves or '?'}, not for {wanted}: "
            "'barnraise leave' ends it; or choose another folder with --data (and another --key)"
        )
    if not as_json:
        typer.echo(
            f"a node runs in {config.data} already (process {state.get('pid', '?')}): this shows it; "
            "options given now do not change it"
        )
    code = attached.ask_once(config.data, config.assume_yes, typer.echo, None)
    if code is not None:
        return code
    return attached.lines(config.data, as_json) if lines else attached.show(config.data, None)


def _awaited(data: Path) -> background.State:
    """The state of the node in ``data``, once one that crashed has started again."""
    deadline = time.monotonic() + background.START_S
    told = ""
    while (state := background.state_in(data)) is None:
        waits = background.waiting_in(data)
        if not waits or time.monotonic() > deadline:
            raise BarnraiseError(f"no node answers in {data}; see {data / 'node.log'}")
        if waits.partition(";")[0] != told:
            told = waits.partition(";")[0]
            typer.echo(waits)
        time.sleep(background.LOOK_EVERY_S)
    return state

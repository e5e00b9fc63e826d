"""``barnraise coordinator``: serve a run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from barnraise.protocol.control_client import send_command
from barnraise.protocol.errors import AbsentError, BarnraiseError, MalformedError, PeerError
from barnraise.tui.console import emit_json, examples, rounds, size
from barnraise.tui.status import no_answer

if TYPE_CHECKING:
    from barnraise.coordinator.run_file import Serve

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
    context: typer.Context,
    folder: Path = typer.Argument(..., metavar="DIR", help="A run folder made by 'barnraise run init'."),
    listen: list[str] = typer.Option(
        ["/ip4/0.0.0.0/tcp/4001"], "--listen", metavar="ADDR", help="Where to listen, TCP; may be repeated."
    ),
    threads: int = typer.Option(
        1, "--threads", metavar="N", min=1, max=1024, help="Threads each for every verifier and the learner."
    ),
    verifiers: str = typer.Option(
        "",
        "--verifiers",
        metavar="N|auto",
        help="Verifier processes here, each with the model in memory; auto: one per GPU, else by cores. "
        "[default: 1, or none with --verifier-at]",
    ),
    mirror: list[str] = typer.Option(
        [],
        "--mirror",
        metavar="URL",
        help="Static file host that has the shards (see export-store), named to nodes in new versions; "
        "may be repeated.",
    ),
    upload_copies: float = typer.Option(
        0.0,
        "--upload-copies",
        metavar="X",
        min=0.0,
        help="Upload about X copies of each version down the broadcast tree, such as 1.5; 0: no limit.",
    ),
    relay: float = typer.Option(
        0.0,
        "--relay-mbit",
        metavar="MBIT",
        min=0.0,
        max=100_000,
        help="Carry shards between nodes behind NAT that cannot reach each other, all together at this "
        "rate; 0: only help them to connect directly.",
    ),
    verify_all: bool = typer.Option(
        False,
        "--verify-all",
        help="Verify everything in full, however long the queue (default: under a backlog, proven nodes' "
        "work is audited at random).",
    ),
    replay: bool = typer.Option(
        False,
        "--replay",
        help="Fold every event of the journal from the first on instead of beginning with a snapshot, and "
        "compare the snapshots with it.",
    ),
    http: str = typer.Option(
        "",
        "--http",
        metavar="HOST:PORT",
        help="Where to serve the web page, the API and metrics; 0.0.0.0:8080 shows them to everybody. "
        "[default: 127.0.0.1:8080, or another port if that is taken]",
    ),
    no_http: bool = typer.Option(False, "--no-http", help="Serve no web page."),
    admin: str = typer.Option(
        "local",
        "--admin",
        metavar="local|proxy|clear|off",
        help="Who may use the admin API, with the token of 'coordinator token': this machine; also through a "
        "TLS proxy on it; everybody whom the page is served to, the token in clear; nobody.",
    ),
    learners: str = typer.Option(
        "1",
        "--learner-processes",
        metavar="N|auto",
        help="Processes over which the learner's model is sharded; auto: one per GPU.",
    ),
    recompute: bool = typer.Option(
        False,
        "--learner-recompute",
        help="Keep no activations inside of layers but compute them twice: less memory, more time.",
    ),
    learner_devices: str = typer.Option(
        "", "--learner-devices", metavar="0,1", help="GPUs for the learner. [default: all]"
    ),
    verifier_devices: str = typer.Option(
        "", "--verifier-devices", metavar="2,3", help="GPUs for verifiers, in turn. [default: all]"
    ),
    verifier_at: list[str] = typer.Option(
        [],
        "--verifier-at",
        metavar="COMMAND",
        help="A verifier on another machine: what starts it, such as 'ssh gpu-box barnraise worker'; "
        "may be repeated.",
    ),
    learner_at: str = typer.Option(
        "", "--learner-at", metavar="COMMAND", help="The learner on another machine, in the same way."
    ),
    torchrun: str = typer.Option(
        "",
        "--learner-torchrun",
        metavar="OPTIONS",
        help="Start the learner's processes with torchrun and these options, for several machines.",
    ),
) -> None:
    """Run the coordinator until Ctrl-C; started again, it goes on where it was."""
    from barnraise.coordinator.main import run_from_folder
    from barnraise.coordinator.newcomers import NewcomerLimits
    from barnraise.coordinator.run_bounds import too_small
    from barnraise.coordinator.run_file import floor_of, operating
    from barnraise.coordinator.scale import read_spread
    from barnraise.coordinator.web.gate import Access
    from barnraise.coordinator.web.listen import Bind, read_bind
    from barnraise.protocol.mirrors import MAX_MIRRORS, check_mirror

    file = operating(folder)
    values = served(context, file.serve)
    listen, http, no_http = list(values["listen"]), values["http"], values["no_http"]
    access = values["admin"]
    if access not in get_args(Access):
        raise typer.BadParameter("local, proxy, clear or off", param_hint="--admin")
    threads, verifiers, verify_all = values["threads"], values["verifiers"], values["verify_all"]
    mirror, upload_copies, relay = list(values["mirrors"]), values["upload_copies"], values["relay_mbit"]
    learners, recompute, torchrun = (
        values["learner_processes"],
        values["learner_recompute"],
        values["learner_torchrun"],
    )
    learner_devices, verifier_devices = values["learner_devices"], values["verifier_devices"]
    if len(mirror) > MAX_MIRRORS:
        raise typer.BadParameter(f"at most {MAX_MIRRORS} mirrors", param_hint="--mirror")
    if 0 < upload_copies < 1:
        raise typer.BadParameter(
            "0, or at least 1: nobody could get a whole version", param_hint="--upload-copies"
        )
    if wrong := too_small({"serve.relay_mbit": relay}):
        raise typer.BadParameter(wrong, param_hint="--relay-mbit")
    if http and no_http:
        raise typer.BadParameter("choose one of --http and --no-http", param_hint="--http")
    try:
        bind = None if no_http else read_bind(http) if http else Bind()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--http") from error
    for url in mirror:
        try:
            check_mirror(url)
        except MalformedError as error:
            raise typer.BadParameter(str(error), param_hint="--mirror") from error
    try:
        spread = read_spread(
            learners,
            recompute,
            learner_devices,
            verifier_devices,
            torchrun,
            verifiers_at=values["verifier_at"],
            learner_at=values["learner_at"],
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--learner-processes") from error
    try:
        code = run_from_folder(
            folder,
            listen=tuple(listen),
            threads=threads,
            verifiers=_verifier_count(verifiers),
            verify_all=verify_all,
            replay=replay,
            mirrors=tuple(mirror),
            upload_copies=upload_copies,
            relay_bytes_s=relay * 125_000,
            http=bind,
            admin=access,
            spread=spread,
            keep=file.keep,
            guards=file.guards,
            floor=floor_of(file.serve),
            newcomers=NewcomerLimits(file.serve.new_keys_per_day, file.serve.limit_private),
        )
    except PeerError as error:  # an address that is malformed or taken
        hint = "--http" if "--http" in str(error) else "--listen"
        raise typer.BadParameter(str(error), param_hint=hint) from error
    raise typer.Exit(code)


_OPTIONS = {"mirrors": "mirror", "relay_mbit": "relay", "learner_processes": "learners"}
_OPTIONS |= {"learner_recompute": "recompute", "learner_torchrun": "torchrun"}


def served(context: typer.Context, serve: Serve) -> dict[str, Any]:
    """``[serve]`` of the run file by key, where the command line says nothing else."""
    found = {}
    for key in serve.__struct_fields__:
        option = _OPTIONS.get(key, key)
        source = context.get_parameter_source(option)
        typed = source is not None and source.name == "COMMANDLINE"
        found[key] = context.params[option] if typed else getattr(serve, key)
    if context.params["http"]:
        found["no_http"] = False
    if context.params["no_http"]:
        found["http"] = ""
    return found


def _verifier_count(text: str) -> int | None:
    """``--verifiers`` as a number; 0 stands for auto, None for nothing said."""
    from barnraise.coordinator.verifier_pool import MAX_VERIFIERS

    if not text:
        return None
    if text == "auto":
        return 0
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_VERIFIERS):
        raise typer.BadParameter(f"a number from 1 to {MAX_VERIFIERS}, or auto", param_hint="--verifiers")
    return int(text)


@app.command(
    "export-store",
    short_help="Write a run's shards as a static file host serves them.",
    epilog=examples(
        "coordinator export-store ./my-run /srv/www/my-run",
        "coordinator export-store ./my-run /srv/www/my-run --prune --every 5",
        "coordinator run ./my-run --mirror https://host/my-run      (to name it to nodes)",
    ),
)
def export_store(
    folder: Path = typer.Argument(..., metavar="DIR", help="A run folder; its coordinator may be running."),
    target: Path = typer.Argument(..., metavar="TARGET", help="Where to write; what is there stays."),
    versions: int = typer.Option(
        1, "--versions", metavar="N", min=1, max=100, help="How many of the newest versions, if still there."
    ),
    prune: bool = typer.Option(False, "--prune", help="Delete the shards of other versions there."),
    every: float | None = typer.Option(
        None, "--every", metavar="SECONDS", min=0.5, max=86_400, help="Go on, until Ctrl-C (default: once)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line."),
) -> None:
    """Write the shards of the newest version to TARGET/shards, for any web server or bucket."""
    from barnraise.coordinator.mirror import export_store as export

    told: int | None = None
    for _ in rounds(every):
        done = export(folder, target, versions=versions, prune=prune)
        if told is None or done.written or done.removed or done.version != told:
            told = done.version
            if as_json:
                emit_json(done._asdict())
            else:
                gone = f", {done.removed} old ones deleted" if done.removed else ""
                typer.echo(
                    f"version {done.version}: {done.shards} shards, {size(done.size)}, in {target}; "
                    f"{done.written} written ({size(done.written_bytes)}){gone}"
                )


@app.command(
    short_help="Give a node no work for a while.",
    epilog=examples(
        "coordinator ban ./my-run 12D3KooW... --reason 'floods others' --for 7d",
        "coordinator ban ./my-run anna --reason 'asked to stop'",
    ),
)
def ban(
    folder: Path = typer.Argument(..., metavar="DIR", help="The folder of a run that is being served."),
    node: str = typer.Argument(
        ..., metavar="NODE", help="Its peer id or the end of it, its key's start, or its name."
    ),
    reason: str = typer.Option(..., "--reason", metavar="TEXT", help="Why; the node and the ledger show it."),
    lasting: str = typer.Option("1d", "--for", metavar="TIME", help="How long: 90m, 12h, 7d."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Ban a node: it gets no work and none is taken from it, until the time is over or 'unban'.

    The ban stands in the public ledger with its reason. A new one replaces that in force. It
    holds for one key: whoever makes another comes back as a newcomer.
    """
    seconds = seconds_of(lasting)
    reply = command(folder, "ban", node=node, reason=reason, seconds=seconds)
    end = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(int(reply["until"]) / 1000))
    if as_json:
        emit_json(reply)
    else:
        typer.echo(f"{reply['name']} ({reply['node']}) is banned until {end}")


@app.command(short_help="End a node's ban.", epilog=examples("coordinator unban ./my-run anna"))
def unban(
    folder: Path = typer.Argument(..., metavar="DIR", help="The folder of a run that is being served."),
    node: str = typer.Argument(..., metavar="NODE", help="As for 'ban'."),
    reason: str = typer.Option("", "--reason", metavar="TEXT", help="Why; the ledger shows it."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """End a node's ban now, whether the operator made it or the rule did."""
    reply = command(folder, "unban", node=node, reason=reason)
    if as_json:
        emit_json(reply)
    else:
        typer.echo(f"{reply['name']} ({reply['node']}) is not banned")


def command(folder: Path, name: str, **arguments: Any) -> dict[str, Any]:
    """Have the coordinator that serves ``folder`` do something.

    Raises:
        BarnraiseError: it refused, with its words; or none serves the folder.
    """
    with answering(folder) as socket:
        return send_command(socket, name, **arguments)


@contextmanager
def answering(folder: Path) -> Iterator[Path]:
    """The control socket of the coordinator that serves ``folder``, for asking it something.

    Raises:
        BarnraiseError: none answers.
    """
    try:
        yield folder / "control.sock"
    except (PeerError, OSError) as error:
        if not isinstance(error, AbsentError):
            raise BarnraiseError(no_answer(folder, error)) from error
        raise BarnraiseError(
            f"no coordinator answers in {folder} ({error}); "
            f"start it with 'barnraise coordinator run {folder}'"
        ) from error


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds_of(text: str) -> int:
    """A time as 90m, 12h or 7d, in seconds. Raises typer.BadParameter."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text.strip())
    if match is None or not 0 < int(match[1]) * _UNITS[match[2]] <= 3650 * 86_400:
        raise typer.BadParameter("write it like 90m, 12h or 7d, at most 3650d", param_hint="--for")
    return int(match[1]) * _UNITS[match[2]]

"""``barnraise demo``: the whole system on one machine, every part real.

A run is made, then one coordinator and some nodes run as separate processes that
talk libp2p over loopback, exactly as ``barnraise coordinator run`` and ``barnraise
join`` start them. This process only starts, watches, restarts and ends them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import typer
from rich.live import Live

from barnraise.protocol.control_client import read_state
from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.console import console, duration, examples, is_plain
from barnraise.tui.demo_processes import Supervisor, barnraise, die_with_parent, last_lines
from barnraise.tui.demo_report import report, summary_lines
from barnraise.tui.demo_view import State, panel, plain_line

EXAMPLES = examples(
    "demo",
    "demo --seed 1 --nodes 2 --keep ./demo-run",
    "demo --model smollm2 --json",
    "demo --phase posttrain     (a ready-made model, rewards alone: about a minute)",
    "status ./demo-run/run      (in another terminal, while it runs)",
)
PHASES = ("posttrain", "pretrain", "both")
REFRESH_S = 0.5
MEASURE_EVERY_S = 2.0
PLAIN_EVERY_S = 5.0
START_PATIENCE_S = 90.0


class Interrupted:
    """Ends the demo on a signal; a ``KeyboardInterrupt`` alone is lost where errors are ignored."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self, number: int, frame: object) -> None:
        self._asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if a signal came."""
        if self._asked:
            raise KeyboardInterrupt


def demo(
    seed: int = typer.Option(
        0,
        "--seed",
        metavar="N",
        min=0,
        max=2**31,
        help="Seed of model, tasks and run (with --keep the run's key, and so its order, is new).",
    ),
    nodes: int = typer.Option(3, "--nodes", metavar="N", min=1, max=16, help="How many volunteers to start."),
    minutes: float = typer.Option(
        0.0,
        "--minutes",
        metavar="MINUTES",
        min=0.0,
        help="Train for at most this long, once all is up (0: 12; 6 for posttrain; 30 for smollm2).",
    ),
    model: str = typer.Option(
        "demo",
        "--model",
        metavar="NAME",
        help="'demo' (0.8 M parameters, learns in minutes) or 'smollm2' (135 M).",
    ),
    phase: str = typer.Option(
        "",
        "--phase",
        metavar="PHASE",
        help="'pretrain': make a model from text in two blocks; 'posttrain': improve one by rewards; "
        "'both' (default; smollm2: posttrain).",
    ),
    versions: int = typer.Option(
        0, "--versions", metavar="N", min=0, help="Policy versions to publish (0: the preset's)."
    ),
    keep: Path | None = typer.Option(
        None, "--keep", metavar="DIR", help="Keep run, nodes and logs in DIR (new or empty)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line."),
    plain: bool = typer.Option(False, "--plain", help="Lines instead of a live table."),
) -> None:
    """Raise a model on this machine, with three volunteers."""
    if model not in ("demo", "smollm2"):
        raise typer.BadParameter(f"'{model}' is neither 'demo' nor 'smollm2'", param_hint="--model")
    phase = phase or ("both" if model == "demo" else "posttrain")
    if phase not in PHASES:
        raise typer.BadParameter(f"'{phase}' is none of {', '.join(PHASES)}", param_hint="--phase")
    if phase != "posttrain" and model != "demo":
        raise typer.BadParameter("only the model 'demo' is pretrained here", param_hint="--phase")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise typer.BadParameter(f"{keep} exists and is not an empty folder", param_hint="--keep")
    minutes = minutes or (30.0 if model != "demo" else 6.0 if phase == "posttrain" else 12.0)
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot make {keep}: {error.strerror}", param_hint="--keep") from error
    interrupted = Interrupted()
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    say: Callable[[str], None] = lambda text: typer.echo(text, err=as_json)  # noqa: E731
    with tempfile.TemporaryDirectory(prefix="barnraise-demo-") as scratch:
        raise typer.Exit(
            _demo(
                keep,
                Path(scratch),
                model,
                phase,
                seed,
                nodes,
                minutes,
                versions,
                as_json,
                is_plain(plain or as_json),
                say,
                interrupted,
            )
        )


def _demo(
    keep: Path | None,
    scratch: Path,
    model: str,
    phase: str,
    seed: int,
    count: int,
    minutes: float,
    versions: int,
    as_json: bool,
    plain: bool,
    say: Callable[[str], None],
    interrupted: Interrupted,
) -> int:
    started = time.monotonic()
    folder = keep or scratch
    run = folder / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    say(
        "making the run: a model and its task"
        if phase == "posttrain"
        else "making the run: a text and a plan"
    )
    _make_run(run, model, phase, seed, versions, keep is None, environment, say)
    making = time.monotonic() - started
    say(f"starting one coordinator and {count} node{'s' if count > 1 else ''}, each a process of its own")
    with Supervisor(environment) as supervisor:
        supervisor.start(
            "coordinator",
            barnraise("coordinator", "run", str(run), "--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1"),
            folder / "logs" / "coordinator.log",
        )
        address = _wait_for_address(supervisor, run, interrupted)
        say(f"coordinator ready at {address}")
        if keep is not None:
            say(f"logs of all processes: {folder / 'logs'}")
        homes = {f"node-{index + 1}": folder / f"node-{index + 1}" for index in range(count)}
        for name, home in homes.items():
            command = barnraise("join", address, "--headless", "--yes", "--name", name, "--threads", "1")
            command += [
                "--data",
                str(home),
                "--key",
                str(home / "node.key"),
                "--listen",
                "/ip4/127.0.0.1/tcp/0",
            ]
            supervisor.start(name, command, folder / "logs" / f"{name}.log")
        try:
            final = _watch(supervisor, run, homes, minutes * 60, plain, say, interrupted)
        finally:
            say("ending the processes")
    memory = {member.name: member.peak_memory for member in supervisor.members}
    say("verifying the ledger offline, drawing the chart")
    result = report(run, final, model, seed, count, time.monotonic() - started, making, memory)
    if keep is None:
        result["charts"] = []  # they go with the folder
    for line in summary_lines(result, keep):
        say(line)
    if as_json:
        typer.echo(json.dumps(result, sort_keys=True))
    return 0 if result["ledger_ok"] and result["versions"] > 0 else 1


def _make_run(
    run: Path,
    model: str,
    phase: str,
    seed: int,
    versions: int,
    throw_away: bool,
    environment: dict[str, str],
    say: Callable[[str], None],
) -> None:
    """``barnraise run init`` in a process of its own: torch's memory goes when it ends.

    ``throw_away``: the run's key follows from the seed (``barnraise.tui.demo_key``).
    """
    command = barnraise("run", "init", str(run), "--model", model, "--seed", str(seed))
    if phase != "posttrain":
        command += ["--phase", "pretrain", "--then-posttrain" if phase == "both" else "--no-posttrain"]
    if versions:
        command += ["--versions", str(versions)]
    if throw_away:
        command.append("--throw-away")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    tail: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            if "serve it with" not in line:  # the demo does that itself
                say(f"  {line.rstrip()}")
        if process.wait() != 0:
            raise BarnraiseError(f"the run could not be made: {tail[-1] if tail else 'no output'}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _wait_for_address(supervisor: Supervisor, run: Path, interrupted: Interrupted) -> str:
    deadline = time.monotonic() + START_PATIENCE_S
    coordinator = supervisor.members[0]
    while time.monotonic() < deadline:
        interrupted.check()
        state = state_of(run)
        if state and state.get("address"):
            return str(state["address"])
        if coordinator.process.poll() is not None:
            break
        time.sleep(0.2)
    raise BarnraiseError(f"the coordinator did not start: {last_lines(coordinator.log, 1) or 'no output'}")


def state_of(folder: Path) -> State | None:
    """The state tree pushed by the process that owns ``folder``, or None while it is not up."""
    try:
        return read_state(folder / "control.sock")
    except (BarnraiseError, OSError):
        return None


def _watch(
    supervisor: Supervisor,
    run: Path,
    homes: dict[str, Path],
    limit_s: float,
    plain: bool,
    say: Callable[[str], None],
    interrupted: Interrupted,
) -> State:
    """Show progress until the run is complete or time is up; return the coordinator's last state."""
    final: State = {}
    notes: list[str] = []
    started = time.monotonic()
    shown = measured = 0.0
    last_words = ""
    live = None if plain else Live(console=console(), refresh_per_second=4, transient=False)
    if live:
        live.start()
    try:
        while True:
            interrupted.check()
            state = state_of(run)
            final = state or final
            nodes = {name: state_of(home) for name, home in homes.items()}
            now = time.monotonic()
            if now - measured >= MEASURE_EVERY_S:
                measured = now
                supervisor.measure()
            for line in supervisor.revive():
                notes.append(line)
                if plain:
                    say(line)
            if live:
                live.update(panel(state, nodes, now - started, limit_s, notes))
            elif now - shown >= PLAIN_EVERY_S:
                shown = now
                say(plain_line(state, nodes, now - started))
            if final.get("complete") and state is not None:
                return final
            paused = final.get("paused")
            if paused and paused["by"] == "guard":  # nobody is here who would resume it
                last_words = f"the run paused itself, and the demo ends here: {paused['reason']}"
                return final
            if now - started > limit_s:
                last_words = f"time is up after {duration(now - started)} (--minutes)"
                return final
            coordinator = supervisor.members[0]
            if coordinator.gave_up or all(member.gave_up for member in supervisor.members[1:]):
                lost = coordinator if coordinator.gave_up else supervisor.members[1]
                raise BarnraiseError(f"{lost.name} died too often: {last_lines(lost.log, 1) or 'no output'}")
            time.sleep(REFRESH_S)
    finally:
        if live:
            live.stop()
        if last_words:
            say(last_words)

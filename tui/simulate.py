"""``barnraise simulate``: a whole swarm in this process, in virtual time, with the real code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from barnraise.protocol.errors import StorageError
from barnraise.tui.console import duration, emit_json, examples, print_rows

if TYPE_CHECKING:
    from barnraise.simulation.churn import Planned
    from barnraise.simulation.run import Now, Outcome
    from barnraise.simulation.scenario import Scenario

EXAMPLES = examples(
    "simulate --list",
    "simulate flash-crowd",
    "simulate diurnal --nodes 1000 --hours 1 --seed 7 --plot swarm.png",
    "simulate ./mine.toml --json --trace swarm.json",
)


def simulate(
    scenario: str = typer.Argument(
        "steady", metavar="[SCENARIO]", help="A name (see --list), or a .toml file."
    ),
    nodes: int | None = typer.Option(None, min=1, max=20_000, help="How many, instead of the scenario's."),
    hours: float | None = typer.Option(
        None, min=0.001, max=336, help="Virtual hours, instead of the scenario's."
    ),
    seed: int = typer.Option(0, min=0, help="The same seed gives the same event log, byte by byte."),
    as_json: bool = typer.Option(False, "--json", help="All numbers, as one JSON object."),
    plot: Path | None = typer.Option(None, metavar="FILE", help="A picture, .png or .svg."),
    trace: Path | None = typer.Option(None, metavar="FILE", help="A trace for ui.perfetto.dev."),
    keep: Path | None = typer.Option(None, metavar="DIR", help="Keep every folder and the event log in DIR."),
    shrink: bool = typer.Option(
        False, "--shrink", help="Look for a smaller scenario that fails the same way."
    ),
    lines: bool = typer.Option(False, "--lines", help="With --keep: also write what each node says."),
    list_them: bool = typer.Option(False, "--list", help="List the scenarios, and end."),
) -> None:
    """Simulate a swarm: churn, crashes, partitions, cheats.

    On the real protocol, node and coordinator, in virtual time.
    """
    from barnraise.simulation import run
    from barnraise.simulation.event_log import read_log
    from barnraise.simulation.invariants import Invariants
    from barnraise.simulation.measure import measure
    from barnraise.simulation.report import as_json as report_json
    from barnraise.simulation.report import command, rows

    if list_them:
        _list(as_json)
        return
    chosen = _chosen(scenario, nodes, hours)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise StorageError(f"{keep} is not empty: choose another folder for --keep")
    with run.scratch_folder(keep) as folder:
        checks = Invariants()
        outcome = run.simulate(
            *(chosen, seed, folder, _progress()), watch=[checks.watch], final=[checks.final], lines=lines
        )
        _clear_line()
        found = measure(read_log(outcome.log_path))
        if plot is not None:
            from barnraise.simulation.plots import draw

            draw(outcome.log_path, found, plot)
        if trace is not None:
            from barnraise.simulation.trace import write_trace

            write_trace(read_log(outcome.log_path), trace)
    if as_json:
        emit_json(report_json(outcome, found))
    else:
        print_rows(rows(outcome, found))
    if outcome.error is not None:
        again = command(outcome, scenario, nodes=nodes, hours=hours)
        typer.echo(f"reproduce it with: {again}", err=True)
        if shrink:
            _shrink(outcome)
        raise typer.Exit(1)
    if outcome.interrupted:
        raise typer.Exit(130)


def _list(as_json: bool) -> None:
    from barnraise.simulation.scenario import load_scenario, scenario_names

    found = [load_scenario(name) for name in scenario_names()]
    if as_json:
        emit_json([{"name": item.name, "description": item.description} for item in found])
    else:
        print_rows([(item.name, item.description) for item in found])


def _chosen(which: str, nodes: int | None, hours: float | None) -> Scenario:
    from msgspec.structs import replace

    from barnraise.simulation.scenario import load_scenario

    scenario = load_scenario(which)
    swarm = scenario.swarm
    return replace(scenario, swarm=replace(swarm, nodes=nodes or swarm.nodes, hours=hours or swarm.hours))


def _progress() -> Callable[[Now], None] | None:
    """A line that is written over, where somebody looks."""
    if not sys.stderr.isatty():
        return None

    def show(now: Now) -> None:
        text = (
            f"{duration(now.virtual_s)} of {duration(now.end_s)}: {now.live} nodes, version {now.version}, "
            f"{now.accepted} units accepted, {now.pace:.0f} x real time"
        )
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    return show


def _clear_line() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")


def _shrink(failed: Outcome) -> None:
    """Say what is left of the plan when everything that does not matter is left out."""
    from barnraise.simulation import run, shrink
    from barnraise.simulation.invariants import Broken, Invariants

    def kind(error: Exception | None) -> object:
        return error.name if isinstance(error, Broken) else type(error)

    def fails(scenario: Scenario, acts: Sequence[Planned]) -> bool:
        checks = Invariants()
        with run.scratch_folder() as folder:
            again = run.simulate(
                *(scenario, failed.seed, folder), acts=acts, watch=[checks.watch], final=[checks.final]
            )
        return kind(again.error) == kind(failed.error)

    found = shrink.shrink(failed.scenario, failed.seed, failed.virtual_s, fails)
    typer.echo(f"after {found.runs} runs, {len(found.acts)} acts still make it fail:", err=True)
    for act in found.acts:
        typer.echo(f"  at {act.at_s:.1f} s: {act.do} {' '.join(act.nodes)}".rstrip(), err=True)

"""A simulation's pictures, as PNG or SVG: who was there and what came of it, and how stale it was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from barnraise.coordinator.report_plots import COLOURS
from barnraise.protocol.errors import StorageError
from barnraise.simulation.event_log import read_log
from barnraise.simulation.measure import Measures

_COMES = frozenset({"join"})
_GOES = frozenset({"crash", "end"})


def draw(log: Path, found: Measures, target: Path) -> Path:
    """Write one picture with three panels to ``target`` (``.png`` or ``.svg``).

    Raises:
        StorageError: it cannot be written, or has another suffix.
    """
    if target.suffix not in (".png", ".svg"):
        raise StorageError(f"{target}: a picture's name must end in .png or .svg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1)
    times, live, accepted, rejected = _series(log)
    top.step(times, live, where="post", color=COLOURS[0])
    top.set(title="nodes", ylabel="live", ylim=(0, None))
    for number, moment in enumerate(found.versions):
        middle.axvline(moment / 60, color="#d1d5db", linewidth=0.8, label="version" if number == 0 else None)
    middle.step([at / 60 for at in accepted], range(1, len(accepted) + 1), color=COLOURS[2], label="accepted")
    if rejected:
        middle.step(
            [at / 60 for at in rejected], range(1, len(rejected) + 1), color=COLOURS[1], label="rejected"
        )
    middle.legend(loc="upper left")
    middle.set(title="units", xlabel="virtual minutes", ylabel="so far", ylim=(0, None))
    bottom.bar([str(lag) for lag in found.staleness], list(found.staleness.values()), color=COLOURS[3])
    bottom.set(title="staleness of what was trained on", xlabel="versions", ylabel="units")
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(
            target, dpi=110, metadata={"Date": None} if target.suffix == ".svg" else {"Software": None}
        )
    except OSError as error:
        raise StorageError(f"cannot write the picture {target}: {error.strerror or error}") from error
    return target


def _series(log: Path) -> tuple[list[float], list[int], list[float], list[float]]:
    """Minutes and who was live then; seconds at which units were accepted, and rejected."""
    times, live, accepted, rejected = [0.0], [0], list[float](), list[float]()
    there: Counter[str] = Counter()
    for event in read_log(log):
        what: Any = event["what"]
        if what in _COMES or what in _GOES:
            there[event["node"]] = int(what in _COMES)
            times.append(event["t"] / 60)
            live.append(there.total())
        elif what == "judged":
            (accepted if event["accepted"] else rejected).append(event["t"])
    return times, live, accepted, rejected

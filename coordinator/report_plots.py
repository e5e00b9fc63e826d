"""A report's plots, as PNG files and nothing else: drawn without a display."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from barnraise.coordinator.report_data import Report

COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0e7490", "#be123c", "#4d7c0f")
REFUSED = "#d1d5db"
MEASURES = (
    ("cosine", "cosine"),
    ("norm_ratio", "norm ratio"),
    ("relative_error", "relative error"),
    ("cka", "CKA"),
)

Paint = Callable[[Any, Report], None]  # (figure, report)


def draw(report: Report, folder: Path) -> dict[str, Path]:
    """Write every plot for which there is data into ``folder``; returns name -> path, in reading order.

    Raises:
        OSError: the folder cannot be written to.
    """
    wanted: list[tuple[str, bool, Paint, tuple[float, float]]] = [
        ("losses", bool(report.rounds) or any(unit.losses for unit in report.units), _losses, (8.0, 4.2)),
        ("perplexity", report.adaptation is not None, _perplexity, (6.0, 3.6)),
        ("seams", bool(report.seams_cold), _seams, (9.0, 3.2)),
        ("compute", report.block_flops > 0, _compute, (7.0, 3.2)),
        ("wall-clock", any(unit.returned_s is not None for unit in report.units), _wall_clock, (8.0, 3.8)),
        ("rewards", bool(report.rewards or report.accuracy), _rewards, (8.0, 3.8)),
    ]
    return {
        name: _save(folder / f"{name}.png", paint, report, shape)
        for name, there, paint, shape in wanted
        if there
    }


def _save(path: Path, paint: Paint, report: Report, shape: tuple[float, float]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=shape, layout="constrained")
    FigureCanvasAgg(figure)
    paint(figure, report)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def _axes(figure: Any, **words: Any) -> Any:
    axes = figure.add_subplot()
    axes.set(**words)
    axes.grid(alpha=0.3)
    return axes


def _losses(figure: Any, report: Report) -> None:
    axes = _axes(figure, xlabel="steps of the block", ylabel="loss, nats per token", title="Loss per block")
    for block in range(report.blocks):
        colour = COLOURS[block % len(COLOURS)]
        mine = [
            unit
            for unit in report.units
            if unit.block == block and unit.losses and unit.accepted is not False
        ]
        for index, unit in enumerate(mine):
            start = unit.version * report.steps
            ends = [min(report.steps, (n + 1) * report.commit_every) for n in range(len(unit.losses))]
            label = f"block {block}, training (each unit)" if index == 0 else None
            axes.plot([start + end for end in ends], unit.losses, color=colour, alpha=0.45, lw=1, label=label)
        held = [
            (entry.version, entry.block_losses[block])
            for entry in report.rounds
            if block < len(entry.block_losses)
        ]
        if held:
            places, values = [version * report.steps for version, _ in held], [loss for _, loss in held]
            axes.plot(places, values, color=colour, marker="o", label=f"block {block}, held out")
    if report.scaffold is not None and report.scaffold.loss is not None:
        axes.axhline(report.scaffold.loss, color="#6b7280", ls="--", lw=1, label="scaffold, held out")
    axes.legend(loc="best", frameon=False, fontsize=8)


def _perplexity(figure: Any, report: Report) -> None:
    axes = _axes(figure, ylabel="held-out perplexity", title="From scaffold to model")
    bars: list[tuple[str, float]] = []
    if report.scaffold is not None and report.scaffold.perplexity is not None:
        bars.append(("scaffold", report.scaffold.perplexity))
    if report.cold_perplexity is not None and report.adapted_perplexity is not None:
        bars += [("recombined,\ncold", report.cold_perplexity), ("adapted", report.adapted_perplexity)]
    drawn = axes.bar([name for name, _ in bars], [value for _, value in bars], color=COLOURS[: len(bars)])
    axes.bar_label(drawn, fmt="%.2f")


def _seams(figure: Any, report: Report) -> None:
    for index, (key, name) in enumerate(MEASURES):
        axes = figure.add_subplot(1, len(MEASURES), index + 1)
        axes.set(title=name, xlabel="behind block")
        axes.grid(alpha=0.3)
        for seams, word, colour in (
            (report.seams_cold, "cold", COLOURS[0]),
            (report.seams_adapted, "adapted", COLOURS[1]),
        ):
            places = [int(seam["block"]) for seam in seams]
            axes.plot(places, [seam[key] for seam in seams], marker="o", color=colour, label=word)
        axes.set_xticks([int(seam["block"]) for seam in report.seams_cold])
        if index == 0:
            axes.legend(loc="best", frameon=False, fontsize=8)


def _compute(figure: Any, report: Report) -> None:
    axes = _axes(figure, xlabel="FLOPs", title="Compute")
    rows = [("blocks, accepted", report.block_flops)]
    if report.scaffold is not None:
        rows.insert(0, ("scaffold", report.scaffold.flops))
    if report.refused_flops:
        rows.append(("blocks, refused", report.refused_flops))
    if report.adaptation is not None:
        rows.append(("adaptation", report.adaptation.flops))
    rows.reverse()
    drawn = axes.barh([name for name, _ in rows], [value for _, value in rows], color=COLOURS[0])
    axes.bar_label(drawn, labels=[f" {value:.3g}" for _, value in rows])
    axes.margins(x=0.15)


def _wall_clock(figure: Any, report: Report) -> None:
    from matplotlib.patches import Patch

    units = [unit for unit in report.units if unit.returned_s is not None]
    names = sorted({unit.name or unit.node[-8:] for unit in units})
    first = min(unit.leased_ms for unit in units)
    axes = _axes(figure, xlabel="seconds since the first lease", title="Who trained which block, and when")
    for unit in units:
        axes.barh(
            names.index(unit.name or unit.node[-8:]),
            unit.returned_s,
            left=(unit.leased_ms - first) / 1000,
            height=0.7,
            color=REFUSED if unit.accepted is False else COLOURS[unit.block % len(COLOURS)],
            edgecolor="white",
        )
    axes.set_yticks(range(len(names)), [_literal(name[:24]) for name in names])
    colours = [Patch(color=COLOURS[n % len(COLOURS)], label=f"block {n}") for n in range(report.blocks)]
    if any(unit.accepted is False for unit in units):
        colours.append(Patch(color=REFUSED, label="refused"))
    figure.legend(handles=colours, loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def _literal(text: str) -> str:
    """A stranger's text as it is: between dollar signs matplotlib would read mathematics."""
    return text.replace("\\", "/").replace("$", "\\$")


def _rewards(figure: Any, report: Report) -> None:
    axes = _axes(figure, xlabel="policy version", ylabel="reward", ylim=(-0.02, 1.02), title="Post-training")
    if report.rewards:
        axes.plot(*zip(*report.rewards, strict=True), color="#8aa4c8", label="training reward (sampled)")
    if report.accuracy:
        axes.plot(
            *zip(*report.accuracy, strict=True), color=COLOURS[1], marker="o", label="held-out accuracy"
        )
    axes.legend(loc="best", frameon=False)

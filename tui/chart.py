"""The reward chart of a run, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw_rewards(
    rewards: Sequence[tuple[int, float]],
    accuracy: Sequence[tuple[int, float]],
    title: str,
    folder: Path,
) -> tuple[Path, Path]:
    """Write ``rewards.png`` and ``rewards.svg`` into ``folder`` and return their paths.

    Args:
        rewards: (policy version, mean training reward of the batch that made it), rewards in [0, 1].
        accuracy: (policy version, held-out accuracy of the greedy policy in [0, 1]).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if rewards:
        axes.plot(*zip(*rewards, strict=True), color="#8aa4c8", label="training reward (sampled, volunteers)")
    if accuracy:
        axes.plot(
            *zip(*accuracy, strict=True),
            color="#c2410c",
            marker="o",
            markersize=3,
            label="held-out accuracy (greedy)",
        )
    axes.set(xlabel="policy version", ylabel="reward", ylim=(-0.02, 1.02), title=title)
    axes.grid(alpha=0.3)
    if rewards or accuracy:
        axes.legend(loc="best", frameon=False)
    paths = folder / "rewards.png", folder / "rewards.svg"
    figure.savefig(paths[0], dpi=144)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths

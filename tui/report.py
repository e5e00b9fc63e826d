"""``barnraise report``: what a run came to, as a page with plots and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from barnraise.protocol.errors import StorageError
from barnraise.tui.console import duration, emit_json, examples, print_rows

if TYPE_CHECKING:
    from barnraise.coordinator.report_data import Report

EXAMPLES = examples("report ./my-run", "report ./my-run --out ./report", "report ./my-run --json")


def report(
    run: Path = typer.Argument(..., metavar="RUN", help="A run folder; its coordinator may be running."),
    out: Path | None = typer.Option(
        None, "--out", metavar="DIR", help="Where to write the page and its plots (default: RUN/report)."
    ),
    as_json: bool = typer.Option(False, "--json", help="All numbers, as one JSON object."),
) -> None:
    """Write a page about a run: losses, compute, time, rewards."""
    import msgspec

    from barnraise.coordinator.report_data import collect
    from barnraise.coordinator.report_page import page
    from barnraise.coordinator.report_plots import draw

    found = collect(run)
    folder = run / "report" if out is None else out
    target = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plots = draw(found, folder)
        target.write_text(page(found, plots))
    except OSError as error:
        raise StorageError(f"cannot write the report to {folder}: {error}; see --out") from error
    if as_json:
        files = {"page": str(target), "plots": [str(path) for path in plots.values()]}
        emit_json(msgspec.to_builtins(found) | files)
        return
    print_rows(rows(found))
    for text in found.absent:
        typer.echo(f"note: {text}")
    typer.echo(
        f"written: {target}"
        + (f" and {len(plots)} plot{'s' if len(plots) > 1 else ''} beside it" if plots else "")
    )


def rows(found: Report) -> list[tuple[str, str]]:
    """The essence, for a terminal; what is not known is left out."""
    lines = [("run", f"{found.name}, version {found.version} of {found.target_version}")]
    if found.scaffold is not None and found.scaffold.perplexity is not None:
        lines.append(("scaffold", f"perplexity {found.scaffold.perplexity:.3f}"))
    if found.rounds:
        losses = ", ".join(f"{loss:.3f}" for loss in found.rounds[-1].block_losses)
        lines.append(("blocks", f"{len(found.rounds)} rounds, held-out loss {losses}"))
    if found.cold_perplexity is not None and found.adapted_perplexity is not None:
        text = f"perplexity {found.cold_perplexity:.3f} cold, {found.adapted_perplexity:.3f} adapted"
        lines.append(("recombined", text))
    if found.critical_path_s and found.serial_s:
        text = f"{duration(found.critical_path_s)}; one machine after the other {duration(found.serial_s)}"
        lines.append(("critical path", text))
    if found.accuracy:
        text = f"held-out {found.accuracy[0][1]:.3f} before, {found.accuracy[-1][1]:.3f} after"
        lines.append(("post-training", text))
    if found.members:
        lines.append(("volunteers", f"{len(found.members)}, {sum(m.credit for m in found.members):,} Mflop"))
    return lines

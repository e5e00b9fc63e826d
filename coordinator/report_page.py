"""A report as one HTML file: no script, nothing fetched, every text escaped.

Names of runs and nodes were chosen by strangers.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from barnraise.coordinator.report_data import Report, Stage

MAX_ROWS = 500
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem .2rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 1px solid #9ca3af; }
tr:nth-child(even) td { background: #f3f4f6; } img { max-width: 100%; } .note { color: #6b7280; }
"""
_ALT = {
    "losses": "Training and held-out loss of each block",
    "perplexity": "Perplexity of scaffold, cold and adapted model",
    "seams": "Seams between the blocks before and after adaptation",
    "compute": "Compute by stage",
    "wall-clock": "Which volunteer trained which block when",
    "rewards": "Rewards and held-out accuracy of post-training",
}


def page(report: Report, plots: Mapping[str, Path]) -> str:
    """The whole page; ``plots`` (``report_plots.draw``) are embedded."""
    begun = _moment(report.made_ms)
    head = (
        f"<h1>{escape(report.name)}</h1><p class=note>run {escape(report.run_id[:16])}, model "
        f"{escape(report.model)} of {report.parameters:,} parameters, made {begun}; "
        f"version {report.version} of {report.target_version}; written {_moment(report.written_ms)}</p>"
    )
    parts = [head, *(f"<p class=note>{escape(text)}</p>" for text in report.absent)]
    if report.blocks:
        parts += [*_quality(report, plots), *_seams(report, plots), *_ledger(report, plots), *_units(report)]
    if report.rewards or report.accuracy:
        parts += ["<h2>Post-training</h2>", _image(plots, "rewards"), _rewards(report)]
    parts += _members(report)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(report.name)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _quality(report: Report, plots: Mapping[str, Path]) -> list[str]:
    rows = []
    if report.scaffold is not None:
        origin = f" (of an earlier run, {report.scaffold.imported[:16]})" if report.scaffold.imported else ""
        rows.append((f"scaffold{origin}", _number(report.scaffold.perplexity)))
    rows.append(("recombined, cold", _number(report.cold_perplexity)))
    rows.append(("adapted", _number(report.adapted_perplexity)))
    held = [
        [f"after round {entry.version}", *(f"{loss:.4f}" for loss in entry.block_losses)]
        for entry in report.rounds
    ]
    names = [f"block {block}" for block in range(report.blocks)]
    return [
        "<h2>Quality</h2>",
        _table(["held-out perplexity", ""], rows),
        _image(plots, "perplexity"),
        "<h2>Blocks</h2><p>Held-out loss of each block inside the scaffold, nats per token.</p>",
        _table(["", *names], held),
        _image(plots, "losses"),
    ]


def _seams(report: Report, plots: Mapping[str, Path]) -> list[str]:
    if not report.seams_cold:
        return []
    keys = ("cosine", "norm_ratio", "relative_error", "cka")
    rows = [
        [f"behind block {int(seam['block'])}, {word}", *(f"{seam[key]:.3f}" for key in keys)]
        for word, seams in (("cold", report.seams_cold), ("adapted", report.seams_adapted))
        for seam in seams
    ]
    return [
        "<h2>Seams</h2><p>Hidden states of the model against the scaffold's at the same place: the next "
        "block was trained to read the scaffold's.</p>",
        _table(["", "cosine", "norm ratio", "relative error", "CKA"], rows),
        _image(plots, "seams"),
    ]


def _ledger(report: Report, plots: Mapping[str, Path]) -> list[str]:
    rows = [_stage_row("scaffold", report.scaffold)]
    slowest = [entry.slowest_s for entry in report.rounds if entry.slowest_s is not None]
    together = [entry.sum_s for entry in report.rounds if entry.sum_s is not None]
    merging = sum(entry.merging_s for entry in report.rounds)
    tokens = sum(unit.tokens for unit in report.units if unit.accepted)
    rows.append(
        ["blocks, accepted", f"{tokens:,}", _flops(report.block_flops), _seconds(sum(together) or None),
         _seconds(sum(slowest) or None)]
    )  # fmt: skip
    if report.refused_flops:
        rows.append(["blocks, refused (estimated)", "", _flops(report.refused_flops), "", ""])
    rows.append(["adding rounds up", "", "", _seconds(merging), _seconds(merging)])
    rows.append(_stage_row("adaptation", report.adaptation))
    whole = report.block_flops + sum(s.flops for s in (report.scaffold, report.adaptation) if s is not None)
    rows.append(
        ["sum", "", _flops(whole), _seconds(report.serial_s), _seconds(report.critical_path_s)]
    )  # fmt: skip
    shorter = ""
    if report.critical_path_s and report.serial_s:
        shorter = (
            f"<p>Critical path {_seconds(report.critical_path_s)}: scaffold, the slowest contributor of each "
            f"round, adaptation. One machine would need {_seconds(report.serial_s)}, "
            f"{report.serial_s / report.critical_path_s:.2f} times as long.</p>"
        )
    took = f"<p>From first to last event: {_seconds(report.wall_s)}.</p>" if report.wall_s else ""
    head = ["", "tokens", "FLOPs", "seconds, all", "seconds, on the critical path"]
    return [
        "<h2>Compute and time</h2>",
        _table(head, rows),
        shorter,
        took,
        "<p class=note>Blocks: forward and backward through the block, forward and activation gradients "
        "above it, forward below it; scaffold and adaptation: 6 x parameters x tokens. Seconds of a unit are "
        "its node's own, or from lease to submission where they are no longer stored.</p>",
        _image(plots, "compute"),
        _image(plots, "wall-clock"),
    ]


def _stage_row(name: str, stage: Stage | None) -> list[str]:
    if stage is None:
        return [name, "", "", "not yet", "not yet"]
    seconds = _seconds(stage.seconds)
    return [name, f"{stage.tokens:,}", _flops(stage.flops), seconds, seconds]


def _units(report: Report) -> list[str]:
    rows = []
    for unit in report.units[:MAX_ROWS]:
        verdict = "" if unit.accepted is None else "accepted" if unit.accepted else f"refused: {unit.check}"
        course = f"{unit.losses[0]:.3f} to {unit.losses[-1]:.3f}" if unit.losses else ""
        rows.append(
            [
                f"round {unit.version + 1}, block {unit.block}, place {unit.slot}",
                unit.name or unit.node[-8:],
                _seconds(unit.seconds),
                _seconds(unit.returned_s),
                course,
                verdict or "out",
            ]
        )
    more = len(report.units) - len(rows)
    return [
        "<h2>Units</h2>",
        _table(["", "volunteer", "trained", "lease to return", "loss", "verdict"], rows),
        f"<p class=note>and {more} more</p>" if more > 0 else "",
    ]


def _rewards(report: Report) -> str:
    rows = []
    if report.accuracy:
        first, last = report.accuracy[0], report.accuracy[-1]
        rows.append([f"held-out accuracy, version {first[0]}", f"{first[1]:.3f}"])
        rows.append([f"held-out accuracy, version {last[0]}", f"{last[1]:.3f}"])
    return _table(["", ""], rows)


def _members(report: Report) -> list[str]:
    if not report.members:
        return []
    rows = [
        [
            member.name or member.node[-8:],
            f"{member.credit:,}",
            str(member.units),
            str(member.accepted),
            str(member.rejected),
        ]
        for member in report.members[:MAX_ROWS]
    ]
    head = ["volunteer", "credit, Mflop", "block units", "accepted", "rejected"]
    return ["<h2>Volunteers</h2>", _table(head, rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _image(plots: Mapping[str, Path], name: str) -> str:
    if name not in plots:
        return ""
    data = base64.b64encode(plots[name].read_bytes()).decode()
    return f'<p><img alt="{escape(_ALT[name])}" src="data:image/png;base64,{data}"></p>'


def _number(value: float | None) -> str:
    return "not yet" if value is None else f"{value:.3f}"


def _flops(value: float) -> str:
    return f"{value:.3g}" if value else ""


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} s"


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")

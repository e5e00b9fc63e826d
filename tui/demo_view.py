"""The demo's screen: a table with a row per process while it runs, the same as plain lines in a pipe."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from barnraise.tui.console import duration, size

State = dict[str, Any]
COLUMNS = ("process", "doing", "version", "accepted", "rejected", "in", "out")
WIDTHS = {"process": 11, "doing": 19}  # with the counts at their widest: 80


def sparkline(values: list[float], width: int = 40) -> str:
    """Values in [0, 1] as block characters, the newest on the right."""
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[min(7, max(0, int(value * 7.999)))] for value in values[-width:])


def latest(pairs: list[list[float]]) -> str:
    """The newest value of a (version, value) list, or a dash."""
    return f"{pairs[-1][1]:.2f}" if pairs else "-"


def coordinator_doing(state: State | None) -> str:
    """What the coordinator is at, in a few words: ``collecting 12/16``."""
    if state is None:
        return "starting"
    doing = str(state.get("state", "starting"))
    if doing == "collecting" and str(state.get("stage", "")).startswith("blocks"):
        blocks = (state.get("pretrain") or {}).get("blocks", [])
        return f"blocks {sum(b['accepted'] for b in blocks)}/{sum(b['contributors'] for b in blocks)}"
    if doing == "collecting":
        return f"collecting {state.get('groups_usable', 0)}/{state.get('groups_wanted', '?')}"
    return doing


def node_doing(state: State | None) -> str:
    """What a node is at, in a few words: ``generating 24/64``, ``waiting for work``."""
    if state is None:
        return "starting"
    doing, reason = str(state.get("state", "starting")), str(state.get("reason") or "")
    unit = state.get("unit") or {}
    if doing == "training" and unit.get("steps"):
        return f"block {unit.get('block')}, {unit.get('step', 0)}/{unit['steps']}"
    if unit.get("of"):
        return f"{doing} {unit.get('completions', 0)}/{unit['of']}"
    if reason.startswith(doing):  # "waiting for work: why" says more than "waiting"
        return reason.split(":")[0].removesuffix(" into the engine")
    return doing


def panel(
    coordinator: State | None,
    nodes: dict[str, State | None],
    seconds: float,
    limit_s: float,
    notes: list[str],
) -> Group:
    """The live view: one row for the coordinator, one per node, then the reward's course.

    ``seconds`` of training have passed of at most ``limit_s``. Fits 80 columns.
    """
    state = coordinator or {}
    table = Table(box=None, pad_edge=False, expand=False)
    for column in COLUMNS:
        width = WIDTHS.get(column)
        table.add_column(column, justify="left" if width else "right", no_wrap=True, width=width)
    version = f"{_version(state)}/{state.get('target_version', '-')}"
    table.add_row("coordinator", coordinator_doing(coordinator), version, *_counts(state))
    for name, node in nodes.items():
        row = node or {}
        table.add_row(name, node_doing(node), _version(row), *_counts(row))
    head = f"training for {duration(seconds)} (at most {duration(limit_s)}); Ctrl-C ends everything"
    lines: list[Table | Text] = [Text(head, style="bold"), table]
    if state.get("pretrain"):
        lines.append(Text(f"{'stage':11}  {stage_words(state)}", no_wrap=True, overflow="ellipsis"))
        lines += [Text(f"{name:11}  {text}", no_wrap=True) for name, text in measured_words(state)]
    for label, pairs in (("reward", state.get("rewards", [])), ("held-out", state.get("accuracy", []))):
        course = sparkline([value for _, value in pairs]) or "not measured yet"
        lines.append(Text(f"{label:11}  {course} {latest(pairs) if pairs else ''}", no_wrap=True))
    if state and state.get("state") != "collecting" and state.get("reason"):
        notes = [*notes, f"coordinator: {state['reason']}"]
    lines.extend(Text(note, style="yellow") for note in notes[-3:])
    return Group(*lines)


def stage_words(state: State) -> str:
    """Where a pretraining run is: ``scaffold 40 %``, ``blocks round 2 of 2: 1+0 of 2+2 units``."""
    stage, pretrain = str(state.get("stage", "")), state.get("pretrain") or {}
    if stage.startswith("blocks"):
        blocks = pretrain.get("blocks", [])
        done = "+".join(str(block["accepted"]) for block in blocks)
        return f"{stage}: {done} of {'+'.join(str(block['contributors']) for block in blocks)} units accepted"
    share = pretrain.get("share") or 0.0
    return f"{stage} {share:.0%}" if stage in ("scaffold", "recombining") and share > 0 else stage


def measured_words(state: State) -> list[tuple[str, str]]:
    """What the learner has measured on held-out text so far, as (name, text)."""
    lines: dict[str, str] = {}
    for note in (state.get("pretrain") or {}).get("measured", []):
        if note.get("stage") == "scaffold" and "perplexity" in note:
            lines["scaffold"] = f"perplexity {note['perplexity']:.3f}"
        elif note.get("stage") == "round":
            losses = ", ".join(f"{loss:.3f}" for loss in note.get("block_losses", []))
            lines["blocks"] = f"losses {losses} after round {note.get('version')}"
        elif "cold_perplexity" in note and "adapted_perplexity" in note:
            cold, adapted = note["cold_perplexity"], note["adapted_perplexity"]
            lines["recombined"] = f"perplexity {cold:.3f} cold, {adapted:.3f} adapted"
    return list(lines.items())


def _version(state: State) -> str:
    version = state.get("policy_version", -1)
    return str(version) if version >= 0 else "-"


def _counts(state: State) -> tuple[str, str, str, str]:
    traffic = size(state.get("bytes_in", 0)), size(state.get("bytes_out", 0))
    return str(state.get("accepted", 0)), str(state.get("rejected", 0)), *traffic


def plain_line(coordinator: State | None, nodes: dict[str, State | None], seconds: float) -> str:
    """The same news in one line of a log."""
    state = coordinator or {}
    doing = ", ".join(f"{name} {node_doing(node)}" for name, node in nodes.items())
    version = f"{_version(state)}/{state.get('target_version', '-')}"
    stage = f"{stage_words(state)}, " if state.get("pretrain") else ""
    return (
        f"[{duration(seconds)}] {stage}version {version}, "
        f"reward {latest(state.get('rewards', []))}, held-out {latest(state.get('accuracy', []))}, "
        f"{state.get('accepted', 0)} accepted, {state.get('rejected', 0)} rejected, "
        f"{size(state.get('bytes_out', 0))} out; coordinator {coordinator_doing(coordinator)}, {doing}"
    )

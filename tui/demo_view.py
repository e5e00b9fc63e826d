"""The demo's screen: a table with a row per process while it runs, the same as plain lines in a pipe."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from barnraise.tui.console import duration, size

State = dict[str, Any]


def sparkline(values: list[float], width: int = 40) -> str:
    """Values in [0, 1] as block characters, the newest on the right."""
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[min(7, max(0, int(value * 7.999)))] for value in values[-width:])


def latest(pairs: list[list[float]]) -> str:
    """The newest value of a (version, value) list, or a dash."""
    return f"{pairs[-1][1]:.2f}" if pairs else "-"


def panel(
    coordinator: State | None, nodes: dict[str, State | None], seconds: float, notes: list[str]
) -> Group:
    """The live view: one row for the coordinator, one per node, then the reward's course."""
    table = Table(title=f"barnraise demo, {duration(seconds)}", title_justify="left", expand=False)
    for column, justify in (
        ("process", "left"),
        ("state", "left"),
        ("version", "right"),
        ("reward", "right"),
        ("held-out", "right"),
        ("accepted", "right"),
        ("rejected", "right"),
        ("in", "right"),
        ("out", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis", max_width=34)  # type: ignore[arg-type]
    state = coordinator or {}
    rewards, accuracy = state.get("rewards", []), state.get("accuracy", [])
    table.add_row(
        "coordinator",
        str(state.get("state", "starting")),
        f"{state.get('policy_version', '-')}/{state.get('target_version', '-')}",
        latest(rewards),
        latest(accuracy),
        str(state.get("accepted", 0)),
        str(state.get("rejected", 0)),
        size(state.get("bytes_in", 0)),
        size(state.get("bytes_out", 0)),
    )
    for name, node in nodes.items():
        row = node or {}
        unit = row.get("unit") or {}
        doing = str(row.get("state", "starting"))
        if unit.get("of"):
            doing += f" {unit.get('completions', 0)}/{unit['of']}"
        elif row.get("reason"):
            doing += f": {row['reason']}"
        table.add_row(
            name,
            doing,
            str(row.get("policy_version", "-")),
            "",
            "",
            str(row.get("accepted", 0)),
            str(row.get("rejected", 0)),
            size(row.get("bytes_in", 0)),
            size(row.get("bytes_out", 0)),
        )
    lines: list[Table | Text] = [table]
    if rewards:
        lines.append(Text(f"reward per version   {sparkline([value for _, value in rewards])}"))
    if accuracy:
        lines.append(Text(f"held-out accuracy    {sparkline([value for _, value in accuracy])}"))
    lines.extend(Text(note, style="yellow") for note in notes[-3:])
    return Group(*lines)


def plain_line(coordinator: State | None, nodes: dict[str, State | None], seconds: float) -> str:
    """The same news in one line of a log."""
    state = coordinator or {}
    doing = ", ".join(f"{name} {(node or {}).get('state', 'starting')}" for name, node in nodes.items())
    return (
        f"[{duration(seconds)}] coordinator {state.get('state', 'starting')}, "
        f"version {state.get('policy_version', '-')}/{state.get('target_version', '-')}, "
        f"reward {latest(state.get('rewards', []))}, held-out {latest(state.get('accuracy', []))}, "
        f"accepted {state.get('accepted', 0)}, rejected {state.get('rejected', 0)}, "
        f"out {size(state.get('bytes_out', 0))}; {doing}"
    )

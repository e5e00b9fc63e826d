"""``barnraise doctor``: what this machine can do for a run, and why what it has is not used (R11)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer

from barnraise.tui.console import console, emit_json
from barnraise.tui.join import default_threads

EXAMPLES = "Example: barnraise doctor --json"
MARKS = {
    "ok": "[green]ok[/]",
    "note": "[cyan]note[/]",
    "warning": "[yellow]warn[/]",
    "problem": "[red]PROBLEM[/]",
}


def doctor(
    data: Path | None = typer.Option(None, "--data", metavar="DIR", help="The node's data folder."),
    key: Path | None = typer.Option(None, "--key", metavar="FILE", help="The node's key file."),
    threads: int = typer.Option(default_threads(), "--threads", min=1, help="Threads meant for the engine."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Look at devices, memory, disk, key and clock. Exit 1 if something keeps a node from working."""
    from rich.table import Table

    from barnraise.node.config import default_data_path, default_key_path
    from barnraise.node.doctor import examine

    findings = examine(data or default_data_path(), key or default_key_path(), threads)
    ok = all(finding.status != "problem" for finding in findings)
    if as_json:
        emit_json({"ok": ok, "findings": [msgspec.to_builtins(finding) for finding in findings]})
        raise typer.Exit(0 if ok else 1)
    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        text = finding.text + (f"\n-> {finding.cure}" if finding.cure else "")
        table.add_row(MARKS[finding.status], finding.subject, text.replace("[", "\\["))
    console().print(table)
    raise typer.Exit(0 if ok else 1)

"""``barnraise doctor``: what this machine can do for a run, and why what it has is not used (R11)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer

from barnraise.node.chosen import default_threads
from barnraise.tui.console import console, emit_json, examples, is_plain

EXAMPLES = examples("doctor", "doctor --data node-1 --key node-1.key --json")
MARKS = {"ok": "ok", "note": "note", "warning": "warn", "problem": "PROBLEM"}
STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


def doctor(
    data: Path | None = typer.Option(
        None, "--data", metavar="DIR", help="The node's data folder (default: ~/.local/share/barnraise)."
    ),
    key: Path | None = typer.Option(
        None, "--key", metavar="FILE", help="The node's key file (default: ~/.config/barnraise/node.key)."
    ),
    threads: int = typer.Option(
        default_threads(), "--threads", metavar="N", min=1, max=1024, help="Threads meant for the engine."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Look at devices, memory, disk, key and clock. Exit 1 if something keeps a node from working."""
    from rich.table import Table
    from rich.text import Text

    from barnraise.node.config import default_data_path, default_key_path
    from barnraise.node.doctor import examine

    if not as_json:
        typer.echo("looking at this machine; importing torch takes a few seconds", err=True)
    findings = examine(data or default_data_path(), key or default_key_path(), threads)
    ok = all(finding.status != "problem" for finding in findings)
    if as_json:
        emit_json({"ok": ok, "findings": [msgspec.to_builtins(finding) for finding in findings]})
        raise typer.Exit(0 if ok else 1)
    if is_plain(False):
        for finding in findings:
            cure = f" -> {finding.cure}" if finding.cure else ""
            typer.echo(f"{MARKS[finding.status]:7}  {finding.subject:9}  {finding.text}{cure}")
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        for finding in findings:
            text = finding.text + (f"\n-> {finding.cure}" if finding.cure else "")
            mark = Text(MARKS[finding.status], STYLES[finding.status])
            table.add_row(mark, finding.subject, Text(text, overflow="fold"))
        console().print(table)
    wrong = sum(finding.status == "problem" for finding in findings)
    typer.echo("this machine can join a run" if ok else f"{wrong} problem(s) keep a node from working here")
    raise typer.Exit(0 if ok else 1)

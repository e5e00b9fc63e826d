"""What a person allows a node and the machine does not have: it is set, and said."""

from __future__ import annotations

import shutil
from pathlib import Path

import typer

from barnraise.node.chosen import usable_cores
from barnraise.tui.console import size


def note_disk(option: str, place: Path, most: int | None) -> None:
    """A line on standard error if the disk of ``place`` has less than ``most`` bytes for weights."""
    there = next((one for one in (place, *place.absolute().parents) if one.is_dir()), None)
    if there is None or most is None:
        return
    try:
        held = sum(file.stat().st_size for file in (place / "store").rglob("*") if file.is_file())
        room = shutil.disk_usage(there).free + held
    except OSError:  # files come and go; nothing is changed for want of this line
        return
    if most > room:
        _note(
            f"{option} {size(most)} is more than there is: {size(room)} of the disk at {there} are free "
            "or hold weights already"
        )


def note_threads(option: str, threads: int | None) -> None:
    """A line on standard error if there are fewer cores than ``threads``."""
    cores = usable_cores()
    if threads is not None and threads > cores:
        what = "core is" if cores == 1 else "cores are"
        _note(f"{option} {threads} is more than there is: {cores} {what} ours; more threads make work slower")


def _note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)

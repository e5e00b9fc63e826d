"""What ``barnraise run init`` refuses before anything is made.

Everything here raises typer.BadParameter with the option's name, but for
``check_folder``: RunFolderError.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from barnraise.protocol.errors import RunFolderError
from barnraise.tui.console import size

if TYPE_CHECKING:
    from barnraise.coordinator.folder import Settings
    from barnraise.coordinator.model_source import AdapterChoice


def check_message(settings: Settings) -> None:
    """Refuse units whose work no message could bring back."""
    from barnraise.coordinator.presets import fits_a_message, largest_submission

    if not fits_a_message(settings):
        raise typer.BadParameter(
            f"one unit's submission could reach {size(largest_submission(settings))}, more than a message "
            "may hold: lower --prompts-per-unit, --group-size or --max-new-tokens"
        )


def one_of(value: str, option: str, *known: str) -> str:
    """``value``, which must be one of the ``known`` words."""
    if value not in known:
        raise typer.BadParameter(f"'{value}' is none of {', '.join(known)}", param_hint=option)
    return value


def check_folder(folder: Path) -> None:
    """Refuse a place where no run folder can be made, before minutes go into a model for it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} exists and is not an empty folder: choose another, or remove it")
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise RunFolderError(f"{folder} cannot be made: {nearest} cannot be written to")


def check_words(option: str, text: str, most: int) -> None:
    """What strangers will read: refused before anything is made, not where peers would refuse it."""
    if len(text) > most:
        raise typer.BadParameter(
            f"{len(text):,} characters; at most {most} reach volunteers", param_hint=option
        )
    if not text.isprintable():
        raise typer.BadParameter(
            "has a line break, a control or an invisible character: write one plain line", param_hint=option
        )


def check_json(text: str) -> None:
    """Refuse environment settings that are no JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--environment-settings") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--environment-settings")


def adapter_choice(rank: int | None, alpha: float | None, targets: str | None) -> AdapterChoice | None:
    """What the ``--lora-`` options ask for; None: the whole model. ``targets``: names with commas."""
    from barnraise.coordinator.model_source import AdapterChoice

    if rank is None:
        if alpha is not None or targets is not None:
            raise typer.BadParameter("adapters need a rank as well", param_hint="--lora-rank")
        return None
    names = tuple(name.strip() for name in (targets or "").split(",") if name.strip())
    if any(len(name) > 64 for name in names) or len(names) > 64:
        raise typer.BadParameter("at most 64 names of 64 characters", param_hint="--lora-targets")
    return AdapterChoice(rank, 2.0 * rank if alpha is None else alpha, names)

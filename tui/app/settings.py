"""What the app remembers of a person from one time to the next: the theme. A small file beside the key."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from barnraise.node.config import default_key_path

MOST_BYTES = 4096


def settings_path() -> Path:
    """The per-user file, such as ``~/.config/barnraise/app.json``."""
    return default_key_path().with_name("app.json")


def is_light(path: Path | None) -> bool:
    """Whether the light theme was chosen last; False where nothing, or nothing sensible, is remembered."""
    if path is None:
        return False
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("theme") == "light"


def remember_light(path: Path | None, light: bool) -> None:
    """Remember the theme, if the disk lets us: it is not worth a word where it does not."""
    if path is None:
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_text(json.dumps({"theme": "light" if light else "dark"}) + "\n", encoding="utf-8")
        draft.replace(path)

"""Every screen as text, at 80x24 and 120x40, against what is stored in tests/data/screens.

``BARNRAISE_NEW_SCREENS=1 pytest tests/test_tui_pictures.py`` stores them anew: look at the difference.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from app_support import RECORDING, Watched, frame, play, press, use_utc

from barnraise.tui.app.ascii import to_ascii
from barnraise.tui.app.screenshots import SHOTS, SIZES, Recording

STORED = Path(__file__).parent / "data" / "screens"


@pytest.mark.parametrize("size", sorted(SIZES))
def test_screens_look_as_they_did(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_utc(monkeypatch)
    monkeypatch.chdir(RECORDING)
    recording = Recording(Path())
    found: dict[str, list[str]] = {}

    async def story(app: Watched, pilot: Any) -> None:
        recording.play(app)
        for name, keys in SHOTS:
            await press(app, pilot, *keys)
            found[name] = frame(app)
            if app.screen.is_modal:
                await press(app, pilot, "escape")

    play(story, Watched(Path(), clock=recording.clock), SIZES[size])
    for name, lines in found.items():
        compare(f"{name}-{size}", lines)
        compare(f"{name}-{size}-ascii", [to_ascii(line).rstrip() for line in lines])


def compare(name: str, lines: list[str]) -> None:
    path = STORED / f"{name}.txt"
    shown = "\n".join(lines) + "\n"
    if os.environ.get("BARNRAISE_NEW_SCREENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), f"{path.name} has changed"

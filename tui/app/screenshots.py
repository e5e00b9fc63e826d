"""Pictures of every screen: ``python -m barnraise.tui.app.screenshots OUT [FOLDER]`` writes SVG files.

``FOLDER`` holds a recording: ``states.json`` (state trees, oldest first) beside a node's
``node.log`` and ``runs/``. The repository's (``tests/data/recorded-node``) is of a node of
``barnraise demo --nodes 4``; receipts, log, peers and rates are as they were. What
a demo on one machine does not have is added by ``dressed``, and only that is made up: names,
a unit half done, a GPU, a person, rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from barnraise.tui.app.app import NodeApp
from barnraise.tui.app.clean import cleaned

RECORDING = Path(__file__).resolve().parents[2] / "tests" / "data" / "recorded-node"
SIZES = {"80x24": (80, 24), "120x40": (120, 40)}
STEP_S = 3.0
STEPS = 40
_GB = 10**9
_REMOTE_FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # a picture fetches nothing
ASKED = {
    "run_id": "06e213deed0897cf33687611ecbb3a7abd2ab2c61cc1a7e37508c909fcda1a84",
    "fields": [
        ["run", "reverse (06e213deed0897cf)"],
        ["operator", "key e91c f058 86c1 61ca"],
        ["model", "demo, 793,984 parameters, 3.2 MB a version"],
        ["environment", "reverse"],
        ["phase", "reinforcement learning, 40 versions"],
        ["your part", "generates completions on 2 threads"],
        ["memory", "about 0.4 GB"],
        ["disk", "up to 20 GB in ~/.local/share/barnraise (412 GB are free)"],
    ],
}

Shot = tuple[str, tuple[str, ...]]
SHOTS: tuple[Shot, ...] = (
    ("overview", ()),
    ("work", ("2", "down", "down")),
    ("swarm", ("3", "down")),
    ("ledger", ("4",)),
    ("limits", ("5",)),
    ("log", ("6",)),
    ("help", ("question_mark",)),
    ("pause-for", ("P",)),
)


class Recording:
    """States of one node, and a clock that stands where the last was recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: list[dict[str, Any]] = json.loads((folder / "states.json").read_bytes())
        self.now: float = self.states[-1]["since_ms"] / 1000 + 41.0

    def clock(self) -> float:
        """Unix time in s."""
        return self.now

    def dressed(self) -> dict[str, Any]:
        """The last state with what the recorded demo did not have."""
        state = dict(self.states[-1])
        state |= {
            "unit": {
                "kind": "rollout",
                "unit_id": 61,
                "version": state["policy_version"],
                "completions": 24,
                "of": 64,
                "tokens": 8412,
            },
            "credit_today": state["credit"] // 3,
            "started_ms": round(self.now * 1000) - 9_876_000,
            "presence": {
                "source": "logind",
                "idle_s": 740.0,
                "in_use": False,
                "text": "away for 12 min (logind)",
            },
            "suspended": [],
            "notices": [
                {
                    "at_ms": round(self.now * 1000) - 7_530_000,
                    "level": "warning",
                    "text": "the GPU was 86 °C warm; paused until it was cool",
                },
                {
                    "at_ms": round(self.now * 1000) - 1_260_000,
                    "level": "warning",
                    "text": "lost the coordinator (the connection was reset); back after 4 s",
                },
            ],
            "hardware": {
                "gpus": [
                    {
                        "name": "GeForce RTX 3060",
                        "kind": "cuda",
                        "used": True,
                        "reason": "",
                        "temperature": 62,
                        "memory_used": 8_100_000_000,
                        "memory_total": 12 * _GB,
                    }
                ],
                "cores": 12,
                "memory_total": 32 * _GB,
                "memory_free": 21 * _GB,
                "engine_memory": state["engine_memory"],
                "tokens_per_s": 1410.0,
                "sized": "",
            },
        }
        state["witness"] = {
            "size": 790,
            "root": "5b1f0c7e92d44a60" * 4,
            "cosigned_ms": round(self.now * 1000) - 38_000,
            "alarm": "",
            "evidence": "",
        }
        state["limits"] = state["limits"] | {
            "up": 5_000_000,
            "monthly": 500 * _GB,
            "monthly_used": 187_400_000_000,
            "disk": 20 * _GB,
            "when": "always",
            "idle_s": 180,
            "hours": [],
            "on_battery": False,
            "gpu_in_use": False,
            "programs": ["blender"],
            "threads_idle": 6,
            "threads_in_use": 3,
            "memory_idle": 0.9,
            "memory_in_use": 0.5,
            "gpu_memory": 0.9,
            "gpu_temperature": 85,
            "until_ms": None,
        }
        return state

    def play(self, app: NodeApp) -> None:
        """Feed ``app`` the recording as if it had been watched for two minutes; ends with ``dressed``."""
        end = self.now
        first = self.states[0]
        for step in range(STEPS):
            state = dict(self.states[step * len(self.states) // STEPS])
            share = step / STEPS
            for name in ("bytes_in", "bytes_out"):
                last = self.states[-1][name]
                state[name] = round(
                    first[name] + (state[name] - first[name]) * 0.7 + (last - first[name]) * share * 0.3
                )
            self.now = end - (STEPS - step) * STEP_S
            app.history.add(cleaned(state), self.now)
        self.now = end
        app.take_state(cleaned(self.dressed()))


async def shoot(out: Path, folder: Path) -> list[Path]:
    """Write pictures of ``folder``'s recording into ``out``: each screen, the overview thrice."""
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    with contextlib.chdir(folder.parent):  # screens name the folder: nobody's own paths in a picture
        return await _shoot(out, Path(folder.name))


async def _shoot(out: Path, folder: Path) -> list[Path]:
    written = []
    more = (
        ("overview", (), "120x40", False),
        ("overview", (), "80x24", True),
        ("consent", (), "80x24", False),
    )
    for name, keys, size, light in (*((name, keys, "80x24", False) for name, keys in SHOTS), *more):
        recording = Recording(folder)
        app = NodeApp(folder, light=light, ascii=False, clock=recording.clock, watch=False)
        async with app.run_test(size=SIZES[size], tooltips=False) as pilot:
            recording.play(app)
            if name == "consent":
                app.take_state(cleaned(recording.dressed() | {"consent": ASKED}))
            await pilot.press(*keys)
            await settle(app)
            await pilot.pause()
            svg = app.export_screenshot(title="barnraise")
        path = out / f"{name}{'-large' if size == '120x40' else ''}{'-light' if light else ''}.svg"
        path.write_text(
            _REMOTE_FONTS.sub("", svg).replace("Fira Code", "Fira Code, monospace"), encoding="utf-8"
        )
        written.append(path)
    return written


async def settle(app: NodeApp) -> None:
    """Wait until nothing that ``app`` began is under way."""
    while app.busy:
        await asyncio.sleep(0.01)


def main() -> int:
    """Write the pictures named on the command line."""
    if not 2 <= len(sys.argv) <= 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[2]) if len(sys.argv) == 3 else RECORDING
    for path in asyncio.run(shoot(Path(sys.argv[1]), folder)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

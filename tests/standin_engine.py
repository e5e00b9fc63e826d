"""A child with the engine's protocol and without torch: it starts at once, and dies like the real one.

For stories about the process alone: killed, stopped, renewed. ``program(monkeypatch)`` puts
it in the real one's place; run as a program, this file is the child.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from barnraise.node.engine import EngineInfo, Generated, Progress
from barnraise.node.engine_child import BEAT_S, GenerateRequest, LoadRequest, Ping, Pong, Request
from barnraise.protocol.child import Child
from barnraise.protocol.child_serve import Send, serve
from barnraise.protocol.errors import BarnraiseError

STEP_S = 0.01


def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on engines in child processes are stand-ins."""
    start = Child.start

    async def started(argv: list[str], **options: Any) -> Child:
        assert "barnraise.node.engine_child" in argv
        return await start([sys.executable, __file__], **options)

    monkeypatch.setattr(Child, "start", started)


def handle(request: Request, send: Send) -> EngineInfo | Generated | Pong:
    """Each completion of a unit is one step, and one token."""
    match request:
        case LoadRequest():
            return EngineInfo(name="stand-in", device="cpu", memory_bytes=1)
        case GenerateRequest(work=work):
            rows = work.prompts * work.group_size
            for row in range(rows):
                if send.cancelled():
                    break
                send(Progress(completions=row + 1, tokens=row + 1))
                time.sleep(STEP_S)
            return Generated(rollouts=(), seconds=rows * STEP_S, tokens=rows)
        case Ping():
            return Pong()
    raise BarnraiseError(f"a stand-in cannot do {type(request).__name__}")


if __name__ == "__main__":
    serve(handle, Request, BEAT_S)

"""Asks torch about GPUs, and measures the engine, in a process of its own.

A broken driver may take a process along, or hang it; and a process that has once failed
to open a GPU cannot find it later. ``python -m barnraise.node.probe_child`` is the child; the
parent's side imports no torch.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from barnraise.node.bench import Measured, measure
from barnraise.node.devices import TorchFacts, probe_torch
from barnraise.protocol.child import Child
from barnraise.protocol.child_lines import log_in_child
from barnraise.protocol.child_serve import Send, serve
from barnraise.protocol.child_watch import Patience
from barnraise.protocol.errors import BarnraiseError, ChildError

BEAT_S = 1.0
PATIENCE = Patience(still_s=30.0, stuck_s=60.0, mute_s=120.0, busy_s=180.0)


class Ask(Struct, frozen=True, tag=True):
    """What does torch see? Reply: ``TorchFacts``."""


class Measure(Struct, frozen=True, kw_only=True, tag=True):
    """How fast is the engine? Events and reply: ``Measured``. ``device``: empty for the engine's choice."""

    seconds: float
    threads: int
    device: str = ""


class Prober:
    """The child, from outside."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def ask_torch(self) -> TorchFacts:
        """What torch sees; never raises: ``error`` says why it could not be asked."""
        try:
            facts: TorchFacts = await self._child.request(Ask(), TorchFacts, patience=PATIENCE)
            return facts
        except ChildError as error:
            return TorchFacts(error=str(error))

    async def measure(
        self, threads: int, seconds: float, progress: Callable[[Measured], None], device: str = ""
    ) -> Measured:
        """Measure the engine.

        Raises:
            ChildError: it does not work here; says why.
        """
        request = Measure(seconds=seconds, threads=threads, device=device)
        measured: Measured = await self._child.request(request, Measured, progress, patience=PATIENCE)
        return measured


@asynccontextmanager
async def open_prober(log: Path | None = None, *, humble: bool = False) -> AsyncIterator[Prober]:
    """Start a child for the time of a ``with``. ``humble``: it gives way to whatever else runs.

    Raises:
        ChildError: it cannot be started.
    """
    argv = [sys.executable, "-m", "barnraise.node.probe_child", *(["--humble"] if humble else [])]
    child = await Child.start(argv, name="the look at the hardware", log=log)
    try:
        yield Prober(child)
    finally:
        await child.kill()


def main() -> NoReturn:
    """The child: answer until the parent goes."""
    log_in_child("probe")
    parser = ArgumentParser(prog="barnraise.node.probe_child")
    parser.add_argument("--humble", action="store_true")
    if parser.parse_args().humble:
        with suppress(OSError, AttributeError):
            os.nice(10)

    def handle(request: Ask | Measure, send: Send) -> Any:
        if isinstance(request, Ask):
            return probe_torch()
        from barnraise.node.torch_engine import default_device

        device = request.device or default_device()
        try:
            return measure(device, request.threads, request.seconds, send, send.cancelled)
        except (RuntimeError, AssertionError) as error:  # torch's, of a device that does not work
            raise BarnraiseError(f"the engine does not work on {device}: {str(error)[:300]}") from error

    serve(handle, Ask | Measure, BEAT_S)


if __name__ == "__main__":
    main()

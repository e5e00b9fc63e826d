"""The node's view of its hardware: found at start, looked for again for minutes, shown in the tree (R11).

A driver may come up after us: what tells of a GPU without torch is looked at every few
seconds at first. When that changes, torch is asked in a process of its own, and an engine
that began on the CPU moves to the GPU between two units. A node without any is as well.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import psutil
import trio

from barnraise.node.bench import Measured
from barnraise.node.context import Context
from barnraise.node.devices import Signs, TorchFacts
from barnraise.node.events import EngineStopped
from barnraise.node.gpus import Gpu, find_gpus, no_gpu
from barnraise.node.processor import memory_limit
from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import StorageError
from barnraise.protocol.wire import printable

LOOK_S = 10.0
RETRY_S = 600.0  # how long a GPU that is not there yet is looked for often
SELDOM_S = 60.0
ASK_AGAIN_S = (20.0, 60.0, 120.0, 300.0)  # after the start: torch, where only it does not see the GPU
MEASURED_FILE = "engine.json"
_MOST_FILE = 4096


@runtime_checkable
class SurveyedEngine(Protocol):
    """An engine that runs on this very machine, in a process that can be started afresh."""

    async def look(self) -> Signs:
        """What tells of a GPU without torch."""

    async def ask_torch(self) -> TorchFacts:
        """What torch sees, asked in a fresh process. Never raises."""

    def renew(self) -> None:
        """Start the engine afresh before its next task, which will be a ``load``."""


async def watch(ctx: Context) -> None:
    """Keep ``ctx.facts.hardware`` true, until cancelled."""
    engine = ctx.engine
    hardware = ctx.facts.hardware = _machine(load_measured(ctx.config.data))
    ctx.changed.set()
    if not isinstance(engine, SurveyedEngine):
        return
    began, again = trio.current_time(), list(ASK_AGAIN_S)
    known: tuple[object, ...] | None = None
    torch, shown = TorchFacts(), ""
    while True:
        signs = await engine.look()
        found = find_gpus(signs, torch)
        there = any(gpu.used for gpu in found)
        elapsed = trio.current_time() - began
        only_torch = signs.any and not there and bool(torch.cuda or torch.hip or torch.error)
        if signs.fingerprint != known or (only_torch and again and elapsed >= again[0]):
            again = [moment for moment in again if moment > elapsed]
            first, known = known is None, signs.fingerprint
            torch = await engine.ask_torch() if signs.any else TorchFacts()
            found = find_gpus(signs, torch)
            came = not there and any(gpu.used for gpu in found)
            there = any(gpu.used for gpu in found)
            if (words := in_words(found)) != shown:
                shown = words
                ctx.say(words, logging.INFO)
            if came and not first:
                await _move(ctx, engine)
        hardware = ctx.facts.hardware = {**hardware, **_memory(), "gpus": [gpu.tree() for gpu in found]}
        ctx.changed.set()
        soon = there or trio.current_time() - began < RETRY_S
        await trio.sleep(LOOK_S if soon else SELDOM_S)


async def _move(ctx: Context, engine: SurveyedEngine) -> None:
    """Have the engine start afresh as soon as it is between two units."""
    seen = -1
    while ctx.state.engine != "idle":
        seen = await ctx.changed.wait(seen)
    ctx.say("a GPU has come up: the engine moves to it")
    engine.renew()
    ctx.feed(EngineStopped(alive=False))


def in_words(gpus: Sequence[Gpu]) -> str:
    """One line: what is used, and of everything else why not."""
    used = [gpu.name for gpu in gpus if gpu.used]
    parts = [f"the engine uses {printable(used[0])}" if used else no_gpu(platform.machine())]
    for gpu in gpus:
        if not gpu.used:
            cure = f" ({gpu.cure})" if gpu.cure else ""
            parts.append(f"not used: {printable(gpu.name)}, {printable(gpu.reason, 300)}{cure}")
    return "; ".join(parts)


def _machine(measured: Measured | None) -> dict[str, Any]:
    return {
        "gpus": [],
        "cores": os.cpu_count() or 1,
        **_memory(),
        "measured_tokens_per_s": None if measured is None else round(measured.tokens_per_s, 1),
        "gflops": None if measured is None else round(measured.gflops, 2),
    }


def _memory() -> dict[str, Any]:
    memory, limit = psutil.virtual_memory(), memory_limit()
    return {
        "memory_total": int(memory.total if limit is None else min(memory.total, limit)),
        "memory_free": int(memory.available),
    }


# --- the benchmark that ``doctor`` made last


def keep_measured(data: Path, measured: Measured) -> None:
    """Keep it for the node; a disk that refuses costs nothing but the number."""
    try:
        write_durably(data / MEASURED_FILE, msgspec.json.encode(measured))
    except StorageError as error:
        logging.getLogger(__name__).debug("the benchmark is not kept: %s", error)


def load_measured(data: Path) -> Measured | None:
    """What ``doctor`` measured here last; None if it did not."""
    try:
        with (data / MEASURED_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(_MOST_FILE), type=Measured)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None

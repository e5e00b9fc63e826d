"""The engine in a child process: what a node runs, so that a model can never take the daemon along.

The parent's side, ``ChildEngine``, imports no torch. ``python -m barnraise.node.engine_child``
is the child. Out-of-memory inside it is reported and survived where torch lets it; a
child that was killed is started afresh, with its version loaded again where that is known.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import trio
from msgspec import Struct

from barnraise.node.block_engine import BlockProgress, BlockTrained, BlockWork
from barnraise.node.devices import Signs, TorchFacts, look_for_signs
from barnraise.node.engine import EngineInfo, EngineLimits, Generated, OutOfMemory, Progress, Work
from barnraise.node.probe_child import open_prober
from barnraise.protocol.child import Child, ChildOutOfMemoryError
from barnraise.protocol.child_lines import log_in_child
from barnraise.protocol.child_serve import Send, serve
from barnraise.protocol.child_watch import Patience
from barnraise.protocol.errors import ChildError
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.unit_context import about, unit_log

story = unit_log("barnraise.node.engine_child")

STOP_S = 1.2
"""A cancelled engine that is still busy after this long is killed."""
BEAT_S = 1.0
NICE = 5
"""How far behind everybody else on the machine a volunteer's engine stands in line for the processor."""


class LoadRequest(Struct, frozen=True, kw_only=True, tag=True):
    """Make ``version``, whose files lie in ``folder``, the loaded one. Reply: ``EngineInfo``."""

    spec: RunSpec
    folder: str
    version: int


class GenerateRequest(Struct, frozen=True, kw_only=True, tag=True):
    """Draw a unit. Events: ``Progress``. Reply: ``Generated`` or ``NoMemory``."""

    work: Work


class TrainRequest(Struct, frozen=True, kw_only=True, tag=True):
    """Train a block unit; nothing need be loaded. Events: ``BlockProgress``.

    Reply: ``BlockTrained`` or ``NoMemory``.
    """

    spec: RunSpec
    work: BlockWork


class Ping(Struct, frozen=True, kw_only=True, tag=True):
    """Answered by ``Pong`` once everything before it is over."""


class Pong(Struct, frozen=True, kw_only=True, tag=True):
    pass


class NoMemory(Struct, frozen=True, kw_only=True, tag=True):
    """Memory ran out, and the child lives."""

    text: str


Request = LoadRequest | GenerateRequest | TrainRequest | Ping | EngineLimits


class ChildEngine:
    """An ``Engine`` and ``BlockEngine`` in a child process, started by the first call.

    After a death the next call starts another.
    """

    def __init__(
        self,
        threads: int = 0,
        log: Path | None = None,
        device: str = "",
        patience: Patience = Patience(),
        nice: int = 0,
        engine: str = "auto",
    ) -> None:
        """Nothing is started yet.

        Args:
            threads: torch's threads in the child; 0 means half of the cores.
            log: file for the child's messages; None shares ours.
            device: a torch device; empty means the accelerator if there is one, else the CPU.
            patience: with a child that hangs; it is killed, and the next call starts another.
            nice: by how much the child's niceness is above ours.
            engine: ``auto``, ``torch`` or ``vllm`` (``barnraise.node.engine_choice``).
        """
        self._threads = threads
        self._log = log
        self._device = device
        self._patience = patience
        self._nice = nice
        self._engine = engine
        self._child: Child | None = None
        self._last: LoadRequest | None = None  # what the node believes to be loaded
        self._stale = False
        self._limits: EngineLimits | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._child.pid if self._child is not None and self._child.alive else None

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        """See ``Engine.load``. Running out of memory here is a ``ChildError`` that says so."""
        self._last = None
        request = LoadRequest(spec=spec, folder=str(folder), version=version)
        child = await self._running()
        try:
            info = await self._load(child, request)
        except trio.Cancelled:
            await self._settle(child)
            raise
        self._last = request
        return info

    async def generate(self, work: Work, progress: Callable[[Progress], None]) -> Generated:
        """See ``Engine.generate``. After an out-of-memory death the version is loaded again first."""
        if self._last is None:
            raise ChildError("the engine has no model loaded")
        if self._child is None or not self._child.alive:
            await self._load(await self._running(), self._last)
        generated: Generated = await self._at_work(GenerateRequest(work=work), Generated, progress, Progress)
        return generated

    async def train(
        self, spec: RunSpec, work: BlockWork, progress: Callable[[BlockProgress], None]
    ) -> BlockTrained:
        """See ``BlockEngine.train``."""
        request = TrainRequest(spec=spec, work=work)
        trained: BlockTrained = await self._at_work(request, BlockTrained, progress, BlockProgress)
        return trained

    async def _at_work(
        self,
        request: GenerateRequest | TrainRequest,
        reply_type: type[Struct],
        progress: Callable[[Any], None],
        events: type[Struct],
    ) -> Any:
        child = await self._running()
        try:
            reply = await child.request(
                request, reply_type | NoMemory, progress, events=events, patience=self._patience
            )
        except trio.Cancelled:
            await self._settle(child)
            raise
        except ChildOutOfMemoryError as error:
            raise OutOfMemory(str(error)) from error
        except ChildError:
            if not child.alive:
                self._last = None  # the next load starts a fresh one
            raise
        if isinstance(reply, NoMemory):
            raise OutOfMemory(reply.text)
        return reply

    async def limit(self, limits: EngineLimits) -> None:
        """See ``LimitedEngine.limit``; the child takes it up before its next step, or when it starts."""
        self._limits = limits
        if self._child is not None and self._child.alive:
            with contextlib.suppress(ChildError):
                await self._child.tell(limits)

    async def look(self) -> Signs:
        """See ``barnraise.node.hardware.SurveyedEngine``."""
        return await trio.to_thread.run_sync(look_for_signs, abandon_on_cancel=True)  # type: ignore[call-arg]

    async def ask_torch(self) -> TorchFacts:
        """See ``barnraise.node.hardware.SurveyedEngine``."""
        try:
            async with open_prober(self._log, humble=True) as prober:
                return await prober.ask_torch()
        except ChildError as error:
            return TorchFacts(error=str(error))

    def renew(self) -> None:
        """See ``barnraise.node.hardware.SurveyedEngine``."""
        self._stale, self._last = True, None

    async def close(self) -> None:
        """See ``Engine.close``."""
        child, self._child, self._last = self._child, None, None
        if child is not None:
            await child.close()

    async def _running(self) -> Child:
        stale, self._stale = self._stale, False
        if self._child is None or not self._child.alive or stale:
            if self._child is not None:
                await self._child.kill()
            threads = self._threads if self._limits is None else self._limits.threads
            argv = [sys.executable, "-m", "barnraise.node.engine_child", "--threads", str(threads)]
            argv += ["--beat", str(BEAT_S), "--nice", str(self._nice), "--engine", self._engine]
            if self._device:
                argv += ["--device", self._device]
            environment = {"OMP_NUM_THREADS": str(threads)} if threads else None
            self._child = await Child.start(argv, name="engine", log=self._log, env=environment)
            if self._limits is not None:
                await self._child.tell(self._limits)
        return self._child

    async def _load(self, child: Child, request: LoadRequest) -> EngineInfo:
        reply: EngineInfo | NoMemory = await child.request(
            request, EngineInfo | NoMemory, patience=self._patience
        )
        if isinstance(reply, NoMemory):
            await child.kill()
            raise ChildError(f"the engine ran out of memory loading version {request.version}: {reply.text}")
        return reply

    async def _settle(self, child: Child) -> None:
        """Wait until the cancelled child is idle; kill it if that takes too long."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(STOP_S) as scope, contextlib.suppress(ChildError):
                await child.request(Ping(), Pong)
            if scope.cancelled_caught:
                await child.kill()


def main() -> NoReturn:
    """The child: serve requests until the parent goes."""
    log_in_child("engine")
    parser = ArgumentParser(prog="barnraise.node.engine_child")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="")
    parser.add_argument("--beat", type=float, default=0.0)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--engine", default="auto")
    options = parser.parse_args()
    if options.nice > 0:
        _stand_back(options.nice)

    import psutil
    import torch

    from barnraise.node.engine_limits import Limiter
    from barnraise.node.picked_engine import PickedEngine
    from barnraise.node.torch_engine import BlockUnits

    torch.set_num_threads(options.threads or max(1, (psutil.cpu_count(logical=False) or 2) // 2))
    generator = PickedEngine(options.engine, options.device or None)
    units = BlockUnits(options.device or None)
    limiter = Limiter(generator.device)

    def handle(request: Request, send: Send) -> EngineInfo | Generated | BlockTrained | NoMemory | Pong:
        def stopped() -> bool:
            limiter.apply()
            return send.cancelled()

        limiter.apply()
        try:
            match request:
                case LoadRequest(spec=spec, folder=folder, version=version):
                    return generator.load(spec, Path(folder), version)
                case GenerateRequest(work=work):
                    with about(work):
                        return _generated(generator.generate(work, send, stopped))
                case TrainRequest(spec=spec, work=work):
                    generator.close()  # blocks want the memory, and their stage comes before or after
                    with about(work):
                        return _trained(units.train(spec, work, send, stopped))
                case Ping() | EngineLimits():
                    return Pong()
        except OutOfMemory as error:
            return NoMemory(text=str(error))

    serve(handle, Request, options.beat, limiter.want)


def _generated(done: Generated) -> Generated:
    story.info("drew %d completions, %d tokens, in %.2f s", len(done.rollouts), done.tokens, done.seconds)
    return done


def _trained(done: BlockTrained) -> BlockTrained:
    losses = ", ".join(f"{loss:.4f}" for loss in done.losses)
    story.info("trained on %d tokens in %.2f s, losses %s", done.tokens, done.seconds, losses)
    return done


def _stand_back(by: int) -> None:
    """Let others on the machine have the processor first."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(by)
    # Linux may weigh sessions rather than processes, and this one has a session of its own.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "r+") as file:
        file.write(str(by))


if __name__ == "__main__":
    main()

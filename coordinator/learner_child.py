"""The learner in a child process: ``python -m barnraise.coordinator.learner_child``.

The event loop never waits for a gradient, and what training does to its process
(memory, crashes) stays there (R5). A job is safe to send again: a version that was
finished is reported, one that was cut short is made anew from the last checkpoint.
The parent's side imports no torch. A learner of several processes (``LearnerScale``) is one child
to the parent: the first process, which starts or meets the others (``learner_launch``).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import trio
from msgspec import Struct

from barnraise.coordinator.block_workers import RecombineJob, RoundJob, StageProgress
from barnraise.coordinator.remote_files import FileReply, FileRequest, NoFiles
from barnraise.coordinator.workers import LearnerScale, Report, Trained, TrainJob, WorkerSetup
from barnraise.protocol.child import Child, ChildOutOfMemoryError
from barnraise.protocol.child_lines import log_in_child
from barnraise.protocol.child_serve import Send, serve
from barnraise.protocol.errors import BarnraiseError, ChildError
from barnraise.protocol.log_lines import tell_run

if TYPE_CHECKING:
    from barnraise.coordinator.learner_launch import Others
    from barnraise.coordinator.learner_shards import Processes
    from barnraise.coordinator.remote import Elsewhere
    from barnraise.coordinator.remote_files import FileHost
    from barnraise.coordinator.workshop import Workshop

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Children that one request may cost before it is given up."""
REPORT_EVERY_S = 0.25
MICRO_BATCH_BYTES = 2 * 1024**3
"""Activations that a backward pass may keep, by estimate; quartered when memory runs out."""


class SetUp(Struct, frozen=True, kw_only=True, tag=True):
    """First request: which run, and how much memory for activations."""

    worker: WorkerSetup
    micro_batch_bytes: int
    processes: int = 1
    recompute: bool = False


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``SetUp``: tokenizer and environment are read."""


class InitialJob(Struct, frozen=True, kw_only=True, tag=True):
    """Request: evaluate version 0, or report it again. The reply is ``Trained``."""


Requests = SetUp | InitialJob | TrainJob | RoundJob | RecombineJob


class _SetUpRefused(ChildError):
    """The child lived long enough to say why it cannot work for this run."""


class ChildLearner:
    """The learner seam over a child, which is started when first needed and after it died."""

    def __init__(
        self,
        setup: WorkerSetup,
        log_path: Path | None = None,
        scale: LearnerScale | None = None,
        at: Elsewhere | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            log_path: file to which the child's messages are appended; None shares ours.
            scale: over how many processes; one by default.
            at: where it runs, if not on this machine.
        """
        self._at = at
        self._scale = scale or LearnerScale()
        self.on_progress: Report = lambda subject, fraction: None
        self._setup = setup
        self._log = log_path
        self._child: Child | None = None
        self._lock = trio.Lock()
        self._micro_batch_bytes = MICRO_BATCH_BYTES
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._child.pid if self._child is not None and self._child.alive else None

    async def initial(self) -> Trained:
        """See ``barnraise.coordinator.workers.Learner``.

        Raises:
            ChildError: the run folder cannot be used, or the learner died ``ATTEMPTS`` times.
        """
        return await self._request(InitialJob())

    async def train(self, job: TrainJob | RoundJob | RecombineJob) -> Trained:
        """See ``barnraise.coordinator.workers.Learner``. A child that dies is replaced and asked again.

        Raises:
            ChildError: the learner refused (a damaged checkpoint, a full disk: the text
                says which), or died ``ATTEMPTS`` times.
        """
        return await self._request(job)

    async def close(self) -> None:
        """End the child, in the middle of a job too; safe to call twice."""
        self._closed = True
        await self._end_child()

    async def _request(self, request: InitialJob | TrainJob | RoundJob | RecombineJob) -> Trained:
        async with self._lock:
            if self._at is not None:
                made = self._at.made(0 if isinstance(request, InitialJob) else request.version)
                if made is not None:
                    return made
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    child = await self._started()
                    if self._at is None:
                        return await child.request(request, Trained, self._note, events=StageProgress)
                    await self._at.send_for(child, None if isinstance(request, InitialJob) else request)
                    trained = await child.request(request, Trained, self._note, events=StageProgress)
                    return await self._at.bring(child, trained)
                except ChildError as error:
                    refused = isinstance(error, _SetUpRefused) or self.pid is not None
                    if refused or self._closed or attempt == ATTEMPTS:
                        raise  # asking again would change nothing, nobody asks any more, or enough is enough
                    if isinstance(error, ChildOutOfMemoryError):
                        self._micro_batch_bytes //= 4
                    log.warning("%s; starting another (%d of %d)", error, attempt + 1, ATTEMPTS)
            raise AssertionError  # unreachable: the last attempt returns or raises

    def _note(self, progress: StageProgress) -> None:
        self.on_progress(progress.subject, progress.fraction)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _started(self) -> Child:
        if self._child is not None and self._child.alive:
            return self._child
        await self._end_child()
        threads = str(max(1, self._setup.threads))
        environment = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self._scale.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._scale.devices
        torchrun = ("torch.distributed.run", *self._scale.torchrun, "-m") if self._scale.torchrun else ()
        here = (sys.executable, "-m", *torchrun, "barnraise.coordinator.learner_child")
        child = await Child.start(
            here if self._at is None else self._at.argv,
            name="learner",
            log=self._log,
            env=environment,
        )
        try:
            if self._at is not None:
                self._at.on_progress = self.on_progress
                await self._at.meet(child)
            await child.request(
                SetUp(
                    worker=self._setup if self._at is None else self._at.setup,
                    micro_batch_bytes=self._micro_batch_bytes,
                    processes=self._scale.processes,
                    recompute=self._scale.recompute,
                ),
                Ready,
            )
        except BaseException as error:
            refused = isinstance(error, ChildError) and child.alive
            await child.kill()  # half set up, it would refuse everything else
            if refused:
                raise _SetUpRefused(str(error)) from error
            raise
        self._child = child
        return child


def main(host: FileHost | NoFiles = NoFiles(), threads: int = 0) -> None:
    """The child's main thread; arguments as those of ``verifier_child.main``."""
    rank = os.environ.get("RANK", "0")
    log_in_child("learner" if rank == "0" else f"learner {rank}")
    if rank != "0":
        _follow()
    workshop: Workshop | None = None
    processes: Processes | None = None
    others: Others | None = None

    def handle(request: Requests | FileRequest, send: Send) -> Ready | Trained | FileReply:
        nonlocal workshop, processes, others
        if isinstance(request, FileRequest):
            return host.handle(request)
        if isinstance(request, SetUp):
            request = msgspec.structs.replace(request, worker=host.here(request.worker, threads))
        import torch

        if isinstance(request, SetUp):
            tell_run(request.worker.run_id)
            torch.set_num_threads(max(1, request.worker.threads))
            if request.processes > 1:
                from barnraise.coordinator import learner_launch

                processes, others = learner_launch.join(request.processes)
        elif workshop is None:
            raise BarnraiseError("the learner was asked before it was set up")
        if processes is None or others is None:
            return perform(request, send)
        return _together(processes, others, request, lambda: perform(request, send))

    def perform(request: Requests, send: Send) -> Ready | Trained:
        nonlocal workshop
        from barnraise.coordinator.workshop import Workshop

        if isinstance(request, SetUp):
            workshop = Workshop(request.worker, request.micro_batch_bytes, request.recompute, processes)
            return Ready()
        assert workshop is not None
        workshop.on_progress = _sparing(send)
        return workshop.initial() if isinstance(request, InitialJob) else workshop.make(request)

    serve(handle, Requests | FileRequest)


def _together(
    processes: Processes, others: Others, request: Requests, perform: Callable[[], Ready | Trained]
) -> Ready | Trained:
    """Have all processes do a request; a death among them ends this one, with the reason."""
    from barnraise.coordinator import learner_launch

    refused: BarnraiseError | None = None
    made: Ready | Trained | None = None
    try:
        learner_launch.tell(processes, request)
        try:
            made = perform()
        except BarnraiseError as error:
            refused = error
        learner_launch.settle(processes, refused is not None)
    except Exception as error:
        raise others.explain(error) from error
    if refused is not None:
        raise refused
    assert made is not None
    return made


def _follow() -> NoReturn:
    """The main thread of any learner process but the first."""
    import torch

    from barnraise.coordinator import learner_launch
    from barnraise.coordinator.workshop import Workshop

    workshop: Workshop | None = None

    def handle(request: Requests, processes: Processes) -> None:
        nonlocal workshop
        if isinstance(request, SetUp):
            tell_run(request.worker.run_id)
            torch.set_num_threads(max(1, request.worker.threads))
            workshop = Workshop(request.worker, request.micro_batch_bytes, request.recompute, processes)
        elif workshop is not None and not isinstance(request, InitialJob):
            workshop.assist(request)

    learner_launch.follow(handle, Requests)


def _sparing(send: Send) -> Report:
    """Progress to the parent, a few times a second at most."""
    last = 0.0

    def report(subject: str, fraction: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= REPORT_EVERY_S or fraction >= 1:
            last = now
            send(StageProgress(subject=subject, fraction=fraction))

    return report


if __name__ == "__main__":
    main()

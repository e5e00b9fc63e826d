"""The verifier in a child process: ``python -m barnraise.coordinator.verifier_child``.

The event loop never waits for torch, and what a model does to its process (memory,
crashes) stays there (R5). The parent's side imports no torch.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import trio
from msgspec import Struct

from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob
from barnraise.coordinator.patience import (
    FLOOR_S,
    Patience,
    StalledError,
    WorkerAwayError,
    block_allowance,
    stalled,
)
from barnraise.coordinator.remote_files import FileReply, FileRequest, NoFiles
from barnraise.coordinator.workers import Judged, VerifyJob, WorkerSetup
from barnraise.protocol.child import Child
from barnraise.protocol.child_lines import log_in_child
from barnraise.protocol.child_serve import Send, serve
from barnraise.protocol.errors import BarnraiseError, ChildError
from barnraise.protocol.log_lines import tell_run
from barnraise.protocol.unit_context import about

if TYPE_CHECKING:
    from barnraise.coordinator.block_judge import BlockJudge
    from barnraise.coordinator.remote import Elsewhere
    from barnraise.coordinator.remote_files import FileHost
    from barnraise.coordinator.verifier import Judge

Reply = TypeVar("Reply", bound=Struct)

log = logging.getLogger(__name__)


class VerifyBatch(Struct, frozen=True, kw_only=True, tag=True):
    """Request: judge these."""

    jobs: tuple[VerifyJob, ...]


class VerifyResults(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``VerifyBatch``: one result per job, same order."""

    results: tuple[Judged, ...]


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``WorkerSetup``: tokenizer and environment are read."""


class ChildVerifier:
    """The verifier seam over a child, which is started when first needed and after it died."""

    slots = 1
    program: tuple[str, ...] = (sys.executable, "-m", "barnraise.coordinator.verifier_child")

    def __init__(
        self,
        setup: WorkerSetup,
        log_path: Path | None = None,
        accelerator: str = "",
        at: Elsewhere | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            log_path: file to which the child's messages are appended; None shares ours.
            accelerator: the one CUDA device that the child may see; empty leaves it all.
            at: where it runs, if not on this machine.
        """
        self.accelerator = accelerator
        self._at = at
        self._setup = setup
        self._log = log_path
        self._child: Child | None = None
        self._lock = trio.Lock()
        self._patience = Patience(setup.spec.model.parameters)

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._child.pid if self._child is not None and self._child.alive else None

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        """See ``barnraise.coordinator.workers.Verifier``. A child that dies is replaced once per call.

        Raises:
            StalledError: it took far longer than these jobs can take, and was ended.
            WorkerAwayError: it runs elsewhere, and cannot be reached.
            ChildError: the verifier died again, could not be started, or could not load a version.
        """
        return (await self._ask(VerifyBatch(jobs=jobs), VerifyResults)).results

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        """See ``barnraise.coordinator.workers.Verifier``. A child that dies is replaced once per call.

        Raises:
            StalledError, ChildError: as ``verify``.
        """
        return await self._ask(job, BlockResult)

    async def close(self) -> None:
        """End the child; safe to call twice."""
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _ask(self, request: VerifyBatch | BlockVerifyJob, reply: type[Reply]) -> Reply:
        async with self._lock:
            try:
                return await self._request(request, reply)
            except StalledError:  # once more would take as long
                raise
            except ChildError as error:
                if self.pid is not None:  # it lives and refused: asking again would change nothing
                    raise
                log.warning("%s; starting another", error)
            return await self._request(request, reply)

    async def _request(self, request: VerifyBatch | BlockVerifyJob, reply: type[Reply]) -> Reply:
        """Ask once; a child that is at a batch or a unit for far too long is ended."""
        child = await self._started()
        if self._at is not None:
            await self._at.send_for(child, request if isinstance(request, BlockVerifyJob) else request.jobs)
        if isinstance(request, BlockVerifyJob):
            allowed = block_allowance(self._setup.spec, request.segments)
            with trio.move_on_after(allowed):
                return await child.request(request, reply)
            await child.kill()
            raise StalledError(f"the verifier was at one block unit for {allowed:.0f} s and was ended")
        began, allowed = trio.current_time(), self._patience.allowance(request.jobs)
        with trio.move_on_after(allowed):
            answer = await child.request(request, reply)
            self._patience.note(request.jobs, trio.current_time() - began)
            return answer
        await child.kill()
        raise stalled(request.jobs, allowed)

    async def _started(self) -> Child:
        if self._child is not None and self._child.alive:
            return self._child
        await self.close()
        threads = str(max(1, self._setup.threads))
        environment = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.accelerator:
            environment["CUDA_VISIBLE_DEVICES"] = self.accelerator
        try:
            child = await Child.start(
                self.program if self._at is None else self._at.argv,
                name="verifier",
                log=self._log,
                env=environment,
            )
        except ChildError as error:
            if self._at is None:
                raise
            raise WorkerAwayError(str(error)) from error
        self._child = child
        try:
            if self._at is not None:
                await self._at.meet(child)
            with trio.move_on_after(FLOOR_S):
                await child.request(self._setup if self._at is None else self._at.setup, Ready)
                return child
            raise StalledError(
                f"the verifier was not ready within {FLOOR_S / 60:.0f} minutes of its start and was stopped: "
                "see verifier.log for what it waits for"
            )
        except BaseException:
            # Half set up: a child that refused its setup would refuse everything else.
            self._child = None
            await child.kill()
            raise


def main(host: FileHost | NoFiles = NoFiles(), threads: int = 0) -> None:
    """The child's main thread.

    Args:
        host: the run folder's stand-in, on another machine than the coordinator's.
        threads: overrides the coordinator's word; 0: does not.
    """
    log_in_child("verifier")
    setup: WorkerSetup | None = None
    judge: Judge | None = None
    blocks: BlockJudge | None = None

    def handle(
        request: WorkerSetup | VerifyBatch | BlockVerifyJob | FileRequest, send: Send
    ) -> Ready | VerifyResults | BlockResult | FileReply:
        nonlocal setup, judge, blocks
        if isinstance(request, FileRequest):
            return host.handle(request)
        if isinstance(request, WorkerSetup):
            request = host.here(request, threads)
        import torch

        from barnraise.coordinator.block_judge import BlockJudge
        from barnraise.coordinator.verifier import Judge

        if isinstance(request, WorkerSetup):
            torch.set_num_threads(max(1, request.threads))
            tell_run(request.run_id)
            setup, judge = request, Judge(request)
            return Ready()
        if setup is None or judge is None:
            raise BarnraiseError("the verifier was asked before it was set up")
        if isinstance(request, BlockVerifyJob):
            blocks = blocks or BlockJudge(setup)
            with about(request.lease, request.submission_id):
                return blocks.judge(request, send.cancelled)
        blocks = None  # memory: once there are rollouts, units are late ones at most
        return VerifyResults(results=judge.judge(request.jobs, send.cancelled))

    serve(handle, WorkerSetup | VerifyBatch | BlockVerifyJob | FileRequest)


if __name__ == "__main__":
    main()

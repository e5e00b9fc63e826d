"""The verifier in a child process: ``python -m barnraise.coordinator.verifier_child``.

The event loop never waits for torch, and what a model does to its process (memory,
crashes) stays there (R5). The parent's side imports no torch.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from msgspec import Struct

from barnraise.coordinator.workers import Judged, VerifyJob, WorkerSetup
from barnraise.protocol.child import Child, Send, serve
from barnraise.protocol.errors import BarnraiseError, ChildError

if TYPE_CHECKING:
    from barnraise.coordinator.verifier import Judge

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

    def __init__(self, setup: WorkerSetup, log_path: Path | None = None, accelerator: str = "") -> None:
        """Nothing is started yet.

        Args:
            log_path: file to which the child's messages are appended; None shares ours.
            accelerator: the one CUDA device that the child may see; empty leaves it all.
        """
        self._accelerator = accelerator
        self._setup = setup
        self._log = log_path
        self._child: Child | None = None
        self._lock = trio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._child.pid if self._child is not None and self._child.alive else None

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        """See ``barnraise.coordinator.workers.Verifier``. A child that dies is replaced once per call.

        Raises:
            ChildError: the verifier died again, could not be started, or could not load a version.
        """
        async with self._lock:
            try:
                return await self._ask(jobs)
            except ChildError as error:
                if self.pid is not None:  # it lives and refused: asking again would change nothing
                    raise
                log.warning("%s; starting another", error)
            return await self._ask(jobs)

    async def close(self) -> None:
        """End the child; safe to call twice."""
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _ask(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        child = await self._started()
        return (await child.request(VerifyBatch(jobs=jobs), VerifyResults)).results

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
        if self._accelerator:
            environment["CUDA_VISIBLE_DEVICES"] = self._accelerator
        child = await Child.start(
            [sys.executable, "-m", "barnraise.coordinator.verifier_child"],
            name="verifier",
            log=self._log,
            env=environment,
        )
        self._child = child
        try:
            await child.request(self._setup, Ready)
        except BaseException:
            # Half set up: a child that refused its setup would refuse everything else.
            self._child = None
            await child.kill()
            raise
        return child


def main() -> None:
    """The child's main thread."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s verifier %(levelname)s %(message)s")
    judge: Judge | None = None

    def handle(request: WorkerSetup | VerifyBatch, send: Send) -> Ready | VerifyResults:
        nonlocal judge
        import torch

        from barnraise.coordinator.verifier import Judge

        if isinstance(request, WorkerSetup):
            torch.set_num_threads(max(1, request.threads))
            judge = Judge(request)
            return Ready()
        if judge is None:
            raise BarnraiseError("the verifier was asked before it was set up")
        return VerifyResults(results=judge.judge(request.jobs, send.cancelled))

    serve(handle, WorkerSetup | VerifyBatch)


if __name__ == "__main__":
    main()

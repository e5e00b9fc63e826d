"""From verdicts to trained versions: form a batch, have it trained on, hand the checkpoint over.

Publishing is another belt's (``publish_belt``): as soon as a checkpoint is durable the
next batch may be formed, and the learner waits only when it has finished a version
while the one before is still being published. The belt is rebuilt from the state
alone: a batch that was under way at a crash is durable, and is sent again. A learner
that fails is tried again, later and later; meanwhile everything else goes on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import trio

from barnraise.coordinator import scheduler
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import BatchFormed, VersionTrained
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.workers import BatchPart, Learner, Trained, TrainJob
from barnraise.protocol.errors import BarnraiseError, ChildError

log = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


@dataclass
class LearnBelt:
    """Forms batches and has them trained on; see ``run``.

    ``serial``: form no batch while a version is being published. Only good for
    measuring what the overlap is worth (``python -m benchmarks.publishing``).
    """

    core: Core
    learner: Learner
    run_folder: Path
    progress: Progress
    serial: bool = False

    async def run(self) -> None:
        """Raise the policy until the last version is trained."""
        pause = FIRST_RETRY_S
        while self.core.state.made < self.core.spec.rollout.versions:
            try:
                await self._one_version()
                self.progress.learner_trouble = ""
                pause = FIRST_RETRY_S
            except BarnraiseError as error:
                self.progress.learner_trouble = str(error)
                log.error("learner: %s; again in %.0f s", error, pause)
                await trio.sleep(pause)
                pause = min(pause * 2, LAST_RETRY_S)

    async def _one_version(self) -> None:
        core = self.core
        if core.state.made < 0:
            self.progress.learner = "evaluating"
            await self._hand_over(await self.learner.initial(), 0)
            return
        batch = await self._batch()
        self.progress.learner = "training"
        await self._hand_over(await self.learner.train(await job_of(core, batch)), batch.version)

    async def _batch(self) -> BatchFormed:
        core = self.core
        while True:
            if core.state.batch is not None:
                await core.record([])  # durable before the learner starts
                return core.state.batch
            if self.serial:
                await self._published()
            self.progress.learner = "collecting" if core.state.head >= 0 else "publishing"
            changed = core.changed
            formed = scheduler.form_batch(core.state, core.spec.rollout, core.now_ms())
            if formed is None:
                await changed.wait()
                continue
            await core.record([formed])

    async def _hand_over(self, trained: Trained, version: int) -> None:
        if trained.version != version:
            raise ChildError(f"the learner made version {trained.version} instead of {version}")
        await self._published()  # the bound: one version trained and not published, no more
        self.progress.learner = "publishing"
        done = VersionTrained(
            version=version,
            weights=_relative(Path(trained.weights), self.run_folder),
            stats=trained.stats,
            accuracy=trained.accuracy,
            at_ms=self.core.now_ms(),
        )
        await self.core.record([done])

    async def _published(self) -> None:
        """Wait while there is a version that is trained and not published."""
        while True:
            changed = self.core.changed
            if self.core.state.unpublished is None:
                return
            self.progress.learner = "publishing"
            await changed.wait()


async def job_of(core: Core, batch: BatchFormed) -> TrainJob:
    """What the learner needs to make ``batch.version``: payloads from the journal, rewards from the state."""
    payloads = await core.offload(lambda: core.journal.payloads(batch.submissions))
    parts = []
    for submission_id in batch.submissions:
        item = core.state.submissions[submission_id]
        parts.append(BatchPart(lease=item.lease, payload=payloads[submission_id], rewards=item.rewards))
    return TrainJob(version=batch.version, parts=tuple(parts))


def _relative(path: Path, folder: Path) -> str:
    try:
        return str(path.resolve().relative_to(folder.resolve()))
    except ValueError:
        return str(path)

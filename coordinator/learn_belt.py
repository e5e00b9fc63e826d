"""From verdicts to trained versions: form a batch or round, have it made, hand the checkpoint over.

Publishing is another belt's (``publish_belt``): as soon as a checkpoint is durable the
next batch may be formed, and the learner waits only when it has finished a version
while the one before is still being published. The belt is rebuilt from the state
alone: a batch that was under way at a crash is durable, and is sent again. A learner
that fails is tried again, later and later; meanwhile everything else goes on.
"""

from __future__ import annotations

import hashlib
import logging
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from barnraise.coordinator import scheduler, unit_lines
from barnraise.coordinator.block_events import RoundFormed
from barnraise.coordinator.block_scheduler import form_round, round_ends
from barnraise.coordinator.block_workers import (
    DELTA_FILE,
    Contribution,
    RecombineJob,
    RoundJob,
    unit_folder,
)
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import BatchFormed, VersionTrained
from barnraise.coordinator.operator_events import RollbackOrdered
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.rollback import published_as, take_up_again
from barnraise.coordinator.workers import BatchPart, Learner, Trained, TrainJob
from barnraise.protocol import wire
from barnraise.protocol.errors import BarnraiseError, ChildError, RunFolderError
from barnraise.protocol.pretrain import BlockSubmission, PretrainSpec, last_block_version, model_version
from barnraise.protocol.unit_context import about

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
        """Raise the policy until the last version is trained, and further if the operator wants more."""
        pause = FIRST_RETRY_S
        while True:
            changed = self.core.changed
            state, last = self.core.state, self.core.settings.rollout.versions
            if state.made >= last and state.operations.rollback is None:
                await changed.wait()
                continue
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
        core, pretrain = self.core, self.core.spec.pretrain
        if core.state.made < 0:
            self.progress.begin("evaluating" if pretrain is None else "scaffold")
            await self._hand_over(await self.learner.initial(), 0)
            return
        if pretrain is not None and core.state.made < model_version(pretrain):
            job = await self._round(pretrain)
            recombines = isinstance(job, RecombineJob)
            self.progress.begin("recombining" if recombines else "adding up the blocks")
            await self._hand_over(await self.learner.train(job), job.version)
            return
        batch = await self._batch()
        if isinstance(batch, RollbackOrdered):
            version, earlier = core.state.made + 1, batch.to_version
            again = await core.offload(
                lambda: take_up_again(
                    self.run_folder,
                    version,
                    earlier,
                    published_as(self.run_folder, core.journal, core.spec, earlier),
                )
            )
            await self._hand_over(again, version)
            return
        self.progress.begin("training")
        await self._hand_over(await self.learner.train(await job_of(core, batch)), batch.version)

    async def _round(self, pretrain: PretrainSpec) -> RoundJob | RecombineJob:
        """The next round's job, once it is full, or its time is up and there is a quorum."""
        core = self.core
        while True:
            formed = core.state.blocks.round
            if formed is not None and formed.version > core.state.made:
                await core.record([])  # durable before the learner starts
                return await block_job(core, formed, self.run_folder)
            changed, now = core.changed, core.now_ms()
            publishing = core.state.unpublished is not None
            self.progress.begin("publishing" if publishing else "collecting")
            formed = None if core.state.operations.paused else form_round(core.state, pretrain, now)
            if formed is not None:
                await core.record([formed])
                unit_lines.batched(unit_lines.known(core.state, formed.submissions), formed.version)
                continue
            left = (round_ends(core.state, pretrain) - now) / 1000
            with trio.move_on_after(left if left > 0 else math.inf):
                await changed.wait()

    async def _batch(self) -> BatchFormed | RollbackOrdered:
        core = self.core
        while True:
            if core.state.operations.rollback is not None:
                await core.record([])
                return core.state.operations.rollback
            if core.state.batch is not None:
                await core.record([])  # durable before the learner starts
                return core.state.batch
            if self.serial:
                await self._published()
            paused = core.state.operations.paused is not None
            self.progress.begin("publishing" if core.state.head < 0 else "paused" if paused else "collecting")
            changed = core.changed
            formed = scheduler.form_batch(core.state, core.settings.rollout, core.now_ms())
            if formed is None:
                await changed.wait()
                continue
            await core.record([formed])
            if isinstance(formed, BatchFormed):
                unit_lines.batched(unit_lines.known(core.state, formed.submissions), formed.version)

    async def _hand_over(self, trained: Trained, version: int) -> None:
        if trained.version != version:
            raise ChildError(f"the learner made version {trained.version} instead of {version}")
        await self._published()  # the bound: one version trained and not published, no more
        self.progress.begin("publishing")
        done = VersionTrained(
            version=version,
            weights=self._weights(trained),
            stats=trained.stats,
            accuracy=trained.accuracy,
            at_ms=self.core.now_ms(),
        )
        await self.core.record([done])

    def _weights(self, trained: Trained) -> str:
        """The one file of a policy; a version of the block stage has several, under names of their own."""
        pretrain = self.core.spec.pretrain
        if pretrain is not None and trained.version <= last_block_version(pretrain):
            return ""
        return _relative(Path(trained.weights), self.run_folder)

    async def _published(self) -> None:
        """Wait while there is a version that is trained and not published."""
        while True:
            changed = self.core.changed
            if self.core.state.unpublished is None:
                return
            self.progress.begin("publishing")
            await changed.wait()


async def job_of(core: Core, batch: BatchFormed) -> TrainJob:
    """What the learner needs to make ``batch.version``: payloads from the journal, rewards from the state."""
    payloads = await core.offload(lambda: core.journal.payloads(batch.submissions))
    parts = []
    for submission_id in batch.submissions:
        item = core.state.submissions[submission_id]
        parts.append(BatchPart(lease=item.lease, payload=payloads[submission_id], rewards=item.rewards))
    settings = core.settings if core.state.operations.amendments else None
    return TrainJob(version=batch.version, parts=tuple(parts), settings=settings)


async def block_job(core: Core, formed: RoundFormed, run_folder: Path) -> RoundJob | RecombineJob:
    """What the learner needs to make ``formed.version`` in the block stage.

    A difference lies on our disk from its verdict to the end of its round: it is hashed again.

    Raises:
        RunFolderError: the differences of a whole block are gone from the disk, or damaged.
    """
    if not formed.submissions:
        return RecombineJob(version=formed.version)
    payloads = await core.offload(lambda: core.journal.payloads(formed.submissions))
    parts = []
    for submission_id in formed.submissions:
        place = unit_folder(run_folder, submission_id) / DELTA_FILE
        lease = core.state.blocks.work[submission_id].lease
        if not await core.offload(partial(_is_sound, place, payloads.get(submission_id))):
            with about(lease, submission_id):
                log.error("%s is gone or damaged: the round goes on without it", place)
            continue
        delta = str(place.relative_to(run_folder))
        parts.append(Contribution(block=lease.block, slot=lease.slot, delta=delta, lease_id=lease.lease_id))
    wanted = {core.state.blocks.work[key].lease.block for key in formed.submissions}
    if lost := wanted - {part.block for part in parts}:
        raise RunFolderError(
            f"every accepted difference of block {min(lost)} is gone from {run_folder / 'units'}, or "
            "damaged: restore that folder from a backup"
        )
    return RoundJob(version=formed.version, contributions=tuple(parts))


def _is_sound(difference: Path, payload: bytes | None) -> bool:
    """Whether a difference is on the disk as its submission names it."""
    if payload is None:
        return False
    try:
        with difference.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return False
    return found == wire.decode(payload, BlockSubmission).delta.sha256


def _relative(path: Path, folder: Path) -> str:
    try:
        return str(path.resolve().relative_to(folder.resolve()))
    except ValueError:
        return str(path)

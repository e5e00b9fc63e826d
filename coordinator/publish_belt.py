"""From a durable checkpoint to a published version, beside the learner and never in its way.

While this belt hashes, patches, signs and announces version v, the learner makes
v + 1. It may be no further ahead than that: ``State.unpublished`` holds one version,
and the fold refuses a second. After a crash the belt goes on with the version that
was trained and not published; should its checkpoint be gone, the learner is asked
for it again, from the batch that it was made of; a rollback's is linked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from barnraise.coordinator import publisher, scheduler, unit_lines
from barnraise.coordinator.block_files import sweep_units
from barnraise.coordinator.block_fold import SETTLED as OVER
from barnraise.coordinator.block_workers import RecombineJob, RoundJob
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import VersionPublished
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.learn_belt import FIRST_RETRY_S, LAST_RETRY_S, block_job, job_of
from barnraise.coordinator.ledger_log import manifest_digest
from barnraise.coordinator.origin import Origin
from barnraise.coordinator.patching import Previous
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.retention import kept_whole
from barnraise.coordinator.rollback import note_published, take_up_again
from barnraise.coordinator.rollout_files import keep_rollouts
from barnraise.coordinator.rollout_table import need_pyarrow
from barnraise.coordinator.run_file import Keep
from barnraise.coordinator.sessions import run_complete
from barnraise.coordinator.state import SETTLED, State, Unpublished
from barnraise.coordinator.unit_notes import keep_notes
from barnraise.coordinator.workers import Learner, TrainJob, checkpoint_folder, first_policy
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.manifest import manifest_bytes
from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.opening import Opening
from barnraise.protocol.store import DiskStore

log = logging.getLogger(__name__)

MOST_KEPT = 8  # versions beyond max_lag that open leases may keep from being deleted


@dataclass
class PublishBelt:
    """Publishes what the learner made, in order; see ``run``.

    ``learner``: to have a checkpoint that was lost made again. ``opens``: whether shards
    leave before the last is hashed (without, only to measure the difference).
    """

    core: Core
    hub: Hub
    learner: Learner
    store: DiskStore
    run_folder: Path
    progress: Progress
    announce: Callable[[str], None]
    shard_size: int
    mirrors: tuple[str, ...] = ()
    origin: Origin | None = None
    opens: bool = True
    keep: Keep = field(default_factory=Keep)

    def __post_init__(self) -> None:
        """Raises RunFolderError where rollouts are to be kept and cannot be."""
        if self.keep.rollouts != "off":
            need_pyarrow()

    async def run(self) -> None:
        """Publish for ever. Call ``serve_head`` first."""
        pause = FIRST_RETRY_S
        complete = False
        while True:
            changed, due = self.core.changed, self.core.state.unpublished
            before, complete = complete, scheduler.is_complete(self.core.state, self.core.settings.rollout)
            if complete and not before:
                self.progress.learner = "complete"
                self.hub.broadcast(run_complete(self.core))
            if due is None:
                await changed.wait()
                continue
            self.progress.publishing = due.trained.version
            try:
                await self._publish(due)
                self.progress.publisher_trouble = ""
                pause = FIRST_RETRY_S
            except BarnraiseError as error:
                self.progress.publisher_trouble = str(error)
                log.error("publishing: %s; again in %.0f s", error, pause)
                await trio.sleep(pause)
                pause = min(pause * 2, LAST_RETRY_S)
            finally:
                self.progress.publishing = None

    async def serve_head(self) -> None:
        """After a restart: serve the head's shards again, out of its checkpoint."""
        state, journal = self.core.state, self.core.journal
        for info in state.versions[-(self.core.spec.rollout.max_lag + 2) :]:
            signed = journal.manifest(info.version)
            if signed is None:
                continue
            manifest = open_signed(signed, Manifest, self.core.spec.operator)
            files = publisher.version_files(self.run_folder, self.core.spec, info.version, info.weights)
            if all(path.is_file() for path in files.values()):
                await self.core.offload(
                    partial(publisher.serve, self.run_folder, self.store, manifest, files)
                )
                if self.origin is not None:
                    self.origin.publish(signed, manifest)
            if info.version == state.head:
                self.hub.set_head(info.version, signed)

    async def _publish(self, due: Unpublished) -> None:
        core, trained = self.core, due.trained
        await core.record([])  # that it was trained is durable before anything is signed
        await self._present(due)
        now = core.now_ms()
        opens = self.opens and self.origin is not None
        tell = partial(self._opened, trio.lowlevel.current_trio_token()) if opens else None
        signed, manifest = await core.offload(
            lambda: publisher.publish(
                self.run_folder,
                core.spec,
                core.run_id,
                trained.version,
                trained.weights,
                self.store,
                core.sign,
                now,
                self.shard_size,
                self._previous(trained.version),
                self.mirrors,
                tell,
            )
        )
        published = VersionPublished(
            version=trained.version,
            manifest=manifest_digest(signed),
            weights=trained.weights,
            size=manifest_bytes(manifest),
            stats=trained.stats,
            accuracy=trained.accuracy,
            at_ms=now,
        )
        leases = unit_lines.known(core.state, _made_of(core.state, due))
        await core.record([published], manifest=(trained.version, signed))
        self.hub.set_head(trained.version, signed)
        if self.origin is not None:
            self.origin.publish(signed, manifest)
        self.announce(_line(published))
        await unit_lines.used(leases, trained.version)
        await self._note_published(trained.version, signed)
        await self._clean_up()

    async def _note_published(self, version: int, signed: Signed) -> None:
        try:
            await self.core.offload(lambda: note_published(self.run_folder, version, signed))
        except OSError as error:  # what it is for is a rollback, some day
            log.warning("version %d: its manifest is not kept beside it: %s", version, error)

    def _opened(self, loop: trio.lowlevel.TrioToken, signed: Signed, opening: Opening) -> None:
        """In the thread that hashes: the tree learns of it on the event loop."""
        assert self.origin is not None
        loop.run_sync_soon(self.origin.open, signed, opening)

    async def _present(self, due: Unpublished) -> None:
        """Have the checkpoint made again if its folder is gone (a disk restored, a folder deleted)."""
        version = due.trained.version
        if checkpoint_folder(self.run_folder, version).is_dir():
            return
        formed, given_up = self.core.state.blocks.round, self.core.state.operations.given_up
        job: TrainJob | RoundJob | RecombineJob
        if due.batch is not None:
            job = await job_of(self.core, due.batch)
        elif formed is not None and formed.version == version:
            job = await block_job(self.core, formed, self.run_folder)
        elif given_up and given_up[-1][1] == version - 1:  # made of no batch: a rollback's, links alone
            earlier = given_up[-1][0] - 1
            log.warning("checkpoint %d is gone before it was published: version %d again", version, earlier)
            await self.core.offload(lambda: take_up_again(self.run_folder, version, earlier))
            return
        else:
            return
        log.warning("checkpoint %d is gone before it was published: it is made again", version)
        await self.learner.train(job)

    def _previous(self, version: int) -> Previous | None:
        """The head, as what the patch to ``version`` begins with; None if it cannot be had."""
        if version <= first_policy(self.core.spec):
            return None  # versions of the block stage share no weights but the scaffold's own shards
        info = self.core.state.versions[-1] if self.core.state.versions else None
        signed = None if info is None else self.core.journal.manifest(info.version)
        if info is None or signed is None:
            return None
        files = publisher.version_files(self.run_folder, self.core.spec, info.version, info.weights)
        return Previous(open_signed(signed, Manifest, self.core.spec.operator), files)

    async def _clean_up(self) -> None:
        """Drop payloads and checkpoints that nothing needs any more."""
        core, state = self.core, self.core.state
        oldest = state.head - state.max_lag
        needed = [lease.terms.policy_version for lease in state.leases.values()]
        needed += [state.submissions[key].lease.policy_version for key in state.waiting]
        needed += [hold.terms.policy_version for hold in state.blocks.leases.values()]
        unjudged = state.blocks.waiting | state.blocks.appeals
        needed += [state.blocks.work[key].lease.policy_version for key in unjudged]
        # A rejected submission may be appealed: then its weights are needed once more.
        needed += [
            item.lease.policy_version for item in state.submissions.values() if item.status == "rejected"
        ]
        keep_from = max(min([oldest - 1, *needed]), oldest - MOST_KEPT)
        stored = await core.offload(lambda: core.journal.payload_ids(oldest))
        settled = [key for key in stored if _is_settled(core.state, key)]
        if settled:
            if core.spec.pretrain is not None:
                await core.offload(lambda: keep_notes(core.journal, self.run_folder, settled))
            settled = await self._keep_rollouts(settled)
        if settled:
            await core.record([], drop_payloads=settled)
        head = state.head
        if core.spec.pretrain is not None:
            work = {key: item for key, item in core.state.blocks.work.items() if item.status not in OVER}
            await core.offload(lambda: sweep_units(self.run_folder, work))
        spared = await core.offload(partial(kept_whole, self.run_folder, head, self.keep, keep_from))
        if (ordered := core.state.operations.rollback) is not None:
            spared |= {ordered.to_version}
        keep = {0, first_policy(core.spec), *spared}
        gone = await core.offload(lambda: publisher.prune(self.run_folder, self.store, keep_from, keep))
        if self.origin is not None:
            self.origin.retain(range(max(0, keep_from), head + 1))
        await core.offload(lambda: publisher.slim(self.run_folder, head, spared))
        if gone:
            log.debug("checkpoints deleted: %s", ", ".join(map(str, gone)))

    async def _keep_rollouts(self, settled: list[bytes]) -> list[bytes]:
        """Keep what the operator wants kept of submissions; which of their payloads may go now."""
        if self.keep.rollouts == "off":
            return settled
        core, amendments = self.core, list(self.core.state.operations.amendments)
        kept = await core.offload(
            lambda: keep_rollouts(
                core.journal, self.run_folder, core.spec, core.run_id, self.keep, settled, amendments
            )
        )
        self.progress.rollouts_trouble = kept.trouble
        if kept.trouble:
            log.error("%s", kept.trouble)
        # It took a while: an appeal may have come in meanwhile, and needs its payload.
        return [key for key in kept.dropped if _is_settled(self.core.state, key)]


def _made_of(state: State, due: Unpublished) -> tuple[bytes, ...]:
    """The submissions that a version was made of."""
    if due.batch is not None:
        return due.batch.submissions
    formed = state.blocks.round
    return formed.submissions if formed is not None and formed.version == due.trained.version else ()


def _is_settled(state: State, submission_id: bytes) -> bool:
    """Whether nothing needs a submission's payload any more."""
    if submission_id in state.appeals:
        return False
    block = state.blocks.work.get(submission_id)
    if block is not None:
        return block.status in OVER
    rollouts = state.submissions.get(submission_id)
    return rollouts is None or rollouts.status in SETTLED


def _line(event: VersionPublished) -> str:
    text = f"version {event.version} published, {event.size / 1e6:.1f} MB"
    if event.stats is not None:
        stats = event.stats
        text += f", reward {stats.reward_mean:.3f}, {stats.groups_used} of {stats.groups} groups used"
        text += f", trained in {stats.seconds:.1f} s"
    return text if event.accuracy < 0 else f"{text}, held-out accuracy {event.accuracy:.3f}"

"""From verdicts to policy versions: form a batch, have it trained on, publish the result.

The belt is rebuilt from the state alone: a batch that was under way at a crash is
durable, and is sent again. A learner that fails is tried again, later and later;
meanwhile everything else goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from barnraise.coordinator import publisher, scheduler
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import BatchFormed, VersionPublished
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.ledger_log import manifest_digest
from barnraise.coordinator.origin import Origin
from barnraise.coordinator.patching import Previous
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.sessions import run_complete
from barnraise.coordinator.state import SETTLED
from barnraise.coordinator.workers import BatchPart, Learner, Trained, TrainJob
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, ChildError
from barnraise.protocol.manifest import manifest_bytes
from barnraise.protocol.messages import Manifest
from barnraise.protocol.store import DiskStore

log = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
MOST_KEPT = 8  # versions beyond max_lag that open leases may keep from being deleted


@dataclass
class LearnBelt:
    """Forms batches, has them trained on, and publishes the result; see ``run``."""

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

    async def run(self) -> None:
        """Raise the policy until the run is complete. Call ``serve_head`` first."""
        pause = FIRST_RETRY_S
        while not scheduler.is_complete(self.core.state, self.core.spec.rollout):
            try:
                await self._one_version()
                self.progress.learner_trouble = ""
                pause = FIRST_RETRY_S
            except BarnraiseError as error:
                self.progress.learner_trouble = str(error)
                log.error("learner: %s; again in %.0f s", error, pause)
                await trio.sleep(pause)
                pause = min(pause * 2, LAST_RETRY_S)
        self.progress.learner = "complete"
        self.hub.broadcast(run_complete(self.core))

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

    async def _one_version(self) -> None:
        core = self.core
        if core.state.head < 0:
            self.progress.learner = "evaluating"
            await self._publish(await self.learner.initial(), 0)
            return
        batch = await self._batch()
        self.progress.learner = "training"
        await self._publish(await self.learner.train(await self._job(batch)), batch.version)

    async def _batch(self) -> BatchFormed:
        core = self.core
        while True:
            if core.state.batch is not None:
                await core.record([])  # durable before the learner starts
                return core.state.batch
            self.progress.learner = "collecting"
            changed = core.changed
            formed = scheduler.form_batch(core.state, core.spec.rollout, core.now_ms())
            if formed is None:
                await changed.wait()
                continue
            await core.record([formed])

    async def _job(self, batch: BatchFormed) -> TrainJob:
        core = self.core
        payloads = await core.offload(lambda: core.journal.payloads(batch.submissions))
        parts = []
        for submission_id in batch.submissions:
            item = core.state.submissions[submission_id]
            parts.append(BatchPart(lease=item.lease, payload=payloads[submission_id], rewards=item.rewards))
        return TrainJob(version=batch.version, parts=tuple(parts))

    async def _publish(self, trained: Trained, version: int) -> None:
        core = self.core
        if trained.version != version:
            raise ChildError(f"the learner made version {trained.version} instead of {version}")
        self.progress.learner = "publishing"
        weights = _relative(Path(trained.weights), self.run_folder)
        now = core.now_ms()
        signed, manifest = await core.offload(
            lambda: publisher.publish(
                self.run_folder,
                core.spec,
                core.run_id,
                version,
                weights,
                self.store,
                core.sign,
                now,
                self.shard_size,
                self._previous(),
                self.mirrors,
            )
        )
        published = VersionPublished(
            version=version,
            manifest=manifest_digest(signed),
            weights=weights,
            size=manifest_bytes(manifest),
            stats=trained.stats,
            accuracy=trained.accuracy,
            at_ms=now,
        )
        await core.record([published], manifest=(version, signed))
        self.hub.set_head(version, signed)
        if self.origin is not None:
            self.origin.publish(signed, manifest)
        self.announce(_line(published))
        await self._clean_up()

    def _previous(self) -> Previous | None:
        """The head, as what the next version's patch begins with; None if it cannot be had."""
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
        keep_from = max(min([oldest - 1, *needed]), oldest - MOST_KEPT)
        stored = await core.offload(lambda: core.journal.payload_ids(oldest))
        settled = [
            key
            for key in stored
            if key not in core.state.submissions or core.state.submissions[key].status in SETTLED
        ]
        if settled:
            await core.record([], drop_payloads=settled)
        gone = await core.offload(lambda: publisher.prune(self.run_folder, self.store, keep_from))
        if self.origin is not None:
            self.origin.retain(range(max(0, keep_from), state.head + 1))
        await core.offload(lambda: publisher.slim(self.run_folder, state.head))
        if gone:
            log.debug("checkpoints deleted: %s", ", ".join(map(str, gone)))


def _relative(path: Path, folder: Path) -> str:
    try:
        return str(path.resolve().relative_to(folder.resolve()))
    except ValueError:
        return str(path)


def _line(event: VersionPublished) -> str:
    text = f"version {event.version} published, {event.size / 1e6:.1f} MB"
    if event.stats is not None:
        stats = event.stats
        text += f", reward {stats.reward_mean:.3f}, {stats.groups_used} of {stats.groups} groups used"
        text += f", trained in {stats.seconds:.1f} s"
    return text if event.accuracy < 0 else f"{text}, held-out accuracy {event.accuracy:.3f}"

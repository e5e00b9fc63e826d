"""From stored block submissions to verdicts: draw segments, fetch their files, have them done again.

A node commits to its files by hash, in a signed submission; only when that is on our
disk are segments drawn, so nobody knows beforehand which ones count. The files come
from the node itself, over the connection that it dialled. Whoever is away or slow keeps
nobody waiting: units take turns, each keeps what it has, one that is not served when its
lease's time is up loses its place in the round, and some time after the deadline it is
rejected: ``block-withheld``, or ``block-hidden`` where the node could tell by what it was
asked for which segments were drawn. The latter counts towards a ban: else whoever cheats
would go away each time that the wrong one is asked for, and come back unharmed.

Rebuilt from state and journal alone; what was half fetched is found again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from barnraise.coordinator import unit_lines
from barnraise.coordinator.audit import ban_event, unban_events
from barnraise.coordinator.block_draws import drawn
from barnraise.coordinator.block_events import BlockJudged, BlockOverdue
from barnraise.coordinator.block_files import (
    DamagedUnitError,
    drop_unit,
    fetch_unit,
    is_revealed,
    keep_delta,
    state_name,
    sweep_units,
    unit_files,
)
from barnraise.coordinator.block_fold import HIDDEN, SETTLED, WITHHELD, BlockWork
from barnraise.coordinator.block_workers import DELTA_FILE, BlockResult, BlockVerifyJob, unit_folder
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import AppealDecided, Event
from barnraise.coordinator.patience import WorkerAwayError
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.verify_belt import FIRST_RETRY_S, LAST_RETRY_S, MAX_ATTEMPTS, either
from barnraise.coordinator.workers import Verifier
from barnraise.protocol import wire
from barnraise.protocol.errors import BarnraiseError, ChildError, PeerError, StorageError
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.ledger import credit_for_block
from barnraise.protocol.messages import Verdict
from barnraise.protocol.network import Network
from barnraise.protocol.pretrain import BlockSubmission, PretrainSpec, segments
from barnraise.protocol.shards import BadShardError, ShardClient
from barnraise.protocol.standing import UNVERIFIABLE
from barnraise.protocol.unit_context import about, unit_log

log, story = logging.getLogger(__name__), unit_log(__name__)

UNITS = 4  # fetched or judged side by side
MOST_BYTES = 64 * 1024**3  # of units' files that have no verdict yet; one unit always fits
TURN_S = 120.0  # of fetching, before others may have the place
GRACE_MS = 120_000  # after the deadline, the submission and our own start, whichever is last
OVERDUE_MS = 30_000  # after the submission, and its lease's timeout: its place goes to somebody else
SLOWEST = 64 * 1024  # bytes/s that a node must serve at, beyond that
MAX_CORRUPT = 3  # shards that are not what was asked for
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 15.0  # between two turns of a unit whose node did not serve


@dataclass(slots=True)
class _Unit:
    """A unit without a verdict, as this process knows it."""

    pause_s: float = FIRST_PAUSE_S
    retry_at: float = 0.0
    corrupt: int = 0
    revealed: bool = False  # its node may know what was drawn
    failures: int = 0  # of our own verifier
    trouble: str = ""


@dataclass
class BlockBelt:
    """Judges stored block units; see ``run``."""

    core: Core
    spec: PretrainSpec
    verifier: Verifier
    network: Network
    run_folder: Path
    progress: Progress
    most_bytes: int = MOST_BYTES
    on_disk: dict[bytes, int] = field(default_factory=dict)  # room that units without a verdict take
    _units: dict[bytes, _Unit] = field(default_factory=dict)
    _running: dict[bytes, bytes] = field(default_factory=dict)  # submission -> node
    _freed: trio.Event = field(default_factory=trio.Event)
    _crowded: bool = False
    _started_ms: int = 0
    _successes: int = 0

    async def run(self) -> None:
        """Judge for ever."""
        self._started_ms = self.core.now_ms()
        await self.core.offload(lambda: sweep_units(self.run_folder, self._wanted()))
        async with trio.open_nursery() as nursery:
            while True:
                changed, freed = self.core.changed, self._freed
                while len(self._running) < UNITS and (key := self._next()) is not None:
                    self._running[key] = self.core.state.blocks.work[key].lease.node
                    nursery.start_soon(self._turn, key)
                due = (u.retry_at for key, u in self._units.items() if key not in self._running)
                now = trio.current_time()
                with trio.move_on_at(min((at for at in due if at > now), default=math.inf)):
                    await either(changed, freed)

    def _wanted(self) -> set[bytes]:
        work = self.core.state.blocks.work
        return {key for key, item in work.items() if item.status not in SETTLED}

    def _next(self) -> bytes | None:
        """The oldest unit whose turn it may be; those of the present round first, one a node."""
        state, now = self.core.state, trio.current_time()
        waiting = state.blocks.waiting | state.blocks.appeals
        self._units = {key: self._units.get(key) or _Unit() for key in waiting}
        self.on_disk = {key: size for key, size in self.on_disk.items() if key in waiting}
        busy = set(self._running.values())
        ready = [
            key
            for key in waiting
            if key not in self._running
            and self._units[key].retry_at <= now
            and state.blocks.work[key].lease.node not in busy
        ]
        ready.sort(key=lambda key: state.blocks.work[key].lease.policy_version != state.head)
        return next(iter(ready), None)

    async def _turn(self, key: bytes) -> None:
        item = self.core.state.blocks.work.get(key)  # gone if the disk refused meanwhile
        with about(b"" if item is None else item.lease, key):
            await self._take_turn(key)

    async def _take_turn(self, key: bytes) -> None:
        unit = self._units[key]
        try:
            await self._go_on(key, unit)
            self.progress.verifier_trouble = ""
        except (BarnraiseError, StorageError) as error:
            self.progress.verifier_trouble = str(error)
            log.error("block unit %s: %s", key.hex()[:16], error)
            self._put_off(unit, FIRST_RETRY_S * 2 ** min(unit.failures, 6), str(error))
        finally:
            del self._running[key]
            self._freed.set()
            self._freed = trio.Event()

    def _put_off(self, unit: _Unit, pause_s: float, why: str) -> None:
        if why != unit.trouble:
            story.info("waits: %s", why)
        unit.trouble = why
        unit.retry_at = trio.current_time() + min(pause_s, LAST_RETRY_S)

    async def _go_on(self, key: bytes, unit: _Unit) -> None:
        core = self.core
        await core.record([])  # that it is stored is durable before anything is drawn
        payloads = await core.offload(lambda: core.journal.payloads([key]))
        item = core.state.blocks.work.get(key)
        if item is None or key not in payloads:
            self._put_off(unit, LAST_RETRY_S, "its payload is not stored")
            return
        submission = await core.offload(lambda: wire.decode(payloads[key], BlockSubmission))
        draw = core.segment_draw(key)
        chosen = drawn(draw, len(segments(self.spec)), item.depth)
        fetched = await self._fetch(key, unit, item, submission, chosen)
        if isinstance(fetched, Verdict):
            await self._record(key, fetched, 0, 0)
        elif fetched:
            result = await self._judge(unit, _job(key, item, submission, chosen, draw))
            await self._record(key, result.verdict, result.tokens, result.parameters)

    async def _fetch(
        self, key: bytes, unit: _Unit, item: BlockWork, submission: BlockSubmission, chosen: tuple[int, ...]
    ) -> Verdict | bool:
        """Fetch what is missing: whether all is here now, or the verdict if that is hopeless."""
        files = unit_files(submission, chosen)
        size = sum(entry.size for entry in files.values())
        where = "segment " + ", ".join(map(str, chosen))
        if key not in self.on_disk:
            taken = sum(self.on_disk.values())
            if taken and taken + size > self.most_bytes:
                self._crowded = True
                self._put_off(unit, FIRST_PAUSE_S, "no room for its files")
                return False
            self.on_disk[key] = size
        peer_id = peer_id_of(item.lease.node)
        client = ShardClient(self.network, peer_id)
        folder = unit_folder(self.run_folder, key)
        before = await self.core.offload(lambda: _present(folder))
        try:
            if not self.network.connected(peer_id):
                raise PeerError(f"{peer_id} is not connected")
            until = trio.current_time() + TURN_S
            story.debug("%d bytes of its files are fetched (%s), %d are here", size, where, before)
            await fetch_unit(client, files, folder, self.core.offload, until)
            unit.pause_s = FIRST_PAUSE_S
            return True
        except TimeoutError:
            have = await self.core.offload(lambda: _present(folder))
            return await self._missing(key, unit, item, submission, size, have, where)
        except DamagedUnitError as error:
            text = f"{error}: the disk may be failing, or the file changed after it was hashed"
            return _rejected("block-files", 0.0, 1.0, f"{where} {error.name}", text)
        except BadShardError as error:
            unit.corrupt += 1
            if unit.corrupt >= MAX_CORRUPT:
                return _rejected("block-files", 0.0, float(unit.corrupt), where, str(error))
            why: PeerError = error
        except PeerError as error:
            why = error
        finally:
            with trio.CancelScope(shield=True):
                await client.close()
        have = await self.core.offload(lambda: _present(folder))
        unit.pause_s = FIRST_PAUSE_S if have > before else min(unit.pause_s * 2, LAST_PAUSE_S)
        self._put_off(unit, unit.pause_s, str(why))
        found = await self._missing(key, unit, item, submission, size, have, where)
        if self._crowded:  # others need the room more
            self._crowded = False
            self.on_disk.pop(key, None)
            await self.core.offload(lambda: drop_unit(self.run_folder, key))
        return found

    async def _missing(
        self,
        key: bytes,
        unit: _Unit,
        item: BlockWork,
        submission: BlockSubmission,
        size: int,
        have: int,
        where: str,
    ) -> Verdict | bool:
        """What follows from files that are not here: nothing yet, the loss of a place, or a verdict."""
        folder, now = unit_folder(self.run_folder, key), self.core.now_ms()
        unit.revealed = unit.revealed or await self.core.offload(lambda: is_revealed(folder, submission))
        item = self.core.state.blocks.work[key]
        late = item.status == "waiting" and not item.overdue
        if late and now >= max(item.lease.timeout_at, item.at_ms + OVERDUE_MS):
            await self.core.record([BlockOverdue(submission_id=key, at_ms=now)])
        begun = max(item.lease.deadline_at, item.at_ms, self._started_ms)
        if now < begun + GRACE_MS + size * 1000 // SLOWEST:
            return False
        text = (
            "the files behind the submission's hashes were not served in time: keep the node running until "
            "the verdict, and its upload above 64 KiB/s"
        )
        if unit.revealed:
            text += "; it stopped when it could tell which segments were drawn, which counts as a failure"
        check = HIDDEN if unit.revealed else WITHHELD
        return _rejected(check, float(size), float(min(have, size)), where, text)

    async def _judge(self, unit: _Unit, job: BlockVerifyJob) -> BlockResult:
        try:
            result = await self.verifier.verify_block(job)
            if result.submission_id != job.submission_id:
                raise ChildError("the verifier answered another submission than it was given")
        except WorkerAwayError:
            raise
        except BarnraiseError as error:
            unit.failures += 1
            others_pass = self._successes > 0 or unit.failures >= 2 * MAX_ATTEMPTS
            if unit.failures < MAX_ATTEMPTS or not others_pass:
                raise
            text = f"the coordinator's verifier failed on it; no mark against you: {error}"
            verdict = _rejected(UNVERIFIABLE, float(MAX_ATTEMPTS), float(unit.failures), "", text)
            return BlockResult(submission_id=job.submission_id, verdict=verdict, tokens=0, parameters=0)
        self._successes += 1
        return result

    async def _record(self, key: bytes, verdict: Verdict, tokens: int, parameters: int) -> None:
        core, now = self.core, self.core.now_ms()
        item = core.state.blocks.work[key]
        node, accepted = core.state.nodes[item.lease.node], verdict.accepted
        blameless = verdict.check == UNVERIFIABLE
        credit = credit_for_block(parameters, tokens) if accepted else 0
        events: list[Event]
        if item.status == "appealing":
            events = [
                AppealDecided(
                    submission_id=key, verdict=verdict, rewards=(), tokens=tokens, credit=credit, at_ms=now
                )
            ]
            if (accepted or blameless) and item.offence:
                events += unban_events(node, key, now)
            log.info("appeal of block unit %s: %s", key.hex()[:16], verdict.check)
        else:
            events = [
                BlockJudged(
                    submission_id=key,
                    verdict=verdict,
                    tokens=tokens if accepted else 0,
                    credit=credit,
                    blameless=blameless,
                    at_ms=now,
                )
            ]
            if not accepted and not blameless and verdict.check != WITHHELD:
                ban = ban_event(node, node.offences + 1, f"the last by check {verdict.check}", now)
                events += [] if ban is None else [ban]
        waited = now - item.at_ms
        await core.record(events)
        unit_lines.judged(item.lease, key, verdict, tokens, waited)
        self.on_disk.pop(key, None)
        used = item.status in ("accepted", "training")
        dispose: Callable[[Path, bytes], None] = keep_delta if used else drop_unit
        await core.offload(lambda: dispose(self.run_folder, key))
        if not accepted:
            log.warning("block unit %s: %s at %s", key.hex()[:16], verdict.check, verdict.position)


def _job(
    key: bytes, item: BlockWork, submission: BlockSubmission, chosen: tuple[int, ...], draw: bytes
) -> BlockVerifyJob:
    folder = Path("units") / key.hex()
    ends = {end for segment in chosen for end in (segment - 1, segment) if end >= 0}
    return BlockVerifyJob(
        submission_id=key,
        lease=item.lease,
        submission=submission,
        segments=chosen,
        states={end: str(folder / state_name(end)) for end in ends | {len(submission.states) - 1}},
        delta=str(folder / DELTA_FILE),
        draw=draw,
    )


def _present(folder: Path) -> int:
    """Bytes of a unit that are here."""
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _rejected(check: str, threshold: float, value: float, position: str, message: str) -> Verdict:
    return Verdict(
        accepted=False,
        check=check,
        threshold=threshold,
        value=value,
        position=position[:500],
        message=message[:500],
    )

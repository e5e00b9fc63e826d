"""From stored submissions to verdicts: batches for the verifier, verdicts into the journal.

The belt is rebuilt from the state alone, so that a restart needs nothing more. A
verifier that fails is tried again; no submission ever blocks another's verdict.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from itertools import islice

import trio

from barnraise.coordinator import unit_lines
from barnraise.coordinator.audit import Pressure, is_audited, pressed, verdict_events
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import SubmissionJudged
from barnraise.coordinator.patience import WorkerAwayError
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.workers import Judged, Verifier, VerifyJob
from barnraise.protocol.errors import BarnraiseError, ChildError
from barnraise.protocol.messages import Verdict
from barnraise.protocol.standing import ALL, UNAUDITED, UNVERIFIABLE
from barnraise.protocol.unit_context import about, unit_log

log, story = logging.getLogger(__name__), unit_log(__name__)

MAX_JOBS = 16  # submissions in one batch of the verifier
MAX_JOB_BYTES = 64 * 1024 * 1024
MAX_ATTEMPTS = 3
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


@dataclass(slots=True)
class _Failed:
    """A submission that made the verifier fail: how often alone, and when it is tried again."""

    successes_before: int
    times: int = 0
    retry_at: float = 0.0


@dataclass
class VerifyBelt:
    """Judges what is stored, oldest first, in as many batches at a time as the verifier takes; see ``run``.

    Jobs of a batch that made the verifier fail are put off and tried alone, so that a
    bad one fails alone, later each time. They and fresh work take turns: neither a bad
    submission nor a long queue keeps anybody waiting for long.
    """

    core: Core
    verifier: Verifier
    progress: Progress
    pressure: Pressure | None = None  # None: everything is verified in full, whatever the backlog
    _put_off: dict[bytes, _Failed] = field(default_factory=dict)
    _flying: set[bytes] = field(default_factory=set)  # with the verifier now, or on the way to the disk
    _batches: int = 0
    _stirred: trio.Event = field(default_factory=trio.Event)
    _successes: int = 0
    _fresh_last: bool = False

    async def run(self) -> None:
        """Judge for ever."""
        self.progress.verifiers = self.verifier.slots
        self.core.stirs.append(self._stir)
        async with trio.open_nursery() as nursery:
            while True:
                stirred = self._stirred
                if self._batches >= self.verifier.slots:
                    await stirred.wait()
                    continue
                jobs = await self._next_jobs()
                if jobs:
                    self._flying |= {job.submission_id for job in jobs}
                    self._count(1)
                    nursery.start_soon(self._judge, jobs)
                    continue
                due = (item.retry_at for key, item in self._put_off.items() if key not in self._flying)
                with trio.move_on_at(min(due, default=math.inf)):
                    await stirred.wait()

    async def _judge(self, jobs: tuple[VerifyJob, ...]) -> None:
        """One batch, from the verifier to the journal. Its slot is kept while the verifier is in trouble."""
        keys = {job.submission_id for job in jobs}
        verifying = True
        try:
            results = await self._verify(jobs)
            verifying = False
            self._count(-1)  # the verifier need not wait for the disk
            await self._record(jobs, results)
        except BarnraiseError as error:
            self.progress.verifier_trouble = str(error)
            log.error("verifier: %s", error)
            await trio.sleep(FIRST_RETRY_S)
        finally:
            self._flying -= keys
            self._count(-1 if verifying else 0)

    def _count(self, change: int) -> None:
        """So many more batches are with the verifier."""
        self._batches += change
        self.progress.verifying = len(self._flying)
        self.progress.verifiers_busy = self._batches
        self._stir()

    def _stir(self) -> None:
        """Have ``run`` look again: a slot is free, or something was committed."""
        self._stirred.set()
        self._stirred = trio.Event()

    async def _next_jobs(self) -> tuple[VerifyJob, ...]:
        """One that is tried alone, or a batch of fresh ones, by turns as far as there are both."""
        waiting = self.core.state.waiting
        self._put_off = {key: item for key, item in self._put_off.items() if key in waiting}
        for fresh in (False, True) if self._fresh_last else (True, False):
            jobs = await self._load(self._fresh() if fresh else self._due())
            if jobs:
                self._fresh_last = fresh
                return jobs
        # One without its payload is not durable yet: the commit that is under way wakes us again.
        return ()

    def _fresh(self) -> list[bytes]:
        """The oldest submissions that nothing is known against: a fair share for each free slot."""
        state = self.core.state
        busy = self._put_off.keys() | self._flying
        ready = len(state.waiting) - sum(1 for key in busy if key in state.waiting)
        most = min(MAX_JOBS, math.ceil(ready / max(1, self.verifier.slots - self._batches)))
        chosen: list[bytes] = []
        size = 0
        for submission_id in islice((key for key in state.waiting if key not in busy), most):
            size += state.submissions[submission_id].size
            if chosen and size > MAX_JOB_BYTES:
                break
            chosen.append(submission_id)
        return chosen

    def _due(self) -> list[bytes]:
        """At most one of those that are tried alone."""
        now = trio.current_time()
        return [
            key for key, item in self._put_off.items() if item.retry_at <= now and key not in self._flying
        ][:1]

    async def _load(self, submission_ids: list[bytes]) -> tuple[VerifyJob, ...]:
        if not submission_ids:
            return ()
        payloads = await self.core.offload(lambda: self.core.journal.payloads(submission_ids))
        known = self.core.state.submissions
        behind = self.pressure is not None and pressed(self.core.state, self.pressure, self.core.now_ms())
        jobs = tuple(
            VerifyJob(
                submission_id=key,
                lease=known[key].lease,
                payload=payloads[key],
                model_check=is_audited(self.core.state, known[key], self.core.audit_seed, behind),
            )
            for key in submission_ids
            if key in payloads and key in known
        )
        if story.isEnabledFor(logging.DEBUG):
            for job in jobs:
                with about(job.lease, job.submission_id):
                    what = "all checks" if job.model_check else "all checks but the model's"
                    story.debug("goes to the verifier with %d others, for %s", len(jobs) - 1, what)
        return jobs

    async def _verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        try:
            results = await self.verifier.verify(jobs)
            _check_results(jobs, results)
        except ChildError as error:
            away = isinstance(error, WorkerAwayError)
            given_up = [
                unverifiable(job, str(error)) for job in jobs if self._put_job_off(job, len(jobs), away)
            ]
            if given_up:
                return tuple(given_up)
            raise
        self._successes += 1
        self.progress.verifier_trouble = ""
        return results

    def _put_job_off(self, job: VerifyJob, batch: int, away: bool) -> bool:
        """Note a failure; true if the fault is the job's: alone, again and again, while others succeed."""
        failed = self._put_off.pop(job.submission_id, None) or _Failed(self._successes)
        failed.times += 1 if batch == 1 and not away else 0
        failed.retry_at = trio.current_time() + min(FIRST_RETRY_S * 2**failed.times, LAST_RETRY_S)
        self._put_off[job.submission_id] = failed
        with about(job.lease, job.submission_id):
            text = "the verifier failed with it among %d; tried alone %d times, again in %.0f s"
            story.info(text, batch, failed.times, failed.retry_at - trio.current_time())
        return not away and failed.times >= MAX_ATTEMPTS and self._successes > failed.successes_before

    async def _record(self, jobs: tuple[VerifyJob, ...], results: tuple[Judged, ...]) -> None:
        core, now = self.core, self.core.now_ms()
        events = verdict_events(core.state, results, core.audit_seed, core.spec.model.parameters, now)
        known = core.state.submissions
        items = {job.submission_id: known[job.submission_id] for job in jobs if job.submission_id in known}
        await core.record(events)
        for event in events:
            if isinstance(event, SubmissionJudged):
                item = items[event.submission_id]
                waited = event.at_ms - item.at_ms
                unit_lines.judged(item.lease, event.submission_id, event.verdict, event.tokens, waited)


async def either(first: trio.Event, second: trio.Event) -> None:
    """Wait for whichever is set first."""
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait, first)
        nursery.start_soon(wait, second)


def _check_results(jobs: tuple[VerifyJob, ...], results: tuple[Judged, ...]) -> None:
    if [job.submission_id for job in jobs] != [result.submission_id for result in results]:
        raise ChildError("the verifier answered other submissions than it was given")
    for job, result in zip(jobs, results, strict=True):
        wanted = job.lease.prompts * job.lease.group_size
        if result.verdict.accepted and len(result.rewards) != wanted:
            raise ChildError(f"the verifier gave {len(result.rewards)} rewards for {wanted} rollouts")
        accepting = ALL if job.model_check else UNAUDITED
        if result.verdict.accepted != (result.verdict.check == accepting):
            raise ChildError(f'the verifier\'s verdict does not say "{accepting}" exactly when it accepts')


def unverifiable(job: VerifyJob, why: str) -> Judged:
    """What is said when our own verifier fails on a submission: no mark against the node."""
    verdict = Verdict(
        accepted=False,
        check=UNVERIFIABLE,
        threshold=float(MAX_ATTEMPTS),
        value=float(MAX_ATTEMPTS),
        position="",
        message=f"the coordinator's verifier failed on it {MAX_ATTEMPTS} times; no mark against you: {why}"[
            :500
        ],
    )
    return Judged(submission_id=job.submission_id, verdict=verdict, rewards=(), tokens=0)

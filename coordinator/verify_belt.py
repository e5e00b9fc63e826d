"""From stored submissions to verdicts: batches for the verifier, verdicts into the journal.

The belt is rebuilt from the state alone, so that a restart needs nothing more. A
verifier that fails is tried again; no submission ever blocks another's verdict.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import trio

from barnraise.coordinator.core import Core
from barnraise.coordinator.events import SubmissionJudged
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.workers import Judged, Verifier, VerifyJob
from barnraise.protocol.errors import BarnraiseError, ChildError
from barnraise.protocol.ledger import credit_for
from barnraise.protocol.messages import Verdict

log = logging.getLogger(__name__)

MAX_JOBS = 16  # submissions in one batch of the verifier
MAX_JOB_BYTES = 64 * 1024 * 1024
MAX_ATTEMPTS = 3
UNVERIFIABLE = "unverifiable"  # the check named when our own verifier failed: no mark against the node
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
    """Judges what is stored, oldest first, in batches; see ``run``.

    Jobs of a batch that made the verifier fail are put off: they are tried alone,
    after everything else and later each time, so that a bad one fails alone.
    """

    core: Core
    verifier: Verifier
    progress: Progress
    _put_off: dict[bytes, _Failed] = field(default_factory=dict)
    _successes: int = 0

    async def run(self) -> None:
        """Judge for ever."""
        while True:
            changed = self.core.changed
            jobs = await self._next_jobs()
            if not jobs:
                with trio.move_on_at(
                    min((item.retry_at for item in self._put_off.values()), default=math.inf)
                ):
                    await changed.wait()
                continue
            self.progress.verifying = len(jobs)
            try:
                await self._record(await self._verify(jobs))
            except BarnraiseError as error:
                self.progress.verifier_trouble = str(error)
                log.error("verifier: %s", error)
                await trio.sleep(FIRST_RETRY_S)
            finally:
                self.progress.verifying = 0

    async def _next_jobs(self) -> tuple[VerifyJob, ...]:
        state = self.core.state
        self._put_off = {key: item for key, item in self._put_off.items() if key in state.waiting}
        chosen: list[bytes] = []
        size = 0
        for submission_id in state.waiting:
            if submission_id in self._put_off:
                continue
            size += state.submissions[submission_id].size
            if chosen and (size > MAX_JOB_BYTES or len(chosen) >= MAX_JOBS):
                break
            chosen.append(submission_id)
        # One without its payload is not durable yet: the commit that is under way wakes us again.
        jobs = await self._load(chosen)
        if jobs:
            return jobs
        now = trio.current_time()
        due = [key for key, item in self._put_off.items() if item.retry_at <= now]
        return await self._load(due[:1])

    async def _load(self, submission_ids: list[bytes]) -> tuple[VerifyJob, ...]:
        if not submission_ids:
            return ()
        payloads = await self.core.offload(lambda: self.core.journal.payloads(submission_ids))
        known = self.core.state.submissions
        return tuple(
            VerifyJob(submission_id=key, lease=known[key].lease, payload=payloads[key])
            for key in submission_ids
            if key in payloads and key in known
        )

    async def _verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        try:
            results = await self.verifier.verify(jobs)
            _check_results(jobs, results)
        except ChildError as error:
            given_up = [_unverifiable(job, str(error)) for job in jobs if self._put_job_off(job, len(jobs))]
            if given_up:
                return tuple(given_up)
            raise
        self._successes += 1
        self.progress.verifier_trouble = ""
        return results

    def _put_job_off(self, job: VerifyJob, batch: int) -> bool:
        """Note a failure; true if the fault is the job's: alone, again and again, while others succeed."""
        failed = self._put_off.pop(job.submission_id, None) or _Failed(self._successes)
        failed.times += 1 if batch == 1 else 0
        failed.retry_at = trio.current_time() + min(FIRST_RETRY_S * 2**failed.times, LAST_RETRY_S)
        self._put_off[job.submission_id] = failed
        return failed.times >= MAX_ATTEMPTS and self._successes > failed.successes_before

    async def _record(self, results: tuple[Judged, ...]) -> None:
        now = self.core.now_ms()
        parameters = self.core.spec.model.parameters
        events = []
        for result in results:
            submission = self.core.state.submissions.get(result.submission_id)
            if submission is None or submission.status != "waiting":
                continue
            accepted = result.verdict.accepted
            events.append(
                SubmissionJudged(
                    submission_id=result.submission_id,
                    verdict=result.verdict,
                    rewards=result.rewards if accepted else (),
                    tokens=result.tokens if accepted else 0,
                    credit=credit_for(parameters, result.tokens) if accepted else 0,
                    blameless=result.verdict.check == UNVERIFIABLE,
                    at_ms=now,
                )
            )
        await self.core.record(events)


def _check_results(jobs: tuple[VerifyJob, ...], results: tuple[Judged, ...]) -> None:
    if [job.submission_id for job in jobs] != [result.submission_id for result in results]:
        raise ChildError("the verifier answered other submissions than it was given")
    for job, result in zip(jobs, results, strict=True):
        wanted = job.lease.prompts * job.lease.group_size
        if result.verdict.accepted and len(result.rewards) != wanted:
            raise ChildError(f"the verifier gave {len(result.rewards)} rewards for {wanted} rollouts")
        if result.verdict.accepted != (result.verdict.check == "all"):
            raise ChildError('the verifier\'s verdict does not say "all" exactly when it accepts')


def _unverifiable(job: VerifyJob, why: str) -> Judged:
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

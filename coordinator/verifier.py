"""The verifier: judges submissions by running the model that they claim to have run.

Prompts are derived again from the lease's seeds, one batched prefill gives the final
hidden states behind every claimed token, and everything else follows from those:
TOPLOC scores, the seeded draw, the log-probabilities. Rewards are computed here alone.

A job is judged on its own merits: what one submission makes fail is tried again
alone, and then costs that submission only. ``LocalVerifier`` is the seam of
``barnraise.coordinator.workers`` in this very process;
``barnraise.coordinator.verifier_child`` runs the same in a child.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import trio

from barnraise.coordinator import checks, draw_checks, toploc_checks
from barnraise.coordinator.block_judge import BlockJudge
from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob
from barnraise.coordinator.checks import CheckFailure
from barnraise.coordinator.held_policies import HeldPolicies
from barnraise.coordinator.measuring import Case, Floats, in_words, logprobs_under, measure, slices
from barnraise.coordinator.scoring import Scorer
from barnraise.coordinator.unit_lines import verdict_words
from barnraise.coordinator.workers import Judged, VerifyJob, WorkerSetup, checkpoint_folder
from barnraise.kernels.models import Policy, load_policy
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import build_environment
from barnraise.protocol.errors import BarnraiseError, RunFolderError
from barnraise.protocol.messages import Verdict
from barnraise.protocol.seeds import sample_seed, task_seed
from barnraise.protocol.tasks_mixed import shaped
from barnraise.protocol.unit_context import about, unit_log

log, story = logging.getLogger(__name__), unit_log(__name__)


class Judge:
    """Holds the policies of recent versions and judges. Synchronous; one caller at a time."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Read tokenizer and environment; weights are loaded when first needed.

        Raises:
            ModelError, TaskError: the run's model folder or environment cannot be used here.
        """
        self.spec = setup.spec
        self.run_id = setup.run_id
        self.folder = Path(setup.folder)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._environment = build_environment(self.spec.environment)
        self._scorer = Scorer(self.spec.environment)
        self._codec = Codec(checkpoint_folder(self.folder, 0), self.spec.environment)
        self._policies = HeldPolicies(self.spec, self.folder, self._device)

    def close(self) -> None:
        """End the scorer's child, if there is one; safe to call twice."""
        self._scorer.close()

    def judge(
        self, jobs: Sequence[VerifyJob], should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[Judged, ...]:
        """One result per job, in order. ``should_stop`` is polled between batches.

        Raises:
            BarnraiseError: a version's weights cannot be loaded though its checkpoint
                exists, or ``should_stop`` said so: nothing was judged.
        """
        began = time.monotonic()
        results: dict[int, Judged] = {}
        versions: dict[int, list[int]] = defaultdict(list)
        cases: dict[int, Case] = {}
        for place, job in enumerate(jobs):
            with about(job.lease, job.submission_id):
                try:
                    cases[place] = self._open(job)
                    if not job.model_check:
                        results[place] = self._spared(cases[place])
                        continue
                    versions[job.lease.policy_version].append(place)
                except CheckFailure as failure:
                    results[place] = _rejected(job, failure.verdict())
        # The version that is loaded already comes first, then older before newer.
        for version in sorted(versions, key=lambda version: (version not in self._policies, version)):
            places = versions[version]
            for place, result in zip(
                places, self._version([cases[p] for p in places], should_stop), strict=True
            ):
                results[place] = result
        seconds = time.monotonic() - began
        for place, job in enumerate(jobs):
            with about(job.lease, job.submission_id):
                _tell(results[place], len(jobs), seconds)
        return tuple(results[place] for place in range(len(jobs)))

    # --- without the model

    def _open(self, job: VerifyJob) -> Case:
        submission = checks.open_payload(job.payload)
        lease = job.lease
        checks.check_lease(submission, lease)
        checks.check_order(submission.rollouts, lease)
        completions = [
            checks.read_rollout(rollout, number, self.spec)
            for number, rollout in enumerate(submission.rollouts)
        ]
        tasks = [
            self._environment.task(task_seed(self.run_id, lease.lease_id, lease.node, prompt), held_out=False)
            for prompt in range(lease.prompts)
        ]
        prompts = [self._codec.encode_prompt(task.prompt) for task in tasks]
        return Case(
            job=job,
            completions=completions,
            tasks=[task for task in tasks for _ in range(lease.group_size)],
            prompts=[prompt for prompt in prompts for _ in range(lease.group_size)],
            seeds=[
                sample_seed(self.run_id, lease.lease_id, prompt, sample)
                for prompt in range(lease.prompts)
                for sample in range(lease.group_size)
            ],
        )

    # --- with it

    def _version(self, cases: list[Case], should_stop: Callable[[], bool]) -> list[Judged]:
        """Judge cases of one policy version together; if that fails, each alone."""
        version = cases[0].job.lease.policy_version
        try:
            policy = self._policies.of(version)
        except RunFolderError as error:
            return [_unverifiable(case.job, str(error)) for case in cases]
        try:
            return self._together(policy, cases, should_stop)
        except Exception as error:
            if _ours(error):
                raise
            log.exception("judging %d submissions of version %d failed: each alone now", len(cases), version)
        results = []
        for case in cases:
            case.failure = None
            case.scores.clear()
            case.margins.clear()
            case.logprobs.clear()
            try:
                results += self._together(policy, [case], should_stop)
            except Exception as error:
                if _ours(error):
                    raise
                # Prompt and weights are ours and were fine: what is left is the payload.
                with about(case.job.lease, case.job.submission_id):
                    log.exception("submission %s makes the verifier fail", case.job.submission_id.hex())
                text = f"the verifier fails on this submission: {type(error).__name__}: {error}"
                results.append(_rejected(case.job, CheckFailure("verifier-error", 0, 1, "", text).verdict()))
        return results

    @torch.no_grad()
    def _together(self, policy: Policy, cases: list[Case], should_stop: Callable[[], bool]) -> list[Judged]:
        verify = self.spec.verify
        for case in cases:
            try:
                for number, completion in enumerate(case.completions):
                    toploc_checks.check_proofs(completion, number, policy.hidden_size, verify)
            except CheckFailure as failure:
                case.failure = failure
        for part in slices([case for case in cases if case.failure is None]):
            if should_stop():
                raise BarnraiseError("judging was given up: nobody waits for it")
            measure(policy, [(case, number) for case, number in part if case.failure is None], self.spec)
        concluded = []
        for case in cases:
            with about(case.job.lease, case.job.submission_id):
                concluded.append(self._conclude(case))
        return concluded

    def _conclude(self, case: Case) -> Judged:
        """The checks over a whole submission, and the rewards of one that passed."""
        verify, temperature = self.spec.verify, self.spec.sampling.temperature
        if story.isEnabledFor(logging.DEBUG):
            story.debug("measured: %s", in_words(case))
        try:
            if case.failure is not None:
                raise case.failure
            toploc_checks.check_toploc_sums(case.scores, verify)
            draw_checks.check_sampling(case.margins, verify, temperature)
            for number, completion in enumerate(case.completions):
                draw_checks.check_end(completion, case.logprobs[number], number, verify)
            claimed = [completion.logprobs for completion in case.completions]
            draw_checks.check_logprobs(claimed, case.logprobs, verify, temperature)
            if draw_checks.is_suspicious(claimed, case.logprobs):
                self._check_age(case)
        except CheckFailure as failure:
            return _rejected(case.job, failure.verdict())
        return self._accepted(case, checks.accepted(case.tokens))

    def _check_age(self, case: Case) -> None:
        """Are the claims, inexact as they are, rather those of an earlier version?

        A share of the tokens is enough, and large models, of which memory holds no
        second version, are spared the swapping.

        Raises:
            CheckFailure: ``stale-weights``.
        """
        current = case.job.lease.policy_version
        versions = [
            version
            for version in range(max(0, current - draw_checks.STALE_VERSIONS), current)
            if checkpoint_folder(self.folder, version).is_dir()
        ][-(self._policies.room() - 1) :]
        if self._policies.room() < 2 or not versions:
            return
        chosen, tokens = 0, 0
        while chosen < len(case.completions) and tokens < draw_checks.STALE_TOKENS:
            tokens += len(case.completions[chosen].tokens)
            chosen += 1

        def rounded() -> Floats | None:
            if self.spec.model.weights_dtype == "bfloat16":
                return None
            policy = load_policy(checkpoint_folder(self.folder, current), "float32", self._device)
            for parameter in policy.model.parameters():
                parameter.data = parameter.data.bfloat16().float()
            return logprobs_under(policy, case, chosen, self.spec)

        draw_checks.check_stale(
            np.concatenate([completion.logprobs for completion in case.completions[:chosen]]),
            np.concatenate(case.logprobs[:chosen]),
            {
                version: logprobs_under(self._policies.of(version), case, chosen, self.spec)
                for version in reversed(versions)
            },
            self.spec.verify,
            rounded,
        )

    def _spared(self, case: Case) -> Judged:
        """What needs no model, for a submission that the audit policy spares the rest.

        Its log-probabilities are claims; the learner's two-sided clipping bounds what a lie can do.
        """
        try:
            hidden = self._policies.hidden_size()
            for number, completion in enumerate(case.completions):
                toploc_checks.check_proofs(completion, number, hidden, self.spec.verify)
            return self._accepted(case, checks.spared(case.tokens))
        except CheckFailure as failure:
            return _rejected(case.job, failure.verdict())
        except Exception as error:
            if _ours(error):
                raise
            log.exception("submission %s makes the verifier fail", case.job.submission_id.hex())
            text = f"the verifier fails on this submission: {type(error).__name__}: {error}"
            return _rejected(case.job, CheckFailure("verifier-error", 0, 1, "", text).verdict())

    def _accepted(self, case: Case, verdict: Verdict) -> Judged:
        answers = [self._codec.decode(completion.tokens.tolist()) for completion in case.completions]
        lease = case.job.lease
        scores = self._scorer.score(self._environment, case.tasks, answers, lease.group_size, lease.lease_id)
        lengths = [len(completion.tokens) for completion in case.completions]
        return Judged(
            submission_id=case.job.submission_id,
            verdict=verdict,
            rewards=tuple(map(shaped, case.tasks, scores.rewards, lengths)),
            tokens=case.tokens,
        )


def _tell(judged: Judged, batch: int, seconds: float) -> None:
    words, rewards = verdict_words(judged.verdict, judged.tokens), ""
    if judged.rewards:
        rewards = f", mean reward {sum(judged.rewards) / len(judged.rewards):.3f}"
    story.info("%s%s; %d judged together in %.2f s", words, rewards, batch, seconds)


def _ours(error: Exception) -> bool:
    """Whether an error says something about this machine and nothing about a payload."""
    memory = isinstance(error, RuntimeError) and "memory" in str(error).lower()
    return memory or isinstance(error, BarnraiseError | MemoryError | OSError)


def _rejected(job: VerifyJob, verdict: Verdict) -> Judged:
    return Judged(submission_id=job.submission_id, verdict=verdict, rewards=(), tokens=0)


def _unverifiable(job: VerifyJob, why: str) -> Judged:
    """A rejection that is the coordinator's fault: the check's name keeps it from counting."""
    text = f"{why}; no mark against you"
    return _rejected(job, CheckFailure("unverifiable", 0, 1, "", text).verdict())


class LocalVerifier:
    """The verifier seam in this very process, for tests and the simulator: it blocks while it judges."""

    slots = 1

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._judge = Judge(setup)
        self._blocks: BlockJudge | None = None

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        await trio.lowlevel.checkpoint()
        return self._judge.judge(jobs)

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        await trio.lowlevel.checkpoint()
        if self._blocks is None:
            self._blocks = BlockJudge(self._setup)
        return self._blocks.judge(job)

    async def close(self) -> None:
        self._judge.close()
        await trio.lowlevel.checkpoint()

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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import trio
from torch import Tensor

from barnraise.coordinator import checks, draw_checks, toploc_checks
from barnraise.coordinator.block_judge import BlockJudge
from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob
from barnraise.coordinator.checks import CheckFailure, Completion
from barnraise.coordinator.scoring import Scorer
from barnraise.coordinator.unit_lines import verdict_words
from barnraise.coordinator.workers import Judged, VerifyJob, WorkerSetup, checkpoint_folder
from barnraise.kernels.logprobs import token_logprobs
from barnraise.kernels.models import ModelError, Policy, load_policy, swap_weights
from barnraise.kernels.prefill import prefill
from barnraise.kernels.sampling import margins
from barnraise.kernels.tokens import Codec
from barnraise.kernels.toploc import ChunkScore, score
from barnraise.protocol.environments import Task, build_environment
from barnraise.protocol.errors import BarnraiseError, RunFolderError
from barnraise.protocol.messages import Verdict
from barnraise.protocol.seeds import sample_seed, task_seed
from barnraise.protocol.tasks_mixed import shaped
from barnraise.protocol.unit_context import about, unit_log

log, story = logging.getLogger(__name__), unit_log(__name__)

_SLICE_TOKENS = 65_536  # completion tokens whose states are held at once
_LOGIT_ELEMENTS = 2**21  # logits held at once; the noise takes eight bytes each besides
_POLICY_BYTES = 1024**3  # weights of recent versions held besides the one in use

Floats = npt.NDArray[np.float32]


@dataclass
class _Case:
    """A job that passed the checks which need no model, and what was measured of it since."""

    job: VerifyJob
    completions: list[Completion]
    tasks: list[Task]
    prompts: list[list[int]]
    seeds: list[int]
    failure: CheckFailure | None = None
    scores: list[list[ChunkScore]] = field(default_factory=list)
    margins: list[Floats] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    def chunks(self, size: int) -> int:
        """Proofs of ``size`` tokens in the whole submission."""
        return sum(-(-len(completion.tokens) // size) for completion in self.completions)


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
        self._policies: dict[int, Policy] = {}  # by version, least recently used first

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
        cases: dict[int, _Case] = {}
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

    def _open(self, job: VerifyJob) -> _Case:
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
        return _Case(
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

    def _version(self, cases: list[_Case], should_stop: Callable[[], bool]) -> list[Judged]:
        """Judge cases of one policy version together; if that fails, each alone."""
        version = cases[0].job.lease.policy_version
        try:
            policy = self._policy(version)
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
    def _together(self, policy: Policy, cases: list[_Case], should_stop: Callable[[], bool]) -> list[Judged]:
        verify = self.spec.verify
        for case in cases:
            try:
                for number, completion in enumerate(case.completions):
                    toploc_checks.check_proofs(completion, number, policy.hidden_size, verify)
            except CheckFailure as failure:
                case.failure = failure
        for part in _slices([case for case in cases if case.failure is None]):
            if should_stop():
                raise BarnraiseError("judging was given up: nobody waits for it")
            self._measure(policy, [(case, number) for case, number in part if case.failure is None])
        concluded = []
        for case in cases:
            with about(case.job.lease, case.job.submission_id):
                concluded.append(self._conclude(case))
        return concluded

    def _measure(self, policy: Policy, rows: list[tuple[_Case, int]]) -> None:
        """Prefill these rollouts; check their proofs, and keep margins and log-probabilities."""
        if not rows:
            return
        verify = self.spec.verify
        found = [case.completions[number] for case, number in rows]
        states = prefill(
            policy,
            [case.prompts[number] for case, number in rows],
            [completion.tokens.tolist() for completion in found],
        )
        if not all(bool(torch.isfinite(state).all()) for state in states):
            raise BarnraiseError("the policy's own hidden states are not finite: its weights are broken")
        scores = score(
            [completion.proofs for completion in found],
            states,
            verify.toploc_top_k,
            verify.toploc_chunk,
            among=toploc_checks.AMONG,
        )
        for (case, number), values in zip(rows, scores, strict=True):
            case.scores.append(values)
            try:
                if case.failure is None:
                    toploc_checks.check_toploc(values, number, case.chunks(verify.toploc_chunk), verify)
            except CheckFailure as failure:
                case.failure = failure
        kept = [i for i, (case, _) in enumerate(rows) if case.failure is None]
        if kept:
            self._draws(policy, [rows[i] for i in kept], [states[i] for i in kept])

    def _draws(self, policy: Policy, rows: list[tuple[_Case, int]], states: list[Tensor]) -> None:
        sampling = self.spec.sampling
        found = [case.completions[number] for case, number in rows]
        lengths = [len(completion.tokens) for completion in found]
        hidden = torch.cat(states)
        tokens = torch.from_numpy(np.concatenate([completion.tokens for completion in found]))
        positions = torch.cat([torch.arange(length) for length in lengths])
        seeds = [
            case.seeds[number]
            for (case, number), length in zip(rows, lengths, strict=True)
            for _ in range(length)
        ]
        step = max(1, _LOGIT_ELEMENTS // policy.vocabulary)
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            margin, logprob = margins(
                policy.logits(hidden[part]),
                tokens[part].to(hidden.device),
                seeds[part],
                positions[part],
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
            )
            parts.append((margin.cpu(), logprob.cpu()))
        margin_rows = torch.split(torch.cat([part[0] for part in parts]), lengths)
        logprob_rows = torch.split(torch.cat([part[1] for part in parts]), lengths)
        for (case, _), margin, logprob in zip(rows, margin_rows, logprob_rows, strict=True):
            case.margins.append(margin.numpy())
            case.logprobs.append(logprob.numpy())

    def _conclude(self, case: _Case) -> Judged:
        """The checks over a whole submission, and the rewards of one that passed."""
        verify, temperature = self.spec.verify, self.spec.sampling.temperature
        if story.isEnabledFor(logging.DEBUG):
            story.debug("measured: %s", _measured(case))
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

    def _check_age(self, case: _Case) -> None:
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
        ][-(self._room() - 1) :]
        if self._room() < 2 or not versions:
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
            return self._logprobs(policy, case, chosen)

        draw_checks.check_stale(
            np.concatenate([completion.logprobs for completion in case.completions[:chosen]]),
            np.concatenate(case.logprobs[:chosen]),
            {version: self._logprobs(self._policy(version), case, chosen) for version in reversed(versions)},
            self.spec.verify,
            rounded,
        )

    @torch.no_grad()
    def _logprobs(self, policy: Policy, case: _Case, rollouts: int) -> Floats:
        """Log-probabilities of the first ``rollouts`` completions under ``policy``, float32 [tokens]."""
        sampling = self.spec.sampling
        tokens = [completion.tokens for completion in case.completions[:rollouts]]
        states = prefill(policy, case.prompts[:rollouts], [part.tolist() for part in tokens])
        logprobs, _ = token_logprobs(
            torch.cat(states),
            policy.head_weight,
            torch.from_numpy(np.concatenate(tokens)).to(self._device),
            sampling.temperature,
            policy.head_bias,
            policy.softcap,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        values: Floats = logprobs.float().cpu().numpy()
        return values

    def _spared(self, case: _Case) -> Judged:
        """What needs no model, for a submission that the audit policy spares the rest.

        Its log-probabilities are claims; the learner's two-sided clipping bounds what a lie can do.
        """
        try:
            hidden = self._hidden_size()
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

    def _hidden_size(self) -> int:
        """The model's width: the same for all versions."""
        if not self._policies:
            folders = sorted((self.folder / "checkpoints").glob("v[0-9]*"))
            if not folders:
                raise RunFolderError(f"there is no checkpoint in {self.folder}")
            return self._policy(int(folders[-1].name[1:])).hidden_size
        return next(iter(self._policies.values())).hidden_size

    def _accepted(self, case: _Case, verdict: Verdict) -> Judged:
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

    def _policy(self, version: int) -> Policy:
        """The policy of ``version``, from memory, from an older one's memory, or from its checkpoint.

        Raises:
            RunFolderError: the checkpoint is gone.
            ModelError: it is there and cannot be loaded.
        """
        policy = self._policies.pop(version, None)
        if policy is None:
            folder = checkpoint_folder(self.folder, version)
            if not folder.is_dir():
                raise RunFolderError(f"the weights of version {version} are no longer kept ({folder.name})")
            if self._policies and len(self._policies) >= self._room():
                policy = self._policies.pop(next(iter(self._policies)))  # dropped if swapping fails
                swap_weights(policy, folder)
            else:
                policy = load_policy(folder, self.spec.model.compute_dtype, self._device)
            if policy.vocabulary < self.spec.model.vocabulary:
                raise ModelError(
                    f"{folder} has a vocabulary of {policy.vocabulary}, the run spec says "
                    f"{self.spec.model.vocabulary}: it is another run's model"
                )
        self._policies[version] = policy
        return policy

    def _room(self) -> int:
        """How many versions to hold: those within the allowed lag, as far as memory goes."""
        policy = next(iter(self._policies.values()))
        size = policy.parameters * policy.head_weight.element_size()
        return max(1, min(self.spec.rollout.max_lag + 2, _POLICY_BYTES // max(size, 1)))


def _tell(judged: Judged, batch: int, seconds: float) -> None:
    words, rewards = verdict_words(judged.verdict, judged.tokens), ""
    if judged.rewards:
        rewards = f", mean reward {sum(judged.rewards) / len(judged.rewards):.3f}"
    story.info("%s%s; %d judged together in %.2f s", words, rewards, batch, seconds)


def _measured(case: _Case) -> str:
    """A case's numbers, before they are held against the limits."""
    chunks = [score for scores in case.scores for score in scores]
    values = sum(score.values for score in chunks)
    if not values or not case.margins:
        return "nothing" if case.failure is None else f"nothing, for {case.failure}"
    apart = np.abs(
        np.concatenate([completion.logprobs for completion in case.completions[: len(case.logprobs)]])
        - np.concatenate(case.logprobs)
    )
    off = sum(score.exponent_mismatches for score in chunks)
    mantissa = max(score.mantissa_mean for score in chunks)
    margin = min(float(row.min()) for row in case.margins if row.size)
    return (
        f"{off} of {values} exponents differ, largest mantissa mean {mantissa:.3g}, smallest margin of a "
        f"draw {margin:.3g}, log-probabilities {float(apart.max()):.3g} apart at most"
    )


def _ours(error: Exception) -> bool:
    """Whether an error says something about this machine and nothing about a payload."""
    memory = isinstance(error, RuntimeError) and "memory" in str(error).lower()
    return memory or isinstance(error, BarnraiseError | MemoryError | OSError)


def _slices(cases: list[_Case]) -> list[list[tuple[_Case, int]]]:
    """All rollouts in order, cut so that each part has at most ``_SLICE_TOKENS`` tokens."""
    parts: list[list[tuple[_Case, int]]] = []
    room = 0
    for case in cases:
        for number, completion in enumerate(case.completions):
            if len(completion.tokens) > room:
                parts.append([])
                room = max(_SLICE_TOKENS, len(completion.tokens))
            parts[-1].append((case, number))
            room -= len(completion.tokens)
    return parts


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

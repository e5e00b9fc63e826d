"""The coordinator's two workers and the node's engine on stand-in policies (see ``standin``).

The checks of a submission that need no model are the real ones
(``barnraise.coordinator.checks``); only proofs and draws are compared by hash.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from barnraise.coordinator import checks
from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob, RecombineJob, RoundJob
from barnraise.coordinator.checks import CheckFailure
from barnraise.coordinator.workers import (
    Judged,
    Report,
    Trained,
    TrainJob,
    TrainStats,
    VerifyJob,
    WorkerSetup,
    checkpoint_folder,
)
from barnraise.node.block_engine import BlockProgress, BlockTrained, BlockWork
from barnraise.node.engine import EngineInfo, Generated, Progress, Work
from barnraise.protocol.errors import ChildError, RunFolderError
from barnraise.protocol.manifest import WEIGHTS_FILE
from barnraise.protocol.messages import Rollout
from barnraise.protocol.seeds import sample_seed, task_seed
from barnraise.protocol.spec import RunSpec
from barnraise.simulation import standin
from barnraise.simulation.block_training import BlockTraining
from barnraise.simulation.block_workers import BlockJudge, BlockStages
from barnraise.simulation.standin import Policy


class StandInVerifier:
    """Judges by hash; ``seconds`` of virtual time per submission that needs the model."""

    slots = 1

    def __init__(self, setup: WorkerSetup, seconds: float) -> None:
        self._setup = setup
        self._seconds = seconds
        self._policies: dict[int, Policy] = {}
        self._judge_blocks = None if setup.spec.pretrain is None else BlockJudge(setup)
        self._places: trio.CapacityLimiter | None = None  # made in a task: slots may be set later

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        """See ``Verifier.verify``."""
        await trio.sleep(self._seconds * sum(job.model_check for job in jobs))
        return tuple(self._judge(job) for job in jobs)

    def _judge(self, job: VerifyJob) -> Judged:
        try:
            return self._accept(job)
        except CheckFailure as failure:
            return Judged(submission_id=job.submission_id, verdict=failure.verdict(), rewards=(), tokens=0)

    def _accept(self, job: VerifyJob) -> Judged:
        spec, lease = self._setup.spec, job.lease
        submission = checks.open_payload(job.payload)
        checks.check_lease(submission, lease)
        checks.check_order(submission.rollouts, lease)
        policy = self._policy(lease.policy_version)
        rewards: list[float] = []
        tokens = 0
        for number, rollout in enumerate(submission.rollouts):
            completion = checks.read_rollout(rollout, number, spec)
            task = task_seed(lease.run_id, lease.lease_id, lease.node, rollout.prompt)
            if job.model_check:
                seed = sample_seed(lease.run_id, lease.lease_id, rollout.prompt, rollout.sample)
                self._check(policy, task, seed, number, rollout.tokens, rollout.logprobs, rollout.proofs)
            rewards.append(standin.reward(completion.tokens))
            tokens += len(completion.tokens)
        verdict = checks.accepted(tokens) if job.model_check else checks.spared(tokens)
        return Judged(submission_id=job.submission_id, verdict=verdict, rewards=tuple(rewards), tokens=tokens)

    def _check(
        self, policy: Policy, task: int, seed: int, number: int, tokens: bytes, logprobs: bytes, proofs: bytes
    ) -> None:
        where = f"rollout {number}"
        if proofs != standin.prove(policy, task, tokens):
            raise CheckFailure("toploc", 0, 1, where, "the proofs are not those of this policy")
        drawn, claimed = standin.complete(policy, task, seed, len(tokens) // 4)
        if drawn.tobytes() != tokens:
            raise CheckFailure("sampling", 0, 1, where, "the tokens are not the seeded draw")
        if claimed.tobytes() != logprobs:
            raise CheckFailure("logprobs", 0, 1, where, "the log-probabilities are not the policy's")

    def _policy(self, version: int) -> Policy:
        policy = self._policies.get(version)
        if policy is None:
            folder = checkpoint_folder(Path(self._setup.folder), version)
            try:
                policy = standin.read_policy(folder / WEIGHTS_FILE, version)
            except RunFolderError as error:
                raise CheckFailure("unverifiable", 0, 1, "", f"{error}; no mark against you") from None
            self._policies[version] = policy
            self._policies.pop(version - 16, None)
        return policy

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        """See ``Verifier.verify_block``. ``seconds`` for each segment that is done again."""
        if self._judge_blocks is None:
            raise ChildError("this run does not pretrain")
        self._places = self._places or trio.CapacityLimiter(self.slots)
        async with self._places:
            await trio.sleep(self._seconds * len(job.segments))
            return self._judge_blocks.judge(job)

    async def close(self) -> None:
        """See ``Verifier.close``."""
        await trio.lowlevel.checkpoint()


class StandInLearner:
    """Raises ``skill`` by the batch's advantage signal; ``seconds`` of virtual time per version.

    ``stages``: makes the versions of a run that pretrains.
    """

    def __init__(
        self, setup: WorkerSetup, seconds: float, gain: float = 0.2, stages: BlockStages | None = None
    ) -> None:
        self.on_progress: Report = lambda subject, fraction: None
        self._setup = setup
        self._seconds = seconds
        self._gain = gain
        self._stages = stages

    async def initial(self) -> Trained:
        """See ``Learner.initial``."""
        await trio.lowlevel.checkpoint()
        if self._stages is not None:
            return self._stages.initial()
        path = checkpoint_folder(Path(self._setup.folder), 0) / WEIGHTS_FILE
        policy = standin.read_policy(path, 0)
        return Trained(version=0, weights=str(path), stats=None, accuracy=policy.skill)

    async def train(self, job: TrainJob | RoundJob | RecombineJob) -> Trained:
        """See ``Learner.train``."""
        await trio.sleep(self._seconds)
        if not isinstance(job, TrainJob):
            if self._stages is None:
                raise ChildError("this run does not pretrain")
            return self._stages.round(job) if isinstance(job, RoundJob) else self._stages.recombine(job)
        folder = Path(self._setup.folder)
        before = checkpoint_folder(folder, job.version - 1)
        old = standin.read_policy(before / WEIGHTS_FILE, job.version - 1)
        group_size = self._setup.spec.rollout.group_size
        rewards = [reward for part in job.parts for reward in part.rewards]
        groups = [rewards[at : at + group_size] for at in range(0, len(rewards), group_size)]
        used = sum(max(group) > min(group) for group in groups)
        lags = [job.version - 1 - part.lease.policy_version for part in job.parts]
        lag = sum(lags) / max(1, len(lags))
        skill = old.skill + self._gain * (1 - old.skill) * (used / max(1, len(groups))) / (1 + lag)
        target = checkpoint_folder(folder, job.version)
        target.mkdir(parents=True, exist_ok=True)
        for name in self._setup.spec.model.assets:
            (target / name).write_bytes((before / name).read_bytes())
        noise = standin.noise_of(before / WEIGHTS_FILE)
        path = target / WEIGHTS_FILE
        standin.write_policy(path, skill, noise, job.version)
        stats = TrainStats(
            reward_mean=sum(rewards) / max(1, len(rewards)),
            groups=len(groups),
            groups_used=used,
            loss=0.0,
            grad_norm=0.0,
            clip_fraction=0.0,
            ratio_max=1.0,
            entropy=0.0,
            kl=0.0,
            lag_mean=lag,
            seconds=self._seconds,
        )
        return Trained(version=job.version, weights=str(path), stats=stats, accuracy=skill)

    async def close(self) -> None:
        """See ``Learner.close``."""
        await trio.lowlevel.checkpoint()


@dataclass
class StandInEngine:
    """Draws a unit at ``tokens_per_s`` of virtual time.

    ``model_tokens``: how many tokens one simulated token stands for (a unit of 32 tokens
    takes as long as one of 32 x ``model_tokens``). ``blocks``: trains block units.
    """

    tokens_per_s: float
    rng: random.Random
    load_s: float = 5.0
    steps: int = 2
    blocks: BlockTraining | None = None
    policy: Policy | None = field(default=None, init=False)
    spec: RunSpec | None = field(default=None, init=False)

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        """See ``Engine.load``."""
        await trio.sleep(self.load_s)
        try:
            self.policy = standin.read_policy(folder / WEIGHTS_FILE, version)
        except RunFolderError as error:
            raise ChildError(str(error)) from error
        self.spec = spec
        return EngineInfo(name="stand-in", device="simulated", memory_bytes=0)

    async def generate(self, work: Work, progress: Callable[[Progress], None]) -> Generated:
        """See ``Engine.generate``."""
        if self.policy is None or self.spec is None or self.policy.version != work.policy_version:
            raise ChildError(f"the engine has no version {work.policy_version}")
        length = self.spec.sampling.max_new_tokens
        total = work.prompts * work.group_size
        seconds = total * length / self.tokens_per_s
        for step in range(1, self.steps + 1):
            await trio.sleep(seconds / self.steps)
            done = total * step // self.steps
            progress(Progress(completions=done, tokens=done * length))
        made = self.make(self.policy, work, length)
        return Generated(rollouts=made, seconds=seconds, tokens=total * length)

    async def train(
        self, spec: RunSpec, work: BlockWork, progress: Callable[[BlockProgress], None]
    ) -> BlockTrained:
        """See ``BlockEngine.train``."""
        if self.blocks is None:
            raise ChildError("this engine trains no blocks")
        return await self.blocks.train(spec, work, progress)

    def make(self, policy: Policy, work: Work, length: int) -> tuple[Rollout, ...]:
        """The unit's rollouts; what an engine that cheats replaces."""
        return standin.rollouts(
            policy, work.run_id, work.lease_id, work.node, work.prompts, work.group_size, length
        )

    async def close(self) -> None:
        """See ``Engine.close``."""
        self.policy = None
        await trio.lowlevel.checkpoint()

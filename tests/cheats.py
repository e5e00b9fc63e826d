"""Engines that cheat, one idea each, behind the real engine seam.

All work in this very process and take ``seconds`` of virtual time for a unit; their
reports repeat exactly, so that a whole swarm does. ``Paced`` is the honest one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import trio
from msgspec import structs

from barnraise.kernels.generate import generate, greedy
from barnraise.kernels.logprobs import token_logprobs
from barnraise.kernels.models import Policy, load_policy
from barnraise.kernels.prefill import prefill
from barnraise.kernels.tokens import Codec
from barnraise.kernels.toploc import build_proofs
from barnraise.node.engine import EngineInfo, Generated, Progress, Work
from barnraise.node.torch_engine import TorchEngine
from barnraise.protocol.environments import Environment, Task, build_environment
from barnraise.protocol.messages import Rollout
from barnraise.protocol.seeds import task_seed
from barnraise.protocol.spec import RunSpec

Tell = Callable[[Progress], None]
Tokens = list[list[int]]


class Paced(TorchEngine):
    """Honest.

    Attributes:
        works: every unit that was begun, in order.
        last: the newest unit that was finished.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__("cpu", in_place=True)
        self.seconds = seconds
        self.works: list[Work] = []
        self.last: Generated | None = None

    async def generate(self, work: Work, progress: Tell) -> Generated:
        self.works.append(work)
        await trio.sleep(self.seconds)
        made = await self.make(work, progress)
        self.last = structs.replace(made, seconds=self.seconds)
        return self.last

    async def make(self, work: Work, progress: Tell) -> Generated:
        """The unit, as the engine would report it."""
        return await super().generate(work, progress)


class StaleWeights(Paced):
    """Saves itself the downloads' use: computes with the first version it ever loaded."""

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__(seconds)
        self.first: tuple[int, EngineInfo] | None = None

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        if self.first is None:
            self.first = version, await super().load(spec, folder, version)
        return self.first[1]

    async def make(self, work: Work, progress: Tell) -> Generated:
        assert self.first is not None
        return await super().make(structs.replace(work, policy_version=self.first[0]), progress)


class OtherModel(Paced):
    """Computes with the model in ``folder`` instead, such as a smaller one."""

    def __init__(self, folder: Path, seconds: float = 1.0) -> None:
        super().__init__(seconds)
        self.folder = folder

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        return await super().load(spec, self.folder, version)


class LogprobLiar(Paced):
    """Claims that its tokens were less likely than they were, to weigh more in the loss."""

    async def make(self, work: Work, progress: Tell) -> Generated:
        def bend(rollout: Rollout) -> Rollout:
            claimed = np.frombuffer(rollout.logprobs, dtype="<f4") - np.float32(0.5)
            return structs.replace(rollout, logprobs=claimed.astype("<f4").tobytes())

        return _each(await super().make(work, progress), bend)


class RewardedRollout(Rollout, frozen=True):
    """A rollout with a field that the protocol does not have."""

    reward: float


class RewardLiar(Paced):
    """Adds the rewards that it would like."""

    async def make(self, work: Work, progress: Tell) -> Generated:
        return _each(
            await super().make(work, progress),
            lambda rollout: RewardedRollout(**structs.asdict(rollout), reward=1.0),
        )


def _each(made: Generated, change: Callable[[Rollout], Rollout]) -> Generated:
    return structs.replace(made, rollouts=tuple(change(rollout) for rollout in made.rollouts))


class Forger(Paced, ABC):
    """Submits tokens of its own choice, each with the proof and log-probability that it really has."""

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__(seconds)
        self.spec: RunSpec
        self.policy: Policy
        self.codec: Codec
        self.environment: Environment

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        self.spec = spec
        self.policy = load_policy(folder, spec.model.compute_dtype, "cpu")
        self.codec = Codec(folder, spec.environment)
        self.environment = build_environment(spec.environment)
        return await super().load(spec, folder, version)

    @abstractmethod
    def choose(self, work: Work, drawn: Tokens) -> Tokens:
        """The tokens to submit, given those that an honest node would."""

    async def make(self, work: Work, progress: Tell) -> Generated:
        honest = await super().make(work, progress)
        drawn = [np.frombuffer(rollout.tokens, dtype="<u4").tolist() for rollout in honest.rollouts]
        chosen = self.choose(work, drawn)
        rollouts = self.forge(work, chosen)
        return structs.replace(honest, rollouts=rollouts, tokens=sum(map(len, chosen)))

    def tasks(self, work: Work) -> list[Task]:
        """The task of every rollout."""
        seeds = [task_seed(work.run_id, work.lease_id, work.node, prompt) for prompt in range(work.prompts)]
        tasks = [self.environment.task(seed, held_out=False) for seed in seeds]
        return [task for task in tasks for _ in range(work.group_size)]

    def prompts(self, work: Work) -> Tokens:
        """The prompt of every rollout."""
        return [self.codec.encode_prompt(task.prompt) for task in self.tasks(work)]

    def draw(self, work: Work, seeds: Sequence[int]) -> Tokens:
        """Sample the policy with noise of one's own."""
        sampling, eos = self.spec.sampling, self.spec.model.eos_token
        return [done.tokens for done in generate(self.policy, self.prompts(work), seeds, sampling, eos)]

    def forge(self, work: Work, chosen: Tokens) -> tuple[Rollout, ...]:
        """Rollouts around any tokens, with honest proofs and log-probabilities."""
        sampling, verify = self.spec.sampling, self.spec.verify
        states = prefill(self.policy, self.prompts(work), chosen)
        proofs = build_proofs(states, verify.toploc_top_k, verify.toploc_chunk)
        rollouts = []
        for row, (tokens, hidden, proof) in enumerate(zip(chosen, states, proofs, strict=True)):
            targets = hidden.new_tensor(tokens, dtype=int)
            logprobs, _ = token_logprobs(hidden, self.policy.head_weight, targets, sampling.temperature)
            prompt, sample = divmod(row, work.group_size)
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    sample=sample,
                    tokens=np.asarray(tokens, dtype="<u4").tobytes(),
                    logprobs=logprobs.detach().numpy().astype("<f4").tobytes(),
                    proofs=proof,
                )
            )
        return tuple(rollouts)


class Greedy(Forger):
    """Takes the most likely token every time."""

    def choose(self, work: Work, drawn: Tokens) -> Tokens:
        limit, eos = self.spec.sampling.max_new_tokens, self.spec.model.eos_token
        return greedy(self.policy, self.prompts(work), limit, eos)


class OwnNoise(Forger):
    """Draws from the policy, but not with the noise that its lease gives."""

    def choose(self, work: Work, drawn: Tokens) -> Tokens:
        return self.draw(work, range(len(drawn)))


class CherryPicker(Forger):
    """Draws each sample ``tries`` times and submits the best."""

    tries = 4

    def choose(self, work: Work, drawn: Tokens) -> Tokens:
        size = len(drawn)
        tries = [self.draw(work, range(n * size, (n + 1) * size)) for n in range(self.tries)]
        tasks = self.tasks(work)

        def score(task: Task, tokens: list[int]) -> float:
            return self.environment.score(task, self.codec.decode(tokens))

        return [
            max(candidates, key=lambda tokens, task=task: score(task, tokens))  # type: ignore[misc]
            for task, *candidates in zip(tasks, *tries, strict=True)
        ]


class AnswerWriter(Forger):
    """Writes down the right answer, which any program can compute, instead of asking the policy."""

    def choose(self, work: Work, drawn: Tokens) -> Tokens:
        eos = self.spec.model.eos_token
        return [[*self.codec.encode_prompt(task.key[::-1]), eos] for task in self.tasks(work)]


class Truncator(Forger):
    """Stops after ``keep`` tokens to be done earlier; with ``claim_end`` it says that the policy stopped."""

    keep = 1

    def __init__(self, *, claim_end: bool, seconds: float = 1.0) -> None:
        super().__init__(seconds)
        self.claim_end = claim_end

    def choose(self, work: Work, drawn: Tokens) -> Tokens:
        eos = self.spec.model.eos_token
        return [[*tokens[: self.keep], eos] if self.claim_end else tokens[: self.keep] for tokens in drawn]


class Copier(Forger):
    """Submits what ``victim`` drew; with ``prove``, around proofs made for its own prompts."""

    def __init__(self, victim: Paced, *, prove: bool, seconds: float = 1.0) -> None:
        super().__init__(seconds)
        self.victim = victim
        self.prove = prove

    async def make(self, work: Work, progress: Tell) -> Generated:
        with trio.fail_after(600):
            while self.victim.last is None:
                await trio.sleep(0.1)
        return self.victim.last if not self.prove else await super().make(work, progress)

    def choose(self, work: Work, drawn: Tokens) -> Tokens:
        assert self.victim.last is not None
        return [np.frombuffer(rollout.tokens, dtype="<u4").tolist() for rollout in self.victim.last.rollouts]


class Shifter(Forger):
    """Honest tokens under the neighbouring sample's name: each is right, none is where it belongs."""

    def choose(self, work: Work, drawn: Tokens) -> Tokens:
        size = work.group_size
        groups = [drawn[start : start + size] for start in range(0, len(drawn), size)]
        return [tokens for group in groups for tokens in (*group[1:], group[0])]

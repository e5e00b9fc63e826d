"""Engines that cheat, one idea each, on the stand-in model; and by which check each is meant to fall.

Their real counterparts, on a real model with real proofs, are in ``tests/cheats.py``: here the
question is not whether a proof can be forged but what a swarm with so many of them comes to.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from msgspec import structs

from barnraise.node.engine import Work
from barnraise.protocol.messages import Rollout
from barnraise.protocol.seeds import task_seed
from barnraise.simulation import standin
from barnraise.simulation.block_training import BlockTraining
from barnraise.simulation.scenario import Scenario
from barnraise.simulation.standin import Policy
from barnraise.simulation.traits import Traits, unit_tokens
from barnraise.simulation.workers import StandInEngine

Rollouts = tuple[Rollout, ...]


@dataclass
class CheatingEngine(StandInEngine):
    """Takes as long as an honest one; ``cheat`` makes the unit."""

    kind: str = ""
    kept: Rollouts = ()
    first: Policy | None = None
    lied: int = field(default=0, init=False)

    def make(self, policy: Policy, work: Work, length: int) -> Rollouts:
        """The unit as this cheat would have it."""
        self.first = self.first or policy
        self.lied += 1
        return _MAKERS[self.kind](self, policy, work, length)

    def honest(self, policy: Policy, work: Work, length: int) -> Rollouts:
        """What an honest engine makes of ``work`` with ``policy``."""
        return super().make(policy, work, length)


def _stale(engine: CheatingEngine, policy: Policy, work: Work, length: int) -> Rollouts:
    assert engine.first is not None
    return engine.honest(engine.first, work, length)


def _other_model(engine: CheatingEngine, policy: Policy, work: Work, length: int) -> Rollouts:
    other = blake2b(b"smaller" + policy.digest, digest_size=32).digest()
    return engine.honest(Policy(policy.version, policy.skill * 0.9, other), work, length)


def _logprobs(engine: CheatingEngine, policy: Policy, work: Work, length: int) -> Rollouts:
    def bend(rollout: Rollout) -> Rollout:
        claimed = np.frombuffer(rollout.logprobs, dtype="<f4") - np.float32(0.5)
        return structs.replace(rollout, logprobs=claimed.astype("<f4").tobytes())

    return tuple(bend(rollout) for rollout in engine.honest(policy, work, length))


def _tokens(engine: CheatingEngine, policy: Policy, work: Work, length: int) -> Rollouts:
    """All right, in half of the samples, each with the proof that it really has."""

    def better(rollout: Rollout) -> Rollout:
        if rollout.sample % 2:
            return rollout
        task = task_seed(work.run_id, work.lease_id, work.node, rollout.prompt)
        tokens = np.full(length, standin.RIGHT + rollout.sample % 8, dtype="<u4").tobytes()
        return structs.replace(rollout, tokens=tokens, proofs=standin.prove(policy, task, tokens))

    return tuple(better(rollout) for rollout in engine.honest(policy, work, length))


def _truncate(engine: CheatingEngine, policy: Policy, work: Work, length: int) -> Rollouts:
    return engine.honest(policy, work, max(1, length // 2))


def _replay(engine: CheatingEngine, policy: Policy, work: Work, length: int) -> Rollouts:
    engine.kept = engine.kept or engine.honest(policy, work, length)
    return engine.kept


def _copy(engine: CheatingEngine, policy: Policy, work: Work, length: int) -> Rollouts:
    neighbour = blake2b(work.node, digest_size=32).digest()
    return engine.honest(policy, structs.replace(work, node=neighbour), length)


def _garbage(engine: CheatingEngine, policy: Policy, work: Work, length: int) -> Rollouts:
    def junk(rollout: Rollout) -> Rollout:
        return structs.replace(rollout, proofs=engine.rng.randbytes(len(rollout.proofs)))

    return tuple(junk(rollout) for rollout in engine.honest(policy, work, length))


Maker = Callable[[CheatingEngine, Policy, Work, int], Rollouts]
_MAKERS: dict[str, Maker] = {
    "stale": _stale,
    "other-model": _other_model,
    "logprobs": _logprobs,
    "tokens": _tokens,
    "truncate": _truncate,
    "replay": _replay,
    "copy": _copy,
    "garbage": _garbage,
}

FOUND_BY: dict[str, tuple[str, str]] = {
    "stale": ("toploc", "computes with the first version it ever loaded"),
    "other-model": ("toploc", "computes with a smaller model"),
    "logprobs": ("logprobs", "claims that its tokens were less likely than they were"),
    "tokens": ("sampling", "writes right answers itself, with proofs that hold"),
    "truncate": ("termination", "stops half way to be sooner done"),
    "replay": ("toploc", "sends its first unit again for every lease"),
    "copy": ("toploc", "sends what another node would have made"),
    "garbage": ("toploc", "sends random proofs"),
}
"""Kind -> the check that is meant to find it, and what it does. ``stale`` is honest with version 0."""


def make_engine(traits: Traits, scenario: Scenario, rng: random.Random) -> StandInEngine:
    """The engine of a node with ``traits``."""
    load_s = scenario.work.load_s
    blocks = None
    if scenario.phase == "blocks":  # a unit takes as long, whatever it is of
        blocks = BlockTraining(unit_tokens(scenario) / traits.speed, rng, traits.cheat)
    if traits.cheat not in _MAKERS:
        return StandInEngine(tokens_per_s=traits.speed, rng=rng, load_s=load_s, blocks=blocks)
    return CheatingEngine(tokens_per_s=traits.speed, rng=rng, load_s=load_s, blocks=blocks, kind=traits.cheat)

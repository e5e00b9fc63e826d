"""The patient cheat: honest for a long time, then now and then not.

``Stage.patience`` says for how many submissions it is honest first (few in the tests, a
hundred in the benchmark); the outcome is that of the first submission that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from attacks.draws import _own_noise
from attacks.registry import attack
from attacks.stage import Outcome, Stage, Tokens
from attacks.weights import FINE_ROUNDING, int8
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import RolloutLease

SHARE = 0.05


def _be_honest(stage: Stage, me: Identity) -> None:
    for _ in range(stage.patience):
        outcome = stage.submit(me, stage.honest(me)[1])
        assert outcome.accepted, outcome


def _some_rollouts(
    stage: Stage, me: Identity, rng: Random, cheat: Callable[[RolloutLease], Tokens]
) -> Outcome:
    """An honest submission but for ``SHARE`` of its rollouts, all of it proven by the right weights."""
    lease = stage.lend(me)
    chosen = [completion.tokens for completion in stage.draw(lease)]
    other = cheat(lease)
    for row in rng.sample(range(len(chosen)), max(1, round(SHARE * len(chosen)))):
        chosen[row] = other[row]
    return stage.submit(me, stage.sign(me, lease, stage.forge(lease, chosen)))


@attack("honest for long, then now and then a submission with noise of its own", "sampling-")
def patient_cheat(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _be_honest(stage, me)
    lease = stage.lend(me)
    rollouts = stage.forge(lease, _own_noise(stage, lease, rng))
    return stage.submit(me, stage.sign(me, lease, rollouts))


@attack("5 % of the rollouts of every submission with noise of its own", "sampling-")
def some_rollouts_with_own_noise(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _some_rollouts(stage, me, rng, lambda lease: _own_noise(stage, lease, rng))


@attack(
    "5 % of the rollouts by the version before, proven by the head",
    "sampling-",
    least=0.0,
    least_exact=0.0,
    limits=FINE_ROUNDING,
)
def some_rollouts_of_the_version_before(stage: Stage, me: Identity, rng: Random) -> Outcome:
    old = stage.policy(stage.head - 1)
    return _some_rollouts(stage, me, rng, lambda lease: [done.tokens for done in stage.draw(lease, old)])


@attack(
    "5 % of the rollouts by 8-bit weights, proven by the right ones",
    "sampling-",
    least=0.0,
    least_exact=0.0,
    limits=FINE_ROUNDING,
)
def some_rollouts_in_int8(stage: Stage, me: Identity, rng: Random) -> Outcome:
    coarse = stage.policy(kind="int8", change=int8)
    return _some_rollouts(stage, me, rng, lambda lease: [done.tokens for done in stage.draw(lease, coarse)])

"""Honest tokens; what is claimed about them is not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from attacks.registry import attack
from attacks.stage import Outcome, Stage
from barnraise.coordinator.draw_checks import sum_limit
from barnraise.kernels.toploc import PRIME, build_proofs, chunk_points
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import Rollout

Floats = npt.NDArray[np.float32]
LOGPROB_CHECKS = ("logprob-max", "logprob-mean", "logprob-bias", "logprob-range")
ROUNDING = (
    "it is no more than rounding does between honest engines, and the importance ratio is off by that much"
)


# --- log-probabilities


def _bent(stage: Stage, me: Identity, bend: Callable[[int, Floats], Floats]) -> Outcome:
    """``bend(rollout, honest values)`` gives the claimed ones."""
    lease = stage.lend(me)
    rollouts = stage.pack(lease, stage.draw(lease))
    claimed = [
        structs.replace(
            rollout,
            logprobs=bend(row, np.frombuffer(rollout.logprobs, "<f4").copy()).astype("<f4").tobytes(),
        )
        for row, rollout in enumerate(rollouts)
    ]
    return stage.submit(me, stage.sign(me, lease, claimed))


@attack("log-probabilities times 0.9", *LOGPROB_CHECKS, least=0.0, limits=ROUNDING)
def logprobs_scaled(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _bent(stage, me, lambda row, values: values * np.float32(0.9))


@attack(
    "log-probabilities minus 0.01, to weigh more in the loss", *LOGPROB_CHECKS, least=0.0, limits=ROUNDING
)
def logprobs_shifted(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _bent(stage, me, lambda row, values: values - np.float32(0.01))


@attack("one log-probability minus 1", "logprob-max", least=0.0, limits=ROUNDING)
def one_logprob_edited(stage: Stage, me: Identity, rng: Random) -> Outcome:
    def bend(row: int, values: Floats) -> Floats:
        if row == 3:
            values[0] -= 1
        return values

    return _bent(stage, me, bend)


@attack("the log-probabilities of temperature 0.8", *LOGPROB_CHECKS)
def logprobs_of_another_temperature(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    chosen = [completion.tokens for completion in stage.draw(lease)]
    sampling = structs.replace(stage.spec.sampling, temperature=0.8)
    return stage.submit(me, stage.sign(me, lease, stage.forge(lease, chosen, sampling=sampling)))


@attack(
    "log-probabilities bent to one side as far as the thresholds leave room",
    *LOGPROB_CHECKS,
    least=0.0,
    least_exact=0.0,
    limits=ROUNDING,
)
def logprobs_bent_within_thresholds(stage: Stage, me: Identity, rng: Random) -> Outcome:
    room = np.float32(0.8 * stage.spec.verify.bias)
    return _bent(stage, me, lambda row, values: values - room)


@attack(
    "noise on log-probabilities, as much as the thresholds leave room",
    *LOGPROB_CHECKS,
    least=0.0,
    least_exact=0.0,
    limits=ROUNDING,
)
def logprobs_noisy_within_thresholds(stage: Stage, me: Identity, rng: Random) -> Outcome:
    tokens, verify, heat = round(stage.usual_tokens), stage.spec.verify, stage.spec.sampling.temperature
    room = 0.8 * sum_limit(verify.logprobs, tokens, verify.false_alarm, heat) / heat / tokens
    return _bent(
        stage,
        me,
        lambda row, values: np.minimum(
            values + np.float32(room) * np.where(np.arange(len(values)) % 2, 1, -1), 0
        ),
    )


def _register_values() -> None:
    for name, value in [("nan", np.nan), ("minus_infinity", -np.inf), ("huge", -3e38), ("positive", 0.5)]:

        def perform(stage: Stage, me: Identity, rng: Random, value: float = value) -> Outcome:
            def bend(row: int, values: Floats) -> Floats:
                if row == 1:
                    values[-1] = value
                return values

            return _bent(stage, me, bend)

        perform.__name__ = f"logprob_{name}"
        attack(f"one log-probability of {value}", "logprob-range", "logprob-max")(perform)


_register_values()


@attack("every log-probability a denormal or -0.0", *LOGPROB_CHECKS)
def logprobs_vanishing(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _bent(
        stage, me, lambda row, values: np.where(row % 2, np.float32(-0.0), np.float32(-1e-45)) + 0 * values
    )


# --- proofs


def _proved(stage: Stage, me: Identity, prove: Callable[[int, Rollout], bytes]) -> Outcome:
    lease = stage.lend(me)
    rollouts = stage.pack(lease, stage.draw(lease))
    made = [structs.replace(rollout, proofs=prove(row, rollout)) for row, rollout in enumerate(rollouts)]
    return stage.submit(me, stage.sign(me, lease, made))


def _constant(stage: Stage, rollout: Rollout, modulus: int, first: int, rest: int) -> bytes:
    """Proofs whose polynomial has these coefficients, for as many tokens as the rollout has."""
    verify, words = stage.spec.verify, []
    width = stage.policy().hidden_size
    for points in chunk_points(len(rollout.tokens) // 4, width, verify.toploc_top_k, verify.toploc_chunk):
        words += [modulus, first, *[rest] * (points - 1)]
    return np.array(words, dtype=">u2").tobytes()


@attack("proofs of zero bytes", "proof-format")
def zero_proofs(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _proved(stage, me, lambda row, rollout: bytes(len(rollout.proofs)))


@attack("no proofs", "proof-length")
def missing_proofs(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _proved(stage, me, lambda row, rollout: b"")


@attack("polynomials that are NaN everywhere", "toploc-")
def nan_proofs(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _proved(stage, me, lambda row, rollout: _constant(stage, rollout, PRIME, 0x7FC0, 0))


@attack("random bytes for proofs", "proof-format")
def random_proofs(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _proved(stage, me, lambda row, rollout: rng.randbytes(len(rollout.proofs)))


@attack("random polynomials under a valid modulus", "toploc-")
def random_polynomials(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _proved(
        stage,
        me,
        lambda row, rollout: _constant(stage, rollout, PRIME, rng.randrange(PRIME), rng.randrange(PRIME)),
    )


@attack("modulus 0 (ends the process of the original package)", "proof-format")
def modulus_zero(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _proved(stage, me, lambda row, rollout: b"\0\0" + rollout.proofs[2:])


@attack("modulus 1, so that one point serves for all", "proof-format")
def modulus_one(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _proved(stage, me, lambda row, rollout: _constant(stage, rollout, 1, 0x4000, 0))


@attack("a proof too many", "proof-length")
def surplus_proof(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _proved(stage, me, lambda row, rollout: rollout.proofs * 2)


@attack("every rollout with its neighbour's proof", "toploc-", "proof-length")
def proofs_of_other_tokens(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    rollouts = stage.pack(lease, stage.draw(lease))
    same = {len(r.tokens): [x.proofs for x in rollouts if len(x.tokens) == len(r.tokens)] for r in rollouts}
    made = []
    for rollout in rollouts:
        choice = same[len(rollout.tokens)]
        other = choice[(choice.index(rollout.proofs) + lease.group_size) % len(choice)]
        made.append(structs.replace(rollout, proofs=other))
    return stage.submit(me, stage.sign(me, lease, made))


@attack("a proof computed without the model: a constant that most large values are near", "toploc-")
def guessed_constant(stage: Stage, me: Identity, rng: Random) -> Outcome:
    """The best constant there is, learnt from honest states of the same model."""
    lease = stage.lend(me)
    states = [completion.states for completion in stage.draw(lease)]
    bits = np.concatenate(
        [np.sort(s.to(torch.bfloat16).view(torch.int16).flatten().numpy() & 0x7FFF)[-128:] for s in states]
    )
    typical = int(np.median(bits))
    return _proved(stage, me, lambda row, rollout: _constant(stage, rollout, PRIME, typical, 0))


@attack("proofs made from states of another prompt", "toploc-")
def proofs_for_another_prompt(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease, other = stage.lend(me), stage.lend(me)
    drawn = stage.draw(lease)
    rollouts = stage.pack(lease, drawn)
    chosen = [completion.tokens for completion in drawn]
    proofs = build_proofs(stage.states(lease, chosen, prompts=stage.prompts(other)))
    made = [structs.replace(r, proofs=proof) for r, proof in zip(rollouts, proofs, strict=True)]
    return stage.submit(me, stage.sign(me, lease, made))

"""The right weights, other draws: every token here has the proof and log-probability that it really has."""

from __future__ import annotations

from random import Random

import torch
from msgspec import structs
from torch import Tensor

from attacks.registry import attack
from attacks.stage import Outcome, Stage, Tokens
from barnraise.kernels.generate import greedy
from barnraise.kernels.sampling import gumbel
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import RolloutLease

ROUNDING = (
    "a token within the margin by which two honest machines may differ cannot be told from rounding; "
    "how many such tokens there are, and what they change, is bounded by the mean"
)


def _hand_in(stage: Stage, me: Identity, lease: RolloutLease, chosen: Tokens) -> Outcome:
    return stage.submit(me, stage.sign(me, lease, stage.forge(lease, chosen)))


def _tokens(stage: Stage, lease: RolloutLease, **changes: object) -> Tokens:
    return [completion.tokens for completion in stage.draw(lease, **changes)]  # type: ignore[arg-type]


# --- another distribution


def _other_sampling(stage: Stage, me: Identity, **changes: object) -> Outcome:
    lease = stage.lend(me)
    sampling = structs.replace(stage.spec.sampling, **changes)
    return _hand_in(stage, me, lease, _tokens(stage, lease, sampling=sampling))


@attack("temperature 0.7 of its own", "sampling-")
def other_temperature(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _other_sampling(stage, me, temperature=0.7 * stage.spec.sampling.temperature)


@attack("a temperature 5 % lower", "sampling-", least=0.0, limits=ROUNDING)
def temperature_slightly_lower(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _other_sampling(stage, me, temperature=0.95 * stage.spec.sampling.temperature)


@attack("top-p 0.9 of its own", "sampling-")
def other_top_p(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _other_sampling(stage, me, top_p=0.9)


@attack("the most likely token, every time", "sampling-")
def greedy_tokens(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    limit, eos = stage.spec.sampling.max_new_tokens, stage.spec.model.eos_token
    return _hand_in(stage, me, lease, greedy(stage.policy(), stage.prompts(lease), limit, eos))


# --- choosing among draws


def _own_noise(stage: Stage, lease: RolloutLease, rng: Random) -> Tokens:
    return _tokens(stage, lease, seeds=[rng.getrandbits(64) for _ in stage.seeds(lease)])


@attack("noise of its own", "sampling-")
def own_noise(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    return _hand_in(stage, me, lease, _own_noise(stage, lease, rng))


def _best_of(stage: Stage, lease: RolloutLease, rng: Random, tries: int) -> Tokens:
    best = _tokens(stage, lease)
    scores = stage.scores(lease, best)
    for _ in range(tries - 1):
        other = _own_noise(stage, lease, rng)
        for row, score in enumerate(stage.scores(lease, other)):
            if score > scores[row]:
                best[row], scores[row] = other[row], score
    return best


@attack("the best of 4 draws, the first by the lease's seed", "sampling-")
def best_of_n(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    return _hand_in(stage, me, lease, _best_of(stage, lease, rng, 4))


@attack("drawn again until the reward is 1", "sampling-")
def resample_until_rewarded(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    return _hand_in(stage, me, lease, _best_of(stage, lease, rng, 12))


@attack(
    "one rollout in a submission drawn again for a better reward",
    "sampling-",
    least=0.0,
    limits=ROUNDING,
)
def one_rollout_resampled(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    chosen = _tokens(stage, lease)
    row = rng.randrange(len(chosen))
    while (other := _own_noise(stage, lease, rng)[row]) == chosen[row]:
        pass
    chosen[row] = other
    return _hand_in(stage, me, lease, chosen)


# --- length


@attack("ends every completion half way with the end token", "sampling-", "eos-probability")
def early_stop(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease, eos = stage.lend(me), stage.spec.model.eos_token
    chosen = [tokens[: max(1, len(tokens) // 2)] for tokens in _tokens(stage, lease)]
    return _hand_in(stage, me, lease, [t if t[-1] == eos else [*t, eos] for t in chosen])


@attack("stops half way and leaves it at that", "termination")
def early_stop_without_end(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    return _hand_in(stage, me, lease, [t[: max(1, len(t) // 2)] for t in _tokens(stage, lease)])


@attack("goes on beyond the limit, for more credit", "completion-length", "early-eos")
def overlong(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease, limit = stage.lend(me), stage.spec.sampling.max_new_tokens
    sampling = structs.replace(stage.spec.sampling, max_new_tokens=2 * limit)
    chosen = _tokens(stage, lease, sampling=sampling)
    longest = max(range(len(chosen)), key=lambda row: len(chosen[row]))
    chosen[longest] = (chosen[longest] * (limit + 1))[: limit + 1]
    return _hand_in(stage, me, lease, chosen)


@attack("pads to the limit after the end token, for more credit", "early-eos")
def padded_after_the_end(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease, limit = stage.lend(me), stage.spec.sampling.max_new_tokens
    return _hand_in(stage, me, lease, [(t + [5] * limit)[:limit] for t in _tokens(stage, lease)])


@attack("suppresses the end token, for more credit", "sampling-")
def never_ends(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease, limit = stage.lend(me), stage.spec.sampling.max_new_tokens
    chosen = _tokens(stage, lease)
    eos = stage.spec.model.eos_token
    longer = [(([x for x in t if x != eos] or [5]) * limit)[:limit] for t in chosen]
    return _hand_in(stage, me, lease, longer)


@attack("a completion of no tokens", "empty-completion")
def empty_completion(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    rollouts = stage.forge(lease, _tokens(stage, lease))
    row = rng.randrange(len(rollouts))
    rollouts[row] = structs.replace(rollouts[row], tokens=b"", logprobs=b"", proofs=b"")
    return stage.submit(me, stage.sign(me, lease, rollouts))


# --- single tokens


@torch.no_grad()
def _perturbed(stage: Stage, lease: RolloutLease, chosen: Tokens) -> list[Tensor]:
    """Per rollout the perturbed values [T, V] whose argmax is the draw."""
    seeds = stage.seeds(lease)
    policy, temperature = stage.policy(), stage.spec.sampling.temperature
    found = []
    for row, states in enumerate(stage.states(lease, chosen)):
        places = torch.arange(len(states))
        noise = gumbel([seeds[row]] * len(states), places, policy.vocabulary)
        found.append(policy.logits(states) / temperature + noise)
    return found


@torch.no_grad()
def _continue(stage: Stage, lease: RolloutLease, row: int, begun: list[int]) -> list[int]:
    """The draws that follow ``begun`` in rollout ``row``, as the lease's seed has them."""
    limit, eos = stage.spec.sampling.max_new_tokens, stage.spec.model.eos_token
    policy, prompt, seed = stage.policy(), stage.prompts(lease)[row], stage.seeds(lease)[row]
    tokens = list(begun)
    while len(tokens) < limit and tokens[-1] != eos:
        (states,) = stage.states(lease, [[*tokens, 0]], prompts=[prompt])
        noise = gumbel([seed], torch.tensor([len(tokens)]), policy.vocabulary)
        best = policy.logits(states[-1:]) / stage.spec.sampling.temperature + noise
        tokens.append(int(best.argmax()))
    return tokens


def _edit(stage: Stage, lease: RolloutLease, chosen: Tokens, row: int, place: int, token: int) -> None:
    chosen[row] = _continue(stage, lease, row, [*chosen[row][:place], token])


@attack(
    "one token exchanged for the runner-up, the rest drawn on from there",
    "sampling-",
    least=0.0,
    limits=ROUNDING,
)
def one_token_edited(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    chosen = _tokens(stage, lease)
    row = rng.randrange(len(chosen))
    place = rng.randrange(len(chosen[row]))
    values = _perturbed(stage, lease, chosen)[row][place]
    _edit(stage, lease, chosen, row, place, int(values.topk(2).indices[1]))
    return _hand_in(stage, me, lease, chosen)


@attack("one token exchanged for any of the less likely half, nothing after it changed", "sampling-")
def one_token_replaced(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    chosen = _tokens(stage, lease)
    row = rng.randrange(len(chosen))
    values = _perturbed(stage, lease, chosen)[row][0]
    # Not the runner-up, as ``one_token_edited`` takes: that one may lie within the margin by chance.
    chosen[row] = [rng.choice(values.argsort()[: len(values) // 2].tolist()), *chosen[row][1:]]
    return _hand_in(stage, me, lease, chosen)


@attack(
    "one token edited where it shows least in the whole submission",
    "sampling-",
    least=0.0,
    least_exact=0.0,
    limits=ROUNDING,
)
def least_noticeable_edit(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    chosen = _tokens(stage, lease)
    best = (float("inf"), 0, 0, 0)
    for row, values in enumerate(_perturbed(stage, lease, chosen)):
        top = values.topk(2, dim=-1)
        gaps = top.values[:, 0] - top.values[:, 1]
        place = int(gaps.argmin())
        best = min(best, (float(gaps[place]), row, place, int(top.indices[place, 1])))
    _edit(stage, lease, chosen, *best[1:])
    return _hand_in(stage, me, lease, chosen)


@attack(
    "every token whose runner-up is within 0.015 nats exchanged",
    "sampling-",
    least=0.0,
    least_exact=0.0,
    limits=ROUNDING,
)
def steered_within_the_margin(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    chosen = _tokens(stage, lease)
    for row, values in enumerate(_perturbed(stage, lease, chosen)):
        top = values.topk(2, dim=-1)
        near = (top.values[:, 0] - top.values[:, 1] < 0.015).nonzero().flatten().tolist()
        if near:
            _edit(stage, lease, chosen, row, near[0], int(top.indices[near[0], 1]))
    return _hand_in(stage, me, lease, chosen)


@attack("writes down the right answer", "sampling-")
def answer_written(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease, eos = stage.lend(me), stage.spec.model.eos_token
    answers = [
        [*stage.codec.encode_prompt(task.key[::-1]), eos][: stage.spec.sampling.max_new_tokens]
        for task in stage.tasks(lease)
        for _ in range(lease.group_size)
    ]
    return _hand_in(stage, me, lease, answers)

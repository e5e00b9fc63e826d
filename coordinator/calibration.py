"""How far apart honest engines are on one model: where a run's bounds on draws come from.

Two honest engines, p of which one draws and q of which the other verifies, are compared at the
same positions, float32 against bfloat16, decoding against prefill. Nothing is left to chance
but the texts: the distribution of a drawn token's log-probability error is p's own, and that of
its margin has a closed form. With softmax P and Q, and r = log P - log Q,

    Pr(margin > x) = 1 - sum_a P_a / sum_j max(P_j, Q_j exp(r_a - x))

(every other token's noise must stay below what makes it win in p, or win by x in q). So a few
hundred positions show tails that as many draws would not. ``Observed.fit`` bounds them by a
sub-gamma variable (``barnraise.protocol.spec.Noise``) whose scale is at least that of an
exponential through the largest value seen; room comes on top, and floors.

``measured_verify_spec`` does this for a run's own model when the run is made. How often and how
much rounding matters differs between models more than tenfold, and hardly changes in training:
the mean is the model's own. The tail is not: a single position of a policy in training can be
three times as noisy as any seen at its start (docs/verification.md, "Seeded sampling"), so scales are
never below the general ones, nor is the variance of margins, whose tail is the nearest to its limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.draw_checks import sum_limit, token_limit
from barnraise.kernels.generate import Completion, GenerationStopped, generate
from barnraise.kernels.models import ModelError, Policy, load_policy
from barnraise.kernels.prefill import prefill
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import build_environment
from barnraise.protocol.spec import Dtype, EnvironmentSpec, Noise, SamplingSpec, VerifySpec

Progress = Callable[[str, float], None]

LEAST_ROOM, ROOM = 1.5, 4.0
"""Times what was measured, for other hardware, other texts and a policy in training: ``ROOM`` as long as
that is tighter than the general bounds, ``LEAST_ROOM`` in any case."""
FLOOR_DRAWS = Noise(mean=4e-4, variance=1e-3, scale=0.095)
FLOOR_LOGPROBS = Noise(mean=0.01, variance=0.003, scale=0.075)
FLOOR_BIAS = 5e-4
"""However quiet this machine is, another's may not be."""

POSITIONS = 384  # per engine; enough for fits that differ by a tenth between halves of them
LONGEST, MOST_ROWS = 48, 256
LARGEST_MEASURED = 4 * 2**30  # bytes of published weights; in bfloat16, three times that is held at once
PATIENCE_S = 90.0

CANDIDATES = 2048  # likeliest tokens taken one by one; all others count as one
SEEN = 0.05  # draws over all positions that reach what counts as the largest value
USUAL = 512  # tokens of a submission for which a fit is made tight
_EDGES = torch.cat([torch.zeros(1), torch.logspace(-7, 1.6, 1200)]).double()
_RUNGS = torch.cat([torch.zeros(1), torch.logspace(-4, 0.9, 40)]).double()
_ROUNDING = 1e-13  # of sums of a few thousand float64 numbers near 1
_ROWS = 64  # positions whose logits are held at once

States = tuple[Policy, Tensor]  # an engine and its final hidden states [N, H]


@dataclass(frozen=True)
class Fit:
    """A sub-gamma bound on a quantity, and what it was made of; nats of logits."""

    noise: Noise
    largest: float
    rms: float


class Observed:
    """A quantity >= 0 at many positions: a histogram, values at their bins' upper edges."""

    def __init__(self) -> None:
        self._mass = torch.zeros(len(_EDGES), dtype=torch.float64)

    def add(self, values: Tensor, weights: Tensor) -> None:
        """Values and weights, float64 [N, K], of a row 1 together; beyond 40 counts as 40."""
        place = torch.searchsorted(_EDGES, values.contiguous()).clamp_(max=len(_EDGES) - 1)
        self._mass.index_add_(0, place.flatten(), weights.flatten())

    def fit(self) -> Fit:
        """The tightest bound of those whose scale is not below the tail's."""
        count = float(self._mass.sum())
        weights = self._mass / count
        mean = float((_EDGES * weights).sum())
        reached = self._mass.flip(0).cumsum(0).flip(0) >= SEEN
        largest = float(_EDGES[int(reached.nonzero().max())])
        least = max(largest / math.log(max(count, 1.0) / SEEN), 1e-7)
        fits = [_at_scale(weights, mean, least * 1.25**step) for step in range(16)]
        noise = min(fits, key=_looseness)
        return Fit(noise, largest, math.sqrt(float((_EDGES**2 * weights).sum())))

    def chance(self, bound: Noise, tokens: int, false_alarm: float, temperature: float) -> float:
        """Chance that ``tokens`` independent values break one of the two limits that ``bound`` gives.

        For one token it is what the histogram says, for the sum the Chernoff bound. Where a
        ``bound`` holds, at most twice ``false_alarm``; where it does not, as large as 1.
        """
        weights = self._mass / self._mass.sum()
        limit = token_limit(bound, tokens, false_alarm, temperature)
        one = tokens * float(weights[limit * 1.02 < _EDGES].sum())  # edges round up, by less than 1.7 %
        rates = torch.logspace(-2, 4, 240).double()
        moments = torch.logsumexp(weights.log() + rates[:, None] * _EDGES, dim=1)
        total = sum_limit(bound, tokens, false_alarm, temperature)
        return min(1.0, one + math.exp(min(0.0, float((tokens * moments - rates * total).min()))))


def _at_scale(weights: Tensor, mean: float, scale: float) -> Noise:
    """The least variance with which the bound holds at this scale, over rates up to 0.95 / scale."""
    variance = 0.0
    for share in torch.linspace(0.02, 0.95, 20).tolist():
        rate = share / scale
        log_moment = float(torch.logsumexp(weights.log() + rate * _EDGES, 0))
        variance = max(variance, 2 * (1 - share) * (log_moment - rate * mean) / rate**2)
    return Noise(mean=mean, variance=variance, scale=scale)


def _looseness(noise: Noise) -> float:
    """What one of ``USUAL`` tokens may do, times what all of them may: a bound is to be good for both."""
    return token_limit(noise, USUAL, 1e-7, 1.0) * sum_limit(noise, USUAL, 1e-7, 1.0)


@dataclass(frozen=True)
class Pair:
    """What lies between two engines at N positions."""

    positions: int
    other_draw: float  # share of draws that differ
    margins: Observed
    errors: Observed
    bias: float  # mean of log P - log Q over P's own draws, nats: the divergence


def compare(engine: States, verifier: States, temperature: float) -> Pair:
    """Margins and |log-probability errors| of what ``engine`` draws, judged by ``verifier``.

    States are of the same positions. Values are in nats of logits (nats x temperature), without truncation.
    """
    margins, errors = Observed(), Observed()
    bias = flips = 0.0
    for mine, theirs in zip(torch.split(engine[1], _ROWS), torch.split(verifier[1], _ROWS), strict=True):
        p, q = _candidates(
            (engine[0].logits(mine) / temperature).double().log_softmax(-1).cpu(),
            (verifier[0].logits(theirs) / temperature).double().log_softmax(-1).cpu(),
        )
        ratio = p - q
        errors.add(ratio.abs() * temperature, p.exp())
        bias += float((p.exp() * ratio).sum())
        tail = _margin_tails(p, q)
        flips += float(tail[:, 0].sum())
        # Mass between two rungs is taken to lie at the upper one.
        mass = torch.cat([1 - tail[:, :1], tail[:, :-1] - tail[:, 1:]], dim=1).clamp_(min=0.0)
        margins.add((_RUNGS * temperature).expand_as(mass), mass)
    count = len(engine[1])
    return Pair(count, flips / count, margins, errors, bias / count)


def _candidates(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens by q, and the rest as one more: log-probabilities [N, <= CANDIDATES + 1]."""
    if p.shape[1] <= CANDIDATES:
        return p, q
    order = q.argsort(dim=-1, descending=True)
    chosen, rest = order[:, :CANDIDATES], order[:, CANDIDATES:]
    found = [
        torch.cat([x.gather(1, chosen), x.gather(1, rest).logsumexp(-1, keepdim=True)], dim=1) for x in (p, q)
    ]
    return found[0], found[1]


def _margin_tails(p: Tensor, q: Tensor) -> Tensor:
    """Pr(margin > x) of each row for each x of ``_RUNGS``, [N, len(_RUNGS)]: sort by r, then prefix sums."""
    ratio, order = (p - q).sort(dim=-1)
    mass_p, mass_q = p.gather(1, order).exp(), q.gather(1, order).exp()
    zero = torch.zeros_like(mass_p[:, :1])
    below_p = torch.cat([zero, mass_p.cumsum(-1)], dim=1)
    below_q = torch.cat([zero, mass_q.cumsum(-1)], dim=1)
    tails = []
    for x in _RUNGS.tolist():
        # P_j >= Q_j exp(r_a - x) exactly where r_j >= r_a - x.
        first = torch.searchsorted(ratio, ratio - x)
        # The sum over j exceeds 1 by this; as a difference from 1 a small chance would drown in rounding.
        excess = below_q.gather(1, first) * torch.exp(ratio - x) - below_p.gather(1, first)
        excess = excess.masked_fill(excess < _ROUNDING, 0.0)
        tails.append((mass_p * excess / (1 + excess)).sum(-1))
    return torch.stack(tails, dim=1)


def with_room(pairs: Sequence[Pair], temperature: float, general: VerifySpec) -> VerifySpec:
    """``general`` with bounds from the worst pair: at least the floors, room as ``ROOM`` says.

    Limits let mean and variance grow by 1 / temperature below temperature 1, so the constants need not.
    With top-k or top-p the margin has no such closed form, and those bounds must be the general ones.
    """
    weight = min(1.0, temperature)
    return structs.replace(
        general,
        draws=_roomy([pair.margins.fit().noise for pair in pairs], weight, FLOOR_DRAWS, general.draws),
        logprobs=_roomy(
            [pair.errors.fit().noise for pair in pairs], weight, FLOOR_LOGPROBS, general.logprobs
        ),
        bias=_room(max(pair.bias for pair in pairs), FLOOR_BIAS, general.bias),
    )


def _roomy(fits: Sequence[Noise], weight: float, floor: Noise, general: Noise) -> Noise:
    mean = weight * max(fit.mean for fit in fits)
    # A variance is a square: so is its room.
    deviation = math.sqrt(weight * max(fit.variance for fit in fits))
    return Noise(
        mean=_room(mean, floor.mean, general.mean),
        variance=_rounded_up(
            _room(deviation, math.sqrt(floor.variance), math.sqrt(general.variance), round_up=False) ** 2
        ),
        scale=_rounded_up(max(floor.scale, LEAST_ROOM * max(fit.scale for fit in fits))),
    )


def _room(measured: float, floor: float, general: float, round_up: bool = True) -> float:
    value = max(floor, LEAST_ROOM * measured, min(general, ROOM * measured))
    return _rounded_up(value) if round_up else value


def measured_verify_spec(
    folder: Path,
    environment: EnvironmentSpec,
    sampling: SamplingSpec,
    compute_dtype: Dtype,
    progress: Progress = lambda what, share: None,
    patience_s: float = PATIENCE_S,
) -> tuple[VerifySpec, str]:
    """``default_verify_spec`` with the bounds on draws and log-probabilities that this model needs.

    Args:
        folder: prepared model: config.json, tokenizer, weights.
        environment, sampling: the run's, for real prompts and the run's temperature.
        patience_s: give up on measuring after this many seconds.

    Returns:
        the thresholds, and one sentence that says where they come from. The defaults where the
        model is too large, or this machine too slow. With top-k or top-p, bounds on draws are at
        least the defaults.

    Raises:
        ModelError, TaskError: the model or the environment cannot be used here.
    """
    default = default_verify_spec(compute_dtype)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > LARGEST_MEASURED:
        return default, "bounds on draws are the general ones: the model is too large to measure here"
    try:
        pairs = _measure(folder, environment, sampling, progress, time.monotonic() + patience_s)
    except GenerationStopped:
        return default, f"bounds on draws are the general ones: measuring took more than {patience_s:.0f} s"
    verify = with_room(pairs, sampling.temperature, default)
    if sampling.top_k or sampling.top_p < 1.0:
        verify = structs.replace(verify, draws=_wider(verify.draws, default.draws))
    error = max(pair.errors.fit().rms for pair in pairs)
    noisier = (
        _wider(verify.draws, default.draws) != default.draws or verify.logprobs.mean > default.logprobs.mean
    )
    return verify, (
        f"bounds on draws measured on this model: {error:.2g} nats rms between bfloat16 and float32 "
        f"({pairs[0].positions} positions)"
        + ("; it is noisier than most, so cheats have more room" * noisier)
    )


def _wider(one: Noise, other: Noise) -> Noise:
    return Noise(
        mean=max(one.mean, other.mean),
        variance=max(one.variance, other.variance),
        scale=max(one.scale, other.scale),
    )


@torch.no_grad()
def _measure(
    folder: Path, environment: EnvironmentSpec, sampling: SamplingSpec, progress: Progress, until: float
) -> list[Pair]:
    """Each dtype draws; what it drew is judged by the other's prefill, bfloat16's also by its own."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tasks, codec = build_environment(environment), Codec(folder, environment)
    policies = {dtype: load_policy(folder, dtype, device) for dtype in ("float32", "bfloat16")}
    plain = structs.replace(
        sampling, top_k=0, top_p=1.0, max_new_tokens=min(sampling.max_new_tokens, LONGEST)
    )
    pairs: list[Pair] = []
    for step, (dtype, policy) in enumerate(policies.items()):
        progress(f"measuring what rounding does to draws ({dtype})", step / 2)
        prompts: list[list[int]] = []
        done: list[Completion] = []
        while len(prompts) < MOST_ROWS and sum(len(one.tokens) for one in done) < POSITIONS:
            rows = range(len(prompts), len(prompts) + 16)
            batch = [codec.encode_prompt(tasks.task(row, held_out=False).prompt) for row in rows]
            done += generate(policy, batch, rows, plain, codec.eos_token, lambda: time.monotonic() > until)
            prompts += batch
        decoded = (policy, torch.cat([completion.states for completion in done]))
        chosen = [completion.tokens for completion in done]
        for other, judge in policies.items():
            if time.monotonic() > until:
                raise GenerationStopped("out of time")
            if (dtype, other) == ("float32", "float32"):
                continue  # a thousandth of the others
            states = (judge, torch.cat(prefill(judge, prompts, chosen)))
            if not all(bool(torch.isfinite(part).all()) for part in (decoded[1], states[1])):
                raise ModelError(f"{folder} computes numbers that are not finite: its weights are broken")
            pairs.append(compare(decoded, states, sampling.temperature))
    return pairs


def _rounded_up(value: float) -> float:
    """Two significant digits, for people who read the spec; never less than ``value``."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")

"""One optimiser step of the learner: micro-batches, loss and gradient, over one process or several.

Rows of one prompt stay together, so that packing shares it (``barnraise.kernels.packing``); a
micro-batch holds as many tokens as its activations' memory allows, and gradients add up over them.
With several processes (``barnraise.coordinator.learner_shards``) the micro-batches are dealt out by
their tokens; every process computes the same deal, and the sum of gradients is that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from barnraise.coordinator.batches import Row
from barnraise.kernels.grpo import LossStats, policy_loss, token_weights
from barnraise.kernels.logprobs import token_logprobs
from barnraise.kernels.models import Policy
from barnraise.kernels.packing import enable, pack, packed_states, packed_tokens
from barnraise.kernels.prefill import prefill
from barnraise.protocol.spec import GrpoSpec, RunSpec

LEAST_SAVING = 0.2
"""Packing gathers and scatters in every layer: it must save this share of a micro-batch's tokens ..."""
LEAST_WORK = {"cpu": 2**23, "cuda": 2**32}
"""... and so many multiplications a layer, or what it saves is less than the calls that it makes."""
_ACTIVATIONS_PER_UNIT = 40  # floats kept per token, layer and unit of width; an estimate, meant to be high
_RECOMPUTED_PER_UNIT = 2  # the same where layers are computed again in the backward pass


def trainable_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """What training changes, by name: the parameters with ``requires_grad`` (tied ones once)."""
    return {name: value for name, value in policy.model.named_parameters() if value.requires_grad}


def make_optimizer(policy: Policy, spec: GrpoSpec) -> torch.optim.AdamW:
    """AdamW; norms and biases (fewer than two dimensions) are not decayed."""
    parameters = list(trainable_parameters(policy).values())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=spec.learning_rate, betas=(spec.beta1, spec.beta2)
    )


def follow(optimizer: torch.optim.AdamW, spec: GrpoSpec) -> None:
    """Go by another spec from the next step on; its moments stay. The rate is set with every step."""
    for group in optimizer.param_groups:
        group["betas"] = (spec.beta1, spec.beta2)
        if group["params"][0].ndim >= 2:
            group["weight_decay"] = spec.weight_decay


class Scores(nn.Module):
    """A policy as a module that gives (log-probability, entropy) of every completion token.

    One module with the output head inside, so that sharding can gather the head's weights for it.
    """

    def __init__(self, policy: Policy, spec: RunSpec) -> None:
        super().__init__()
        self.model = policy.model
        self.policy = policy
        self.spec = spec
        self.packs = enable(policy)

    def forward(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Float32 [sum T_i] each, row after row."""
        policy, sampling = self.policy, self.spec.sampling
        targets = torch.tensor([token for row in rows for token in row.tokens], device=policy.device)
        # A frozen base is in the compute dtype already, and its layers cast the adapters: as nodes compute.
        reduced = self.spec.model.compute_dtype == "bfloat16" and policy.adapter is None
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=reduced):
            prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
            if self.packs and self._saves(rows):
                hidden = packed_states(policy, pack(prompts, tokens, policy.device))
            else:
                # One pass in any case: processes that share a model must gather its weights as often.
                hidden = prefill(policy, prompts, tokens, max_tokens=2**40, grad=True)
            return token_logprobs(
                hidden,
                policy.head_weight,
                targets,
                sampling.temperature,
                policy.head_bias,
                policy.softcap,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )

    def _saves(self, rows: Sequence[Row]) -> bool:
        padded = _padded(rows)
        saved = padded - packed_tokens([row.prompt for row in rows], [row.tokens for row in rows])
        each = 12 * self.policy.hidden_size**2  # multiplications per token in a layer of the usual shape
        return saved >= LEAST_SAVING * padded and saved * each >= LEAST_WORK[self.policy.device.type]


def recompute_layers(policy: Policy) -> None:
    """Keep only what goes into each decoder layer, and compute the rest again in the backward pass."""
    for layer in decoder_layers(policy):
        layer.forward = _recomputing(layer.forward)


def decoder_layers(policy: Policy) -> Iterator[nn.Module]:
    """The blocks of the model, first to last: the members of its longest module list."""
    lists = [module for module in policy.base.modules() if isinstance(module, nn.ModuleList)]
    yield from max(lists, key=len, default=())


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, use_reentrant=False, **named)

    return again


@dataclass(frozen=True)
class Share:
    """Which part of every minibatch is this process's, and how sums over all of them are made."""

    rank: int = 0
    processes: int = 1
    sum_up: Callable[[LossStats, float], tuple[LossStats, float]] = lambda stats, loss: (stats, loss)


def tokens_at_once(policy: Policy, activation_bytes: int, recompute: bool) -> int:
    """How many tokens' activations fit ``activation_bytes``, by an estimate that is meant to be low."""
    config = policy.config.get_text_config(decoder=True)
    layers = int(getattr(config, "num_hidden_layers", 1))
    each = (
        layers * _RECOMPUTED_PER_UNIT + _ACTIVATIONS_PER_UNIT if recompute else layers * _ACTIVATIONS_PER_UNIT
    )
    return max(1, activation_bytes // (4 * each * policy.hidden_size))


def gradients(
    scores: Scores,
    rows: Sequence[Row],
    tokens: int,
    share: Share,
    reference: Callable[[Sequence[Row]], Tensor] | None = None,
) -> tuple[float, LossStats]:
    """Add the gradient of a minibatch's loss to the parameters; (loss, sums) over all processes.

    Args:
        rows: the whole minibatch, the same in every process.
        tokens: at most so many at once in a micro-batch (a longer row alone).
        reference: log-probabilities [sum T_i] that the KL penalty holds on to.

    Returns:
        The loss is not finite where something went wrong, and then the gradient is to be dropped.
    """
    spec = scores.spec.grpo
    if share.processes > 1:  # no process idle for want of pieces
        together = sum(len(row.prompt) + len(row.tokens) for row in rows)
        if scores.packs:
            together = packed_tokens([row.prompt for row in rows], [row.tokens for row in rows])
        tokens = min(tokens, -(-together // share.processes))
    micro = micro_batches(rows, tokens, scores.packs)
    lengths = torch.tensor([len(row.tokens) for part in micro for row in part])
    weights = token_weights(lengths, spec.loss_aggregation)
    counts = [sum(len(row.tokens) for row in part) for part in micro]
    weighted = list(zip(micro, torch.split(weights, counts), strict=True))
    total, stats = 0.0, LossStats()
    for part, weight in dealt(weighted, share):
        loss, sums = _loss(scores, part, weight, reference)
        total += float(loss.detach())
        if share.processes == 1 and not math.isfinite(total):
            return total, stats
        loss.backward()  # type: ignore[no-untyped-call]
        if bool(weight.any()):
            stats += sums
    return share.sum_up(stats, total)[::-1]


def dealt(micro: list[tuple[list[Row], Tensor]], share: Share) -> Iterator[tuple[list[Row], Tensor]]:
    """This process's micro-batches: as many as any other's, for all gather weights together.

    The largest are dealt first, each to the process with the fewest tokens so far. Who has fewer
    micro-batches repeats a short row without weight.
    """
    if share.processes == 1:
        yield from micro
        return
    hands: list[list[tuple[list[Row], Tensor]]] = [[] for _ in range(share.processes)]
    loads = [0] * share.processes
    for part in sorted(micro, key=lambda part: -_padded(part[0])):
        least = min(range(share.processes), key=lambda number: (loads[number], number))
        hands[least].append(part)
        loads[least] += _padded(part[0])
    most = max(map(len, hands))
    mine = hands[share.rank]
    yield from mine
    idle = min((row for part, _ in micro for row in part), key=lambda row: len(row.prompt) + len(row.tokens))
    for _ in range(most - len(mine)):
        yield [idle], torch.zeros(len(idle.tokens))


def micro_batches(rows: Sequence[Row], tokens: int, packs: bool) -> list[list[Row]]:
    """Rows of similar length together, those of one prompt next to each other, within ``tokens``.

    ``packs``: what counts is packed tokens, else padded ones.
    """
    longest: dict[tuple[int, ...], int] = {}
    for row in rows:
        prompt = tuple(row.prompt)
        longest[prompt] = max(longest.get(prompt, 0), len(row.prompt) + len(row.tokens))

    def place(row: Row) -> tuple[Any, ...]:
        length = len(row.prompt) + len(row.tokens)
        prompt = tuple(row.prompt)
        return (-longest[prompt], prompt, -length) if packs else (-length,)

    parts: list[list[Row]] = []
    prompts: set[tuple[int, ...]] = set()
    used = width = 0
    for row in sorted(rows, key=place):
        prompt, length = tuple(row.prompt), len(row.prompt) + len(row.tokens)
        cost = length - 1 - (len(prompt) if prompt in prompts else 0) if packs else width
        if not parts or used + cost > tokens:
            parts.append([])
            prompts, used, width = set(), 0, length
            cost = length - 1 if packs else length
        parts[-1].append(row)
        prompts.add(prompt)
        used += cost
    return parts


def _loss(
    scores: Scores,
    rows: Sequence[Row],
    weights: Tensor,
    reference: Callable[[Sequence[Row]], Tensor] | None,
) -> tuple[Tensor, LossStats]:
    device = scores.policy.device
    old = torch.tensor([value for row in rows for value in row.logprobs], dtype=torch.float32, device=device)
    advantages = torch.tensor(
        [row.advantage for row in rows for _ in row.tokens], dtype=torch.float32, device=device
    )
    held = None if reference is None else reference(rows)
    new, entropy = scores(rows)
    return policy_loss(new, old, advantages, entropy, weights.to(device), scores.spec.grpo, held)


def _padded(rows: Sequence[Row]) -> int:
    return len(rows) * max(len(row.prompt) + len(row.tokens) for row in rows)

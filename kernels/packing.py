"""Sequences packed one behind another, their positions reset, attention confined to each; prompts shared.

A padded batch computes what nobody reads, and the samples of a GRPO group compute their prompt
once each. Here the tokens of a whole micro-batch are one row: every distinct prompt once, then
every completion, whose positions go on where its prompt ends. G samples of a prompt of P tokens
cost P + sum C_i tokens instead of G (P + max C_i), forward and backward, and give the same states.

All layers but attention see tokens alone, so only attention has to know. It is replaced, for the
models that ``enable`` was called for, by one that gathers the queries of rows of like length and
the keys that they may see, and gives those to the model's own attention function.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from barnraise.kernels.models import Policy
from barnraise.kernels.shared_prefill import only_attends

log = logging.getLogger(__name__)

PART_ELEMENTS = 2**22
"""Query-key pairs of one call of the attention function; a longer sequence is a call of its own."""
_PREFIX = "barnraise_packed_"
_CHECK_TOLERANCE = 1e-3
WINDOWS_TOLD = frozenset(
    {"gemma2", "gemma3", "gemma3_text", "mistral", "ministral", "qwen2", "qwen3", "smollm3"}
)
"""Model types known to tell their attention function of their sliding window."""


@dataclass
class _Part:
    """Queries and keys of R rows of like length: places in the packed row and positions, -1 where padded."""

    queries: Tensor  # int64 [R, Q]
    keys: Tensor  # int64 [R, K]
    query_positions: Tensor  # int64 [R, Q]
    key_positions: Tensor  # int64 [R, K]
    causal: bool  # keys are the queries themselves: the plain causal kernel is right
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """Bool [R, 1, Q, K]: what each query sees; padded queries see what is there, for NaN's sake."""
        known = self.masks.get(window)
        if known is not None:
            return known
        query, key = self.query_positions.clamp(min=0)[:, :, None], self.key_positions[:, None, :]
        seen = (key >= 0) & (key <= query)
        if window is not None:
            seen &= key > query - window
        seen = (seen | (self.query_positions < 0)[:, :, None])[:, None]
        if seen.numel() <= PART_ELEMENTS:
            self.masks[window] = seen
        return seen


@dataclass(frozen=True)
class Packing:
    """A packed micro-batch of T tokens.

    ``states``: int64 [sum T_i], where in the packed row the state of each completion token is.
    """

    ids: Tensor  # int64 [1, T]
    positions: Tensor  # int64 [1, T]
    states: Tensor
    parts: tuple[_Part, ...]
    order: Tensor  # int64 [T]: where in the parts' outputs, one behind another, each token's is

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids.shape[1]


def packed_tokens(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> int:
    """How many tokens ``pack`` makes of these."""
    distinct = {tuple(prompt) for prompt in prompts}
    return sum(map(len, distinct)) + sum(max(0, len(tokens) - 1) for tokens in completions)


def pack(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], device: torch.device
) -> Packing:
    """One packed row of ``completions`` (at least one token each; the last is never fed) and their prompts.

    Raises:
        ValueError: lengths differ, or a prompt or completion is empty.
    """
    if len(prompts) != len(completions) or not all(prompts) or not all(completions) or not prompts:
        raise ValueError("as many prompts as completions are wanted, none of them empty")
    ids: list[int] = []
    positions: list[int] = []

    def place(tokens: Sequence[int], first: int) -> range:
        start = len(ids)
        ids.extend(tokens)
        positions.extend(range(first, first + len(tokens)))
        return range(start, len(ids))

    places: dict[tuple[int, ...], range] = {}
    for prompt in prompts:
        key = tuple(prompt)
        if key not in places:
            places[key] = place(key, 0)
    states: list[int] = []
    rows: list[tuple[range, range]] = [(where, range(0)) for where in places.values()]
    for prompt, completion in zip(prompts, completions, strict=True):
        where = places[tuple(prompt)]
        fed = place(completion[:-1], len(prompt))
        states.append(where[-1])
        states.extend(fed)
        if fed:
            rows.append((fed, where))
    parts: list[_Part] = []
    order = torch.empty(len(ids), dtype=torch.int64)
    filled = 0
    for batch in _batches(rows):
        part, width = _part(batch, positions, device), max(len(own) for own, _ in batch)
        for number, (own, _) in enumerate(batch):
            start = filled + number * width
            order[own.start : own.stop] = torch.arange(start, start + len(own))
        filled += len(batch) * width
        parts.append(part)
    return Packing(
        ids=torch.tensor([ids], device=device),
        positions=torch.tensor([positions], device=device),
        states=torch.tensor(states, device=device),
        parts=tuple(parts),
        order=order.to(device),
    )


def packed_states(policy: Policy, packing: Packing) -> Tensor:
    """States [sum T_i, H] of every completion token with their graph, as ``prefill`` gives them.

    ``policy`` must have been enabled.
    """
    marker = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packing.ids.device)
    # Models hand a mask of four dimensions to their attention as it is, through recomputation too.
    marker.packing = packing  # type: ignore[attr-defined]
    hidden = policy.hidden(
        packing.ids, attention_mask=marker, position_ids=packing.positions, use_cache=False
    )
    return hidden[0, packing.states]


def enable(policy: Policy) -> bool:
    """Let ``policy`` run packings as well as everything else; False where its architecture cannot.

    That packing changes nothing is tried out on a few tokens.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config = policy.config.get_text_config(decoder=True)
    if not only_attends(policy):
        return False
    if getattr(config, "sliding_window", None) and config.model_type not in WINDOWS_TOLD:
        return False
    base = str(config._attn_implementation)
    if base.startswith(_PREFIX):
        return True
    if base not in ("sdpa", "eager"):
        return False
    name = _PREFIX + base
    AttentionInterface.register(name, _attention(base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    config._attn_implementation = name
    try:
        fits = _fits(policy)
    except Exception as error:  # an architecture that takes no position ids, say
        log.info("%s models cannot be packed: %s", config.model_type, error)
        fits = False
    if not fits:
        config._attn_implementation = base
    return fits


@torch.no_grad()
def _fits(policy: Policy) -> bool:
    from barnraise.kernels.prefill import prefill

    most = policy.vocabulary - 1
    prompts = [[0, most, 1 % (most + 1)], [most, 0], [0, most, 1 % (most + 1)]]
    completions = [[0, most, 0], [most, most, 0, 0], [most, 0]]
    padded = prefill(policy, prompts, completions, grad=True)
    packed = packed_states(policy, pack(prompts, completions, policy.device))
    scale = float(padded.abs().max()) + 1e-6
    tolerance = _CHECK_TOLERANCE if padded.dtype == torch.float32 else 0.1
    return float((padded.float() - packed.float()).abs().max()) <= tolerance * scale


def _attention(base: str) -> Callable[..., tuple[Tensor, Any]]:
    def packed(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, Any]:
        attend = _base_function(base, module)
        packing: Packing | None = getattr(attention_mask, "packing", None)
        if packing is None:
            found: tuple[Tensor, Any] = attend(module, query, key, value, attention_mask, **rest)
            return found
        rest.pop("is_causal", None)
        window = rest.get("sliding_window")
        outputs = []
        for part in packing.parts:
            plain = part.causal and base == "sdpa" and (window is None or part.keys.shape[1] <= window)
            mask = None if plain else part.mask(window)
            if mask is not None and base == "eager":  # which adds its mask
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
                    ~mask, torch.finfo(query.dtype).min
                )
            rows = (_rows(query, part.queries), _rows(key, part.keys), _rows(value, part.keys))
            output = attend(module, *rows, mask, **rest)[0]  # [R, Q, heads, D]
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs)[packing.order][None], None

    return packed


def _base_function(base: str, module: Any) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if base == "eager":
        own: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        return own
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[base]
    return function


def _rows(packed: Tensor, places: Tensor) -> Tensor:
    """[1, heads, T, D] at int64 [R, L]: [R, heads, L, D]."""
    heads, width = packed.shape[1], packed.shape[3]
    gathered = packed[0].index_select(1, places.flatten())
    return gathered.view(heads, *places.shape, width).transpose(0, 1)


def _batches(rows: list[tuple[range, range]]) -> list[list[tuple[range, range]]]:
    """Rows (own places, those of the prompt before them) of like length; prompts apart from completions."""
    batches: list[list[tuple[range, range]]] = []
    for own, before in sorted(rows, key=lambda row: (len(row[1]) > 0, -len(row[0]), -len(row[1]))):
        last = batches[-1] if batches else None
        if last is not None and bool(last[0][1]) == bool(before):
            width = len(last[0][0])  # the longest, as they are sorted
            depth = max(len(row[1]) for row in (*last, (own, before)))
            # Half of a part may be padding, not more.
            if (len(last) + 1) * width * (width + depth) <= PART_ELEMENTS and 2 * len(own) >= width:
                last.append((own, before))
                continue
        batches.append([(own, before)])
    return batches


def _part(rows: list[tuple[range, range]], positions: list[int], device: torch.device) -> _Part:
    width = max(len(own) for own, _ in rows)
    depth = max(len(before) for _, before in rows)
    queries = torch.full((len(rows), width), -1)
    keys = torch.full((len(rows), depth + width), -1)
    for number, (own, before) in enumerate(rows):
        queries[number, : len(own)] = torch.arange(own.start, own.stop)
        keys[number, : len(before)] = torch.arange(before.start, before.stop)
        keys[number, depth : depth + len(own)] = torch.arange(own.start, own.stop)
    where = torch.tensor(positions)
    padded = (torch.where(places < 0, -1, where[places.clamp(min=0)]) for places in (queries, keys))
    query_positions, key_positions = padded
    return _Part(
        queries=queries.clamp_(min=0).to(device),
        keys=keys.clamp_(min=0).to(device),
        query_positions=query_positions.to(device),
        key_positions=key_positions.to(device),
        causal=depth == 0,
    )

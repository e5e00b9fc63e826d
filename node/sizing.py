"""How much of a unit an engine holds at once: by the memory that is free when the unit begins (R5).

Estimates, on the safe side, of what one sequence takes; half of what is free is used. Where
one is wrong all the same, memory runs out, and the unit is tried again with half as much.
"""

from __future__ import annotations

from typing import Any

import torch

from barnraise.kernels.models import Policy
from barnraise.kernels.mot import Cut
from barnraise.node.block_engine import BlockWork
from barnraise.node.engine import Sized
from barnraise.node.memory import free_memory
from barnraise.protocol.pretrain import PretrainSpec
from barnraise.protocol.spec import RunSpec

MAX_BATCH = 256
# What a layer keeps for its backward pass, in tensors of [tokens, hidden] and [tokens, intermediate].
# Together within a factor of 1.5 of what benchmarks/micro_batches.py measures.
_HIDDEN_KEPT = 18
_INNER_KEPT = 5
_LOGITS = 4  # logits, their float32 copy, log-softmax, gradient


def size_unit(policy: Policy, spec: RunSpec, prompts: list[list[int]], shrink: int = 0) -> Sized:
    """How many completions to draw at once.

    Counted per sequence: keys and values of every layer, twice (the cache grows by
    copying), captured states, and one step's logits in float32 a few times over.
    """
    text: Any = policy.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or policy.hidden_size // text.num_attention_heads
    element = torch.finfo(policy.compute_dtype).bits // 8
    length = max(len(prompt) for prompt in prompts) + spec.sampling.max_new_tokens
    cache = 2 * 2 * text.num_hidden_layers * heads * head_dim * element * length
    states = 2 * policy.hidden_size * element * spec.sampling.max_new_tokens
    each = cache + states + 8 * 4 * policy.vocabulary
    return _sized(each, free_memory(policy.device), MAX_BATCH, shrink)


def size_block(config: Any, cut: Cut, work: BlockWork, spec: PretrainSpec, device: torch.device) -> Sized:
    """How many of a step's sequences to train on at once; call it with model and optimizer in memory."""
    each = block_bytes(config, cut, work.block, spec.sequence)
    return _sized(each, free_memory(device), spec.recipe.batch, work.shrink)


def block_bytes(config: Any, cut: Cut, block: int, length: int) -> int:
    """What a step takes for each sequence of ``length`` tokens, above weights, gradients and moments."""
    text: Any = config.get_text_config(decoder=True)
    layers = sum(cut.slice_layers) - cut.slice_layers[block] + cut.block_layers[block]
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    kept = layers * (_HIDDEN_KEPT * text.hidden_size + _INNER_KEPT * inner) + _LOGITS * text.vocab_size
    return 4 * int(kept) * length


def _sized(each: int, free: int, most: int, shrink: int) -> Sized:
    fitting = max(1, min(most, free // 2 // max(1, each)))
    return Sized(at_once=max(1, fitting >> shrink), most=most, each=each, free=free, halved=shrink)

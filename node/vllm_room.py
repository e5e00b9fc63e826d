"""How much vLLM is given: key-value cache, sequences, tokens of a step; before it starts. Needs no vLLM.

vLLM takes its cache at once and for good, and preempts sequences where it is too small; so
a unit's memory is bounded before it begins (R5), and what may still run out is what steps take.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from barnraise.kernels.model_files import DTYPES, weight_files
from barnraise.node.engine import OutOfMemory, Sized
from barnraise.node.memory import free_memory, gpu_share
from barnraise.protocol.spec import RunSpec

MOST_SEQUENCES = 256
PROMPT_ROOM = 8192  # tokens of a prompt, where memory allows
_USUAL_PROMPT = 512
_LEAST_PROMPT = 96
_OVERBOOKED = 4
_CPU_SEQUENCES = 64  # for which the cache has room on a CPU, where more at once hardly pay
_BLOCK = 16  # tokens of a block of the cache; on a CPU
_CPU_BLOCK = 32
_GPU_STEP = 8192  # tokens
_CPU_STEP_FLOP = 1.5e10  # half a second of one slow core: a pause waits for the end of a step (R13)
_SPARE_GPU = 0.03  # of its memory, for what others on the machine may take meanwhile


@dataclass(frozen=True)
class Room:
    """What vLLM is started with.

    Attributes:
        length: tokens of the longest sequence.
        sequences: most at once.
        step_tokens: most tokens, prompts' included, of one step.
        kv_bytes: size of the cache; 0 on a GPU, where vLLM takes what ``gpu_share`` leaves.
        token_bytes: keys and values of one token, all layers.
        gpu_share: fraction of the GPU's memory.
        free: bytes that were free before.
    """

    length: int
    sequences: int
    step_tokens: int
    kv_bytes: int
    token_bytes: int
    gpu_share: float
    block: int
    free: int
    on_cpu: bool

    def sized(self, rows: int, longest: int, shrink: int) -> Sized:
        """How many of a unit's ``rows`` sequences vLLM is given at once; it may hold fewer (R5)."""
        most = max(1, min(rows, self.sequences))
        held = self.kv_bytes // (self.token_bytes * longest) if self.kv_bytes else most
        # More than fit at their longest: a group shares its prompt's blocks, most answers end earlier,
        # and vLLM preempts where they do not.
        fitting = max(1, min(most, _OVERBOOKED * max(1, held)))
        return Sized(
            at_once=max(1, fitting >> shrink),
            most=most,
            each=self.token_bytes * longest,
            free=self.kv_bytes or self.free,
            halved=shrink,
        )

    def in_words(self) -> str:
        """For a person."""
        cache = (
            f"{self.kv_bytes / 1e6:,.0f} MB of cache" if self.kv_bytes else f"{self.gpu_share:.0%} of the GPU"
        )
        return f"{cache} for sequences of up to {self.length} tokens; {self.free / 1e6:,.0f} MB were free"


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in every layer of a transformers config."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * head_dim * dtype.itemsize)


def room_for(
    config: Any,
    spec: RunSpec,
    folder: Path,
    device: torch.device,
    kv_bytes: int = 0,
    step_tokens: int = 0,
) -> Room:
    """What vLLM may have for this model on this machine, now.

    Args:
        kv_bytes, step_tokens: the cache's size and a step's, if somebody chose them.

    Raises:
        OutOfMemory: not even one sequence fits beside the weights; with the numbers.
    """
    dtype = DTYPES[spec.model.compute_dtype]
    each = token_bytes(config, dtype)
    text = config.get_text_config(decoder=True)
    new = spec.sampling.max_new_tokens
    length = min(getattr(text, "max_position_embeddings", None) or PROMPT_ROOM + new, PROMPT_ROOM + new)
    free = free_memory(device)
    if device.type != "cpu":
        share = max(0.05, min(0.9 * gpu_share(), free / _total(device) - _SPARE_GPU))
        return Room(length, MOST_SEQUENCES, _GPU_STEP, kv_bytes, each, share, _BLOCK, free, False)
    # Packed weights, and for a moment the files' and one layer's own copy; tied heads are packed besides.
    weights = spec.model.parameters * dtype.itemsize
    files = sum(path.stat().st_size for path in weight_files(folder))
    left = free - 2 * weights - min(files, weights)
    least = each * (_LEAST_PROMPT + new + _CPU_BLOCK)
    wanted = _CPU_SEQUENCES * each * (_USUAL_PROMPT + new)
    cache = kv_bytes or min(wanted, left // 2)
    if cache < least:
        raise OutOfMemory(
            f"vLLM needs {least / 1e6:,.0f} MB of key-value cache beside {2 * weights / 1e6:,.0f} MB of "
            f"weights, and {free / 1e6:,.0f} MB are free: close other programs, allow more memory "
            "(barnraise limits set --memory), or use --engine torch"
        )
    length = min(length, (cache // (each * _CPU_BLOCK) - 1) * _CPU_BLOCK)  # vLLM keeps a block for itself
    step = step_tokens or max(MOST_SEQUENCES, min(4096, int(_CPU_STEP_FLOP / (2 * spec.model.parameters))))
    return Room(length, min(MOST_SEQUENCES, step), step, cache, each, 0.5, _CPU_BLOCK, free, True)


def _total(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1])

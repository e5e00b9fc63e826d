"""How fast the engine is on this machine: a model of known size, drawn from for a few seconds.

The engine's own generation loop on a random Llama. What comes out is told as tokens per
second and as GFLOP/s of useful work (two per weight and token, attention and sampling not
counted), from which the speed of other models of the same kind follows roughly. On a GPU the
model is larger, and yet small for a large one, which the number then underestimates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

ROWS, PROMPT, NEW = 16, 32, 64
_SIZES = {"cpu": (512, 8), "cuda": (1024, 16), "mps": (1024, 16)}  # hidden, layers
_VOCABULARY = 4096
_TOLD_S = 0.25


class Measured(Struct, frozen=True, kw_only=True, tag=True):
    """Finished work (R7): ``tokens`` drawn in ``seconds`` by ``weights`` that each token goes through."""

    tokens: int
    seconds: float
    weights: int
    device: str
    threads: int
    dtype: str = "float32"

    @property
    def tokens_per_s(self) -> float:
        """Of the model that it was measured with."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def gflops(self) -> float:
        """10^9 useful floating-point operations per second."""
        return 2e-9 * self.weights * self.tokens_per_s

    def speed_of(self, parameters: int) -> float:
        """Tokens per second to expect of a model with so many parameters, roughly."""
        return self.gflops * 1e9 / (2 * max(1, parameters))


def measure(
    device: str,
    threads: int,
    seconds: float,
    progress: Callable[[Measured], None],
    should_stop: Callable[[], bool] = lambda: False,
    size: tuple[int, int] | None = None,
) -> Measured:
    """Draw for ``seconds`` after a short warm-up; ``progress`` is told of finished work alone.

    Raises:
        BarnraiseError: the model cannot be built.
        Exception: whatever torch raises where a device does not work after all.
    """
    import torch

    torch.empty(1, device=device)  # a device that does not work is refused before a model is made for it

    from transformers import LlamaConfig

    from barnraise.kernels.generate import GenerationStopped, generate
    from barnraise.kernels.models import random_policy
    from barnraise.protocol.spec import SamplingSpec

    torch.set_num_threads(max(1, threads))
    kind = torch.device(device).type
    hidden, layers = size or _SIZES.get(kind, _SIZES["cpu"])
    dtype = "bfloat16" if kind == "cuda" else "float32"
    config: Any = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        tie_word_embeddings=False,
    )
    policy = random_policy(config, dtype, device, seed=0)
    weights = policy.parameters - _VOCABULARY * hidden  # looking a token up costs nothing
    prompts = [[(7 * row + place) % _VOCABULARY for place in range(PROMPT)] for row in range(ROWS)]
    sampling = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW)
    began, drawn, told = time.monotonic(), 0, 0.0

    def result() -> Measured:
        return Measured(
            tokens=drawn,
            seconds=time.monotonic() - began,
            weights=weights,
            device=device,
            threads=threads,
            dtype=dtype,
        )

    def over() -> bool:
        return should_stop() or time.monotonic() - began >= seconds

    def step(before: int) -> Callable[[int, int], None]:
        def on_progress(ended: int, tokens: int) -> None:
            nonlocal drawn, told
            drawn = before + tokens
            if time.monotonic() - told >= _TOLD_S:
                told = time.monotonic()
                progress(result())

        return on_progress

    warm = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=2)
    generate(policy, prompts, list(range(ROWS)), warm, _VOCABULARY, should_stop)
    began, round_ = time.monotonic(), 0
    done: Measured | None = None
    while not over():
        seeds = [round_ * ROWS + row for row in range(ROWS)]
        try:
            generate(policy, prompts, seeds, sampling, _VOCABULARY, over, step(drawn))
        except GenerationStopped:
            break
        round_ += 1
    done = result()
    progress(done)
    return done

"""Triton kernels are used on a device only after they have agreed there with the torch reference.

GPUs, drivers and versions of Triton are many, and these kernels have run on few of them. So
before its first use on a device each kernel computes a small example, and the reference
the same on a CPU; a draw must be equal to the bit, log-probabilities and gradients close. A
kernel that fails to compile, to start or to agree is left out there with a warning, and
torch does its work: slower, and right. The check takes about as long as compiling does.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Logprobs = Callable[..., tuple[Tensor, Tensor]]
Gumbel = Callable[..., Tensor]
Draw = Callable[..., tuple[Tensor, Tensor]]

_OLDEST_TENSOR_CORES = (8, 0)
"""Triton's matrix products need Ampere or newer; on Turing they compile, and spill every register."""


@lru_cache(maxsize=16)
def fused_logprobs(device: torch.device) -> Logprobs | None:
    """``logprobs_triton.token_logprobs_triton``, where it is installed and right on ``device``."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST_TENSOR_CORES:
        return None
    found: tuple[Logprobs] | None = _checked(
        "logprobs_triton", device, _logprobs_agree, "token_logprobs_triton"
    )
    return None if found is None else found[0]


@lru_cache(maxsize=16)
def fused_sampling(device: torch.device) -> tuple[Gumbel, Draw] | None:
    """``gumbel`` and ``draw`` of ``sampling_triton``, where it is installed and right on ``device``."""
    found: tuple[Gumbel, Draw] | None = _checked("sampling_triton", device, _draws_agree, "gumbel", "draw")
    return found


def _checked(name: str, device: torch.device, agrees: Callable[..., bool], *functions: str) -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        module = importlib.import_module(f"barnraise.kernels.{name}")
        found = tuple(getattr(module, function) for function in functions)
        # Whoever draws first may be in inference mode, under autocast, or both.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            right = agrees(device, *found)
        fault = "differs from the torch reference"
    # Whatever a compiler or a driver throws: torch can do the same work.
    except Exception as error:
        right, fault = False, f"does not run: {type(error).__name__}: {error}"
    if right:
        return found
    warnings.warn(f"the Triton kernel {name} {fault} on {device}; torch is used instead", stacklevel=3)
    return None


def _logprobs_agree(device: torch.device, fused: Logprobs) -> bool:
    from barnraise.kernels.logprobs import token_logprobs

    generator = torch.Generator().manual_seed(3)
    tokens, width, vocab = 130, 80, 300  # more than a block of each, and no multiple of one
    example = [
        torch.randn(*shape, generator=generator) for shape in ((tokens, width), (vocab, width), (vocab,))
    ]
    targets = torch.randint(vocab, (tokens,), generator=generator)
    along = torch.randn(2, tokens, generator=generator)
    results = []
    for function, where, dtype in ((token_logprobs, "cpu", torch.float64), (fused, device, torch.bfloat16)):
        leaves = [part.bfloat16().to(where, dtype).requires_grad_() for part in example]
        found = function(leaves[0], leaves[1], targets.to(where), 0.7, leaves[2], 20.0)
        sum((way.to(where) * value).sum() for way, value in zip(along, found, strict=True)).backward()
        results.append([*found, *(leaf.grad for leaf in leaves)])
    values = [(own.double().cpu(), other.double().cpu()) for own, other in zip(*results, strict=True)]
    near = all(torch.allclose(own, other, rtol=1e-4, atol=1e-3) for own, other in values[:2])
    return near and all(
        bool((own - other).abs().max() <= 0.02 * own.abs().max()) for own, other in values[2:]
    )


def _draws_agree(device: torch.device, gumbel: Gumbel, draw: Draw) -> bool:
    from barnraise.kernels import sampling

    generator = torch.Generator().manual_seed(3)
    seeds, places = [0, 1, 2**63 + 5, 2**64 - 1], torch.tensor([0, 7, 2**31, 2**32 - 1])
    logits = 3 * torch.randn(len(seeds), 1027, generator=generator)
    noise = gumbel(seeds, places.to(device), logits.shape[1]).cpu()
    if not torch.equal(noise, sampling.gumbel(seeds, places, logits.shape[1])):
        return False
    for top_k, top_p in ((0, 1.0), (50, 0.9)):
        own = sampling.draw(logits, seeds, places, 0.7, top_k, top_p)
        other = draw(logits.to(device), seeds, places.to(device), 0.7, top_k, top_p)
        if not torch.equal(own[0], other[0].cpu()) or not torch.allclose(own[1], other[1].cpu(), atol=1e-4):
            return False
    return True

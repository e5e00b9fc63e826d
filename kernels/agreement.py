"""Does a model draw what it is later judged by? Tried once, before a run is made of it.

Generation feeds one token at a time behind a key-value cache, in a batch padded on the left;
verifier and learner see whole sequences. Where an architecture makes these differ by more
than rounding, honest work would be refused. So would it where a token's state depends on
those after it (an encoder).
"""

from __future__ import annotations

import torch

from barnraise.kernels.generate import generate
from barnraise.kernels.model_config import SUPPORTED
from barnraise.kernels.model_json import ModelError
from barnraise.kernels.models import Policy
from barnraise.kernels.prefill import prefill
from barnraise.protocol.spec import SamplingSpec

TOLERANCE = 1e-3
"""Of a state's norm, in float32: rounding gives about 1e-6 on dense models of four layers."""
_LENGTHS = (7, 3)  # of two prompts, so that one is padded
_DRAWN = 6


@torch.no_grad()
def check_agreement(policy: Policy) -> None:
    """Draw a few tokens and compare their states with those of each sequence run alone.

    Raises:
        ModelError: they differ, or the model cannot be run as a causal LM at all; says what is supported.
        ValueError: ``policy`` is not of float32, where rounding could not be told from faults.
    """
    if policy.compute_dtype != torch.float32:
        raise ValueError("agreement is checked in float32")
    kind = policy.config.model_type
    prompts = [[1 + i % (policy.vocabulary - 1) for i in range(length)] for length in _LENGTHS]
    sampling = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=_DRAWN)
    try:
        drawn = generate(policy, prompts, [1, 2], sampling, -1)
        apart = [prefill(policy, [p], [one.tokens])[0] for p, one in zip(prompts, drawn, strict=True)]
        alone = [
            policy.hidden(torch.tensor([p + one.tokens[:-1]], device=policy.device), use_cache=False)[0]
            for p, one in zip(prompts, drawn, strict=True)
        ]
        first = [
            policy.hidden(torch.tensor([p], device=policy.device), use_cache=False)[0, -1] for p in prompts
        ]
    except Exception as error:  # whatever an architecture of transformers may raise
        raise ModelError(f"a {kind} model cannot draw completions here ({error}). {SUPPORTED}") from error
    for prompt, one, prefilled, whole, before in zip(prompts, drawn, apart, alone, first, strict=True):
        wanted = whole[len(prompt) - 1 :]
        norm = float(wanted.norm(dim=1).max())
        for states in (one.states, prefilled, torch.cat([before[None], wanted[1:]])):
            if not float((states - wanted).norm(dim=1).max()) <= TOLERANCE * norm:
                raise ModelError(
                    f"a {kind} model gives a token another state in generation than in verification, "
                    f"so honest work would be refused. {SUPPORTED}"
                )

"""The checks of proofs: their form first, then the scores, each failure named with its place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from barnraise.coordinator import toploc_checks
from barnraise.coordinator.checks import CheckFailure, Completion, default_verify_spec
from barnraise.kernels.models import Policy, _wrap
from barnraise.kernels.prefill import prefill
from barnraise.kernels.shared_prefill import new_cache
from barnraise.kernels.toploc import ChunkScore, build_proofs, chunk_points, proof_length, score
from barnraise.protocol.messages import Verdict
from barnraise.protocol.wire import decode, encode

HIDDEN = 16
VERIFY = default_verify_spec()


def _failure(check: str, call: Any, *arguments: Any) -> Verdict:
    with pytest.raises(CheckFailure) as caught:
        call(*arguments)
    verdict = caught.value.verdict()
    assert (verdict.check, verdict.accepted) == (check, False)
    assert decode(encode(verdict), Verdict) == verdict  # fit to be signed and sent
    return verdict


def _completion(tokens: int, proofs: bytes, ended: bool = True) -> Completion:
    return Completion(np.zeros(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.float32), proofs, ended)


def test_proofs_are_measured_before_they_are_computed_with() -> None:
    size = proof_length(33, HIDDEN)
    for proofs in (b"", bytes(size - 1), bytes(size + 258)):
        verdict = _failure(
            "proof-length", toploc_checks.check_proofs, _completion(33, proofs), 1, HIDDEN, VERIFY
        )
        assert (verdict.threshold, verdict.value, verdict.position) == (size, len(proofs), "rollout 1")
    verdict = _failure(
        "proof-format", toploc_checks.check_proofs, _completion(33, bytes(size)), 1, HIDDEN, VERIFY
    )
    assert "modulus 0" in verdict.message
    good = b"\xff\xd9" + bytes(256) + b"\xff\xd9" + bytes(32)
    toploc_checks.check_proofs(_completion(33, good), 1, HIDDEN, VERIFY)


@pytest.mark.parametrize(
    ("check", "score"),
    [
        ("toploc-exponents", ChunkScore(11, 0.0, 0.0)),
        ("toploc-mantissa-mean", ChunkScore(10, 4.1, 3.0)),
        ("toploc-mantissa-median", ChunkScore(10, 4.0, 4.0)),
        ("toploc-mantissa-mean", ChunkScore(0, math.nan, 0.0)),
    ],
)
def test_toploc_scores_over_a_threshold_are_named_with_their_chunk(check: str, score: ChunkScore) -> None:
    fine = ChunkScore(10, 4.0, 3.0)
    toploc_checks.check_toploc([fine, fine], [128, 128], 5, VERIFY)
    verdict = _failure(check, toploc_checks.check_toploc, [fine, score], [128, 128], 5, VERIFY)
    assert verdict.position == "rollout 5 chunk 1"


def test_a_short_chunk_is_allowed_proportionally_fewer_mismatches() -> None:
    toploc_checks.check_toploc([ChunkScore(2, 0.0, 0.0)], [16], 0, VERIFY)
    verdict = _failure(
        "toploc-exponents", toploc_checks.check_toploc, [ChunkScore(3, 0.0, 0.0)], [16], 0, VERIFY
    )
    assert verdict.threshold == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 7, 32])
def test_an_engine_that_prefills_in_pieces_passes(dtype: torch.dtype, piece: int) -> None:
    tokens = torch.randint(1, 64, (70,), generator=torch.Generator().manual_seed(piece)).tolist()
    prompt, completion = tokens[:30], tokens[30:]
    engine, verifier = _policy(dtype), _policy(torch.float32)
    cache = new_cache(engine)
    fed = tokens[:-1]
    parts = []
    with torch.no_grad():
        for start in range(0, len(fed), piece):
            ids = torch.tensor([fed[start : start + piece]])
            positions = torch.arange(start, start + ids.shape[1])[None]
            arguments = {engine.cache_argument: cache, "use_cache": True, "position_ids": positions}
            parts.append(engine.hidden(ids, **arguments)[0])
    proofs = build_proofs([torch.cat(parts)[len(prompt) - 1 :]])
    (scores,) = score(proofs, prefill(verifier, [prompt], [completion]))
    toploc_checks.check_toploc(scores, chunk_points(len(completion), 96), 0, VERIFY)


def _policy(dtype: torch.dtype) -> Policy:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "initializer_range": 0.1,
    }
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**values)).eval().to(dtype)
    return _wrap(model, torch.device("cpu"), dtype)

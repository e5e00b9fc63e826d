"""The checks of proofs: their form first, then the scores, each failure named with its place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from barnraise.coordinator import toploc_checks
from barnraise.coordinator.checks import CheckFailure, Completion, default_verify_spec
from barnraise.kernels.models import Policy, _wrap
from barnraise.kernels.prefill import prefill
from barnraise.kernels.shared_prefill import new_cache
from barnraise.kernels.toploc import ChunkScore, build_proofs, proof_length, score
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
        ("toploc-exponents", ChunkScore(40, 0.0, 0.0, 128)),
        ("toploc-mantissa-mean", ChunkScore(10, 8.5, 3.0, 128)),
        ("toploc-mantissa-median", ChunkScore(10, 3.0, 7.0, 128)),
        ("toploc-mantissa-mean", ChunkScore(0, math.nan, 0.0, 128)),
    ],
)
def test_toploc_scores_over_a_threshold_are_named_with_their_chunk(check: str, score: ChunkScore) -> None:
    fine = ChunkScore(30, 8.0, 6.0, 128)
    toploc_checks.check_toploc([fine, fine], 5, 64, VERIFY)
    verdict = _failure(check, toploc_checks.check_toploc, [fine, score], 5, 64, VERIFY)
    assert verdict.position == "rollout 5 chunk 1"


def test_the_more_proofs_a_submission_has_the_further_may_one_of_them_be_off() -> None:
    limits = [toploc_checks.mismatch_limit(128, VERIFY, VERIFY.false_alarm / n) for n in (1, 64, 10_000)]
    assert limits == sorted(limits)
    assert limits[-1] < 48


def test_what_no_single_proof_shows_all_of_them_do() -> None:
    coarse = [[ChunkScore(14, 1.0, 1.0, 128)] for _ in range(64)]
    distorted = [[ChunkScore(0, 4.0, 2.0, 128)] for _ in range(64)]
    honest = [[ChunkScore(7, 3.0, 1.0, 128)] for _ in range(64)]
    for number, row in enumerate([*coarse, *distorted, *honest]):
        toploc_checks.check_toploc(row, number, 64, VERIFY)
    toploc_checks.check_toploc_sums(honest, VERIFY)
    for few in (coarse, distorted):
        toploc_checks.check_toploc_sums(few[:1], VERIFY)
    verdict = _failure("toploc-exponents-all", toploc_checks.check_toploc_sums, coarse, VERIFY)
    assert (verdict.value, verdict.position) == (896.0, "all 64 chunks")
    _failure("toploc-mantissa-all", toploc_checks.check_toploc_sums, distorted, VERIFY)


def test_of_few_values_relatively_more_may_differ() -> None:
    shares = [toploc_checks.mismatch_limit(n, VERIFY, 1e-9) / n for n in (8, 32, 128, 8192)]
    means = [toploc_checks.mantissa_limit(n, VERIFY, 1e-9) for n in (8, 32, 128, 8192)]
    assert shares == sorted(shares, reverse=True)
    assert means == sorted(means, reverse=True)
    assert means[-1] < 1.2 * VERIFY.max_mantissa_mean
    exact = structs.replace(VERIFY, max_exponent_mismatches=0, max_mantissa_mean=0.0)
    assert toploc_checks.mismatch_limit(128, exact, 1e-9) == 0
    assert toploc_checks.mantissa_limit(128, exact, 1e-9) == 0


@pytest.mark.parametrize("values", [8, 128, 8192])
def test_honest_mismatches_exceed_their_limit_less_often_than_was_promised(values: int) -> None:
    """Against the exact tail of a Poisson variable, which is wider than that of any sum of indicators."""
    mean = VERIFY.max_exponent_mismatches * values / VERIFY.toploc_top_k
    for false_alarm in (1e-3, 1e-7, 1e-11):
        limit = int(toploc_checks.mismatch_limit(values, VERIFY, false_alarm))
        kind = torch.float64
        beyond = torch.special.gammainc(torch.tensor(limit + 1.0, dtype=kind), torch.tensor(mean, dtype=kind))
        assert 0 < float(beyond) <= false_alarm


@pytest.mark.parametrize("values", [8, 128, 8192])
def test_honest_mantissas_exceed_their_limit_less_often_than_was_promised(values: int) -> None:
    """Against the exact tail of a mean of exponential variables, a quarter as many as there are values."""
    shape = values / toploc_checks.TOGETHER
    for false_alarm in (1e-3, 1e-7, 1e-11):
        limit = toploc_checks.mantissa_limit(values, VERIFY, false_alarm)
        at = torch.tensor(limit / VERIFY.max_mantissa_mean * shape, dtype=torch.float64)
        beyond = torch.special.gammaincc(torch.tensor(shape, dtype=torch.float64), at)
        assert 0 < float(beyond) <= false_alarm


def test_of_a_short_chunk_the_values_that_rounding_ruins_are_not_compared() -> None:
    """One token of a narrow model: all 128 values are in the proof, and small ones are differences."""
    generator = torch.Generator().manual_seed(5)
    own = [torch.randn(1, 128, generator=generator) for _ in range(200)]
    engine = [state + 0.004 * torch.randn(1, 128, generator=generator) for state in own]
    proofs = build_proofs(engine)
    scores = score(proofs, own, among=toploc_checks.AMONG)
    for number, row in enumerate(scores):
        assert row[0].values == 32
        toploc_checks.check_toploc(row, number, len(own), VERIFY)
    toploc_checks.check_toploc_sums(scores, VERIFY)
    # Another token's state is told from this one by the largest quarter alone.
    for number, row in enumerate(score(proofs, own[1:] + own[:1], among=toploc_checks.AMONG)):
        with pytest.raises(CheckFailure):
            toploc_checks.check_toploc(row, number, len(own), VERIFY)


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
    (scores,) = score(proofs, prefill(verifier, [prompt], [completion]), among=toploc_checks.AMONG)
    toploc_checks.check_toploc(scores, 0, len(scores), VERIFY)
    toploc_checks.check_toploc_sums([scores], VERIFY)


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

"""TOPLOC: the package's own bytes, hostile bytes refused, and scores that tell models apart."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from barnraise.kernels import toploc
from barnraise.kernels.toploc import (
    PRIME,
    ProofError,
    build_proofs,
    check_format,
    chunk_points,
    proof_length,
    score,
)

DATA = Path(__file__).parent / "data"
RECIPE = runpy.run_path(str(DATA / "toploc_vectors.py"))
VECTORS: list[dict[str, Any]] = json.loads((DATA / "toploc_vectors.json").read_text())
PARAMETERS = [pytest.param(v, id=f"{v['tokens']}x{v['hidden']}-{v['seed']}") for v in VECTORS]


def _states(tokens: int, hidden: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vector", PARAMETERS)
def test_proofs_have_the_bytes_of_the_published_package(vector: dict[str, Any]) -> None:
    states = RECIPE["states"](vector["seed"], vector["tokens"], vector["hidden"])
    proofs = bytes.fromhex(vector["proofs"])
    check_format(proofs, vector["tokens"], vector["hidden"])
    assert build_proofs([states]) == [proofs]


@pytest.mark.parametrize("vector", [p for p in PARAMETERS if p.values[0]["scores"]])  # type: ignore[index]
def test_scores_are_those_of_the_published_package(vector: dict[str, Any]) -> None:
    states = RECIPE["states"](vector["seed"], vector["tokens"], vector["hidden"])
    other = RECIPE["disturbed"](states, vector["seed"])
    found = score([bytes.fromhex(vector["proofs"])], [other])[0]
    for ours, (mismatches, mean, median) in zip(found, vector["scores"], strict=True):
        assert (ours.exponent_mismatches, ours.mantissa_median) == (mismatches, median)
        assert ours.mantissa_mean == pytest.approx(mean, rel=1e-12)


def test_a_proof_with_another_modulus_verifies() -> None:
    vectors = [v for v in VECTORS if not v["proofs"].startswith("ffd9")]
    assert vectors
    for vector in vectors:
        states = RECIPE["states"](vector["seed"], vector["tokens"], vector["hidden"])
        (found,) = score([bytes.fromhex(vector["proofs"])], [states])[0]
        assert (found.exponent_mismatches, found.mantissa_mean, found.mantissa_median) == (0, 0.0, 0.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(0, 1000)), min_size=1, max_size=5),
    st.sampled_from([1, 3, 16, 40, 128]),
    st.sampled_from([1, 5, 128, 300]),
    st.sampled_from([1, 7, 32]),
)
def test_honest_proofs_score_zero_in_every_shape(
    sequences: list[tuple[int, int]], hidden: int, top_k: int, chunk: int
) -> None:
    states = [_states(tokens, hidden, seed) for tokens, seed in sequences]
    proofs = build_proofs(states, top_k, chunk)
    for proof, state in zip(proofs, states, strict=True):
        assert len(proof) == proof_length(len(state), hidden, top_k, chunk)
        check_format(proof, len(state), hidden, top_k, chunk)
        # A sequence's proofs do not depend on what shares its batch.
        assert build_proofs([state], top_k, chunk) == [proof]
    for found, state in zip(score(proofs, states, top_k, chunk), states, strict=True):
        assert len(found) == len(chunk_points(len(state), hidden, top_k, chunk))
        assert all((s.exponent_mismatches, s.mantissa_mean) == (0, 0.0) for s in found)


def test_states_of_higher_precision_are_rounded_to_bfloat16_first() -> None:
    states = _states(40, 24)
    assert build_proofs([states]) == build_proofs([states.to(torch.bfloat16)])
    assert build_proofs([states.double()]) == build_proofs([states])
    assert build_proofs([states.T.contiguous().T]) == build_proofs([states])


def test_ties_across_the_border_go_to_the_lower_index() -> None:
    states = torch.ones(32, 64)
    states[31, 63] = 2.0
    index, bits = toploc._largest(states.to(torch.bfloat16).reshape(1, -1), 128)
    assert sorted(index[0].tolist()) == [*range(127), 32 * 64 - 1]
    assert set(bits[0].tolist()) == {0x3F80, 0x4000}
    large = torch.ones(1, 70_000, dtype=torch.bfloat16)
    assert sorted(toploc._largest(large, 5)[0][0].tolist()) == [0, 1, 2, 3, 4]


def test_the_modulus_is_the_largest_that_separates_the_indices() -> None:
    index = torch.tensor([[0, 1, 2], [0, PRIME, 5], [1, 2 * PRIME - 1, 0], [0, PRIME, PRIME - 1]])
    assert toploc._moduli(index).tolist() == [PRIME, PRIME - 1, PRIME, PRIME - 2]
    hostile = torch.tensor([[4, 4]])
    with pytest.raises(ValueError, match="separates"):
        toploc._moduli(hostile)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 16, 127, 128, 129, 500, 1024]))
def test_the_polynomial_passes_through_its_points(data: st.DataObject, count: int) -> None:
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.stack([torch.randperm(PRIME, generator=generator)[:count] for _ in range(3)])
    y = torch.randint(0, PRIME, (3, count), generator=generator)
    if data.draw(st.booleans()):  # the largest possible intermediate values
        x = torch.arange(PRIME - count, PRIME).expand(3, count)
        y = torch.full((3, count), PRIME - 1)
    coefficients = toploc._interpolate(x, y)
    row, at = data.draw(st.integers(0, 2)), data.draw(st.integers(0, count - 1))
    value = 0
    for coefficient in reversed(coefficients[row].tolist()):
        value = (value * int(x[row, at]) + coefficient) % PRIME
    assert value == int(y[row, at])
    assert torch.equal(toploc._evaluate(coefficients, x), y)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p[:-1], "bytes of proofs, not"),
        (lambda p: p + p[:258], "bytes of proofs, not"),
        (lambda p: b"", "bytes of proofs, not"),
        (lambda p: b"\0\0" + p[2:], "chunk 0: modulus 0 is not in"),
        (lambda p: b"\x00\x81" + p[2:], "chunk 0: modulus 129 is not in"),
        (lambda p: p[:258] + b"\xff\xff" + p[260:], "chunk 1: modulus 65535 is not in"),
        (lambda p: p[:-2] + b"\xff\xd9", "chunk 1: coefficient 65497 is not below"),
    ],
)
def test_bytes_that_no_prover_sends_are_refused(change: Any, text: str) -> None:
    proofs = build_proofs([_states(40, 16)])[0]
    check_format(proofs, 40, 16)
    with pytest.raises(ProofError, match=text):
        check_format(change(proofs), 40, 16)


def test_large_chunks_may_use_a_smaller_modulus_but_not_any() -> None:
    proofs = build_proofs([_states(1, 70_000)])[0]
    for modulus, fine in ((PRIME, True), (40_000, True), (2**15, False), (PRIME + 1, False)):
        changed = modulus.to_bytes(2, "big") + proofs[2:]
        if fine:
            check_format(changed, 1, 70_000)
        else:
            with pytest.raises(ProofError, match="modulus"):
                check_format(changed, 1, 70_000)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=516, max_size=516), st.booleans())
def test_random_bytes_never_get_past_the_format_and_break_the_arithmetic(raw: bytes, fix: bool) -> None:
    if fix:
        raw = b"\xff\xd9" + raw[2:258] + b"\xff\xd9" + raw[260:]
    try:
        check_format(raw, 40, 16)
    except ProofError:
        return
    found = score([raw], [_states(40, 16)])[0]
    assert len(found) == 2
    assert all(0 <= s.exponent_mismatches <= 128 and s.mantissa_mean <= 128 for s in found)


def test_broken_states_are_an_error_not_a_proof() -> None:
    for bad in (float("nan"), float("inf")):
        states = _states(33, 16)
        states[32, 3] = bad
        with pytest.raises(ValueError, match="infinities or NaN"):
            build_proofs([states])


def test_small_noise_passes_and_another_model_does_not() -> None:
    states = [_states(64, 96, seed) for seed in range(4)]
    proofs = build_proofs(states)
    noisy = [state + 0.004 * torch.randn_like(state) for state in states]
    for found in score(proofs, noisy):
        for chunk in found:
            assert chunk.exponent_mismatches <= 10
            assert chunk.mantissa_mean <= 4
            assert chunk.mantissa_median <= 3
    for found in score(proofs, states[1:] + states[:1]):
        assert all(chunk.exponent_mismatches > 60 for chunk in found)

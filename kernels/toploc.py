"""TOPLOC proofs: a few bytes that tie a completion to the model that computed it.

After arXiv 2501.16007. A sequence's final hidden states [T, H] are cut into chunks
of 32 tokens. Per chunk the k = min(128, elements) values of largest magnitude are
taken in bfloat16 with their flat indices, a modulus m is found under which these
indices stay distinct, and the polynomial over the field of p = 65497 elements
through the points (index mod m, bit pattern) is sent: m and k coefficients, lowest
first, as big-endian 16-bit numbers; 258 bytes for k = 128. A verifier takes the
largest values of its own states, evaluates the polynomial there, and compares
exponents and mantissas; signs are not compared.

Byte-compatible with the package ``toploc`` 0.1.6 for bfloat16 input and k = 128,
wherever the k largest magnitudes are one set. Where magnitudes tie across the
border that package leaves the choice to the platform; here the lower index wins,
so that two honest machines with equal states choose alike.

The field arithmetic runs in float64, exactly: products stay below 2^32, their sums
over k <= 1024 points below 2^42, and transforms of that size err by less than 0.02
before they are rounded to whole numbers. A batch of polynomials takes a few dozen
vectorised operations: a product tree for M(x) = prod (x - x_i), then Lagrange's
formula as a correlation of M with the power sums of the weights y_i / M'(x_i).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from barnraise.protocol.errors import BarnraiseError

PRIME = 65_497
PROOF_BYTES = 258
LEAST_MODULUS = 2**15  # exclusive; only states of more than PRIME values need less than PRIME
# Polynomials per batch, and state values per selection: what keeps intermediates in cache.
_POLYNOMIALS = 64
_VALUES = 4_194_304
# Reported as mantissa error where no exponent agrees: one more than the largest possible.
_NO_MATCH = 128.0


class ProofError(BarnraiseError):
    """Bytes cannot be the proofs of a completion; the text names the chunk and the fault."""


@dataclass(frozen=True)
class ChunkScore:
    """How far one chunk's proof is from the verifier's own states.

    Attributes:
        exponent_mismatches: of the compared values, how many differ in the 8-bit exponent.
        mantissa_mean: mean |difference| of the 7-bit mantissas where exponents agree; 128
            where none do.
        mantissa_median: the median of the same (the lower one of two).
        values: how many values were compared.
    """

    exponent_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    values: int


@dataclass(frozen=True)
class _Chunk:
    """Values [first, first + count) tokens of sequence ``sequence``; k points."""

    sequence: int
    start: int
    stop: int
    points: int


def chunk_points(tokens: int, hidden: int, top_k: int = 128, chunk: int = 32) -> list[int]:
    """The number of points (and coefficients) of each proof of a T-token completion."""
    return [min(top_k, min(chunk, tokens - start) * hidden) for start in range(0, tokens, chunk)]


def proof_length(tokens: int, hidden: int, top_k: int = 128, chunk: int = 32) -> int:
    """The length in bytes of all proofs of a T-token completion together."""
    return sum(2 + 2 * points for points in chunk_points(tokens, hidden, top_k, chunk))


def check_format(proofs: bytes, tokens: int, hidden: int, top_k: int = 128, chunk: int = 32) -> None:
    """Refuse bytes that no honest prover could have sent; cheap, and before any arithmetic.

    Raises:
        ProofError: wrong total length, a modulus that the search could not have given,
            or a coefficient outside the field.
    """
    expected = proof_length(tokens, hidden, top_k, chunk)
    if len(proofs) != expected:
        raise ProofError(f"{tokens} tokens need {expected} bytes of proofs, not {len(proofs)}")
    words = np.frombuffer(proofs, dtype=">u2")
    at = 0
    for number, points in enumerate(chunk_points(tokens, hidden, top_k, chunk)):
        modulus = int(words[at])
        values = min(chunk, tokens - number * chunk) * hidden
        least = PRIME if values <= PRIME else LEAST_MODULUS + 1
        if not least <= modulus <= PRIME:
            raise ProofError(f"chunk {number}: modulus {modulus} is not in [{least}, {PRIME}]")
        largest = int(words[at + 1 : at + 1 + points].max())
        if largest >= PRIME:
            raise ProofError(f"chunk {number}: coefficient {largest} is not below {PRIME}")
        at += 1 + points


def build_proofs(states: Sequence[Tensor], top_k: int = 128, chunk: int = 32) -> list[bytes]:
    """Prove completions: per sequence, its chunks' proofs one after another.

    Args:
        states: per sequence the final hidden states [T, H] (the input of the output
            head) that produced its T tokens; any floating dtype, taken to bfloat16.
            All of one H.
        top_k: values per chunk, at most 1024.
        chunk: tokens per chunk.

    Raises:
        ValueError: states are not finite, so that no honest proof exists.
    """
    parts: list[dict[int, bytes]] = [{} for _ in states]
    for chunks, index, bits in _selected(states, top_k, chunk):
        if not bool((bits & 0x7F80 != 0x7F80).all()):
            raise ValueError("hidden states hold infinities or NaN: the model's output is broken")
        modulus = _moduli(index)
        coefficients = _interpolate(index % modulus.unsqueeze(1), bits)
        rows = torch.cat([modulus.unsqueeze(1), coefficients], dim=1).numpy().astype(">u2")
        for part, row in zip(chunks, rows, strict=True):
            parts[part.sequence][part.start] = row.tobytes()
    return [b"".join(part[start] for start in sorted(part)) for part in parts]


def score(
    proofs: Sequence[bytes], states: Sequence[Tensor], top_k: int = 128, chunk: int = 32, *, among: int = 1
) -> list[list[ChunkScore]]:
    """Compare proofs with the verifier's own states; one list of chunk scores per sequence.

    Arguments as ``build_proofs``; every element of ``proofs`` must have passed
    ``check_format`` for its sequence.

    Args:
        among: compare at most one in so many of a chunk's values, the largest ones, at least one. Where
            a proof holds most of its chunk's values (a token or two of a narrow model), the small ones
            are sums that cancelled, and what rounding does to them has no bound. 1, as the package
            does, compares all.
    """
    words = [np.frombuffer(proof, dtype=">u2").astype(np.int64) for proof in proofs]
    scores: list[dict[int, ChunkScore]] = [{} for _ in states]
    for chunks, index, bits in _selected(states, top_k, chunk):
        rows = []
        for part in chunks:
            stride = 1 + min(top_k, chunk * states[part.sequence].shape[1])
            first = part.start // chunk * stride
            rows.append(words[part.sequence][first : first + 1 + part.points])
        sent = torch.from_numpy(np.stack(rows))
        one = chunks[0]
        count = max(1, min(one.points, (one.stop - one.start) * states[one.sequence].shape[1] // among))
        if count < one.points:
            # Unique keys again: the largest magnitudes, of equal ones the lower index.
            best = (((bits & 0x7FFF) << 32) - index).topk(count, dim=1, sorted=False).indices
            index, bits = index.gather(1, best), bits.gather(1, best)
        claimed = _evaluate(sent[:, 1:], index % sent[:, :1])
        for part, value in zip(chunks, _compare(claimed, bits), strict=True):
            scores[part.sequence][part.start] = value
    return [[found[start] for start in sorted(found)] for found in scores]


# --- selection


def _selected(
    states: Sequence[Tensor], top_k: int, chunk: int
) -> Iterable[tuple[list[_Chunk], Tensor, Tensor]]:
    """Batches of equally long chunks, with indices and bit patterns (int64 [B, k], CPU)."""
    by_tokens: dict[tuple[int, int], list[_Chunk]] = defaultdict(list)
    for sequence, state in enumerate(states):
        tokens, hidden = state.shape
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            points = min(top_k, (stop - start) * hidden)
            by_tokens[stop - start, hidden].append(_Chunk(sequence, start, stop, points))
    for (tokens, hidden), chunks in by_tokens.items():
        size = max(1, min(_POLYNOMIALS, _VALUES // (tokens * hidden)))
        for first in range(0, len(chunks), size):
            batch = chunks[first : first + size]
            rows = [
                states[part.sequence][part.start : part.stop].to(torch.bfloat16).reshape(-1) for part in batch
            ]
            index, bits = _largest(torch.stack(rows), batch[0].points)
            yield batch, index, bits


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest magnitudes per row of bfloat16 [B, n]; the lower index wins a tie.

    Returns indices and unsigned bit patterns, int64 [B, count] on the CPU, in no order.
    """
    raw = values.detach().view(torch.int16)
    size = raw.shape[1]
    shift, wide = (16, torch.int32) if size <= 1 << 16 else (32, torch.int64)
    # Magnitude above, complemented index below: unique keys, so top-k has one answer.
    key = (raw & 0x7FFF).to(wide) << shift
    key += torch.arange(size - 1, -1, -1, dtype=wide, device=raw.device)
    best = key.topk(count, dim=1, sorted=False).values.to(torch.int64)
    index = (size - 1) - (best & ((1 << shift) - 1))
    bits = raw.gather(1, index).to(torch.int64) & 0xFFFF
    return index.cpu(), bits.cpu()


def _moduli(index: Tensor) -> Tensor:
    """Per row the largest modulus <= PRIME that keeps the indices distinct, int64 [B]."""
    modulus = torch.full((len(index),), PRIME, dtype=torch.int64)
    pending = torch.arange(len(index))
    while len(pending):
        residues = (index[pending] % modulus[pending].unsqueeze(1)).sort(dim=1).values
        clash = (residues[:, 1:] == residues[:, :-1]).any(dim=1)
        pending = pending[clash]
        modulus[pending] -= 1
        if bool((modulus <= LEAST_MODULUS).any()):
            raise ValueError(f"no modulus above {LEAST_MODULUS} separates the indices")
    return modulus


def _compare(claimed: Tensor, own: Tensor) -> list[ChunkScore]:
    """Scores of claimed against own bit patterns, both int64 [B, k]."""
    agree = (claimed >> 7 & 0xFF) == (own >> 7 & 0xFF)
    errors = ((claimed & 0x7F) - (own & 0x7F)).abs()
    count = agree.sum(dim=1)
    total = errors.masked_fill(~agree, 0).sum(dim=1)
    ordered = errors.masked_fill(~agree, 1 << 20).sort(dim=1).values
    median = ordered.gather(1, (count - 1).clamp(min=0).div(2, rounding_mode="floor").unsqueeze(1))
    points = own.shape[1]
    return [
        ChunkScore(points - n, sum_ / n if n else _NO_MATCH, float(middle) if n else _NO_MATCH, points)
        for n, sum_, middle in zip(count.tolist(), total.tolist(), median.squeeze(1).tolist(), strict=True)
    ]


# --- the field of PRIME elements, exactly, in float64


def _reduce(values: Tensor) -> Tensor:
    """Whole numbers in [0, 2^45), float64, modulo PRIME, in place."""
    return values.sub_((values / PRIME).floor_(), alpha=PRIME)


@lru_cache(maxsize=1)
def _inverses() -> Tensor:
    """Table of inverses (Fermat: a^(p - 2)), float64 [PRIME]; entry 0 is 0."""
    square = torch.arange(PRIME, dtype=torch.float64)
    result = torch.ones(PRIME, dtype=torch.float64)
    exponent = PRIME - 2
    while exponent:
        if exponent & 1:
            result = _reduce(result * square)
        square = _reduce(square * square)
        exponent >>= 1
    return result


def _powers(base: Tensor, count: int) -> Tensor:
    """base^0 ... base^(count - 1), float64 [..., count]."""
    out = torch.empty(*base.shape, count, dtype=torch.float64)
    out[..., 0] = 1.0
    have, step = 1, base  # step = base^have
    while have < count:
        more = min(have, count - have)
        out[..., have : have + more] = _reduce(out[..., :more] * step.unsqueeze(-1))
        step = _reduce(step * step)
        have += more
    return out


def _steps(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Baby and giant steps: x^0..x^(a-1) and x^0, x^a, x^2a, ... that make up ``count`` powers."""
    baby = math.isqrt(count - 1) + 1
    giant = -(-count // baby)
    low = _powers(x, baby + 1)
    return low[..., :baby].contiguous(), _powers(low[..., baby].contiguous(), giant)


def _horner(coefficients: Tensor, steps: tuple[Tensor, Tensor]) -> Tensor:
    """Values of polynomials (float64 [B, k], lowest first) at the points of ``steps``, [B, n]."""
    low, high = steps
    a, b = low.shape[-1], high.shape[-1]
    padded = torch.nn.functional.pad(coefficients, (0, a * b - coefficients.shape[-1]))
    inner = _reduce(low @ padded.view(-1, b, a).transpose(1, 2))
    return _reduce((inner * high).sum(dim=-1))


def _evaluate(coefficients: Tensor, x: Tensor) -> Tensor:
    """Polynomials int64 [B, k] at points int64 [B, n]: values int64 [B, n] in the field."""
    steps = _steps(x.to(torch.float64), coefficients.shape[1])
    return _horner(coefficients.to(torch.float64), steps).to(torch.int64)


def _product(roots: Tensor) -> Tensor:
    """prod (x - root): the coefficients below the leading 1, float64 [B, k], lowest first.

    A product tree. Two monic factors of degree d are multiplied by a cyclic
    transform of length 2d, where only the known leading 1 wraps around, onto 0.
    """
    count = roots.shape[1]
    size = 1 << (count - 1).bit_length()
    # Missing leaves have the root 0; the product is then x^(size - count) times ours.
    tree = _reduce(PRIME - torch.nn.functional.pad(roots, (size - count, 0))).unsqueeze(-1)
    while tree.shape[1] > 1:
        degree = tree.shape[-1]
        monic = torch.nn.functional.pad(tree, (0, degree))
        monic[..., degree] = 1.0
        spectrum = torch.fft.rfft(monic)
        both = torch.fft.irfft(spectrum[:, 0::2] * spectrum[:, 1::2], n=2 * degree).round_()
        both[..., 0] += PRIME - 1.0
        tree = _reduce(both)
    return tree[:, 0, size - count :]


def _interpolate(x: Tensor, y: Tensor) -> Tensor:
    """The polynomials of degree below k through k points; int64 [B, k] all, x distinct per row."""
    points, count = x.to(torch.float64), x.shape[1]
    steps = _steps(points, count)
    below = _product(points)
    # M without its constant term: coefficient j of `upper` is that of x^(j + 1) in M.
    upper = torch.nn.functional.pad(below[:, 1:], (0, 1), value=1.0)
    derivative = _reduce(upper * torch.arange(1, count + 1, dtype=torch.float64))
    slopes = _horner(derivative, steps)
    weights = _reduce(y * _inverses()[slopes.to(torch.int64)])
    # Power sums S_t = sum_i w_i x_i^t; then coefficient j is sum_t upper[j + t] S_t.
    low, high = steps
    sums = _reduce(low.transpose(1, 2) @ _reduce(high * weights.unsqueeze(-1)))
    sums = sums.transpose(1, 2).reshape(len(x), -1)[:, :count]
    length = 2 * count
    spectrum = torch.fft.rfft(upper, n=length) * torch.fft.rfft(sums, n=length).conj()
    found = torch.fft.irfft(spectrum, n=length)[:, :count].round_()
    return _reduce(found.contiguous()).to(torch.int64)

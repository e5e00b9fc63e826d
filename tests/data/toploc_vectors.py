"""How ``toploc_vectors.json`` was made, once, with the package ``toploc`` 0.1.6.

    python -m venv V && V/bin/pip install torch==2.13.0 numpy setuptools wheel ninja
    V/bin/pip install --no-build-isolation --no-binary toploc toploc==0.1.6
    V/bin/python tests/data/toploc_vectors.py > tests/data/toploc_vectors.json

``states`` and ``disturbed`` are the recipe of the inputs; the tests load them from
here. They need nothing but hashing, and so give the same states on every platform.
No magnitudes tie across the border of the k largest: there the package's choice
would not be a function of the input.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from torch import Tensor

SHAPES = ((32, 4), (3, 128), (8, 128), (37, 64), (70, 96), (64, 576), (40, 1024), (16, 8192), (32, 4096))
CHUNK, TOP_K = 32, 128


def _words(seed: int, count: int) -> Tensor:
    """``count`` 16-bit numbers of SHAKE-128, int32."""
    raw = hashlib.shake_128(seed.to_bytes(8, "big")).digest(2 * count)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 2).to(torch.int32) @ torch.tensor(
        [256, 1], dtype=torch.int32
    )


def _as_bfloat16(bits: Tensor) -> Tensor:
    signed = torch.where(bits >= 1 << 15, bits - (1 << 16), bits)
    return signed.to(torch.int16).view(torch.bfloat16)


def states(seed: int, tokens: int, hidden: int) -> Tensor:
    """bfloat16 [tokens, hidden]: any sign and mantissa, and in every chunk 128 clearly largest values."""
    words = _words(seed, tokens * hidden)
    ranks = _words(seed + (1 << 33), tokens * hidden)
    bits = torch.empty_like(words)
    for start in range(0, tokens * hidden, CHUNK * hidden):
        part = slice(start, start + CHUNK * hidden)
        exponents = (words[part] >> 7 & 0x0F) + 111  # 2^-16 to 2^-1
        top = ranks[part].sort(descending=True, stable=True).indices[:TOP_K]
        exponents[top] = (words[part][top] >> 7 & 0x03) + 130  # 2^3 to 2^6
        bits[part] = (words[part] & 0x807F) | (exponents << 7)
    return _as_bfloat16(bits).view(tokens, hidden)


def disturbed(original: Tensor, seed: int) -> Tensor:
    """The same states with magnitudes moved by -3 to 4 units in the last place."""
    bits = original.view(torch.int16).to(torch.int32).reshape(-1) & 0xFFFF
    moved = (bits & 0x7FFF) + (_words(seed + (1 << 32), bits.numel()) & 7) - 3
    return _as_bfloat16((bits & 0x8000) | moved).view(original.shape)


def main() -> None:
    """Write the vectors to standard output."""
    import toploc  # type: ignore[import-not-found]

    vectors = []
    for tokens, hidden in SHAPES:
        usual, others, seed = 0, 0, 0
        while usual < 2 or (others < 1 and min(tokens, CHUNK) * hidden > 65_497):
            seed += 1
            original = states(seed, tokens, hidden)
            rows = [row.unsqueeze(0).contiguous() for row in original]
            proofs = toploc.build_proofs_bytes(rows, CHUNK, TOP_K, skip_prefill=True)
            # The package verifies lists with a modulus of 65497 whatever the proof says:
            # scores of the proofs with another one would be wrong.
            scores: list[list[float]] | None = None
            if all(proof[:2] == bytes.fromhex("ffd9") for proof in proofs):
                usual += 1
                if usual > 2:
                    continue
                rows = [row.unsqueeze(0).contiguous() for row in disturbed(original, seed)]
                results = toploc.verify_proofs_bytes(rows, proofs, CHUNK, TOP_K, skip_prefill=True)
                scores = [[r.exp_mismatches, r.mant_err_mean, r.mant_err_median] for r in results]
            else:
                others += 1
            vectors.append(
                {
                    "seed": seed,
                    "tokens": tokens,
                    "hidden": hidden,
                    "proofs": b"".join(proofs).hex(),
                    "scores": scores,
                }
            )
    json.dump(vectors, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

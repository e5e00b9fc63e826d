"""Time per TOPLOC proof, built and verified, of our implementation and of the package ``toploc``.

    python benchmarks/toploc_speed.py [--threads N] [--repeat N]

Prints one line per shape: milliseconds per proof (best of the repeats, after a warm-up)
and the ratio. The package is compared if it can be imported; with torch 2.13 it must
be built from source, best into an environment of its own:

    python -m venv V && V/bin/pip install -c constraints.txt . wheel ninja
    V/bin/pip install --no-build-isolation --no-binary toploc toploc==0.1.6
    V/bin/python benchmarks/toploc_speed.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from barnraise.kernels.toploc import build_proofs, score

# (sequences, tokens each, width): many short chunks, a small model, SmolLM2, an 8B model, one proof alone.
SHAPES = ((128, 6, 128), (16, 128, 128), (16, 128, 576), (4, 64, 4096), (1, 32, 576))
CHUNK, TOP_K = 32, 128


def milliseconds(call: Callable[[], Any], repeat: int) -> float:
    """Best time of ``repeat`` calls after one that does not count."""
    call()
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1000


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        import toploc  # type: ignore[import-not-found]
    except ImportError:
        toploc = None
        print("the package toploc is not installed: ours alone")
    print(f"torch {torch.__version__}, {options.threads} thread(s), ms per proof, best of {options.repeat}")
    for sequences, tokens, hidden in SHAPES:
        generator = torch.Generator().manual_seed(0)
        states = [
            torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16) for _ in range(sequences)
        ]
        count = sequences * -(-tokens // CHUNK)
        proofs = build_proofs(states)
        build = milliseconds(lambda: build_proofs(states), options.repeat) / count  # noqa: B023
        verify = milliseconds(lambda: score(proofs, states), options.repeat) / count  # noqa: B023
        line = f"{sequences:4} x {tokens:4} x {hidden:5}: build {build:7.3f}  verify {verify:7.3f}"
        if toploc is not None:
            rows = [[row.unsqueeze(0).contiguous() for row in state] for state in states]

            def their_build() -> list[Any]:
                return [toploc.build_proofs_bytes(part, CHUNK, TOP_K, skip_prefill=True) for part in rows]  # noqa: B023

            def their_verify() -> None:
                for part, built in zip(rows, theirs, strict=True):  # noqa: B023
                    toploc.verify_proofs_bytes(part, built, CHUNK, TOP_K, skip_prefill=True)

            theirs = their_build()
            other_build = milliseconds(their_build, options.repeat) / count
            other_verify = milliseconds(their_verify, options.repeat) / count
            line += (
                f"   package {other_build:7.3f} {other_verify:7.3f}"
                f"   ratio {build / other_build:5.2f} {verify / other_verify:5.2f}"
            )
        print(line)


if __name__ == "__main__":
    main()

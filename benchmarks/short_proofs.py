"""Proofs of few tokens: how far an honest bfloat16 engine's are from a float32 verifier's states.

    python -m benchmarks.short_proofs [--json] [--models demo qwen3 ...] [--rows 2000] [--tokens 10]
        [--width 192] [--save FILE]

The last chunk of a completion may be a single token, and of a narrow model that is few values. Engines
generate in bfloat16, what they computed is cut into pieces of 1, 2, 3, ... tokens (up to 8,000 of each),
each is proven and compared. Printed per length: values compared, the largest mismatches and mantissa mean
and what a submission of 64 proofs may have; ``chance``: of one honest proof over that limit, the larger of
the two estimates in ``benchmarks.tails``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from barnraise.coordinator import toploc_checks
from barnraise.coordinator.checks import default_verify_spec
from barnraise.kernels.generate import generate
from barnraise.kernels.prefill import prefill
from barnraise.kernels.toploc import ChunkScore, build_proofs, score
from barnraise.protocol.spec import SamplingSpec
from benchmarks import proof_models
from benchmarks.calibrate_toploc import MODELS, STEPS, prompts_of
from benchmarks.tails import chance_count, chance_exponential, chance_mean, histogram

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
PIECES = 8_000
PROOFS = 64  # of a submission
VERIFY = default_verify_spec()
BATCH = {"smollm2": 8}


def states(name: str, rows: int, tokens: int, scratch: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Of the bfloat16 engine that draws and of the float32 verifier, per completion [T, H]."""
    folder = proof_models.model_folder(name, scratch)
    prompts = prompts_of(name, rows)
    batch = BATCH.get(name, 256)
    sampling = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens)
    eos = 1 if name == "demo" else -1
    engine = proof_models.load(folder, "bfloat16")
    done = generate(engine, prompts, list(range(rows)), sampling, eos, max_batch=batch)
    verifier = proof_models.load(folder, "float32")
    own: list[Tensor] = []
    for start in range(0, rows, batch):
        part = slice(start, start + batch)
        own += prefill(verifier, prompts[part], [completion.tokens for completion in done[part]])
    return [completion.states for completion in done], own


def pieces(sequences: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The first ``PIECES`` pieces of ``tokens`` tokens."""
    found = [
        one[start : start + tokens] for one in sequences for start in range(0, len(one) - tokens + 1, tokens)
    ]
    return found[:PIECES]


def row(scores: Sequence[ChunkScore], tokens: int) -> dict[str, Any]:
    """Of one length."""
    values = scores[0].values
    false_alarm = toploc_checks.SHARE * VERIFY.false_alarm / PROOFS
    most = toploc_checks.mismatch_limit(values, VERIFY, false_alarm)
    mean = toploc_checks.mantissa_limit(values, VERIFY, false_alarm)
    counts = histogram([float(one.exponent_mismatches) for one in scores], 1.0)
    means = histogram([one.mantissa_mean for one in scores], STEPS["mantissa_mean"])
    chances = [
        chance_count(counts, int(most)),
        chance_exponential(counts, most, 1.0),
        chance_mean(means, mean),
        chance_exponential(means, mean, STEPS["mantissa_mean"]),
    ]
    return {
        "tokens": tokens,
        "proofs": len(scores),
        "values": values,
        "exponents_mean": round(sum(one.exponent_mismatches for one in scores) / len(scores), 3),
        "exponents_max": max(counts),
        "exponents_limit": most,
        "mantissa_mean": round(sum(one.mantissa_mean for one in scores) / len(scores), 3),
        "mantissa_max": round(max(one.mantissa_mean for one in scores), 3),
        "mantissa_limit": round(mean, 2),
        "median_max": max(one.mantissa_median for one in scores),
        "exponents_chance": max((c for c in chances[:2] if c is not None), default=None),
        "mantissa_chance": max((c for c in chances[2:] if c is not None), default=None),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["demo"])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--width", type=int, default=proof_models.WIDTH, help="of a random model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, help="add to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    proof_models.WIDTH = options.width
    result: dict[str, Any] = {}
    if options.save is not None and options.save.exists():
        result = json.loads(options.save.read_text())
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="barnraise-short-") as scratch:
            engine, verifier = states(name, options.rows, options.tokens, Path(scratch))
        table = result[f"{name}, width {engine[0].shape[1]}"] = []
        for tokens in LENGTHS:
            cut = pieces(engine, tokens)
            if len(cut) < 10:
                break
            found = score(build_proofs(cut), pieces(verifier, tokens), among=toploc_checks.AMONG)
            table.append(row([one for part in found for one in part], tokens))
            print(name, table[-1], file=sys.stderr, flush=True)
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

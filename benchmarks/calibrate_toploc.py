"""How far honest proofs are from honest states, and dishonest ones: what the thresholds rest on.

    python -m benchmarks.calibrate_toploc [--json] [--models demo smollm2 llama qwen3 gemma3]
        [--parts honest dishonest] [--rows 12] [--tokens 64] [--save FILE]

Engines really generate (key-value cache, left padding, batches, chunked prefill, eager and fused
attention, one and two threads, float32 and bfloat16), prove what they computed, and verifiers that
compute in another way compare. Of every pair of an engine and a verifier, per proof of 32 tokens:
exponent mismatches of 128, mean and (lower) median mantissa difference. ``chance`` is that of one
honest proof over the default threshold, by a distribution of the pair's mean and variance: negative
binomial for counts, gamma for means. SmolLM2 takes a shorter list of ways: it is slow here.

Dishonest engines prove what other weights computed for the same tokens; ``found`` is the share of
single proofs, and of submissions of 8 proofs, over the default thresholds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from barnraise.coordinator import toploc_checks
from barnraise.coordinator.checks import CheckFailure, default_verify_spec
from barnraise.kernels.generate import generate
from barnraise.kernels.models import Policy
from barnraise.kernels.prefill import prefill
from barnraise.kernels.toploc import ChunkScore, build_proofs, chunk_points, score
from barnraise.protocol.spec import SamplingSpec
from benchmarks.proof_models import DISHONEST, VOCABULARY, chunked_states, load, model_folder

VERIFY = default_verify_spec()
MODELS = ("demo", "smollm2", "llama", "qwen3", "gemma3")
STATISTICS = ("exponent_mismatches", "mantissa_mean", "mantissa_median")
SUBMISSION_PROOFS = 8
Row = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Way:
    """One way to compute. ``chunk`` 0 is whole prefill; ``batch`` rows at a time."""

    dtype: str = "float32"
    batch: int = 256
    attention: str = "sdpa"
    threads: int = 1
    chunk: int = 0

    @property
    def name(self) -> str:
        parts = [self.dtype, "one by one" if self.batch == 1 else f"batch {self.batch}"]
        parts += ["eager"] if self.attention != "sdpa" else []
        parts += [f"{self.threads} threads"] if self.threads > 1 else []
        parts += [f"prefill in pieces of {self.chunk}"] if self.chunk else []
        return ", ".join(parts)


ENGINES = (
    Way(),
    Way(batch=1),
    Way(batch=5),
    Way(threads=2),
    Way(attention="eager"),
    Way(chunk=7),
    Way(chunk=64),
    Way("bfloat16"),
    Way("bfloat16", batch=1),
    Way("bfloat16", batch=5),
    Way("bfloat16", threads=2),
    Way("bfloat16", attention="eager"),
    Way("bfloat16", chunk=7),
    Way("bfloat16", chunk=64),
)
VERIFIERS = (
    Way(),
    Way(batch=1, threads=2),
    Way(attention="eager"),
    Way("bfloat16"),
    Way("bfloat16", batch=1, threads=2),
    Way("bfloat16", attention="eager"),
)
FEW_ENGINES = tuple(
    Way(dtype, **change)  # type: ignore[arg-type]
    for dtype in ("float32", "bfloat16")
    for change in ({}, {"batch": 3}, {"attention": "eager"}, {"chunk": 24})
)
FEW_VERIFIERS = (Way(), Way("bfloat16"))


@dataclass(frozen=True)
class Work:
    """What an engine computed: rows, and the states [T, H] behind their completions."""

    rows: list[Row]
    states: list[Tensor]


class Model:
    """A model's folder, its prompts, and its policies by dtype and attention, loaded when needed."""

    def __init__(self, name: str, scratch: Path, rows: int, tokens: int) -> None:
        self.name = name
        self.folder = model_folder(name, scratch)
        self.tokens = 8 if name == "demo" else tokens
        self.prompts = _prompts(name, rows * (4 if name == "demo" else 1))
        self._policies: dict[tuple[str, str], Policy] = {}

    def policy(self, way: Way) -> Policy:
        torch.set_num_threads(way.threads)
        key = (way.dtype, way.attention)
        if key not in self._policies:
            self._policies[key] = load(self.folder, *key)
        return self._policies[key]

    def engine(self, way: Way, rows: list[Row]) -> Work:
        """Generate; or, with chunks, compute the states of ``rows`` piece by piece."""
        policy = self.policy(way)
        if way.chunk:
            states = [
                chunked_states(policy, prompt + done[:-1], len(prompt) - 1, way.chunk)
                for prompt, done in rows
            ]
            return Work(rows, states)
        sampling = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=self.tokens)
        eos = 1 if self.name == "demo" else -1  # others go on: a proof wants 32 tokens
        seeds = list(range(len(self.prompts)))
        done = generate(policy, self.prompts, seeds, sampling, eos, max_batch=way.batch)
        return Work(
            [(prompt, completion.tokens) for prompt, completion in zip(self.prompts, done, strict=True)],
            [completion.states for completion in done],
        )

    def verifier(self, way: Way, rows: list[Row]) -> list[Tensor]:
        prompts, done = [row[0] for row in rows], [row[1] for row in rows]
        if way.batch == 1:
            return [prefill(self.policy(way), [p], [c])[0] for p, c in zip(prompts, done, strict=True)]
        return prefill(self.policy(way), prompts, done)


def _prompts(name: str, rows: int) -> list[list[int]]:
    """Real prompts of the preset's tasks, of different lengths; random tokens for a random model."""
    if name in ("demo", "smollm2"):
        from barnraise.coordinator import presets
        from barnraise.kernels.tokens import Codec
        from barnraise.protocol.environments import build_environment

        settings = presets.demo() if name == "demo" else presets.smollm2()
        with tempfile.TemporaryDirectory() as scratch:
            codec = Codec(model_folder(name, Path(scratch)), settings.environment)
        environment = build_environment(settings.environment)
        tasks = [environment.task(seed, held_out=False) for seed in range(rows)]
        padding = "Think about it as long as you like, and explain every step. " if name == "smollm2" else ""
        return [codec.encode_prompt(padding * (i % 4) + task.prompt) for i, task in enumerate(tasks)]
    rng = Random(1)
    return [[rng.randrange(1, VOCABULARY) for _ in range(rng.choice((5, 40, 100)))] for _ in range(rows)]


# --- scores


def compare(proofs: Sequence[bytes], states: Sequence[Tensor]) -> list[ChunkScore]:
    """All chunks' scores."""
    return [chunk for row in score(proofs, states) for chunk in row]


def over(scores: Sequence[ChunkScore], points: Sequence[int]) -> list[bool]:
    """Which proofs the default thresholds refuse."""
    found = []
    for one, count in zip(scores, points, strict=True):
        try:
            toploc_checks.check_toploc([one], [count], 0, VERIFY)
            found.append(False)
        except CheckFailure:
            found.append(True)
    return found


def chance_count(values: Sequence[float], threshold: int) -> float:
    """P(count > threshold), negative binomial of the values' mean and variance (Poisson if not wider)."""
    mean, variance = _moments(values)
    if mean == 0:
        return 0.0
    below = 0.0
    for count in range(threshold + 1):
        if variance <= mean * 1.001:
            log = count * math.log(mean) - mean - math.lgamma(count + 1)
        else:
            size, share = mean * mean / (variance - mean), mean / variance
            log = math.lgamma(count + size) - math.lgamma(size) - math.lgamma(count + 1)
            log += size * math.log(share) + count * math.log1p(-share)
        below += math.exp(log)
    return max(0.0, 1.0 - below)


def chance_mean(values: Sequence[float], threshold: float) -> float:
    """P(value > threshold), gamma distribution of the values' mean and variance."""
    mean, variance = _moments(values)
    if variance == 0:
        return float(mean > threshold)
    shape, scale = mean * mean / variance, variance / mean
    kind = torch.float64
    return float(
        torch.special.gammaincc(torch.tensor(shape, dtype=kind), torch.tensor(threshold / scale, dtype=kind))
    )


def _moments(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)


def summary(scores: Sequence[ChunkScore]) -> dict[str, Any]:
    """Largest and mean of the three statistics, and the chances to exceed two of the thresholds."""
    result: dict[str, Any] = {"proofs": len(scores)}
    for name in STATISTICS:
        values = [float(getattr(one, name)) for one in scores]
        result[name] = {"max": round(max(values), 3), "mean": round(sum(values) / len(values), 3)}
    counts, means = result["exponent_mismatches"], result["mantissa_mean"]
    counts["chance"] = chance_count([s.exponent_mismatches for s in scores], VERIFY.max_exponent_mismatches)
    means["chance"] = chance_mean([s.mantissa_mean for s in scores], VERIFY.max_mantissa_mean)
    return result


def honest(model: Model, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every engine against every verifier."""
    engines, verifiers = (FEW_ENGINES, FEW_VERIFIERS) if model.name == "smollm2" else (ENGINES, VERIFIERS)
    base = model.engine(engines[0], [])
    table = []
    for way in engines:
        work = model.engine(way, base.rows)
        proofs = build_proofs(work.states)
        points = [p for state in work.states for p in chunk_points(len(state), state.shape[1])]
        for other in verifiers:
            scores = compare(proofs, model.verifier(other, work.rows))
            refused = sum(over(scores, points))
            table.append({"engine": way.name, "verifier": other.name, **summary(scores), "refused": refused})
        worst = max(row["exponent_mismatches"]["max"] for row in table[-len(verifiers) :])
        say(f"{model.name}: engine {way.name}: at most {worst} mismatches")
    return table


def dishonest(model: Model, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Proofs of other weights for the same tokens, against float32 and bfloat16 verifiers."""
    base = model.engine(ENGINES[0], [])
    verifiers = {dtype: model.verifier(Way(dtype), base.rows) for dtype in ("float32", "bfloat16")}
    cheats: dict[str, list[Tensor]] = {}
    for name, change in DISHONEST.items():
        policy = load(model.folder, "float32")
        policy.rows = base.rows  # type: ignore[attr-defined]
        change(policy)
        cheats[name] = prefill(policy, [row[0] for row in base.rows], [row[1] for row in base.rows])
    edited = [[*prompt[:-1], (prompt[-1] + 1) % 40] for prompt, _ in base.rows]
    cheats["one prompt token changed"] = prefill(
        model.policy(ENGINES[0]), edited, [row[1] for row in base.rows]
    )
    table = []
    for name, states in cheats.items():
        proofs = build_proofs(states)
        points = [p for state in states for p in chunk_points(len(state), state.shape[1])]
        for dtype, own in verifiers.items():
            scores = compare(proofs, own)
            share = sum(over(scores, points)) / len(scores)
            table.append(
                {
                    "cheat": name,
                    "verifier": dtype,
                    **summary(scores),
                    "found": round(share, 4),
                    "found_in_8_proofs": round(1 - (1 - share) ** SUBMISSION_PROOFS, 4),
                }
            )
        say(f"{model.name}: {name}: {share:.2f} of single proofs refused")
    return table


# --- output


def print_tables(result: dict[str, Any]) -> None:
    """Markdown, as in docs/verification.md."""
    print("| model | engine -> verifier | proofs | exponents max (chance) | mean max (chance) | median max |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, model in result["models"].items():
        for pair in ("float32 -> float32", "bfloat16 -> bfloat16", "mixed"):
            rows = [row for row in model.get("honest", []) if _pair(row) == pair]
            if not rows:
                continue
            counts, means, medians = ([row[key] for row in rows] for key in STATISTICS)
            cells = [
                f"{max(item['max'] for item in part):g} ({max(item['chance'] for item in part):.0e})"
                for part in (counts, means)
            ]
            median = max(item["max"] for item in medians)
            total = sum(row["proofs"] for row in rows)
            print(f"| {name} | {pair} | {total} | {' | '.join(cells)} | {median:g} |")
    print()
    print("| model | cheat | exponents mean | mean | median | proofs found | of 8 proofs |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, model in result["models"].items():
        for row in model.get("dishonest", []):
            if row["verifier"] == "float32":
                cells = [f"{row[s]['mean']:.1f}" for s in STATISTICS]
                print(
                    f"| {name} | {row['cheat']} | {' | '.join(cells)} | "
                    f"{row['found']:.0%} | {row['found_in_8_proofs']:.0%} |"
                )


def _pair(row: dict[str, Any]) -> str:
    dtypes = {row["engine"].split(",")[0], row["verifier"].split(",")[0]}
    return "mixed" if len(dtypes) == 2 else f"{(d := dtypes.pop())} -> {d}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--parts", nargs="+", choices=("honest", "dishonest"), default=["honest", "dishonest"]
    )
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--save", type=Path, help="write the JSON here; models already in it are kept")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    models: dict[str, Any] = {}
    if options.save is not None and options.save.exists():
        models = json.loads(options.save.read_text())["models"]
    with tempfile.TemporaryDirectory(prefix="barnraise-calibrate-") as scratch:
        for name in options.models:
            began = time.monotonic()
            model = Model(name, Path(scratch), options.rows, options.tokens)
            found = models.setdefault(name, {})
            if "honest" in options.parts:
                found["honest"] = honest(model, say)
            if "dishonest" in options.parts:
                found["dishonest"] = dishonest(model, say)
            found.update(tokens=model.tokens, seconds=round(time.monotonic() - began, 1))
    result = {
        "conditions": {
            "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "thresholds": {
            key: value for key, value in _thresholds().items() if key.startswith(("max_", "toploc_"))
        },
        "models": models,
    }
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        print_tables(result)


def _thresholds() -> dict[str, Any]:
    import msgspec

    return dict(msgspec.structs.asdict(VERIFY))


if __name__ == "__main__":
    main()

"""How far honest proofs are from honest states, and dishonest ones: what the thresholds rest on.

    python -m benchmarks.calibrate_toploc [--json] [--models demo smollm2 llama qwen3 gemma3]
        [--parts honest dishonest] [--rows 12] [--tokens 64] [--save FILE]

Engines really generate (key-value cache, left padding, batches, chunked prefill, eager and fused
attention, one and two threads, float32 and bfloat16), prove what they computed, and verifiers that
compute in another way compare. Of every pair of an engine and a verifier, per proof of 32 tokens:
exponent mismatches of 128, mean and (lower) median mantissa difference. ``chances`` are those of one
honest proof over the default threshold, see ``benchmarks.tails``, from all pairs of a kind together.
SmolLM2 takes a shorter list of ways: it is slow here. ``--save`` is written after every engine and cheat,
and what FILE has already is not done again: a run that was cut short goes on with the same command.

Dishonest engines prove what other weights computed for the same tokens; ``found`` is the share of
single proofs, and of submissions of 8 proofs, over the default thresholds.
"""

from __future__ import annotations

import argparse
import json
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
from barnraise.kernels.toploc import ChunkScore, build_proofs, score
from barnraise.protocol.spec import SamplingSpec
from benchmarks.proof_models import DISHONEST, VOCABULARY, chunked_states, load, model_folder
from benchmarks.tails import chance_count, chance_exponential, chance_mean, histogram, merged

VERIFY = default_verify_spec()
MODELS = ("demo", "smollm2", "llama", "qwen3", "gemma3")
STATISTICS = ("exponent_mismatches", "mantissa_mean", "mantissa_median")
STEPS = {"exponent_mismatches": 1.0, "mantissa_mean": 0.05}  # of the histograms that are kept
PROMPT_CHANGED = "one prompt token changed"
SUBMISSION_PROOFS, USUAL_PROOFS = 8, 64
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
        self.prompts = prompts_of(name, rows * (4 if name == "demo" else 1))
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


def prompts_of(name: str, rows: int) -> list[list[int]]:
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
    return [chunk for row in score(proofs, states, among=toploc_checks.AMONG) for chunk in row]


def over(scores: Sequence[ChunkScore]) -> list[bool]:
    """Which proofs the default thresholds refuse, as one of ``USUAL_PROOFS`` in a submission."""
    found = []
    for one in scores:
        try:
            toploc_checks.check_toploc([one], 0, USUAL_PROOFS, VERIFY)
            found.append(False)
        except CheckFailure:
            found.append(True)
    return found


def submissions(scores: Sequence[ChunkScore]) -> float:
    """The share of submissions of ``SUBMISSION_PROOFS`` of these proofs that are refused; overlapping."""
    refused = over(scores)
    size = SUBMISSION_PROOFS
    parts = [slice(start, start + size) for start in range(max(1, len(scores) - size + 1))]
    return sum(any(refused[part]) or _sums_refused(scores[part]) for part in parts) / len(parts)


def _sums_refused(scores: Sequence[ChunkScore]) -> bool:
    try:
        toploc_checks.check_toploc_sums([scores], VERIFY)
    except CheckFailure:
        return True
    return False


def summary(scores: Sequence[ChunkScore]) -> dict[str, Any]:
    """Largest and mean of the three statistics."""
    result: dict[str, Any] = {"proofs": len(scores)}
    for name in STATISTICS:
        values = [float(getattr(one, name)) for one in scores]
        result[name] = {"max": round(max(values), 3), "mean": round(sum(values) / len(values), 3)}
    return result


def pool(found: dict[str, Any], pair: str, scores: Sequence[ChunkScore]) -> None:
    """Add the scores to the histograms of all pairs of this kind (JSON's keys are text)."""
    pooled = found.setdefault("histograms", {}).setdefault(pair, {})
    for name, step in STEPS.items():
        more = histogram([float(getattr(one, name)) for one in scores], step)
        old = {float(value): count for value, count in pooled.get(name, {}).items()}
        pooled[name] = {f"{value:g}": count for value, count in merged(old, more).items()}


def chances(pooled: dict[str, dict[str, int]]) -> dict[str, dict[str, float | None]]:
    """Of one honest proof over its limit, by both estimates of ``benchmarks.tails``."""
    counts, means = ({float(v): n for v, n in pooled[name].items()} for name in STEPS)
    false_alarm = toploc_checks.SHARE * VERIFY.false_alarm / USUAL_PROOFS
    most = toploc_checks.mismatch_limit(VERIFY.toploc_top_k, VERIFY, false_alarm)
    mean = toploc_checks.mantissa_limit(VERIFY.toploc_top_k, VERIFY, false_alarm)
    return {
        "exponent_mismatches": {
            "limit": most,
            "distribution": chance_count(counts, int(most)),
            "exponential": chance_exponential(counts, most, STEPS["exponent_mismatches"]),
        },
        "mantissa_mean": {
            "limit": mean,
            "distribution": chance_mean(means, mean),
            "exponential": chance_exponential(means, mean, STEPS["mantissa_mean"]),
        },
    }


def honest(model: Model, found: dict[str, Any], say: Callable[[str], None], save: Callable[[], None]) -> None:
    """Every engine against every verifier; engines that ``found`` has already are left out."""
    engines, verifiers = (FEW_ENGINES, FEW_VERIFIERS) if model.name == "smollm2" else (ENGINES, VERIFIERS)
    table = found.setdefault("honest", [])
    done = {row["engine"] for row in table}
    wanted = [way for way in engines if way.name not in done]
    base = model.engine(engines[0], []) if wanted else None
    for way in wanted:
        assert base is not None
        work = base if way == engines[0] else model.engine(way, base.rows)
        proofs = build_proofs(work.states)
        rows = []
        for other in verifiers:
            scores = compare(proofs, model.verifier(other, work.rows))
            row = {"engine": way.name, "verifier": other.name, **summary(scores)}
            rows.append({**row, "refused": sum(over(scores))})
            pool(found, _pair(row), scores)
        table += rows
        found["chances"] = {pair: chances(pooled) for pair, pooled in found["histograms"].items()}
        save()
        worst = max(row["exponent_mismatches"]["max"] for row in rows)
        say(f"{model.name}: engine {way.name}: at most {worst} mismatches")


def dishonest(
    model: Model, found: dict[str, Any], say: Callable[[str], None], save: Callable[[], None]
) -> None:
    """Proofs of other weights for the same tokens, against float32 and bfloat16 verifiers."""
    table = found.setdefault("dishonest", [])
    done = {row["cheat"] for row in table}
    wanted = [name for name in (*DISHONEST, PROMPT_CHANGED) if name not in done]
    if not wanted:
        return
    base = model.engine(ENGINES[0], [])
    completions = [row[1] for row in base.rows]
    verifiers = {dtype: model.verifier(Way(dtype), base.rows) for dtype in ("float32", "bfloat16")}
    for name in wanted:
        prompts = [row[0] for row in base.rows]
        if name == PROMPT_CHANGED:
            policy = model.policy(ENGINES[0])
            prompts = [[*prompt[:-1], (prompt[-1] + 1) % 40] for prompt in prompts]
        else:
            policy = load(model.folder, "float32")
            policy.rows = base.rows  # type: ignore[attr-defined]
            DISHONEST[name](policy)
        states = prefill(policy, prompts, completions)
        proofs = build_proofs(states)
        for dtype, own in verifiers.items():
            scores = compare(proofs, own)
            share = sum(over(scores)) / len(scores)
            row = {"cheat": name, "verifier": dtype, **summary(scores), "found": round(share, 4)}
            table.append({**row, "found_in_8_proofs": round(submissions(scores), 4)})
        save()
        say(f"{model.name}: {name}: {share:.2f} of single proofs refused")


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
            most = [max(row[name]["max"] for row in rows) for name in STATISTICS]
            told = model["chances"][pair]
            cells = [
                f"{value:g} ({_told(told[name])})" if name in told else f"{value:g}"
                for name, value in zip(STATISTICS, most, strict=True)
            ]
            total = sum(row["proofs"] for row in rows)
            print(f"| {name} | {pair} | {total} | {' | '.join(cells)} |")
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


def _told(chance: dict[str, float | None]) -> str:
    """The larger estimate."""
    known = [value for key, value in chance.items() if key != "limit" and value is not None]
    return f"{max(known):.0e}" if known else "-"


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

    result: dict[str, Any] = {
        "conditions": {
            "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "thresholds": {
            key: value for key, value in _thresholds().items() if key.startswith(("max_", "toploc_"))
        },
        "models": {},
    }
    if options.save is not None and options.save.exists():
        result["models"] = json.loads(options.save.read_text())["models"]

    def save() -> None:
        if options.save is not None:
            temporary = options.save.with_suffix(".new")
            temporary.write_text(json.dumps(result, indent=1) + "\n")
            temporary.replace(options.save)

    with tempfile.TemporaryDirectory(prefix="barnraise-calibrate-") as scratch:
        for name in options.models:
            began = time.monotonic()
            model = Model(name, Path(scratch), options.rows, options.tokens)
            found = result["models"].setdefault(name, {"seconds": 0.0})
            found.update(tokens=model.tokens, rows=len(model.prompts))
            if "honest" in options.parts:
                honest(model, found, say, save)
            if "dishonest" in options.parts:
                dishonest(model, found, say, save)
            found["seconds"] = round(found["seconds"] + time.monotonic() - began, 1)
            save()
    if options.json:
        print(json.dumps(result))
    else:
        print_tables(result)


def _thresholds() -> dict[str, Any]:
    import msgspec

    return dict(msgspec.structs.asdict(VERIFY))


if __name__ == "__main__":
    main()

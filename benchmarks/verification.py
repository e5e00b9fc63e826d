"""What proofs cost, what verifying costs, how often honest work is refused and cheats are caught.

    python -m benchmarks.verification [--json] [--save FILE]
        [--parts speed honest-demo honest-smollm2 attacks attacks-smollm2] [--tries 3]

Everything runs for real: submissions are made by the torch engine (``node.torch_engine``), judged by the
whole ``Judge`` with the default thresholds, and attacks (``tests/attacks``) go through the coordinator's
own state and submission checks besides. One thread; times are processor time, so that a busy machine
does not change their ratios. ``--save`` keeps the parts that are in FILE already; attacks are saved one by
one, and those that FILE has are not performed again: a run that was cut short goes on with the same command.

``proof_overhead``: making proofs, as a fraction of the time to generate what is proven. ``verify_speedup``:
processor time to generate a token, at decode batch 1 or 16, over that to judge one (SmolLM2-135M, 16
completions in one submission, 4 per prompt, up to 48 tokens).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from barnraise.coordinator import presets
from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.folder import Settings
from barnraise.coordinator.verifier import Judge
from barnraise.coordinator.workers import VerifyJob, WorkerSetup, checkpoint_folder
from barnraise.kernels.toploc import build_proofs, chunk_points
from barnraise.node import torch_engine
from barnraise.node.engine import Work
from barnraise.node.torch_engine import Generator
from barnraise.protocol.messages import RolloutLease, RolloutSubmission
from barnraise.protocol.spec import Dtype, RunSpec
from barnraise.protocol.wire import encode
from benchmarks.proof_models import benchmark_run, model_folder

PARTS = ("speed", "honest-demo", "honest-smollm2", "attacks", "attacks-smollm2")
NODE = bytes([9]) * 32
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
# Of the attacks on the demo model, those whose outcome depends on the model, tried on SmolLM2 too.
ON_SMOLLM2 = (
    "bfloat16-engine",
    "int8-weights",
    "int4-weights",
    "smaller-model",
    "fine-tuned-copy",
    "previous-version",
    "other-temperature",
    "own-noise",
    "wrong-prompt-proven",
)
Say = Callable[[str], None]


class Bench:
    """A run folder, engines for it by dtype, judges by dtype."""

    def __init__(self, model: str, settings: Settings, scratch: Path) -> None:
        scratch.mkdir(parents=True)
        source = model_folder(model, scratch)
        run = benchmark_run(source, model, settings, scratch)
        self.folder, self.spec, self.run_id = run.path, run.spec, run.run_id
        self._engines: dict[str, Generator] = {}
        self._judges: dict[str, Judge] = {}
        self._leases = 0

    def spec_in(self, dtype: Dtype) -> RunSpec:
        model = msgspec.structs.replace(self.spec.model, compute_dtype=dtype)
        return msgspec.structs.replace(self.spec, model=model)

    def engine(self, dtype: Dtype) -> Generator:
        if dtype not in self._engines:
            engine = Generator("cpu")
            engine.load(self.spec_in(dtype), checkpoint_folder(self.folder, 0), 0)
            self._engines[dtype] = engine
        return self._engines[dtype]

    def judge(self, dtype: Dtype) -> Judge:
        if dtype not in self._judges:
            setup = WorkerSetup(
                spec=self.spec_in(dtype), run_id=self.run_id, folder=str(self.folder), threads=1
            )
            self._judges[dtype] = Judge(setup)
        return self._judges[dtype]

    def job(
        self, dtype: Dtype, shrink: int, prompts: int = 0, group: int = 0
    ) -> tuple[VerifyJob, RolloutSubmission, float]:
        """A fresh lease answered by the engine, and the processor time that this took, seconds."""
        self._leases += 1
        rollout = self.spec.rollout
        lease = RolloutLease(
            run_id=self.run_id,
            lease_id=self._leases.to_bytes(16, "big"),
            unit_id=self._leases,
            node=NODE,
            policy_version=0,
            prompts=prompts or rollout.prompts_per_unit,
            group_size=group or rollout.group_size,
            issued_at=0,
            timeout_at=1,
            deadline_at=2,
        )
        work = Work(
            run_id=lease.run_id,
            lease_id=lease.lease_id,
            node=NODE,
            policy_version=0,
            prompts=lease.prompts,
            group_size=lease.group_size,
            shrink=shrink,
        )
        engine = self.engine(dtype)
        began = time.process_time()
        done = engine.generate(work, lambda progress: None, lambda: False)
        seconds = time.process_time() - began
        submission = RolloutSubmission(
            run_id=lease.run_id,
            lease_id=lease.lease_id,
            policy_version=0,
            engine="torch",
            generate_ms=1,
            rollouts=done.rollouts,
        )
        return (
            VerifyJob(submission_id=lease.lease_id * 2, lease=lease, payload=encode(submission)),
            submission,
            seconds,
        )


def wordy(settings: Settings, prompts: int, group: int, tokens: int) -> Settings:
    """The same run with units of another shape and answers that go on."""
    return replace(
        settings,
        environment=msgspec.structs.replace(
            settings.environment, system_prompt="Explain every step at length before you answer."
        ),
        sampling=msgspec.structs.replace(settings.sampling, max_new_tokens=tokens),
        rollout=msgspec.structs.replace(settings.rollout, prompts_per_unit=prompts, group_size=group),
    )


# --- speed


def speed(scratch: Path, say: Say) -> dict[str, Any]:
    """Overhead of proofs, speed of verifying against generating; float32."""
    result: dict[str, Any] = {}
    for name in ("demo", "smollm2"):
        settings = presets.demo() if name == "demo" else wordy(presets.smollm2(), 4, 4, 48)
        bench = Bench(name, settings, scratch / f"speed-{name}")
        result[name] = one_speed(bench, say, name)
    small = result["smollm2"]
    return {
        "speed": result,
        "proof_overhead": small["proof_overhead"],
        "verify_speedup_b1": small["verify_speedup_b1"],
        "verify_speedup_b16": small["verify_speedup_b16"],
        "bytes_per_32_tokens": small["bytes_per_32_tokens"],
    }


def one_speed(bench: Bench, say: Say, name: str) -> dict[str, Any]:
    """Of one model. The unit's completions are drawn side by side, and some of them one by one."""
    build_proofs([torch.randn(64, 64)])  # makes its tables
    with timed_proofs() as times:
        job, submission, together = bench.job("float32", 0)
    proofs = times[0]
    tokens = sum(len(rollout.tokens) // 4 for rollout in submission.rollouts)
    _, alone, one_by_one = bench.job("float32", 16, prompts=1, group=2)
    alone_tokens = sum(len(rollout.tokens) // 4 for rollout in alone.rollouts)
    judge = bench.judge("float32")
    verify = []
    for _ in range(2):
        began = time.process_time()
        (verdict,) = judge.judge([job])
        verify.append(time.process_time() - began)
        if not verdict.verdict.accepted:
            raise SystemExit(f"honest work was refused: {verdict.verdict}")
    per_token = min(verify) / tokens
    row = {
        "rollouts": len(submission.rollouts),
        "tokens": tokens,
        "generate_ms_per_token_b1": 1000 * one_by_one / alone_tokens,
        "generate_ms_per_token_unit": 1000 * together / tokens,
        "verify_ms_per_token": 1000 * per_token,
        "proof_overhead": proofs / (together - proofs),
        "proof_ms_per_32_tokens": 1000 * proofs / sum(-(-len(r.tokens) // 128) for r in submission.rollouts),
        "verify_speedup_b1": one_by_one / alone_tokens / per_token,
        "verify_speedup_b16": together / tokens / per_token,
        "bytes_per_32_tokens": largest_proof(bench, submission),
    }
    say(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    return row


@contextmanager
def timed_proofs() -> Iterator[list[float]]:
    """Processor time of every ``build_proofs`` of engines meanwhile, seconds."""
    times: list[float] = []
    original = torch_engine.build_proofs

    def build(states: Sequence[Tensor], top_k: int = 128, chunk: int = 32) -> list[bytes]:
        began = time.process_time()
        done = original(states, top_k, chunk)
        times.append(time.process_time() - began)
        return done

    torch_engine.build_proofs = build
    try:
        yield times
    finally:
        torch_engine.build_proofs = original


def largest_proof(bench: Bench, submission: RolloutSubmission) -> int:
    """Bytes of the largest proof of 32 tokens that was sent."""
    hidden = bench.judge("float32")._hidden_size()
    sizes = [
        2 + 2 * points
        for rollout in submission.rollouts
        for points in chunk_points(len(rollout.tokens) // 4, hidden)
    ]
    whole = sum(len(rollout.proofs) for rollout in submission.rollouts)
    if sum(sizes) != whole:
        raise SystemExit(f"{whole} bytes of proofs, {sum(sizes)} expected")
    return max(sizes)


# --- honest work


def honest(bench: Bench, chunks: int, shrinks: tuple[int, ...], say: Say) -> dict[str, Any]:
    """Submissions of every dtype, batch shape and verifier dtype by turns, until there are enough proofs."""
    ways = [(engine, verifier, shrink) for shrink in shrinks for engine in DTYPES for verifier in DTYPES]
    seen = alarms = submissions = tokens = 0
    refused: dict[str, int] = {}
    by_way: dict[str, int] = {}
    while seen < chunks or submissions < len(ways):
        engine, verifier, shrink = ways[submissions % len(ways)]
        job, submission, _ = bench.job(engine, shrink)
        (result,) = bench.judge(verifier).judge([job])
        count = sum(-(-len(rollout.tokens) // 128) for rollout in submission.rollouts)
        submissions += 1
        seen += count
        tokens += sum(len(rollout.tokens) // 4 for rollout in submission.rollouts)
        way = f"{engine} engine, {verifier} verifier"
        by_way[way] = by_way.get(way, 0) + count
        if not result.verdict.accepted:
            alarms += 1
            refused[result.verdict.check] = refused.get(result.verdict.check, 0) + 1
            say(f"refused ({way}, shrink {shrink}): {result.verdict}")
        if submissions % 20 == 0:
            say(f"{seen} honest proofs in {submissions} submissions, {alarms} refused")
    return {
        "chunks": seen,
        "submissions": submissions,
        "tokens": tokens,
        "false_alarms": alarms,
        "refused_by": refused,
        "chunks_by_way": by_way,
    }


def honest_demo(scratch: Path, say: Say) -> dict[str, Any]:
    """Single prompts' groups up to the whole unit at a time."""
    bench = Bench("demo", presets.demo(), scratch / "honest-demo")
    return honest(bench, 9_600, (0, 3, 5, 8), say)


def honest_smollm2(scratch: Path, say: Say) -> dict[str, Any]:
    """The preset's short answers in large units, then long answers in small ones."""
    settings = presets.smollm2()
    shape = msgspec.structs.replace(settings.rollout, prompts_per_unit=8, group_size=8)
    short = Bench("smollm2", replace(settings, rollout=shape), scratch / "honest-short")
    rows = [honest(short, 440, (0, 5), say)]
    del short
    long = Bench("smollm2", wordy(settings, 2, 4, 80), scratch / "honest-long")
    rows.append(honest(long, 60, (0,), say))
    return {
        "short": rows[0],
        "long": rows[1],
        **{key: sum(row[key] for row in rows) for key in ("chunks", "submissions", "tokens", "false_alarms")},
    }


# --- attacks


def attacks(
    rows: dict[str, Any], say: Say, tries: int, model: str, save: Callable[[], None]
) -> dict[str, Any]:
    """Every attack of the suite on the demo model; those of ``ON_SMOLLM2`` on SmolLM2. Saved one by one."""
    from benchmarks.attacks import attacks as perform

    perform(model, tries, ON_SMOLLM2 if model == "smollm2" else (), rows=rows, save=save)
    for name, row in rows.items():
        say(f"{model}: {name}: {row['caught']} of {row['of']}, median {row['median']}")
    return rows


# --- together


def totals(result: dict[str, Any]) -> dict[str, Any]:
    """The figures over both models."""
    rows = [result[key] for key in ("honest-demo", "honest-smollm2") if key in result]
    if rows:
        result["honest_chunks"] = sum(row["chunks"] for row in rows)
        result["false_alarms"] = sum(row["false_alarms"] for row in rows)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tries", type=int, default=3, help="submissions per attack (SmolLM2: at most 2)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, help="write the result here; parts already in it are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result: dict[str, Any] = {"benchmark": "verification"}
    if options.save is not None and options.save.exists():
        result = json.loads(options.save.read_text())
    with tempfile.TemporaryDirectory(prefix="barnraise-verification-") as name:
        scratch = Path(name)
        for part in options.parts:
            began, before = time.monotonic(), result.setdefault("seconds", {}).get(part, 0.0)
            if not part.startswith("attacks"):
                before = 0.0  # done anew, while attacks go on where they were

            def save(part: str = part, began: float = began, before: float = before) -> None:
                result["seconds"][part] = round(before + time.monotonic() - began, 1)
                if options.save is not None:
                    temporary = options.save.with_suffix(".new")
                    temporary.write_text(json.dumps(_conditions(totals(result)), indent=1) + "\n")
                    temporary.replace(options.save)

            match part:
                case "speed":
                    result.update(speed(scratch, say))
                case "honest-demo":
                    result[part] = honest_demo(scratch, say)
                case "honest-smollm2":
                    result[part] = honest_smollm2(scratch, say)
                case "attacks":
                    attacks(result.setdefault(part, {}), say, options.tries, "demo", save)
                case _:
                    attacks(result.setdefault(part, {}), say, min(options.tries, 2), "smollm2", save)
            save()
    text = json.dumps(_conditions(totals(result)), indent=None if options.json else 1)
    print(text)


def _conditions(result: dict[str, Any]) -> dict[str, Any]:
    result["conditions"] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "device": "cpu",
        "verify": msgspec.to_builtins(default_verify_spec()),
    }
    return result


if __name__ == "__main__":
    main()

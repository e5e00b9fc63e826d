"""How far honest draws and log-probabilities are apart: what the bounds in ``VerifySpec`` rest on.

    python -m benchmarks.calibrate_sampling [--models demo smollm2 llama qwen3 gemma3] [--rows 16]
        [--tokens 32] [--temperatures 1.0 0.6] [--save FILE] [--submissions N]

Engines generate (float32 and bfloat16, key-value cache, batches); the same tokens are also run through
other ways to compute (prefill, single rows, eager attention, two threads), each taken as the engine of
its own logits. ``barnraise.coordinator.calibration`` compares every pair at every position, without
drawing at random. Reported are the tightest bounds of each pair, the chance that an honest submission of
64, 512 or 4096 tokens breaks a limit of the default bounds, and of those that ``run init`` would write
for the model. With ``--submissions`` instead, N whole submissions of the node's engine are judged by the
real verifier, for each pairing of dtypes, under the model's own bounds. ``--save`` adds to FILE what was
measured (one model at a time fits a minute or two).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from msgspec import structs

from barnraise.coordinator import presets
from barnraise.coordinator.calibration import Pair, States, compare, measured_verify_spec, with_room
from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.draw_checks import sum_limit, token_limit
from barnraise.coordinator.folder import create_run, read_spec
from barnraise.coordinator.model_source import prepare_model
from barnraise.coordinator.verifier import Judge
from barnraise.coordinator.workers import VerifyJob, WorkerSetup, checkpoint_folder
from barnraise.kernels.generate import generate
from barnraise.kernels.prefill import prefill
from barnraise.node.engine import Work
from barnraise.node.torch_engine import Generator
from barnraise.protocol.messages import RolloutLease, RolloutSubmission
from barnraise.protocol.spec import Dtype, SamplingSpec, VerifySpec
from barnraise.protocol.wire import encode
from benchmarks.proof_models import VOCABULARY, load, model_folder

MODELS = ("demo", "smollm2", "llama", "qwen3", "gemma3")
DTYPES: tuple[tuple[Dtype, Dtype], ...] = (("bfloat16", "float32"), ("float32", "bfloat16"))
SUBMISSIONS = (64, 512, 4096)  # tokens


def described(pair: Pair, temperature: float, own: VerifySpec | None = None) -> dict[str, Any]:
    """A pair's figures: the bounds it needs, and how likely it breaks the default ones (or ``own``)."""
    row: dict[str, Any] = {"positions": pair.positions, "other_draw": pair.other_draw, "bias": pair.bias}
    for name, seen in (("draws", pair.margins), ("logprobs", pair.errors)):
        fit = seen.fit()
        row[name] = {
            "mean": fit.noise.mean,
            "variance": fit.noise.variance,
            "scale": fit.noise.scale,
            "largest": fit.largest,
            "rms": fit.rms,
            "chance": _chance(pair, name, default_verify_spec(), temperature),
        }
        if own is not None:
            row[name]["chance_own"] = _chance(pair, name, own, temperature)
    return row


def _chance(pair: Pair, name: str, verify: VerifySpec, temperature: float) -> float:
    """The largest over the sizes of submissions."""
    seen, bound = (pair.margins, verify.draws) if name == "draws" else (pair.errors, verify.logprobs)
    return max(seen.chance(bound, tokens, verify.false_alarm, temperature) for tokens in SUBMISSIONS)


def ways(
    name: str, folder: Path, rows: int, tokens: int, temperature: float, engines: Sequence[str]
) -> Iterator[tuple[str, States, States]]:
    """Pairs of an engine's states and a verifier's, of the same tokens, with a name."""
    policies = {dtype: load(folder, dtype) for dtype in ("float32", "bfloat16")}
    random = Random(0)
    prompts = [[random.randrange(3, policies["float32"].vocabulary) for _ in range(7)] for _ in range(rows)]
    if name in ("demo", "smollm2"):
        prompts = _prompts(folder, rows, name)
    eos = policies["float32"].config.eos_token_id or 0
    sampling = SamplingSpec(temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=tokens)
    for dtype in engines:
        policy = policies[dtype]
        done = generate(policy, prompts, range(rows), sampling, eos, max_batch=rows)
        chosen = [completion.tokens for completion in done]
        decoded = (policy, torch.cat([completion.states for completion in done]))
        short = {other: (it, torch.cat(prefill(it, prompts, chosen))) for other, it in policies.items()}
        for other, states in short.items():
            yield f"{dtype} decode, {other} prefill", decoded, states
        if dtype == "float32":
            yield "float32 prefill, bfloat16 prefill", short["float32"], short["bfloat16"]
        if name != "smollm2":  # slow there
            single = (policy, torch.cat(prefill(policy, prompts, chosen, max_tokens=1)))
            yield f"{dtype} single rows, float32 prefill", single, short["float32"]
            torch.set_num_threads(2)
            two = (policy, torch.cat(prefill(policy, prompts, chosen)))
            torch.set_num_threads(1)
            yield f"{dtype} two threads, float32 prefill", two, short["float32"]
        elif dtype == "float32":
            continue
        eager = load(folder, dtype, "eager")
        slow = (eager, torch.cat(prefill(eager, prompts, chosen)))
        yield f"{dtype} eager, float32 prefill", slow, short["float32"]
        yield f"{dtype} decode, {dtype} eager", decoded, slow


def _prompts(folder: Path, rows: int, preset: str) -> list[list[int]]:
    """Prompts of the preset's environment; text long enough to be worth proving."""
    from barnraise.kernels.tokens import Codec
    from barnraise.protocol.environments import build_environment

    settings = presets.demo() if preset == "demo" else presets.smollm2()
    spec = settings.environment
    if preset == "smollm2":
        spec = structs.replace(spec, system_prompt="Think step by step, then answer.")
    environment, codec = build_environment(spec), Codec(folder, spec)
    return [list(codec.encode_prompt(environment.task(row, held_out=False).prompt)) for row in range(rows)]


def whole(name: str, folder: Path, count: int, engine: Dtype, verifier: Dtype) -> dict[str, Any]:
    """``count`` units by the node's engine in one dtype, judged in another, under the model's own bounds."""
    settings = presets.demo() if name == "demo" else presets.smollm2()
    own, _ = measured_verify_spec(folder, settings.environment, settings.sampling, settings.compute_dtype)
    checks: Counter[str] = Counter()
    tokens = 0
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        prepare_model(folder, Path(scratch) / "start", settings.weights_dtype, settings.environment)
        run_id = create_run(
            run,
            Path(scratch) / "start",
            settings,
            own,
            name="whole",
            description="",
            model_name=name,
            seed=0,
            now_ms=1,
        )
        spec = read_spec(run)[0]
        specs = {
            dtype: structs.replace(spec, model=structs.replace(spec.model, compute_dtype=dtype))
            for dtype in (engine, verifier)
        }
        generator = Generator("cpu")
        generator.load(specs[engine], checkpoint_folder(run, 0), 0)
        judge = Judge(WorkerSetup(spec=specs[verifier], run_id=run_id, folder=str(run), threads=1))
        prompts, group = spec.rollout.prompts_per_unit, spec.rollout.group_size
        for number in range(count):
            work = Work(
                run_id=run_id,
                lease_id=number.to_bytes(16, "big"),
                node=bytes(32),
                policy_version=0,
                prompts=prompts,
                group_size=group,
            )
            done = generator.generate(work, lambda event: None, lambda: False)
            lease = RolloutLease(
                run_id=run_id,
                lease_id=work.lease_id,
                unit_id=number,
                node=work.node,
                policy_version=0,
                prompts=prompts,
                group_size=group,
                issued_at=1,
                timeout_at=2,
                deadline_at=3,
            )
            submission = RolloutSubmission(
                run_id=run_id,
                lease_id=work.lease_id,
                policy_version=0,
                engine="torch",
                generate_ms=1,
                rollouts=done.rollouts,
            )
            job = VerifyJob(submission_id=bytes(32), lease=lease, payload=encode(submission))
            (judged,) = judge.judge([job])
            checks[judged.verdict.check] += 1
            tokens += done.tokens
        judge.close()
    row = {"model": name, "engine": engine, "verifier": verifier, "tokens": tokens, "verdicts": dict(checks)}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.6])
    parser.add_argument("--engines", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--folder", type=Path, help="measure this folder's weights, of the model named")
    parser.add_argument("--submissions", type=int, default=0, metavar="N")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"pairs": [], "own": {}}
    if options.save and options.save.is_file():
        report = json.loads(options.save.read_text(encoding="utf-8"))
    default = default_verify_spec()
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            folder = options.folder or model_folder(name, Path(scratch))
            if options.submissions:
                for engine, verifier in DTYPES:
                    row = whole(name, folder, options.submissions, engine, verifier)
                    report.setdefault("whole", []).append(row)
                if options.save:
                    _save(report, options.save)
                continue
            label = f"{name} {options.folder.name}" if options.folder else name
            for temperature in options.temperatures:
                started = time.monotonic()
                found = {
                    pair: compare(engine, verifier, temperature)
                    for pair, engine, verifier in ways(
                        name, folder, options.rows, options.tokens, temperature, options.engines
                    )
                }
                # What ``run init`` looks at.
                seen = [one for pair, one in found.items() if "decode" in pair and "bfloat16 prefill" in pair]
                own = with_room(seen, temperature, default)
                report["own"][f"{label} {temperature}"] = {
                    "draws": [own.draws.mean, own.draws.variance, own.draws.scale],
                    "logprobs": [own.logprobs.mean, own.logprobs.variance, own.logprobs.scale],
                    "bias": own.bias,
                    "seconds": round(time.monotonic() - started),
                }
                rows = [
                    {"model": label, "temperature": temperature, "pair": pair}
                    | described(one, temperature, own)
                    for pair, one in found.items()
                ]
                fresh = {(label, temperature, pair) for pair in found}
                kept = [r for r in report["pairs"] if (r["model"], r["temperature"], r["pair"]) not in fresh]
                report["pairs"] = kept + rows
                for row in rows:
                    print(_line(row), file=sys.stderr, flush=True)
                if options.save:
                    _save(report, options.save)
    if not options.save:
        print(json.dumps(_rounded(report), indent=1))


def _save(report: dict[str, Any], path: Path) -> None:
    verify = default_verify_spec()
    report |= {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "random_vocabulary": VOCABULARY,
        "limits": {
            str(tokens): {
                "draw_token": token_limit(verify.draws, tokens, verify.false_alarm, 1.0),
                "draw_mean": sum_limit(verify.draws, tokens, verify.false_alarm, 1.0) / tokens,
                "logprob_token": token_limit(verify.logprobs, tokens, verify.false_alarm, 1.0),
                "logprob_mean": sum_limit(verify.logprobs, tokens, verify.false_alarm, 1.0) / tokens,
            }
            for tokens in SUBMISSIONS
        },
    }
    path.write_text(json.dumps(_rounded(report), indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _line(row: dict[str, Any]) -> str:
    draws, logprobs = row["draws"], row["logprobs"]
    return (
        f"{row['model']:8} T={row['temperature']:<4} {row['pair']:38} n={row['positions']:<5} "
        f"other {row['other_draw']:.1e} margin {draws['mean']:.1e} v {draws['variance']:.1e} "
        f"b {draws['scale']:.1e} max {draws['largest']:.2f} chance {draws['chance']:.0e} "
        f"own {draws['chance_own']:.0e} | error {logprobs['mean']:.1e} v {logprobs['variance']:.1e} "
        f"b {logprobs['scale']:.1e} max {logprobs['largest']:.2f} rms {logprobs['rms']:.1e} "
        f"chance {logprobs['chance']:.0e} own {logprobs['chance_own']:.0e} | bias {row['bias']:.1e}"
    )


if __name__ == "__main__":
    main()

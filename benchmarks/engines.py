"""Engines against each other: do their verifiers agree, and how fast are they?

    python -m benchmarks.engines [--json] [--save FILE] [--parts agreement speed] [--dtypes bfloat16 float32]
        [--models llama qwen3 gemma3 smollm2] [--chunks 600] [--batch 32] [--tries 3]

``agreement``: submissions drawn by vLLM are judged by the whole ``Judge`` (torch), and by turns such
of the torch engine, with default thresholds. vLLM runs with all that its workers were ever bitten by:
prefix caching over shared prompts, prompts of different lengths in one batch, long ones prefilled in
pieces, and a key-value cache so small that sequences are preempted and resumed. ``seeded_identical``:
completions that both engines draw alike, token by token, from the same seeds.

``speed``: processor time for the same unit (the batch, prompts and lengths are equal) of Hugging
Face's ``generate``, of the torch engine and of vLLM, proofs on and off; seconds of a hot reload
against a first load; resident memory.

Needs vLLM (``make test-vllm`` says how it is installed); without it only the torch rows are measured.
Each model and type runs in a process of its own, for vLLM fills one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from barnraise.coordinator import presets
from barnraise.coordinator.folder import Settings
from barnraise.coordinator.verifier import Judge
from barnraise.coordinator.workers import VerifyJob, WorkerSetup, checkpoint_folder
from barnraise.kernels.generate import generate
from barnraise.node.engine import Generated, Work
from barnraise.node.engine_choice import find_vllm
from barnraise.node.picked_engine import RolloutEngine
from barnraise.node.torch_engine import Generator
from barnraise.node.unit_rollouts import draw_tasks
from barnraise.protocol.messages import RolloutLease, RolloutSubmission
from barnraise.protocol.spec import EnvironmentSpec
from barnraise.protocol.wire import encode
from benchmarks.proof_models import VOCABULARY, benchmark_run, model_folder

MODELS = ("llama", "qwen3", "gemma3", "smollm2")
PARTS = ("agreement", "speed")
NODE = bytes([9]) * 32
TIGHT_STEP = 64  # tokens: prompts are prefilled in pieces
TIGHT_BLOCKS = 16  # of 32 tokens: few sequences fit


class Unit:
    """A run folder of one model; leases, submissions and a judge for it."""

    def __init__(self, model: str, dtype: str, scratch: Path, prompts: int, group: int, tokens: int) -> None:
        source = model_folder(model, scratch)
        if model != "smollm2":
            _write_tokenizer(source)
        settings = _settings(model, dtype, prompts, group, tokens)
        run = benchmark_run(source, model, settings, scratch)
        self.spec, self.run_id = run.spec, run.run_id
        self.folder = checkpoint_folder(scratch / "run", 0)
        self._setup = WorkerSetup(spec=self.spec, run_id=self.run_id, folder=str(scratch / "run"), threads=1)
        self._judge: Judge | None = None

    def work(self, number: int) -> Work:
        """The lease's work."""
        rollout = self.spec.rollout
        return Work(
            run_id=self.run_id,
            lease_id=number.to_bytes(16, "big"),
            node=NODE,
            policy_version=0,
            prompts=rollout.prompts_per_unit,
            group_size=rollout.group_size,
        )

    def refused(self, work: Work, done: Generated) -> str:
        """What the torch verifier says against a submission; empty if it is accepted."""
        lease = RolloutLease(
            run_id=work.run_id,
            lease_id=work.lease_id,
            unit_id=1,
            node=NODE,
            policy_version=0,
            prompts=work.prompts,
            group_size=work.group_size,
            issued_at=0,
            timeout_at=1,
            deadline_at=2,
        )
        submission = RolloutSubmission(
            run_id=work.run_id,
            lease_id=work.lease_id,
            policy_version=0,
            engine="benchmark",
            generate_ms=1,
            rollouts=done.rollouts,
        )
        if self._judge is None:
            self._judge = Judge(self._setup)
        job = VerifyJob(submission_id=work.lease_id * 2, lease=lease, payload=encode(submission))
        (judged,) = self._judge.judge([job])
        verdict = judged.verdict
        return "" if verdict.accepted else f"{verdict.check}: {verdict.message}"


def agreement(unit: Unit, chunks: int, say: Any) -> dict[str, Any]:
    """Submissions of vLLM, roomy and tight, and of torch, until each has its share of proofs."""
    from barnraise.node.vllm_engine import VllmGenerator

    torch_engine = Generator("cpu")
    torch_engine.load(unit.spec, unit.folder, 0)
    rows: dict[str, dict[str, Any]] = {}
    watch = _Watch()
    number = 0
    for name, share in (("vllm", 0.4), ("vllm tight", 0.4), ("torch", 0.2)):
        engine: RolloutEngine = torch_engine
        fast = None
        if name == "vllm":
            engine = fast = VllmGenerator("cpu")
        elif name == "vllm tight":
            engine = fast = VllmGenerator("cpu", kv_bytes=_tight(unit), step_tokens=TIGHT_STEP)
        if fast is not None:
            fast.load(unit.spec, unit.folder, 0)
            watch.attach(fast)
        row: dict[str, Any] = {
            "chunks": 0,
            "tokens": 0,
            "submissions": 0,
            "false_alarms": 0,
            "alike": 0,
            "of": 0,
        }
        while row["chunks"] < share * chunks:
            number += 1
            work = unit.work(number)
            done = engine.generate(work, lambda progress: None, lambda: False)
            row["submissions"] += 1
            row["tokens"] += done.tokens
            row["chunks"] += sum(-(-len(rollout.tokens) // 128) for rollout in done.rollouts)
            why = unit.refused(work, done)
            if why:
                row["false_alarms"] += 1
                say(f"refused: {name}: {why}")
            if fast is not None and row["submissions"] == 1:
                other = torch_engine.generate(work, lambda progress: None, lambda: False)
                pairs = list(zip(done.rollouts, other.rollouts, strict=True))
                row["alike"], row["of"] = sum(a.tokens == b.tokens for a, b in pairs), len(pairs)
        if fast is not None:
            fast.close()
            row |= watch.counts()
        rows[name] = row
        say(f"{name}: {row}")
    return {
        "chunks": sum(row["chunks"] for row in rows.values()),
        "false_alarms": sum(row["false_alarms"] for row in rows.values()),
        "engines": rows,
    }


class _Watch:
    """Counts preemptions, cached prompt tokens and prefills in pieces of a vLLM engine."""

    def __init__(self) -> None:
        self._counts = {"preemptions": 0, "cached_tokens": 0, "pieces": 0}

    def attach(self, engine: Any) -> None:
        self._counts = dict.fromkeys(self._counts, 0)
        counts, loaded = self._counts, engine._loaded.engine
        scheduler = loaded.engine_core.engine_core.scheduler
        schedule, step = scheduler.schedule, loaded.step

        def watched(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            counts["preemptions"] += len(output.preempted_req_ids or ())
            for name, scheduled in output.num_scheduled_tokens.items():
                request = scheduler.requests[name]
                counts["pieces"] += request.num_computed_tokens < request.num_tokens and scheduled > 1
            return output

        def stepped() -> Any:
            outputs = step()
            counts["cached_tokens"] += sum(one.num_cached_tokens or 0 for one in outputs if one.finished)
            return outputs

        scheduler.schedule, loaded.step = watched, stepped

    def counts(self) -> dict[str, int]:
        return dict(self._counts)


def _tight(unit: Unit) -> int:
    from barnraise.kernels.model_config import read_config
    from barnraise.node.vllm_room import token_bytes

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[unit.spec.model.compute_dtype]
    return TIGHT_BLOCKS * 32 * token_bytes(read_config(unit.folder), dtype)


# --- speed


def speed(unit: Unit, say: Any, tries: int) -> dict[str, Any]:
    """Processor seconds of one unit with each engine; the best of ``tries``, by turns."""
    have_vllm = bool(find_vllm().distribution)
    plain = Generator("cpu")
    began = time.process_time()
    plain.load(unit.spec, unit.folder, 0)
    rows: dict[str, dict[str, Any]] = {"torch": {"load_s": time.process_time() - began}, "hf": {}}
    began = time.process_time()
    plain.load(unit.spec, unit.folder, 0)
    rows["torch"]["reload_s"] = time.process_time() - began
    ways: dict[str, Any] = {
        "hf": lambda work: _hugging_face(plain, work),
        "torch, no proofs": lambda work: _without_proofs(plain, work),
        "torch": lambda work: plain.generate(work, lambda progress: None, lambda: False).tokens,
    }
    if have_vllm:
        from barnraise.node.vllm_engine import VllmGenerator

        memory = psutil.Process().memory_info().rss
        fast = VllmGenerator("cpu")
        began = time.process_time()
        fast.load(unit.spec, unit.folder, 0)
        rows["vllm"] = {"load_s": time.process_time() - began}
        began = time.process_time()
        fast.load(unit.spec, unit.folder, 0)
        rows["vllm"]["reload_s"] = time.process_time() - began
        rows["vllm"]["memory_added_mb"] = round((psutil.Process().memory_info().rss - memory) / 1e6)

        def vllm(work: Work, proofs: bool) -> int:
            fast._proofs = proofs
            return fast.generate(work, lambda progress: None, lambda: False).tokens

        ways["vllm, no proofs"] = lambda work: vllm(work, False)
        ways["vllm"] = lambda work: vllm(work, True)
    times: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, int] = {}
    for attempt in range(tries + 1):  # the first warms up
        for name, way in ways.items():
            began = time.process_time()
            tokens[name] = way(unit.work(1))
            if attempt:
                times[name].append(time.process_time() - began)
        say(", ".join(f"{name} {tokens[name] / times[name][-1]:.0f}" for name in ways if times[name]))
    rate = {name: tokens[name] / min(spent) for name, spent in times.items()}
    result: dict[str, Any] = {"tokens": tokens["torch"], "torch_vs_hf": rate["torch"] / rate["hf"]}
    for name in ("hf", "torch", "vllm"):
        if name in rate:
            rows[name]["tokens_per_cpu_s"] = rate[name]
        if f"{name}, no proofs" in rate:
            pairs = zip(times[name], times[f"{name}, no proofs"], strict=True)
            rows[name]["proof_overhead"] = statistics.median(a / b for a, b in pairs) - 1
            rows[name]["proof_overhead_of_best"] = min(times[name]) / min(times[f"{name}, no proofs"]) - 1
    if have_vllm:
        result["vllm_vs_hf"] = rate["vllm"] / rate["hf"]
    rows["torch"]["memory_mb"] = round(psutil.Process().memory_info().rss / 1e6)
    return {**result, "engines": rows}


def _hugging_face(engine: Generator, work: Work) -> int:
    """The library's own ``generate``: all rows side by side, sampled at the run's temperature."""
    loaded = engine._loaded
    assert loaded is not None
    prompts, _ = draw_tasks(loaded.environment, loaded.codec, work)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling, eos = loaded.spec.sampling, loaded.spec.model.eos_token
    with torch.no_grad():
        drawn = loaded.policy.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=eos,
            pad_token_id=eos,
        )[:, width:]
    ends = (drawn == eos).int().cumsum(dim=1)
    return int(((ends - (drawn == eos).int()) == 0).sum())


def _without_proofs(engine: Generator, work: Work) -> int:
    loaded = engine._loaded
    assert loaded is not None
    prompts, seeds = draw_tasks(loaded.environment, loaded.codec, work)
    done = generate(loaded.policy, prompts, seeds, loaded.spec.sampling, loaded.spec.model.eos_token)
    return sum(len(completion.tokens) for completion in done)


# --- models and settings


def _write_tokenizer(folder: Path) -> None:
    """One token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    symbols = ["<eos>", *(chr(code) for code in range(32, 127)), "\n"]
    symbols += [f"<{number}>" for number in range(len(symbols), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(symbols)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def _settings(model: str, dtype: str, prompts: int, group: int, tokens: int) -> Settings:
    base = presets.smollm2()
    environment = EnvironmentSpec(
        name="chain_sum",
        settings=json.dumps({"min_terms": 2, "max_terms": 24, "min_digits": 1, "max_digits": 3}),
        prompt_format="chat" if model == "smollm2" else "plain",
        system_prompt="Explain every step at length before you answer." if model == "smollm2" else "",
    )
    return replace(
        base,
        environment=environment,
        sampling=msgspec.structs.replace(base.sampling, max_new_tokens=tokens),
        rollout=msgspec.structs.replace(base.rollout, prompts_per_unit=prompts, group_size=group),
        weights_dtype=dtype,  # type: ignore[arg-type]
        compute_dtype=dtype,  # type: ignore[arg-type]
    )


def _one(part: str, model: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in this process."""
    torch.set_num_threads(1)

    def say(text: str) -> None:
        print(f"{part}, {model}, {dtype}: {text}", file=sys.stderr, flush=True)

    small = model == "smollm2"
    with tempfile.TemporaryDirectory() as scratch:
        if part == "speed":
            group = min(4, options.batch)
            tokens = 24 if small else 64
            unit = Unit(model, dtype, Path(scratch), max(1, options.batch // group), group, tokens)
            return speed(unit, say, options.tries)
        unit = Unit(model, dtype, Path(scratch), 2 if small else 5, 4 if small else 8, 40 if small else 80)
        return agreement(unit, options.chunks, say)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--chunks", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tries", type=int, default=3, help="of the speed, after one to warm up")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, help="add to this file, and leave out what it has")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        row = _one(options.parts[0], options.models[0], options.dtypes[0], options)
        options.save.write_text(json.dumps(row))
        return
    result: dict[str, Any] = {}
    if options.save is not None and options.save.exists():
        result = json.loads(options.save.read_text())
    for part in options.parts:
        for model in options.models:
            for dtype in options.dtypes:
                if f"{model} {dtype}" in result.setdefault(part, {}):
                    continue
                result[part][f"{model} {dtype}"] = _apart(part, model, dtype, options)
                _summarise(result)
                if options.save is not None:
                    options.save.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        print(json.dumps(result, indent=1))


def _apart(part: str, model: str, dtype: str, options: argparse.Namespace) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        words = ["--parts", part, "--models", model, "--dtypes", dtype, "--here", "--save", file.name]
        words += [
            "--chunks",
            str(options.chunks),
            "--batch",
            str(options.batch),
            "--tries",
            str(options.tries),
        ]
        command = [sys.executable, "-P", "-m", "benchmarks.engines", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
        return json.loads(Path(file.name).read_text())


def _summarise(result: dict[str, Any]) -> None:
    vllm = find_vllm()
    result["conditions"] = {
        "processor": platform.processor() or platform.machine(),
        "torch": str(torch.__version__),
        "vllm": f"{vllm.distribution} {vllm.version}".strip(),
        "threads": 1,
    }
    rows = result.get("agreement", {}).values()
    result["chunks"] = sum(row["chunks"] for row in rows)
    result["false_alarms"] = sum(row["false_alarms"] for row in rows)


if __name__ == "__main__":
    main()

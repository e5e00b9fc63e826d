"""One optimiser step of our learner beside TRL's ``GRPOTrainer`` on the same model and batch.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0
    python -m benchmarks.learner --trl /tmp/trl/bin/python [--json] [--threads 1] [--steps 2]

TRL is a dependency of this benchmark alone and has an environment of its own. Each side runs in a
process of its own and is given the same model folder (float32), the same token ids, behaviour
log-probabilities, advantages and loss: the two-sided clipping of INTELLECT-2 over the mean of all
tokens (TRL's ``dapo``, ``delta`` 4), AdamW, gradients clipped. TRL cuts the 16 sequences into two
micro-batches of a group of eight, padded to their own longest sequence, which is less than
``GRPOTrainer`` itself would pad; we fill ours up to the tokens of the largest group. That both
compute the same is checked: loss and gradient norm.

Speed: real tokens (prompt and completion, once per sequence) a second of processor time, which a
busy machine disturbs less than the clock, the best of ``--steps`` steps after a first. Memory: the
most that the CPU allocator has handed out in a step, with weights, gradients and AdamW's moments, by
torch's profiler; and the process's resident peak above what it was before the model.

Shapes: ``rollouts`` has
prompts of 128 tokens and answers of 16 to 128, ``long prompts`` 256 and 16 to 64, ``long answers``
16 and exactly 240, where there is nothing to share and nothing padded: the least that we can gain.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

SHAPES = {"rollouts": (128, 16, 128), "long prompts": (256, 16, 64), "long answers": (16, 240, 240)}
"""Prompt tokens, and from how many to how many an answer has."""
GROUPS, SAMPLES, VOCABULARY = 2, 8, 16_384
RATE, CLIP, LOW, HIGH, DELTA = 1e-5, 0.1, 0.2, 0.2, 4.0


def make_rows(shape: str) -> list[dict[str, Any]]:
    """The batch: samples of a group one behind another."""
    prompt, least, most = SHAPES[shape]
    draw = random.Random(7)
    rows = []
    for _ in range(GROUPS):
        given = [draw.randrange(VOCABULARY) for _ in range(prompt)]
        for _ in range(SAMPLES):
            # Most answers are short, few are long, as in reality.
            length = least + round((most - least) * draw.random() ** 1.5)
            tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
            logprobs = [-9.7 + draw.uniform(-0.3, 0.3) for _ in tokens]
            rows.append(
                {"prompt": given, "tokens": tokens, "logprobs": logprobs, "advantage": draw.uniform(-1, 1)}
            )
    return rows


def make_model(folder: Path) -> None:
    """A Llama of 18 million parameters, its head a third of them, and a tokenizer that TRL can read."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    from barnraise.kernels.models import build_model, save_weights

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=10,
        num_attention_heads=5,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_weights(build_model(config, torch.float32, seed=3), folder / "model.safetensors", "float32")
    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>").save_pretrained(
        folder
    )


Step = Callable[[], tuple[float, float]]


def ours(folder: Path, rows: list[dict[str, Any]], recompute: bool) -> Step:
    """The learner's step: (loss, gradient norm)."""
    from barnraise.coordinator.batches import Row
    from barnraise.coordinator.learner_shards import clip_gradients
    from barnraise.coordinator.learner_step import (
        Scores,
        Share,
        gradients,
        make_optimizer,
        micro_batches,
        recompute_layers,
    )
    from barnraise.kernels.models import load_policy
    from barnraise.kernels.packing import packed_tokens

    spec = _spec()
    policy = load_policy(folder, "float32")
    policy.model.requires_grad_(True)
    scores = Scores(policy, spec)
    if recompute:
        recompute_layers(policy)
    optimizer = make_optimizer(policy, spec.grpo)
    batch = [Row(row["prompt"], row["tokens"], row["logprobs"], row["advantage"]) for row in rows]
    groups = [batch[start : start + SAMPLES] for start in range(0, len(batch), SAMPLES)]
    tokens = max(packed_tokens([r.prompt for r in group], [r.tokens for r in group]) for group in groups)
    assert len(micro_batches(batch, tokens, packs=True)) >= GROUPS  # none larger than TRL's

    def step() -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        loss, _ = gradients(scores, batch, tokens, Share())
        norm = clip_gradients(policy, CLIP)
        optimizer.step()
        return loss, norm

    return step


def _spec() -> Any:
    from types import SimpleNamespace

    grpo = SimpleNamespace(
        loss_aggregation="token",
        weight_decay=0.0,
        learning_rate=RATE,
        beta1=0.9,
        beta2=0.99,
        clip_low=LOW,
        clip_high=HIGH,
        clip_delta=DELTA,
        kl_coefficient=0.0,
        entropy_coefficient=0.0,
    )
    sampling = SimpleNamespace(temperature=1.0, top_k=0, top_p=1.0)
    return SimpleNamespace(
        grpo=grpo, sampling=sampling, model=SimpleNamespace(compute_dtype="float32", adapter=None)
    )


def trl(folder: Path, rows: list[dict[str, Any]], recompute: bool) -> Step:
    """``GRPOTrainer``'s step on given inputs. Runs where there is no barnraise."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=GROUPS,
        num_generations=SAMPLES,
        loss_type="dapo",
        epsilon=LOW,
        epsilon_high=HIGH,
        delta=DELTA,
        beta=0.0,
        learning_rate=RATE,
        adam_beta2=0.99,
        max_grad_norm=CLIP,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=recompute,
        report_to=[],
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = Given(
        model=str(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * SAMPLES}),
    )
    trainer.create_optimizer()
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = GROUPS
    total = torch.tensor(float(sum(len(row["tokens"]) for row in rows)))
    micro = []
    for start in range(0, len(rows), SAMPLES):
        part = rows[start : start + SAMPLES]
        width = max(len(row["tokens"]) for row in part)

        def padded(key: str, fill: float, width: int = width, part: Any = part) -> torch.Tensor:
            return torch.tensor([row[key] + [fill] * (width - len(row[key])) for row in part])

        mask = torch.tensor([[1] * len(r["tokens"]) + [0] * (width - len(r["tokens"])) for r in part])
        prompts = torch.tensor([row["prompt"] for row in part])
        micro.append(
            {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": padded("tokens", 0),
                "completion_mask": mask,
                "advantages": torch.tensor([row["advantage"] for row in part]),
                "old_per_token_logps": padded("logprobs", 0.0),
                "num_items_in_batch": total,
            }
        )

    def step() -> tuple[float, float]:
        trainer.optimizer.zero_grad(set_to_none=True)
        loss = sum(float(trainer.training_step(model, dict(part), None)) for part in micro)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        trainer.optimizer.step()
        return loss, norm

    return step


def measure(
    side: str, folder: Path, rows: list[dict[str, Any]], steps: int, recompute: bool
) -> dict[str, Any]:
    """One side's numbers."""
    from torch.profiler import ProfilerActivity, profile

    make = ours if side == "ours" else trl
    if side == "ours":
        from barnraise.coordinator import learner  # noqa: F401 (what its process has loaded anyway)
    else:
        import trl as _
    before = _resident()
    step = make(folder, rows, recompute)
    loss, norm = step()  # AdamW's moments, and what torch makes once
    seconds, work = [], []
    for _ in range(steps):
        started, worked = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - started)
        work.append(time.process_time() - worked)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        step()
    events = records.profiler.kineto_results.events()  # type: ignore[union-attr]
    handed = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    # Gradients of the step before are freed in this one, so they are counted once.
    parameters = (folder / "model.safetensors").stat().st_size
    tokens = sum(len(row["prompt"]) + len(row["tokens"]) for row in rows)
    return {
        "loss": loss,
        "norm": norm,
        "tokens_s": tokens / min(work),
        "seconds": min(seconds),
        "cpu_seconds": min(work),
        "memory": handed + 4 * parameters,  # weights, two moments, and the gradients that it began with
        "activations": handed,
        "resident_peak": peak - before,
    }


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", default="", help="Python of an environment with TRL; without, ours alone.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--recompute", action="store_true", help="Activation checkpointing on both sides.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.side:
        rows = make_rows(options.shapes[0])
        print(
            "RESULT"
            + json.dumps(measure(options.side, options.folder, rows, options.steps, options.recompute))
        )
        return
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": options.threads,
        "load_before": os.getloadavg()[0],
        "recompute": options.recompute,
        "parameters": 0,
        "shapes": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        result["parameters"] = (folder / "model.safetensors").stat().st_size // 4
        for shape in options.shapes:
            sides = {}
            for side, python in (("ours", sys.executable), ("trl", options.trl)):
                if python:
                    sides[side] = _in_process(side, python, folder, shape, options)
            result["shapes"][shape] = _compared(sides)
    first = result["shapes"].get("rollouts", {})
    result |= {key: first[key] for key in ("vs_trl_speed", "vs_trl_memory") if key in first}
    result["load_after"] = os.getloadavg()[0]
    print(json.dumps(result, indent=None if options.json else 2))


def _compared(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if "trl" not in sides:
        return dict(sides)
    our, their = sides["ours"], sides["trl"]
    for key in ("loss", "norm"):
        if abs(our[key] - their[key]) > 1e-3 * abs(their[key]) + 1e-6:
            raise SystemExit(f"the two do not compute the same: {key} {our[key]} and {their[key]}")
    return {
        **sides,
        "vs_trl_speed": our["tokens_s"] / their["tokens_s"],
        "vs_trl_memory": our["memory"] / their["memory"],
        "vs_trl_resident": our["resident_peak"] / their["resident_peak"],
    }


def _in_process(side: str, python: str, folder: Path, shape: str, options: Any) -> dict[str, Any]:
    argv = [python, "-P", __file__, "--side", side, "--folder", str(folder), "--shapes", shape]
    argv += ["--threads", str(options.threads), "--steps", str(options.steps)]
    argv += ["--recompute"] if options.recompute else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    if side == "trl":
        environment.pop("PYTHONPATH", None)
    found = subprocess.run(argv, capture_output=True, text=True, env=environment)
    lines = [line for line in found.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise SystemExit(f"{side}: {found.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT"))
    return measured


if __name__ == "__main__":
    main()

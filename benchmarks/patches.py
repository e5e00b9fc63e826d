"""How small a patch between policy versions is: real GRPO steps on SmolLM2-135M-Instruct.

    python -m benchmarks.patches [--json] [--versions 8] [--threads 1] [--rates 1e-6 3e-7]

For each learning rate a new policy is trained for ``--versions`` versions of one AdamW step
each, as the learner does it: completions of the run's environment drawn from the policy and
rewarded, the GRPO loss with INTELLECT-2's settings (without KL term and warm-up), master weights in
float32, published in bfloat16. Patches between versions 1, 2 and 8 apart are made, applied and
compared. Steps are small (a CPU has to make them); what decides how many values change is the
rate and the optimiser, not the size of the batch.

``masters``: what the float32 weights are at the start. A published model gives them exactly on
bfloat16 values ("on-grid"), from where a small step reaches the next value only in tiny weights;
after many versions they lie anywhere between two values ("mid-run": each is moved by a random
part of the rounding interval, which leaves its bfloat16 value as it is). The second is the
lasting case and the one with larger patches; it is the one to quote. Exact zeros, which the
dequantised weights have and a trained model hardly does, change in all their bits at every step:
they make the patches here larger than they need be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from barnraise.coordinator.presets import smollm2
from barnraise.kernels.generate import generate
from barnraise.kernels.grpo import group_advantages, policy_loss, token_weights
from barnraise.kernels.logprobs import token_logprobs
from barnraise.kernels.models import Policy, load_policy, save_weights
from barnraise.kernels.patches import PatchStats, apply_chain, make_patch
from barnraise.kernels.prefill import prefill
from barnraise.kernels.smollm2 import prepare_smollm2
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import build_environment

LAGS = (1, 2, 8)
GROUPS, SAMPLES = 2, 4
RUN = smollm2()
GRPO = msgspec.structs.replace(RUN.grpo, kl_coefficient=0.0)  # no second model in memory


def spread(policy: Policy, masters: str, seed: int) -> None:
    """Put the float32 weights on their bfloat16 values, or evenly around them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            grid = parameter.bfloat16()
            parameter.copy_(grid.float())
            if masters == "mid-run":
                _, exponent = torch.frexp(parameter)
                unit = torch.ldexp(torch.ones_like(parameter), exponent - 8)  # of the last place
                moved = parameter + unit * (torch.rand(parameter.shape, generator=generator) - 0.5) * 0.999
                # Below a power of two the interval is half as wide: those few stay where they are.
                parameter.copy_(torch.where(moved.bfloat16() == grid, moved, parameter))


def draw(policy: Policy, codec: Codec, environment: Any, version: int) -> tuple[Any, ...]:
    """One batch: prompts, completions and log-probabilities, advantages; never all equal rewards."""
    for attempt in range(1000):
        prompts: list[list[int]] = []
        tasks = []
        for group in range(GROUPS):
            task = environment.task(version * 100_003 + attempt * 101 + group, held_out=False)
            tasks += [task] * SAMPLES
            prompts += [codec.encode_prompt(task.prompt)] * SAMPLES
        seeds = [version * 1_000_003 + attempt * 1009 + row for row in range(len(prompts))]
        done = generate(policy, prompts, seeds, RUN.sampling, policy.config.eos_token_id, lambda: False)
        scores = [
            environment.score(task, codec.decode(list(one.tokens)))
            for task, one in zip(tasks, done, strict=True)
        ]
        rewards = torch.tensor(scores, dtype=torch.float32).reshape(GROUPS, SAMPLES)
        advantages = group_advantages(rewards, True)
        if bool((advantages != 0).any()):
            return prompts, done, advantages.reshape(-1).tolist(), float(rewards.mean())
    raise RuntimeError("no group with unequal rewards in 1000 batches")


def step(policy: Policy, optimizer: torch.optim.AdamW, batch: tuple[Any, ...], clip: float) -> float:
    """One GRPO step; the gradient's norm before clipping."""
    prompts, done, advantages, _ = batch
    tokens = [list(one.tokens) for one in done]
    targets = torch.tensor([token for row in tokens for token in row])
    old = torch.tensor([value for one in done for value in one.logprobs], dtype=torch.float32)
    weight = token_weights(torch.tensor([len(row) for row in tokens]), "token")
    per_token = torch.tensor([a for a, row in zip(advantages, tokens, strict=True) for _ in row])
    hidden = prefill(policy, prompts, tokens, max_tokens=2**40, grad=True)
    new, entropy = token_logprobs(hidden, policy.head_weight, targets, 1.0, policy.head_bias, policy.softcap)
    loss, _ = policy_loss(new, old, per_token, entropy, weight, GRPO, None)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(policy.model.parameters(), clip))
    optimizer.step()
    return norm


def adamw(policy: Policy, rate: float) -> torch.optim.AdamW:
    """The learner's optimiser: norms are not decayed."""
    weights: list[Tensor] = list(policy.model.parameters())
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": GRPO.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(GRPO.beta1, GRPO.beta2))


def measure(folder: Path, first: int, last: int) -> dict[str, float | bool]:
    """Patch from version ``first`` to ``last``: made, applied, compared."""
    base, target = folder / f"v{first}.safetensors", folder / f"v{last}.safetensors"
    patch, out = folder / "patch", folder / "out.safetensors"
    began, cpu = time.perf_counter(), time.process_time()
    stats = make_patch(base, target, patch)
    encode, encode_cpu = time.perf_counter() - began, time.process_time() - cpu
    assert isinstance(stats, PatchStats)
    began, cpu = time.perf_counter(), time.process_time()
    apply_chain(base, [patch], out)
    apply, apply_cpu = time.perf_counter() - began, time.process_time() - cpu
    size = stats.full_bytes
    return {
        "changed_fraction": stats.changed / stats.elements,
        "ratio": size / stats.patch_bytes,
        "patch_bytes": stats.patch_bytes,
        "bits_per_change": 8 * stats.patch_bytes / max(stats.changed, 1),
        "encode_MBps": size / encode / 1e6,
        "apply_MBps": size / apply / 1e6,
        "encode_MB_per_cpu_s": size / encode_cpu / 1e6,
        "apply_MB_per_cpu_s": size / apply_cpu / 1e6,
        "bit_exact": out.read_bytes() == target.read_bytes(),
    }


def train(rate: float, masters: str, versions: int, folder: Path, say: Any) -> list[dict[str, Any]]:
    """Versions 0 to ``versions`` in ``folder``; returns one row per lag, medians over the versions."""
    source = prepare_smollm2()
    policy = load_policy(source, "float32")
    spread(policy, masters, seed=1)
    policy.model.requires_grad_(True)
    codec, environment = Codec(source, RUN.environment), build_environment(RUN.environment)
    optimizer = adamw(policy, rate)
    save_weights(policy.model, folder / "v0.safetensors", "bfloat16")
    for version in range(1, versions + 1):
        began = time.perf_counter()
        policy.model.requires_grad_(False)
        batch = draw(policy, codec, environment, version)
        policy.model.requires_grad_(True)
        norm = step(policy, optimizer, batch, GRPO.grad_clip)
        save_weights(policy.model, folder / f"v{version}.safetensors", "bfloat16")
        took = time.perf_counter() - began
        say(f"lr {rate:g} {masters} v{version}: reward {batch[3]:.3f} norm {norm:.3f} {took:.1f} s")
    del policy, optimizer
    rows = []
    for lag in (lag for lag in LAGS if lag <= versions):
        ends = sorted({lag, (lag + versions) // 2, versions})
        found = [measure(folder, last - lag, last) for last in ends]
        row: dict[str, Any] = {"learning_rate": rate, "masters": masters, "lag": lag, "pairs": len(found)}
        for key in found[0]:
            values = [one[key] for one in found]
            row[key] = all(values) if key == "bit_exact" else statistics.median(values)
        row["ratio_least"] = min(one["ratio"] for one in found)
        rows.append(row)
        say(f"  lag {lag}: changed {row['changed_fraction']:.4%}, {row['ratio']:.0f} times smaller")
    return rows


def main() -> None:
    """Run the grid and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-7])
    parser.add_argument("--masters", nargs="+", default=["mid-run"], choices=("mid-run", "on-grid"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    rows: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    began = time.perf_counter()
    for masters in options.masters:
        for rate in options.rates:
            with tempfile.TemporaryDirectory(prefix="barnraise-patches-") as folder:
                rows += train(rate, masters, options.versions, Path(folder), say)
    head = next((r for r in rows if r["lag"] == 1 and r["learning_rate"] == options.rates[0]), rows[0])
    result = {
        "benchmark": "patches",
        "changed_fraction": head["changed_fraction"],
        "ratio": head["ratio"],
        "encode_MBps": head["encode_MBps"],
        "apply_MBps": head["apply_MBps"],
        "bit_exact": all(row["bit_exact"] for row in rows),
        "rows": rows,
        "conditions": {
            "model": "SmolLM2-135M-Instruct, dequantised from 4 bits (0.24 % of it exact zeros), "
            "published in bfloat16 (269 MB)",
            "optimiser": "AdamW, betas 0.9 0.99, decay 0.01, gradient clipped to 0.1, no warm-up",
            "batch": f"{GROUPS} prompts x {SAMPLES} completions, one step a version",
            "environment": f"{RUN.environment.name} {RUN.environment.settings}, chat format, "
            f"at most {RUN.sampling.max_new_tokens} tokens",
            "threads": options.threads,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_before": load,
            "load_after": os.getloadavg()[0],
            "torch": torch.__version__,
            "seconds": time.perf_counter() - began,
            "peak_rss_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        },
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for row in rows:
        print(
            f"lr {row['learning_rate']:g} {row['masters']} lag {row['lag']}: {row['changed_fraction']:.4%} "
            f"changed, 1/{row['ratio']:.0f}, make {row['encode_MBps']:.0f} MB/s, "
            f"apply {row['apply_MBps']:.0f} MB/s, exact: {row['bit_exact']}"
        )


if __name__ == "__main__":
    main()

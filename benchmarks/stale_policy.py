"""How often earlier weights, handed in as the current ones, are found: real GRPO steps.

    python -m benchmarks.stale_policy [--model demo] [--rates 2e-4 1e-5] [--tokens 16384] [--save FILE]

From one policy, AdamW steps of the GRPO loss are made as the learner makes them (the run's settings, one
step a version, completions drawn and rewarded). A cheat goes on with the version before the steps; its
claims are what its engine computes, in float32 or bfloat16. The verifier (float32) holds the version after
1, 2, 4 or 8 steps, and the earlier one. Counted is how many submissions of a size are refused by
``stale-weights`` alone and, of the smallest size, by which check first, under the default bounds and under
those that ``run init`` writes for the model. Submissions of the smallest size are cut from the pool of
completions, none used twice; larger ones are drawn from it at random, so they overlap. All their tokens are
looked at, where the verifier looks at ``STALE_TOKENS``. ``honest`` rows are the same with an engine that has
the newer version: they must never be refused.

SmolLM2's masters lie evenly between bfloat16 values ("mid-run", see ``benchmarks.patches``) and versions are
published in bfloat16; the demo publishes float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from barnraise.coordinator import presets
from barnraise.coordinator.calibration import measured_verify_spec
from barnraise.coordinator.checks import CheckFailure, default_verify_spec
from barnraise.coordinator.draw_checks import (
    Floats,
    check_logprobs,
    check_sampling,
    check_stale,
    is_suspicious,
)
from barnraise.coordinator.folder import Settings
from barnraise.kernels.generate import generate
from barnraise.kernels.grpo import group_advantages, policy_loss, token_weights
from barnraise.kernels.logprobs import token_logprobs
from barnraise.kernels.models import Policy, load_policy
from barnraise.kernels.prefill import prefill
from barnraise.kernels.sampling import margins
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import build_environment
from barnraise.protocol.spec import VerifySpec
from benchmarks.patches import spread
from benchmarks.proof_models import model_folder

STEPS = (1, 2, 4, 8)
SIZES = (256, 1024, 4096)
RESAMPLED = 100
BATCH = {"demo": (16, 8), "smollm2": (2, 4)}  # groups, samples of a step

Weights = dict[str, Tensor]


@dataclass
class Pool:
    """Completions, and what is claimed and computed of them, one float32 array per completion."""

    tokens: list[list[int]]
    claimed: list[Floats]
    margins: list[Floats]
    ours: list[Floats]
    earlier: list[Floats]
    rounded: list[Floats] | None


class Bench:
    """A model, its tasks, and weights that come and go."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.settings: Settings = presets.demo() if name == "demo" else presets.smollm2()
        task = self.settings.environment
        self.codec, self.environment = Codec(folder, task), build_environment(task)
        self.policies = {dtype: load_policy(folder, dtype) for dtype in ("float32", "bfloat16")}
        # Answers of one number have three tokens; a pool wants more of the same prompts.
        words = "Think step by step, then answer." if name == "smollm2" else task.system_prompt
        self._asking = Codec(folder, msgspec.structs.replace(task, system_prompt=words))
        longest = 32 if name == "smollm2" else self.settings.sampling.max_new_tokens
        self.sampling = msgspec.structs.replace(self.settings.sampling, max_new_tokens=longest)

    def prompt(self, number: int) -> list[int]:
        """A prompt for pools."""
        return self._asking.encode_prompt(self.environment.task(number, held_out=False).prompt)

    def put(self, weights: Weights, dtype: str = "float32") -> Policy:
        """The policy of ``dtype``, with these weights."""
        policy = self.policies[dtype]
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.copy_(weights[name])
        return policy

    def published(self, policy: Policy) -> Weights:
        """What other peers would get of these masters."""
        wanted = torch.float32 if self.settings.weights_dtype == "float32" else torch.bfloat16
        return {name: p.detach().to(wanted, copy=True) for name, p in policy.model.named_parameters()}


def train(bench: Bench, rate: float, say: Callable[[str], None]) -> dict[int, Weights]:
    """Published weights after 0 and each of ``STEPS`` steps at ``rate``."""
    grpo = msgspec.structs.replace(bench.settings.grpo, kl_coefficient=0.0, learning_rate=rate)
    policy = bench.policies["float32"]
    if bench.name == "smollm2":
        spread(policy, "mid-run", seed=1)
    weights = list(policy.model.parameters())
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": grpo.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(grpo.beta1, grpo.beta2))
    versions = {0: bench.published(policy)}
    for step in range(1, max(STEPS) + 1):
        prompts, tokens, old, advantages = _batch(bench, policy, step)
        policy.model.requires_grad_(True)
        hidden = prefill(policy, prompts, tokens, max_tokens=2**40, grad=True)
        targets = torch.tensor([token for row in tokens for token in row])
        new, entropy = token_logprobs(
            hidden, policy.head_weight, targets, 1.0, policy.head_bias, policy.softcap
        )
        weight = token_weights(torch.tensor([len(row) for row in tokens]), grpo.loss_aggregation)
        per_token = torch.tensor([a for a, row in zip(advantages, tokens, strict=True) for _ in row])
        loss, _ = policy_loss(new, old, per_token, entropy, weight, grpo, None)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(weights, grpo.grad_clip))
        optimizer.step()
        policy.model.requires_grad_(False)
        say(f"{bench.name} lr {rate:g} step {step}: gradient {norm:.3g}")
        if step in STEPS:
            versions[step] = bench.published(policy)
    return versions


@torch.no_grad()
def _batch(bench: Bench, policy: Policy, step: int) -> tuple[list[list[int]], list[list[int]], Tensor, Any]:
    """Prompts, completions, their log-probabilities [T], advantages per row; never all rewards equal."""
    groups, samples = BATCH[bench.name]
    for attempt in range(200):
        tasks = [
            bench.environment.task(step * 100_003 + attempt * 1009 + group, held_out=False)
            for group in range(groups)
            for _ in range(samples)
        ]
        prompts = [bench.codec.encode_prompt(task.prompt) for task in tasks]
        seeds = [step * 1_000_003 + attempt * 1009 + row for row in range(len(prompts))]
        done = generate(policy, prompts, seeds, bench.settings.sampling, bench.codec.eos_token)
        rewards = torch.tensor(
            [
                float(bench.environment.score(task, bench.codec.decode(one.tokens)))
                for task, one in zip(tasks, done, strict=True)
            ]
        ).reshape(groups, samples)
        advantages = group_advantages(rewards, bench.settings.grpo.normalise_std)
        if bool((advantages != 0).any()):
            old = torch.tensor([value for one in done for value in one.logprobs], dtype=torch.float32)
            return prompts, [one.tokens for one in done], old, advantages.reshape(-1).tolist()
    raise RuntimeError("no group with unequal rewards")


@torch.no_grad()
def drawn(bench: Bench, weights: Weights, dtype: str, tokens: int, first: int) -> tuple[Any, ...]:
    """Prompts, completions and seeds of at least ``tokens`` tokens by an engine with ``weights``."""
    policy = bench.put(weights, dtype)
    prompts: list[list[int]] = []
    done: list[Any] = []
    while sum(len(one.tokens) for one in done) < tokens:
        rows = range(first + len(done), first + len(done) + (128 if bench.name == "demo" else 16))
        batch = [bench.prompt(row) for row in rows]
        done += generate(policy, batch, rows, bench.sampling, bench.codec.eos_token)
        prompts += batch
    return prompts, done, list(range(first, first + len(done)))


@torch.no_grad()
def judged(bench: Bench, weights: Weights, drawn: tuple[Any, ...]) -> tuple[list[Floats], list[Floats]]:
    """Log-probabilities and margins per completion, under ``weights`` in float32."""
    prompts, done, seeds = drawn
    policy = bench.put(weights)
    found: tuple[list[Floats], list[Floats]] = ([], [])
    for start in range(0, len(done), 64):
        part = slice(start, start + 64)
        tokens = [one.tokens for one in done[part]]
        states = torch.cat(prefill(policy, prompts[part], tokens))
        rows = [seed for seed, own in zip(seeds[part], tokens, strict=True) for _ in own]
        margin, logprob = margins(
            policy.logits(states),
            torch.tensor([token for own in tokens for token in own]),
            rows,
            torch.cat([torch.arange(len(own)) for own in tokens]),
            bench.sampling.temperature,
        )
        lengths = [len(own) for own in tokens]
        found[0].extend(values.numpy() for values in torch.split(logprob, lengths))
        found[1].extend(values.numpy() for values in torch.split(margin, lengths))
    return found


def pool(bench: Bench, cheat: tuple[Any, ...], current: Weights, before: Weights) -> Pool:
    """Everything that the checks need."""
    ours, margin = judged(bench, current, cheat)
    rounded = None
    if bench.settings.weights_dtype == "float32":
        near = {name: value.bfloat16().float() for name, value in current.items()}
        rounded = judged(bench, near, cheat)[0]
    return Pool(
        tokens=[one.tokens for one in cheat[1]],
        claimed=[np.asarray(one.logprobs, dtype=np.float32) for one in cheat[1]],
        margins=margin,
        ours=ours,
        earlier=judged(bench, before, cheat)[0],
        rounded=rounded,
    )


def verdict(found: Pool, rows: Sequence[int], verify: VerifySpec, only_stale: bool) -> str:
    """The check that refuses these completions as one submission, or "all"."""

    def of(values: list[Floats]) -> list[Floats]:
        return [values[row] for row in rows]

    def rounded() -> Floats | None:
        return None if found.rounded is None else np.concatenate(of(found.rounded))

    claimed, ours = of(found.claimed), of(found.ours)
    try:
        if not only_stale:
            check_sampling(of(found.margins), verify)
            check_logprobs(claimed, ours, verify)
        if is_suspicious(claimed, ours):
            earlier = {0: np.concatenate(of(found.earlier))}
            check_stale(np.concatenate(claimed), np.concatenate(ours), earlier, verify, rounded)
    except CheckFailure as failure:
        return failure.check
    return "all"


def count(found: Pool, size: int, specs: dict[str, VerifySpec]) -> dict[str, Any]:
    """How many submissions of ``size`` tokens are refused, and by what."""
    random = Random(size)
    cut: list[list[int]] = [[]]
    order = list(range(len(found.tokens)))
    for row in order:
        cut[-1].append(row)
        if sum(len(found.tokens[r]) for r in cut[-1]) >= size:
            cut.append([])
    cut.pop()
    if size > min(SIZES) and len(cut) < RESAMPLED:
        cut = []
        for _ in range(RESAMPLED):
            random.shuffle(order)
            rows, held = [], 0
            for row in order:
                rows.append(row)
                held += len(found.tokens[row])
                if held >= size:
                    break
            cut.append(rows)
    result: dict[str, Any] = {"tokens": size, "submissions": len(cut)}
    result["stale"] = sum(verdict(found, rows, specs["default"], True) != "all" for rows in cut)
    for name, verify in specs.items() if size == min(SIZES) else ():
        result[name] = dict(Counter(verdict(found, rows, verify, False) for rows in cut))
    return result


def measure(
    bench: Bench, rate: float, tokens: int, honest: int, specs: dict[str, VerifySpec], say: Any
) -> Iterator[dict[str, Any]]:
    """One row per steps, engine and kind."""
    versions = train(bench, rate, say)
    cheats = {dtype: drawn(bench, versions[0], dtype, tokens, 0) for dtype in ("float32", "bfloat16")}
    for steps in STEPS:
        for dtype, cheat in cheats.items():
            plans = [("stale", cheat)]
            if honest:
                plans.append(("honest", drawn(bench, versions[steps], dtype, honest, 10**6)))
            for kind, work in plans:
                found = pool(bench, work, versions[steps], versions[0])
                shift = np.concatenate(found.earlier) - np.concatenate(found.ours)
                error = np.concatenate(found.claimed) - np.concatenate(found.ours)
                row = {
                    "model": bench.name,
                    "rate": rate,
                    "steps": steps,
                    "engine": dtype,
                    "kind": kind,
                    "step_rms": float(np.sqrt(np.mean(shift**2))),
                    "error_rms": float(np.sqrt(np.mean(error**2))),
                    "sizes": [
                        count(found, size, specs)
                        for size in (SIZES if kind == "stale" else SIZES[:1])
                        if sum(map(len, found.tokens)) >= size * (1 if size == min(SIZES) else 1.25)
                    ],
                }
                say(json.dumps(row))
                yield row


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo", choices=tuple(BATCH))
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 1e-5])
    parser.add_argument("--tokens", type=int, default=16_384, help="of the cheat's pool")
    parser.add_argument("--honest", type=int, default=16_384, help="of each honest pool; 0: none")
    parser.add_argument("--folder", type=Path, help="start from this folder's weights")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, help="add to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    began = time.monotonic()
    rows: list[dict[str, Any]] = []

    def save() -> dict[str, Any]:
        report: dict[str, Any] = {"rows": []}
        if options.save and options.save.is_file():
            report = json.loads(options.save.read_text(encoding="utf-8"))
        new = {_key(row) for row in rows}
        report = {
            "benchmark": "stale_policy",
            "torch": torch.__version__,
            "machine": platform.machine(),
            "load": os.getloadavg()[0],
            "seconds": round(time.monotonic() - began),
            "rows": [row for row in report["rows"] if _key(row) not in new] + rows,
        }
        if options.save:
            options.save.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return report

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or model_folder(options.model, Path(scratch))
        run = presets.demo() if options.model == "demo" else presets.smollm2()
        own, _ = measured_verify_spec(folder, run.environment, run.sampling, run.compute_dtype)
        specs = {"default": default_verify_spec(), "own": own}
        for rate in options.rates:
            bench = Bench(options.model, folder)  # the float32 masters begin anew
            for row in measure(bench, rate, options.tokens, options.honest, specs, say):
                rows.append(row)
                save()  # a run that is cut short keeps what it has
    if options.json:
        print(json.dumps(save(), indent=1))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "rate", "steps", "engine", "kind"))


if __name__ == "__main__":
    main()

"""How far honest draws and log-probabilities are apart: what the bounds in ``VerifySpec`` rest on.

    python -m benchmarks.calibrate_sampling [--models demo smollm2 llama qwen3 gemma3] [--rows 16]
        [--tokens 48] [--temperatures 1.0 0.6] [--json] [--save FILE]

Engines generate (float32 and bfloat16, key-value cache, batches); the same tokens are also run through
other ways to compute (prefill, single rows, eager attention, two threads), each taken as the engine of
its own logits. For every pair of an engine's logits p and a verifier's logits q of a position, nothing is
drawn at random: the distribution of a drawn token's log-probability error is p's own, and that of its
margin has a closed form. With p's softmax P, q's softmax Q and r = log P - log Q,

    Pr(margin > x) = 1 - sum_a P_a / sum_j max(P_j, Q_j exp(r_a - x))

(every other token's noise must stay below what makes it win in p, or win by x in q). Of both, over all
positions of a pair, ``fit`` makes the tightest sub-gamma bound whose scale is not below that of an
exponential through the largest value seen; the default is the worst pair's, times ``SAFETY``.
The likeliest ``CANDIDATES`` tokens are taken one by one, all others as one.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.draw_checks import sum_limit, token_limit
from barnraise.kernels.generate import generate
from barnraise.kernels.models import Policy
from barnraise.kernels.prefill import prefill
from barnraise.protocol.spec import SamplingSpec
from benchmarks.proof_models import VOCABULARY, load, model_folder

MODELS = ("demo", "smollm2", "llama", "qwen3", "gemma3")
SAFETY = 1.5
CANDIDATES = 2048
SEEN = 0.05  # draws over all positions that reach what counts as the largest value
SURPRISE = math.log(2048 / 1e-7)  # the token limit of a submission of 2048 tokens is what a fit makes small
MARGINS = torch.cat([torch.zeros(1), torch.logspace(-4, 0.7, 60)]).double()

States = tuple[Policy, Tensor]


class Sample:
    """One quantity x >= 0 at many positions, as distributions: E exp(l x) for any l, mean, largest."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []  # [N, K] nats of logits
        self.weights: list[Tensor] = []  # [N, K], of a row 1 together

    def add(self, values: Tensor, weights: Tensor) -> None:
        self.values.append(values)
        self.weights.append(weights)

    def fit(self) -> dict[str, float]:
        """``mean``, ``variance``, ``scale`` of the bound, and what it was made of."""
        values = torch.cat(self.values).flatten()
        weights = torch.cat(self.weights).flatten()
        count = float(weights.sum())
        weights = weights / count
        mean = float((values * weights).sum())
        order = values.argsort(descending=True)
        reached = int((weights[order].cumsum(0) * count < SEEN).sum())
        largest = float(values[order[min(reached, len(order) - 1)]])
        least = max(largest / math.log(count / SEEN), 1e-7)
        best: dict[str, float] | None = None
        for scale in (least * 1.25**step for step in range(8)):
            variance = 0.0
            for share in torch.linspace(0.02, 0.95, 20).tolist():
                rate = share / scale
                log_moment = float((weights * torch.exp(rate * values)).sum().log())
                variance = max(variance, 2 * (1 - share) * (log_moment - rate * mean) / rate**2)
            limit = mean + math.sqrt(2 * variance * SURPRISE) + scale * SURPRISE
            if best is None or limit < best["limit"]:
                best = {"limit": limit, "mean": mean, "variance": variance, "scale": scale}
        assert best is not None
        return best | {"largest": largest, "rms": math.sqrt(float((values**2 * weights).sum()))}


def measure(engine: States, verifier: States, temperature: float) -> dict[str, Any]:
    """Fits of margin and |log-probability error|, in nats of logits, and the bias in nats."""
    margins, errors = Sample(), Sample()
    bias, flips, count = 0.0, 0.0, 0
    for mine, theirs in zip(engine[1].split(64), verifier[1].split(64), strict=True):
        p, q = _candidates(
            (engine[0].logits(mine) / temperature).double().log_softmax(-1),
            (verifier[0].logits(theirs) / temperature).double().log_softmax(-1),
        )
        ratio = p - q
        errors.add(ratio.abs() * temperature, p.exp())
        bias += float((p.exp() * ratio).sum())
        tail = torch.stack([_margin_tail(p, q, float(x)) for x in MARGINS], dim=1)
        flips += float(tail[:, 0].sum())
        # Mass between two rungs is taken to lie at the upper one.
        mass = torch.cat([1 - tail[:, :1], tail[:, :-1] - tail[:, 1:]], dim=1).clamp(min=0.0)
        margins.add((MARGINS * temperature).expand_as(mass), mass)
        count += len(p)
    return {
        "tokens": count,
        "other_draw": flips / count,
        "draws": margins.fit(),
        "logprobs": errors.fit(),
        "bias": bias / count,
    }


def _candidates(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens by q, and the rest as one more."""
    if p.shape[1] <= CANDIDATES:
        return p, q
    order = q.argsort(dim=-1, descending=True)
    chosen, rest = order[:, :CANDIDATES], order[:, CANDIDATES:]
    return tuple(  # type: ignore[return-value]
        torch.cat([x.gather(1, chosen), x.gather(1, rest).logsumexp(-1, keepdim=True)], dim=1) for x in (p, q)
    )


def _margin_tail(p: Tensor, q: Tensor, x: float) -> Tensor:
    """Pr(margin > x) of each row, by the closed form above: sort by r, then prefix sums."""
    ratio, order = (p - q).sort(dim=-1)
    mass_p, mass_q = p.gather(1, order).exp(), q.gather(1, order).exp()
    below_q = torch.cat([torch.zeros_like(mass_q[:, :1]), mass_q.cumsum(-1)], dim=1)
    below_p = torch.cat([torch.zeros_like(mass_p[:, :1]), mass_p.cumsum(-1)], dim=1)
    # P_j >= Q_j exp(r_a - x) exactly where r_j >= r_a - x.
    first = torch.searchsorted(ratio, ratio - x)
    total = below_p[:, -1:] - below_p.gather(1, first) + below_q.gather(1, first) * torch.exp(ratio - x)
    return (1 - (mass_p / total).sum(-1)).clamp(0.0, 1.0)


def ways(
    name: str, folder: Path, rows: int, tokens: int, temperature: float
) -> Iterator[tuple[str, States, States]]:
    """Pairs of an engine's states and a verifier's, of the same tokens, with a name."""
    policies = {dtype: load(folder, dtype) for dtype in ("float32", "bfloat16")}
    random = Random(0)
    prompts = [[random.randrange(3, policies["float32"].vocabulary) for _ in range(7)] for _ in range(rows)]
    if name in ("demo", "smollm2"):
        prompts = _prompts(folder, rows, name)
    eos = policies["float32"].config.eos_token_id or 0
    sampling = SamplingSpec(temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=tokens)
    for dtype, policy in policies.items():
        done = generate(policy, prompts, range(rows), sampling, eos, max_batch=rows)
        chosen = [completion.tokens for completion in done]
        decoded = (policy, torch.cat([completion.states for completion in done]))
        short = {other: (it, torch.cat(prefill(it, prompts, chosen))) for other, it in policies.items()}
        for other, states in short.items():
            yield f"{dtype} decode, {other} prefill", decoded, states
        if dtype == "float32":
            yield "float32 prefill, bfloat16 prefill", short["float32"], short["bfloat16"]
            if name == "smollm2":
                continue  # slow here
        single = (policy, torch.cat(prefill(policy, prompts, chosen, max_tokens=1)))
        yield f"{dtype} single rows, float32 prefill", single, short["float32"]
        torch.set_num_threads(2)
        two = (policy, torch.cat(prefill(policy, prompts, chosen)))
        torch.set_num_threads(1)
        yield f"{dtype} two threads, float32 prefill", two, short["float32"]
        eager = load(folder, dtype, "eager")
        slow = (eager, torch.cat(prefill(eager, prompts, chosen)))
        yield f"{dtype} eager, float32 prefill", slow, short["float32"]
        yield f"{dtype} decode, {dtype} eager", decoded, slow


def _prompts(folder: Path, rows: int, preset: str) -> list[list[int]]:
    """Prompts of the preset's environment; text long enough to be worth proving."""
    from msgspec import structs

    from barnraise.coordinator import presets
    from barnraise.kernels.tokens import Codec
    from barnraise.protocol.environments import build_environment

    settings = presets.demo() if preset == "demo" else presets.smollm2()
    spec = settings.environment
    if preset == "smollm2":
        spec = structs.replace(spec, system_prompt="Think step by step, then answer.")
    environment, codec = build_environment(spec), Codec(folder, spec)
    return [list(codec.encode_prompt(environment.task(row, held_out=False).prompt)) for row in range(rows)]


def proposal(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The bounds: of every constant the worst pair's, times ``SAFETY`` (the variance twice)."""
    bounds: dict[str, Any] = {}
    for quantity in ("draws", "logprobs"):
        fits = [result[quantity] for result in results]
        bounds[quantity] = {
            "mean": SAFETY * max(fit["mean"] * _weight(r) for fit, r in zip(fits, results, strict=True)),
            "variance": SAFETY**2
            * max(fit["variance"] * _weight(r) for fit, r in zip(fits, results, strict=True)),
            "scale": SAFETY * max(fit["scale"] for fit in fits),
        }
    return bounds


def _weight(result: dict[str, Any]) -> float:
    """Below temperature 1 a limit lets mean and variance grow; the constant itself need not hold that."""
    return min(1.0, float(result["temperature"]))


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.6])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    started = time.monotonic()
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            folder = model_folder(name, Path(scratch))
            for temperature in options.temperatures:
                for pair, engine, verifier in ways(name, folder, options.rows, options.tokens, temperature):
                    result = {"model": name, "temperature": temperature, "pair": pair}
                    result |= measure(engine, verifier, temperature)
                    results.append(result)
                    print(_line(result), file=sys.stderr, flush=True)
    verify = default_verify_spec()
    report = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - started),
        "safety": SAFETY,
        "random_vocabulary": VOCABULARY,
        "proposal": proposal(results),
        "limits": {
            str(tokens): {
                "draw_token": token_limit(verify.draws, tokens, verify.false_alarm, 1.0),
                "draw_mean": sum_limit(verify.draws, tokens, verify.false_alarm, 1.0) / tokens,
                "logprob_token": token_limit(verify.logprobs, tokens, verify.false_alarm, 1.0),
                "logprob_mean": sum_limit(verify.logprobs, tokens, verify.false_alarm, 1.0) / tokens,
            }
            for tokens in (64, 512, 2048, 8192)
        },
        "pairs": results,
    }
    text = json.dumps(_rounded(report), indent=1)
    if options.save:
        options.save.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
    else:
        print(json.dumps(_rounded(report["proposal"]), indent=1))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _line(result: dict[str, Any]) -> str:
    draws, logprobs = result["draws"], result["logprobs"]
    return (
        f"{result['model']:8} T={result['temperature']:<4} {result['pair']:38} n={result['tokens']:<6} "
        f"other draw {result['other_draw']:.2e}  margin {draws['mean']:.1e} v {draws['variance']:.1e} "
        f"b {draws['scale']:.1e} max {draws['largest']:.2f}  error {logprobs['mean']:.1e} "
        f"v {logprobs['variance']:.1e} b {logprobs['scale']:.1e} max {logprobs['largest']:.2f}  "
        f"bias {result['bias']:.1e} of {logprobs['rms']:.1e}^2"
    )


if __name__ == "__main__":
    main()

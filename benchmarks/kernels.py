"""Our kernels against torch.compile and the plain reference: time, part of the roofline, memory.

    python -m benchmarks.kernels [--json] [--quick] [--threads 1]

Without a GPU it says "no GPU: not measured", measures the torch reference on the CPU in small
shapes, and gives for the large shapes what memory each way must hold, by arithmetic.

On a GPU, per shape and in bfloat16:

- ``logprobs``: log-probability and entropy, forward, and forward with backward. Ways: ``plain``
  (whole logits, ``log_softmax``), ``compiled`` (the same by ``torch.compile``), ``reference``
  (``kernels/logprobs.py``, chunks) and ``triton``. ``speedup_over_*`` are ratios of times in this run,
  ``memory_saved`` is 1 - (peak of triton / peak of plain). ``roofline`` is the part of this GPU's
  measured speed at one large bfloat16 product that the useful products reach: one forward, two
  backward, whoever computes more than that (triton makes the logits again) has it held against it.
- ``draw``: one token per row, noise included; ``roofline`` is the part of the measured bandwidth
  that reading the logits once reaches. The noise itself is integer arithmetic, and bounds it too.
- ``agrees``: whether Triton's draws equal the CPU reference's to the bit, and the largest error of its
  log-probabilities against float64.

A way that runs out of memory is reported as such, the others without it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from barnraise.kernels import logprobs, sampling
from barnraise.kernels.checked_triton import fused_logprobs, fused_sampling

NO_GPU = "no GPU: not measured"


@dataclass(frozen=True)
class Shape:
    """Tokens, width and vocabulary of one call."""

    name: str
    tokens: int
    width: int
    vocab: int


LARGE = (
    Shape("SmolLM2-135M", 16_384, 576, 49_152),
    Shape("Qwen3-0.6B", 16_384, 1_024, 151_936),
    Shape("Qwen3-8B", 16_384, 4_096, 151_936),
    Shape("Gemma3-4B", 16_384, 2_560, 262_144),
)
SMALL = (Shape("tiny", 256, 128, 4_096), Shape("SmolLM2's head", 128, 576, 49_152))
ROWS = (1, 64, 512)  # of a draw

Way = Callable[..., tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What a trainer writes first: whole logits."""
    every = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(dim=-1)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The torch reference, which a GPU with Triton would not take by itself."""
    elements = logprobs.CHUNK_ELEMENTS_CUDA if hidden.is_cuda else logprobs.CHUNK_ELEMENTS
    return logprobs.token_logprobs(hidden, weight, targets, chunk=max(1, elements // len(weight)))


def memory(shape: Shape) -> dict[str, float]:
    """What each way holds besides states, head and their bfloat16 gradients, MiB; by arithmetic.

    ``plain``: the logits in bfloat16 and float32, their logarithms and exponentials and, backward, the
    gradient in float32 twice and in bfloat16. ``reference``: two float32 matrices of one chunk, one of
    them in bfloat16 too, and the head's gradient in float32. ``triton``: one slice of gradients in
    bfloat16 and the states' gradient in float32, with the slice's part of it in bfloat16.
    """
    from_chunk = min(shape.tokens * shape.vocab, logprobs.CHUNK_ELEMENTS_CUDA)
    columns = max(128, 2**26 // shape.tokens // 128 * 128)
    held = {
        "plain": shape.tokens * shape.vocab * (2 + 4 + 4 + 4 + 4 + 4 + 2),
        "reference": from_chunk * (4 + 4 + 2) + shape.vocab * shape.width * (4 + 2),
        "triton": shape.tokens * (min(columns, shape.vocab) * 2 + shape.width * (4 + 2)),
    }
    found = {name: round(size / 2**20, 1) for name, size in held.items()}
    return {**found, "saved": round(1 - held["triton"] / held["plain"], 4)}


def seconds(call: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median time of ``repeat`` calls after two that do not count (they compile)."""
    times = []
    for number in range(repeat + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def roofs(device: torch.device) -> tuple[float, float]:
    """This GPU's measured speed at a bfloat16 product, FLOP/s, and its bandwidth, byte/s."""
    size = 8192
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product = seconds(lambda: left @ left, device, 10)
    wide = torch.empty(2**28, device=device, dtype=torch.float32)
    copied = seconds(lambda: wide.mul_(1.0), device, 10)  # read and written
    return 2 * size**3 / product, 2 * wide.numel() * 4 / copied


def of_logprobs(shape: Shape, ways: dict[str, Way], device: torch.device, repeat: int) -> dict[str, Any]:
    """Seconds and peak memory of each way, forward and with backward."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.width, generator=generator, device=device).to(dtype)
    weight = torch.randn(shape.vocab, shape.width, generator=generator, device=device)
    weight = (weight * shape.width**-0.5).to(dtype)
    targets = torch.randint(shape.vocab, (shape.tokens,), generator=generator, device=device)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    found: dict[str, Any] = {}
    for name, way in ways.items():

        def forward(way: Way = way) -> None:
            with torch.no_grad():
                way(*leaves, targets)

        def both(way: Way = way) -> None:
            chosen, entropy = way(*leaves, targets)
            (chosen.sum() + entropy.sum()).backward()
            leaves[0].grad = leaves[1].grad = None

        try:
            if device.type == "cuda":
                both()
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                both()
                peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
            timed = {
                "forward_s": seconds(forward, device, repeat),
                "both_s": seconds(both, device, repeat),
            }
        except torch.OutOfMemoryError:
            found[name] = "out of memory"
        else:
            found[name] = timed | ({"peak_mib": round(peak, 1)} if device.type == "cuda" else {})
        leaves[0].grad = leaves[1].grad = None
        gc.collect()
    return found


def judged(found: dict[str, Any], shape: Shape, flops: float) -> dict[str, float]:
    """Ratios within one run of Triton's row."""
    ours = found["triton"]
    if not isinstance(ours, dict):
        return {}
    useful = 2 * shape.tokens * shape.width * shape.vocab
    result = {
        "roofline_forward": useful / ours["forward_s"] / flops,
        "roofline": 3 * useful / ours["both_s"] / flops,
    }
    for name in ("plain", "compiled", "reference"):
        if isinstance(other := found.get(name), dict):
            result[f"speedup_over_{name}"] = other["both_s"] / ours["both_s"]
            result[f"speedup_over_{name}_forward"] = other["forward_s"] / ours["forward_s"]
            if name == "plain":
                result["memory_saved"] = 1 - ours["peak_mib"] / other["peak_mib"]
    return {name: round(value, 4) for name, value in result.items()}


def of_draws(
    rows: int, vocab: int, device: torch.device, repeat: int, bandwidth: float = 0.0
) -> dict[str, Any]:
    """Seconds of a draw, by torch and by Triton, with all tokens and with the 50 likeliest."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = (3 * torch.randn(rows, vocab, generator=generator, device=device)).to(dtype)
    seeds, places = list(range(rows)), torch.arange(rows, device=device)
    found: dict[str, Any] = {"rows": rows, "vocab": vocab}
    fused = fused_sampling(device) if device.type == "cuda" else None
    for name, top_k in (("all", 0), ("top_50", 50)):
        if fused is not None:
            made = fused[1]
            found[f"triton_{name}_s"] = seconds(
                lambda k=top_k: made(logits, seeds, places, 0.8, k),  # noqa: B023
                device,
                repeat,
            )
        with without_triton():
            found[f"reference_{name}_s"] = seconds(
                lambda k=top_k: sampling.draw(logits, seeds, places, 0.8, k), device, repeat
            )
        if fused is not None:
            found[f"speedup_{name}"] = round(found[f"reference_{name}_s"] / found[f"triton_{name}_s"], 2)
    if fused is not None and bandwidth:
        read = logits.numel() * logits.element_size()
        found["roofline"] = round(read / found["triton_all_s"] / bandwidth, 4)
    return found


@contextlib.contextmanager
def without_triton() -> Any:
    """The reference is asked for itself, also where it would hand over."""
    kept = sampling.fused_sampling
    sampling.fused_sampling = lambda device: None  # type: ignore[assignment]
    try:
        yield
    finally:
        sampling.fused_sampling = kept


def agreement(device: torch.device) -> dict[str, Any]:
    """Triton's draws against the CPU reference's, and its log-probabilities against float64."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 151_936, generator=generator)
    seeds, places = [7 * row for row in range(64)], torch.arange(64)
    fused, alike = fused_sampling(device), fused_logprobs(device)
    if fused is None or alike is None:
        return {"kernels": "left out: they did not agree with the reference, or triton is missing"}
    tokens, _ = fused[1](logits.to(device), seeds, places.to(device), 0.8)
    hidden = torch.randn(200, 512, generator=generator).bfloat16()
    weight = (torch.randn(20_000, 512, generator=generator) * 512**-0.5).bfloat16()
    targets = torch.randint(20_000, (200,), generator=generator)
    exact = logprobs.token_logprobs(hidden.double(), weight.double(), targets)[0]
    ours, _ = alike(hidden.to(device), weight.to(device), targets.to(device))
    return {
        "draws_equal": bool(torch.equal(tokens.cpu(), sampling.draw(logits, seeds, places, 0.8)[0])),
        "logprob_error": float((ours.cpu().double() - exact).abs().max()),
    }


def report(quick: bool) -> dict[str, Any]:
    """Everything that this machine can show."""
    conditions = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU,
    }
    analytic = [asdict(shape) | {"mib": memory(shape)} for shape in LARGE]
    result: dict[str, Any] = {"conditions": conditions, "memory": analytic}
    if not torch.cuda.is_available():
        cpu, repeat = torch.device("cpu"), 1 if quick else 5
        ways: dict[str, Way] = {"plain": plain, "reference": chunked}
        shapes = SMALL[:1] if quick else SMALL
        result["gpu"] = NO_GPU
        result["cpu_logprobs"] = [asdict(shape) | of_logprobs(shape, ways, cpu, repeat) for shape in shapes]
        result["cpu_draws"] = [of_draws(rows, 49_152, cpu, repeat) for rows in ((1,) if quick else (1, 64))]
        return result
    device, repeat = torch.device("cuda", torch.cuda.current_device()), 3 if quick else 15
    flops, bandwidth = roofs(device)
    result["roofs"] = {"tflops": round(flops / 1e12, 1), "gb_per_s": round(bandwidth / 1e9, 1)}
    result["agrees"] = agreement(device)
    ways = {"plain": plain, "compiled": torch.compile(plain), "reference": chunked}
    fused = fused_logprobs(device)
    if fused is not None:
        ways["triton"] = fused
    rows = []
    for shape in LARGE[:2] if quick else LARGE:
        found = of_logprobs(shape, ways, device, repeat)
        rows.append(asdict(shape) | found | (judged(found, shape, flops) if fused is not None else {}))
    result["logprobs"] = rows
    result["draws"] = [of_draws(count, 151_936, device, repeat, bandwidth) for count in ROWS]
    return result


def printed(found: dict[str, Any]) -> None:
    """The report for people."""
    print(", ".join(f"{name} {value}" for name, value in found["conditions"].items()))
    print("besides states, head and their gradients, MiB (by arithmetic, bfloat16):")
    for row in found["memory"]:
        held = ", ".join(f"{name} {value:,}" for name, value in row["mib"].items())
        print(f"  {row['name']:14} {row['tokens']:,} x {row['width']:,} x {row['vocab']:,}: {held}")
    for part in ("roofs", "agrees", "logprobs", "draws", "gpu", "cpu_logprobs", "cpu_draws"):
        value = found.get(part)
        for row in value if isinstance(value, list) else [value] if value is not None else []:
            print(f"{part}: {row if isinstance(row, str) else json.dumps(row)}")


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="few and small shapes")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = report(options.quick)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        printed(found)


if __name__ == "__main__":
    main()

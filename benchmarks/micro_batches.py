"""What micro-batches cost and save: how far their steps lie from whole ones, and the memory of each.

    python -m benchmarks.micro_batches [--json] [--steps 24] [--hidden 256]

A block of a random Llama is trained for ``--steps`` AdamW steps of eight sequences, whole and in
micro-batches of 4, 2 and 1, in float32 and in bfloat16 autocast, one thread. An auditor that
takes whole batches in float32 compares (``barnraise.kernels.block_audit.SegmentError``; the
limits in use are those of ``BlockTolerance``). Memory: the peak resident size of a process of
its own that makes two steps, above what it had before them, beside the estimate by which a
node chooses (``barnraise.node.sizing``).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

import psutil
import torch

from barnraise.kernels.block_audit import compare
from barnraise.kernels.block_training import BlockState, BlockTrainer, Recipe, start_state
from barnraise.kernels.models import build_model
from barnraise.kernels.mot import first_block, make_cut, scaffold_config, split_scaffold
from barnraise.node.sizing import block_bytes

BATCH, LENGTH, VOCABULARY, LAYERS = 8, 256, 4096, 8
MICRO = (8, 4, 2, 1)


def make_trainer(hidden: int, micro: int, dtype: torch.dtype) -> tuple[BlockTrainer, BlockState]:
    """A trainer at the start of its unit."""
    config, cut = make_config(hidden), make_cut(LAYERS, 2, 4)
    frame = split_scaffold(build_model(scaffold_config(config, cut), torch.float32, seed=1), cut)
    start = start_state(first_block(config, cut, frame, 0, "grown", 2))
    recipe = Recipe(
        learning_rate=1e-3,
        warmup_steps=8,
        settle_steps=4,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.01,
        clip=1.0,
        batch=BATCH,
    )
    return BlockTrainer(config, cut, frame, 0, recipe, start, 0, compute_dtype=dtype, micro=micro), start


def make_config(hidden: int) -> Any:
    """A Llama of ``LAYERS`` layers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def batches(steps: int) -> list[torch.Tensor]:
    """Sequences with something to learn: a noisy successor of each token."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(steps):
        first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
        jumps = torch.randint(1, 4, (BATCH, LENGTH - 1), generator=generator)
        made.append(torch.cat([first, first + jumps.cumsum(1)], dim=1) % VOCABULARY)
    return made


def errors(hidden: int, steps: int) -> dict[str, dict[str, float]]:
    """Each kind's distance from the auditor's whole float32 steps."""
    data = batches(steps)
    ours, start = make_trainer(hidden, 0, torch.float32)
    ours.train(data)
    found = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        for micro in MICRO:
            theirs, _ = make_trainer(hidden, micro, dtype)
            theirs.train(data)
            error = compare(start, theirs.state(), ours.state())
            found[f"{name} in {micro}s"] = {
                key: getattr(error, key) for key in ("update", "first", "second", "worst_tensor")
            }
    return found


def peak(hidden: int, micro: int) -> int:
    """Bytes that two steps take at most in this process above what was there before."""
    trainer, _ = make_trainer(hidden, micro, torch.float32)
    before = psutil.Process().memory_info().rss
    trainer.train(batches(2))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak is not None:
        print(peak(options.hidden, options.peak))
        return
    each = block_bytes(make_config(options.hidden), make_cut(LAYERS, 2, 4), 0, LENGTH)
    memory = {}
    for micro in MICRO:
        argv = [sys.executable, "-m", "benchmarks.micro_batches", "--hidden", str(options.hidden)]
        out = subprocess.run([*argv, "--peak", str(micro)], check=True, capture_output=True, text=True)
        memory[micro] = {"measured": int(out.stdout), "estimate": micro * each}
    result = {"errors": errors(options.hidden, options.steps), "memory": memory, "torch": torch.__version__}
    if options.json:
        print(json.dumps(result))
        return
    for name, row in result["errors"].items():  # type: ignore[attr-defined]
        print(f"{name:15}", "  ".join(f"{key} {value:.2e}" for key, value in row.items()))
    for micro, row in memory.items():
        print(f"{micro} at once: {row['measured'] / 1e6:.0f} MB, estimate {row['estimate'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

"""How far honest machines' replays of a block segment lie apart, and how far lies do.

    python -m benchmarks.calibrate_blocks [--json] [--corpus DIR] [--out FILE] [--steps 32] [--every 8]

A unit of ``--steps`` AdamW steps is trained once for each kind of honest machine (one or two
threads, bfloat16 autocast, eager attention) and once for each cheat; the auditor, float32 on
one thread, replays every segment of ``--every`` steps from the committed state at its start
and compares the committed state at its end (``barnraise.kernels.block_audit.SegmentError``).
The defaults of ``BlockTolerance`` must lie above every honest row and below the cheats'.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from barnraise.kernels.block_audit import SegmentError, compare, replay, update_bound
from barnraise.kernels.block_training import BlockState, BlockTrainer, start_state
from barnraise.kernels.mot import Tensors, first_block, make_cut
from benchmarks.mot import python_docs
from benchmarks.mot_jobs import monolithic
from benchmarks.mot_world import World, batches, recipe, scaffold_of

SEED = 7


class Bench:
    """One block in its scaffold, and the data of its unit."""

    def __init__(self, world: World, steps: int, every: int) -> None:
        self.world, self.steps, self.every = world, steps, every
        self.cut = make_cut(world.layers, 2, 4)
        scaffold = monolithic(world, "scaffold", SEED, layers=4, steps=60)
        self.frame = scaffold_of(world, self.cut, scaffold.path)
        self.config = world.config()
        self.first = first_block(self.config, self.cut, self.frame, 0, "grown", SEED)
        self.neighbour = first_block(self.config, self.cut, self.frame, 1, "grown", SEED)
        self.data = batches(world, SEED, (0, 2), 0, steps)
        self.other = batches(world, SEED + 1, (0, 2), 0, steps)
        self.recipe = recipe(world, 10 * steps)
        self.auditor = self.trainer(start_state(self.first))

    def trainer(self, state: BlockState, **changes: Any) -> BlockTrainer:
        rule = dataclasses.replace(self.recipe, **changes.pop("recipe", {}))
        config = changes.pop("config", self.config)
        return BlockTrainer(config, self.cut, self.frame, 0, rule, state, 10 * self.steps, **changes)

    def unit(self, data: list[Tensor], **changes: Any) -> list[BlockState]:
        """The states that a node commits to: the start and the state after every segment."""
        worker = self.trainer(start_state(self.first), **changes)
        states = [start_state(self.first)]
        for at in range(0, self.steps, self.every):
            worker.train(data[at : at + self.every])
            states.append(worker.state())
        return states

    def audit(self, states: list[BlockState]) -> list[SegmentError]:
        """Every segment, replayed as the coordinator does it."""
        found = []
        for number, (start, claimed) in enumerate(itertools.pairwise(states)):
            at = number * self.every
            start = dataclasses.replace(start, step=at)
            found.append(
                compare(start, claimed, replay(self.auditor, start, self.data[at : at + self.every]))
            )
        return found


def honest(bench: Bench) -> dict[str, Callable[[], list[BlockState]]]:
    """Kinds of honest machine."""

    def threads(count: int) -> list[BlockState]:
        torch.set_num_threads(count)
        try:
            return bench.unit(bench.data)
        finally:
            torch.set_num_threads(1)

    def eager() -> list[BlockState]:
        config = bench.world.config()
        config._attn_implementation = "eager"
        return bench.unit(bench.data, config=config)

    return {
        "float32, one thread": lambda: threads(1),
        "float32, two threads": lambda: threads(2),
        "float32, eager attention": eager,
        "bfloat16 autocast": lambda: bench.unit(bench.data, compute_dtype=torch.bfloat16),
    }


def cheats(bench: Bench) -> dict[str, Callable[[], list[BlockState]]]:
    """Ways to save work, or to do harm."""

    def changed(change: Callable[[list[BlockState]], list[BlockState]]) -> list[BlockState]:
        return change(bench.unit(bench.data))

    def weights(state: BlockState, change: Callable[[str, Tensor], Tensor]) -> BlockState:
        return dataclasses.replace(state, weights={k: change(k, v) for k, v in state.weights.items()})

    def idle(states: list[BlockState]) -> list[BlockState]:
        return [states[0]] * len(states)

    def last(states: list[BlockState], change: Callable[[str, Tensor], Tensor]) -> list[BlockState]:
        return [*states[:-1], weights(states[-1], change)]

    def scaled(states: list[BlockState]) -> list[BlockState]:
        begin: Tensors = states[0].weights
        return [weights(state, lambda k, v: begin[k] + 2 * (v - begin[k])) for state in states]

    noisy = [
        torch.where(torch.rand(b.shape, generator=torch.Generator().manual_seed(i)) < 0.1, b.flip(1), b)
        for i, b in enumerate(bench.data)
    ]
    half = [b[: len(b) // 2] for b in bench.data]
    generator = torch.Generator().manual_seed(1)
    return {
        "no training at all": lambda: changed(idle),
        "random weights": lambda: changed(
            lambda s: last(s, lambda k, v: torch.randn(v.shape, generator=generator) * 0.02)
        ),
        "every second step": lambda: bench.unit([b for b in bench.data[::2] for _ in (0, 1)]),
        "half of every batch": lambda: bench.unit(half),
        "other data": lambda: bench.unit(bench.other),
        "a tenth of the tokens replaced": lambda: bench.unit(noisy),
        "learning rate + 20 %": lambda: bench.unit(
            bench.data, recipe={"learning_rate": 1.2 * bench.recipe.learning_rate}
        ),
        "a neighbour's block": lambda: changed(lambda s: last(s, lambda k, v: bench.neighbour[k])),
        "difference doubled": lambda: changed(scaled),
        "one matrix + 0.001": lambda: changed(
            lambda s: last(s, lambda k, v: v + 0.001 if k == "0.mlp.up_proj.weight" else v)
        ),
    }


def summary(errors: list[SegmentError]) -> dict[str, float]:
    """Largest value of each measure over the segments."""
    return {
        key: max(getattr(error, key) for error in errors)
        for key in ("update", "first", "second", "worst_tensor")
    } | {"median_update": sorted(error.update for error in errors)[len(errors) // 2]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--corpus", type=Path, help="a prepared corpus (default: the Python documentation)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--steps", type=int, default=32, help="steps of the unit")
    parser.add_argument("--every", type=int, default=8, help="steps of a segment")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="barnraise-blocks-") as scratch:
        corpus = arguments.corpus or python_docs(Path(scratch))
        bench = Bench(World(corpus=corpus, folder=Path(scratch)), arguments.steps, arguments.every)
        rows: dict[str, dict[str, Any]] = {"honest": {}, "cheats": {}}
        for kind, table in (("honest", honest(bench)), ("cheats", cheats(bench))):
            for name, make in table.items():
                rows[kind][name] = summary(bench.audit(make()))
                print(f"{kind:7} {name:32} {rows[kind][name]}", file=sys.stderr, flush=True)
        result = rows | {
            "update_bound": update_bound(bench.recipe, 10 * bench.steps, bench.steps, 0.5),
            "conditions": {
                "steps": arguments.steps,
                "every": arguments.every,
                "machine": platform.machine(),
                "model": {k: v for k, v in vars(bench.world).items() if k not in ("corpus", "folder")},
            },
        }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=None if arguments.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

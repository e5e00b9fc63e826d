"""What one liar's block unit can do to a round while its drawn segment is honest.

    python -m benchmarks.block_poison [--text FOLDER] [--attack-steps 150] [--case N] [--json]

A small byte model (width 64, 4 layers, 2 blocks) is taken from its scaffold through one round. In the next
the liar trains a unit of 64 steps honestly but for its last segment, which ends wherever gradient ascent
finds the most harm within ``update_bound`` (with ``ball``: and within 1.5 times the length of an honest
difference) while the loss that is checked stays 0.1 below its limit or less. ``known``: that text is the
held-out text, which is public; else it is any text, as where text is drawn for each unit. ``goal``: the
block's loss in its scaffold, or the recombined model's. Each row gives that loss (nats a byte, text that
nobody trained on) after the outer step over 1 to 8 contributors, honest and with the liar among them.
Eight minutes on one of two busy cores.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from barnraise.kernels.block_audit import update_bound
from barnraise.kernels.block_training import BlockTrainer, Recipe, next_token_loss, start_state
from barnraise.kernels.joint_training import JointSchedule, JointTrainer, evaluate
from barnraise.kernels.models import build_model
from barnraise.kernels.mot import (
    Tensors,
    block_parameters,
    find_layers,
    first_block,
    make_cut,
    recombine,
    scaffold_config,
    scaffolded,
    split_scaffold,
)
from barnraise.kernels.outer import outer_step, trimmed_mean

LENGTH, BATCH, STEPS, SCAFFOLD_STEPS = 64, 16, 64, 300
LIMIT = 0.1  # of the loss check
CEILING = 12.0  # nats: more harm than this is no worse
COUNTS = ((1, 0.0), (2, 0.0), (4, 0.0), (4, 0.25), (8, 0.0), (8, 0.25))
CASES = (("scaffold", True, False), ("scaffold", True, True), ("recombined", False, True))
RECIPE = Recipe(2e-3, 38, 6, 0.9, 0.95, 0.01, 1.0, BATCH)


@dataclass(frozen=True)
class Attack:
    """What a liar found: the weights, what its harm was, and what the check saw."""

    weights: Tensors
    harm: float
    seen: float


class Bench:
    """A block after its first round, its neighbour, and eight honest units of the next."""

    def __init__(self, text: bytes) -> None:
        rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        rows = rows[: len(rows) // LENGTH * LENGTH].view(-1, LENGTH)
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        self.test, self.held_out = list(rows[:256].split(32)), list(rows[256:320].split(32))
        self.pool, self.at = rows[320:], 0
        self.config: Any = Qwen3Config(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
        )
        self.cut = make_cut(4, 2, 2)
        scaffold = build_model(scaffold_config(self.config, self.cut), torch.float32, 1)
        schedule = JointSchedule(SCAFFOLD_STEPS, 3e-3, 0.1, 0.1, 0.01, 1.0)
        JointTrainer(scaffold, schedule).train(self.text(SCAFFOLD_STEPS))
        self.frame = split_scaffold(scaffold, self.cut)
        self.start, self.other = (self.trained(self._first(block), block, 0) for block in (0, 1))
        self.honest = [self.trained(self.start, 0, STEPS) for _ in range(8)]
        largest = max(float(value.abs().max()) for value in self.start.values())
        self.bound = update_bound(RECIPE, STEPS, STEPS, largest)
        self.length = length(minus(self.honest[0], self.start))

    def _first(self, block: int) -> Tensors:
        return first_block(self.config, self.cut, self.frame, block, "grown", 1)

    def text(self, batches: int) -> list[Tensor]:
        """The next batches: nobody reads the same text."""
        found = []
        for _ in range(batches):
            place = self.at % (len(self.pool) // BATCH)
            found.append(self.pool[place * BATCH : (place + 1) * BATCH])
            self.at += 1
        return found

    def trained(self, start: Tensors, block: int, before: int) -> Tensors:
        """A whole unit, honestly."""
        state = start_state(start)
        worker = BlockTrainer(self.config, self.cut, self.frame, block, RECIPE, state, before)
        worker.train(self.text(STEPS))
        return worker.state().weights

    def in_scaffold(self, weights: Tensors, text: list[Tensor]) -> float:
        return evaluate(scaffolded(self.config, self.cut, self.frame, 0, weights), text, torch.float32)

    def recombined(self, weights: Tensors, text: list[Tensor]) -> float:
        model = recombine(self.config, self.cut, self.frame.shared, [weights, self.other])
        return evaluate(model, text, torch.float32)

    def loss(self, goal: str, weights: Tensors) -> float:
        return (self.in_scaffold if goal == "scaffold" else self.recombined)(weights, self.test)

    def attack(self, goal: str, known: bool, ball: bool, steps: int) -> Attack | None:
        """The most harm that passes; None if nothing does."""
        model = scaffolded(self.config, self.cut, self.frame, 0, self.honest[0])
        live = block_parameters(model, self.cut, 0)
        whole = recombine(self.config, self.cut, self.frame.shared, [self.honest[0], self.other])
        named, prefix = dict(whole.named_parameters()), find_layers(whole)[0]
        twins = {key: named[f"{prefix}.{key}"] for key in live}
        adam = torch.optim.Adam(live.values(), lr=self.bound / (100 if ball else 30))
        checked = self.held_out if known else [*self.test, *self.held_out]
        before = self.in_scaffold(self.start, checked)
        best, weight = None, 1.0
        for step in range(steps):
            adam.zero_grad()
            batch = torch.cat(self.held_out)[torch.randperm(64)[:32]] if known else self.text(1)[0]
            cost = next_token_loss(model, batch)
            over = float(cost.detach()) - before - LIMIT / 2
            weight = min(max(weight * (math.exp(0.3 * over) if over > 0 else 0.97), 0.05), 1e3)
            (weight * cost).backward()  # type: ignore[no-untyped-call]
            target = model if goal == "scaffold" else whole
            whole.zero_grad()
            gain = next_token_loss(target, self.text(1)[0]).clamp(max=CEILING)
            (-gain).backward()  # type: ignore[no-untyped-call]
            if goal != "scaffold":
                for key, parameter in live.items():
                    assert parameter.grad is not None
                    parameter.grad += twins[key].grad
            torch.nn.utils.clip_grad_norm_(live.values(), 1.0)
            adam.step()
            self._keep_within(live, twins, 1.5 * self.length if ball else math.inf)
            if step % 10 == 9:
                weights = {key: value.detach().clone() for key, value in live.items()}
                seen = self.in_scaffold(weights, checked) - before
                harm = self.loss(goal, weights)
                if seen <= LIMIT and (best is None or harm > best.harm):
                    best = Attack(weights, harm, seen)
        return best

    @torch.no_grad()
    def _keep_within(
        self, live: dict[str, torch.nn.Parameter], twins: dict[str, torch.nn.Parameter], most: float
    ) -> None:
        delta = {key: (live[key] - self.start[key]).clamp(-self.bound, self.bound) for key in live}
        share = min(1.0, most / length(delta))
        for key, value in delta.items():
            live[key].copy_(self.start[key] + share * value)
            twins[key].copy_(live[key])

    def rounds(self, goal: str, weights: Tensors) -> dict[str, tuple[float, float]]:
        """Loss after the outer step, honest and poisoned, by contributors and trim."""
        found = {}
        for count, trim in COUNTS:
            honest = [minus(item, self.start) for item in self.honest[:count]]
            poisoned = [minus(weights, self.start), *honest[1:]]
            rate, momentum = (1.0, 0.0) if count == 1 else (0.7, 0.9)
            both = [
                outer_step(self.start, trimmed_mean(deltas, trim), None, rate, momentum)[0]
                for deltas in (honest, poisoned)
            ]
            name = f"{count}" + (f" trim {trim}" if trim else "")
            found[name] = (round(self.loss(goal, both[0]), 3), round(self.loss(goal, both[1]), 3))
        return found


def minus(a: Tensors, b: Tensors) -> Tensors:
    return {key: a[key] - b[key] for key in b}


def length(tensors: Tensors) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in tensors.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of .py")
    parser.add_argument("--attack-steps", type=int, default=150)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this row")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = sorted(options.text.glob("*.py"))[:120]
    bench = Bench(b"".join(path.read_bytes() for path in files))
    rows: list[dict[str, Any]] = []
    for goal, known, ball in CASES if options.case is None else CASES[options.case :][:1]:
        found = bench.attack(goal, known, ball, options.attack_steps)
        row: dict[str, Any] = {"goal": goal, "known": known, "ball": ball}
        if found is not None:
            row["seen"] = round(found.seen, 3)
            row["lengths"] = round(length(minus(found.weights, bench.start)) / bench.length, 2)
            row["rounds"] = bench.rounds(goal, found.weights)
        rows.append(row)
        if not options.json:
            print(row, flush=True)
    if options.json:
        print(json.dumps({"bound": round(bench.bound, 3), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Mixture of Training against training the whole model: the same text, the same held-out files.

    python -m benchmarks.mot [--quick] [--json] [--seeds 0 1 2] [--corpus DIR] [--out FILE] [--folder DIR]

Every row of the table is trained for real, one process and one thread a job, two jobs at a
time; ``--quick`` takes one seed, and fails where the expected shape does not come out.
``critical_path_s`` adds up what has to happen one after the other if every block
and every volunteer has a core of its own: the scaffold, the slowest block (each timed in its own
process, in processor time, so that other work on the machine does not count), the joint tune.
``train_flops`` leave the scaffold out, ``full_flops``
charge it whole. See docs/mot.md for what came out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from barnraise.coordinator.corpus_files import prepare
from barnraise.coordinator.corpus_sources import SOURCES, fetched
from barnraise.kernels.mot import make_cut
from benchmarks import mot_jobs as jobs
from benchmarks.mot_world import Done, World, corpus_of, perplexity


@dataclass(frozen=True)
class Plan:
    """How many steps everything gets."""

    scaffold_layers: int = 4
    scaffold: int = 200
    block: int = 256
    rounds: int = 4
    contributors: int = 2

    @property
    def short(self) -> int:
        return self.block // 8

    @property
    def long(self) -> int:
        return 3 * self.block // 8


@dataclass
class Row:
    """One way to a model, one seed."""

    ppl: float
    train_flops: float
    full_flops: float
    tokens: int
    critical_path_s: float


class Table:
    """Runs the jobs of one seed and collects its rows."""

    def __init__(self, world: World, plan: Plan, pool: ProcessPoolExecutor, seed: int) -> None:
        self.world, self.plan, self.pool, self.seed = world, plan, pool, seed
        self.rows: dict[str, Row] = {}
        self.notes: dict[str, Any] = {}

    def start(self, job: Callable[..., Done], name: str, **arguments: Any) -> Future[Done]:
        seed = arguments.pop("seed", self.seed)
        return self.pool.submit(jobs.kept, job, self.world, f"s{self.seed}-{name}", seed, **arguments)

    def add(self, name: str, ppl_of: float, scaffold: Done | None, stages: list[list[Done]]) -> Row:
        """``stages`` follow one another; the jobs of a stage run side by side."""
        flops = sum(job.train_flops for stage in stages for job in stage)
        path = sum(max(job.seconds for job in stage) for stage in stages)
        row = Row(
            ppl=perplexity(ppl_of),
            train_flops=flops,
            full_flops=flops + (scaffold.train_flops if scaffold else 0.0),
            tokens=sum(job.tokens for stage in stages for job in stage)
            + (scaffold.tokens if scaffold else 0),
            critical_path_s=path + (scaffold.seconds if scaffold else 0.0),
        )
        self.rows[name] = row
        print(
            f"seed {self.seed}  {name:44} ppl {row.ppl:8.2f}  path {row.critical_path_s:6.0f} s  "
            f"{row.full_flops / 1e12:6.2f} TFLOP",
            file=sys.stderr,
            flush=True,
        )
        return row

    def run(self, shared_scaffold: Done | None) -> Done:
        """All rows of this seed; returns its scaffold. ``shared_scaffold``: another seed's, to use again."""
        world, plan = self.world, self.plan
        two, four = (make_cut(world.layers, k, plan.scaffold_layers) for k in (2, 4))
        first = self.start(jobs.monolithic, "scaffold", layers=plan.scaffold_layers, steps=plan.scaffold)
        equal_tokens = self.start(jobs.monolithic, "mono", layers=world.layers, steps=plan.block)
        scaffold = first.result()
        self.add("aligner alone", scaffold.loss, scaffold, [])
        many = {"scaffold": scaffold.path, "steps": plan.block}
        blocks = {
            (k, init, data): [
                self.start(
                    jobs.block,
                    f"block-{k}-{init}-{data}-{number}",
                    cut=two if k == 2 else four,
                    number=number,
                    init=init,
                    data=data,
                    **many,
                )
                for number in range(k)
            ]
            for k, init, data in (
                (2, "grown", "disjoint"),
                (2, "random", "disjoint"),
                (4, "grown", "disjoint"),
                (2, "grown", "shared"),
            )
        }
        drawn = self.start(jobs.untrained_scaffold, "untrained", layers=plan.scaffold_layers)
        bare = [
            self.start(jobs.no_scaffold, f"bare-{number}", cut=two, number=number, **many)
            for number in range(2)
        ]
        many["scaffold"] = drawn.result().path
        without = [
            self.start(jobs.no_scaffold, f"without-{number}", cut=two, number=number, **many)
            for number in range(2)
        ]
        mono = equal_tokens.result()
        self.add("monolithic, equal tokens", mono.loss, None, [[mono]])
        grown = [job.result() for job in blocks[2, "grown", "disjoint"]]
        self.notes["block in scaffold"] = [perplexity(job.loss) for job in grown]
        long = self._adapted("K=2 grown", two, scaffold, grown, diagnose=True)
        self._controls(scaffold, grown, long, mono)
        for (k, init, data), pending in blocks.items():
            if (k, init, data) != (2, "grown", "disjoint"):
                done = [job.result() for job in pending]
                label = f"K={k} {init}{'' if data == 'disjoint' else ', shared data'}"
                self._adapted(label, two if k == 2 else four, scaffold, done)
        self._cold("no frozen slices, the scaffold's embedding and head", two, scaffold, bare)
        self._cold("no scaffold at all", two, drawn.result(), without)
        self._exchange(two, scaffold, grown)
        self._volunteers(two, scaffold)
        self._reuse(two, shared_scaffold or scaffold)
        return scaffold

    def _joint(
        self, label: str, cut: Any, scaffold: Done, blocks: list[Done], steps: int, **more: Any
    ) -> Future[Done]:
        return self.start(
            jobs.adapt,
            f"adapt-{label}-{steps}".replace(" ", "-").replace(",", ""),
            cut=cut,
            scaffold=scaffold.path,
            blocks=[block.path for block in blocks],
            steps=steps,
            rate=self.world.rate / 2,
            **more,
        )

    def _adapted(
        self, label: str, cut: Any, scaffold: Done, blocks: list[Done], diagnose: bool = False
    ) -> Done:
        """Cold, short and long adaptation of these blocks."""
        short = self._joint(label, cut, scaffold, blocks, self.plan.short)
        long = self._joint(label, cut, scaffold, blocks, self.plan.long, diagnose=diagnose)
        done = long.result()
        self.add(f"{label}, cold", done.extra["cold"], scaffold, [blocks])
        self.add(f"{label}, short joint tune", short.result().loss, scaffold, [blocks, [short.result()]])
        self.add(f"{label}, long joint tune", done.loss, scaffold, [blocks, [done]])
        if diagnose:
            self.notes["seams"] = {key: done.extra[key] for key in ("seams_cold", "seams_adapted")}
        return done

    def _cold(self, label: str, cut: Any, scaffold: Done, pending: list[Future[Done]]) -> None:
        blocks = [job.result() for job in pending]
        done = self._joint(label, cut, scaffold, blocks, 0).result()
        self.add(f"{label}, cold", done.loss, scaffold, [blocks])

    def _controls(self, scaffold: Done, blocks: list[Done], joint: Done, mono: Done) -> None:
        """Monolithic at equal compute and equal critical path, and growing the aligner end to end."""
        per_step, seconds = mono.train_flops / self.plan.block, mono.seconds / self.plan.block
        work = sum(block.train_flops for block in blocks) + joint.train_flops
        path = scaffold.seconds + max(block.seconds for block in blocks) + joint.seconds
        wanted = {
            "monolithic, equal compute": (work + scaffold.train_flops) / per_step,
            "monolithic, equal compute, a third of the aligner": (work + scaffold.train_flops / 3) / per_step,
            "monolithic, equal critical path": path / seconds,
        }
        running = {
            label: self.start(
                jobs.monolithic, f"control-{number}", layers=self.world.layers, steps=max(1, round(steps))
            )
            for number, (label, steps) in enumerate(wanted.items())
        }
        serial = self.start(
            jobs.monolithic,
            "serial",
            layers=self.world.layers,
            steps=max(1, round(work / per_step)),
            grown_from=scaffold.path,
            skip=self.plan.scaffold,
        )
        for label, job in running.items():
            self.add(label, job.result().loss, None, [[job.result()]])
        self.add(
            "aligner grown, trained end to end, equal compute",
            serial.result().loss,
            scaffold,
            [[serial.result()]],
        )

    def _exchange(self, cut: Any, scaffold: Done, blocks: list[Done]) -> None:
        steps = self.plan.long
        again = [
            self.start(
                jobs.block,
                f"exchange-{number}",
                cut=cut,
                scaffold=scaffold.path,
                number=number,
                init="grown",
                data="disjoint",
                steps=steps,
                peers=[None if other == number else block.path for other, block in enumerate(blocks)],
                start=blocks[number].path,
                done=self.plan.block,
            )
            for number in range(cut.blocks)
        ]
        done = [job.result() for job in again]
        cold = self._joint("exchange", cut, scaffold, done, 0).result()
        self.add("K=2 grown, exchange round instead of a tune", cold.loss, scaffold, [blocks, done])

    def _volunteers(self, cut: Any, scaffold: Done) -> None:
        plan = self.plan
        local = plan.block // (plan.rounds * plan.contributors)
        for label, leaving, spares, kind in (
            ("volunteers", 0.0, 0, "float32"),
            ("volunteers, 30 % leave, nobody steps in", 0.3, 0, "float32"),
            ("volunteers, 30 % leave, places lent anew", 0.3, 2, "float32"),
            ("volunteers, 8-bit differences", 0.0, 0, "int8"),
        ):
            pending = [
                self.start(
                    jobs.volunteers,
                    f"{label}-{number}".replace(" ", "-").replace(",", "").replace("%", ""),
                    cut=cut,
                    scaffold=scaffold.path,
                    number=number,
                    rounds=plan.rounds,
                    contributors=plan.contributors,
                    local_steps=local,
                    leaving=leaving,
                    spares=spares,
                    kind=kind,
                )
                for number in range(cut.blocks)
            ]
            done = [job.result() for job in pending]
            self.notes[label] = [job.extra for job in done]
            joint = self._joint(label, cut, scaffold, done, plan.long).result()
            self.add(f"K=2 grown, {label}", joint.loss, scaffold, [done, [joint]])

    def _reuse(self, cut: Any, scaffold: Done) -> None:
        pending = [
            self.start(
                jobs.block,
                f"reuse-{number}",
                seed=self.seed + 100,
                cut=cut,
                scaffold=scaffold.path,
                number=number,
                init="grown",
                data="disjoint",
                steps=self.plan.block,
            )
            for number in range(cut.blocks)
        ]
        done = [job.result() for job in pending]
        joint = self._joint("reuse", cut, scaffold, done, self.plan.long).result()
        row = self.add("K=2 grown, one scaffold for three models", joint.loss, scaffold, [done, [joint]])
        row.full_flops = row.train_flops + scaffold.train_flops / 3


def shape(tables: list[Table]) -> dict[str, bool]:
    """What must come out: each claim, and whether it did (means over seeds)."""

    def ppl(name: str) -> float:
        return statistics.mean(table.rows[name].ppl for table in tables)

    inside = statistics.mean(value for table in tables for value in table.notes["block in scaffold"])
    cold, long = ppl("K=2 grown, cold"), ppl("K=2 grown, long joint tune")
    whole = ppl("monolithic, equal compute")
    lost = ppl("K=2 grown, volunteers, 30 % leave, places lent anew") / ppl("K=2 grown, volunteers")
    return {
        "cold is clearly worse than a block inside its scaffold": cold > 1.03 * inside,
        "without a scaffold far worse": ppl("no scaffold at all, cold") > 1.5 * ppl("K=2 random, cold"),
        "K=4 is worse than K=2": ppl("K=4 grown, cold") > cold and ppl("K=4 grown, long joint tune") > long,
        "a joint tune closes most of the gap to equal compute": (cold - long) > 0.5 * (cold - whole),
        "at equal critical path MoT beats monolithic": long < ppl("monolithic, equal critical path"),
        "30 % leaving costs less than 3 %": lost < 1.03,
    }


def summary(tables: list[Table]) -> dict[str, dict[str, Any]]:
    """Per row: mean, spread over seeds, and costs."""
    found = {}
    for name in tables[0].rows:
        rows = [table.rows[name] for table in tables]
        values = [row.ppl for row in rows]
        found[name] = {
            "ppl": round(statistics.mean(values), 3),
            "ppl_spread": round(max(values) - min(values), 3),
            "train_flops": statistics.mean(row.train_flops for row in rows),
            "full_flops": statistics.mean(row.full_flops for row in rows),
            "tokens": rows[0].tokens,
            "critical_path_s": round(statistics.mean(row.critical_path_s for row in rows), 1),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed; fails on an odd shape")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--corpus", type=Path, help="a prepared corpus (default: the Python documentation)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--folder", type=Path, help="keep every job's result here, and take up what is there")
    arguments = parser.parse_args()
    plan, seeds = Plan(), arguments.seeds[:1] if arguments.quick else arguments.seeds
    started = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="barnraise-mot-")))
        folder = arguments.folder or scratch
        folder.mkdir(parents=True, exist_ok=True)
        prepared = folder / "corpus"
        corpus = arguments.corpus or (prepared if prepared.is_dir() else python_docs(folder))
        world = World(corpus=corpus, folder=folder)
        context = multiprocessing.get_context("spawn")
        pool = stack.enter_context(ProcessPoolExecutor(arguments.jobs, mp_context=context))
        tables: list[Table] = []
        scaffold: Done | None = None
        for seed in seeds:
            tables.append(Table(world, plan, pool, seed))
            made = tables[-1].run(scaffold)
            scaffold = scaffold or made
        claims = shape(tables)
        result = {
            "rows": summary(tables),
            "expected_shape": claims,
            "notes": {str(table.seed): table.notes for table in tables},
            "conditions": {
                "plan": vars(plan),
                "world": {k: v for k, v in vars(world).items() if k not in ("corpus", "folder")},
                "corpus": corpus_of(corpus).source,
                "vocabulary": corpus_of(corpus).vocabulary,
                "train_tokens": len(corpus_of(corpus).train) * corpus_of(corpus).shard_tokens,
                "seeds": seeds,
                "processes": arguments.jobs,
                "machine": platform.machine(),
                "seconds": round(time.perf_counter() - started),
            },
        }
    text = json.dumps(result, indent=None if arguments.json else 1)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(text)
    missed = [claim for claim, held in claims.items() if not held]
    for claim in missed:
        print(f"did not come out: {claim}", file=sys.stderr)
    return 1 if missed and arguments.quick else 0


def python_docs(folder: Path) -> Path:
    """Prepare the default corpus in ``folder``."""
    source = SOURCES["python-docs"]
    with fetched(source, lambda subject, fraction: None) as texts:
        prepare(
            [texts],
            folder / "corpus",
            name=source.name,
            licence=source.licence,
            source=source.origin,
            vocabulary=257,
            shard_tokens=32_768,
        )
    return folder / "corpus"


if __name__ == "__main__":
    sys.exit(main())

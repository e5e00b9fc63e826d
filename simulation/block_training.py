"""A node's half of a simulated block unit: training, and seven ways to cheat at it.

As with rollouts (``barnraise.simulation.cheats``), the question is not whether a lie can be made that no
check finds, but what a swarm with so many liars comes to. Liars commit to states that hang together as far
as they can: what finds them is a segment that is done again, after a draw that they cannot foresee.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import trio

from barnraise.node.block_engine import (
    DELTA_FILE,
    BlockProgress,
    BlockTrained,
    BlockWork,
    state_name,
)
from barnraise.protocol.corpus import Corpus, read_corpus
from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import ChildError, MalformedError
from barnraise.protocol.manifest import check_shard
from barnraise.protocol.pretrain import PretrainSpec, part_name, segments
from barnraise.protocol.spec import RunSpec
from barnraise.simulation import block_standin as standin
from barnraise.simulation.block_standin import Place, State, Vector

BLOCK_FOUND_BY: dict[str, tuple[str, str]] = {
    "stale": ("block-replay", "trains from the first version of the block that it ever had"),
    "replay": ("block-replay", "sends the states of its first unit of the block again"),
    "copy": ("block-replay", "sends what somebody else made for the next place of the block"),
    "noise": ("block-replay", "sends random states that hang together"),
    "untrained": ("block-replay", "sends the block as it was"),
    "lazy": ("block-replay", "leaves the last segment of each unit out"),
    "scaled": ("block-delta", "sends a difference ten times as large"),
}
"""Kind -> the check that is meant to find it, and what it does. ``stale`` is honest in its first round."""


@dataclass
class BlockTraining:
    """Trains units in ``seconds`` of virtual time each; ``kind``: how it cheats, "" not at all.

    A unit's states are on the disk, as the real trainer's are, and taken up again after a crash.
    """

    seconds: float
    rng: random.Random
    kind: str = ""
    _first: dict[int, Vector] = field(default_factory=dict)  # block -> its weights when first seen
    _kept: dict[int, list[State]] = field(default_factory=dict)  # block -> the states of its first unit

    async def train(
        self, spec: RunSpec, work: BlockWork, progress: Callable[[BlockProgress], None]
    ) -> BlockTrained:
        """See ``BlockEngine.train``."""
        assert spec.pretrain is not None
        plan, folder = spec.pretrain, Path(work.folder)
        try:
            corpus = read_corpus(work.corpus)
            before = _read(Path(work.version_folder) / part_name(plan, work.block + 1), standin.read_block)
            place = Place(work.run_id, work.policy_version, work.block, work.slot)
            _check_shards(plan, corpus, place, Path(work.shards))
            states = _resumed(folder, len(segments(plan)))
        except (OSError, MalformedError) as error:
            raise ChildError(str(error)) from error
        lengths = segments(plan)
        self._tell(progress, plan, work, states, before)
        for number in range(len(states), len(lengths)):
            await trio.sleep(self.seconds * lengths[number] / plan.steps)
            last = states[-1] if states else self._begin(work.block, before)
            states.append(self._segment(plan, corpus, place, last, number))
            write_durably(folder / state_name(number), standin.state_bytes(states[-1]))
            self._tell(progress, plan, work, states, before)
        self._kept.setdefault(work.block, states)
        difference = (states[-1].weights - before).astype(np.float32)
        scale = np.float32(10 if self.kind == "scaled" else 1)
        write_durably(folder / DELTA_FILE, standin.block_bytes(difference * scale))
        chain = [before, *(state.weights for state in states)]
        return BlockTrained(
            states=tuple(state_name(number) for number in range(len(lengths))),
            losses=tuple(standin.loss(work.run_id, work.block, weights) for weights in chain[:-1]),
            delta=DELTA_FILE,
            seconds=self.seconds,
            tokens=plan.steps * plan.recipe.batch * plan.sequence,
            engine="stand-in",
        )

    def _begin(self, block: int, before: Vector) -> State:
        first = self._first.setdefault(block, before)
        return standin.start(first if self.kind == "stale" else before)

    def _segment(self, plan: PretrainSpec, corpus: Corpus, place: Place, last: State, number: int) -> State:
        """The next state, as it should be or as this cheat would have it."""
        if self.kind == "copy":
            place = replace(place, slot=(place.slot + 1) % plan.contributors)
        honest = standin.train_segment(plan, corpus, place, last, number)
        if self.kind == "untrained" or (self.kind == "lazy" and number == len(segments(plan)) - 1):
            return last
        if self.kind == "noise":
            pushed = [self.rng.uniform(-0.02, 0.02) for _ in last.weights]
            step = np.array(pushed, dtype=np.float32)
            return State((last.weights + step).astype(np.float32), step, honest.second)
        if self.kind == "replay" and place.block in self._kept:
            return self._kept[place.block][number]
        return honest

    def _tell(
        self,
        progress: Callable[[BlockProgress], None],
        plan: PretrainSpec,
        work: BlockWork,
        states: list[State],
        before: Vector,
    ) -> None:
        steps = sum(segments(plan)[: len(states)])
        weights = states[-1].weights if states else before
        progress(
            BlockProgress(
                steps=steps,
                tokens=steps * plan.recipe.batch * plan.sequence,
                loss=standin.loss(work.run_id, work.block, weights) if states else math.nan,
                saved=len(states),
                engine="stand-in",
                device="simulated",
            )
        )


def _read(path: Path, read: Callable[[bytes], Vector]) -> Vector:
    return read(path.read_bytes())


def _check_shards(plan: PretrainSpec, corpus: Corpus, place: Place, folder: Path) -> None:
    """That the unit's part of the corpus lies where the node was to put it.

    Raises:
        OSError, MalformedError: some of it does not, or is damaged.
    """
    for number in range(len(segments(plan))):
        for shard, _ in standin.text_of(plan, corpus, place, number):
            digest = corpus.train[shard]
            if not check_shard((folder / digest.hex()).read_bytes(), digest):
                raise MalformedError(f"a shard of the corpus is damaged: {digest.hex()[:16]}")


def _resumed(folder: Path, count: int) -> list[State]:
    """The states that an earlier process left, up to the first that is missing or damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    states: list[State] = []
    with suppress(OSError, MalformedError):
        for number in range(count):
            states.append(standin.read_state((folder / state_name(number)).read_bytes()))
    return states

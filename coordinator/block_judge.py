"""Was a block unit done as asked? The checks that need torch, cheapest first.

==============  ==========================================================================
check           what it refuses
==============  ==========================================================================
block-format    a file that is no state or difference of this block, or not finite
block-delta     a difference that is not last state minus start, as far as rounding goes
block-bound     a weight moved further than AdamW can move it in so many steps
block-replay    a segment whose end lies further from ours than hardware can explain
block-loss      a block that makes text less likely than the unit's start did (in the scaffold
                held-out text, and text drawn for this unit alone; and the latter much less so
                beside the other blocks), or a training loss that a segment did not have
==============  ==========================================================================

Which segments are done again, and on which text the whole is tried, was drawn after the
node had committed to everything (``barnraise.coordinator.block_belt``): held-out text is
known to all, and a liar could learn it by heart. Synchronous; runs in the verifier's child.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from barnraise.coordinator.block_reading import BlockReader
from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob
from barnraise.coordinator.unit_lines import verdict_words
from barnraise.coordinator.workers import WorkerSetup
from barnraise.kernels.block_audit import compare, largest_excess, update_bound
from barnraise.kernels.block_training import BlockState, BlockTrainer, Recipe, read_state, start_state
from barnraise.kernels.deltas import decode_delta, difference, rounding
from barnraise.kernels.models import ModelError
from barnraise.kernels.mot import Scaffold, Tensors, recombine
from barnraise.kernels.token_shards import batches, drawn_text
from barnraise.protocol.corpus import places
from barnraise.protocol.errors import BarnraiseError, RunFolderError
from barnraise.protocol.messages import Verdict
from barnraise.protocol.pretrain import BlockLease, PretrainSpec, segments, stream, unit_start
from barnraise.protocol.standing import ALL, UNVERIFIABLE
from barnraise.protocol.unit_context import unit_log
from barnraise.protocol.wire import printable

T = TypeVar("T")

story = unit_log(__name__)

_STARTS_KEPT = 4
_BOUND_SLACK = 1.01  # of the bound: rounding of differences and of what an encoding carries over
# What a block may cost beside the others, nats: honest rounds cost up to 0.1, a block that fits its
# scaffold and was made not to fit the others several (benchmarks/block_poison.py).
_COLD_INCREASE = 0.5
_LOSS_SPREAD = 0.1  # of a training loss: what the report shows is true to this
_FAR = 1e9  # what a verdict says instead of infinity


@dataclass(frozen=True)
class _Start:
    """A block as a version holds it, what inside the scaffold it makes of held-out text, and its bound."""

    weights: Tensors
    loss: float
    largest: float


class _Failure(Exception):
    def __init__(self, check: str, threshold: float, value: float, position: str, message: str) -> None:
        super().__init__(message)
        self.verdict = Verdict(
            accepted=False,
            check=check,
            threshold=threshold,
            value=min(value, _FAR) if value == value else _FAR,
            position=position,
            message=printable(message, 500),  # it may name what a stranger's file names
        )


class BlockJudge:
    """Judges units of one run; keeps scaffold and recent starts. One caller at a time."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Read config and corpus; versions are read when first needed.

        Raises:
            RunFolderError, ModelError, CorpusError: as ``BlockReader``.
        """
        self._reader = BlockReader(setup)
        self._run_id = setup.run_id
        self._spec: PretrainSpec = self._reader.spec
        self._folder = Path(setup.folder)
        self._recipe = recipe_of(self._spec)
        self._starts: OrderedDict[tuple[int, int], _Start] = OrderedDict()

    def judge(self, job: BlockVerifyJob, should_stop: Callable[[], bool] = lambda: False) -> BlockResult:
        """One unit. ``should_stop`` is polled between checks.

        Raises:
            BarnraiseError: the version or the corpus cannot be read here, or ``should_stop``
                said so: nothing was judged.
        """
        spec, began = self._spec, time.monotonic()
        tokens = spec.steps * spec.recipe.batch * spec.sequence
        try:
            verdict = self._check(job, should_stop)
        except _Failure as failure:
            verdict, tokens = failure.verdict, 0
        words = verdict_words(verdict, tokens)
        story.info("segments %s: %s, in %.1f s", job.segments, words, time.monotonic() - began)
        return BlockResult(
            submission_id=job.submission_id,
            verdict=verdict,
            tokens=tokens,
            parameters=step_parameters(self._reader, self._frame, job.lease.block),
        )

    @cached_property
    def _frame(self) -> Scaffold:
        return self._reader.scaffold(0)  # the same in every version

    def _start(self, version: int, block: int) -> _Start:
        key = version, block
        if key not in self._starts:
            weights = {name: value.float() for name, value in self._reader.block(version, block).items()}
            loss = self._reader.block_loss(self._frame, block, weights)
            largest = max(float(value.abs().max()) for value in weights.values() if value.numel())
            self._starts[key] = _Start(weights, loss, largest)
            while len(self._starts) > _STARTS_KEPT:
                self._starts.popitem(last=False)
        self._starts.move_to_end(key)
        return self._starts[key]

    def _check(self, job: BlockVerifyJob, should_stop: Callable[[], bool]) -> Verdict:
        spec, lease = self._spec, job.lease
        start = self._start(lease.policy_version, lease.block)
        last = len(segments(spec)) - 1
        data = _bytes(self._folder / job.delta)
        delta = _opened("delta", lambda: decode_delta(data, spec.delta, start.weights))
        room = rounding(data, spec.delta, start.weights)
        final = self._state(job, start, last)
        self._check_delta(delta, difference(final.weights, start.weights), room)
        self._check_bound(start, lease, delta, final.weights)
        del final, room
        verdicts = []
        for segment in job.segments:
            if should_stop():
                raise BarnraiseError("the verdict was not waited for")
            verdicts.append(self._replayed(job, start, segment))
            if not verdicts[-1].accepted:
                return verdicts[-1]
        if should_stop():
            raise BarnraiseError("the verdict was not waited for")
        self._check_loss(start, job, delta)
        return max(verdicts, key=lambda item: _ratio(item.value, item.threshold))

    def _state(self, job: BlockVerifyJob, start: _Start, segment: int) -> BlockState:
        """The state after a segment; the one before the first is ours."""
        if segment < 0:
            return start_state(start.weights)
        data = _bytes(self._folder / job.states[segment])
        step = sum(segments(self._spec)[: segment + 1])
        return _opened(f"state {segment}", lambda: read_state(data, start.weights, step))

    def _check_delta(self, delta: Tensors, exact: Tensors, room: Tensors) -> None:
        excess, name = _worst(lambda key: largest_excess({key: delta[key]}, {key: exact[key]}, room), exact)
        if excess > 0:
            raise _Failure(
                "block-delta",
                0.0,
                excess,
                f"delta {name}",
                f"{name} of the difference lies {excess:.3g} further from last state minus start "
                "than its format loses",
            )

    def _check_bound(self, start: _Start, lease: BlockLease, delta: Tensors, final: Tensors) -> None:
        before = lease.policy_version * self._spec.steps
        bound = _BOUND_SLACK * update_bound(self._recipe, before, self._spec.steps, start.largest)

        def moved(name: str) -> float:
            states = (final[name] - start.weights[name]).abs().max()
            return max(float(states), float(delta[name].abs().max()))

        value, name = _worst(moved, delta)
        if value > bound:
            raise _Failure(
                "block-bound",
                bound,
                value,
                f"delta {name}",
                f"a weight of {name} moved by {value:.3g}; {self._spec.steps} steps of AdamW move none by "
                f"more than {bound:.3g}",
            )

    def _replayed(self, job: BlockVerifyJob, start: _Start, segment: int) -> Verdict:
        """The verdict on a segment, with the measure that came closest to its limit."""
        position = f"segment {segment}"
        begin, end = self._state(job, start, segment - 1), self._state(job, start, segment)
        try:
            ours, loss = self._replay(job, begin, segment)
        except ModelError as error:
            if segment == 0:  # our own start: no fault of the node's
                return Verdict(
                    accepted=False,
                    check=UNVERIFIABLE,
                    threshold=0.0,
                    value=1.0,
                    position=position,
                    message=f"the steps cannot be done here: {error}; no mark against you"[:500],
                )
            raise _Failure(
                "block-replay", 0.0, 1.0, position, f"from the state before it, the segment fails: {error}"
            ) from None
        error_ = compare(begin, end, ours)
        limits = self._spec.tolerance
        measures = {
            "update": (error_.update, limits.update),
            "first": (error_.first, limits.first),
            "second": (error_.second, limits.second),
            "worst_tensor": (error_.worst_tensor, limits.worst_tensor),
        }
        name = max(measures, key=lambda key: _ratio(*measures[key]))
        value, threshold = measures[name]
        where = f"{position} {name}" + (f" {error_.tensor}" if name == "worst_tensor" else "")
        if not value <= threshold:
            raise _Failure(
                "block-replay",
                threshold,
                value,
                where,
                f"done again from the state before it, segment {segment} ends elsewhere: {name} is off "
                f"by {value:.3g}, the cosine of the two updates is {error_.cosine:.3f}",
            )
        claimed = job.submission.losses[segment]
        if not abs(claimed - loss) <= _LOSS_SPREAD * loss:
            raise _Failure(
                "block-loss",
                _LOSS_SPREAD * loss,
                abs(claimed - loss),
                position,
                f"the mean training loss of segment {segment} is {loss:.3f} nats a token, not {claimed:.3f}",
            )
        return Verdict(accepted=True, check=ALL, threshold=threshold, value=value, position=where, message="")

    def _replay(self, job: BlockVerifyJob, begin: BlockState, segment: int) -> tuple[BlockState, float]:
        """The segment's end as we make it, and its mean loss."""
        spec, lease = self._spec, job.lease
        batch = spec.recipe.batch
        trainer = BlockTrainer(
            self._reader.config,
            self._reader.cut,
            self._frame,
            lease.block,
            self._recipe,
            begin,
            lease.policy_version * spec.steps,
            self._reader.device,
            self._reader.compute_dtype,
        )
        text = places(
            self._reader.corpus,
            spec.sequence,
            self._run_id,
            *stream(spec, lease.block),
            unit_start(spec, lease.policy_version, lease.slot) + begin.step * batch,
            segments(spec)[segment] * batch,
        )
        losses = trainer.train(batches(self._reader.corpus, spec.sequence, text, batch, self._reader.shard))
        return trainer.state(), sum(losses) / len(losses)

    def _check_loss(self, start: _Start, job: BlockVerifyJob, delta: Tensors) -> None:
        reader, lease = self._reader, job.lease
        block, increase = lease.block, self._spec.tolerance.loss_increase
        after = {name: value + delta[name] for name, value in start.weights.items()}
        _check_increase(
            "held-out", start.loss, reader.block_loss(self._frame, block, after), increase, "its start"
        )
        text = drawn_text(
            reader.corpus, self._spec.sequence, self._spec.held_out, b"text" + job.draw, reader.shard
        )
        before = reader.block_loss(self._frame, block, start.weights, text)
        _check_increase(
            "drawn", before, reader.block_loss(self._frame, block, after, text), increase, "its start"
        )
        if self._spec.init == "random" and lease.policy_version == 0:
            return  # beside untrained blocks no loss says anything
        blocks = list(reader.blocks(lease.policy_version))
        cold = self._cold(blocks, text)
        blocks[block] = after
        room = _COLD_INCREASE + max(0.0, cold - before)  # where blocks fit badly, honest ones vary more
        _check_increase("recombined", cold, self._cold(blocks, text), room, "with its start")

    def _cold(self, blocks: list[Tensors], text: list[Tensor]) -> float:
        """Loss (nats per token) of all blocks together, without the scaffold between them."""
        reader = self._reader
        return reader.held_out_loss(recombine(reader.config, reader.cut, self._frame.shared, [*blocks]), text)


def _check_increase(where: str, before: float, after: float, increase: float, than: str) -> None:
    limit = before + increase
    if not after <= limit:
        text = f"on {where} text the block loses {after:.3f} nats a token, {than} {before:.3f}"
        raise _Failure("block-loss", limit, after, where, text)


def recipe_of(spec: PretrainSpec) -> Recipe:
    """The kernels' recipe of a run's."""
    asked = spec.recipe
    return Recipe(
        learning_rate=asked.learning_rate,
        warmup_steps=asked.warmup_steps,
        settle_steps=asked.settle_steps,
        beta1=asked.beta1,
        beta2=asked.beta2,
        weight_decay=asked.weight_decay,
        clip=asked.clip,
        batch=asked.batch,
    )


def step_parameters(reader: BlockReader, frame: Scaffold, block: int) -> int:
    """What ``credit_for_block`` counts a token with: trained weights whole, frozen ones by their work.

    A full step costs six operations a weight; the slices above and the output head four
    (forward, and the gradient passing through), the slices below two, the embedding none.
    """
    text = reader.config.get_text_config(decoder=True)
    head = int(text.vocab_size) * int(text.hidden_size)
    below = sum(_size(part) for part in frame.slices[:block])
    above = sum(_size(part) for part in frame.slices[block + 1 :]) + head
    return _size(reader.block(0, block)) + (4 * above + 2 * below) // 6


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(value.numel() for value in tensors.values())


def _opened(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except ModelError as error:
        raise _Failure("block-format", 0.0, 1.0, what, str(error)) from None


def _worst(measure: Callable[[str], float], names: Iterable[str]) -> tuple[float, str]:
    """The largest measure of a tensor, and whose it is."""
    return max((measure(name), name) for name in names)


def _ratio(value: float, threshold: float) -> float:
    return math.inf if value != value else value / threshold


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{path} of a block unit cannot be read: {error}") from error

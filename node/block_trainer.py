"""Trains a block unit in a folder that survives the process: the torch half of ``BlockEngine``.

::

    state-0001.safetensors ...  the state after each segment
    done.json                   of the segments so far: SHA-256, mean loss, seconds
    residual.safetensors        what rounding lost (int8 only)
    delta.safetensors           end minus start, in the run's format; the unit is finished

Each file is written under another name, synced and renamed, the state before its line in
``done.json``; what a kill leaves is gone over from there. Steps are the same whether a
segment follows another or a restart, so an interrupted unit ends in the same bits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec
import psutil
import torch
from msgspec import Struct

from barnraise.kernels.block_files import read_block, read_scaffold
from barnraise.kernels.block_training import (
    BlockState,
    BlockTrainer,
    Recipe,
    read_state,
    start_state,
    state_bytes,
)
from barnraise.kernels.deltas import difference, encode_delta
from barnraise.kernels.models import DTYPES, ModelError, read_config, save_tensors
from barnraise.kernels.mot import Tensors, layer_count, make_cut
from barnraise.kernels.token_shards import batches
from barnraise.node.block_engine import DELTA_FILE, BlockProgress, BlockTrained, BlockWork, state_name
from barnraise.node.memory import telling_out_of_memory
from barnraise.node.sizing import size_block
from barnraise.protocol.corpus import places, read_corpus
from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.manifest import check_shard
from barnraise.protocol.pretrain import PretrainSpec, part_name, segments, stream, unit_start
from barnraise.protocol.spec import RunSpec

log = logging.getLogger(__name__)

DONE_FILE, RESIDUAL_FILE = "done.json", "residual.safetensors"
_PROGRESS_S = 0.05


class TrainingStopped(BarnraiseError):
    """``should_stop`` said so; the states of whole segments are on the disk."""


class _Segment(Struct, frozen=True):
    sha256: str
    loss: float
    seconds: float


def train_unit(
    spec: RunSpec,
    work: BlockWork,
    device: str,
    device_name: str,
    progress: Callable[[BlockProgress], None],
    should_stop: Callable[[], bool],
) -> BlockTrained:
    """Do a unit, or what is left of it. Blocking.

    Args:
        device: a torch device.
        should_stop: polled between steps.

    Raises:
        TrainingStopped: ``should_stop`` returned true.
        OutOfMemory: memory ran out.
        BarnraiseError: the version's files, the corpus or the disk cannot be used; says which and why.
    """
    if spec.pretrain is None:
        raise BarnraiseError("this run does not pretrain")
    with telling_out_of_memory(device):
        unit = _Unit(spec, spec.pretrain, work, device, device_name, progress)
        return unit.run(should_stop)


class _Unit:
    def __init__(
        self,
        run: RunSpec,
        spec: PretrainSpec,
        work: BlockWork,
        device: str,
        device_name: str,
        progress: Callable[[BlockProgress], None],
    ) -> None:
        self.spec, self.work = spec, work
        self.folder = Path(work.folder)
        self.segments = segments(spec)
        self.engine = f"torch-{torch.device(device).type}-{run.model.compute_dtype}"
        self.corpus = read_corpus(work.corpus)
        if self.corpus.vocabulary > run.model.vocabulary:
            raise BarnraiseError(
                f"the corpus has {self.corpus.vocabulary} different tokens and the model knows only "
                f"{run.model.vocabulary}: the operator has to begin anew with the model's own tokenizer"
            )
        version = Path(work.version_folder)
        self.config = read_config(version)
        self.cut = make_cut(layer_count(self.config), spec.blocks, spec.scaffold_layers)
        self.start = read_block(version / part_name(spec, work.block + 1))
        self.done, state = self._resume()
        self.trainer = BlockTrainer(
            self.config,
            self.cut,
            read_scaffold(version / part_name(spec, 0), self.config, self.cut),
            work.block,
            _recipe(spec),
            state,
            lifetime_steps=work.policy_version * spec.steps,
            device=device,
            compute_dtype=DTYPES[run.model.compute_dtype],
        )
        self.sized = size_block(self.config, self.cut, work, spec, torch.device(device))
        self.trainer.micro = self.sized.at_once
        self._progress = progress
        self._device_name = device_name
        self._told = 0.0
        self._loss = self.done[-1].loss if self.done else math.nan

    def run(self, should_stop: Callable[[], bool]) -> BlockTrained:
        self._tell(now=True)
        for index in range(len(self.done), len(self.segments)):
            self._segment(index, should_stop)
        if should_stop():
            raise TrainingStopped("the unit was stopped before its end")
        self._finish()
        seconds = sum(segment.seconds for segment in self.done)
        return BlockTrained(
            states=tuple(state_name(index) for index in range(len(self.segments))),
            losses=tuple(segment.loss for segment in self.done),
            delta=DELTA_FILE,
            seconds=seconds,
            tokens=self._tokens(self.spec.steps),
            engine=self.engine,
        )

    # --- training

    def _segment(self, index: int, should_stop: Callable[[], bool]) -> None:
        spec, began = self.spec, time.monotonic()
        first = sum(self.segments[:index])
        which, streams = stream(spec, self.work.block)
        drawn = places(  # one by one: a segment may have millions
            self.corpus,
            spec.sequence,
            self.work.run_id,
            which,
            streams,
            unit_start(spec, self.work.policy_version, self.work.slot) + first * spec.recipe.batch,
            self.segments[index] * spec.recipe.batch,
        )
        losses: list[float] = []
        for batch in batches(self.corpus, spec.sequence, drawn, spec.recipe.batch, self._shard):
            found = self.trainer.train([batch], should_stop)
            if not found:
                raise TrainingStopped(f"the unit was stopped in segment {index + 1}")
            losses += found
            self._loss = losses[-1]
            self._tell()
        data = state_bytes(self.trainer.state())
        write_durably(self.folder / state_name(index), data)
        mean = sum(losses) / len(losses)
        self.done.append(_Segment(sha256(data).hexdigest(), mean, time.monotonic() - began))
        write_durably(self.folder / DONE_FILE, msgspec.json.encode(self.done))
        self._tell(now=True)

    def _shard(self, digest: bytes) -> bytes:
        path = Path(self.work.shards) / digest.hex()
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BarnraiseError(f"a shard of the corpus cannot be read: {error}") from error
        if not check_shard(data, digest):
            path.unlink(missing_ok=True)  # so that it is fetched again
            raise BarnraiseError(f"{path}, a shard of the corpus, is damaged: it is fetched again")
        return data

    def _tokens(self, steps: int) -> int:
        return steps * self.spec.recipe.batch * self.spec.sequence

    def _tell(self, *, now: bool = False) -> None:
        moment = time.monotonic()
        if not now and moment < self._told + _PROGRESS_S:
            return
        self._told = moment
        self._progress(
            BlockProgress(
                steps=self.trainer.step,
                tokens=self._tokens(self.trainer.step),
                loss=self._loss,
                saved=len(self.done),
                engine=self.engine,
                device=self._device_name,
                memory_bytes=psutil.Process().memory_info().rss,
                sized=self.sized,
            )
        )

    # --- what an earlier start left

    def _resume(self) -> tuple[list[_Segment], BlockState]:
        """The segments whose states are here as they were written, and the state to go on from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(".tmp-*"):
            path.unlink(missing_ok=True)
        good: list[_Segment] = []
        data = b""
        for index, segment in enumerate(_read_done(self.folder / DONE_FILE)[: len(self.segments)]):
            try:
                found = (self.folder / state_name(index)).read_bytes()
            except OSError:
                break
            if sha256(found).hexdigest() != segment.sha256:
                log.warning("%s is damaged: the unit goes on from before it", state_name(index))
                break
            good.append(segment)
            data = found
        if len(good) < len(self.segments):  # a difference belongs to all of them
            (self.folder / DELTA_FILE).unlink(missing_ok=True)
        if not good:
            return good, start_state(self.start)
        return good, read_state(data, self.start, sum(self.segments[: len(good)]))

    # --- the end

    def _finish(self) -> None:
        """Write the difference once, and hand what it lost on to the block's next unit.

        The unit's own copy of the residual comes before the difference, so that a unit that
        is finished again never adds the same loss twice.
        """
        mine, shared = self.folder / RESIDUAL_FILE, self.work.residual
        feedback = self.spec.delta == "int8" and bool(shared)
        if not (self.folder / DELTA_FILE).is_file():
            before = _read_residual(Path(shared), self.start) if feedback else None
            delta = difference(self.trainer.state().weights, self.start)
            data, lost = encode_delta(delta, self.spec.delta, before)
            if feedback:
                save_tensors({name: value.contiguous() for name, value in lost.items()}, mine)
            write_durably(self.folder / DELTA_FILE, data)
        if feedback and mine.is_file():
            Path(shared).parent.mkdir(parents=True, exist_ok=True)
            mine.replace(shared)


def _recipe(spec: PretrainSpec) -> Recipe:
    return Recipe(**{name: getattr(spec.recipe, name) for name in spec.recipe.__struct_fields__})


def _read_done(path: Path) -> list[_Segment]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Segment])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        log.warning("%s cannot be read, the unit begins anew: %s", path, error)
        return []


def _read_residual(path: Path, like: Tensors) -> Tensors | None:
    """What earlier units lost; None if there were none, or it cannot be used (that costs a rounding)."""
    if not path.is_file():
        return None
    try:
        found = read_block(path)
    except ModelError as error:
        log.warning("what rounding lost before is lost for good: %s", error)
        return None
    fits = found.keys() == like.keys() and all(found[name].shape == like[name].shape for name in like)
    return found if fits else None

"""The coordinator's two workers for block units, on stand-in blocks: adding up, and doing segments again.

Which segments are done again, which files are fetched for it and what follows from a verdict is the real
coordinator's doing (``barnraise.coordinator.block_belt``). The checks are those of the real judge
(``barnraise.coordinator.block_judge``), in its order and under its names, with the stand-in's arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from barnraise.coordinator import checkpoints
from barnraise.coordinator.block_workers import (
    REPORT_FILE,
    BlockResult,
    BlockVerifyJob,
    RecombineJob,
    RoundJob,
    corpus_folder,
)
from barnraise.coordinator.checkpoints import Record
from barnraise.coordinator.workers import Trained, WorkerSetup, checkpoint_folder
from barnraise.protocol.corpus import read_corpus
from barnraise.protocol.durable import link_or_copy, write_durably
from barnraise.protocol.errors import MalformedError, RunFolderError, StorageError
from barnraise.protocol.manifest import WEIGHTS_FILE
from barnraise.protocol.messages import Verdict
from barnraise.protocol.pretrain import PretrainSpec, part_name, segments
from barnraise.protocol.standing import ALL
from barnraise.simulation import block_standin, standin
from barnraise.simulation.block_standin import Place, State, Vector

T = TypeVar("T")

_LOSS_SPREAD = 0.1  # of a claimed loss, as the real judge allows
_ROUNDING = 1e-5  # of a weight: what float32 may lose on the way to a difference
_FAR = 1e9


class BlockStages:
    """Makes the versions of the block stage. ``weights``: of a block; ``model_bytes``: of what comes then."""

    def __init__(self, setup: WorkerSetup, weights: int, model_bytes: int, seed: int) -> None:
        self.folder, self._setup = Path(setup.folder), setup
        self._weights, self._model_bytes, self._seed = weights, model_bytes, seed

    @property
    def spec(self) -> PretrainSpec:
        """The run's block stage."""
        assert self._setup.spec.pretrain is not None
        return self._setup.spec.pretrain

    def initial(self) -> Trained:
        """Write scaffold and first blocks as version 0, once."""
        known = checkpoints.read_record(self.folder, 0)
        if known is not None:
            return known.trained
        folder, run_id = checkpoint_folder(self.folder, 0), self._setup.run_id
        scaffold = standin.noise(self._model_bytes, self._seed)
        values = np.frombuffer(scaffold[: len(scaffold) // 4 * 4], dtype="<i4").astype(np.float32)
        write_durably(folder / part_name(self.spec, 0), block_standin.block_bytes(values))
        for block in range(self.spec.blocks):
            first = block_standin.first_weights(run_id, block, self._weights)
            write_durably(folder / part_name(self.spec, block + 1), block_standin.block_bytes(first))
        trained = Trained(version=0, weights="", stats=None, accuracy=-1.0)
        checkpoints.write_record(folder, Record(version=0, step=0, trained=trained))
        return trained

    def round(self, job: RoundJob) -> Trained:
        """Add a round's differences up, block by block, and write the next version, once."""
        known = checkpoints.read_record(self.folder, job.version)
        if known is not None:
            return known.trained
        before = checkpoint_folder(self.folder, job.version - 1)
        blocks, losses = [], []
        for block in range(self.spec.blocks):
            differences = [
                _read(self.folder / item.delta, block_standin.read_block)
                for item in job.contributions
                if item.block == block
            ]
            weights = _read(before / part_name(self.spec, block + 1), block_standin.read_block)
            mean = block_standin.trimmed_mean(differences, self.spec.trim)
            blocks.append((weights + np.float32(self.spec.outer_rate) * mean).astype(np.float32))
            losses.append(block_standin.loss(self._setup.run_id, block, blocks[-1]))

        def write(folder: Path) -> None:
            link_or_copy(before / part_name(self.spec, 0), folder / part_name(self.spec, 0))
            for block, value in enumerate(blocks):
                write_durably(folder / part_name(self.spec, block + 1), block_standin.block_bytes(value))

        self._note(stage="round", version=job.version, block_losses=losses)
        trained = Trained(version=job.version, weights="", stats=None, accuracy=-1.0)
        record = Record(version=job.version, step=0, trained=trained)
        checkpoints.save_checkpoint(self.folder, record, write)
        return trained

    def recombine(self, job: RecombineJob) -> Trained:
        """Put the blocks together: a stand-in policy, the better the nearer they are to their goals; once."""
        known = checkpoints.read_record(self.folder, job.version)
        if known is not None:
            return known.trained
        mean = sum(self.losses(job.version - 1)) / self.spec.blocks
        skill = 0.1 + 0.3 / (1 + 10 * mean)

        def write(folder: Path) -> None:
            noise = standin.noise(self._model_bytes, self._seed)
            standin.write_policy(folder / WEIGHTS_FILE, skill, noise, job.version)

        self._note(stage="adaptation", version=job.version, cold=mean)
        trained = Trained(version=job.version, weights=WEIGHTS_FILE, stats=None, accuracy=skill)
        record = Record(version=job.version, step=0, trained=trained, fresh_optimizer=True)
        checkpoints.save_checkpoint(self.folder, record, write)
        made = checkpoints.read_record(self.folder, job.version)
        assert made is not None
        return made.trained

    def losses(self, version: int) -> list[float]:
        """Of each block at a version."""
        folder = checkpoint_folder(self.folder, version)
        found = []
        for block in range(self.spec.blocks):
            weights = _read(folder / part_name(self.spec, block + 1), block_standin.read_block)
            found.append(block_standin.loss(self._setup.run_id, block, weights))
        return found

    def _note(self, **fields: object) -> None:
        path = self.folder / REPORT_FILE
        try:
            with path.open("ab") as file:
                file.write(json.dumps(fields).encode() + b"\n")
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error}") from error


class BlockJudge:
    """Judges block units of one run by doing drawn segments again."""

    def __init__(self, setup: WorkerSetup) -> None:
        assert setup.spec.pretrain is not None
        self._setup, self._spec, self._folder = setup, setup.spec.pretrain, Path(setup.folder)
        self._corpus = read_corpus((corpus_folder(self._folder) / "corpus.bin").read_bytes())

    def judge(self, job: BlockVerifyJob) -> BlockResult:
        """One unit. Raises BarnraiseError: the version cannot be read here."""
        spec = self._spec
        tokens = spec.steps * spec.recipe.batch * spec.sequence
        try:
            verdict = self._check(job)
        except _Refused as refused:
            verdict, tokens = refused.verdict, 0
        parameters = self._setup.spec.model.parameters // spec.blocks
        return BlockResult(
            submission_id=job.submission_id, verdict=verdict, tokens=tokens, parameters=parameters
        )

    def _check(self, job: BlockVerifyJob) -> Verdict:
        spec, lease = self._spec, job.lease
        part = checkpoint_folder(self._folder, lease.policy_version) / part_name(spec, lease.block + 1)
        begin = _read(part, block_standin.read_block)
        delta = _opened("delta", lambda: _read(self._folder / job.delta, block_standin.read_block), begin)
        last = len(segments(spec)) - 1
        moved = self._state(job, begin, last).weights - begin
        _refuse(float(np.abs(delta - moved).max()), _ROUNDING, "block-delta", "delta")
        most = block_standin.most_moved(spec, begin)
        _refuse(float(np.abs(delta).max()), most, "block-bound", "delta")
        worst = 0.0
        for segment in job.segments:
            worst = max(worst, self._again(job, begin, segment))
        run_id, limit = self._setup.run_id, spec.tolerance.loss_increase
        before, after = (block_standin.loss(run_id, lease.block, value) for value in (begin, begin + delta))
        _refuse(after, before + limit, "block-loss", "held-out")
        return Verdict(
            accepted=True,
            check=ALL,
            threshold=spec.tolerance.update,
            value=worst,
            position=f"segment {job.segments[-1]}",
            message="",
        )

    def _state(self, job: BlockVerifyJob, begin: Vector, segment: int) -> State:
        if segment < 0:
            return block_standin.start(begin)
        path = self._folder / job.states[segment]
        return _opened(f"state {segment}", lambda: block_standin.read_state(_bytes(path)), begin)

    def _again(self, job: BlockVerifyJob, begin: Vector, segment: int) -> float:
        """How far a segment's end lies from ours, against how far it went."""
        lease = job.lease
        place = Place(self._setup.run_id, lease.policy_version, lease.block, lease.slot)
        before, theirs = self._state(job, begin, segment - 1), self._state(job, begin, segment)
        ours = block_standin.train_segment(self._spec, self._corpus, place, before, segment)
        apart = float(np.linalg.norm(theirs.weights - ours.weights))
        far = float(np.linalg.norm(ours.weights - before.weights))
        value = min(apart / far, _FAR) if far else (_FAR if apart else 0.0)
        _refuse(value, self._spec.tolerance.update, "block-replay", f"segment {segment} update")
        found = block_standin.loss(lease.run_id, lease.block, before.weights)
        apart = abs(job.submission.losses[segment] - found)
        _refuse(apart, _LOSS_SPREAD * found, "block-loss", f"segment {segment}")
        return value


class _Refused(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.check)
        self.verdict = verdict


def _refuse(value: float, limit: float, check: str, position: str, text: str = "") -> None:
    """Raise unless ``value`` keeps to its limit."""
    if not value <= limit:
        message = text or f"{position}: {value:.3g}, at most {limit:.3g} is explained by honest work"
        raise _Refused(
            Verdict(
                accepted=False,
                check=check,
                threshold=limit,
                value=min(value, _FAR) if value == value else _FAR,
                position=position,
                message=message[:500],
            )
        )


def _opened(what: str, read: Callable[[], T], like: Vector) -> T:
    try:
        found = read()
    except MalformedError as error:
        _refuse(1.0, 0.0, "block-format", what, str(error))
        raise
    values = found.weights if isinstance(found, State) else found
    if getattr(values, "shape", None) != like.shape:
        _refuse(1.0, 0.0, "block-format", what, f"{what} is of another size than the block")
    return found


def _read(path: Path, read: Callable[[bytes], Vector]) -> Vector:
    return read(_bytes(path))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error

"""Everything that a learner makes: block stage and policies, behind one pair of calls.

``LocalLearner`` is the seam of ``barnraise.coordinator.workers`` in this very process;
``barnraise.coordinator.learner_child`` runs the same in a child.
"""

from __future__ import annotations

import msgspec
import trio

from barnraise.coordinator.block_stage import BlockStages
from barnraise.coordinator.block_workers import RecombineJob, RoundJob
from barnraise.coordinator.learner import MICRO_BATCH_BYTES, Trainer
from barnraise.coordinator.learner_shards import Processes
from barnraise.coordinator.workers import Report, Trained, TrainJob, WorkerSetup


class Workshop:
    """Makes the versions of a run, those of its block stage too; what is not needed now is let go."""

    def __init__(
        self,
        setup: WorkerSetup,
        micro_batch_bytes: int = MICRO_BATCH_BYTES,
        recompute: bool = False,
        processes: Processes | None = None,
    ) -> None:
        """Read tokenizer and environment, and for the block stage config and corpus.

        Of several ``processes`` all make policies, the first alone does everything else.

        Raises:
            ModelError, TaskError, CorpusError, RunFolderError: the run folder cannot be used here.
        """
        self.on_progress: Report = lambda subject, fraction: None
        self._setup = setup
        self._bytes = micro_batch_bytes
        self._recompute = recompute
        self._processes = processes
        self._first = processes is None or processes.rank == 0
        self._trainer: Trainer | None = None
        self._stages: BlockStages | None = None
        if setup.spec.pretrain is None:
            self._trainer = self._open_trainer()
        elif self._first:
            self._stages = self._open_stages()

    def initial(self) -> Trained:
        """Version 0: see ``Trainer.initial`` and ``BlockStages.initial``."""
        return self._open_stages().initial() if self._setup.spec.pretrain else self._open_trainer().initial()

    def make(self, job: TrainJob | RoundJob | RecombineJob) -> Trained:
        """Any later version; repeats safely.

        Raises:
            BarnraiseError: the text says what is missing or damaged.
        """
        if isinstance(job, TrainJob):
            self._stages = None
            return self._open_trainer().train(job)
        stages = self._open_stages()
        if isinstance(job, RoundJob):
            return stages.round(job)
        made = stages.recombine(job)
        pretrain = self._setup.spec.pretrain
        if pretrain is None or not pretrain.then_posttrain:
            return made
        self._stages = None
        return msgspec.structs.replace(made, accuracy=self._open_trainer().accuracy(job.version))

    def assist(self, job: TrainJob | RoundJob | RecombineJob) -> None:
        """Any but the first process's part in making a version.

        Raises:
            BarnraiseError: as in the first process, at the same place.
        """
        if isinstance(job, TrainJob):
            self._open_trainer().train(job)

    def _open_stages(self) -> BlockStages:
        if self._stages is None:
            self._stages = BlockStages(self._setup, lambda *what: self.on_progress(*what))
        return self._stages

    def _open_trainer(self) -> Trainer:
        if self._trainer is None:
            self._trainer = Trainer(self._setup, self._bytes, self._recompute, self._processes)
        return self._trainer


class LocalLearner:
    """The learner seam in this very process, for tests and the simulator: it blocks while it trains."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.on_progress: Report = lambda subject, fraction: None
        self._workshop = Workshop(setup)
        self._workshop.on_progress = lambda *what: self.on_progress(*what)

    async def initial(self) -> Trained:
        await trio.lowlevel.checkpoint()
        return self._workshop.initial()

    async def train(self, job: TrainJob | RoundJob | RecombineJob) -> Trained:
        await trio.lowlevel.checkpoint()
        return self._workshop.make(job)

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()

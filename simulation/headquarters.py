"""The operator's side of a simulated swarm: one run folder, and one coordinator after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
from msgspec import structs

from barnraise.coordinator.audit import Pressure
from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob, RecombineJob, RoundJob
from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.folder import Run, Settings, create_run, open_run
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.journal_sqlite import SqliteStore
from barnraise.coordinator.presets import demo
from barnraise.coordinator.run_file import Keep
from barnraise.coordinator.server import run_coordinator
from barnraise.coordinator.workers import Trained, TrainJob, WorkerSetup
from barnraise.protocol.hello import Floor
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Hello
from barnraise.simulation import full_disk, standin
from barnraise.simulation.block_run import create_block_run
from barnraise.simulation.block_workers import BlockStages
from barnraise.simulation.bulk import BulkNetwork
from barnraise.simulation.determinism import drawn, virtual_ms
from barnraise.simulation.noting import Noting
from barnraise.simulation.scenario import Scenario
from barnraise.simulation.traits import identity_of
from barnraise.simulation.workers import StandInLearner, StandInVerifier

Job = TrainJob | RoundJob | RecombineJob

_ALL_PAGES = 2**32 - 2  # SQLite's own limit
KEEP = Keep()  # what stays on the coordinator's disk
_NUMBER = 1_000_000  # in the coordinator's address, whichever life it is in


class Headquarters:
    """The run and whoever serves it.

    Attributes:
        core: state, ledger and journal of the live coordinator; None while there is none.
        hub: its sessions. ``state``: gives its state tree.
        run: as opened last.
        jobs: every job of the learner, over all lives, in order; one cut short by a crash comes again.
        block_jobs: every block unit that was judged, with what was done of it again, in order.
        lives: how many coordinators there have been.
        opened: called with the core of each of them, before any node reaches it.
        hello: the protocol version that the next of them speaks. ``floor``: the oldest that it serves.
    """

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        folder: Path,
        memory: MemorySwarm,
        nursery: trio.Nursery,
        noting: Noting,
        died: Callable[[str, Exception], None],
    ) -> None:
        self.core: Core | None = None
        self.hub: Hub | None = None
        self.state: Callable[[], dict[str, Any]] | None = None
        self.run: Run | None = None
        self.jobs: list[Job] = []
        self.block_jobs: list[BlockVerifyJob] = []
        self.lives = 0
        self.wire: BulkNetwork | None = None
        self.bulk_sent = 0  # bytes of shards, by earlier lives
        self.opened: list[Callable[[Core], None]] = []
        self.skew_s = 0.0
        self.hello: Hello | None = None
        self.floor: Floor | None = None
        self.identity = identity_of(seed, "operator")
        self.folder = folder
        self.address = f"/memory/{_NUMBER}/p2p/{self.identity.peer_id}"
        self._scenario, self._seed, self._memory = scenario, seed, memory
        self._nursery, self._noting, self._died = nursery, noting, died
        self._scope = trio.CancelScope()
        self._gone = trio.Event()

    def now_ms(self) -> int:
        """The coordinator's wall clock."""
        return virtual_ms() + round(self.skew_s * 1000)

    async def start(self) -> None:
        """Serve the run, which is made at the first call; returns once nodes may come."""
        if not self.folder.exists():
            self._create()
        self.lives += 1
        self._scope, self._gone = trio.CancelScope(), trio.Event()
        await self._nursery.start(self._serve, self._scope, self._gone)

    async def crash(self) -> None:
        """Kill the live coordinator; returns when nothing of it is left but what was on the disk."""
        snapshots = self.folder / "snapshots"
        before = set(snapshots.iterdir()) if snapshots.is_dir() else set()
        self._memory.crash(self.identity.peer_id)
        self._scope.cancel()
        await self._gone.wait()
        for path in set(snapshots.iterdir()) - before if snapshots.is_dir() else ():
            path.unlink()  # a clean stop makes one, a killed process does not

    @property
    def full(self) -> bool:
        """Whether the run's disk is."""
        return full_disk.is_full(self.folder)

    def fill_disk(self) -> None:
        """Let no file of the run be written, and its database not grow by a page."""
        full_disk.fill(self.folder)
        self._limit(1)

    def free_disk(self) -> None:
        """Make room again."""
        full_disk.clear(self.folder)
        self._limit(_ALL_PAGES)

    def _limit(self, pages: int) -> None:
        if self.core is not None:
            store = self.core.journal.store
            assert isinstance(store, SqliteStore)
            store.db.execute(f"PRAGMA max_page_count={pages}").fetchall()  # never below what there is

    def _create(self) -> None:
        if self._scenario.phase == "blocks":
            its, now = settings(self._scenario), self.now_ms()
            create_block_run(self.folder, self._scenario, its, self._seed, now, self.identity)
            return
        model = self.folder.with_name("model")
        standin.write_model(model, self._scenario.swarm.model_bytes, self._seed)
        create_run(
            *(self.folder, model, settings(self._scenario), default_verify_spec("float32")),
            name=self._scenario.name,
            description="",
            model_name="standin",
            seed=self._seed,
            now_ms=self.now_ms(),
            identity=self.identity,
        )

    async def _serve(
        self, scope: trio.CancelScope, gone: trio.Event, task_status: Any = trio.TASK_STATUS_IGNORED
    ) -> None:
        work = self._scenario.work
        try:
            with scope, open_run(self.folder) as run:
                self.run = run
                setup = WorkerSetup(spec=run.spec, run_id=run.run_id, folder=str(run.path), threads=1)
                peer_id = run.identity.peer_id
                async with self._memory.network(peer_id, number=_NUMBER) as network:
                    self.wire = BulkNetwork(network)
                    self.wire.sent = self.bulk_sent
                    await run_coordinator(
                        *(run, self.wire),
                        _Verifiers(setup, work.verify_s, work.verifiers, self.block_jobs),
                        _Learner(setup, work.learn_s, self.jobs, self._stages(setup)),
                        now_ms=self.now_ms,
                        rng=drawn(self._seed, "coordinator", str(self.lives)),
                        offload=in_place,
                        announce=lambda line: None,
                        control=False,
                        shard_size=self._scenario.swarm.shard_bytes,
                        pressure=Pressure(),
                        keep=KEEP,
                        hello=self.hello,
                        floor=self.floor,
                        task_status=_Opened(self, task_status),
                    )
        except Exception as error:
            self._died("coordinator", error)
        finally:
            self.bulk_sent = 0 if self.wire is None else self.wire.sent
            self.core = self.hub = self.state = None
            gone.set()

    def _stages(self, setup: WorkerSetup) -> BlockStages | None:
        if setup.spec.pretrain is None:
            return None
        asked = self._scenario
        return BlockStages(setup, asked.blocks.weights, asked.swarm.model_bytes, self._seed)

    def _opened(self, state: Any) -> None:
        self.state = state
        self.core, self.hub = state.args[0], state.args[1]  # it is partial(state_tree, core, hub, ...)
        if self.full:
            self._limit(1)
        self.core.listeners.append(self._noting.hear)
        for tell in self.opened:
            tell(self.core)


class _Opened:
    """trio's task status: the listener is there before the first event."""

    def __init__(self, headquarters: Headquarters, task_status: Any) -> None:
        self._headquarters, self._task_status = headquarters, task_status

    def started(self, state: Callable[[], dict[str, Any]], /) -> None:
        self._headquarters._opened(state)
        self._task_status.started()


class _Verifiers(StandInVerifier):
    def __init__(
        self, setup: WorkerSetup, seconds: float, slots: int, block_jobs: list[BlockVerifyJob]
    ) -> None:
        super().__init__(setup, seconds)
        self.slots = slots
        self._block_jobs = block_jobs

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        result = await super().verify_block(job)
        self._block_jobs.append(job)
        return result


class _Learner(StandInLearner):
    def __init__(
        self, setup: WorkerSetup, seconds: float, jobs: list[Job], stages: BlockStages | None
    ) -> None:
        super().__init__(setup, seconds, stages=stages)
        self._jobs = jobs

    async def train(self, job: Job) -> Trained:
        self._jobs.append(job)
        return await super().train(job)


def settings(scenario: Scenario) -> Settings:
    """What the run's spec is made of."""
    work, base = scenario.work, demo()
    groups = max(1, round(scenario.swarm.nodes * work.units_per_version * work.prompts))
    return replace(
        base,
        sampling=structs.replace(base.sampling, max_new_tokens=work.tokens),
        rollout=structs.replace(
            base.rollout,
            prompts_per_unit=work.prompts,
            group_size=work.group_size,
            groups_per_version=min(groups, 65_536),
            max_groups_per_version=min(2 * groups, 65_536),
            max_lag=work.max_lag,
            versions=work.versions,
            timeout_s=float(work.timeout_s),
            deadline_s=float(work.deadline_s),
        ),
        weights_dtype="bfloat16",
    )

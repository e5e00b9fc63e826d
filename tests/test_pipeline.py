"""The learner goes on while a version is published; one version ahead, and through any crash."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from coordinator_history import MAX_LAG, history, published, trained
from coordinator_support import ROLLOUT, Coordinator, FakeLearner, coordinating, make_run, node

from barnraise.coordinator import publisher
from barnraise.coordinator.events import BatchFormed, VersionTrained, decode_event, encode_event
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import entries_of
from barnraise.coordinator.scheduler import Wait, decide_lease, form_batch
from barnraise.coordinator.state import EventError, State, apply, fold
from barnraise.coordinator.workers import Trained, TrainJob, checkpoint_folder
from barnraise.protocol.errors import ChildError, StorageError
from barnraise.protocol.memory_network import MemorySwarm
from tests.test_coordinator_state import accept, started, submit

Clock = trio.testing.MockClock
SPEC = msgspec.structs.replace(ROLLOUT, max_lag=MAX_LAG, versions=100, groups_per_version=2)


# --- the fold


def batch_of(state: State, seed: int, version: int | None = None) -> BatchFormed:
    """A batch of fresh work, formed."""
    one = submit(state, random.Random(seed), version=state.head if version is None else version)
    accept(state, one)
    formed = form_batch(state, SPEC, 9)
    assert isinstance(formed, BatchFormed)
    apply(state, formed)
    return formed


def test_the_next_batch_is_formed_while_the_version_before_is_unpublished() -> None:
    state = started()
    assert batch_of(state, 1).version == 1
    apply(state, trained(state, 10))
    assert (state.head, state.made) == (0, 1)
    assert batch_of(state, 2).version == 2
    apply(state, published(state, 11))
    assert (state.head, state.made) == (1, 1)
    assert state.batch is not None
    apply(state, trained(state, 12))
    assert (state.head, state.made) == (1, 2)


def test_the_learner_is_at_most_one_version_ahead() -> None:
    state = started()
    batch_of(state, 1)
    apply(state, trained(state, 10))
    batch_of(state, 2)
    with pytest.raises(EventError, match="before the one before it was published"):
        apply(state, VersionTrained(version=2, weights="w", stats=None, accuracy=-1.0, at_ms=11))


def test_staleness_is_counted_against_the_version_being_made() -> None:
    state = started()
    for seed in (1, 2):  # the head is 1, and 2 is trained
        batch_of(state, seed)
        apply(state, trained(state, 10))
        if seed == 1:
            apply(state, published(state, 10))
    assert (state.head, state.made, state.max_lag) == (1, 2, 1)
    late = submit(state, random.Random(3), version=0)
    accept(state, late)
    assert state.submissions[late].status == "stale"  # 2 behind what version 3 is trained from
    assert isinstance(decide_lease(state, SPEC, state.nodes[b"n" * 32], b"i" * 16, 0, 10), Wait)
    fresh = batch_of(state, 4)
    assert fresh.version == 3


def test_work_that_grows_too_old_by_training_leaves_the_pool() -> None:
    state = started()
    batch_of(state, 1)
    apply(state, trained(state, 10))
    apply(state, published(state, 10))
    batch_of(state, 2)
    old = submit(state, random.Random(3), version=0)
    accept(state, old)
    assert old in state.pool
    apply(state, trained(state, 12))
    assert state.submissions[old].status == "stale"


def test_without_any_lag_nodes_wait_for_the_version_to_be_published() -> None:
    state = started()
    state.max_lag = 0
    spec = msgspec.structs.replace(SPEC, max_lag=0)
    batch_of(state, 1)
    apply(state, trained(state, 10))
    answer = decide_lease(state, spec, state.nodes[b"n" * 32], b"i" * 16, 0, 10)
    assert isinstance(answer, Wait)
    assert "being published" in answer.reason


def test_the_work_of_a_version_is_kept_until_it_is_published() -> None:
    state = started()
    taken = batch_of(state, 1).submissions
    apply(state, trained(state, 10))
    assert {state.submissions[key].status for key in taken} == {"training"}
    apply(state, published(state, 11))
    assert {state.submissions[key].status for key in taken} == {"used"}


def test_journals_from_before_the_event_still_fold() -> None:
    events = [event for event in history(5, 400) if not isinstance(event, VersionTrained)]
    state = State(max_lag=MAX_LAG)
    kept = []
    for event in events:  # what follows, follows
        try:
            apply(state, event)
        except EventError:
            continue
        kept.append(event)
    assert state.head >= 1
    assert fold([decode_event(encode_event(event)) for event in kept], MAX_LAG) == state
    assert list(entries_of(kept, MAX_LAG))


# --- the belts


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(600):
        while not condition():
            await trio.sleep(0.05)


class SlowPublishing:
    """Lets ``publisher.publish`` wait, in virtual time, until ``go`` is set; fails while ``broken``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.held = True
        self.real = publisher.publish
        monkeypatch.setattr(publisher, "publish", self)

    def __call__(self, *args: object, **named: object) -> object:
        version = args[3]
        assert isinstance(version, int)
        self.begun.append(version)
        if self.held and version > 0:
            raise StorageError("the disk is busy")  # the belt tries again
        return self.real(*args, **named)  # type: ignore[arg-type]


class CarefulLearner(FakeLearner):
    """Refuses to start from a checkpoint that is not there, as the real one does."""

    async def train(self, job: TrainJob) -> Trained:
        if not checkpoint_folder(self.folder, job.version - 1).is_dir():
            await trio.sleep(self.delay_s)
            raise ChildError(f"checkpoint {job.version - 1} is missing")
        return await super().train(job)


async def work(coordinator: Coordinator, swarm: MemorySwarm) -> None:
    """A node that answers lease after lease, always at the head."""
    async with node(swarm, coordinator) as ann:
        while not coordinator.state()["complete"]:
            ann.version = max(0, coordinator.state()["policy_version"])
            with trio.move_on_after(2):
                lease = await ann.lease()
                await ann.submit(ann.signed_work(lease))


async def test_the_learner_trains_the_next_version_while_one_is_published(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm(latency_s=0.01)
    slow = SlowPublishing(monkeypatch)
    async with coordinating(swarm, folder) as coordinator, trio.open_nursery() as nursery:
        nursery.start_soon(work, coordinator, swarm)
        await until(lambda: len(coordinator.learner.jobs) == 2)
        assert coordinator.state()["policy_version"] == 0
        assert [job.version for job in coordinator.learner.jobs] == [1, 2]
        await until(lambda: coordinator.state()["state"] == "publishing")  # 2 is made, 1 not yet published
        await trio.sleep(30)
        assert [job.version for job in coordinator.learner.jobs] == [1, 2]  # and it goes no further
        assert coordinator.state()["reason"].startswith("publishing: the disk is busy")
        slow.held = False
        await until(lambda: coordinator.state()["complete"])
        assert [job.version for job in coordinator.learner.jobs] == [1, 2, 3]
        nursery.cancel_scope.cancel()


async def test_a_coordinator_killed_between_trained_and_published_goes_on(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm(latency_s=0.01)
    slow = SlowPublishing(monkeypatch)
    async with coordinating(swarm, folder) as coordinator, trio.open_nursery() as nursery:
        nursery.start_soon(work, coordinator, swarm)
        await until(lambda: len(coordinator.learner.jobs) == 2)
        nursery.cancel_scope.cancel()
    journal = Journal(folder / "state.sqlite")
    events = list(journal.events())
    journal.close()
    assert any(isinstance(event, VersionTrained) and event.version == 1 for event in events)
    slow.held = False
    slow.begun.clear()
    async with (
        coordinating(swarm, folder, seed=1) as again,
        trio.open_nursery() as nursery,
    ):
        await until(lambda: again.state()["policy_version"] >= 1)
        assert slow.begun[0] == 1
        assert 1 not in [job.version for job in again.learner.jobs]  # it was trained, and that was durable
        nursery.start_soon(work, again, swarm)
        await until(lambda: bool(again.state()["complete"]))
        nursery.cancel_scope.cancel()


async def test_a_checkpoint_lost_before_it_was_published_is_made_again(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm(latency_s=0.01)
    slow = SlowPublishing(monkeypatch)
    async with coordinating(swarm, folder) as coordinator, trio.open_nursery() as nursery:
        nursery.start_soon(work, coordinator, swarm)
        await until(lambda: len(coordinator.learner.jobs) == 2)
        nursery.cancel_scope.cancel()
    for version in (1, 2):
        shutil.rmtree(checkpoint_folder(folder, version), ignore_errors=True)
    slow.held = False
    learner = CarefulLearner(folder)
    async with coordinating(swarm, folder, learner=learner, seed=1) as again, trio.open_nursery() as nursery:
        nursery.start_soon(work, again, swarm)
        await until(lambda: bool(again.state()["complete"]))
        assert 1 in [job.version for job in learner.jobs]
        nursery.cancel_scope.cancel()

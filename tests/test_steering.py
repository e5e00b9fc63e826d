"""Pause, resume, rollback and guards as nodes meet them: over the wire, in virtual time."""

import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
import trio
from coordinator_support import FakeLearner, coordinating, make_run, node

from barnraise.coordinator import checkpoints, learn_belt
from barnraise.coordinator.amending import amend
from barnraise.coordinator.checkpoints import Record, write_record
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import entries_of
from barnraise.coordinator.publish_belt import PublishBelt
from barnraise.coordinator.rollback import take_up_again
from barnraise.coordinator.steering import pause, resume, roll_back
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol import ledger
from barnraise.protocol.errors import RefusedError, RunFolderError
from barnraise.protocol.memory_network import MemorySwarm


@dataclass
class Recording(FakeLearner):
    """Records its versions as the learner does; its reward falls for good at version ``bad``."""

    bad: int = 1000

    async def initial(self):
        made = await super().initial()
        self._record(made)
        return made

    async def train(self, job):
        made = await super().train(job)
        if job.version >= self.bad:
            made = msgspec.structs.replace(made, stats=msgspec.structs.replace(made.stats, reward_mean=0.01))
        self._record(made)
        return made

    def _record(self, made):
        bare = msgspec.structs.replace(made, weights=checkpoints.WEIGHTS_FILE)
        write_record(
            checkpoint_folder(self.folder, made.version),
            Record(version=made.version, step=made.version, trained=bare),
        )


@asynccontextmanager
async def at_work(tmp_path, bad=1000, **rollout):
    """A coordinator and one node that hands in unit after unit."""
    swarm, folder = MemorySwarm(latency_s=0.01), make_run(tmp_path, **{"versions": 60, **rollout})
    async with coordinating(swarm, folder, learner=Recording(folder, bad=bad)) as coordinator:
        async with node(swarm, coordinator) as ann, trio.open_nursery() as nursery:
            nursery.start_soon(work, ann, coordinator)
            yield coordinator, coordinator.state.args[0], folder
            nursery.cancel_scope.cancel()


async def work(ann, coordinator):
    while True:
        ann.version = max(0, coordinator.state()["policy_version"])
        reply = await ann.lease_reply()
        if reply.lease is None:
            await trio.sleep(1)
            continue
        lease = await ann.lease()
        with trio.move_on_after(60):
            await ann.submit(ann.signed_work(lease))


async def until(core, reached, seconds=3000):
    with trio.fail_after(seconds):
        while not reached(core.state):
            await trio.sleep(0.5)


def weights(folder, version):
    return (checkpoint_folder(folder, version) / "model.safetensors").read_bytes()


async def test_a_paused_run_lends_nothing_takes_what_was_lent_and_stays_paused_over_a_restart(
    tmp_path, autojump_clock
):
    swarm, folder = MemorySwarm(latency_s=0.01), make_run(tmp_path)
    async with coordinating(swarm, folder) as coordinator:
        core = coordinator.state.args[0]
        await until(core, lambda state: state.head >= 0)
        async with node(swarm, coordinator) as ann:
            lent = await ann.lease()
            for _ in range(2):  # safe to repeat
                told = await pause(core, {"reason": "maintenance"})
                assert told == {"paused": {"by": "operator", "reason": "maintenance"}}
            await ann.submit(ann.signed_work(lent))
            await until(core, lambda state: state.accepted == 1)
            assert "maintenance" in (await ann.lease_reply()).reason
    async with coordinating(swarm, folder, seed=1) as coordinator:
        core = coordinator.state.args[0]
        assert coordinator.state()["paused"]["reason"] == "maintenance"
        async with node(swarm, coordinator) as ann:
            assert "maintenance" in (await ann.lease_reply()).reason
            assert await resume(core, {}) == {"paused": None}
            assert await ann.lease()


async def test_a_rollback_is_a_new_version_with_the_old_weights_and_the_run_learns_on_from_there(
    tmp_path, autojump_clock
):
    async with at_work(tmp_path) as (_, core, folder):
        await until(core, lambda state: state.head >= 4)
        await pause(core, {"reason": "it went wrong"})
        await until(core, lambda state: state.batch is None and state.unpublished is None)
        last = core.state.head
        kept = checkpoints.complete_versions(folder)
        back = kept[-2]
        assert await roll_back(core, folder, {"version": back, "reason": "bad batch"}) == {
            "to": back,
            "version": last + 1,
        }
        assert (await roll_back(core, folder, {"version": back, "reason": "bad batch"}))["to"] == back
        await until(core, lambda state: state.head == last + 1)
        assert weights(folder, last + 1) == weights(folder, back)
        again = await roll_back(core, folder, {"version": back, "reason": "bad batch"})
        assert again == {"to": back, "version": last + 1}
        assert core.state.operations.rollbacks == 1
        await resume(core, {})
        await until(core, lambda state: state.head >= last + 3)
        used = [item for item in core.state.submissions.values() if item.status in ("used", "training")]
        assert not any(back < item.lease.policy_version <= last and item.at_ms > 0 for item in used[-2:])
    journal = Journal(folder / "state.sqlite")
    entries = list(entries_of(journal.events(), core.state.max_lag))
    journal.close()
    assert [entry.to_version for entry in entries if isinstance(entry, ledger.RolledBack)] == [back]
    ledger.balances(entries, core.spec)  # keeps every rule


async def test_a_rollbacks_checkpoint_that_is_lost_before_it_is_published_is_made_again(
    tmp_path, autojump_clock, monkeypatch
):
    lost = []

    async with at_work(tmp_path) as (_, core, folder):
        await until(core, lambda state: state.head >= 4)
        await pause(core, {"reason": "it went wrong"})
        await until(core, lambda state: state.batch is None and state.unpublished is None)
        last, back = core.state.head, checkpoints.complete_versions(folder)[-2]
        present = PublishBelt._present

        async def present_after_loss(belt, due):
            if due.trained.version == last + 1 and not lost:
                lost.append(due.batch)
                shutil.rmtree(checkpoint_folder(folder, last + 1))
            await present(belt, due)

        monkeypatch.setattr(PublishBelt, "_present", present_after_loss)
        await roll_back(core, folder, {"version": back, "reason": "bad batch"})
        await until(core, lambda state: state.head == last + 1)
        assert lost == [None]
        assert weights(folder, last + 1) == weights(folder, back)


async def test_a_rollback_that_cannot_be_is_refused_with_what_can(tmp_path, autojump_clock):
    async with at_work(tmp_path) as (_, core, folder):
        await until(core, lambda state: state.head >= 1)
        for version, why in ((999, "not an earlier one"), (True, "which version"), ("1", "which version")):
            with pytest.raises(RefusedError, match=why):
                await roll_back(core, folder, {"version": version, "reason": "x"})
        with pytest.raises(RefusedError, match="say why"):
            await roll_back(core, folder, {"version": 0, "reason": " "})


async def test_a_collapse_pauses_the_run_once_and_the_operator_may_go_on(tmp_path, autojump_clock):
    async with at_work(tmp_path, bad=8) as (coordinator, core, _):
        await until(core, lambda state: state.operations.paused is not None)
        head = core.state.head
        assert core.state.operations.paused.by == "guard"
        alarm = coordinator.state()["alarms"][0]
        assert alarm["kind"] == "reward-collapse"
        assert "rollback" in alarm["text"]
        await trio.sleep(300)
        assert core.state.head <= head + 1  # what was under way, and no more
        await resume(core, {})
        await until(core, lambda state: state.head >= head + 5)
        assert core.state.operations.paused is None


@asynccontextmanager
async def idle(tmp_path, **rollout):
    """As ``at_work``, paused with nothing in training; with the versions that may be taken up again."""
    async with at_work(tmp_path, **rollout) as (coordinator, core, folder):
        await until(core, lambda state: state.head >= 4)
        await pause(core, {"reason": "it went wrong"})
        await until(core, lambda state: state.batch is None and state.unpublished is None)
        yield coordinator, core, folder, checkpoints.complete_versions(folder)[:-1]


async def test_a_run_that_is_complete_can_go_back_and_its_settings_can_still_change(tmp_path, autojump_clock):
    async with at_work(tmp_path, versions=4) as (coordinator, core, folder):
        await until(core, lambda state: state.head >= 4)
        await trio.sleep(60)
        assert await roll_back(core, folder, {"version": 3, "reason": "worse"}) == {"to": 3, "version": 5}
        await until(core, lambda state: state.head == 5)
        assert coordinator.state()["complete"]
        assert weights(folder, 5) == weights(folder, 3)
        told = await amend(core, {"changes": {"grpo.learning_rate": "1e-05"}, "reason": "slower"})
        assert told["number"] == 1
        with pytest.raises(RefusedError, match="below version 5"):
            await amend(core, {"changes": {"rollout.versions": "3"}, "reason": "less"})
        await amend(core, {"changes": {"rollout.versions": "7"}, "reason": "more"})
        await until(core, lambda state: state.head == 7)


async def test_of_two_operators_at_once_one_goes_back_and_the_other_is_told(tmp_path, autojump_clock):
    said = []

    async def order(core, folder, version):
        try:
            said.append(await roll_back(core, folder, {"version": version, "reason": "x"}))
        except RefusedError as error:
            said.append(error.code)

    async with idle(tmp_path) as (_, core, folder, kept):
        async with trio.open_nursery() as nursery:
            for version in (kept[-1], kept[-1], 0, 0):
                nursery.start_soon(order, core, folder, version)
        assert sorted(map(str, said))[:2] == ["not-now"] * 2
        assert len({str(reply) for reply in said}) == 2
        assert core.state.operations.rollbacks == 1


def lose(path):
    shutil.rmtree(path)


def flip(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").unlink()  # others may be links to it
    (path / "model.safetensors").write_bytes(data)


def spoil(path):
    (path / "state.json").write_text("{")


def flip_an_old_one(path):
    """The journal has the manifests of the newest versions alone."""
    flip(path)
    assert (path / ".published").is_file()


@pytest.mark.parametrize("harm", [lose, flip, spoil, flip_an_old_one])
async def test_a_rollback_whose_checkpoint_is_lost_after_the_order_gives_way_to_another(
    tmp_path, autojump_clock, monkeypatch, harm
):
    real = learn_belt.take_up_again

    def too_late(*args):
        monkeypatch.setattr(learn_belt, "take_up_again", real)
        harm(checkpoint_folder(args[0], args[2]))
        return real(*args)

    async with idle(tmp_path) as (coordinator, core, folder, kept):
        last = core.state.head
        if harm is flip_an_old_one:
            monkeypatch.setattr(Journal, "manifest", lambda journal, version: None)
        monkeypatch.setattr(learn_belt, "take_up_again", too_late)
        await roll_back(core, folder, {"version": kept[-2], "reason": "bad"})
        await trio.sleep(30)
        assert core.state.head == last
        assert coordinator.state()["reason"].startswith("rollback: ")
        told = await roll_back(core, folder, {"version": kept[-3], "reason": "that one, then"})
        assert told == {"to": kept[-3], "version": last + 1}
        await until(core, lambda state: state.head == last + 1)
        assert weights(folder, last + 1) == weights(folder, kept[-3])
        await resume(core, {})
        await until(core, lambda state: state.head >= last + 3)
    journal = Journal(folder / "state.sqlite")
    entries = list(entries_of(journal.events(), core.state.max_lag))
    journal.close()
    ledger.balances(entries, core.spec)  # keeps every rule


def test_a_version_whose_optimiser_is_gone_begins_with_an_empty_one(tmp_path):
    folder = make_run(tmp_path)
    source = checkpoint_folder(folder, 0)
    learner = Recording(folder)

    async def first():
        await learner.initial()

    trio.run(first, clock=trio.testing.MockClock(autojump_threshold=0))
    again = take_up_again(folder, 3, 0)
    assert again.version == 3
    assert again.stats is None
    record = checkpoints.read_record(folder, 3)
    assert record.fresh_optimizer
    assert weights(folder, 3) == (source / "model.safetensors").read_bytes()
    assert take_up_again(folder, 3, 0) == again  # a crash before it was recorded
    with pytest.raises(RunFolderError, match="not kept any more"):
        take_up_again(folder, 5, 4)

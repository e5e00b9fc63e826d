"""A coordinator's clock that ran ahead and went back: what was set on it ends when it was meant to."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import coordinator_support
import pytest
import trio
from coordinator_history import MAX_LAG, RUN_ID, Recorded, as_core, lease_for
from coordinator_support import Coordinator, ScriptedNode, coordinating, make_run, node, opened
from server_support import Clock, audited, head_is
from test_block_rounds import NODES, SPEC, World

from barnraise.coordinator import bans
from barnraise.coordinator.appeals import appeal_wait_ms
from barnraise.coordinator.audit import ban_ms, is_banned, quiet_ms
from barnraise.coordinator.audit_fold import APPEAL_EVERY_MS, UNFINISHED_FREE, strike_pause_ms
from barnraise.coordinator.backup import back_up
from barnraise.coordinator.block_scheduler import form_round
from barnraise.coordinator.clock_back import ClockBack, moved_bans
from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.deadlines import AGAIN_MS, Deadlines
from barnraise.coordinator.events import (
    BanLifted,
    LeaseClosed,
    LeaseIssued,
    LeaseTimedOut,
    NodeBanned,
    NodeJoined,
    OffenceNoted,
    RunOpened,
    VersionPublished,
)
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.restore import restore
from barnraise.coordinator.standing import standing_of
from barnraise.coordinator.state import fold
from barnraise.coordinator.state_parts import CLOCK_BACK_MS
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm

ANN = Identity.from_private_bytes(b"a" * 32).public_key
YEAR_MS = 365 * 86_400_000
HOUR_MS = 3_600_000
MINUTE_MS = 60_000
NOW = 10 * YEAR_MS
AHEAD = [30 * 1_000, 59 * MINUTE_MS, 25 * HOUR_MS, 30 * YEAR_MS]


def begun(at_ms: int) -> tuple[Recorded, Core]:
    """A run with a version and Ann in it."""
    recorded = Recorded()
    recorded.record(
        RunOpened(run_id=RUN_ID, operator=b"o" * 32, at_ms=at_ms),
        VersionPublished(
            version=0, manifest=b"m" * 32, weights="w", size=1, stats=None, accuracy=-1.0, at_ms=at_ms
        ),
        NodeJoined(node=ANN, name="ann", at_ms=at_ms),
    )
    return recorded, as_core(recorded)


@pytest.mark.parametrize("seed", range(12))
def test_a_lease_lasts_no_longer_than_it_was_to_from_the_last_time_the_clock_went_back(seed: int) -> None:
    rng, now = random.Random(seed), NOW
    recorded, core = begun(now)
    deadlines = Deadlines(core)
    since: dict[bytes, int] = {}  # lease -> when it was issued, or the clock went back
    terms = {}
    ended = backs = unseen = 0
    for _ in range(400):
        step = rng.choice([rng.randint(0, 5_000)] * 20 + [rng.choice(AHEAD), -rng.choice(AHEAD)])
        now += step
        unseen += step < 0
        if step >= 0 and rng.random() < 0.05:  # a restart, or the disk refused
            deadlines = Deadlines(core) if rng.random() < 0.5 else deadlines
            recorded.state = fold(recorded.events, MAX_LAG)
            unseen += 1
        if rng.random() < 0.5:
            lease = lease_for(recorded.state, ANN, rng, now)
            terms[lease.lease_id], since[lease.lease_id] = lease, now
            recorded.record(LeaseIssued(lease=lease, instance=b"i" * 16))
        if rng.random() < 0.2:  # the clock goes on, or back, before anybody looks
            continue
        if unseen:
            backs, unseen, since = backs + unseen, 0, dict.fromkeys(since, now)
        for event in deadlines.due(now, lambda key, at: False):
            assert isinstance(event, LeaseTimedOut | LeaseClosed)
            recorded.record(event)
            ended += 1
        for key, begins in since.items():
            lent, lease = recorded.state.leases.get(key), terms[key]
            timeout, deadline = lease.timeout_at - lease.issued_at, lease.deadline_at - lease.issued_at
            assert lent is None or now < begins + deadline + AGAIN_MS
            assert lent is None or lent.timed_out or now < begins + timeout
    assert ended > 100
    assert backs


def test_a_lease_of_before_is_not_cut_short_by_a_clock_that_comes_back_to_where_it_was() -> None:
    recorded, core = begun(NOW)
    lease = lease_for(recorded.state, ANN, random.Random(1), NOW)
    recorded.record(LeaseIssued(lease=lease, instance=b"i" * 16))
    deadlines = Deadlines(core)
    for now in (NOW, NOW + 20_000, NOW + 10_000, lease.timeout_at - 1):  # ten seconds back
        assert deadlines.due(now, lambda key, at: False) == []
    assert len(deadlines.due(lease.timeout_at, lambda key, at: False)) == 1


def banned(at_ms: int, lasting_ms: int) -> NodeBanned:
    return NodeBanned(node=ANN, reason="why", until=at_ms + lasting_ms, by_rule=True, at_ms=at_ms)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("lasting", [ban_ms(0), ban_ms(2), ban_ms(9)])
def test_a_ban_lasts_about_as_long_as_it_was_to(lasting: int, ahead: int, restart: bool) -> None:
    recorded, core = begun(NOW)
    clock, served = ClockBack(core), 20 * MINUTE_MS
    recorded.record(banned(NOW + ahead, lasting))
    assert clock.due(NOW + ahead + served) == []
    if restart:  # all that is known then is the newest event
        recorded.record(NodeJoined(node=b"b" * 32, name="b", at_ms=NOW + ahead + served))
        recorded.state = fold(recorded.events, MAX_LAG)
        clock = ClockBack(core)
    now = NOW + served
    recorded.record(*clock.due(now))
    ann = recorded.state.nodes[ANN]
    if ahead > served + CLOCK_BACK_MS:
        assert ann.banned_until == now + lasting - served
    slack = max(0, min(ahead, served + CLOCK_BACK_MS))
    assert now + lasting - served <= ann.banned_until <= now + lasting - served + slack
    assert (ann.bans, ann.ban_reason, is_banned(ann, now)) == (1, "why", True)
    assert clock.due(now) == []
    assert clock.due(now + 250) == []
    assert fold(recorded.events, MAX_LAG) == recorded.state  # what was decided is in the events


def test_a_ban_that_was_over_on_the_clock_ahead_is_over() -> None:
    recorded, core = begun(NOW)
    clock = ClockBack(core)
    recorded.record(banned(NOW + YEAR_MS, HOUR_MS))
    assert clock.due(NOW + YEAR_MS + 2 * HOUR_MS) == []
    assert is_banned(recorded.state.nodes[ANN], NOW + 2 * HOUR_MS)  # what would be without it
    (event,) = clock.due(NOW + 2 * HOUR_MS)
    assert isinstance(event, BanLifted)
    recorded.record(event)
    assert not is_banned(recorded.state.nodes[ANN], NOW + 2 * HOUR_MS)


def test_a_ban_of_before_the_clock_ran_ahead_stays_as_it_is() -> None:
    recorded, core = begun(NOW)
    clock = ClockBack(core)
    recorded.record(banned(NOW, HOUR_MS))
    assert clock.due(NOW + YEAR_MS) == []
    assert not is_banned(recorded.state.nodes[ANN], NOW + YEAR_MS)
    assert clock.due(NOW + MINUTE_MS) == []
    assert recorded.state.nodes[ANN].banned_until == NOW + HOUR_MS


def test_a_ban_is_moved_though_the_disk_refused_at_first_or_others_wrote_before() -> None:
    recorded, core = begun(NOW)
    clock = ClockBack(core)
    recorded.record(banned(NOW + YEAR_MS, HOUR_MS))
    assert clock.due(NOW) == clock.due(NOW) == moved_bans(recorded.state, NOW + YEAR_MS, NOW) != []
    recorded.record(NodeJoined(node=b"b" * 32, name="b", at_ms=NOW))  # then a crash
    recorded.record(*ClockBack(core).due(NOW))
    assert recorded.state.nodes[ANN].banned_until == NOW + HOUR_MS


@pytest.mark.parametrize("ahead", AHEAD[1:])
def test_a_pause_that_was_set_on_a_clock_ahead_holds_nobody_up(ahead: int) -> None:
    recorded, _ = begun(NOW)
    recorded.record(OffenceNoted(node=ANN, what="bad-signature", at_ms=NOW + ahead))
    ann = recorded.state.nodes[ANN]
    assert quiet_ms(ann, NOW + ahead) == strike_pause_ms(1)
    assert quiet_ms(ann, NOW) == standing_of(ann, NOW).quiet_until == 0
    rng = random.Random(1)
    for _ in range(UNFINISHED_FREE + 2):  # and does not hide one that is set now
        lease = lease_for(recorded.state, ANN, rng, NOW)
        recorded.record(LeaseIssued(lease=lease, instance=b"i" * 16))
        recorded.record(LeaseClosed(lease_id=lease.lease_id, reason="returned", at_ms=NOW))
    assert quiet_ms(ann, NOW) == strike_pause_ms(2)
    assert standing_of(ann, NOW).quiet_until == NOW + strike_pause_ms(2)


@pytest.mark.parametrize("ahead", AHEAD)
def test_an_appeal_waits_about_as_long_as_it_has_to(ahead: int) -> None:
    ann = begun(NOW)[0].state.nodes[ANN]
    ann.next_appeal_at = NOW + ahead + APPEAL_EVERY_MS
    assert appeal_wait_ms(ann, NOW) <= APPEAL_EVERY_MS + CLOCK_BACK_MS
    assert appeal_wait_ms(ann, NOW + ahead + 1_000) == APPEAL_EVERY_MS - 1_000
    assert appeal_wait_ms(ann, NOW + ahead + APPEAL_EVERY_MS) == 0


@pytest.mark.parametrize("ahead", AHEAD[1:])
def test_a_round_that_began_on_a_clock_ahead_ends_with_a_quorum(ahead: int) -> None:
    world = World()
    world.now = NOW + ahead
    world.state.blocks.opened_at = world.now
    for key in NODES[: SPEC.quorum * SPEC.blocks]:
        lease = world.lease(key)
        assert lease is not None
        world.judge(world.submit(lease))
    assert form_round(world.state, SPEC, world.now) is None
    assert form_round(world.state, SPEC, NOW) is not None


class Jumping:
    """The coordinator's wall clock, ``ahead_ms`` of the true one."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> int:
        return NOW + round(trio.current_time() * 1000) + self.ahead_ms


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Jumping:
    clock = Jumping()
    monkeypatch.setattr(coordinator_support, "virtual_ms", clock)
    return clock


@asynccontextmanager
async def alone(folder: Path, now_ms: Callable[[], int]) -> AsyncIterator[Core]:
    """The run's core without a server, as an operator's command finds it."""
    with opened(folder) as run, closing(Journal(run.journal_path)) as journal:
        core = Core(journal, run.spec, run.run_id, run.identity, now_ms, in_place)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            yield core
            nursery.cancel_scope.cancel()


async def has_work_after(scripted: ScriptedNode, seconds: float) -> bool:
    with trio.move_on_after(seconds):
        await scripted.lease()
        return True
    return False


@pytest.mark.parametrize("restart", [False, True])
async def test_a_unit_lent_on_a_clock_ahead_is_lent_to_others_and_its_lease_ends(
    tmp_path: Path, autojump_clock: Clock, wall: Jumping, restart: bool
) -> None:
    folder, swarm = make_run(tmp_path), MemorySwarm()

    async def ends(coordinator: Coordinator) -> None:
        wall.ahead_ms = 0
        async with node(swarm, coordinator, b"b") as bob:
            bobs = await bob.lease()  # issued on the clock that is right
            lasts = (lent.deadline_at - lent.issued_at) / 1000
            await trio.sleep(lasts + 2)
            async with node(swarm, coordinator, b"a") as ann:
                with pytest.raises(RefusedError, match="deadline has passed"):
                    await ann.submit(ann.signed_work(lent))
                assert (await ann.lease()).issued_at < bobs.deadline_at + 10_000

    async with coordinating(swarm, folder) as coordinator:
        await head_is(coordinator, 0)
        wall.ahead_ms = YEAR_MS
        async with node(swarm, coordinator, b"a") as ann:
            lent = await ann.lease()
        if not restart:
            await ends(coordinator)
    if restart:
        async with coordinating(swarm, folder, seed=1) as coordinator:
            await ends(coordinator)
    report = audited(tmp_path, coordinator, folder)
    assert report.ok, report.problems


@pytest.mark.parametrize("restart", [False, True])
async def test_a_node_banned_for_an_hour_has_work_again_after_an_hour_and_the_ledger_verifies(
    tmp_path: Path, autojump_clock: Clock, wall: Jumping, restart: bool
) -> None:
    folder, swarm = make_run(tmp_path), MemorySwarm()
    async with coordinating(swarm, folder) as coordinator:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator, b"a"):
            pass
    wall.ahead_ms = YEAR_MS
    async with alone(folder, wall) as core:
        await bans.ban(core, {"node": "ann", "reason": "floods", "seconds": 3_600})
    wall.ahead_ms = 0 if restart else YEAR_MS
    async with coordinating(swarm, folder, seed=1) as coordinator:
        await trio.sleep(1)
        wall.ahead_ms = 0
        await trio.sleep(1)
        async with node(swarm, coordinator, b"a") as ann:
            banned_s = trio.current_time()
            assert "UTC: by the operator: floods" in (await ann.lease_reply()).reason
            assert await has_work_after(ann, 3_590) is False
            assert await has_work_after(ann, 60) is True
            assert trio.current_time() - banned_s < 3_610
        before = coordinator.state()
    async with alone(folder, wall) as core:  # replayed
        (replayed,) = core.state.nodes.values()
        assert (replayed.bans, replayed.banned_until <= wall()) == (1, True)
    assert before["nodes"]
    report = audited(tmp_path, coordinator, folder)
    assert report.ok, report.problems


@pytest.mark.parametrize("lasting_s", [3_600, 30 * 86_400])
@pytest.mark.parametrize("served_s", [600, 86_400])
async def test_a_ban_of_a_clock_ahead_lasts_no_longer_in_a_run_that_continues_a_backup(
    tmp_path: Path, autojump_clock: Clock, wall: Jumping, lasting_s: int, served_s: int
) -> None:
    folder, swarm = make_run(tmp_path), MemorySwarm()
    async with coordinating(swarm, folder) as coordinator:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator, b"a"):
            pass
    wall.ahead_ms = YEAR_MS
    async with alone(folder, wall) as core:
        await bans.ban(core, {"node": "ann", "reason": "floods", "seconds": lasting_s})
        wall.ahead_ms += served_s * 1000
        await core.record([NodeJoined(node=ANN, name="ann", at_ms=wall())])
    back_up(folder, tmp_path / "backup", wall())
    wall.ahead_ms = 0
    restore(tmp_path / "backup", tmp_path / "elsewhere", wall())
    async with alone(tmp_path / "elsewhere", wall) as core:
        left = [node.banned_until - wall() for node in core.state.nodes.values()]
    expected = [(lasting_s - served_s) * 1000] if lasting_s > served_s else []
    assert left == pytest.approx(expected, abs=1_000)

"""What is due is found without a walk over what is not, and the hub's costs do not grow with its nodes."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from coordinator_history import MAX_LAG, RUN_ID, Recorded, as_core, lease_for, next_event

from barnraise.coordinator import scheduler
from barnraise.coordinator.collector import calm_collector
from barnraise.coordinator.deadlines import Deadlines
from barnraise.coordinator.events import LeaseIssued, NodeJoined, RunOpened, VersionPublished
from barnraise.coordinator.hub import MAX_PER_PEER, Hub, Live
from barnraise.coordinator.state import fold
from barnraise.protocol.messages import Message

NODE = b"n" * 32


def never(lease_id: bytes, now_ms: int) -> bool:
    return False


@pytest.mark.parametrize("seed", range(8))
def test_what_is_due_is_what_a_walk_over_all_leases_would_find(seed: int) -> None:
    rng, core, now = random.Random(seed), Recorded(), 1_000
    deadlines = Deadlines(as_core(core))
    found = 0
    for step in range(400):
        now += rng.randint(0, 5_000)
        core.record(next_event(core.state, rng, now))
        if rng.random() < 0.3:
            spared = {key for key in core.state.leases if rng.random() < 0.2}

            def waits(key: bytes, at: int, spared: set[bytes] = spared) -> bool:
                return key in spared

            events = deadlines.due(now, waits)
            wanted = scheduler.expired(core.state, now, waits)
            late = [
                item for item in wanted if now - core.state.leases[item.lease_id].terms.deadline_at > 1_000
            ]  # type: ignore[union-attr]
            key = lambda event: (type(event).__name__, event.lease_id)  # noqa: E731
            assert (
                {key(item) for item in late}
                <= {key(item) for item in events}
                <= {key(item) for item in wanted}
            )
            core.record(*events)
            found += len(events)
        if step % 130 == 129:  # the disk refused: the state is another one, and says the same
            core.state = fold(core.events, MAX_LAG)
    assert found


def test_leases_that_are_not_due_are_not_looked_at() -> None:
    core = Recorded()
    core.record(
        RunOpened(run_id=RUN_ID, operator=b"o" * 32, at_ms=1),
        VersionPublished(
            version=0, manifest=b"m" * 32, weights="w", size=1, stats=None, accuracy=-1.0, at_ms=1
        ),
        NodeJoined(node=NODE, name="n", at_ms=1),
    )
    deadlines, rng = Deadlines(as_core(core)), random.Random(0)
    assert deadlines.due(1, never) == []
    for number in range(1_000):
        terms = lease_for(core.state, NODE, rng, now=number * 1_000)
        terms = msgspec.structs.replace(terms, unit_id=core.state.next_unit, issued_at=1)
        core.record(LeaseIssued(lease=terms, instance=b"i" * 16))
    looked: list[bytes] = []

    def noting(key: bytes, at: int) -> bool:
        looked.append(key)
        return False

    assert deadlines.due(59_999, noting) == []
    assert len(deadlines.due(60_000, noting)) == 1
    assert looked == []  # its deadline is not over
    assert len(deadlines.due(125_000, noting)) == 66  # six are over, sixty time out
    assert len(looked) == 6


@dataclass
class Pushed:
    messages: list[Message] = field(default_factory=list)
    closed: str = ""

    def push(self, message: Message) -> bool:
        self.messages.append(message)
        return True

    def close(self, reason: str) -> None:
        self.closed = reason


def test_the_hub_draws_from_exactly_those_who_are_there() -> None:
    rng, hub = random.Random(4), Hub()
    everybody: list[Live] = []
    for step in range(3_000):
        move = rng.random()
        if move < 0.5:
            peer = f"p{rng.randrange(60)}"
            if hub.has_room(peer):
                live = Live(Pushed(), peer, step)
                hub.add(live)
                everybody.append(live)
        elif move < 0.8 and everybody:
            live = rng.choice(everybody)
            live.key = live.peer_id.encode()
            hub.join(live)
        elif everybody:
            hub.remove(everybody.pop(rng.randrange(len(everybody))))
        assert set(hub._order) == set(hub.by_key.values())
        assert all(hub._order[place] is live for live, place in hub._place.items())
        assert len(hub._order) == len(hub._place) == len(hub.by_key)
        assert list(hub.joining) == [live for live in everybody if not live.key]
        assert hub.sessions == set(everybody)
    most = max(len(mine) for mine in hub._by_peer.values())
    assert 0 < most <= MAX_PER_PEER
    for live in everybody:
        hub.remove(live)
    assert not hub.by_key
    assert not hub._by_peer
    assert not hub._order


def test_what_is_there_at_the_start_is_not_looked_at_again() -> None:
    before = gc.get_threshold()
    try:
        calm_collector()
        assert gc.get_freeze_count() > 1_000
        assert gc.get_threshold() > before
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)

"""Treecast under arbitrary events from arbitrary peers: it never raises, and its books stay true."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from treecast_mesh import head

from barnraise.protocol.bitmaps import members, to_bytes, to_mask
from barnraise.protocol.messages import Message
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree_effects import (
    Ban,
    Complete,
    Connect,
    Deliver,
    Effect,
    Effects,
    Send,
    StartSend,
    StopReceive,
)
from barnraise.protocol.tree_messages import (
    Bitmap,
    Cancel,
    Contact,
    ForwardJoin,
    Gossip,
    GossipHave,
    Graft,
    Have,
    HeadMark,
    LeaveView,
    Neighbour,
    NeighbourReply,
    OverlayJoin,
    Prune,
    Shuffle,
    ShuffleReply,
    Unavailable,
    Want,
)
from barnraise.protocol.treecast import Treecast
from barnraise.protocol.view_state import ViewConfig

PEERS = [f"p{index}" for index in range(7)]
SHARDS = 12


def contact(name: str) -> Contact:
    return Contact(peer_id=name, addresses=("a/" + name,))


def fresh(seed: int) -> Treecast:
    core = Treecast(
        contact("me"),
        [contact("p0")],
        random.Random(seed),
        views=ViewConfig(active=4, passive=6),
        transfer=TransferConfig(versions=3),
    )
    core.start(0.0)
    return core


def any_message(rng: random.Random) -> Message:
    version = rng.randrange(5)
    index = rng.randrange(SHARDS + 3)
    some = tuple(rng.sample(range(SHARDS + 3), rng.randrange(6)))
    peer = contact(rng.choice([*PEERS, "me", "far"]))
    mark = HeadMark(id=bytes([version]) * 32, version=version, hops=rng.randrange(9))
    makers: list[Callable[[], Message]] = [
        lambda: OverlayJoin(addresses=("a/x",)),
        lambda: Neighbour(addresses=("a/x",), urgent=rng.random() < 0.5),
        lambda: NeighbourReply(accepted=rng.random() < 0.5),
        lambda: LeaveView(),
        lambda: ForwardJoin(newcomer=peer, ttl=rng.randrange(9)),
        lambda: Shuffle(origin=peer, ttl=rng.randrange(9), sample=(peer,)),
        lambda: ShuffleReply(sample=(peer,)),
        lambda: Gossip(version=version, hops=rng.randrange(9), head=head(version)),
        lambda: GossipHave(marks=(mark,)),
        lambda: Graft(id=None if rng.random() < 0.5 else mark.id),
        lambda: Prune(),
        lambda: Have(version=version, indices=some),
        lambda: Want(version=version, indices=some, busy=some[:1], starved=rng.random() < 0.2),
        lambda: Bitmap(version=version, bits=to_bytes(to_mask(some)), ask=rng.random() < 0.5),
        lambda: Cancel(version=version, index=index),
        lambda: Unavailable(version=version, index=index),
    ]
    return rng.choice(makers)()


def check_books(core: Treecast) -> None:
    transfer = core.transfer
    assert len(core.views.active) <= core.views.state.config.active
    assert set(transfer._peers) == set(core.views.active) == set(core.tree.eager) | set(core.tree.lazy)
    assert not set(core.tree.eager) & set(core.tree.lazy)
    assert len(transfer._versions) <= transfer.config.versions
    assert list(transfer._versions) == sorted(transfer._versions, reverse=True)
    assert len(transfer.sending()) <= transfer.fan_out + 2
    for version, state in transfer._versions.items():
        assert state.incoming == to_mask(state.on_way)
        assert not state.incoming & state.have
        for index in range(SHARDS + 3):
            holders = sum(peer.holds.get(version, 0) >> index & 1 for peer in transfer._peers.values())
            assert state.counts.count(index) == holders
        for name, peer in transfer._peers.items():
            if peer.receiving is not None and peer.receiving[0] == version:
                assert state.on_way[peer.receiving[1]] == name
            assert all(not state.incoming >> index & 1 for index in peer.asked.get(version, ()))


def check_effects(core: Treecast, effects: Effects) -> None:
    for effect in effects:
        if isinstance(effect, StartSend):
            assert core.transfer.bitmap(effect.version) >> effect.index & 1
        if isinstance(effect, Send) and isinstance(effect.message, Want):
            state = core.transfer._versions.get(effect.message.version)
            assert state is None or not to_mask(effect.message.indices) & state.have


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 250))
def test_any_events_in_any_order_leave_the_books_true(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    core, now = fresh(seed), 0.0
    for _ in range(steps):
        now += rng.choice((0.0, 0.1, 1.0, 6.0))
        peer, version, index = rng.choice(PEERS), rng.randrange(5), rng.randrange(SHARDS)
        receiving, sending = core.transfer.receiving(), core.transfer.sending()
        match rng.randrange(19):
            case 0:
                effects = core.want(version, [1 << 20] * rng.randint(1, SHARDS), now)
            case 1:
                effects = core.forget(version, now)
            case 2:
                effects = core.connected(peer, now)
            case 3:
                effects = core.disconnected(peer, now) if rng.random() < 0.3 else core.on_time(now)
            case 4:
                effects = core.incoming(peer, version, index, now)
            case 5 if receiving:
                peer = rng.choice(sorted(receiving))
                effects = core.received(peer, *receiving[peer], now)
                effects += core.verified(peer, *receiving[peer], now)
            case 6 if receiving and rng.random() < 0.3:
                peer = rng.choice(sorted(receiving))
                effects = core.corrupt(peer, *receiving[peer], now)
                assert any(isinstance(effect, Ban) for effect in effects)
            case 7:
                effects = core.verified(None, version, index, now)
            case 8 if sending:
                peer = rng.choice(sorted(sending))
                done = core.sent if rng.random() < 0.8 else core.send_failed
                effects = done(peer, *sending[peer], now)
            case 9:
                effects = core.lost(version, index, now)
            case 10:
                effects = core.on_time(now)
            case 11:
                claimed, effects = core.transfer.arrivals.claim(version, now)
                effects += (
                    core.verified(None, version, claimed, now) if claimed and rng.random() < 0.5 else []
                )
            case 12:
                effects = core.transfer.arrivals.unclaim(version, index, now)
            case 13:
                config = replace(core.transfer.config, inbound=rng.randrange(4), slots=rng.randrange(4))
                effects = core.reconfigure(config, now)
            case 14:
                effects = []
                core.progress(peer, rng.randrange(200_000), now)
            case _:
                effects = core.on_message(peer, any_message(rng), now)
        check_books(core)
        check_effects(core, effects)
        assert core.wake_at is None or core.wake_at >= 0


def test_a_banned_peer_is_out_of_overlay_tree_and_transfers() -> None:
    core = fresh(1)
    core.on_message("bad", Neighbour(addresses=("a/bad",), urgent=True), 0.0)
    core.want(1, [10], 0.0)
    core.on_message("bad", Bitmap(version=1, bits=b"\x01", ask=False), 0.0)
    core.incoming("bad", 1, 0, 0.1)
    effects = core.corrupt("bad", 1, 0, 0.2)
    assert any(isinstance(effect, Ban) and effect.peer == "bad" for effect in effects)
    check_books(core)
    assert "bad" not in core.views.active
    core.on_message("bad", Neighbour(addresses=("a/bad",), urgent=True), 0.3)
    assert "bad" not in core.views.active


def test_heads_and_shards_flow_between_two_cores_wired_back_to_back() -> None:
    cores = {
        "me": Treecast(contact("me"), [], random.Random(1)),
        "n": Treecast(contact("n"), [contact("me")], random.Random(2)),
    }
    queue: list[tuple[str, Effect]] = []
    completed: list[tuple[str, int]] = []

    def put(name: str, effects: Effects) -> None:
        queue.extend((name, effect) for effect in effects)

    def drain() -> None:
        while queue:
            who, effect = queue.pop(0)
            match effect:
                case Connect(contact=Contact(peer_id=peer)):
                    put(peer, cores[peer].connected(who, 0.0))
                    put(who, cores[who].connected(peer, 0.0))
                case Send(peer=peer, message=message):
                    put(peer, cores[peer].on_message(who, message, 0.0))
                case StartSend(peer=peer, version=version, index=index):
                    begun = cores[peer].incoming(who, version, index, 0.0)
                    assert not any(isinstance(one, StopReceive) for one in begun)
                    put(peer, begun)
                    put(peer, cores[peer].received(who, version, index, 0.1))
                    put(peer, cores[peer].verified(who, version, index, 0.1))
                    put(who, cores[who].sent(peer, version, index, 0.1))
                case Deliver(version=version):
                    put(who, cores[who].want(version, [1 << 20] * 20, 0.0))
                case Complete(version=version):
                    completed.append((who, version))
                case _:
                    raise AssertionError(effect)

    put("me", cores["me"].start(0.0))
    put("n", cores["n"].start(0.0))
    drain()
    put("me", cores["me"].want(3, [1 << 20] * 20, 0.0, have=(1 << 20) - 1))
    put("me", cores["me"].publish(3, head(3), 0.0))
    drain()
    assert completed == [("me", 3), ("n", 3)]
    assert list(members(cores["n"].transfer.bitmap(3))) == list(range(20))
    assert cores["n"].transfer.stats.received == 20

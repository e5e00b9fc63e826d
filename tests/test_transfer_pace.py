"""Senders that are slow, and downlinks that are: who is overtaken, who is struck, what a cap asks."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_support import comes, node, orders, says, starts, wants
from treecast_sim import SHARD

from barnraise.protocol.transfer import Transfer
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree_effects import (
    Drop,
    Report,
    Send,
    StopReceive,
)
from barnraise.protocol.tree_messages import (
    Cancel,
    Want,
)


def test_at_the_end_a_slow_sender_is_overtaken_if_another_holds_the_shard() -> None:
    core = node("slow", "fast")
    says(core, "fast", tuple(range(7)))
    for index in range(7):
        comes(core, "fast", index, float(index), 0.9)
    says(core, "slow", (7,))
    core.arrivals.incoming("slow", 1, 7, 7.0)
    for second in range(8, 20):
        core.arrivals.progress("slow", 40_000, float(second))
    assert not orders(core.on_time(20.0))
    says(core, "fast", (7,), 20.0)
    effects = core.on_time(21.0)
    assert orders(effects)["fast"] == {7}
    assert Send("slow", Cancel(version=1, index=7)) in effects
    assert not any(isinstance(effect, Report) for effect in effects)  # slow is not at fault


def test_nobody_is_overtaken_while_our_own_downlink_is_what_is_slow() -> None:
    """One sender fills a slow downlink, then six share it: each takes six times as long."""
    core = node(*"abcdef", floor=1e3)
    for peer in "abcdef":
        says(core, peer, tuple(range(8)))
    for index in range(2):
        comes(core, "a", index, 20.0 * index, 17.0)
    for index, peer in enumerate("abcdef"):
        core.arrivals.incoming(peer, 1, index + 2, 40.0)
    for second in range(41, 140):
        for peer in "abcdef":
            core.arrivals.progress(peer, SHARD // 17 // 6, float(second))
        assert not core.on_time(float(second))


def test_one_that_trickles_gets_a_strike_and_the_shard_comes_from_elsewhere() -> None:
    core = node("a", "b", order=1)
    says(core, "a", tuple(range(8)))
    says(core, "b", tuple(range(8)))
    core.arrivals.incoming("a", 1, 0, 0.0)
    core.arrivals.incoming("b", 1, 1, 0.0)
    for second in range(1, 5):
        core.arrivals.progress("a", 1, float(second))
        core.arrivals.progress("b", 100_000, float(second))
        assert not core.on_time(float(second))
    effects = core.on_time(5.0)
    assert StopReceive("a", 1, 0) in effects
    assert [effect.code for effect in effects if isinstance(effect, Report)] == ["trickle"]
    assert core.receiving() == {"b": (1, 1)}
    assert core.stats.trickles == 1


def test_one_that_trickles_alone_is_left_too() -> None:
    core = node("a")
    says(core, "a", (0,))
    core.arrivals.incoming("a", 1, 0, 0.0)
    core.arrivals.progress("a", 1, 4.9)
    assert [effect.code for effect in core.on_time(5.0) if isinstance(effect, Report)] == ["trickle"]


def test_no_sender_is_struck_for_a_share_of_a_slow_downlink() -> None:
    core = node(*"abcdefgh")
    for peer in "abcdefgh":
        says(core, peer, tuple(range(8)))
    for index, peer in enumerate("abcdefgh"):
        core.arrivals.incoming(peer, 1, index, 0.0)
    for second in range(1, 31):  # 32 kB/s in all: the smallest cap
        for peer in "abcdefgh":
            core.arrivals.progress(peer, 4_000, float(second))
        assert not core.on_time(float(second))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 6), st.integers(20_000, 10_000_000))
def test_an_even_share_of_whatever_downlink_is_never_at_fault(
    data: st.DataObject, senders: int, downlink: int
) -> None:
    """Pieces come in any order and lumps, to the same rate each: nobody is given up."""
    peers = "abcdef"[:senders]
    core = Transfer(random.Random(1), TransferConfig())
    for peer in peers:
        core.link_up(peer, 0.0)
    core.want(1, [1 << 40] * senders, 0.0)
    for peer in peers:
        says(core, peer, tuple(range(senders)))
    for index, peer in enumerate(peers):
        core.arrivals.incoming(peer, 1, index, 0.0)
    for second in range(1, 60):
        for peer in data.draw(st.permutations(peers)):
            core.arrivals.progress(peer, downlink // senders, float(second))
        assert not core.on_time(second + 0.01)


def test_a_node_under_a_cap_asks_as_many_as_it_may_and_others_when_those_do_not_begin() -> None:
    core = node("a", "b", "c", inbound=1)
    for peer in "abc":
        says(core, peer, tuple(range(8)))
    asked = [name for name in "abc" if core._peers[name].asked.get(1)]
    assert len(asked) == 1
    seen = set(asked)
    for second in range(1, 40):
        core.on_time(float(second))
        now = [name for name in "abc" if core._peers[name].asked.get(1)]
        assert len(now) == 1
        seen |= set(now)
    assert seen == set("abc")
    core.arrivals.incoming(now[0], 1, 0, 40.0)
    for second in range(41, 45):
        core.arrivals.progress(now[0], 100_000, float(second))
        core.on_time(float(second))
        assert [name for name in "abc" if core._peers[name].asked.get(1)] == now  # it has begun
    core.link_down(now[0], 45.0)
    core.on_time(46.0)
    assert len([name for name in core._peers if core._peers[name].asked.get(1)]) == 1
    effects = core.reconfigure(TransferConfig(inbound=0), 46.5)
    assert len([name for name in core._peers if core._peers[name].asked.get(1)]) == 2, effects


def test_a_node_under_a_cap_is_pushed_nothing() -> None:
    core = node("a", inbound=1)
    core.link_eager("a", 0.0, eager=True)
    effects = says(core, "a", ())
    effects += says(core, "a", (0,))
    (want,) = [effect.message for effect in effects if isinstance(effect, Send)][-1:]
    assert isinstance(want, Want)
    assert set(want.busy) == set(range(8))
    pusher = node("b", have=tuple(range(8)))
    pusher.link_eager("b", 0.0, eager=True)
    wants(pusher, "b", (), busy=tuple(range(8)))
    assert not starts(says(pusher, "b", ()))


def test_a_shard_without_progress_for_five_seconds_is_asked_for_elsewhere() -> None:
    core = node("a", "b")
    says(core, "a", (0,))
    says(core, "b", (0,))
    core.arrivals.incoming("a", 1, 0, 0.0)
    core.arrivals.progress("a", 500_000, 3.0)
    core.arrivals.progress("a", 0, 4.0)
    assert not any(isinstance(effect, StopReceive) for effect in core.on_time(7.9))
    effects = core.on_time(8.0)
    assert StopReceive("a", 1, 0) in effects
    assert Send("a", Cancel(version=1, index=0)) in effects
    assert orders(effects) == {"a": set(), "b": {0}} or orders(effects) == {"b": {0}}
    assert core.stats.timeouts == 1


def test_a_silent_peer_is_dropped_at_its_third_strike() -> None:
    core = node("a")
    says(core, "a", (0, 1, 2, 3))
    now, effects = 0.0, []
    for index in range(3):
        core.arrivals.incoming("a", 1, index, now)
        effects = core.on_time(now + 5)
        now += 100
        core.on_time(now)
    assert Drop("a", "timeout") in effects


def test_a_starved_node_says_so() -> None:
    core = node("a")
    says(core, "a", (0,))
    effects = core.on_time(11.0)
    assert any(isinstance(effect, Report) and effect.code == "starved" for effect in effects)
    want = [effect.message for effect in effects if isinstance(effect, Send)]
    assert want == [Want(version=1, indices=(0,), busy=(), starved=True)]

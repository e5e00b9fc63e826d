"""Shards: orders, pushes, slots; what corrupt, silent, slow and lying peers cost; whole swarms."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from treecast_sim import MB, SHARD, join, run_until_complete, swarm

from barnraise.protocol.bitmaps import Counts, from_bytes, members, pick, to_bytes, to_mask
from barnraise.protocol.frames import FRAMES
from barnraise.protocol.transfer import Transfer
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree_effects import (
    Ban,
    Complete,
    Drop,
    Effects,
    Report,
    Send,
    StartSend,
    StopReceive,
    StopSend,
)
from barnraise.protocol.tree_messages import (
    MAX_SHARDS,
    TREE_FRAMES,
    Bitmap,
    Cancel,
    Have,
    Unavailable,
    Want,
)
from barnraise.protocol.wire import decode, encode

SIZES = [SHARD] * 8
NO_SHRINK = [Phase.explicit, Phase.reuse, Phase.generate]  # a swarm takes seconds; its seed says enough


def node(*peers: str, have: tuple[int, ...] = (), **options: Any) -> Transfer:
    core = Transfer(random.Random(1), TransferConfig(**options))
    for peer in peers:
        core.link_up(peer, 0.0)
    core.want(1, SIZES, 0.0)
    for index in have:
        core.verified(None, 1, index, 0.0)
    return core


def says(core: Transfer, peer: str, indices: tuple[int, ...], now: float = 0.0) -> Effects:
    return core.on_message(peer, Bitmap(version=1, bits=to_bytes(to_mask(indices)), ask=False), now)


def wants(core: Transfer, peer: str, indices: tuple[int, ...], now: float = 0.0, **more: Any) -> Effects:
    message = Want(version=1, indices=indices, busy=more.get("busy", ()), starved=more.get("starved", False))
    return core.on_message(peer, message, now)


def orders(effects: Effects) -> dict[str, set[int]]:
    return {
        effect.peer: set(effect.message.indices)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Want)
    }


def starts(effects: Effects) -> list[StartSend]:
    return [effect for effect in effects if isinstance(effect, StartSend)]


# --- bitmaps


@given(st.lists(st.integers(0, 2**70), max_size=12), st.data())
def test_bit_sliced_counts_equal_plain_counting(masks: list[int], data: st.DataObject) -> None:
    counts, plain = Counts(), Counter[int]()
    for mask in masks:
        counts.add(mask)
        plain.update(members(mask))
    for mask in data.draw(st.lists(st.sampled_from(masks), unique=True)) if masks else []:
        counts.subtract(mask)
        plain.subtract(members(mask))
    asked = data.draw(st.integers(1, 2**70))
    least = min(plain[index] for index in members(asked))
    assert set(members(counts.rarest(asked))) == {i for i in members(asked) if plain[i] == least}
    assert set(members(counts.zero(asked))) == {i for i in members(asked) if plain[i] == 0}
    assert all(counts.count(index) == plain[index] for index in range(71))


@given(st.integers(1, 2**200), st.integers())
def test_picking_and_bytes(mask: int, seed: int) -> None:
    assert mask >> pick(mask, random.Random(seed)) & 1
    assert from_bytes(to_bytes(mask)) == mask
    assert from_bytes(to_bytes(mask) + bytes(3)) == mask


def test_messages_fit_their_frames_and_codes_are_free() -> None:
    codes = [frame.code for frame in FRAMES if frame not in TREE_FRAMES] + [f.code for f in TREE_FRAMES]
    assert len(set(codes)) == len(codes)
    assert all(50 <= frame.code < 80 for frame in TREE_FRAMES)
    limits = {frame.type: frame.limit for frame in TREE_FRAMES}
    worst = tuple(range(MAX_SHARDS - 64, MAX_SHARDS))
    for message in (
        Want(version=2**31, indices=worst, busy=worst, starved=True),
        Have(version=2**31, indices=worst),
        Bitmap(version=2**31, bits=bytes(MAX_SHARDS // 8), ask=True),
    ):
        body = encode(message)
        assert len(body) <= limits[type(message)]
        assert decode(body, type(message)) == message


# --- what we want


def test_a_link_opens_with_both_bitmaps_and_orders_follow() -> None:
    core = node("a", have=(0,))
    effects = core.on_message("a", Bitmap(version=1, bits=b"\x07", ask=True), 0.0)
    assert effects[0] == Send("a", Bitmap(version=1, bits=b"\x01", ask=False))
    assert orders(effects) == {"a": {1, 2}}


def test_the_rarest_shards_are_ordered_first() -> None:
    core = node("a", "b", "c", order=2)
    says(core, "b", (0, 1, 2, 3))
    says(core, "c", (0, 1, 2, 3))
    assert orders(says(core, "a", (0, 1, 2, 3, 6, 7))) == {"a": {6, 7}}


def test_a_shard_on_its_way_is_taken_out_of_the_other_orders() -> None:
    core = node("a", "b")
    says(core, "a", (0, 1))
    says(core, "b", (0, 1))
    assert orders(core.incoming("a", 1, 0, 0.1)) == {"a": {1}, "b": {1}}


def test_a_second_copy_is_refused_while_the_first_is_on_its_way() -> None:
    core = node("a", "b")
    says(core, "a", (0,))
    says(core, "b", (0,))
    core.incoming("a", 1, 0, 0.1)
    effects = core.incoming("b", 1, 0, 0.11)
    assert StopReceive("b", 1, 0) in effects
    assert Send("b", Cancel(version=1, index=0)) in effects
    assert core.stats.duplicates == 1
    assert not any(isinstance(effect, Report) for effect in effects)


def test_what_nobody_asked_for_is_refused_with_a_strike() -> None:
    core = node("a")
    effects = core.incoming("a", 1, 0, 0.1)
    assert StopReceive("a", 1, 0) in effects
    assert any(isinstance(effect, Report) and effect.code == "unasked" for effect in effects)
    assert core.incoming("stranger", 1, 0, 0.1) == [StopReceive("stranger", 1, 0)]


def test_a_shard_without_progress_for_five_seconds_is_asked_for_elsewhere() -> None:
    core = node("a", "b")
    says(core, "a", (0,))
    says(core, "b", (0,))
    core.incoming("a", 1, 0, 0.0)
    core.progress("a", 500_000, 3.0)
    core.progress("a", 0, 4.0)
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
        core.incoming("a", 1, index, now)
        effects = core.on_time(now + 5)
        now += 100
        core.on_time(now)
    assert Drop("a", "timeout") in effects


def test_a_corrupt_shard_bans_and_reports_its_sender_and_is_asked_for_elsewhere() -> None:
    core = node("a", "b")
    says(core, "a", (0,))
    says(core, "b", (0,))
    core.incoming("a", 1, 0, 0.1)
    core.received("a", 1, 0, 0.2)
    effects = core.corrupt("a", 1, 0, 0.3)
    assert any(isinstance(effect, Ban) and effect.peer == "a" for effect in effects)
    assert any(isinstance(effect, Report) and effect.code == "corrupt" for effect in effects)
    assert orders(effects)["b"] == {0}
    assert not orders(effects).get("a")
    assert core.bitmap(1) == 0


def test_the_next_shard_may_begin_while_the_last_is_hashed() -> None:
    core = node("a")
    says(core, "a", (0, 1))
    core.incoming("a", 1, 0, 0.1)
    core.received("a", 1, 0, 0.2)
    assert not any(isinstance(effect, StopReceive) for effect in core.incoming("a", 1, 1, 0.2))
    core.verified("a", 1, 0, 0.3)
    assert core.receiving() == {"a": (1, 1)}


def test_a_lost_link_frees_what_was_on_its_way() -> None:
    core = node("a", "b")
    says(core, "a", (0,))
    says(core, "b", (0,))
    core.incoming("a", 1, 0, 0.1)
    assert orders(core.link_down("a", 0.2)) == {"b": {0}}


def test_unavailable_shards_are_not_ordered_again() -> None:
    core = node("a")
    says(core, "a", (0, 1))
    assert orders(core.on_message("a", Unavailable(version=1, index=0), 0.1)) == {"a": {1}}


def test_a_starved_node_says_so() -> None:
    core = node("a")
    says(core, "a", (0,))
    effects = core.on_time(11.0)
    assert any(isinstance(effect, Report) and effect.code == "starved" for effect in effects)
    want = [effect.message for effect in effects if isinstance(effect, Send)]
    assert want == [Want(version=1, indices=(0,), busy=(), starved=True)]


def comes(core: Transfer, peer: str, index: int, begin: float, seconds: float) -> None:
    """A whole shard of ``SHARD`` bytes from ``peer``, in even pieces, ``seconds`` long; time is kept."""
    core.incoming(peer, 1, index, begin)
    for step in range(1, 11):
        core.progress(peer, SHARD // 10, begin + seconds * step / 10)
        assert not core.on_time(begin + seconds * step / 10)
    core.received(peer, 1, index, begin + seconds)
    core.verified(peer, 1, index, begin + seconds)


def test_at_the_end_a_slow_sender_is_overtaken_if_another_holds_the_shard() -> None:
    core = node("slow", "fast")
    says(core, "fast", tuple(range(7)))
    for index in range(7):
        comes(core, "fast", index, float(index), 0.9)
    says(core, "slow", (7,))
    core.incoming("slow", 1, 7, 7.0)
    for second in range(8, 20):
        core.progress("slow", 40_000, float(second))
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
        core.incoming(peer, 1, index + 2, 40.0)
    for second in range(41, 140):
        for peer in "abcdef":
            core.progress(peer, SHARD // 17 // 6, float(second))
        assert not core.on_time(float(second))


def test_one_that_trickles_gets_a_strike_and_the_shard_comes_from_elsewhere() -> None:
    core = node("a", "b", order=1)
    says(core, "a", tuple(range(8)))
    says(core, "b", tuple(range(8)))
    core.incoming("a", 1, 0, 0.0)
    core.incoming("b", 1, 1, 0.0)
    for second in range(1, 5):
        core.progress("a", 1, float(second))
        core.progress("b", 100_000, float(second))
        assert not core.on_time(float(second))
    effects = core.on_time(5.0)
    assert StopReceive("a", 1, 0) in effects
    assert [effect.code for effect in effects if isinstance(effect, Report)] == ["trickle"]
    assert core.receiving() == {"b": (1, 1)}
    assert core.stats.trickles == 1


def test_one_that_trickles_alone_is_left_too() -> None:
    core = node("a")
    says(core, "a", (0,))
    core.incoming("a", 1, 0, 0.0)
    core.progress("a", 1, 4.9)
    assert [effect.code for effect in core.on_time(5.0) if isinstance(effect, Report)] == ["trickle"]


def test_no_sender_is_struck_for_a_share_of_a_slow_downlink() -> None:
    core = node(*"abcdefgh")
    for peer in "abcdefgh":
        says(core, peer, tuple(range(8)))
    for index, peer in enumerate("abcdefgh"):
        core.incoming(peer, 1, index, 0.0)
    for second in range(1, 31):  # 32 kB/s in all: the smallest cap
        for peer in "abcdefgh":
            core.progress(peer, 4_000, float(second))
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
        core.incoming(peer, 1, index, 0.0)
    for second in range(1, 60):
        for peer in data.draw(st.permutations(peers)):
            core.progress(peer, downlink // senders, float(second))
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
    core.incoming(now[0], 1, 0, 40.0)
    for second in range(41, 45):
        core.progress(now[0], 100_000, float(second))
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


def test_whoever_names_sixty_four_busy_shards_is_pushed_nothing() -> None:
    core = Transfer(random.Random(1), TransferConfig())
    core.link_up("a", 0.0)
    core.link_eager("a", 0.0, eager=True)
    core.want(1, [SHARD] * 200, 0.0)
    for index in range(200):
        core.verified(None, 1, index, 0.0)
    wants(core, "a", (), busy=tuple(range(64)))
    assert not starts(says(core, "a", ()))
    assert starts(wants(core, "a", (150,), busy=tuple(range(64)))) == [StartSend("a", 1, 150)]


# --- what others want


def test_a_verified_shard_is_announced_and_pushed_to_an_eager_neighbour_at_once() -> None:
    core = node("a", "b", "c")
    core.link_eager("b", 0.0, eager=True)
    for peer in "abc":
        says(core, peer, (0, 1) if peer == "a" else ())
    core.incoming("a", 1, 0, 0.1)
    effects = core.verified("a", 1, 0, 0.2)
    assert Send("c", Have(version=1, indices=(0,))) in effects
    assert starts(effects) == [StartSend("b", 1, 0)]


def test_an_eager_neighbour_is_not_pushed_what_is_on_its_way_to_it() -> None:
    core = node("b")
    core.link_eager("b", 0.0, eager=True)
    says(core, "b", ())
    wants(core, "b", (), busy=(0,))
    assert not starts(core.verified(None, 1, 0, 0.1))
    assert starts(core.verified(None, 1, 1, 0.1)) == [StartSend("b", 1, 1)]


def test_two_slots_serve_the_two_that_hold_least() -> None:
    core = node("a", "b", "c", have=tuple(range(8)))
    says(core, "a", (0, 1, 2))
    says(core, "b", (0,))
    says(core, "c", (0, 1))
    core._uploads.uplink._since = None
    assert starts(wants(core, "a", (4,))) == [StartSend("a", 1, 4)]
    assert starts(wants(core, "c", (4,))) == [StartSend("c", 1, 4)]
    assert not starts(wants(core, "b", (4,)))
    assert starts(core.sent("a", 1, 4, 1.0)) == [StartSend("b", 1, 4)]


def test_a_transfer_that_its_receiver_holds_up_frees_its_slot() -> None:
    core = node("a", "b", "c", have=(4,))
    for peer in "abc":
        says(core, peer, ())
        wants(core, peer, (4,))
    assert not starts(core.on_time(4.9))
    assert starts(core.on_time(5.1)) == [StartSend("c", 1, 4)]


def test_the_newest_version_goes_first_for_both_sides() -> None:
    core = node("a", have=(0, 1))
    core.want(2, SIZES, 0.0)
    core.verified(None, 2, 0, 0.0)
    for version in (1, 2):
        core.on_message("a", Bitmap(version=version, bits=b"", ask=False), 0.0)
    core.link_eager("a", 0.0, eager=True)
    assert core.sending() == {"a": (2, 0)}
    assert starts(core.sent("a", 2, 0, 1.0))[0].version == 1


def test_a_cancelled_transfer_stops_and_frees_its_slot() -> None:
    core = node("a", "b", "c", have=(0, 1))
    for peer in "abc":
        says(core, peer, ())
        wants(core, peer, (0, 1))
    index = core.sending()["a"][1]
    effects = core.on_message("a", Cancel(version=1, index=index), 0.5)
    assert StopSend("a", 1, index) in effects
    assert len(core.sending()) == 2


def test_nobody_is_sent_a_version_over_and_over() -> None:
    core = node("leech", have=tuple(range(8)))
    says(core, "leech", ())
    for step in range(100):
        for start in starts(wants(core, "leech", (step % 8,), float(step))):
            core.sent("leech", 1, start.index, step + 0.5)
    assert core.stats.sent == 16


def test_an_origin_at_its_limit_sends_only_what_is_missing_nearby_or_starving() -> None:
    core = node("a", "b", have=tuple(range(8)), copies=1.0)
    says(core, "a", (0,))
    says(core, "b", ())
    for index in range(8):
        wants(core, "b", (index,))
        core.sent("b", 1, index, 0.1)
    assert core.stats.sent == 8
    assert not starts(wants(core, "a", (1,)))
    assert starts(wants(core, "a", (1,), starved=True)) == [StartSend("a", 1, 1)]


def test_what_goes_out_beside_the_links_counts_against_the_origins_limit() -> None:
    core = node("a", "b", have=tuple(range(8)), copies=1.5, slots=4, max_slots=4)
    says(core, "b", (0,))
    core.sent_beside(12 * SHARD)  # one and a half copies
    says(core, "a", ())
    assert {start.index for start in starts(wants(core, "a", (0,)))} == set()  # b has it
    assert {start.index for start in starts(wants(core, "a", (0, 1)))} == {1}  # nobody has it


def test_a_shard_lost_from_disk_is_withdrawn_and_wanted_again() -> None:
    core = node("a", have=(0, 1))
    says(core, "a", (1,))
    effects = core.lost(1, 1, 1.0)
    assert Send("a", Bitmap(version=1, bits=b"\x01", ask=False)) in effects
    assert orders(effects) == {"a": {1}}


def test_shards_on_disk_are_announced_with_the_bitmap_and_serving_can_be_turned_off() -> None:
    core = Transfer(random.Random(1), TransferConfig(max_slots=0))
    core.link_up("a", 0.0)
    assert core.want(1, SIZES, 0.0, have=0b101) == [Send("a", Bitmap(version=1, bits=b"\x05", ask=True))]
    says(core, "a", ())
    assert not starts(wants(core, "a", (0, 2)))
    assert starts(core.reconfigure(TransferConfig(), 1.0))


def test_a_manifest_that_comes_in_parts_extends_the_version() -> None:
    core = node("a")
    says(core, "a", (0, 9))
    assert orders(core.want(1, [SHARD] * 10, 0.1)) == {"a": {0, 9}}


def test_a_forgotten_version_is_withdrawn_and_the_oldest_makes_room() -> None:
    core = node("a", have=(0,))
    says(core, "a", ())
    effects = core.forget(1, 1.0)
    assert Send("a", Bitmap(version=1, bits=b"", ask=False)) in effects
    for version in range(2, 8):
        core.want(version, SIZES, 2.0)
    assert core.versions() == (7, 6, 5, 4)
    with pytest.raises(ValueError, match="larger shards"):
        core.want(9, [1] * (MAX_SHARDS + 1), 3.0)


def test_the_last_shard_completes_the_version() -> None:
    core = node(have=tuple(range(7)))
    assert Complete(1) in core.verified(None, 1, 7, 1.0)


# --- swarms


def test_a_swarm_completes_near_the_bound_and_every_shard_comes_once() -> None:
    sim = swarm(1, 12)
    sizes = [SHARD] * 64
    sim.publish("o", 1, sizes)
    took = run_until_complete(sim, 1, 60)
    assert took < 1.35 * 12 * 64 * SHARD / (100 * MB + 12 * 12 * MB)
    for name, host in sim.hosts.items():
        if name != "o":
            assert host.core.transfer.stats.received == 64
            assert not host.reports


def test_a_corrupt_sender_is_banned_by_all_it_serves_and_costs_one_shard_each() -> None:
    sim = swarm(2, 12)
    sim.intact = lambda source, target, version, index: source.name != "n3"
    sim.publish("o", 1, [SHARD] * 48)
    run_until_complete(sim, 1, 120, frozenset({"n3"}))
    for name, host in sim.hosts.items():
        assert host.core.transfer.stats.corrupt <= 1
        assert {report.peer for report in host.reports if report.code == "corrupt"} <= {"n3"}
        if host.core.transfer.stats.corrupt:
            assert "n3" in host.core.views.banned, name
    assert sum(host.core.transfer.stats.corrupt for host in sim.hosts.values()) >= 1


def test_peers_that_announce_everything_and_send_nothing_delay_nobody_for_long() -> None:
    sim = swarm(3, 14)
    liars = frozenset({"n2", "n5", "n8"})
    sim.obey = lambda host, effect: host.name not in liars
    sim.publish("o", 1, [SHARD] * 48)
    sim.run(sim.now + 0.5)
    for name in liars:
        for index in range(48):
            sim.do(sim.hosts[name], sim.hosts[name].core.verified(None, 1, index, sim.now))
    assert run_until_complete(sim, 1, 60, liars) < 20


def test_a_node_with_a_slow_upload_does_not_hold_the_others_up() -> None:
    sim = swarm(4, 10)
    for name in ("s0", "s1"):
        join(sim, name, up=0.1 * MB)
    sim.run(sim.now + 30)
    sim.publish("o", 1, [SHARD] * 48)
    assert run_until_complete(sim, 1, 120) < 15


def test_late_joiners_and_those_who_come_back_catch_up_after_the_origin_is_quiet() -> None:
    sim = swarm(5, 8)
    sim.publish("o", 1, [SHARD] * 16)
    run_until_complete(sim, 1, 60)
    sim.crash("n4")
    sim.publish("o", 2, [SHARD] * 16)
    run_until_complete(sim, 2, 60)
    join(sim, "late")
    join(sim, "n4")
    run_until_complete(sim, 2, 60)
    run_until_complete(sim, 1, 60)


def test_two_versions_in_flight_both_arrive_and_the_newer_is_not_held_up() -> None:
    sim = swarm(6, 10)
    sim.publish("o", 1, [SHARD] * 128)
    sim.run(sim.now + 1.0)
    sim.publish("o", 2, [SHARD] * 32)
    newer = run_until_complete(sim, 2, 60)
    assert not any(1 in host.done for name, host in sim.hosts.items() if name != "o")
    older = run_until_complete(sim, 1, 60)
    assert newer < 10
    assert older < 30


def test_an_origin_limited_to_one_and_a_half_copies_stays_there() -> None:
    sim = swarm(7, 16, copies=1.5)
    sim.publish("o", 1, [SHARD] * 64)
    run_until_complete(sim, 1, 60)
    assert sim.hosts["o"].bytes_out < 1.7 * 64 * SHARD


def test_the_same_seed_gives_the_same_run() -> None:
    def once() -> tuple[float, int]:
        sim = swarm(8, 8)
        sim.publish("o", 1, [SHARD] * 16)
        return run_until_complete(sim, 1, 60), sim.messages

    assert once() == once()


@settings(max_examples=20, deadline=None, phases=NO_SHRINK)
@given(
    st.integers(0, 2**16),
    st.lists(
        st.tuples(
            st.sampled_from(["join", "crash", "cut", "publish", "corrupt", "withhold", "lose"]),
            st.floats(0.0, 2.0),
        ),
        max_size=25,
    ),
)
def test_any_interleaving_ends_with_every_honest_live_node_holding_every_shard_verified_once(
    seed: int, steps: list[tuple[str, float]]
) -> None:
    sim = swarm(seed, 8)
    rng = random.Random(seed)
    bad: dict[str, str] = {}
    lost: Counter[str] = Counter()
    sim.intact = lambda source, target, version, index: bad.get(source.name) != "corrupt"
    sim.obey = lambda host, effect: bad.get(host.name) != "withhold" or rng.random() < 0.3
    version, count = 1, 8
    sim.publish("o", 1, [SHARD] * rng.randint(1, 40))
    for step, pause in steps:
        others = sorted(set(sim.hosts) - {"o"})
        match step:
            case "join":
                join(sim, f"n{count}")
                count += 1
            case "crash" if len(others) > 3:
                sim.crash(rng.choice(others))
            case "cut":
                host = sim.hosts[rng.choice(sorted(sim.hosts))]
                if host.links:
                    sim.cut(host.name, rng.choice(sorted(host.links)))
            case "publish" if version < 4:
                version += 1
                sim.publish("o", version, [SHARD] * rng.randint(1, 40))
            case "corrupt" | "withhold" if len(bad) < 2:
                bad[rng.choice(others)] = step
            case "lose":
                name = rng.choice(others)
                have = sim.hosts[name].core.transfer.bitmap(version)
                if have:
                    lost[name] += 1
                    index = pick(have, rng)
                    sim.do(sim.hosts[name], sim.hosts[name].core.lost(version, index, sim.now))
        sim.run(sim.now + pause)
    everybody = frozenset(bad)
    run_until_complete(sim, version, 600, everybody)
    sim.run(sim.now + 30)
    for name, host in sim.hosts.items():
        if name == "o" or name in bad:
            continue
        total = 0
        for number in host.core.transfer.versions():
            whole = (1 << len(sim.versions[number])) - 1
            assert host.core.transfer.bitmap(number) == whole
            total += whole.bit_count()
        assert host.core.transfer.stats.received == total + lost[name]
        assert not host.core.transfer.receiving()

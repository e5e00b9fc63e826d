"""Shards: messages, orders, what is refused, what corrupt and lost peers cost."""

from __future__ import annotations

import random

from transfer_support import SIZES, node, orders, says
from treecast_sim import SHARD

from barnraise.protocol.frames import FRAMES
from barnraise.protocol.transfer import Transfer
from barnraise.protocol.transfer_state import EARLY
from barnraise.protocol.tree_effects import (
    Ban,
    Complete,
    Report,
    Send,
    StopReceive,
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


def test_a_link_opens_with_both_bitmaps_and_orders_follow() -> None:
    core = node("a", have=(0,))
    effects = core.on_message("a", Bitmap(version=1, bits=b"\x07", ask=True), 0.0)
    assert effects[0] == Send("a", Bitmap(version=1, bits=b"\x01", ask=False))
    assert orders(effects) == {"a": {1, 2}}


def test_two_that_hold_everything_say_nothing_to_each_other() -> None:
    core = Transfer(random.Random(1))
    core.link_up("a", 0.0)
    assert core.want(1, SIZES, 0.0, have=0xFF, wanted=False) == [Complete(1)]
    assert core.link_up("b", 0.0) == []
    assert says(core, "a", tuple(range(8))) == []
    assert says(core, "b", (0,)) == [Send("b", Bitmap(version=1, bits=b"\xff", ask=False))]


def test_what_a_neighbour_said_before_a_version_was_known_counts() -> None:
    core = Transfer(random.Random(1))
    for peer in ("a", "b"):
        core.link_up(peer, 0.0)
    assert says(core, "a", ()) == []
    assert core.on_message("a", Have(version=1, indices=(2,)), 0.0) == []
    says(core, "b", (5,))
    says(core, "b", ())  # it has left again
    for other in range(100):
        core.on_message("a", Bitmap(version=2 + other, bits=b"\x01", ask=False), 0.0)
    assert len(core._peers["a"].early) == EARLY
    says(core, "a", (2,))
    effects = core.want(1, SIZES, 0.1)
    assert orders(effects) == {"a": {2}}
    told = {effect.peer: effect.message for effect in effects if isinstance(effect, Send)}
    assert Send("b", Bitmap(version=1, bits=b"", ask=False)) in effects
    assert set(told) == {"a", "b"}


def test_a_neighbour_that_begins_later_learns_what_came_meanwhile() -> None:
    core = node("late")
    assert core.arrivals.verified(None, 1, 3, 0.1) == []  # it does not take part, so it is told nothing
    assert says(core, "late", ()) == [Send("late", Bitmap(version=1, bits=b"\x08", ask=False))]
    assert says(core, "late", (3,)) == []


def test_the_only_shard_is_asked_of_one_neighbour_at_a_time() -> None:
    core = Transfer(random.Random(1))
    for peer in ("a", "b", "c"):
        core.link_up(peer, 0.0)
    core.want(1, [SHARD], 0.0)
    assert orders(says(core, "a", (0,))) == {"a": {0}}
    assert orders(says(core, "b", (0,))) == {}
    assert orders(says(core, "c", (0,))) == {}
    (other,) = orders(core.link_down("a", 0.1))
    unavailable = core.on_message(other, Unavailable(version=1, index=0), 0.2)
    (last,) = {"b", "c"} - {other}
    assert orders(unavailable) == {other: set(), last: {0}}


def test_who_sends_nothing_after_it_was_asked_is_not_waited_for_long() -> None:
    core = Transfer(random.Random(1))
    for peer in ("a", "b"):
        core.link_up(peer, 0.0)
    core.want(1, [SHARD], 0.0)
    says(core, "a", (0,))
    says(core, "b", (0,))
    assert orders(core.on_time(10.0)) == {"a": {0}, "b": {0}}


def test_the_rarest_shards_are_ordered_first() -> None:
    core = node("a", "b", "c", order=2)
    says(core, "b", (0, 1, 2, 3))
    says(core, "c", (0, 1, 2, 3))
    assert orders(says(core, "a", (0, 1, 2, 3, 6, 7))) == {"a": {6, 7}}


def test_a_shard_on_its_way_is_taken_out_of_the_other_orders() -> None:
    core = node("a", "b")
    says(core, "a", (0, 1))
    says(core, "b", (0, 1))
    assert orders(core.arrivals.incoming("a", 1, 0, 0.1)) == {"a": {1}, "b": {1}}


def test_a_second_copy_is_refused_while_the_first_is_on_its_way() -> None:
    core = node("a", "b")
    says(core, "a", (0,))
    says(core, "b", (0,))
    core.arrivals.incoming("a", 1, 0, 0.1)
    effects = core.arrivals.incoming("b", 1, 0, 0.11)
    assert StopReceive("b", 1, 0) in effects
    assert Send("b", Cancel(version=1, index=0)) in effects
    assert core.stats.duplicates == 1
    assert not any(isinstance(effect, Report) for effect in effects)


def test_what_nobody_asked_for_is_refused_with_a_strike() -> None:
    core = node("a")
    effects = core.arrivals.incoming("a", 1, 0, 0.1)
    assert StopReceive("a", 1, 0) in effects
    assert any(isinstance(effect, Report) and effect.code == "unasked" for effect in effects)
    assert core.arrivals.incoming("stranger", 1, 0, 0.1) == [StopReceive("stranger", 1, 0)]


def test_a_corrupt_shard_bans_and_reports_its_sender_and_is_asked_for_elsewhere() -> None:
    core = node("a", "b")
    says(core, "a", (0,))
    says(core, "b", (0,))
    core.arrivals.incoming("a", 1, 0, 0.1)
    core.arrivals.received("a", 1, 0, 0.2)
    effects = core.arrivals.corrupt("a", 1, 0, 0.3)
    assert any(isinstance(effect, Ban) and effect.peer == "a" for effect in effects)
    assert any(isinstance(effect, Report) and effect.code == "corrupt" for effect in effects)
    assert orders(effects)["b"] == {0}
    assert not orders(effects).get("a")
    assert core.bitmap(1) == 0


def test_the_next_shard_may_begin_while_the_last_is_hashed() -> None:
    core = node("a")
    says(core, "a", (0, 1))
    core.arrivals.incoming("a", 1, 0, 0.1)
    core.arrivals.received("a", 1, 0, 0.2)
    assert not any(isinstance(effect, StopReceive) for effect in core.arrivals.incoming("a", 1, 1, 0.2))
    core.arrivals.verified("a", 1, 0, 0.3)
    assert core.receiving() == {"a": (1, 1)}


def test_a_lost_link_frees_what_was_on_its_way() -> None:
    core = node("a", "b")
    says(core, "a", (0,))
    says(core, "b", (0,))
    core.arrivals.incoming("a", 1, 0, 0.1)
    assert orders(core.link_down("a", 0.2)) == {"b": {0}}


def test_unavailable_shards_are_not_ordered_again() -> None:
    core = node("a")
    says(core, "a", (0, 1))
    assert orders(core.on_message("a", Unavailable(version=1, index=0), 0.1)) == {"a": {1}}


def test_a_manifest_that_comes_in_parts_extends_the_version() -> None:
    core = node("a")
    says(core, "a", (0, 9))
    assert orders(core.want(1, [SHARD] * 10, 0.1)) == {"a": {0, 9}}


def test_the_last_shard_completes_the_version() -> None:
    core = node(have=tuple(range(7)))
    assert Complete(1) in core.arrivals.verified(None, 1, 7, 1.0)

"""What a node sends to whom: pushes, slots, turns, an origin's limit."""

from __future__ import annotations

import random

import pytest
from transfer_support import SIZES, node, orders, says, starts, wants
from treecast_sim import SHARD

from barnraise.protocol.transfer import Transfer
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree_effects import (
    Send,
    StartSend,
    StopSend,
)
from barnraise.protocol.tree_messages import (
    MAX_SHARDS,
    Bitmap,
    Cancel,
    Have,
)


def test_a_verified_shard_is_announced_and_pushed_to_an_eager_neighbour_at_once() -> None:
    core = node("a", "b", "c")
    core.link_eager("b", 0.0, eager=True)
    for peer in "abc":
        says(core, peer, (0, 1) if peer == "a" else ())
    core.arrivals.incoming("a", 1, 0, 0.1)
    effects = core.arrivals.verified("a", 1, 0, 0.2)
    assert Send("c", Have(version=1, indices=(0,))) in effects
    assert starts(effects) == [StartSend("b", 1, 0)]


def test_an_eager_neighbour_is_not_pushed_what_is_on_its_way_to_it() -> None:
    core = node("b")
    core.link_eager("b", 0.0, eager=True)
    says(core, "b", ())
    wants(core, "b", (), busy=(0,))
    assert not starts(core.arrivals.verified(None, 1, 0, 0.1))
    assert starts(core.arrivals.verified(None, 1, 1, 0.1)) == [StartSend("b", 1, 1)]


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
    core.arrivals.verified(None, 2, 0, 0.0)
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
    effects = core.arrivals.lost(1, 1, 1.0)
    assert Send("a", Bitmap(version=1, bits=b"\x01", ask=False)) in effects
    assert orders(effects) == {"a": {1}}


def test_shards_on_disk_are_announced_with_the_bitmap_and_serving_can_be_turned_off() -> None:
    core = Transfer(random.Random(1), TransferConfig(max_slots=0))
    core.link_up("a", 0.0)
    assert core.want(1, SIZES, 0.0, have=0b101) == [Send("a", Bitmap(version=1, bits=b"\x05", ask=False))]
    says(core, "a", ())
    assert not starts(wants(core, "a", (0, 2)))
    assert starts(core.reconfigure(TransferConfig(), 1.0))


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


def test_whoever_names_sixty_four_busy_shards_is_pushed_nothing() -> None:
    core = Transfer(random.Random(1), TransferConfig())
    core.link_up("a", 0.0)
    core.link_eager("a", 0.0, eager=True)
    core.want(1, [SHARD] * 200, 0.0)
    for index in range(200):
        core.arrivals.verified(None, 1, index, 0.0)
    wants(core, "a", (), busy=tuple(range(64)))
    assert not starts(says(core, "a", ()))
    assert starts(wants(core, "a", (150,), busy=tuple(range(64)))) == [StartSend("a", 1, 150)]

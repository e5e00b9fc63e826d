"""Whom hearsay can have dialled, and how often."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from barnraise.protocol.addresses import household, household_of
from barnraise.protocol.errors import PeerError
from barnraise.protocol.gossip_dial import FAILED_PER_HOST, IN_ALL, Dialler
from barnraise.protocol.reachability import WINDOW_S
from barnraise.protocol.tree_messages import Contact


class Dialled:
    """A network that notes whom it is told to dial; only the peers in ``there`` answer."""

    def __init__(self, there: frozenset[str] = frozenset()) -> None:
        self.there = there
        self.dials: list[str] = []

    def connected(self, peer_id: str) -> bool:
        return False

    async def connect(self, address: str) -> str:
        await trio.lowlevel.checkpoint()
        self.dials.append(address)
        peer = address.rpartition("/")[2]
        if peer not in self.there:
            raise PeerError("nobody there")
        return peer

    async def open_stream(self, peer_id: str, protocol: str) -> Any:
        await trio.lowlevel.checkpoint()
        if peer_id not in self.there:
            raise PeerError(f"not connected to {peer_id}")
        return object()


def named(number: int, host: str = "203.0.113.9", kind: str = "ip4", copies: int = 16) -> Contact:
    peer = f"peer{number}"
    places = tuple(f"/{kind}/{host}/tcp/{port}/p2p/{peer}" for port in range(9000, 9000 + copies))
    return Contact(peer_id=peer, addresses=places)


async def _fail(dialler: Dialler, contact: Contact) -> None:
    with pytest.raises(PeerError):
        await dialler.open(contact)


async def test_a_stranger_cannot_have_a_third_party_dialled_more_than_a_few_times(
    autojump_clock: MockClock,
) -> None:
    network: Any = Dialled()
    dialler = Dialler(network)
    for number in range(200):
        await _fail(dialler, named(number))
    assert len(network.dials) == FAILED_PER_HOST
    await trio.sleep(WINDOW_S + 1)
    await _fail(dialler, named(999))
    assert len(network.dials) == 2 * FAILED_PER_HOST


async def test_many_newcomers_named_at_once_are_no_way_around_it(autojump_clock: MockClock) -> None:
    network: Any = Dialled()
    dialler = Dialler(network)
    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(_fail, dialler, named(number))
    assert len(network.dials) == FAILED_PER_HOST


async def test_the_hosts_of_one_ipv6_network_count_as_one(autojump_clock: MockClock) -> None:
    network: Any = Dialled()
    dialler = Dialler(network)
    for number in range(1, 100):
        await _fail(dialler, named(number, f"2001:db8:7:1::{number:x}", "ip6"))
    assert len(network.dials) == FAILED_PER_HOST


async def test_hosts_all_over_the_world_are_not_scanned(autojump_clock: MockClock) -> None:
    network: Any = Dialled()
    dialler = Dialler(network)
    for number in range(500):
        await _fail(dialler, named(number, f"198.51.{number // 250}.{number % 250 + 1}", copies=4))
    assert len(network.dials) == IN_ALL


async def test_an_address_that_is_named_sixteen_times_is_dialled_once(autojump_clock: MockClock) -> None:
    network: Any = Dialled()
    address = "/ip4/203.0.113.9/tcp/9000/p2p/peer1"
    await _fail(Dialler(network), Contact(peer_id="peer1", addresses=(address,) * 16))
    assert network.dials == [address]


async def test_a_host_where_nodes_live_is_dialled_again_and_again(autojump_clock: MockClock) -> None:
    network: Any = Dialled(frozenset({"peer7"}))
    dialler = Dialler(network)
    for number in range(10):  # left since, one port each
        await _fail(dialler, named(number + 100, copies=1))
        await dialler.open(named(7, copies=1))
    assert len(network.dials) == 20


async def test_the_coordinator_is_dialled_whatever_strangers_say(autojump_clock: MockClock) -> None:
    network: Any = Dialled()
    dialler = Dialler(network, ["peer7"])
    for number in range(100, 200):
        await _fail(dialler, named(number))
    before = len(network.dials)
    await _fail(dialler, named(7))
    assert len(network.dials) == before + 16


@pytest.mark.parametrize(
    ("ip", "expected"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("2001:db8:7:1:aaaa::1", "2001:db8:7:1::/64"),
        ("2001:DB8:7:1::2", "2001:db8:7:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("Example.ORG", "example.org"),
    ],
)
def test_a_household_shares_its_limits(ip: str, expected: str) -> None:
    assert household(ip) == expected
    assert household_of(f"/ip6/{ip}/tcp/4001") == expected


def test_no_address_is_no_household() -> None:
    assert household_of("") == ""
    assert household_of("/memory/7/p2p/x") == "7"

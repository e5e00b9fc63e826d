"""Whether others can dial a node: the question, its limits, and a swarm most of whom nobody can dial."""

import random
from pathlib import Path
from typing import Any

import pytest
import trio
from gossip_support import meadow
from trio.testing import MockClock

from barnraise.protocol import reachability
from barnraise.protocol.errors import PeerError
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.reach_messages import REACH_PROTOCOL, PortReach, ReachReply, ReachRequest
from barnraise.protocol.reachability import announced, ask_reach, judge, serve_reach
from barnraise.protocol.wire import MessageReader, send_message
from barnraise.tui import status
from barnraise.tui import swarm as swarm_command

PEER = Identity.from_private_bytes(b"p" * 32).peer_id


def reply(observed: str, *ports: PortReach, message: str = "") -> ReachReply:
    return ReachReply(observed=observed, ports=ports, relays=False, message=message, retry_after_ms=0)


async def test_a_node_that_can_be_dialled_is_told_so_and_one_that_cannot_is_told_why(
    autojump_clock: MockClock,
) -> None:
    """R1."""
    swarm = MemorySwarm(latency_s=0.01)
    outcomes: list[Any] = []
    async with (
        swarm.network("asked") as asked,
        swarm.network("open") as open_,
        swarm.network("shut", dialable=False) as shut,
    ):
        asked.set_handler(REACH_PROTOCOL, serve_reach(asked, on_reach=lambda *told: outcomes.append(told)))
        for network in (open_, shut):
            await network.connect(asked.addresses[0])
        good = judge(open_.addresses, await ask_reach(open_, "asked"))
        bad = judge(shut.addresses, await ask_reach(shut, "asked", "relayed"))
    assert (good.kind, good.addresses) == ("direct", open_.addresses)
    assert (bad.kind, bad.addresses) == ("outbound-only", ())
    assert "did not answer within 10 s" in bad.reason
    assert outcomes == [
        ("open", "/memory/2", open_.addresses, ""),
        ("shut", "/memory/3", (), "relayed"),
    ]


async def test_over_libp2p_the_dial_back_proves_the_key_and_leaves_no_connection() -> None:
    async with (
        open_libp2p(Identity.generate(), ("/ip4/127.0.0.1/tcp/0",)) as asked,
        open_libp2p(Identity.generate(), ("/ip4/127.0.0.1/tcp/0",)) as node,
        open_libp2p(Identity.generate(), ("/ip4/127.0.0.1/tcp/0",)) as other,
    ):
        asked.set_handler(REACH_PROTOCOL, serve_reach(asked))
        await node.connect(asked.addresses[0])
        found = judge(node.addresses, await ask_reach(node, asked.peer_id))
        assert (found.kind, found.proven) == ("direct", node.addresses)
        with pytest.raises(PeerError, match="cannot connect"):  # somebody else answers there
            await asked.dial_back(node.peer_id, int(other.addresses[0].split("/")[4]))
        with pytest.raises(PeerError, match="not known where"):
            await asked.dial_back(other.peer_id, 4001)
        assert asked.way(node.peer_id) == "direct"
        assert asked.way(other.peer_id) is None


async def test_who_asks_too_often_is_refused_and_nobody_is_dialled(autojump_clock: MockClock) -> None:
    swarm = MemorySwarm()
    dialled: list[str] = []
    async with swarm.network("asked") as asked, swarm.network("node") as node:
        handler = serve_reach(asked, on_reach=lambda peer, *rest: dialled.append(peer))
        asked.set_handler(REACH_PROTOCOL, handler)
        await node.connect(asked.addresses[0])
        answers = [await ask_reach(node, "asked") for _ in range(reachability.PER_PEER + 2)]
        assert len(dialled) == reachability.PER_PEER
        assert answers[-1].message == "asked too often"
        assert answers[-1].retry_after_ms > 0
        assert judge(node.addresses, answers[-1]).kind == "unknown"
        await trio.sleep(reachability.WINDOW_S)
        assert (await ask_reach(node, "asked")).message == ""


async def test_the_address_to_dial_is_never_the_askers_to_choose(autojump_clock: MockClock) -> None:
    """Ports of another host lead nowhere: nobody can have a stranger dialled."""
    swarm = MemorySwarm()
    async with swarm.network("asked") as asked, swarm.network("node") as node, swarm.network("victim"):
        asked.set_handler(REACH_PROTOCOL, serve_reach(asked))
        await node.connect(asked.addresses[0])
        stream = await node.open_stream("asked", REACH_PROTOCOL)
        await send_message(stream, ReachRequest(ports=(3,), way=""))
        answer = await MessageReader(stream, (ReachReply,)).receive()
    assert isinstance(answer, ReachReply)
    assert answer.ports[0].address == ""


def test_what_a_person_reads_says_what_would_change_it() -> None:
    """R1."""
    claimed = [f"/ip4/192.168.1.5/tcp/4600/p2p/{PEER}"]
    shut = PortReach(port=4600, address="", error="no answer")
    nat = judge(claimed, reply("/ip4/198.51.100.3/tcp/9", shut))
    assert "behind NAT (seen at 198.51.100.3): forward TCP port 4600" in nat.line
    wall = judge(claimed, reply("/ip4/192.168.1.5/tcp/9", shut))
    assert "firewall" in wall.cure
    assert "does not listen" in judge([], reply("/ip4/198.51.100.3/tcp/9")).reason


def test_a_forwarded_port_is_announced_alone_and_a_lan_keeps_its_addresses() -> None:
    lan = [f"/ip4/127.0.0.1/tcp/4600/p2p/{PEER}", f"/ip4/192.168.1.5/tcp/4600/p2p/{PEER}"]
    outside = f"/ip4/198.51.100.3/tcp/4600/p2p/{PEER}"
    assert announced(lan, "/ip4/198.51.100.3/tcp/77", [outside]) == (outside,)
    assert announced(lan, "/ip4/192.168.1.5/tcp/77", [lan[1]]) == (lan[1], lan[0])
    assert announced(lan, "/ip4/192.168.1.5/tcp/77", []) == ()


def test_the_quota_forgets_old_askers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "MAX_KNOWN", 3)
    quota = reachability.Quota(1)
    for number in range(5):
        assert quota.wait(str(number), number) == 0
        quota.spend(str(number), number)
    assert quota.wait("4", 5) > 0
    assert quota.wait("0", 5) == 0


async def test_a_swarm_with_seventy_percent_that_nobody_can_dial_completes_a_broadcast(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """They take and give over connections that they opened themselves (R1)."""
    rng = random.Random(7)
    names = [f"n{number}" for number in range(20)]
    shut = set(rng.sample(names, 14))
    async with meadow(tmp_path) as field:
        origin = await field.add("o")
        for name in names:
            await field.add(name, dialable=name not in shut)
            await trio.sleep(0.2)
        signed = origin.publish(1)
        await field.until_done(1)
        assert all(field.hosts[name].whole(signed) for name in names)
        given = sum(field.hosts[name].uploaded(1) for name in shut)
        assert given > 0.5 * 1024 * 1024  # those that nobody can dial serve others, too
        assert origin.uploaded(1) < 14 * 1024 * 1024
        with trio.fail_after(120):  # a moment without any neighbour is no harm: it asks again
            while not all(field.hosts[name].gossiper.core.views.active for name in names):
                await trio.sleep(1)


def test_status_and_swarm_say_how_a_node_is_reached_and_what_would_change_it() -> None:
    reach = {"kind": "outbound-only", "reason": "no answer", "cure": "forward TCP port 4600", "addresses": []}
    node = {"kind": "node", "name": "n", "run": "r", "reach": reach}
    line = ("reachable", "outbound-only: no answer; forward TCP port 4600")
    assert line in status.overview(node, 0.0)
    assert line in swarm_command.overview(node)
    assert swarm_command.summary(node)["reach"] == reach
    link = {"peer": PEER, "eager": True, "way": "hole-punched"}
    nodes = [
        {"name": "a", "reach": "direct", "state": "idle"},
        {"name": "b", "reach": "relayed", "state": "idle"},
    ]
    coordinator = {"kind": "coordinator", "run": "r", "nodes": nodes, "tree": {"neighbours": [link]}}
    rows = dict(swarm_command.overview(coordinator))
    assert rows["reachable"] == "1 direct, 1 relayed"
    assert any(text.startswith("eager, hole-punched") for text in rows.values())

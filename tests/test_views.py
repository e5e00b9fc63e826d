"""Partial views: joining, replacing, shuffling, and what a hostile neighbour cannot do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treecast_mesh import Mesh, Node

from barnraise.protocol.tree_effects import Connect, Disconnect, LinkUp, Report, Send
from barnraise.protocol.tree_messages import (
    Contact,
    ForwardJoin,
    LeaveView,
    Neighbour,
    NeighbourReply,
    OverlayJoin,
    Shuffle,
    ShuffleReply,
)
from barnraise.protocol.view_state import ViewConfig
from barnraise.protocol.views import Views


def contact(name: str) -> Contact:
    return Contact(peer_id=name, addresses=("a/" + name,))


def views(active: int = 3, bootstrap: tuple[str, ...] = ("boot",), **options: int) -> Views:
    config = ViewConfig(active=active, **options)
    return Views(contact("me"), [contact(name) for name in bootstrap], random.Random(1), config)


def component(mesh: Mesh, start: str) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        for peer in mesh.nodes[todo.pop()].views.active:
            if peer not in seen:
                seen.add(peer)
                todo.append(peer)
    return seen


def check_links(mesh: Mesh) -> None:
    for name, node in mesh.nodes.items():
        assert name not in node.views.active
        guests = [peer for peer in node.views.active if peer.startswith("nat")]
        assert len(node.views.active) - len(guests) <= node.views.state.config.active
        assert len(guests) <= max(node.views.state.config.guests, node.views.state.config.active)
        assert set(node.views.state.guests) == set(guests)
        assert len(node.views.passive) <= node.views.state.config.passive
        assert not set(node.views.active) & set(node.views.passive)
        for peer in node.views.active:
            assert name in mesh.nodes[peer].views.active, f"{name} believes in a link to {peer}"


def test_a_newcomer_joins_and_its_join_is_forwarded() -> None:
    node = views()
    assert node.start(0.0) == [Connect(contact("boot"))]
    assert node.connected("boot", 0.1) == [Send("boot", OverlayJoin(addresses=("a/me",)))]
    assert node.on_message("boot", NeighbourReply(accepted=True), 0.2) == [LinkUp("boot")]
    effects = node.on_message("new", OverlayJoin(addresses=("a/new",)), 1.0)
    assert LinkUp("new") in effects
    assert Send("boot", ForwardJoin(newcomer=contact("new"), ttl=4)) in effects


def test_a_full_view_refuses_polite_requests_and_grants_urgent_ones() -> None:
    node = views(active=2)
    node.start(0.0)
    for name in ("a", "b"):
        node.on_message(name, Neighbour(addresses=("a/" + name,), urgent=False), 0.0)
    refused = node.on_message("c", Neighbour(addresses=("a/c",), urgent=False), 0.0)
    assert refused == [Send("c", NeighbourReply(accepted=False))]
    assert "c" in node.passive
    granted = node.on_message("d", Neighbour(addresses=("a/d",), urgent=True), 0.0)
    assert Send("d", NeighbourReply(accepted=True)) in granted
    parted = [effect.peer for effect in granted if isinstance(effect, Disconnect)]
    assert len(node.active) == 2
    assert "d" in node.active
    assert Send(parted[0], LeaveView()) in granted


def test_a_lost_neighbour_is_replaced_from_the_passive_view() -> None:
    node = views(active=1)
    node.start(0.0, known=[contact("spare")])
    node.on_message("a", Neighbour(addresses=("a/a",), urgent=True), 0.0)
    node.connect_failed("boot", 0.0)
    node.connect_failed("spare", 0.0)
    node.state.remember(contact("next"))
    effects = node.disconnected("a", 1.0)
    assert Connect(contact("next")) in effects
    assert node.connected("next", 1.1) == [Send("next", Neighbour(addresses=("a/me",), urgent=True))]


def test_a_node_without_anybody_tries_its_bootstrap_again_with_growing_pauses() -> None:
    node = views()
    assert node.start(0.0) == [Connect(contact("boot"))]
    now, pauses = 0.0, []
    for _ in range(6):
        node.connect_failed("boot", now)
        assert node.wake_at is not None
        due = node.search.retry_at
        assert due is not None
        pauses.append(due - now)
        now = due
        assert Connect(contact("boot")) in node.on_time(now)
    assert pauses[0] <= 1.5
    assert pauses[-1] > 10


def test_a_link_that_only_the_other_side_believes_in_is_taken_back() -> None:
    node = views()
    node.start(0.0)
    assert node.on_message("x", NeighbourReply(accepted=True), 0.0) == [Send("x", LeaveView())]
    assert node.on_message("x", ForwardJoin(newcomer=contact("y"), ttl=1), 0.0) == [Send("x", LeaveView())]


def test_nobody_fills_our_passive_view_unasked() -> None:
    node = views()
    node.start(0.0)
    node.on_message("x", ShuffleReply(sample=tuple(contact(f"bad{i}") for i in range(16))), 0.0)
    assert not node.passive


def test_a_flooding_neighbour_is_reported_and_its_walks_dropped() -> None:
    node = views(active=3)
    node.start(0.0)
    for name in ("a", "b"):
        node.on_message(name, Neighbour(addresses=("a/" + name,), urgent=True), 0.0)
    walk = Shuffle(origin=contact("z"), ttl=8, sample=())
    effects = [effect for _ in range(500) for effect in node.on_message("a", walk, 1.0)]
    assert sum(isinstance(effect, Send) for effect in effects) <= 100
    assert any(isinstance(effect, Report) and effect.code == "flood" for effect in effects)


def test_a_banned_peer_is_never_linked_again() -> None:
    node = views()
    node.start(0.0)
    node.on_message("bad", Neighbour(addresses=("a/bad",), urgent=True), 0.0)
    assert Disconnect("bad") in node.ban("bad", 1.0)
    assert node.connected("bad", 2.0) == [Disconnect("bad")]
    assert node.on_message("bad", OverlayJoin(addresses=("a/bad",)), 2.0) == [Disconnect("bad")]
    assert "bad" not in node.active
    assert "bad" not in node.passive


def full(active: int) -> Views:
    node = views(active=active)
    node.start(0.0)
    for index in range(active):
        node.on_message(f"n{index}", Neighbour(addresses=(f"a/n{index}",), urgent=True), 0.0)
    node.connect_failed("boot", 0.0)
    return node


def test_whoever_makes_room_for_a_newcomer_is_introduced_to_it() -> None:
    node = full(4)
    effects = node.on_message("new", OverlayJoin(addresses=("a/new",)), 1.0)
    (parted,) = [effect.peer for effect in effects if isinstance(effect, Disconnect)]
    introduced = Send(parted, ForwardJoin(newcomer=contact("new"), ttl=0))
    assert effects.index(introduced) < effects.index(Send(parted, LeaveView()))
    other = full(4)
    assert other.on_message("n0", ForwardJoin(newcomer=contact("new"), ttl=0), 1.0) == [
        Connect(contact("new"))
    ]
    left = other.on_message("n0", LeaveView(), 1.1)
    assert not any(isinstance(effect, Connect) for effect in left)  # it asks nobody else
    assert other.connected("new", 1.2) == [Send("new", Neighbour(addresses=("a/me",), urgent=False))]


def test_a_node_that_leaves_ties_its_neighbours_together() -> None:
    effects = full(4).leave()
    told = {effect.peer: effect.message for effect in effects[:2] if isinstance(effect, Send)}
    tied = {name for peer, walk in told.items() for name in (peer, walk.newcomer.peer_id)}  # type: ignore[attr-defined]
    assert tied == {"n0", "n1", "n2", "n3"}


def test_a_node_that_lacks_one_link_asks_few_of_the_many_it_knows() -> None:
    node = full(8)
    for index in range(40):
        node.state.remember(contact(f"other{index}"))
    asked, effects = 0, node.disconnected("n0", 1.0)
    while dialled := [effect.contact.peer_id for effect in effects if isinstance(effect, Connect)]:
        asked += len(dialled)
        effects = []
        for peer in dialled:
            node.connected(peer, 1.0)
            effects += node.on_message(peer, NeighbourReply(accepted=False), 1.0)
    assert asked == 2


def test_joins_into_a_full_overlay_cost_few_links_beyond_their_own() -> None:
    mesh = Mesh(seed=6, config=ViewConfig(active=6, passive=24))
    mesh.add("n0", [])
    for index in range(1, 60):
        mesh.add(f"n{index}", ["n0"])
        mesh.run(0.3)
    mesh.run(60)
    before = {(name, peer) for name, node in mesh.nodes.items() for peer in node.views.active}
    for index in range(60, 70):
        mesh.add(f"n{index}", ["n0"])
        mesh.run(0.5)
    mesh.run(2)
    old = {f"n{index}" for index in range(60)}
    fresh = {
        (name, peer) for name, node in mesh.nodes.items() for peer in node.views.active if {name, peer} <= old
    }
    assert len(fresh - before) <= 10
    assert min(len(node.views.active) for node in mesh.nodes.values()) >= 3


def test_forty_nodes_that_join_one_after_the_other_are_one_well_linked_overlay() -> None:
    mesh = Mesh(seed=3, config=ViewConfig(active=5, passive=20))
    mesh.add("n0", [])
    for index in range(1, 40):
        mesh.add(f"n{index}", ["n0"])
        mesh.run(0.3)
    mesh.run(60)
    check_links(mesh)
    assert component(mesh, "n0") == set(mesh.nodes)
    degrees = [len(node.views.active) for node in mesh.nodes.values()]
    assert sum(degrees) / len(degrees) >= 4
    assert min(degrees) >= 1


def test_nodes_that_only_dial_out_find_their_neighbours_themselves() -> None:
    mesh = Mesh(seed=4, config=ViewConfig(active=5, passive=20))
    mesh.add("n0", [])
    for index in range(1, 30):
        mesh.add(f"n{index}" if index % 3 else f"nat{index}", ["n0"])
        mesh.run(0.3)
    mesh.run(120)
    check_links(mesh)
    assert min(len(node.views.active) for node in mesh.nodes.values()) >= 3
    assert not any(peer.startswith("nat") for node in mesh.nodes.values() for peer in node.views.passive)


class Losing(Node):
    """Counts the links it loses."""

    lost = 0

    def link_down(self, peer: str) -> None:
        self.lost += 1


@pytest.mark.parametrize(("hosts", "guests"), [(6, 54), (2, 28)])
def test_where_nearly_nobody_can_be_dialled_links_come_to_rest_and_nobody_is_without(
    hosts: int, guests: int
) -> None:
    mesh = Mesh(seed=5, config=ViewConfig(guests=20), node=Losing)
    mesh.add("n0", [])
    names = [f"n{index}" for index in range(1, hosts)] + [f"nat{index}" for index in range(guests)]
    mesh.rng.shuffle(names)
    for name in names:
        mesh.add(name, ["n0"])
        mesh.run(0.3)
    mesh.run(300)
    before = sum(node.lost for node in mesh.nodes.values())
    mesh.run(300)
    check_links(mesh)
    assert sum(node.lost for node in mesh.nodes.values()) == before
    assert all(node.views.active for node in mesh.nodes.values())
    assert component(mesh, "n0") == set(mesh.nodes)


def test_more_guests_than_places_take_turns_and_a_place_is_kept_for_a_while() -> None:
    mesh = Mesh(seed=5, config=ViewConfig(guests=8), node=Losing)
    mesh.add("n0", [])
    for index in range(12):
        mesh.add(f"nat{index}", ["n0"])
        mesh.run(0.3)
    had: set[str] = set()
    for _ in range(30):
        mesh.run(20)
        check_links(mesh)
        had |= set(mesh.nodes["n0"].views.active)
        assert len(mesh.nodes["n0"].views.active) == 8
    assert len(had) == 12
    assert mesh.nodes["n0"].lost <= 8 * 600 / mesh.config.tenure


def test_a_guest_never_costs_a_neighbour_that_can_be_dialled_its_link() -> None:
    node = full(3)
    node.state.config = ViewConfig(active=3, guests=1, tenure=60.0)
    node.on_message("nat1", OverlayJoin(addresses=()), 0.0)
    for urgent in (True, False):
        refused = node.on_message("nat2", Neighbour(addresses=(), urgent=urgent), 100.0)
        assert refused == [Send("nat2", NeighbourReply(accepted=False))]
    assert Send("nat2", NeighbourReply(accepted=False)) in node.on_message(
        "nat2", OverlayJoin(addresses=()), 59.0
    )
    granted = node.on_message("nat2", OverlayJoin(addresses=()), 60.0)
    assert Send("nat1", LeaveView()) in granted
    assert set(node.active) == {"n0", "n1", "n2", "nat2"}


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**16),
    st.lists(
        st.tuples(
            st.sampled_from(["join", "guest", "crash", "leave", "cut", "return", "refresh"]),
            st.floats(0.0, 3.0),
        ),
        max_size=40,
    ),
)
def test_any_interleaving_of_joins_leaves_and_lost_links_ends_symmetric_and_connected(
    seed: int, steps: list[tuple[str, float]]
) -> None:
    mesh = Mesh(seed)
    rng = random.Random(seed)
    mesh.add("n0", [])
    count, gone = 1, []
    for _ in range(5):
        mesh.add(f"n{count}", ["n0"])
        count += 1
        mesh.run(0.2)
    for step, pause in steps:
        others = sorted(set(mesh.nodes) - {"n0"})
        match step:
            case "join":
                mesh.add(f"n{count}", ["n0"])
                count += 1
            case "guest":
                mesh.add(f"nat{count}", ["n0"])
                count += 1
            case "crash" if others:
                mesh.crash(rng.choice(others))
            case "leave" if others:
                gone.append(rng.choice(others))
                mesh.leave(gone[-1])
            case "cut" if mesh.links:
                mesh.cut(*rng.choice(sorted(mesh.links)))
            case "return" if gone and gone[-1] not in mesh.nodes:
                mesh.add(gone.pop(), ["n0"])
            case "refresh":
                node = mesh.nodes[rng.choice(sorted(mesh.nodes))]
                node.do(node.views.refresh(mesh.now))
        mesh.run(pause)
    mesh.run(200)
    check_links(mesh)
    assert all(node.views.active for node in mesh.nodes.values()) or len(mesh.nodes) == 1

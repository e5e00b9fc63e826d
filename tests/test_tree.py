"""The tree of heads: prune, graft, shortcut; every head everywhere, over a tree when quiet."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st
from treecast_mesh import Mesh, head, head_id

from barnraise.protocol.tree import Tree, TreeConfig
from barnraise.protocol.tree_effects import Deliver, LinkEager, Send
from barnraise.protocol.tree_messages import Gossip, GossipHave, Graft, HeadMark, Prune
from barnraise.protocol.view_state import ViewConfig


def gossip(version: int, hops: int = 1) -> Gossip:
    return Gossip(version=version, hops=hops, head=head(version))


def mark(version: int, hops: int = 1) -> GossipHave:
    return GossipHave(marks=(HeadMark(id=head_id(version), version=version, hops=hops),))


def tree(*peers: str) -> Tree:
    node = Tree(TreeConfig())
    for peer in peers:
        node.link_up(peer)
    return node


def eager_edges(mesh: Mesh) -> set[tuple[str, str]]:
    edges = set()
    for name, node in mesh.nodes.items():
        for peer in node.tree.eager:
            assert name in mesh.nodes[peer].tree.eager, "eager on one side only"
            edges.add((min(name, peer), max(name, peer)))
    return edges


def test_a_head_goes_whole_to_eager_links_and_by_id_to_lazy_ones() -> None:
    node = tree("a", "b", "c")
    node.on_message("c", Prune(), 0.0)
    effects = node.on_message("a", gossip(1), 0.0)
    assert effects[0] == Deliver("a", 1, head(1))
    assert Send("b", gossip(1, 2)) in effects
    assert Send("c", mark(1, 2)) in effects
    assert node.parent(head_id(1)) == "a"


def test_who_announced_a_head_is_not_told_of_it() -> None:
    node = tree("a", "b", "c", "d")
    for peer in ("b", "c"):
        node.on_message(peer, Prune(), 0.0)
    node.on_message("b", mark(1, 1), 0.0)
    effects = node.on_message("a", gossip(1), 0.1)
    assert [effect.peer for effect in effects if isinstance(effect, Send)] == ["d", "c"]


def test_a_newcomer_sends_the_head_to_nobody_who_announced_it() -> None:
    node = tree("a", "b", "c", "new")
    for peer in ("a", "b", "c"):
        node.on_message(peer, mark(1, 1), 0.0)
    effects = [effect for effect in node.on_message("a", gossip(1), 0.1) if isinstance(effect, Send)]
    assert {(effect.peer, type(effect.message)) for effect in effects} == {
        ("b", Prune),
        ("c", Prune),
        ("new", Gossip),
    }
    assert set(node.eager) == {"a", "new"}


def test_a_head_that_came_another_way_leaves_one_way_for_the_next() -> None:
    node = tree("a", "b")
    for peer in ("a", "b"):
        node.on_message(peer, mark(1, 1), 0.0)
    assert Send("b", Prune()) in node.broadcast(1, head(1), 0.1)
    assert set(node.eager) == {"a"}
    assert set(node.lazy) == {"b"}


def test_a_second_copy_prunes_its_link() -> None:
    node = tree("a", "b")
    node.on_message("a", gossip(1), 0.0)
    assert node.on_message("b", gossip(1), 0.0) == [LinkEager("b", False), Send("b", Prune())]
    assert list(node.lazy) == ["b"]


def test_an_announced_head_that_does_not_follow_is_grafted_from_one_announcer_after_another() -> None:
    node = tree("a", "b", "c")
    node.on_message("b", Prune(), 0.0)
    node.on_message("c", Prune(), 0.0)
    node.on_message("b", mark(1), 0.0)
    node.on_message("c", mark(1), 0.1)
    assert node.wake_at == 1.0
    assert node.on_time(1.0) == [LinkEager("b", True), Send("b", Graft(id=head_id(1)))]
    assert node.on_time(1.5) == [LinkEager("c", True), Send("c", Graft(id=head_id(1)))]
    node.on_message("c", gossip(1), 1.6)
    assert node.wake_at is None


def test_a_graft_is_answered_with_the_head() -> None:
    node = tree("a", "b")
    node.on_message("a", gossip(1), 0.0)
    node.on_message("b", Prune(), 0.0)
    effects = node.on_message("b", Graft(id=head_id(1)), 0.0)
    assert effects == [LinkEager("b", True), Send("b", gossip(1, 2))]


def test_a_much_shorter_way_takes_the_place_of_the_eager_link() -> None:
    node = tree("a", "b")
    node.on_message("b", Prune(), 0.0)
    node.on_message("a", gossip(1, hops=9), 0.0)
    effects = node.on_message("b", mark(1, hops=1), 0.1)
    assert Send("b", Graft(id=None)) in effects
    assert Send("a", Prune()) in effects
    assert list(node.eager) == ["b"]


def test_a_slow_child_is_demoted_and_cannot_graft_itself_back_at_once() -> None:
    node = tree("a", "slow")
    node.on_message("a", gossip(1), 0.0)
    assert Send("slow", Prune()) in node.demote("slow", 1.0)
    answer = node.on_message("slow", Graft(id=head_id(1)), 1.5)
    assert Send("slow", gossip(1, 2)) in answer
    assert "slow" in node.lazy
    node.on_message("slow", Graft(id=None), 4.0)
    assert "slow" in node.eager


def test_a_neighbour_that_announces_what_it_does_not_have_costs_nothing_but_a_bounded_list() -> None:
    node = tree("liar", "honest")
    for version in range(100):
        node.on_message("liar", mark(1000 + version), 0.0)
    assert len(node._missing) == 16
    node.on_message("honest", mark(1), 0.0)
    assert head_id(1) in node._missing
    for step in range(10):
        node.on_time(1.0 + step)
    assert not node._missing


def test_a_newcomer_is_told_of_the_heads_that_it_missed() -> None:
    node = tree("a")
    node.on_message("a", gossip(1), 0.0)
    assert Send("late", mark(1, 2)) in node.link_up("late")


def test_old_heads_are_forgotten_first_and_not_taken_again() -> None:
    node = Tree(TreeConfig(heads=4))
    node.link_up("a")
    for version in (5, 6, 7, 8, 9):
        node.on_message("a", gossip(version), 0.0)
    assert node.on_message("a", gossip(5), 0.0) == []
    assert node.parent(head_id(5)) is None
    assert node.parent(head_id(9)) == "a"


def test_forty_nodes_get_a_head_over_a_spanning_tree() -> None:
    mesh = Mesh(seed=5, config=ViewConfig(active=6, passive=20))
    mesh.add("n0", [])
    for index in range(1, 40):
        mesh.add(f"n{index}", ["n0"])
        mesh.run(0.3)
    mesh.run(30)
    for version in range(1, 4):
        mesh.nodes["n0"].do(mesh.nodes["n0"].tree.broadcast(version, head(version), mesh.now))
        mesh.run(5)
    assert len(eager_edges(mesh)) == 39
    assert all(node.heads == [1, 2, 3] for name, node in mesh.nodes.items() if name != "n0")


@example(seed=0, steps=[("cut", 0.0), ("head", 0.0), ("cut", 0.0), ("cut", 0.0)])
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**16),
    st.lists(
        st.tuples(st.sampled_from(["join", "crash", "leave", "cut", "head"]), st.floats(0.0, 1.0)),
        max_size=40,
    ),
)
def test_any_interleaving_ends_with_every_head_everywhere_once_and_an_acyclic_eager_graph(
    seed: int, steps: list[tuple[str, float]]
) -> None:
    mesh = Mesh(seed)
    rng = random.Random(seed)
    mesh.add("n0", [])
    count, version = 1, 0
    for _ in range(6):
        mesh.add(f"n{count}", ["n0"])
        count += 1
        mesh.run(0.2)
    for step, pause in steps:
        others = sorted(set(mesh.nodes) - {"n0"})
        match step:
            case "join":
                mesh.add(f"n{count}", ["n0"])
                count += 1
            case "crash" if others:
                mesh.crash(rng.choice(others))
            case "leave" if others:
                mesh.leave(rng.choice(others))
            case "cut" if mesh.links:
                mesh.cut(*rng.choice(sorted(mesh.links)))
            case "head":
                version += 1
                mesh.nodes["n0"].do(mesh.nodes["n0"].tree.broadcast(version, head(version), mesh.now))
        mesh.run(pause)
    mesh.run(120)
    reached, todo = {"n0"}, ["n0"]
    while todo:
        for peer in mesh.nodes[todo.pop()].views.active:
            if peer not in reached:
                reached.add(peer)
                todo.append(peer)
    for _ in range(3):
        version += 1
        mesh.nodes["n0"].do(mesh.nodes["n0"].tree.broadcast(version, head(version), mesh.now))
        mesh.run(20)
    edges = [edge for edge in eager_edges(mesh) if edge[0] in reached]
    assert len(edges) == len(reached) - 1
    for name in reached - {"n0"}:
        assert set(range(version - 2, version + 1)) <= set(mesh.nodes[name].heads)
        assert max(Counter(mesh.nodes[name].heads).values()) == 1

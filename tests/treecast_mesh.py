"""A small asynchronous network for the treecast state machines: ordered links, latency, crashes.

Each node runs the machines of ``barnraise.protocol`` unchanged. Time is virtual; everything is
drawn from one seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from barnraise.protocol.messages import Message, Signed
from barnraise.protocol.tree import Tree, TreeConfig
from barnraise.protocol.tree_effects import (
    Ban,
    Connect,
    Deliver,
    Demote,
    Disconnect,
    Drop,
    Effect,
    LinkDown,
    LinkEager,
    LinkUp,
    Report,
    Send,
)
from barnraise.protocol.tree_messages import Contact
from barnraise.protocol.view_state import ViewConfig
from barnraise.protocol.views import Views


def head(version: int) -> Signed:
    """A stand-in for a signed manifest; these machines never look inside."""
    return Signed(payload=version.to_bytes(8, "big"), signer=bytes(32), signature=bytes(64))


def head_id(version: int) -> bytes:
    return sha256(head(version).payload).digest()


class Node:
    """One peer: overlay and tree; ``extra`` carries out the effects these two do not know."""

    def __init__(self, mesh: Mesh, name: str, bootstrap: list[str], config: ViewConfig) -> None:
        self.mesh, self.name = mesh, name
        contacts = [Contact(peer_id=peer, addresses=("a/" + peer,)) for peer in bootstrap]
        me = Contact(peer_id=name, addresses=() if name.startswith("nat") else ("a/" + name,))
        self.views = Views(me, contacts, random.Random(f"{mesh.seed}/{name}"), config)
        self.tree = Tree(TreeConfig())
        self.heads: list[int] = []
        self.reports: list[Report] = []
        self._planned: float | None = None

    def do(self, effects: list[Effect]) -> None:
        mesh, now = self.mesh, self.mesh.now
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    mesh.send(self.name, peer, message)
                case Connect(contact=contact):
                    mesh.dial(self.name, contact.peer_id)
                case Disconnect(peer=peer):
                    mesh.hang_up(self.name, peer)
                case LinkUp(peer=peer):
                    self.do(self.tree.link_up(peer))
                    self.link_up(peer)
                case LinkDown(peer=peer):
                    self.do(self.tree.link_down(peer))
                    self.link_down(peer)
                case Deliver(version=version):
                    self.heads.append(version)
                    self.delivered(version)
                case Demote(peer=peer):
                    self.do(self.tree.demote(peer, now))
                case Drop(peer=peer):
                    self.do(self.views.drop(peer, now))
                case Ban(peer=peer):
                    self.do(self.views.ban(peer, now))
                case Report():
                    self.reports.append(effect)
                case _:
                    self.extra(effect)
        self.plan()

    def link_up(self, peer: str) -> None: ...

    def link_down(self, peer: str) -> None: ...

    def delivered(self, version: int) -> None: ...

    def extra(self, effect: Effect) -> None:
        assert isinstance(effect, LinkEager)

    def take(self, peer: str, message: Message) -> None:
        self.do(self.views.on_message(peer, message, self.mesh.now))
        self.do(self.tree.on_message(peer, message, self.mesh.now))

    def wakes(self) -> list[float | None]:
        return [self.views.wake_at, self.tree.wake_at]

    def tick(self) -> None:
        self.do(self.views.on_time(self.mesh.now))
        self.do(self.tree.on_time(self.mesh.now))

    def plan(self) -> None:
        due = min((at for at in self.wakes() if at is not None), default=None)
        if due is None or (self._planned is not None and self.mesh.now < self._planned <= due):
            return
        self._planned = due
        self.mesh.at(max(due, self.mesh.now), self._wake)

    def _wake(self) -> None:
        if self.mesh.nodes.get(self.name) is not self:
            return
        self._planned = None
        self.tick()
        self.plan()


class Mesh:
    """Nodes and the ordered links between them."""

    def __init__(self, seed: int, config: ViewConfig | None = None, node: Any = Node) -> None:
        self.seed, self.config, self.make = seed, config or ViewConfig(active=4, passive=16), node
        self.rng = random.Random(seed)
        self.now = 0.0
        self.nodes: dict[str, Any] = {}
        self.links: dict[tuple[str, str], int] = {}  # ordered pair of names: generation
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._clear: dict[tuple[str, str], float] = {}

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, call))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = end

    def add(self, name: str, bootstrap: list[str]) -> Any:
        node = self.nodes[name] = self.make(self, name, bootstrap, self.config)
        node.do(node.views.start(self.now))
        return node

    def crash(self, name: str) -> None:
        """The machine is gone; the others notice within a second."""
        del self.nodes[name]
        for low, high in list(self.links):
            if name in (low, high):
                self.cut(low, high)

    def leave(self, name: str) -> None:
        node = self.nodes[name]
        node.do(node.views.leave())
        self.at(self.now + 0.2, lambda: self.crash(name) if self.nodes.get(name) is node else None)

    def cut(self, one: str, two: str) -> None:
        """Lose a connection and all that is under way on it."""
        if self.links.pop((min(one, two), max(one, two)), None) is None:
            return
        for here, there in ((one, two), (two, one)):
            self.at(self.now + self.rng.random(), lambda here=here, there=there: self._lost(here, there))

    def _lost(self, here: str, there: str) -> None:
        if here in self.nodes and (min(here, there), max(here, there)) not in self.links:
            node = self.nodes[here]
            node.do(node.views.disconnected(there, self.now))

    def dial(self, here: str, there: str) -> None:
        self.at(self.now + 0.01 + self.rng.random() / 20, lambda: self._dialled(here, there))

    def _dialled(self, here: str, there: str) -> None:
        if here not in self.nodes:
            return
        linked = (min(here, there), max(here, there)) in self.links
        if there not in self.nodes or (there.startswith("nat") and not linked):
            self.nodes[here].do(self.nodes[here].views.connect_failed(there, self.now))
            return
        pair = (min(here, there), max(here, there))
        fresh = pair not in self.links
        if fresh:
            self._order += 1
            self.links[pair] = self._order
            self.nodes[there].do(self.nodes[there].views.connected(here, self.now))
        if pair in self.links:
            self.nodes[here].do(self.nodes[here].views.connected(there, self.now))

    def hang_up(self, here: str, there: str) -> None:
        """Close after what was sent before has arrived, unless the other side still wants the link."""
        pair = (min(here, there), max(here, there))
        generation = self.links.get(pair)

        def close() -> None:
            wanted = any(
                a in self.nodes and (b in self.nodes[a].views.active or b in self.nodes[a].views.pending)
                for a, b in ((here, there), (there, here))
            )
            if self.links.get(pair) == generation and not wanted:
                self.cut(here, there)

        self.at(self.now + 0.5, close)

    def send(self, here: str, there: str, message: Message) -> None:
        pair = (min(here, there), max(here, there))
        generation = self.links.get(pair)
        if generation is None:
            return
        arrival = max(self.now + 0.01 + self.rng.random() / 20, self._clear.get((here, there), 0.0))
        self._clear[here, there] = arrival

        def arrive() -> None:
            if self.links.get(pair) == generation and there in self.nodes:
                self.nodes[there].take(here, message)

        self.at(arrival, arrive)

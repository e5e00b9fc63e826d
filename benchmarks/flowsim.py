"""A network of shaped home links in virtual time, for treecast's real state machines.

Every node runs ``barnraise.protocol.treecast.Treecast`` unchanged: overlay, tree,
messages, choices. What is modelled: a message arrives after half a round trip; a
shard is a flow with an even share of its sender's upload, or less where its receiver's
download is full (divided max-min fairly; a share of the upload that such a receiver
leaves is lost, which is pessimistic); hashing takes its time. What is not: TCP's slow start,
packet loss, and the bytes of messages (which are counted, see ``control_bytes``).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from barnraise.protocol.messages import Message, Signed
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree import TreeConfig
from barnraise.protocol.tree_effects import (
    Ban,
    Complete,
    Connect,
    Deliver,
    Disconnect,
    Effect,
    Report,
    Send,
    StartSend,
    StopReceive,
    StopSend,
)
from barnraise.protocol.tree_messages import Contact
from barnraise.protocol.treecast import Treecast
from barnraise.protocol.view_state import ViewConfig

_OVERHEAD = 60  # bytes of framing, encryption and transport around one message


@dataclass(slots=True)
class Flow:
    """One shard under way."""

    source: Host
    target: Host
    version: int
    index: int
    left: float
    rate: float = 0.0
    since: float = 0.0
    plan: int = 0  # number of the finish event that counts
    announced: bool = False  # its receiver has seen the beginning
    refused: bool = False
    moved: float = 0.0
    told: int = 0  # bytes of it that its receiver was told of


@dataclass(slots=True, eq=False)
class Host:
    """A node and its link. ``verify`` may say False: a shard that arrives then counts as corrupt."""

    name: str
    core: Treecast
    up: float
    down: float
    up_flows: dict[tuple[str, int, int], Flow] = field(default_factory=dict)
    down_flows: dict[tuple[str, int, int], Flow] = field(default_factory=dict)
    links: set[str] = field(default_factory=set)
    done: dict[int, float] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    bytes_out: float = 0.0
    wasted: float = 0.0
    generation: int = 0


class FlowSim:
    """Hosts, links and a clock. ``sizes_of`` gives a version's shard sizes, as its manifest would."""

    def __init__(self, seed: int, *, rtt: float = 0.04, hash_rate: float = 500e6) -> None:
        self.rng = random.Random(seed)
        self.seed, self.latency, self.hash_rate = seed, rtt / 2, hash_rate
        self.now = 0.0
        self.hosts: dict[str, Host] = {}
        self.versions: dict[int, Sequence[int]] = {}
        self.wanted: Callable[[Host, int], bool] = lambda host, version: True
        self.intact: Callable[[Host, Host, int, int], bool] = lambda source, target, version, index: True
        self.obey: Callable[[Host, StartSend], bool] = lambda host, effect: True
        self.messages = 0
        self.control_bytes = 0
        self.count_bytes = False
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        self._encoder = msgspec.msgpack.Encoder()

    # --- building

    def add(
        self,
        name: str,
        bootstrap: Sequence[str],
        *,
        up: float,
        down: float,
        views: ViewConfig | None = None,
        transfer: TransferConfig | None = None,
    ) -> Host:
        """Start a node with links of ``up`` and ``down`` bytes per second."""
        contacts = [Contact(peer_id=peer, addresses=("sim/" + peer,)) for peer in bootstrap]
        me = Contact(peer_id=name, addresses=("sim/" + name,))
        rng = random.Random(f"{self.seed}/{name}")
        core = Treecast(me, contacts, rng, views=views, tree=TreeConfig(), transfer=transfer)
        host = self.hosts[name] = Host(name, core, up, down)
        self.do(host, core.start(self.now))
        self.later(1.0 + self.rng.random(), self._tick, host)
        return host

    def publish(self, name: str, version: int, sizes: Sequence[int]) -> None:
        """``name`` has ``version`` whole and announces it."""
        self.versions[version] = sizes
        host = self.hosts[name]
        self.do(host, host.core.want(version, sizes, self.now))
        for index in range(len(sizes)):
            self.do(host, host.core.verified(None, version, index, self.now))
        head = Signed(payload=version.to_bytes(8, "big"), signer=bytes(32), signature=bytes(64))
        self.do(host, host.core.publish(version, head, self.now))

    def crash(self, name: str) -> None:
        """The host vanishes with everything under way; others notice after a round trip."""
        host = self.hosts.pop(name)
        for flow in [*host.up_flows.values(), *host.down_flows.values()]:
            self._end(flow)
        for peer in sorted(host.links):
            self.cut(name, peer)

    # --- running

    def later(self, delay: float, call: Callable[..., None], *arguments: object) -> None:
        """Call after ``delay`` seconds of virtual time."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay, self._order, call, arguments))

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Advance to ``until``, or until ``stop`` says so (asked after every event)."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(queue)
            call(*arguments)
            self.events += 1
            if stop is not None and stop():
                return
        self.now = until

    def do(self, host: Host, effects: Sequence[Effect]) -> None:
        """Carry out what ``host``'s machine wants."""
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                self._send(host, effect.peer, effect.message)  # type: ignore[attr-defined]
            elif isinstance(effect, StartSend):
                self._start(host, effect)
            elif isinstance(effect, StopSend):
                flow = host.up_flows.get((effect.peer, effect.version, effect.index))
                if flow is not None:
                    self._end(flow)
            elif isinstance(effect, StopReceive):
                flow = host.down_flows.get((effect.peer, effect.version, effect.index))
                if flow is not None:
                    flow.refused = True
            elif isinstance(effect, Connect):
                self.later(3 * self.latency, self._dialled, host, effect.contact.peer_id)
            elif isinstance(effect, Disconnect):
                self.later(3 * self.latency, self._hang_up, host, effect.peer)
            elif isinstance(effect, Deliver):
                sizes = self.versions[effect.version]
                wanted = self.wanted(host, effect.version)
                self.do(host, host.core.want(effect.version, sizes, self.now, wanted=wanted))
            elif isinstance(effect, Complete):
                host.done.setdefault(effect.version, self.now)
            elif isinstance(effect, Report):
                host.reports.append(effect)
            elif not isinstance(effect, Ban):
                raise AssertionError(f"unexpected effect {effect}")

    def _tick(self, host: Host) -> None:
        if self.hosts.get(host.name) is not host:
            return
        for flow in host.down_flows.values():
            if flow.rate > 0 and flow.announced and not flow.refused:
                self._advance(flow)
                host.core.progress(flow.source.name, round(flow.moved) - flow.told, self.now)
                flow.told = round(flow.moved)
        wake = host.core.wake_at
        if wake is not None and wake <= self.now:
            self.do(host, host.core.on_time(self.now))
        self.later(1.0, self._tick, host)

    # --- messages and connections

    def _send(self, host: Host, peer: str, message: Message) -> None:
        if peer not in host.links:
            return
        self.messages += 1
        if self.count_bytes:
            self.control_bytes += len(self._encoder.encode(message)) + _OVERHEAD
        self.later(self.latency, self._arrive, host, self.hosts[peer], message)

    def _arrive(self, source: Host, target: Host, message: Message) -> None:
        if source.name in target.links and self.hosts.get(target.name) is target:
            self.do(target, target.core.on_message(source.name, message, self.now))

    def _dialled(self, host: Host, peer: str) -> None:
        if self.hosts.get(host.name) is not host:
            return
        other = self.hosts.get(peer)
        if other is None:
            self.do(host, host.core.connect_failed(peer, self.now))
            return
        if peer not in host.links:
            host.links.add(peer)
            other.links.add(host.name)
            self.do(other, other.core.connected(host.name, self.now))
        self.do(host, host.core.connected(peer, self.now))

    def _hang_up(self, host: Host, peer: str) -> None:
        other = self.hosts.get(peer)
        if other is None or peer not in host.links or self.hosts.get(host.name) is not host:
            return
        for here, there in ((host, other), (other, host)):
            if there.name in here.core.views.active or there.name in here.core.views.pending:
                return  # one side still needs it
        self.cut(host.name, peer)

    def cut(self, one: str, two: str) -> None:
        for name, peer in ((one, two), (two, one)):
            host = self.hosts.get(name)
            if host is None or peer not in host.links:
                continue
            host.links.discard(peer)
            for flow in [*host.up_flows.values(), *host.down_flows.values()]:
                if peer in (flow.source.name, flow.target.name):
                    self._end(flow)
            self.later(2 * self.latency, self._noticed, host, peer)

    def _noticed(self, host: Host, peer: str) -> None:
        if self.hosts.get(host.name) is host and peer not in host.links:
            self.do(host, host.core.disconnected(peer, self.now))

    # --- flows

    def _start(self, host: Host, effect: StartSend) -> None:
        target = self.hosts.get(effect.peer)
        if target is None or effect.peer not in host.links or not self.obey(host, effect):
            return
        size = self.versions[effect.version][effect.index]
        flow = Flow(host, target, effect.version, effect.index, float(size), since=self.now)
        host.up_flows[effect.peer, effect.version, effect.index] = flow
        target.down_flows[host.name, effect.version, effect.index] = flow
        self._share(host, target)
        self.later(self.latency, self._begun, flow)

    def _begun(self, flow: Flow) -> None:
        target = flow.target
        if self.hosts.get(target.name) is not target or flow.source.name not in target.links:
            return
        flow.announced = True
        effects = target.core.incoming(flow.source.name, flow.version, flow.index, self.now)
        flow.refused = flow.refused or any(isinstance(effect, StopReceive) for effect in effects)
        self.do(target, effects)

    def _share(self, source: Host, target: Host) -> None:
        """Divide the links again after a flow between these two began or ended."""
        targets = {flow.target.name: flow.target for flow in source.up_flows.values()}
        targets[target.name] = target
        for host in targets.values():
            self._fill_download(host)

    def _fill_download(self, host: Host) -> None:
        """Max-min fair: no flow gets more than its share of its sender's upload; the rest is divided."""
        wanted = sorted(
            ((flow.source.up / len(flow.source.up_flows), flow) for flow in host.down_flows.values()),
            key=lambda pair: pair[0],
        )
        left, count = host.down, len(wanted)
        for share, flow in wanted:
            rate = min(share, left / count)
            left -= rate
            count -= 1
            self._set(flow, rate)

    def _set(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        self._advance(flow)
        flow.rate = rate
        self._order += 1
        flow.plan = self._order
        heapq.heappush(
            self._queue, (self.now + flow.left / rate, self._order, self._finished, (flow, self._order))
        )

    def _advance(self, flow: Flow) -> None:
        moved = (self.now - flow.since) * flow.rate
        flow.left -= moved
        flow.moved += moved
        flow.since = self.now
        flow.source.bytes_out += moved

    def _end(self, flow: Flow) -> None:
        """Stop a flow before its end."""
        self._remove(flow)
        flow.target.wasted += flow.moved

    def _remove(self, flow: Flow) -> None:
        self._advance(flow)
        flow.plan = -1
        flow.source.up_flows.pop((flow.target.name, flow.version, flow.index), None)
        flow.target.down_flows.pop((flow.source.name, flow.version, flow.index), None)
        self._share(flow.source, flow.target)

    def _finished(self, flow: Flow, plan: int) -> None:
        if flow.plan != plan:
            return
        self._remove(flow)
        source = flow.source
        self.later(self.latency, self._received, flow)
        self.do(source, source.core.sent(flow.target.name, flow.version, flow.index, self.now))

    def _received(self, flow: Flow) -> None:
        target = flow.target
        if self.hosts.get(target.name) is not target:
            return
        if flow.refused:
            target.wasted += flow.moved
            return
        self.do(target, target.core.received(flow.source.name, flow.version, flow.index, self.now))
        self.later(flow.moved / self.hash_rate, self._hashed, flow)

    def _hashed(self, flow: Flow) -> None:
        source, target = flow.source, flow.target
        if self.hosts.get(target.name) is not target:
            return
        good = self.intact(source, target, flow.version, flow.index)
        event = target.core.verified if good else target.core.corrupt
        self.do(target, event(source.name, flow.version, flow.index, self.now))

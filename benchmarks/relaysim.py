"""A star and an HTTP relay tree as SHARDCAST has it, on the links of ``benchmarks.flowsim``.

The same model of links, the same sizes, no cores: clients of static files. What is
taken from SHARDCAST, and where this is kinder to it, says ``benchmarks.http_peer``, which
is the same between real processes; polls, parallel downloads and averages are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.flowsim import Flow, FlowSim, Host
from benchmarks.http_peer import ALPHA, HEALING, PARALLEL, POLL_S


@dataclass(slots=True, eq=False)
class Client:
    """Who downloads, and what it has learned of its relays."""

    host: Host
    upstream: list[Host]
    pending: list[int]  # shards to ask for, the last one next
    success: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    have: set[int] = field(default_factory=set)
    asked: dict[int, float] = field(default_factory=dict)  # when what is on its way was asked for


class RelaySim(FlowSim):
    """Static servers and their clients. Rates in bytes per second, times in virtual seconds."""

    def __init__(self, seed: int, sizes: list[int], *, parallel: int = PARALLEL, rtt: float = 0.04) -> None:
        super().__init__(seed, rtt=rtt)
        self.versions[1] = sizes
        self.parallel = parallel
        self.clients: dict[str, Client] = {}

    def place(self, name: str, up: float, down: float) -> Host:
        """A machine with a link; one that never becomes a client has every shard."""
        host = self.hosts[name] = Host(name, cast(Any, None), up, down)
        return host

    def fetch(self, host: Host, upstream: list[Host]) -> None:
        """``host`` begins to fetch every shard, in order, from ``upstream``."""
        count = len(self.versions[1])
        client = self.clients[host.name] = Client(host, upstream, list(range(count - 1, -1, -1)))
        client.success = {server.name: 1.0 for server in upstream}
        for _ in range(self.parallel):
            self._next(client)

    def _next(self, client: Client) -> None:
        if client.pending:
            self._ask(client, client.pending.pop())

    def _ask(self, client: Client, index: int) -> None:
        most = max(client.rates.values(), default=1.0)
        weights = [
            client.success[server.name] * client.rates.get(server.name, most) for server in client.upstream
        ]
        server = self.rng.choices(client.upstream, weights)[0]
        client.asked[index] = self.now
        self.later(self.latency, self._answer, client, server, index)

    def _answer(self, client: Client, server: Host, index: int) -> None:
        holder = self.clients.get(server.name)
        if holder is not None and index not in holder.have:
            self.later(self.latency + POLL_S, self._ask, client, index)
            return
        flow = Flow(server, client.host, 1, index, float(self.versions[1][index]), since=self.now)
        server.up_flows[client.host.name, 1, index] = flow
        client.host.down_flows[server.name, 1, index] = flow
        self._share(server, client.host)

    def _finished(self, flow: Flow, plan: int) -> None:
        if flow.plan == plan:
            self._remove(flow)
            self.later(self.latency, self._received, flow)

    def _received(self, flow: Flow) -> None:
        client = self.clients[flow.target.name]
        server, size = flow.source.name, self.versions[1][flow.index]
        rate = size / max(self.now - client.asked.pop(flow.index), 1e-6)
        client.rates[server] = (1 - ALPHA) * client.rates.get(server, rate) + ALPHA * rate
        for name in client.success:
            gain = ALPHA * (1 - client.success[name]) if name == server else HEALING
            client.success[name] = min(1.0, client.success[name] + gain)
        client.have.add(flow.index)
        if len(client.have) == len(self.versions[1]):
            client.host.done[1] = self.now
        self._next(client)


def broadcast(
    links: list[float], down: float, origin: float, sizes: list[int], *, relays: int, dedicated: float = 0.0
) -> list[float]:
    """Seconds after which each of the nodes is done, sorted.

    ``links``: uploads of the nodes, bytes/s. ``relays`` of them pass shards on (0: a
    star); with ``dedicated`` the relays are further machines with links of that many
    bytes/s both ways instead, which nobody waits for.
    """
    sim = RelaySim(1, sizes, parallel=PARALLEL if relays else 2)  # a star's time does not depend on it
    root = sim.place("origin", origin, origin)
    nodes = [sim.place(f"node{number}", up, down) for number, up in enumerate(links)]
    if dedicated:
        between = [sim.place(f"relay{number}", dedicated, dedicated) for number in range(relays)]
    else:
        between = nodes[:relays]
    for host in between:
        sim.fetch(host, [root])
    for host in nodes:
        if host not in between:
            sim.fetch(host, between or [root])
    while any(1 not in host.done for host in nodes):
        sim.run(sim.now + 10)
    return sorted(host.done[1] for host in nodes)


def best_relays(nodes: int, up: float, origin: float) -> int:
    """How many nodes a tree of two levels uses best as relays, by arithmetic. Rates in any one unit."""

    def rough(count: int) -> float:
        return max(count / origin, (nodes - count) / (count * up))

    return min(range(1, nodes), key=rough)

"""The wires between the hosts of a swarm in memory: what they cost, and which of them are cut.

A host has a line of its own, a pair of hosts may have a wire of its own. Nothing crosses a cut
one, nor between islands, and after so long a connection over it is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from barnraise.protocol.memory_alarm import Alarm

DEAD_AFTER_S = 45.0  # a silent connection is given up after this long


@dataclass
class Link:
    """One direction between two hosts: where its wire is busy until. Seconds, bytes per second."""

    latency_s: float
    bandwidth: float | None
    free_at: float = 0.0


class Wires:
    """All wires of a swarm; arguments as for ``MemorySwarm``.

    Attributes:
        alarm: wakes who waits for something to arrive.
        bandwidth: of every link not set otherwise; None is unlimited.
        cut_since: pairs of hosts that lose everything between them, and since when.
        islands: hosts that are not on the mainland: where, and since when.
    """

    def __init__(
        self,
        latency_s: float,
        bandwidth: float | None,
        weigh: Callable[[str, int], float] | None,
    ) -> None:
        self.alarm = Alarm()
        self.weigh = weigh
        self.cut_since: dict[frozenset[str], float] = {}
        self.islands: dict[str, tuple[str, float]] = {}
        self._latency_s = latency_s
        self.bandwidth = bandwidth
        self._links: dict[tuple[str, str], Link] = {}
        self._lines: dict[str, tuple[float | None, float | None, float | None]] = {}

    def set_line(self, peer_id: str, latency_s: float | None, down: float | None, up: float | None) -> None:
        """Give a host a line of its own; None: as good as any."""
        self._lines[peer_id] = (latency_s, down, up)

    def set_link(self, a: str, b: str, latency_s: float, bandwidth: float | None) -> None:
        """Set both directions between ``a`` and ``b``."""
        for pair in ((a, b), (b, a)):
            link = self._links[pair] = self.link(*pair)
            link.latency_s, link.bandwidth = latency_s, bandwidth

    def link(self, source: str, target: str) -> Link:
        """The wire from ``source`` to ``target``: the slower of their two lines, unless it was set."""
        link = self._links.get((source, target))
        if link is None:
            latency, bandwidth = self._latency_s, self.bandwidth
            for name in (source, target):
                own_latency, down, up = self._lines.get(name, (None, None, None))
                own_bandwidth = up if name == source else down
                if own_latency is not None:
                    latency = max(latency, own_latency)
                if own_bandwidth is not None:
                    bandwidth = own_bandwidth if bandwidth is None else min(bandwidth, own_bandwidth)
            link = Link(latency, bandwidth)
            if bandwidth is not None:  # others are as good as new each time: a thousand hosts make many pairs
                self._links[(source, target)] = link
        return link

    def since(self, ends: frozenset[str]) -> float | None:
        """Since when the two hosts do not hear each other; None: they do."""
        if not self.cut_since and not self.islands:
            return None
        cut = self.cut_since.get(ends)
        if cut is None and self.islands:
            places = [self.islands[end] for end in ends if end in self.islands]
            if len(places) == 1 or (len(places) == 2 and places[0][0] != places[1][0]):
                return max(since for _, since in places)
        return cut

    def expiry(self, ends: frozenset[str]) -> float:
        """When connections between the two are lost, unless they hear each other again before."""
        since = self.since(ends)
        return float("inf") if since is None else since + DEAD_AFTER_S

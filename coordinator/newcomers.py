"""How many keys that a run has never seen come from one internet address: a sliding window, no I/O.

Anybody can make any number of keys, and nobody any number of addresses. So new keys are counted
by address (of IPv4 the address itself, of IPv6 its /64, which costs its holder nothing) and, four
times as many, by its surroundings (/24 and /48, what one holder often has). That is what Tor's
directory authorities, Ethereum's node tables (geth: /24) and libp2p's routing tables do, with far
smaller numbers: there one operator's many nodes are suspicious, here a household, a campus or a
provider's NAT sends many volunteers. Keys that were here before are never counted.

Groups are kept as keyed hashes alone. Times are ms since the Unix epoch.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from msgspec import Struct

WINDOW_MS = 86_400_000
AROUND = 4  # times as many from the surroundings of an address
MOST_KEPT = 32_768  # arrivals; beyond, the oldest are forgotten before their time
GROUP_BYTES = 8
_UNKNOWN = "unknown"  # the group of all whose address is not known
_OWN_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10"),
    )
)


class NewcomerLimits(Struct, frozen=True):
    """``per_day``: new keys from one address; 0: no limit. ``private``: count private addresses, too."""

    per_day: int = 64
    private: bool = False


class Groups(NamedTuple):
    """Whom an arrival counts for: an address, and what surrounds it."""

    address: bytes
    around: bytes


class Arrival(NamedTuple):
    """One new key that was let in."""

    at_ms: int
    groups: Groups


def groups_of(observed: str, secret: bytes, private: bool) -> Groups | None:
    """The groups of an address as ``Network.observed`` gives it (``/ip4/HOST/tcp/PORT``).

    None: it is not counted, being of this machine or a private network (RFC 1918, 4193, 6598,
    loopback, link-local, a host in memory), unless ``private``. What is not known is one group.
    """
    parts = observed.split("/")
    kind, host = (parts[1], parts[2]) if len(parts) > 2 else ("", "")
    if kind == "memory":
        return _groups(secret, observed, observed) if private else None
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return _groups(secret, _UNKNOWN, _UNKNOWN)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if not private and any(ip.version == net.version and ip in net for net in _OWN_NETWORKS):
        return None
    near, far = (32, 24) if ip.version == 4 else (64, 48)
    return _groups(secret, *(str(ipaddress.ip_network(f"{ip}/{bits}", strict=False)) for bits in (near, far)))


def _groups(secret: bytes, address: str, around: str) -> Groups:
    def hashed(text: str) -> bytes:
        return hmac.digest(secret, text.encode(), "sha256")[:GROUP_BYTES]

    return Groups(hashed(f"address {address}"), hashed(f"around {around}"))


class Newcomers:
    """The arrivals of the last 24 hours, by group."""

    def __init__(self, per_day: int, kept: Iterable[Arrival] = ()) -> None:
        """``per_day``: at least 1. ``kept``: what was kept of an earlier life."""
        self._per_day = per_day
        self._arrivals: deque[Arrival] = deque()
        self._times: dict[bytes, list[int]] = {}  # of each group, ascending
        for arrival in sorted(kept):
            self._add(arrival)

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def arrivals(self) -> Collection[Arrival]:
        """All that count, oldest first."""
        return self._arrivals

    def wait_ms(self, groups: Groups, now_ms: int) -> int:
        """How long until one more new key may come from there; 0: now."""
        self.forget(now_ms)
        address = self._free_at(groups.address, self._per_day)
        around = self._free_at(groups.around, AROUND * self._per_day)
        return max(0, max(address, around) - now_ms)

    def _free_at(self, group: bytes, most: int) -> int:
        times = self._times.get(group, ())
        return times[-most] + WINDOW_MS if len(times) >= most else 0

    def let_in(self, groups: Groups, now_ms: int) -> Arrival:
        """Count a new key."""
        self.forget(now_ms)
        arrival = Arrival(now_ms, groups)
        self._add(arrival)
        return arrival

    def take_back(self, arrival: Arrival) -> None:
        """It did not come in after all."""
        if arrival in self._arrivals:
            self._arrivals.remove(arrival)
            self._drop(arrival)

    def forget(self, now_ms: int) -> None:
        """Drop what is older than the window. A clock that went back makes nobody wait longer than that."""
        if self._arrivals and self._arrivals[-1].at_ms > now_ms:
            late = [arrival._replace(at_ms=min(arrival.at_ms, now_ms)) for arrival in self._arrivals]
            self._arrivals.clear()
            self._times.clear()
            for arrival in late:
                self._add(arrival)
        while self._arrivals and self._arrivals[0].at_ms <= now_ms - WINDOW_MS:
            self._drop(self._arrivals.popleft())

    def _add(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        for group in set(arrival.groups):
            self._times.setdefault(group, []).append(arrival.at_ms)
        if len(self._arrivals) > MOST_KEPT:
            self._drop(self._arrivals.popleft())

    def _drop(self, arrival: Arrival) -> None:
        for group in set(arrival.groups):
            times = self._times[group]
            times.remove(arrival.at_ms)
            if not times:
                del self._times[group]

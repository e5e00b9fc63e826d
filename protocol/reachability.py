"""Whether others can dial a node, found out by asking one of them to try (R1).

The asker names ports and never a host: it is dialled at the address of its own
connection alone, over which it has proved its key, so that nobody can have strangers
dialled in their place. How often anybody is dialled is bounded per peer, per host and
in all. The idea is AutoNAT's (libp2p specs, autonat); this is smaller, and answers why.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import trio
from msgspec import Struct

from barnraise.protocol.addresses import household_of
from barnraise.protocol.errors import BarnraiseError, PeerError
from barnraise.protocol.messages import Message
from barnraise.protocol.network import Handler, Network, Stream
from barnraise.protocol.reach_messages import (
    MAX_PORTS,
    REACH_PROTOCOL,
    PortReach,
    ReachReply,
    ReachRequest,
)
from barnraise.protocol.wire import MessageReader, printable, send_message

ASK_S = 40.0  # for the whole answer: the ports are dialled one after the other
READ_S = 10.0
AT_ONCE = 16  # askers being dialled
PER_PEER = 6  # questions in WINDOW_S
PER_HOST = 24  # a household, a company's exit
IN_ALL = 600
WINDOW_S = 300.0
MAX_KNOWN = 8192


class Reach(Struct, frozen=True):
    """How others reach a node. ``addresses``: where they may dial it (none: it dials out only).

    ``kind``: ``unknown`` (not asked yet), ``direct``, ``hole-punched``, ``relayed`` or
    ``outbound-only``. ``cure`` says what would change that. ``proven``: which of the
    addresses somebody else has dialled.
    """

    kind: str
    reason: str
    cure: str = ""
    addresses: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """All of it in one line for a person."""
        return f"{self.kind}: {self.reason}" + (f"; {self.cure}" if self.cure else "")


UNASKED = Reach("unknown", "not asked yet")


class Quota:
    """At most so many questions per key in ``window_s``; keeps no more than ``MAX_KNOWN`` keys."""

    def __init__(self, most: int, window_s: float = WINDOW_S) -> None:
        self._most = most
        self._window_s = window_s
        self._asked: OrderedDict[str, list[float]] = OrderedDict()

    def wait(self, key: str, now: float) -> float:
        """Seconds until ``key`` may ask again; 0.0: now."""
        times = [at for at in self._asked.get(key, ()) if now - at < self._window_s]
        return 0.0 if len(times) < self._most else times[-self._most] + self._window_s - now

    def spend(self, key: str, now: float) -> None:
        """Count one question."""
        times = [at for at in self._asked.pop(key, ()) if now - at < self._window_s]
        self._asked[key] = [*times, now][-self._most :]
        while len(self._asked) > MAX_KNOWN:
            self._asked.popitem(last=False)

    def forget(self, key: str) -> None:
        """Let ``key`` begin anew."""
        self._asked.pop(key, None)


def port_of(address: str) -> int | None:
    """The port of ``/ip4/HOST/tcp/PORT/...`` (of a host in memory: its number); None for anything else."""
    parts = address.split("/")
    text = parts[2] if parts[1:2] == ["memory"] else parts[4] if parts[3:4] == ["tcp"] else ""
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65_536 else None


def host_of(address: str) -> str:
    """What comes before the port: ``/ip4/HOST``."""
    return "/".join(address.split("/")[:3])


def announced(claimed: Sequence[str], observed: str, proven: Sequence[str]) -> tuple[str, ...]:
    """Where others may dial a node that was reached at ``proven``.

    A node whose own interface has the address that it was seen at is behind no NAT as seen
    from there, and its other addresses may serve others (a coordinator and nodes on one
    LAN). Behind a NAT with a forwarded port only what was proven does.
    """
    if not proven:
        return ()
    own = any(host_of(address) == host_of(observed) for address in claimed)
    return tuple(dict.fromkeys([*proven, *(claimed if own else ())]))[:16]


def serve_reach(
    network: Network,
    *,
    relays: bool = False,
    on_reach: Callable[[str, str, tuple[str, ...], str], None] = lambda peer, observed, proven, way: None,
) -> Handler:
    """A handler of ``REACH_PROTOCOL``: dials whoever asks, within limits.

    ``on_reach(peer, observed, proven, way)`` is told of each outcome.
    """
    peers, hosts, everybody = Quota(PER_PEER), Quota(PER_HOST), Quota(IN_ALL)
    busy = trio.CapacityLimiter(AT_ONCE)

    async def serve(stream: Stream) -> None:
        request: Message | None = None
        with trio.move_on_after(READ_S):
            request = await MessageReader(stream, (ReachRequest,)).receive()
        if not isinstance(request, ReachRequest):
            return
        reply = await answer(stream.peer_id, request)
        with trio.move_on_after(READ_S):
            await send_message(stream, reply)

    async def answer(peer: str, request: ReachRequest) -> ReachReply:
        observed, now = network.observed(peer), trio.current_time()
        keys = ((peers, peer), (hosts, household_of(observed)), (everybody, ""))
        wait = max(quota.wait(key, now) for quota, key in keys)
        if wait > 0 or not observed or busy.available_tokens < 1:
            text = "asked too often" if wait > 0 else "busy" if observed else "it is not known where you are"
            return _reply(observed, (), relays, text, max(wait, 30.0))
        for quota, key in keys:
            quota.spend(key, now)
        found = []
        async with busy:
            for port in dict.fromkeys(request.ports):
                found.append(await _try(network, peer, port))
        proven = tuple(entry.address for entry in found if entry.address)
        on_reach(peer, observed, proven, request.way)
        return _reply(observed, tuple(found), relays, "", 0.0)

    return serve


def _reply(
    observed: str, ports: tuple[PortReach, ...], relays: bool, message: str, wait: float
) -> ReachReply:
    return ReachReply(
        observed=observed or None,
        ports=ports,
        relays=relays,
        message=message,
        retry_after_ms=min(3_600_000, round(wait * 1000)),
    )


async def _try(network: Network, peer: str, port: int) -> PortReach:
    try:
        return PortReach(port=port, address=(await network.dial_back(peer, port))[:256], error="")
    except PeerError as error:
        return PortReach(port=port, address="", error=printable(str(error), 500))


async def ask_reach(network: Network, peer: str, way: str = "", *, tell_only: bool = False) -> ReachReply:
    """Ask a connected peer to dial us back on the ports that we listen on.

    ``tell_only``: nobody need dial, it is just told by what ``way`` others have reached us.

    Raises:
        PeerError: it does not answer, or does not do that.
        MalformedError: what it answers is not a ``ReachReply``.
    """
    claimed = () if tell_only else network.addresses
    ports = [port for port in map(port_of, claimed) if port is not None]
    stream: Stream | None = None
    try:
        with trio.fail_after(ASK_S):
            stream = await network.open_stream(peer, REACH_PROTOCOL)
            known = "hole-punched" if way == "hole-punched" else "relayed" if way == "relayed" else ""
            await send_message(
                stream,
                ReachRequest(ports=tuple(dict.fromkeys(ports))[:MAX_PORTS], way=known),  # type: ignore[arg-type]
            )
            reply = await MessageReader(stream, (ReachReply,)).receive()
    except trio.TooSlowError:
        raise PeerError(f"{peer} did not say within {ASK_S:.0f} s whether it can dial us") from None
    finally:
        if stream is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
                await stream.reset()
    if not isinstance(reply, ReachReply):
        raise PeerError(f"{peer} did not say whether it can dial us")
    return reply


def judge(claimed: Sequence[str], reply: ReachReply) -> Reach:
    """What a dial-back means, without help of a relay."""
    observed = reply.observed or ""
    proven = tuple(entry.address for entry in reply.ports if entry.address)
    if proven:
        return Reach("direct", f"dialled at {proven[0]}", "", announced(claimed, observed, proven), proven)
    if not claimed:
        return Reach("outbound-only", "this node does not listen", "start it with --listen to be dialled")
    if not reply.ports:
        return Reach("unknown", f"the coordinator did not try to dial it: {printable(reply.message, 200)}")
    cause = reply.ports[0].error
    own = any(host_of(address) == host_of(observed) for address in claimed)
    ports = ", ".join(str(entry.port) for entry in reply.ports)
    cure = (
        f"a firewall is in the way: let TCP port {ports} in"
        if own
        else f"it is behind NAT (seen at {host_of(observed).rpartition('/')[2]}): forward TCP port {ports} "
        "on the router to this machine, with a fixed --listen port"
    )
    return Reach("outbound-only", f"the coordinator cannot dial it ({printable(cause, 200)})", cure)


def reason_of(error: BarnraiseError) -> Reach:
    """When the question itself fails."""
    return Reach("unknown", f"the coordinator could not be asked: {printable(str(error), 200)}")

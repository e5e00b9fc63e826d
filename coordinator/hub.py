"""Who is connected: live sessions by key, what they last said, and what is pushed to them.

Nothing here is durable: a restart begins with an empty hub, and nodes come back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from barnraise.protocol.messages import (
    HeadPush,
    Message,
    NoticePush,
    Peer,
    ReceiptPush,
    Signed,
)
from barnraise.protocol.reachability import announced

MAX_SESSIONS = 16_384
MAX_PER_PEER = 4
PEERS_GIVEN = 16
MAX_REPORTS = 64
MAX_REPORTS_OF_ONE = 16  # per session
_TRIES = 64


class Pusher(Protocol):
    """The part of ``ServerSession`` that the hub uses."""

    def push(self, message: Message) -> bool: ...

    def close(self, reason: str) -> None: ...


@dataclass(eq=False, slots=True)
class Live:
    """One session. Fields after ``connected_at`` are set when it has joined."""

    session: Pusher
    peer_id: str
    connected_at: int
    key: bytes = b""
    instance: bytes = b""
    name: str = ""
    engine: str = ""
    addresses: tuple[str, ...] = ()
    have_version: int = -1
    state: str = "joining"
    seen_at: int = 0
    replaced: bool = False
    reports: int = 0
    reach: str = "unknown"  # how others reach it; see barnraise.protocol.reachability.Reach


@dataclass(slots=True)
class Hub:
    """Live sessions. ``head`` is the signed manifest that newcomers are given.

    Whatever is done for one session costs the same however many there are.
    """

    sessions: set[Live] = field(default_factory=set)
    joining: dict[Live, None] = field(default_factory=dict)  # have not joined yet, oldest first
    by_key: dict[bytes, Live] = field(default_factory=dict)
    head: Signed | None = None
    head_version: int = -1
    reports: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))  # hearsay
    _by_peer: dict[str, dict[Live, None]] = field(default_factory=dict)
    _order: list[Live] = field(default_factory=list)  # those of by_key, for drawing from
    _place: dict[Live, int] = field(default_factory=dict)  # where each is in it

    def has_room(self, peer_id: str) -> bool:
        """Whether one more session, of this peer, is within the bounds."""
        return len(self.sessions) < MAX_SESSIONS and len(self._by_peer.get(peer_id, ())) < MAX_PER_PEER

    def add(self, live: Live) -> None:
        """A stream was opened."""
        self.sessions.add(live)
        self.joining[live] = None
        self._by_peer.setdefault(live.peer_id, {})[live] = None

    def remove(self, live: Live) -> None:
        """A session ended; a newer one of the same key stays."""
        self.sessions.discard(live)
        self.joining.pop(live, None)
        mine = self._by_peer.get(live.peer_id, {})
        mine.pop(live, None)
        if not mine:
            self._by_peer.pop(live.peer_id, None)
        if self.by_key.get(live.key) is live:
            del self.by_key[live.key]
            place, last = self._place.pop(live), self._order.pop()
            if last is not live:
                self._order[place], self._place[last] = last, place

    def join(self, live: Live) -> Live | None:
        """``live`` speaks for its key from now on; returns the session that did until now, if any."""
        self.joining.pop(live, None)
        previous = self.by_key.get(live.key)
        if previous is live:
            return None
        self.by_key[live.key] = live
        if previous is None:
            self._place[live] = len(self._order)
            self._order.append(live)
            return None
        place = self._place[live] = self._place.pop(previous)
        self._order[place] = live
        previous.replaced = True
        return previous

    def joined(self) -> Iterator[Live]:
        """Sessions that speak for their key."""
        return iter(self.by_key.values())

    def reached(self, peer_id: str, observed: str, proven: tuple[str, ...], way: str) -> None:
        """Others are sent to where this peer was dialled; ``way``: what it says of itself otherwise."""
        for live in self._by_peer.get(peer_id, ()):
            live.addresses = announced(live.addresses, observed, proven)
            live.reach = "direct" if proven else way or "outbound-only"

    def set_head(self, version: int, manifest: Signed) -> None:
        """Tell everybody of a new version."""
        self.head = manifest
        self.head_version = version
        self.broadcast(HeadPush(head=manifest))

    def broadcast(self, message: Message) -> None:
        """Push to every joined session; whoever does not read loses their session alone."""
        for live in list(self.by_key.values()):
            live.session.push(message)

    def send_receipt(self, node: bytes, receipt: Signed) -> None:
        """Push a receipt if its owner is here; else they ask for it when they are back."""
        live = self.by_key.get(node)
        if live is not None:
            live.session.push(ReceiptPush(receipt=receipt))

    def notify_duplicate(self, old: Live, new: Live) -> None:
        """Two live processes use one key: both are told (R9); the newer one keeps it (R4)."""
        old.session.push(
            NoticePush(
                code="duplicate-key",
                message="another node has just joined with this very key, so this one's session ends. "
                "Give each machine a key of its own: `barnraise join --key FILE`",
            )
        )
        new.session.push(
            NoticePush(
                code="duplicate-key-kept",  # else it would stay away, too, if we end soon after
                message="another live node used this very key until now; its session was ended. "
                "If you did not restart it yourself, give each machine a key of its own",
            )
        )

    def peers_for(self, live: Live, oldest: int, rng: random.Random) -> tuple[Peer, ...]:
        """A random sample of other nodes that hold version ``oldest`` or newer, newest first."""
        everybody = self._order
        count = len(everybody)
        tried = range(count) if count <= _TRIES else rng.sample(range(count), _TRIES)
        found = [
            other
            for other in (everybody[index] for index in tried)
            if other is not live and other.addresses and other.have_version >= max(0, oldest)
        ]
        if count <= _TRIES:
            rng.shuffle(found)  # else they are in the order of the draw
        found.sort(key=lambda other: -other.have_version)
        return tuple(
            Peer(peer_id=other.peer_id, addresses=other.addresses, have_version=other.have_version)
            for other in found[:PEERS_GIVEN]
        )

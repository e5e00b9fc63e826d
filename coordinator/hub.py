"""Who is connected: live sessions by key, what they last said, and what is pushed to them.

Nothing here is durable: a restart begins with an empty hub, and nodes come back.
"""

from __future__ import annotations

import random
from collections import Counter, deque
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
    """Live sessions. ``head`` is the signed manifest that newcomers are given."""

    sessions: set[Live] = field(default_factory=set)
    by_key: dict[bytes, Live] = field(default_factory=dict)
    head: Signed | None = None
    head_version: int = -1
    reports: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))  # hearsay
    _per_peer: Counter[str] = field(default_factory=Counter)
    _sample: tuple[Live, ...] | None = None

    def has_room(self, peer_id: str) -> bool:
        """Whether one more session, of this peer, is within the bounds."""
        return len(self.sessions) < MAX_SESSIONS and self._per_peer[peer_id] < MAX_PER_PEER

    def add(self, live: Live) -> None:
        """A stream was opened."""
        self.sessions.add(live)
        self._per_peer[live.peer_id] += 1

    def remove(self, live: Live) -> None:
        """A session ended; a newer one of the same key stays."""
        self.sessions.discard(live)
        self._per_peer[live.peer_id] -= 1
        if not self._per_peer[live.peer_id]:
            del self._per_peer[live.peer_id]
        if self.by_key.get(live.key) is live:
            del self.by_key[live.key]
        self._sample = None

    def join(self, live: Live) -> Live | None:
        """``live`` speaks for its key from now on; returns the session that did until now, if any."""
        previous = self.by_key.get(live.key)
        self.by_key[live.key] = live
        self._sample = None
        if previous is None or previous is live:
            return None
        previous.replaced = True
        return previous

    def joined(self) -> Iterator[Live]:
        """Sessions that speak for their key."""
        return iter(self.by_key.values())

    def reached(self, peer_id: str, observed: str, proven: tuple[str, ...], way: str) -> None:
        """Others are sent to where this peer was dialled; ``way``: what it says of itself otherwise."""
        for live in self.sessions:
            if live.peer_id == peer_id:
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
                code="duplicate-key",
                message="another live node used this very key until now; its session was ended. "
                "If you did not restart it yourself, give each machine a key of its own",
            )
        )

    def peers_for(self, live: Live, oldest: int, rng: random.Random) -> tuple[Peer, ...]:
        """A random sample of other nodes that hold version ``oldest`` or newer, newest first."""
        if self._sample is None:
            self._sample = tuple(self.by_key.values())
        everybody = self._sample
        count = len(everybody)
        tried = range(count) if count <= _TRIES else rng.sample(range(count), _TRIES)
        found = [
            other
            for other in (everybody[index] for index in tried)
            if other is not live and other.addresses and other.have_version >= max(0, oldest)
        ]
        rng.shuffle(found)
        found.sort(key=lambda other: -other.have_version)
        return tuple(
            Peer(peer_id=other.peer_id, addresses=other.addresses, have_version=other.have_version)
            for other in found[:PEERS_GIVEN]
        )

"""The control streams of one node's links: dialled, taken, read, written and ended.

Whatever a neighbour sends, the worst that happens is the end of its own link; the machine is
told of every end, whatever the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import trio

from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError, SignatureError
from barnraise.protocol.gossip_dial import Dialler
from barnraise.protocol.gossip_link import Link
from barnraise.protocol.messages import Message
from barnraise.protocol.network import Network, Stream
from barnraise.protocol.tree_messages import TREE_FRAMES, Contact, Opened, Piece
from barnraise.protocol.tree_messages import Gossip as Head
from barnraise.protocol.wire import MessageReader

if TYPE_CHECKING:
    from barnraise.protocol.gossip import Gossiper

log = logging.getLogger(__name__)

MAX_LINKS = 128
LINGER_S = 1.0  # between the decision to part and the end of the connection
_CONTROL = frozenset(frame.type for frame in TREE_FRAMES) - {Piece}


class ControlTraffic:
    """The control streams of one ``Gossiper``; ``trusted`` peers may always be dialled."""

    def __init__(self, owner: Gossiper, network: Network, trusted: Iterable[str]) -> None:
        self._owner = owner
        self._dialler = Dialler(network, trusted)
        self._dialling: set[str] = set()

    @property
    def dialling(self) -> bool:
        """Whether somebody is being dialled."""
        return bool(self._dialling)

    def connect(self, contact: Contact) -> None:
        """Dial ``contact``, unless that is under way, and tell the machine how it went."""
        peer = contact.peer_id
        if peer in self._dialling:
            return
        self._dialling.add(peer)
        self._owner.spawn(self._dial, contact)

    async def _dial(self, contact: Contact) -> None:
        peer = contact.peer_id
        stream: Stream | None = None
        try:
            if peer not in self._owner.links and peer not in self._owner.banned:
                stream = await self._dialler.open(contact)
        except PeerError as error:
            log.debug("cannot link to %s: %s", peer, error)
        finally:
            self._dialling.discard(peer)
        now = trio.current_time()
        if stream is not None:
            link = self._link(peer, stream)
            self._owner.spawn(self._read_own, link, stream)
        elif peer not in self._owner.links:
            self._owner.do(self._owner.core.connect_failed(peer, now))
            return
        self._owner.do(self._owner.core.connected(peer, now))

    def _link(self, peer: str, stream: Stream) -> Link:
        """The link to ``peer``, with one stream more."""
        link = self._owner.links.get(peer)
        if link is None:
            link = self._owner.links[peer] = Link(peer, trio.current_time())
            link.streams.append(stream)
            self._owner.spawn(self._write, link)
            self._owner.stir()
        else:
            link.streams.append(stream)
        return link

    def end(self, link: Link, reason: str, *, abruptly: bool = True) -> None:
        """Close a link and tell the machine; safe to call twice."""
        if link.ended:
            return
        link.stop(reason)
        del self._owner.links[link.peer_id]
        link.streams += self._owner.shards.ended(link)
        self._owner.spawn(partial(link.close, abruptly=abruptly))
        self._owner.stir()
        log.debug("link to %s ended: %s", link.peer_id, reason)
        self._owner.do(self._owner.core.disconnected(link.peer_id, trio.current_time()))

    def needed(self, peer: str) -> bool:
        """Whether ``peer`` is a neighbour, or asked to be one."""
        return peer in self._owner.core.views.active or peer in self._owner.core.views.pending

    async def part_later(self, peer: str) -> None:
        """End the link to a neighbour of the past, unless it is one again by then."""
        link = self._owner.links.get(peer)
        await trio.sleep(LINGER_S)
        if link is not None and self._owner.links.get(peer) is link and not self.needed(peer):
            self.end(link, "parted", abruptly=False)

    async def end_banned(self, peer: str, reason: str) -> None:
        """End the link to a banned peer."""
        link = self._owner.links.get(peer)
        if link is not None:
            self.end(link, reason)
        await trio.lowlevel.checkpoint()

    async def serve(self, stream: Stream) -> None:
        """Take a control stream that a peer opened, until it ends."""
        peer = stream.peer_id
        link = self._owner.links.get(peer)
        full = len(self._owner.links) >= MAX_LINKS if link is None else len(link.streams) >= 2
        if not self._owner.running or peer in self._owner.banned or full:
            await stream.reset()
            return
        fresh = link is None
        link = self._link(peer, stream)
        if fresh:
            self._owner.do(self._owner.core.connected(peer, trio.current_time()))
        await self._read(link, stream)

    async def _read_own(self, link: Link, stream: Stream) -> None:
        with link.task():
            await self._read(link, stream)

    async def _write(self, link: Link) -> None:
        with link.task():
            try:
                await link.write()
            except BarnraiseError as error:
                self.end(link, str(error))

    async def _read(self, link: Link, stream: Stream) -> None:
        """Take messages until the link ends; its end is ours to note, whatever the cause."""
        reason = "the other side closed it"
        reader = MessageReader(stream, _CONTROL)
        try:
            while not link.ended:
                message = await reader.receive()
                if message is None:
                    break
                await link.throttle()
                await self._take(link, message)
        except BarnraiseError as error:
            reason = str(error)
            if isinstance(error, MalformedError | SignatureError):
                log.warning("the link to %s ends: %s", link.peer_id, error)
        except Exception:
            self._owner.defects += 1
            reason = "a message could not be handled"
            log.exception("a message of %s could not be handled", link.peer_id)
        self.end(link, reason)

    async def _take(self, link: Link, message: Message) -> None:
        if isinstance(message, Head | Opened):
            try:
                if isinstance(message, Opened):
                    if self.needed(link.peer_id):
                        await self._owner.openings.believe(link.peer_id, message)
                    return
                await self._owner.heads.believe(message)
            except SignatureError as error:
                if not link.ended:
                    self._owner.report("forged", link.peer_id, str(error))
                    self._owner.do(self._owner.core.ban(link.peer_id, trio.current_time()))
                raise
        if not link.ended:
            self._owner.do(self._owner.core.on_message(link.peer_id, message, trio.current_time()))

"""The shards that move between one node and its neighbours: read, checked, stored; sent and stopped.

Each outbound transfer is a task; a neighbour's transfers share one bulk stream and
follow each other on it. What arrives is hashed and stored off the event loop, a few
shards at a time, and counts only then.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError, StorageError
from barnraise.protocol.gossip_bulk import PieceReader, Receiving, Sending
from barnraise.protocol.gossip_link import Link
from barnraise.protocol.manifest import check_shard
from barnraise.protocol.network import Stream
from barnraise.protocol.shards import off_loop
from barnraise.protocol.tree_messages import BULK_PROTOCOL, Piece

if TYPE_CHECKING:
    from barnraise.protocol.gossip import Gossiper

log = logging.getLogger(__name__)

OPEN_S = 10.0
MAX_STREAMS = 2  # of one neighbour; it needs one
REUSE_S = 300.0
CHECKS = 4  # shards being hashed and stored at a time, each in memory


class ShardTraffic:
    """The bulk streams of one ``Gossiper``."""

    def __init__(self, owner: Gossiper) -> None:
        self._owner = owner
        self._sending: dict[str, Sending] = {}
        self._streams: dict[str, tuple[Stream, float]] = {}  # and when it was last used
        self._turns: dict[str, trio.Lock] = {}
        self._receiving: dict[str, Receiving] = {}
        self._checks = trio.Semaphore(CHECKS)

    # --- what the machine wants

    def start(self, peer: str, number: int, index: int) -> None:
        """Begin to send a shard."""
        link = self._owner.links.get(peer)
        if link is not None:
            sending = self._sending[peer] = Sending(number, index)
            self._owner.stir()
            self._owner.spawn(self._send, link, sending)

    def stop(self, peer: str, number: int, index: int) -> None:
        """Stop sending a shard after the piece under way."""
        sending = self._sending.get(peer)
        if sending is not None and (sending.number, sending.index) == (number, index):
            sending.stopped = True
            del self._sending[peer]

    def drop(self, peer: str, number: int, index: int) -> None:
        """Forget what arrived of a shard, and what will."""
        receiving = self._receiving.get(peer)
        if receiving is not None and (receiving.number, receiving.index) == (number, index):
            receiving.drop()

    def ended(self, link: Link) -> list[Stream]:
        """The link is over; returns streams of ours to close with it."""
        peer = link.peer_id
        sending = self._sending.pop(peer, None)
        if sending is not None:
            sending.stopped = True
        self._receiving.pop(peer, None)
        self._turns.pop(peer, None)
        kept = self._streams.pop(peer, None)
        return [] if kept is None else [kept[0]]

    # --- out

    async def _send(self, link: Link, sending: Sending) -> None:
        owner, peer = self._owner, link.peer_id
        number, index = sending.number, sending.index
        with link.task():
            turn = self._turns.setdefault(peer, trio.Lock())
            async with turn:  # the last piece of a stopped shard may still be on its way out
                try:
                    whole = await self._deliver(link, sending)
                except BarnraiseError as error:
                    owner.control.end(link, str(error))
                    return
                except Exception:
                    owner.defects += 1
                    log.exception("a shard for %s could not be sent", peer)
                    owner.control.end(link, "a shard could not be sent")
                    return
            if link.ended or sending.stopped:
                return
            del self._sending[peer]
            now = trio.current_time()
            if whole:
                owner.do(owner.core.sent(peer, number, index, now))
            elif number in owner.lists.watches:
                owner.do(owner.core.lost(number, index, now))
            else:
                owner.lists.forget(number)  # a version that is going, or damaged on disk

    async def _deliver(self, link: Link, sending: Sending) -> bool:
        """Send a shard; False if it is not here any more, or no longer wanted."""
        owner, peer = self._owner, link.peer_id
        shards = owner.lists.shards.get(sending.number, ())
        if sending.stopped or sending.index >= len(shards):
            return False
        digest, size = shards[sending.index]
        data = await off_loop(size, lambda: owner.store.get(digest))
        if data is None or len(data) != size or sending.stopped:
            return False
        stream = await self._kept(peer)
        if stream is None:
            with trio.move_on_after(OPEN_S):
                stream = await owner.network.open_stream(peer, BULK_PROTOCOL)
            if stream is None:
                raise PeerError(f"{peer} opened no stream for shards within {OPEN_S:.0f} s")
            if link.ended:
                await stream.reset()
                return False
        self._streams[peer] = (stream, trio.current_time())
        version = owner.lists.version(sending.number)

        def moved(more: int) -> None:
            link.sent.add(more, trio.current_time())
            owner.lists.sent[version] += more

        whole = await sending.run(stream, data, moved)
        if self._streams.get(peer, (None, 0.0))[0] is stream:
            self._streams[peer] = (stream, trio.current_time())
        return whole

    async def _kept(self, peer: str) -> Stream | None:
        """The open stream to ``peer``, unless it was idle for so long that its other end may be gone."""
        stream, used = self._streams.get(peer, (None, 0.0))
        if stream is not None and trio.current_time() - used > REUSE_S:
            del self._streams[peer]
            with trio.move_on_after(OPEN_S):
                await stream.close()
            return None
        return stream

    # --- in

    async def serve(self, stream: Stream) -> None:
        """Take a bulk stream that a neighbour opened, until it ends; a fault of its ends the link."""
        link = self._owner.links.get(stream.peer_id)
        if link is None or not self._owner.running or stream.peer_id in self._owner.banned:
            await stream.reset()
            return
        try:
            await self.read(link, stream)
        except BarnraiseError as error:
            if isinstance(error, MalformedError):
                log.warning("the link to %s ends: %s", link.peer_id, error)
            if isinstance(error, MalformedError) or link.peer_id in self._receiving:
                self._owner.control.end(link, str(error))
            await stream.reset()
        except Exception:
            self._owner.defects += 1
            log.exception("a shard of %s could not be handled", link.peer_id)
            self._owner.control.end(link, "a shard could not be handled")
            await stream.reset()

    async def read(self, link: Link, stream: Stream) -> None:
        """Take what ``link``'s neighbour sends on one bulk stream until it ends.

        Raises:
            MalformedError: what came is no piece, or none of what it claims to be.
            PeerError: the stream is gone.
        """
        owner, peer = self._owner, link.peer_id

        def moved(more: int) -> None:
            now = trio.current_time()
            link.received.add(more, now)
            receiving = self._receiving.get(peer)
            if receiving is not None and receiving.taken:  # what is read and forgotten is no progress
                owner.core.progress(peer, more, now)
                watch = owner.lists.watches.get(receiving.number)
                if watch is not None:
                    watch.heard_at = now

        if link.bulk_streams >= MAX_STREAMS:
            raise MalformedError(f"more than {MAX_STREAMS} streams for shards at a time")
        link.bulk_streams += 1
        try:
            await self._read(link, PieceReader(stream, moved))
        finally:
            link.bulk_streams -= 1

    async def _read(self, link: Link, reader: PieceReader) -> None:
        peer = link.peer_id
        while not link.ended:
            piece = await reader.header()
            if piece is None:
                return
            receiving = self._begin(link, piece) if piece.offset == 0 else self._receiving.get(peer)
            part = await reader.body(piece)
            if link.ended or receiving is None:
                continue
            if not receiving.expects(piece):
                if receiving.taken:
                    raise MalformedError(f"a piece at {piece.offset} where {receiving.offset} was due")
                continue
            if receiving.add(part):
                self._receiving.pop(peer, None)
                if receiving.taken:
                    await self._whole(link, receiving)

    def _begin(self, link: Link, piece: Piece) -> Receiving:
        """A neighbour begins a shard: whether we take it is the machine's decision."""
        owner, peer = self._owner, link.peer_id
        shards = owner.lists.shards.get(piece.version)
        if shards is not None and piece.version in owner.lists.opened and piece.index >= len(shards):
            shards = None  # the neighbour knows more of it than we do, as yet
        if shards is not None:
            if piece.index >= len(shards):
                raise MalformedError(f"shard {piece.index} of a list of {len(shards)}")
            if piece.total != shards[piece.index][1]:
                raise MalformedError(
                    f"shard {piece.index} has {shards[piece.index][1]} bytes, {piece.total} are announced"
                )
        receiving = self._receiving[peer] = Receiving(piece)
        owner.stir()
        if shards is None:
            receiving.drop()
        owner.do(owner.core.incoming(peer, piece.version, piece.index, trio.current_time()))
        return receiving

    async def _whole(self, link: Link, receiving: Receiving) -> None:
        owner, peer = self._owner, link.peer_id
        number, index = receiving.number, receiving.index
        owner.do(owner.core.received(peer, number, index, trio.current_time()))
        shards = owner.lists.shards.get(number)
        if shards is None:
            return
        await self._checks.acquire()
        try:
            owner.spawn(self._check, peer, number, index, shards[index][0], bytes(receiving.data))
        except BaseException:
            self._checks.release()
            raise

    async def _check(self, peer: str, number: int, index: int, digest: bytes, data: bytes) -> None:
        owner = self._owner

        def keep() -> bool:
            if not check_shard(data, digest):
                return False
            owner.store.put(digest, data, checked=True)
            return True

        try:
            good = await off_loop(len(data), keep)
        except StorageError as error:
            watch = owner.lists.watches.get(number)
            owner.lists.forget(number)
            if watch is not None:
                watch.failed(error)
            return
        except Exception:
            owner.defects += 1
            log.exception("a shard of %s could not be stored", peer)
            owner.lists.forget(number)
            return
        finally:
            self._checks.release()
        now = trio.current_time()
        if not good:
            owner.do(owner.core.corrupt(peer, number, index, now))
            return
        owner.lists.received[owner.lists.version(number)] += len(data)
        watch = owner.lists.watches.get(number)
        if watch is not None:
            watch.heard_at = now
            watch.got(digest, len(data), peer)
        owner.do(owner.core.verified(peer, number, index, now))

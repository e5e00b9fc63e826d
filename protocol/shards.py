"""Shards over one stream: ask by digest, get a header and the raw bytes; many times per stream.

The server answers requests in order and holds a bounded number of shards in
memory; whoever sends anything else loses that stream and nothing more. The
client keeps one stream per peer and a few requests in flight on it, never pauses
reading while a reply is due (py-libp2p's sender gives up when starved of window
for 5 s), and gives a peer that makes no progress for 5 s up (R22).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import trio

from barnraise.protocol.bandwidth import WINDOW
from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.manifest import check_shard
from barnraise.protocol.messages import MAX_SHARD, SHARD_PROTOCOL, ShardReply, ShardRequest
from barnraise.protocol.network import Handler, Network, Stream
from barnraise.protocol.paced_network import PacedStream
from barnraise.protocol.stream_slots import with_slots
from barnraise.protocol.wire import MessageReader, send_message

T = TypeVar("T")

INLINE_BYTES = 1024 * 1024  # less than this is hashed, read or written on the event loop: 1-3 ms
PROGRESS_S = 5.0
DIAL_S = 10.0
_RESET_S = 2.0
_SLOWEST = 16 * 1024  # bytes/s: a peer that trickles below this is given up, too
_PIECE = 256 * 1024
_BUSY_S = 2.0  # after so long a wait for its turn, a request is answered as if the shard were not here


class BadShardError(PeerError):
    """The peer sent bytes that are not the shard, or no valid reply: it is faulty or hostile."""


class ShardStore(Protocol):
    """What is served from; ``barnraise.protocol.store.DiskStore`` is one."""

    def size(self, digest: bytes) -> int | None:
        """The shard's size in bytes, ``None`` if it is not here."""

    def get(self, digest: bytes) -> bytes | None:
        """The verified bytes, ``None`` if they are not here."""


class ServeLimits(NamedTuple):
    """What serving may cost: streams at once, shards in memory at once, patience in seconds."""

    streams: int = 64
    streams_per_peer: int = 4
    sending: int = 8  # and as many shards on their way at once
    misses: int = 1024  # requests in a row for shards that are not here
    idle_s: float = 60.0
    progress_s: float = 30.0  # for each 256 KiB


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run blocking ``work`` on about ``size`` bytes: in a worker thread if that would be felt.

    An autojump clock does not wait for worker threads: timeouts elsewhere may
    fire while one works. Simulations raise ``INLINE_BYTES`` out of the way.
    """
    if size < INLINE_BYTES:
        return work()
    return await trio.to_thread.run_sync(work)


def serve_shards(
    store: ShardStore,
    limits: ServeLimits | None = None,
    *,
    allow: Callable[[str], bool] = lambda peer_id: True,
    sent: Callable[[str, int], None] = lambda peer_id, size: None,
    slots: Callable[[int], int] = lambda most: most,
) -> Handler:
    """A handler for ``SHARD_PROTOCOL`` that serves what ``store`` holds.

    ``allow(peer_id)`` false resets the stream, or ends it before the next shard.
    ``sent(peer_id, bytes)`` is called for each piece sent. ``slots(most)`` says how
    many of ``most`` shards may be on their way at once: under a bandwidth cap
    (``barnraise.protocol.bandwidth.Pacer.streams``) so few that each makes progress.
    """
    budget = limits or ServeLimits()
    sending = 0
    sent_one = trio.Condition()

    async def serve(stream: Stream) -> None:
        reader = MessageReader(stream, frozenset({ShardRequest}))
        misses = 0
        while misses < budget.misses:
            with trio.fail_after(budget.idle_s):
                request = await reader.receive()
            if request is None or not allow(stream.peer_id):
                break
            assert isinstance(request, ShardRequest)
            misses = 0 if await reply(stream, request.digest) else misses + 1
        await stream.close()

    async def reply(stream: Stream, digest: bytes) -> bool:
        size = store.size(digest)
        if size is not None and size <= MAX_SHARD and await begin():
            try:
                data = await off_loop(size, lambda: store.get(digest))
                if data is not None:
                    with trio.fail_after(budget.progress_s):
                        await send_message(stream, ShardReply(found=True, size=len(data)))
                    await send(stream, data)
                    return True
            finally:
                await end()
        with trio.fail_after(budget.progress_s):
            await send_message(stream, ShardReply(found=False, size=0))
        return False

    async def begin() -> bool:
        """Wait for a turn. Who waits for long is told to ask somebody else, not kept in silence."""
        nonlocal sending
        with trio.move_on_after(_BUSY_S):
            async with sent_one:
                while sending >= slots(budget.sending):
                    await sent_one.wait()
                sending += 1
                return True
        return False

    async def end() -> None:
        nonlocal sending
        sending -= 1
        with trio.CancelScope(shield=True):
            async with sent_one:
                sent_one.notify()

    async def send(stream: Stream, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(data), _PIECE):
            part = bytes(view[start : start + _PIECE])
            with trio.fail_after(budget.progress_s):
                await stream.write(part)
            sent(stream.peer_id, len(part))

    return with_slots(serve, budget.streams, budget.streams_per_peer, allow)


class _Patient:
    """A stream for reading replies: an end or too long a silence is a ``PeerError``."""

    def __init__(self, client: ShardClient, stream: Stream, timeout: float) -> None:
        self._client = client
        self._stream = stream
        self._timeout = timeout

    @property
    def peer_id(self) -> str:
        return self._stream.peer_id

    @property
    def waiting(self) -> int:
        return int(getattr(self._stream, "waiting", 0))

    @property
    def room(self) -> int:
        return int(getattr(self._stream, "room", WINDOW))

    async def read(self, limit: int) -> bytes:
        if isinstance(self._stream, PacedStream):
            self._stream.foreseen, self._stream.waits = self._client.foreseen, self._client.waits()
        with trio.move_on_after(self._timeout):
            data = await self._stream.read(limit)
            if not data:
                raise PeerError(f"{self.peer_id} closed the stream before its reply was complete")
            self._client.received += len(data)
            return data
        raise PeerError(f"{self.peer_id} sent nothing for {self._timeout:g} s")

    async def write(self, data: bytes) -> None:
        with trio.move_on_after(self._timeout):
            return await self._stream.write(data)
        raise PeerError(f"{self.peer_id} took no request for {self._timeout:g} s")

    async def close(self) -> None:
        await self._stream.close()

    async def reset(self) -> None:
        await self._stream.reset()


class _Link:
    """One open stream and whose turn it is to read from it."""

    def __init__(self, stream: _Patient) -> None:
        self.stream = stream
        self.reader = MessageReader(stream, frozenset({ShardReply}))
        self.writing = trio.Lock()
        self.last = trio.Event()  # set when the reply before the next one was read
        self.last.set()
        self.broken = ""


class ShardClient:
    """Fetches shards from one peer over one stream, opened when needed and again after a failure.

    ``fetch`` may run in several tasks at once: up to ``pipeline`` requests, and
    8 MiB, are in flight; each task reads its own reply when its turn comes.
    """

    def __init__(
        self,
        network: Network,
        peer_id: str,
        addresses: Sequence[str] = (),
        *,
        pipeline: int = 4,
        timeout: float = PROGRESS_S,
    ) -> None:
        self.peer_id = peer_id
        self.waits: Callable[[], bool] = lambda: True  # see ``PacedStream``, as of the next
        self.foreseen = False  # what is read was counted for the cap before (``PacedStream.foreseen``)
        self.addresses = tuple(addresses)
        self.failures = 0  # streams that broke or could not be opened; one each, however many waited
        self.received = 0  # bytes read, headers included
        self._network = network
        self._pipeline = pipeline
        self._timeout = timeout
        self._link: _Link | None = None
        self._opening = trio.Lock()
        self._room = trio.Condition()
        self._requests = 0
        self._outstanding = 0

    @property
    def waiting(self) -> int:
        """Bytes that have arrived and were not read yet, as far as the network tells."""
        return 0 if self._link is None else self._link.stream.waiting

    @property
    def room(self) -> int:
        """Bytes that may still arrive before something is read, as far as the network tells."""
        return WINDOW if self._link is None else self._link.stream.room

    async def fetch(self, digest: bytes, size: int, *, exact: bool = True) -> bytes | None:
        """The shard named ``digest`` of ``size`` bytes, verified; ``None`` if the peer lacks it.

        Not ``exact``: of at most so many, where the name is all that is known of it.

        Raises:
            BadShardError: it sent something else.
            PeerError: unreachable, gone, or silent for ``timeout`` seconds.
        """
        if not 0 < size <= MAX_SHARD:
            raise ValueError(f"a shard has 1 to {MAX_SHARD} bytes, not {size}")
        async with self._room:
            while self._requests and (
                self._requests >= self._pipeline or self._outstanding + size > 2 * MAX_SHARD
            ):
                await self._room.wait()
            self._requests += 1
            self._outstanding += size
        try:
            link, data = await self._exchange(digest, size, exact)
        finally:
            with trio.CancelScope(shield=True):
                async with self._room:
                    self._requests -= 1
                    self._outstanding -= size
                    self._room.notify_all()
        if data is not None and not await off_loop(size, lambda: check_shard(data, digest)):
            error = BadShardError(f"{self.peer_id} sent a corrupt shard {digest.hex()[:16]}")
            await self._break(link, str(error))
            raise error
        return data

    async def close(self) -> None:
        """Close the stream; a later ``fetch`` opens another."""
        link, self._link = self._link, None
        if link is not None:
            await link.stream.close()

    async def _exchange(self, digest: bytes, size: int, exact: bool) -> tuple[_Link, bytes | None]:
        link = await self._connected()
        done = trio.Event()
        try:
            async with link.writing:
                turn, link.last = link.last, done
                await send_message(link.stream, ShardRequest(digest=digest))
            await turn.wait()
            if link.broken:
                raise PeerError(link.broken)
            return link, await self._receive(link, size, exact)
        except trio.Cancelled:
            # the reply may still come, and nobody would read it
            await self._break(link, f"a request to {self.peer_id} was given up", count=False)
            raise
        except MalformedError as error:
            await self._break(link, str(error))
            raise BadShardError(f"{self.peer_id} sent an invalid reply: {error}") from error
        except PeerError as error:
            await self._break(link, str(error))
            raise
        finally:
            done.set()

    async def _receive(self, link: _Link, size: int, exact: bool) -> bytes | None:
        with trio.move_on_after(2 * self._timeout + size / _SLOWEST):
            reply = await link.reader.receive()
            assert isinstance(reply, ShardReply)
            if not reply.found:
                return None
            if reply.size > size or (exact and reply.size != size):  # before anything is read for it
                raise MalformedError(f"{reply.size} bytes for a shard of {size}")
            return await link.reader.read_exactly(reply.size)
        raise PeerError(f"{self.peer_id} sends less than {_SLOWEST // 1024} KiB/s")

    async def _connected(self) -> _Link:
        failures = self.failures
        async with self._opening:
            if self._link is None:
                if self.failures != failures:
                    raise PeerError(f"{self.peer_id} could not be reached a moment ago")
                try:
                    await self._dial()
                    with trio.fail_after(self._timeout):
                        stream = await self._network.open_stream(self.peer_id, SHARD_PROTOCOL)
                except trio.TooSlowError:
                    self.failures += 1
                    raise PeerError(f"{self.peer_id} opened no stream within {self._timeout:g} s") from None
                except PeerError:
                    self.failures += 1
                    raise
                self._link = _Link(_Patient(self, stream, self._timeout))
            return self._link

    async def _dial(self) -> None:
        if self._network.connected(self.peer_id) or not self.addresses:
            return
        reasons = []
        for address in self.addresses:
            with trio.move_on_after(DIAL_S):
                try:
                    found = await self._network.connect(address)
                except PeerError as error:
                    reasons.append(f"{address}: {error}")
                    continue
                if found == self.peer_id:
                    return
                reasons.append(f"{address}: {found} answered")
                continue
            reasons.append(f"{address}: no answer within {DIAL_S:g} s")
        raise PeerError(f"{self.peer_id} cannot be reached: {'; '.join(reasons)}")

    async def _break(self, link: _Link, reason: str, *, count: bool = True) -> None:
        if link.broken:
            return
        link.broken = reason
        if self._link is link:
            self._link = None
        if count:
            self.failures += 1
        with trio.CancelScope(deadline=trio.current_time() + _RESET_S, shield=True):
            await link.stream.reset()

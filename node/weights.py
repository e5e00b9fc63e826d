"""Getting a version's shards: from other nodes where possible, from the coordinator where not.

``Fetcher`` is the seam: the broadcast tree will stand behind it. ``SwarmFetcher``
asks all known holders at once, each shard from one of them in random order, so
that nodes that fetch together hold different parts and can serve each other. The
coordinator's upload is spared: while nodes that hold everything deliver well, it
is not asked. A source that stalls or breaks is struck and left, one that sends a
corrupt shard is banned and reported; a download fails only when no source is left
(R22). Every shard is verified before it is stored, so that it can be served on.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import trio

from barnraise.protocol.errors import PeerError, StorageError
from barnraise.protocol.messages import Manifest
from barnraise.protocol.network import Network
from barnraise.protocol.shards import BadShardError, ShardClient, off_loop
from barnraise.protocol.store import DiskStore

STRIKES = 3  # broken or stalled streams after which a source is left
_REFRESH_S = 1.0  # how often new sources are looked for
_ORIGIN_GRACE_S = 2.0  # complete peers have this long to show their rate
_ORIGIN_HELPS_S = 10.0  # the coordinator is asked too when peers would need longer than this
_ENDGAME_S = 1.0  # a shard in flight for so long may be asked of a second source
_MAX_DONORS = 16  # asked at the same time, the coordinator among them
_SCAN = 256  # shards looked at for one that a source may have


class Source(NamedTuple):
    """Somebody to ask. ``origin``: the coordinator. ``complete``: said to hold the whole version."""

    peer_id: str
    addresses: tuple[str, ...] = ()
    origin: bool = False
    complete: bool = True


class Fetcher(Protocol):
    """Brings shards into the store it was made with."""

    async def fetch(
        self, manifest: Manifest, missing: Mapping[bytes, int], received: Callable[[int], None]
    ) -> None:
        """Return once every shard in ``missing`` (digest -> size in bytes) is verified and stored.

        ``received(size)`` is called as each is stored. Cancelling keeps what was stored.

        Raises:
            PeerError: no source is left; the text lists each and why.
            StorageError: the disk refused.
        """


class SwarmFetcher:
    """Fetches from whatever ``sources(version)`` names, asked again every second.

    ``report(peer_id, reason)`` is called once for each peer banned for a corrupt
    shard; the ban lasts as long as this object. The coordinator is never banned
    (there is no run without it), only left for the current fetch.
    ``pace(bytes)``, a bandwidth cap, is awaited before each request.
    """

    def __init__(
        self,
        network: Network,
        store: DiskStore,
        sources: Callable[[int], Sequence[Source]],
        *,
        report: Callable[[str, str], None] = lambda peer_id, reason: None,
        pace: Callable[[int], Awaitable[None]] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.banned: dict[str, str] = {}
        self.network = network
        self.store = store
        self.sources = sources
        self.report = report
        self.pace = pace
        self.rng = rng or random.Random()

    async def fetch(
        self, manifest: Manifest, missing: Mapping[bytes, int], received: Callable[[int], None]
    ) -> None:
        """See ``Fetcher.fetch``."""
        if missing:
            await _Download(self, manifest.version, missing, received).run()


@dataclass(eq=False)
class _Donor:
    """A source during one download."""

    source: Source
    client: ShardClient
    complete: bool
    out: str = ""  # why it is not asked any more
    retry_at: float = 0.0
    misses: int = 0  # in a row
    lacks: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # digest -> ask again at, wait


class _Download:
    def __init__(
        self,
        owner: SwarmFetcher,
        version: int,
        missing: Mapping[bytes, int],
        received: Callable[[int], None],
    ) -> None:
        self.owner = owner
        self.version = version
        self.received = received
        self.missing = dict(missing)
        order = list(missing)
        owner.rng.shuffle(order)
        self.idle = dict.fromkeys(order)  # missing and asked of nobody, in order of asking
        self.flying: dict[bytes, list[tuple[_Donor, float]]] = {}
        self.donors: dict[str, _Donor] = {}
        self.failure: PeerError | StorageError | None = None
        self.changed = trio.Event()
        self.started = trio.current_time()
        self.from_peers = 0  # bytes

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                while self.missing and self.failure is None:
                    self._enlist(nursery)
                    await self._wait(_REFRESH_S)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                for donor in self.donors.values():
                    await donor.client.close()
        if self.failure is not None:
            raise self.failure

    def _enlist(self, nursery: trio.Nursery) -> None:
        offered = sorted(self.owner.sources(self.version), key=lambda s: (not s.origin, not s.complete))
        for source in offered:
            if source.peer_id in self.owner.banned or source.peer_id == self.owner.network.peer_id:
                continue
            donor = self.donors.get(source.peer_id)
            if donor is None:
                if not source.origin and sum(not d.out for d in self.donors.values()) >= _MAX_DONORS:
                    continue
                client = ShardClient(self.owner.network, source.peer_id, source.addresses)
                donor = self.donors[source.peer_id] = _Donor(source, client, source.complete)
                for _ in range(1 if source.origin else 4):
                    nursery.start_soon(self._draw_from, donor)
            elif source.complete and not donor.source.complete:
                donor.source = source  # it has finished its own download meanwhile
                donor.complete = True
                donor.lacks.clear()
        if all(donor.out for donor in self.donors.values()):
            reasons = [f"{peer_id}: {donor.out}" for peer_id, donor in self.donors.items()]
            reasons += [f"{p}: banned, {why}" for p, why in self.owner.banned.items() if p not in self.donors]
            size = sum(self.missing.values())
            self.failure = PeerError(
                f"version {self.version}: no source is left for {len(self.missing)} shards "
                f"({size / 1e6:.1f} MB); " + ("; ".join(reasons) or "nobody offers it")
            )

    async def _draw_from(self, donor: _Donor) -> None:
        while not donor.out and self.missing and self.failure is None:
            pause = donor.retry_at - trio.current_time()
            if pause > 0:
                await trio.sleep(pause)
            elif (digest := self._pick(donor)) is None:
                await self._wait(0.25)
            else:
                await self._take(donor, digest)

    def _pick(self, donor: _Donor) -> bytes | None:
        now = trio.current_time()
        if donor.source.origin and self._peers_suffice(now):
            return None
        for looked, digest in enumerate(self.idle):
            if looked == _SCAN:
                break
            if donor.lacks.get(digest, (0.0, 0.0))[0] <= now:
                return digest
        patience = _ENDGAME_S * (3 if donor.source.origin else 1)
        for digest, asked in self.flying.items():
            if digest not in self.missing:
                continue  # a second request still under way for what the first has brought
            others = len(asked) == 1 and asked[0][0] is not donor and now - asked[0][1] >= patience
            if others and donor.lacks.get(digest, (0.0, 0.0))[0] <= now:
                return digest
        return None

    def _peers_suffice(self, now: float) -> bool:
        """Whether complete peers alone finish soon, so that the coordinator's upload can be spared."""
        healthy = any(
            donor.complete and not donor.source.origin and not donor.out and donor.retry_at <= now
            for donor in self.donors.values()
        )
        elapsed = now - self.started
        if not healthy or elapsed < _ORIGIN_GRACE_S:
            return healthy
        left = sum(self.missing.values())
        return left * elapsed <= _ORIGIN_HELPS_S * self.from_peers

    async def _take(self, donor: _Donor, digest: bytes) -> None:
        size = self.missing[digest]
        self.idle.pop(digest, None)
        mine = (donor, trio.current_time())
        self.flying.setdefault(digest, []).append(mine)
        try:
            if self.owner.pace is not None:
                await self.owner.pace(size)
            data = await donor.client.fetch(digest, size)
            if data is None:
                self._missed(donor, digest)
            else:
                donor.misses = 0
                await self._keep(donor, digest, data)
        except BadShardError as error:
            self._caught(donor, str(error))
        except PeerError as error:
            self._strike(donor, str(error))
        except StorageError as error:
            self.failure = error
        finally:
            asked = self.flying[digest]
            asked.remove(mine)
            if not asked:
                del self.flying[digest]
                if digest in self.missing:
                    self.idle[digest] = None
            self._notify()

    async def _keep(self, donor: _Donor, digest: bytes, data: bytes) -> None:
        await off_loop(len(data), lambda: self.owner.store.put(digest, data, checked=True))
        if self.missing.pop(digest, None) is None:
            return  # another source was faster
        self.idle.pop(digest, None)
        if not donor.source.origin:
            self.from_peers += len(data)
        self.received(len(data))

    def _missed(self, donor: _Donor, digest: bytes) -> None:
        """It lacks this shard: ask for others, and after several in a row ask less often."""
        now = trio.current_time()
        donor.complete = False
        wait = min(2 * donor.lacks.get(digest, (0.0, 0.25))[1], 8.0)
        donor.lacks[digest] = (now + wait, wait)
        donor.misses += 1
        donor.retry_at = max(donor.retry_at, now + min(1.0, 0.01 * 2 ** min(donor.misses, 7)))

    def _strike(self, donor: _Donor, reason: str) -> None:
        failures = donor.client.failures
        donor.retry_at = trio.current_time() + min(0.5 * 2**failures, 10.0)
        if failures < STRIKES:
            return
        # The origin is never left while others are about: they may lack what only it has.
        others = any(not other.out for other in self.donors.values() if other is not donor)
        if not donor.source.origin or not others:
            donor.out = reason

    def _caught(self, donor: _Donor, reason: str) -> None:
        if donor.out:
            return
        donor.out = reason
        if not donor.source.origin:
            self.owner.banned[donor.source.peer_id] = reason
        self.owner.report(donor.source.peer_id, reason)

    async def _wait(self, seconds: float) -> None:
        changed = self.changed
        with trio.move_on_after(seconds):
            await changed.wait()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

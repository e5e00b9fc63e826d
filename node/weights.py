"""Getting a version's shards: from other nodes where possible, from mirrors or the coordinator where not.

``Fetcher`` is the seam: the broadcast tree will stand behind it. ``SwarmFetcher``
asks all known holders at once, each shard from one of them in random order, so
that nodes that fetch together hold different parts and can serve each other. Bought
upload is spared: while nodes that hold everything deliver well, no mirror is asked,
and while they and mirrors do, the coordinator is not. A source that stalls or breaks
is struck and left, one that sends a corrupt shard is banned and reported; a download
fails only when no source is left (R22). Every shard is verified before it is stored,
so that it can be served on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import trio

from barnraise.protocol.bandwidth import Pacer
from barnraise.protocol.errors import PeerError, StorageError
from barnraise.protocol.messages import Manifest
from barnraise.protocol.network import Network
from barnraise.protocol.shards import BadShardError, ShardClient, off_loop
from barnraise.protocol.store import DiskStore

STRIKES = 3  # broken or stalled streams after which a source is left
_REFRESH_S = 1.0  # how often new sources are looked for
_GRACE_S = 2.0  # complete peers have this long to show their rate
_HELP_S = 10.0  # mirrors, and then the coordinator, are asked too when the others would need longer
_ENDGAME_S = 1.0  # a shard in flight for so long may be asked of a second source
_MAX_DONORS = 16  # asked at the same time, the coordinator among them
_SCAN = 256  # shards looked at for one that a source may have


class Source(NamedTuple):
    """Somebody to ask. ``origin``: the coordinator. ``complete``: said to hold the whole version.

    ``peer_id`` is a mirror's base URL where ``Donor``s are made of URLs.
    """

    peer_id: str
    addresses: tuple[str, ...] = ()
    origin: bool = False
    complete: bool = True


class Donor(Protocol):
    """One source's shards; ``barnraise.protocol.shards.ShardClient`` is a peer's.

    Attributes:
        failures: how often it was unreachable, broke off or stalled, since it was made.
        received: bytes that have arrived since it was made.
    """

    failures: int
    received: int

    async def fetch(self, digest: bytes, size: int) -> bytes | None:
        """The verified shard, ``None`` if it is not there. May run in several tasks at once.

        Raises:
            BadShardError: something else was sent.
            PeerError: unreachable, gone or silent.
        """

    async def close(self) -> None:
        """Let go; a later ``fetch`` begins anew."""


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
    (there is no run without it), only left for the current fetch. ``down`` is the
    cap that ``network`` is under: it bounds what is asked for before it arrives.
    ``mirror(url)`` makes a donor of a mirror that a manifest names (``None``: not of
    this one); without it mirrors are not asked.

    Attributes:
        came_from: bytes of the download under way, or the last one, by peer id or mirror's URL.
    """

    def __init__(
        self,
        network: Network,
        store: DiskStore,
        sources: Callable[[int], Sequence[Source]],
        *,
        report: Callable[[str, str], None] = lambda peer_id, reason: None,
        down: Pacer | None = None,
        mirror: Callable[[str], Donor | None] = lambda url: None,
        rng: random.Random | None = None,
    ) -> None:
        self.banned: dict[str, str] = {}
        self.came_from: Counter[str] = Counter()
        self.network = network
        self.store = store
        self.sources = sources
        self.report = report
        self.down = down
        self.mirror = mirror
        self.rng = rng or random.Random()

    async def fetch(
        self, manifest: Manifest, missing: Mapping[bytes, int], received: Callable[[int], None]
    ) -> None:
        """See ``Fetcher.fetch``."""
        self.came_from = Counter()
        await self.fetch_more(manifest, missing, received)

    async def fetch_shards(
        self, what: str, missing: Mapping[bytes, int], received: Callable[[int], None]
    ) -> None:
        """``fetch`` for shards of no version, such as a corpus's; ``what`` names them in errors.

        Nobody is taken to hold all of them but the coordinator, and mirrors are not asked.
        """
        self.came_from = Counter()
        if missing:
            await _Download(self, -1, what, (), missing, received).run()

    async def fetch_more(
        self, manifest: Manifest, missing: Mapping[bytes, int], received: Callable[[int], None]
    ) -> None:
        """``fetch`` for a part of a download: ``came_from`` goes on counting."""
        if missing:
            what = f"version {manifest.version}"
            await _Download(self, manifest.version, what, manifest.mirrors, missing, received).run()


PEER, MIRROR, ORIGIN = range(3)  # the order in which sources are asked


@dataclass(eq=False)
class _Helper:
    """A source during one download."""

    source: Source
    client: Donor
    rank: int
    complete: bool
    out: str = ""  # why it is not asked any more
    retry_at: float = 0.0
    misses: int = 0  # in a row
    asked: int = 0  # bytes of requests under way
    settled: int = 0  # of what it has sent, bytes that do not belong to those
    lacks: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # digest -> ask again at, wait

    @property
    def outstanding(self) -> int:
        """Bytes asked of it that have not arrived."""
        return max(0, self.asked - max(0, self.client.received - self.settled))

    def expect(self, size: int) -> None:
        if not self.asked:
            self.settled = self.client.received
        self.asked += size

    def done(self, size: int) -> None:
        self.asked -= size
        self.settled = min(self.settled + size, self.client.received)


class _Download:
    def __init__(
        self,
        owner: SwarmFetcher,
        version: int,
        what: str,
        mirrors: Sequence[str],
        missing: Mapping[bytes, int],
        received: Callable[[int], None],
    ) -> None:
        self.owner = owner
        self.version = version
        self.what = what
        self.mirrors = mirrors
        self.received = received
        self.missing = dict(missing)
        order = list(missing)
        owner.rng.shuffle(order)
        self.idle = dict.fromkeys(order)  # missing and asked of nobody, in order of asking
        self.flying: dict[bytes, list[tuple[_Helper, float]]] = {}
        self.donors: dict[str, _Helper] = {}
        self.failure: PeerError | StorageError | None = None
        self.changed = trio.Event()
        self.started = trio.current_time()
        self.delivered = [0, 0, 0]  # bytes by rank

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
                self._add(nursery, source, client, ORIGIN if source.origin else PEER)
            elif source.complete and not donor.source.complete:
                donor.source = source  # it has finished its own download meanwhile
                donor.complete = True
                donor.lacks.clear()
        for url in self.mirrors:
            if url not in self.donors and url not in self.owner.banned:
                mirror = self.owner.mirror(url)
                if mirror is not None:
                    self._add(nursery, Source(url), mirror, MIRROR)
        if all(donor.out for donor in self.donors.values()):
            reasons = [f"{peer_id}: {donor.out}" for peer_id, donor in self.donors.items()]
            reasons += [f"{p}: banned, {why}" for p, why in self.owner.banned.items() if p not in self.donors]
            size = sum(self.missing.values())
            self.failure = PeerError(
                f"{self.what}: no source is left for {len(self.missing)} shards "
                f"({size / 1e6:.1f} MB); " + ("; ".join(reasons) or "nobody offers it")
            )

    def _add(self, nursery: trio.Nursery, source: Source, client: Donor, rank: int) -> None:
        donor = self.donors[source.peer_id] = _Helper(source, client, rank, source.complete)
        for _ in range(1 if source.origin else 4):
            nursery.start_soon(self._draw_from, donor)

    async def _draw_from(self, donor: _Helper) -> None:
        while not donor.out and self.missing and self.failure is None:
            pause = donor.retry_at - trio.current_time()
            if pause > 0:
                await trio.sleep(pause)
            elif not self._may_ask() or (digest := self._pick(donor)) is None:
                await self._wait(0.25)
            else:
                await self._take(donor, digest)

    def _may_ask(self) -> bool:
        down = self.owner.down
        return down is None or down.allows_more(sum(donor.outstanding for donor in self.donors.values()))

    def _pick(self, donor: _Helper) -> bytes | None:
        now = trio.current_time()
        if self._spared(donor.rank, now):
            return None
        for looked, digest in enumerate(self.idle):
            if looked == _SCAN:
                break
            if donor.lacks.get(digest, (0.0, 0.0))[0] <= now:
                return digest
        if self._capped():
            return None  # asking twice for one shard brings neither of them sooner
        patience = _ENDGAME_S * (3 if donor.source.origin else 1) + self._time_at_cap()
        for digest, asked in self.flying.items():
            if digest not in self.missing:
                continue  # a second request still under way for what the first has brought
            others = len(asked) == 1 and asked[0][0] is not donor and now - asked[0][1] >= patience
            if others and donor.lacks.get(digest, (0.0, 0.0))[0] <= now:
                return digest
        return None

    def _spared(self, rank: int, now: float) -> bool:
        """Whether complete sources of lower rank alone finish soon, so that this rank's upload is spared."""
        healthy = any(
            donor.complete and donor.rank < rank and not donor.out and donor.retry_at <= now
            for donor in self.donors.values()
        )
        elapsed = now - self.started
        if not healthy or elapsed < _GRACE_S:
            return healthy
        left = sum(self.missing.values())
        return left * elapsed <= _HELP_S * sum(self.delivered[:rank]) or self._capped()

    def _time_at_cap(self) -> float:
        """Seconds that all bytes under way take if nothing but our own cap slows them."""
        down = self.owner.down
        rate = None if down is None else down.rate
        return sum(donor.outstanding for donor in self.donors.values()) / rate if rate else 0.0

    def _capped(self) -> bool:
        """Whether it is our own cap that makes it slow: then more sources would not help."""
        down = self.owner.down
        return down is not None and down.busy

    async def _take(self, donor: _Helper, digest: bytes) -> None:
        size = self.missing[digest]
        self.idle.pop(digest, None)
        mine = (donor, trio.current_time())
        self.flying.setdefault(digest, []).append(mine)
        donor.expect(size)
        try:
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
            donor.done(size)
            asked = self.flying[digest]
            asked.remove(mine)
            if not asked:
                del self.flying[digest]
                if digest in self.missing:
                    self.idle[digest] = None
            self._notify()

    async def _keep(self, donor: _Helper, digest: bytes, data: bytes) -> None:
        await off_loop(len(data), lambda: self.owner.store.put(digest, data, checked=True))
        if self.missing.pop(digest, None) is None:
            return  # another source was faster
        self.idle.pop(digest, None)
        self.delivered[donor.rank] += len(data)
        self.owner.came_from[donor.source.peer_id] += len(data)
        self.received(len(data))

    def _missed(self, donor: _Helper, digest: bytes) -> None:
        """It lacks this shard: ask for others, and after several in a row ask less often."""
        now = trio.current_time()
        donor.complete = False
        wait = min(2 * donor.lacks.get(digest, (0.0, 0.25))[1], 8.0)
        donor.lacks[digest] = (now + wait, wait)
        donor.misses += 1
        donor.retry_at = max(donor.retry_at, now + min(1.0, 0.01 * 2 ** min(donor.misses, 7)))

    def _strike(self, donor: _Helper, reason: str) -> None:
        failures = donor.client.failures
        donor.retry_at = trio.current_time() + min(0.5 * 2**failures, 10.0)
        if failures < STRIKES:
            return
        # The origin is never left while others are about: they may lack what only it has.
        others = any(not other.out for other in self.donors.values() if other is not donor)
        if not donor.source.origin or not others:
            donor.out = reason

    def _caught(self, donor: _Helper, reason: str) -> None:
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

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

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import trio

from barnraise.node.asking import MIRROR, ORIGIN, PEER, Appetite, Asked, Donor, Source
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
_PIPELINE = 512  # of small shards; how many are asked for is decided here
_SCAN = 256  # shards looked at for one that a source may have


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
        self.flying: dict[bytes, list[tuple[Asked, float]]] = {}
        self.donors: dict[str, Asked] = {}
        self.appetite = Appetite(owner.down, self.donors.values())
        self.failure: PeerError | StorageError | None = None
        self.changed = trio.Event()
        self.started = trio.current_time()
        self.delivered = [0, 0, 0]  # bytes by rank

    async def run(self) -> None:
        try:
            with self.appetite.foreseen():
                await self._until_whole()
        finally:
            with trio.CancelScope(shield=True):
                for donor in self.donors.values():
                    await donor.client.close()
        if self.failure is not None:
            raise self.failure

    async def _until_whole(self) -> None:
        async with trio.open_nursery() as nursery:
            look_at = -math.inf
            while self.missing and self.failure is None:
                now = trio.current_time()
                if now >= look_at:
                    self._enlist()
                    look_at = now + _REFRESH_S
                changed = self.changed
                if not self._ask(nursery, now):
                    with trio.move_on_after(self.appetite.look_s):
                        await changed.wait()
            nursery.cancel_scope.cancel()

    def _enlist(self) -> None:
        offered = sorted(self.owner.sources(self.version), key=lambda s: (not s.origin, not s.complete))
        for source in offered:
            if source.peer_id in self.owner.banned or source.peer_id == self.owner.network.peer_id:
                continue
            donor = self.donors.get(source.peer_id)
            if donor is None:
                if not source.origin and sum(not d.out for d in self.donors.values()) >= _MAX_DONORS:
                    continue
                client = ShardClient(self.owner.network, source.peer_id, source.addresses, pipeline=_PIPELINE)
                self._add(source, client, ORIGIN if source.origin else PEER)
            elif source.complete and not donor.source.complete:
                donor.source = source  # it has finished its own download meanwhile
                donor.complete = True
                donor.lacks.clear()
        for url in self.mirrors:
            if url not in self.donors and url not in self.owner.banned:
                mirror = self.owner.mirror(url)
                if mirror is not None:
                    self._add(Source(url), mirror, MIRROR)
        if all(donor.out for donor in self.donors.values()):
            reasons = [f"{peer_id}: {donor.out}" for peer_id, donor in self.donors.items()]
            reasons += [f"{p}: banned, {why}" for p, why in self.owner.banned.items() if p not in self.donors]
            size = sum(self.missing.values())
            self.failure = PeerError(
                f"{self.what}: no source is left for {len(self.missing)} shards "
                f"({size / 1e6:.1f} MB); " + ("; ".join(reasons) or "nobody offers it")
            )

    def _add(self, source: Source, client: Donor, rank: int) -> None:
        donor = self.donors[source.peer_id] = Asked(source, client, rank, source.complete)
        client.waits = partial(self.appetite.waits, donor)

    def _ask(self, nursery: trio.Nursery, now: float) -> bool:
        """Ask each source for at most one more shard; whether any was asked."""
        some = False
        for donor in self.donors.values():  # what comes last may be read as fast as it came
            donor.client.foreseen = not self.idle
        for donor in self.owner.rng.sample(list(self.donors.values()), len(self.donors)):
            size = self.missing.get(
                next(iter(self.idle), b""), 0
            )  # of shards of one version all but the last
            if donor.out or donor.retry_at > now or not self.appetite.for_more(donor, size):
                continue
            digest = self._pick(donor)
            if digest is not None:
                self._take(nursery, donor, digest, now)
                some = True
        return some

    def _pick(self, donor: Asked) -> bytes | None:
        now = trio.current_time()
        if self._spared(donor.rank, now):
            return None
        for looked, digest in enumerate(self.idle):
            if looked == _SCAN:
                break
            if donor.lacks.get(digest, (0.0, 0.0))[0] <= now:
                return digest
        if self.appetite.capped:
            return None  # asking twice for one shard brings neither of them sooner
        patience = _ENDGAME_S * (3 if donor.source.origin else 1) + self.appetite.unread_s
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
        return left * elapsed <= _HELP_S * sum(self.delivered[:rank]) or self.appetite.capped

    def _take(self, nursery: trio.Nursery, donor: Asked, digest: bytes, now: float) -> None:
        size = self.missing[digest]
        self.idle.pop(digest, None)
        self.flying.setdefault(digest, []).append((donor, now))
        donor.expect(size)
        nursery.start_soon(self._bring, donor, digest, size, now)

    async def _bring(self, donor: Asked, digest: bytes, size: int, asked_at: float) -> None:
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
            asked.remove((donor, asked_at))
            if not asked:
                del self.flying[digest]
                if digest in self.missing:
                    self.idle[digest] = None
            self._notify()

    async def _keep(self, donor: Asked, digest: bytes, data: bytes) -> None:
        await off_loop(len(data), lambda: self.owner.store.put(digest, data, checked=True))
        if self.missing.pop(digest, None) is None:
            return  # another source was faster
        self.idle.pop(digest, None)
        self.delivered[donor.rank] += len(data)
        self.owner.came_from[donor.source.peer_id] += len(data)
        self.received(len(data))

    def _missed(self, donor: Asked, digest: bytes) -> None:
        """It lacks this shard: ask for others, and after several in a row ask less often."""
        now = trio.current_time()
        donor.complete = False
        wait = min(2 * donor.lacks.get(digest, (0.0, 0.25))[1], 8.0)
        donor.lacks[digest] = (now + wait, wait)
        donor.misses += 1
        donor.retry_at = max(donor.retry_at, now + min(1.0, 0.01 * 2 ** min(donor.misses, 7)))

    def _strike(self, donor: Asked, reason: str) -> None:
        failures = donor.client.failures
        donor.retry_at = trio.current_time() + min(0.5 * 2**failures, 10.0)
        if failures < STRIKES:
            return
        # The origin is never left while others are about: they may lack what only it has.
        others = any(not other.out for other in self.donors.values() if other is not donor)
        if not donor.source.origin or not others:
            donor.out = reason

    def _caught(self, donor: Asked, reason: str) -> None:
        if donor.out:
            return
        donor.out = reason
        if not donor.source.origin:
            self.owner.banned[donor.source.peer_id] = reason
        self.owner.report(donor.source.peer_id, reason)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

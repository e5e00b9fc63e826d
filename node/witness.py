"""This node as a witness of the run's ledger: it lets it only ever grow, and says so with its signature.

Once a minute it asks the coordinator, and a few peers it is connected with, for the
newest checkpoint that they know. A larger one is judged by the coordinator's tiles, kept
durably, cosigned, and the cosignature handed in. Two that no ledger can have both are
an alarm: a loud line, and a file with both signed heads that convicts the operator
before anybody. From then on this node cosigns nothing more of that run.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from barnraise.node.context import Context
from barnraise.protocol.cosignature import cosign, witness_name
from barnraise.protocol.errors import BarnraiseError, MalformedError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.log_messages import CHECKPOINT, LOG_PROTOCOL
from barnraise.protocol.log_stream import fetch_files, fetch_tiles, hand_in, serve_log
from barnraise.protocol.notes import Ed25519Key, parse_note
from barnraise.protocol.tlog_checkpoint import Head, log_key, open_checkpoint
from barnraise.protocol.tlog_tiles import Tile, TileTree, tiles_to_compare
from barnraise.protocol.wire import printable
from barnraise.protocol.witness import Conflict, Unproven, judge
from barnraise.protocol.witness_store import WitnessStore

EVERY_S = 60.0
PEERS = 3  # asked each time
MAX_OPEN = 16  # heads that wait for a proof
PATIENCE_S = 900.0  # without a proof, before a person is told

FetchTiles = Callable[[Sequence[Tile]], Awaitable[dict[Tile, bytes] | None]]
"""Gives these tiles of the log, from wherever; None: not to be had now. Raises PeerError, MalformedError."""

log = logging.getLogger("barnraise.node.witness")


class Witness:
    """A witness of one log.

    Attributes:
        last: the head that was kept last.
        convicted: whether this log was caught with two histories, now or by an earlier process.

    Raises (when it is made):
        StorageError: its memory is damaged or cannot be read; it must not begin anew.
    """

    def __init__(self, folder: Path, key: Ed25519Key, identity: Identity) -> None:
        self.key = key
        self.name = witness_name(identity.peer_id)
        self._identity = identity
        self._store = WitnessStore(folder)
        self.last = self._store.last(key)
        self.convicted = any(folder.glob("evidence-split-view-*.json"))
        self._open: dict[str, Head] = {}  # by text
        self._unproven: dict[str, float] = {}  # since when
        self._told: set[Path] = set()

    async def hear(self, note: bytes, fetch: FetchTiles, now_s: int) -> tuple[str | None, list[str]]:
        """Judge a checkpoint: our cosignature's line where there is a new one, and alarms for a person.

        Of two calls at once one could undo what the other found: the caller makes one at a time.

        Raises:
            SignatureError, MalformedError: it is none of this log.
            PeerError: the tiles could not be fetched; the head is looked at again with the next call.
            StorageError: the disk refused; nothing was cosigned.
        """
        head = open_checkpoint(note, self.key)
        text = head.checkpoint.text
        if text not in self._open:
            while len(self._open) >= MAX_OPEN:
                self._close(next(iter(self._open)))
            self._open[text] = head
        alarms: list[str] = []
        for place in sorted(self._open, key=lambda item: item != text):  # others may be judged by it
            alarm = await self._settle(place, fetch)
            if alarm:
                alarms.append(alarm)
        if self.convicted or self.last is None or self.last.checkpoint.text != text:
            return None, alarms
        if any(item.name == self.name for item in parse_note(note).signatures):
            return None, alarms
        return cosign(text, self.name, self._identity, now_s).line, alarms

    async def _settle(self, place: str, fetch: FetchTiles) -> str | None:
        """Judge one head against the last; what is to be said of it."""
        last, head = self.last, self._open[place]
        verdict = "grown" if last is None else await _compare(last, head, fetch)
        match verdict:
            case Unproven():
                since = self._unproven.setdefault(place, trio.current_time())
                if trio.current_time() - since < PATIENCE_S:
                    return None
                self._close(place)
                return self._alarm(verdict)
            case Conflict():
                self.convicted = True
                alarm = self._alarm(verdict)
                self._close(place)
                return alarm
        if last is None or head.size > last.size:
            self._store.keep(self.key, head)
            self.last = head
        self._close(place)
        return None

    def _close(self, place: str) -> None:
        self._open.pop(place, None)
        self._unproven.pop(place, None)

    def _alarm(self, trouble: Conflict | Unproven) -> str | None:
        path = self._store.keep_evidence(self.key, trouble)
        if path in self._told:
            return None
        self._told.add(path)
        sizes = f"{trouble.smaller.size} and {trouble.larger.size} entries"
        if isinstance(trouble, Conflict):
            return (
                f"SPLIT VIEW: the operator signed two ledgers that contradict each other ({sizes}); {path} "
                "proves it: show it to others, and trust no balance of this run until it is explained"
            )
        return (
            f"the ledger's heads of {sizes} are both signed, and for {PATIENCE_S / 60:.0f} minutes the "
            f"coordinator gave no proof that one grew from the other; both are in {path}"
        )


async def _compare(one: Head, other: Head, fetch: FetchTiles) -> str | Conflict | Unproven:
    smaller, larger = sorted((one, other), key=lambda head: head.size)
    if smaller.size in (0, larger.size):
        return judge(one, other)
    tiles = await fetch(tiles_to_compare(smaller.size, larger.size))
    if tiles is None:
        return Unproven(smaller, larger)
    tree = TileTree(larger.size, tiles.__getitem__)
    try:
        root, proof = tree.root(smaller.size), tree.consistency_proof(smaller.size)
    except MalformedError:
        return Unproven(smaller, larger)
    return judge(one, other, proof, root)


async def watch(ctx: Context) -> None:
    """Witness the run's ledger until cancelled."""
    rng = random.Random(ctx.instance)  # not the daemon's: its draws stay what they are without a witness
    while ctx.run is None:
        await _doze(rng)
    run = ctx.run
    folder = ctx.config.run_path(run.run_id) / "witness"
    try:
        witness = Witness(folder, log_key(run.run_id, run.spec.operator), ctx.identity)
    except StorageError as error:
        ctx.say(f"this node is no witness of the ledger: {error}", logging.ERROR)
        return

    async def read(path: str) -> bytes | None:
        return witness.last.note if path == CHECKPOINT and witness.last is not None else None

    ctx.network.set_handler(LOG_PROTOCOL, serve_log(read))
    while True:
        await _doze(rng)
        if ctx.session is None or not ctx.coordinator:
            continue
        await _ask(ctx, witness, ctx.coordinator)
        others = [peer.peer_id for peer in ctx.peers if ctx.network.connected(peer.peer_id)]
        for peer_id in rng.sample(others, min(PEERS, len(others))):
            await _ask(ctx, witness, peer_id)


async def _doze(rng: random.Random) -> None:
    await trio.sleep(EVERY_S * rng.uniform(0.75, 1.25))


async def _ask(ctx: Context, witness: Witness, peer_id: str) -> None:
    """Hear one peer; what goes wrong with it is nothing that a person must know."""

    async def fetch(tiles: Sequence[Tile]) -> dict[Tile, bytes] | None:
        return await fetch_tiles(ctx.network, ctx.coordinator, tiles)

    try:
        (note,) = await fetch_files(ctx.network, peer_id, [CHECKPOINT])
        if note is None:
            return
        line, alarms = await witness.hear(note, fetch, ctx.clock.wall_ms() // 1000)
        for alarm in alarms:
            ctx.say(alarm, logging.ERROR)
        if line is not None:
            await hand_in(ctx.network, ctx.coordinator, line)
    except StorageError as error:
        ctx.say(f"the ledger is not witnessed: {error}", logging.WARNING)
    except BarnraiseError as error:
        log.debug("nothing heard of the ledger from %s: %s", peer_id[-8:], printable(str(error)))

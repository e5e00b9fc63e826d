"""This node as a witness of the run's ledger: it lets it only ever grow, and says so with its signature.

Once a minute it asks the coordinator, and a few peers it is connected with, for the
newest checkpoint that they know. A larger one is judged by the coordinator's tiles, kept
durably, cosigned, and the cosignature handed in. Two that no ledger can have both are
an alarm: a loud line, and a file with both signed heads that convicts the operator
before anybody. From then on this node cosigns nothing more of that run, hands the
evidence to every peer it is connected with, and takes no more work (the unit at hand is
finished) until a person has it resume.

Evidence that a peer hands in is believed if it is signed by the run's own key and holds;
then all of this follows from it in the same way.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from barnraise.node import guard
from barnraise.node.context import Context
from barnraise.node.distrust import hold_back
from barnraise.node.remembered import read_run
from barnraise.protocol.cosignature import cosign, cosigned_at, witness_name
from barnraise.protocol.errors import BarnraiseError, MalformedError, StorageError
from barnraise.protocol.evidence import Accusations, encode_evidence
from barnraise.protocol.identity import Identity
from barnraise.protocol.log_messages import CHECKPOINT, LOG_PROTOCOL
from barnraise.protocol.log_stream import accuse, fetch_files, fetch_tiles, hand_in, serve_log
from barnraise.protocol.messages import Signed
from barnraise.protocol.notes import MAX_NOTE, MAX_SIGNATURES, Ed25519Key, Note, parse_note
from barnraise.protocol.tlog_checkpoint import Head, log_key, open_checkpoint
from barnraise.protocol.tlog_tiles import Tile, TileTree, tiles_to_compare
from barnraise.protocol.wire import printable
from barnraise.protocol.witness import Conflict, Unproven, judge
from barnraise.protocol.witness_store import WitnessStore

PEERS = 3  # asked each time
ACCUSE_EVERY_S = 10.0
ACCUSED_AT_ONCE = 8  # peers told in one round
TRIES = 3  # to hand evidence to one peer
MAX_TOLD = 4096  # peers remembered
MAX_OPEN = 16  # heads that wait for a proof
SAY_AGAIN_S = 3600.0  # that the disk refuses
PATIENCE_S = 900.0  # without a proof, before a person is told

FetchTiles = Callable[[Sequence[Tile]], Awaitable[dict[Tile, bytes] | None]]
"""Gives these tiles of the log, from wherever; None: not to be had now. Raises PeerError, MalformedError."""

log = logging.getLogger("barnraise.node.witness")


class Witness:
    """A witness of one log.

    Attributes:
        last: the head that was kept last.
        cosigned_s: when a head was last cosigned, seconds since the Unix epoch; None: not by this process.
        failed_at: when a person was last told that the disk refuses (trio's clock); None: never.
        evidence: the first proof that this log has two histories, as its file; None: there is none.
        alarm: what a person must know of this log, ``""`` if nothing.

    Raises (when it is made):
        StorageError: its memory is damaged or cannot be read; it must not begin anew.
    """

    def __init__(
        self, folder: Path, key: Ed25519Key, identity: Identity, run_spec: Signed | None = None
    ) -> None:
        self.key = key
        self.name = witness_name(identity.peer_id)
        self._identity = identity
        self._spec = run_spec
        self._store = WitnessStore(folder)
        self.last = self._store.last(key)
        self.cosigned_s: int | None = None
        self.failed_at: float | None = None
        self.evidence, conflict = self._store.conviction(key)
        self._conflict = conflict
        self._accusations = Accusations(key, believed=self.convicted)
        self._open: dict[str, Head] = {}  # by text
        self._unproven: dict[str, float] = {}  # since when
        self._suspicions: dict[str, str] = {}  # what was said of heads that still wait
        self._told: set[Path] = set()

    @property
    def convicted(self) -> bool:
        """Whether this log was caught with two histories, now or by an earlier process."""
        return self.evidence is not None

    @property
    def alarm(self) -> str:
        if self.evidence is not None:
            return _charge(self._conflict, self.evidence)
        return next(iter(self._suspicions.values()), "")

    @property
    def accusation(self) -> bytes | None:
        """The evidence as it goes to peers; None: there is none that could be shown."""
        return None if self._conflict is None else encode_evidence(self.key, self._conflict)

    def accused(self, peer_id: str, evidence: bytes, now: float) -> str | None:
        """Judge evidence that a peer handed in; an alarm for a person where it is the first proof.

        ``now``: seconds of a monotonic clock.

        Raises:
            MalformedError, SignatureError: it proves nothing against this log.
        """
        conflict = self._accusations.hear(peer_id, evidence, now)
        return None if conflict is None else self._convict(conflict)

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
            if self.convicted:  # once is enough
                break
            alarm = await self._settle(place, fetch, now_s)
            if alarm:
                alarms.append(alarm)
        if self.convicted or self.last is None or self.last.checkpoint.text != text:
            return None, alarms
        mine = [item for item in parse_note(note).signatures if item.name == self.name]
        if mine:
            self.cosigned_s = max(self.cosigned_s or 0, cosigned_at(mine[0]))
            return None, alarms
        self.cosigned_s = now_s
        return cosign(text, self.name, self._identity, now_s).line, alarms

    async def _settle(self, place: str, fetch: FetchTiles, now_s: int) -> str | None:
        """Judge one head against the last; what is to be said of it."""
        last, head = self.last, self._open[place]
        verdict = "grown" if last is None else await _compare(last, head, fetch)
        match verdict:
            case Unproven():
                since = self._unproven.setdefault(place, trio.current_time())
                if trio.current_time() - since < PATIENCE_S:
                    return None
                return self._suspect(place, verdict)  # and goes on waiting for its proof
            case Conflict():
                self._accusations.believed = True
                self._close(place)
                return self._convict(verdict)
        if last is None or head.size > last.size:
            dated = self._dated(head, now_s)
            self._store.keep(self.key, dated)
            self.last = dated
        self._close(place)
        return None

    def _close(self, place: str) -> None:
        for items in (self._open, self._unproven, self._suspicions):
            items.pop(place, None)

    def _dated(self, head: Head, now_s: int) -> Head:
        """A head with our cosignature: whoever reads it, or what we kept, sees who saw it, and when."""
        note = parse_note(head.note)
        others = [item for item in note.signatures if item.name != self.name]
        line = cosign(note.text, self.name, self._identity, now_s)
        whole = Note(note.text, (*others, line)).encode()
        if len(others) >= MAX_SIGNATURES or len(whole) > MAX_NOTE:
            return head
        return Head(head.checkpoint, whole)

    def _convict(self, conflict: Conflict) -> str | None:
        if self._conflict is None:
            self._conflict = conflict
        path = self._store.evidence_path(self.key, conflict, self._spec)
        self.evidence = self.evidence or path  # believed, whatever the disk says
        if path in self._told:
            return None
        self._told.add(path)
        try:
            self._store.keep_evidence(self.key, conflict, self._spec)
        except StorageError as error:
            return f"{_charge(conflict, path)}; but it is not there: {error}"
        return _charge(conflict, path)

    def _suspect(self, place: str, trouble: Unproven) -> str | None:
        path = self._store.keep_evidence(self.key, trouble, self._spec)
        text = (
            f"the ledger's heads of {trouble.smaller.size} and {trouble.larger.size} entries are both "
            f"signed, and for {PATIENCE_S / 60:.0f} minutes the coordinator gave no proof that one grew from "
            f"the other; both are in {path}"
        )
        self._suspicions[place] = text
        if path in self._told:
            return None
        self._told.add(path)
        return text


def _charge(conflict: Conflict | None, path: Path) -> str:
    sizes = "" if conflict is None else f" ({conflict.smaller.size} and {conflict.larger.size} entries)"
    return (
        f"SPLIT VIEW: the operator signed two ledgers that contradict each other{sizes}; {path} "
        "proves it: show it to others ('barnraise ledger evidence' says what it holds), and trust no balance "
        "of this run until it is explained"
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
    seen = -1
    while ctx.run is None:
        seen = await ctx.changed.wait(seen)
    run, folder = ctx.run, ctx.config.run_path(ctx.run.run_id)
    try:
        witness = Witness(
            folder / "witness", log_key(run.run_id, run.spec.operator), ctx.identity, read_run(folder)
        )
    except StorageError as error:
        text = f"this node is no witness of the ledger: {error}"
        ctx.facts.witness = {"size": 0, "root": "", "cosigned_ms": None, "alarm": text, "evidence": ""}
        ctx.say(text, logging.ERROR)
        return
    caught = trio.Event()
    told: set[int] = set()

    def show() -> None:
        ctx.facts.witness = fields(witness)
        ctx.changed.set()
        if witness.evidence is not None:
            hold_back(ctx, folder / "witness", witness.evidence)
            guard.hold(ctx)
            caught.set()

    async def read(path: str) -> bytes | None:
        return witness.last.note if path == CHECKPOINT and witness.last is not None else None

    def convict(peer_id: str, evidence: bytes) -> bool:
        alarm = witness.accused(peer_id, evidence, trio.current_time())
        if alarm is not None:
            ctx.say(f"{alarm} (handed in by {printable(peer_id[-8:])})", logging.ERROR)
            show()
        return True

    if witness.convicted:
        ctx.say(witness.alarm, logging.ERROR)
    show()
    ctx.network.set_handler(LOG_PROTOCOL, serve_log(read, convict=convict))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_spread, ctx, witness, caught)
        while True:
            await _doze(rng, ctx.config.witness_s)
            if ctx.session is None or not ctx.coordinator:
                continue
            await _ask(ctx, witness, ctx.coordinator)
            others = _neighbours(ctx)
            for peer_id in rng.sample(others, min(PEERS, len(others))):
                await _ask(ctx, witness, peer_id)
            compare_receipts(ctx, told)
            show()


def fields(witness: Witness) -> dict[str, Any]:
    """What the state tree has under ``witness``: ``evidence`` is a path, ``""`` if there is none."""
    last, at = witness.last, witness.cosigned_s
    return {
        "size": 0 if last is None else last.size,
        "root": "" if last is None else last.root.hex(),
        "cosigned_ms": None if at is None else at * 1000,
        "alarm": witness.alarm,
        "evidence": "" if witness.evidence is None else str(witness.evidence),
    }


def compare_receipts(ctx: Context, told: set[int]) -> None:
    """Two receipts for one entry, both signed: the ledger was written twice. They are their own proof."""
    book = ctx.receipts
    if book is None:
        return
    for pair in book.conflicts[:MAX_OPEN]:
        index = pair[0].ledger_index
        if index in told:
            continue
        told.add(index)
        said = " and ".join(f"{printable(item.verdict.check)}, {item.credit:,} Mflop" for item in pair)
        ctx.say(
            f"the operator signed two receipts for entry {index} of its ledger that contradict each other "
            f"({said}); {book.path} holds both: 'barnraise ledger verify --receipts' says which of them the "
            "ledger has",
            logging.ERROR,
        )


def _neighbours(ctx: Context) -> list[str]:
    """Connected peers, of those that the coordinator names and those that others do.

    An operator with two ledgers would name to each node only those who see the same.
    """
    named = [peer.peer_id for peer in ctx.peers]
    if ctx.treecast is not None:
        named += ctx.treecast.gossiper.core.views.active
    return [peer for peer in dict.fromkeys(named) if peer != ctx.coordinator and ctx.network.connected(peer)]


async def _spread(ctx: Context, witness: Witness, caught: trio.Event) -> None:
    """Once the log is caught, hand the evidence to every peer that comes near, once each."""
    await caught.wait()
    tries: dict[str, int] = {}
    while True:
        evidence = witness.accusation
        if evidence is None:
            return  # found damaged on the disk: it stops this node, but convinces nobody
        near = [*_neighbours(ctx), ctx.coordinator]
        due = [peer for peer in near if tries.get(peer, 0) < TRIES and ctx.network.connected(peer)]
        for peer_id in due[:ACCUSED_AT_ONCE]:
            while len(tries) >= MAX_TOLD and peer_id not in tries:
                del tries[next(iter(tries))]
            tries[peer_id] = tries.get(peer_id, 0) + 1
            try:
                if await accuse(ctx.network, peer_id, evidence):
                    tries[peer_id] = TRIES
            except BarnraiseError as error:
                log.debug("%s did not hear of the split view: %s", peer_id[-8:], printable(str(error)))
        await trio.sleep(ACCUSE_EVERY_S)


async def _doze(rng: random.Random, seconds: float) -> None:
    await trio.sleep(seconds * rng.uniform(0.75, 1.25))


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
        now = trio.current_time()
        again = witness.failed_at is not None and now - witness.failed_at < SAY_AGAIN_S
        log.debug("the ledger is not witnessed: %s", error)
        if not again:  # a full disk stays full for a while, and peers are asked many times a minute
            witness.failed_at = now
            ctx.say(f"the ledger is not witnessed: {error}", logging.WARNING)
    except BarnraiseError as error:
        log.debug("nothing heard of the ledger from %s: %s", peer_id[-8:], printable(str(error)))

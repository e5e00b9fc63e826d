"""Keeps ``RUN/log`` up with the ledger, hands its files to peers, and collects the nodes' cosignatures.

A checkpoint is signed for a size and a root that a durable tree head was signed for
before, so a crash can never make the run's key sign two histories. Cosignatures are
taken from nodes of the run only, and stand in the checkpoint's file until the next.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import trio

from barnraise.coordinator.core import MAX_FRESH, Core
from barnraise.coordinator.journal import Write
from barnraise.coordinator.journal_mark import mark_trouble
from barnraise.coordinator.log_folder import LogFolder
from barnraise.protocol.cosignature import cosigned_at, node_cosignatures, node_witness, witness_name
from barnraise.protocol.errors import MalformedError, StorageError
from barnraise.protocol.evidence import Accusations
from barnraise.protocol.identity import Identity, peer_id_of
from barnraise.protocol.log_stream import serve_log
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Signed
from barnraise.protocol.network import Handler
from barnraise.protocol.notes import Note, NoteSignature, parse_note, parse_signatures
from barnraise.protocol.tlog_checkpoint import Checkpoint, Head, log_key, origin_of, sign_checkpoint
from barnraise.protocol.witness_store import WitnessStore

MAX_COSIGNATURES = 63  # in the file
COSIGNED_EVERY_S = 2.0
RETRY_S = 10.0

log = logging.getLogger(__name__)


class LogBelt:
    """Publishes the ledger of a run.

    Raises (when it is made):
        RunFolderError: what was published before is not this ledger's beginning, or is damaged.
        StorageError: it cannot be read.
    """

    def __init__(
        self, core: Core, identity: Identity, folder: LogFolder, signed_spec: Signed | None = None
    ) -> None:
        self._core = core
        self._identity = identity
        key = log_key(core.run_id, core.spec.operator)
        self.folder = folder
        self.folder.check(core.ledger)
        self._first, self._waiting = core.fresh_from, core.fresh
        core.fresh = []
        self.grown = trio.Event()  # set by the next checkpoint
        self._cosigned: dict[str, NoteSignature] = {}
        if self.folder.head is not None:
            note = parse_note(self.folder.head.note)
            good = node_cosignatures(note.text, note.signatures)
            self._cosigned = {item.name: item for item in note.signatures if item.name in good}
        self._key, self._spec = key, signed_spec
        self._evidence = WitnessStore(folder.folder.parent / "witness")
        path, _ = self._evidence.conviction(key)
        self._accusations = Accusations(key, believed=path is not None)
        self._alarm = "" if path is None else _charge(path)
        if self._alarm:
            log.error("%s", self._alarm)
        if trouble := mark_trouble(core.journal.path):
            log.warning("%s", trouble)
        self._fresh = trio.Event()
        self._writing = trio.Lock()
        core.listeners.append(self._note)

    def handler(self) -> Handler:
        """For ``LOG_PROTOCOL``."""

        async def read(path: str) -> bytes | None:
            return await self._core.offload(lambda: self.folder.read(path))

        return serve_log(read, self._take, self._convict)

    def witnesses(self) -> dict[str, Any]:
        """What the state tree has under ``witnesses``: who cosigned the checkpoint that is out there.

        ``cosigned``: newest first, times in ms since the epoch; ``age_s``: seconds since the newest,
        None without any; ``alarm``: what is wrong with this log, ``""`` if nothing.
        """
        head, state = self.folder.head, self._core.state
        found = sorted(((cosigned_at(item), name) for name, item in self._cosigned.items()), reverse=True)
        rows = []
        for at, name in found:
            key = node_witness(name)
            assert key is not None  # others are not taken
            node = state.nodes.get(key.public_key)
            peer_id = peer_id_of(key.public_key)
            rows.append({"node": peer_id, "name": "" if node is None else node.name, "at_ms": at * 1000})
        return {
            "size": self.folder.size,
            "root": "" if head is None else head.root.hex(),
            "cosigned": rows,
            "count": len(rows),
            "age_s": max(0.0, self._core.now_ms() / 1000 - found[0][0]) if found else None,
            "alarm": self._alarm,
        }

    async def run(self) -> None:
        """Publish whatever was signed, for ever. A disk that refuses is tried again."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._renew)
            if not await self._heal():  # what is new goes out meanwhile
                nursery.start_soon(self._heal_later)
            while True:
                changed = self._core.changed
                try:
                    if self._core.head[0] > self.folder.size:
                        await self._publish(*self._core.head)
                except StorageError as error:
                    log.error("%s", error)
                    await trio.sleep(RETRY_S)
                    continue
                await changed.wait()

    async def _heal_later(self) -> None:
        """A disk that was full when we began may have room by now."""
        await trio.sleep(RETRY_S)
        while not await self._heal():
            await trio.sleep(RETRY_S)

    async def _heal(self) -> bool:
        """Make whole again what a disk lost or changed since it was published; false: it refuses."""

        def work() -> bool:
            if self._spec is not None:
                self.folder.put_spec(self._spec)
            if self.folder.intact():
                return False
            whole = MerkleLog()
            for entry in islice(self._core.entries_from(0), self.folder.size):
                whole.append(entry)
            bundles = self.folder.damaged(whole)
            if bundles:
                self.folder.mend(whole, bundles, self._core.entries_from(0))
            return True

        try:
            async with self._writing:
                mended = await self._core.offload(work)
        except StorageError as error:
            log.error("%s", error)
            return False
        if mended:
            log.warning("%s: damaged or missing files were written again", self.folder.folder)
        return True

    def _note(self, write: Write) -> None:
        if len(self._waiting) >= MAX_FRESH:  # nothing is published for so long: derive them when it is
            self._first += len(self._waiting)
            self._waiting = []
        self._waiting.extend(write.entries)

    async def _publish(self, size: int, root: bytes) -> None:
        checkpoint = Checkpoint(origin_of(self._core.run_id), size, root)
        head = Head(checkpoint, sign_checkpoint(checkpoint, self._identity).encode())
        ledger, first = self._core.ledger, self._first
        waiting = self._waiting[: max(0, size - first)]

        def work() -> None:
            start = self.folder.missing_from()
            if start >= first:
                self.folder.grow(ledger, head, start, waiting[start - first :])
                return
            self.folder.grow(ledger, head, start, islice(self._core.entries_from(start), size - start))

        async with self._writing:
            await self._core.offload(work)
        self._cosigned.clear()
        done = self.folder.size - self._first
        if done > 0:
            del self._waiting[:done]
            self._first += done
        self._core.ledger.forget(size, self.folder.node)  # it is in the tiles
        self.grown.set()
        self.grown = trio.Event()

    def _take(self, peer_id: str, line: str) -> bool:
        """A cosignature of the checkpoint that is out there, by a node of this run, from itself."""
        head, name = self.folder.head, witness_name(peer_id)
        key = node_witness(name)
        if head is None or key is None or key.public_key not in self._core.state.nodes:
            return False
        try:
            (item,) = parse_signatures(line)
        except (MalformedError, ValueError):
            return False
        if item.name != name or name not in node_cosignatures(head.checkpoint.text, [item]):
            return False
        if len(self._cosigned) >= MAX_COSIGNATURES and name not in self._cosigned:
            oldest = min(self._cosigned, key=lambda other: cosigned_at(self._cosigned[other]))
            del self._cosigned[oldest]
        self._cosigned[name] = item
        self._fresh.set()
        return True

    def _convict(self, peer_id: str, evidence: bytes) -> bool:
        """A node found that this run's key signed two histories: whoever did that, the operator must know."""
        conflict = self._accusations.hear(peer_id, evidence, trio.current_time())
        if conflict is not None:
            self._alarm = _charge(self._evidence.evidence_path(self._key, conflict, self._spec))
            try:
                self._evidence.keep_evidence(self._key, conflict, self._spec)
            except StorageError as error:
                self._alarm += f"; but it is not there: {error}"
            log.error("%s", self._alarm)
        return True

    async def _renew(self) -> None:
        """Write what was cosigned, many at a time."""
        while True:
            await self._fresh.wait()
            await trio.sleep(COSIGNED_EVERY_S)
            self._fresh = trio.Event()
            head = self.folder.head
            if head is None or not self._cosigned:
                continue
            own = sign_checkpoint(head.checkpoint, self._identity).signatures
            note = Note(head.checkpoint.text, (*own, *self._cosigned.values())).encode()

            async with self._writing:
                if self.folder.head is head:  # else these are of the checkpoint before
                    with suppress(StorageError):  # the next ones will be tried
                        await self._core.offload(partial(self.folder.put_checkpoint, note))


def _charge(evidence: Path) -> str:
    return (
        "SPLIT VIEW: this run's key signed two ledgers that contradict each other: an old copy of the run "
        "folder was continued, or somebody else has the key. Nodes that know take no more work. "
        f"'barnraise ledger evidence {evidence}' says what was signed"
    )

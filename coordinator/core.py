"""Decide, journal, reply: the one way in which anything happens to a run.

A decision reads the state and calls ``record`` without an await in between, so no
two decisions ever see the same state. The events are applied at once and queued;
``run`` commits whatever is queued in one transaction (many sessions share one
fsync), and only then does ``record`` return, do listeners hear of it, and does
anything leave this process. State is therefore ahead of the disk only by what
nobody has seen. If the disk refuses, everything still queued fails with
``StorageError``, the state is folded again from the newest snapshot and the journal
(away from the event loop; what is asked for meanwhile fails too), and life goes on.
"""

from __future__ import annotations

import hmac
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import trio

from barnraise.coordinator import ledger_log
from barnraise.coordinator.events import Event, RunOpened
from barnraise.coordinator.journal import Journal, Payload, StoredReceipt, Write
from barnraise.coordinator.snapshot import Fold, Snapshots
from barnraise.coordinator.state import EventError
from barnraise.protocol.envelope import open_signed, sign
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.merkle import EMPTY_ROOT
from barnraise.protocol.messages import Message, Receipt, Signed, TreeHead
from barnraise.protocol.spec import RunSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_GROUP = 512  # writes in one transaction
MAX_GROUP_BYTES = 64 * 1024 * 1024
MAX_FRESH = 100_000  # ledger entries kept in memory until they are published

Listener = Callable[[Write], None]


class Offload(Protocol):
    """Runs a blocking function away from the event loop (or in place, in simulations)."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def in_thread(work: Callable[[], T], /) -> T:
    """Run ``work`` in a worker thread; a cancelled caller waits for it to finish."""
    return await trio.to_thread.run_sync(work)


async def in_place(work: Callable[[], T], /) -> T:
    """Run ``work`` here and now: for virtual time, whose clock must not run on beside a thread."""
    await trio.lowlevel.checkpoint()
    return work()


class _Queued:
    """One decision's write. ``unsigned``: its receipts, signed by whoever commits it."""

    __slots__ = ("done", "error", "size", "unsigned", "write")

    def __init__(self, write: Write, unsigned: list[tuple[int, Receipt]]) -> None:
        self.write = write
        self.unsigned = unsigned
        self.size = sum(len(payload.signed.payload) for payload in write.payloads)
        self.done = trio.Event()
        self.error: StorageError | None = None


class Core:
    """State, ledger and journal of one run, kept in step.

    Attributes:
        state: folded from everything recorded; replaced, not mended, after a disk failure.
        ledger: the Merkle log over the entries derived from the same events.
        head: size and root of the newest tree head that is signed and durable.
        begun_at: how many events came from a snapshot when it was made; 0: all were replayed.
        begun_size: how many ledger entries those had.
        fresh: the ledger entries from number ``fresh_from`` on, as far as the start replayed them
            (``MAX_FRESH`` at most, beginning with ``published``), for whoever publishes them.
        listeners: called in order with each write once it is durable; must not raise.
        stirs: called when ``changed`` is set, for whoever waits for other things, too; must not raise.
    """

    def __init__(
        self,
        journal: Journal,
        spec: RunSpec,
        run_id: bytes,
        identity: Identity,
        now_ms: Callable[[], int],
        offload: Offload = in_thread,
        *,
        snapshots: Snapshots | None = None,
        published: int = 0,
        replay: bool = False,
    ) -> None:
        """Fold what is durable. Blocking.

        Args:
            snapshots: where to begin from; None: from the first event.
            published: how many ledger entries are out there, which no snapshot may exceed.
            replay: begin from the first event all the same, and compare what the snapshots say.

        Raises:
            RunFolderError: the journal is damaged, or not what was signed.
        """
        self.spec = spec
        self.run_id = run_id
        self.now_ms = now_ms
        self.offload = offload
        self.journal = journal
        self.listeners: list[Listener] = []
        self.stirs: list[Callable[[], None]] = []
        self.trouble = ""  # why the last commit failed, until one succeeds
        self._identity = identity
        self._settings: tuple[bytes, RunSpec] = (b"", spec)  # the newest amendment, and what came of it
        self._snapshots = snapshots
        self._published = published
        self._queue: deque[_Queued] = deque()
        self._work = trio.Event()
        self._changed = trio.Event()
        self._defect: EventError | None = None
        self._refused: StorageError | None = None  # while the state is being folded again
        self._head_due = False
        self.head = self._last_head()
        self.fresh_from, self.fresh = published, list[bytes]()
        fold = self._compared() if replay else self._replay(self._note_fresh)
        self.state, self.ledger = fold.state, fold.ledger
        self.begun_at, self.begun_size = (0, 0) if replay else self._begun

    def _last_head(self) -> tuple[int, bytes]:
        signed = self.journal.last_tree_head()
        if signed is None:
            return 0, EMPTY_ROOT
        head = open_signed(signed, TreeHead, self.spec.operator)
        return head.size, head.root

    def _note_fresh(self, index: int, data: bytes) -> None:
        if index < self.fresh_from:
            return
        if len(self.fresh) >= MAX_FRESH:  # they will be derived once more, from the journal
            self.fresh_from = index
            self.fresh.clear()
        self.fresh.append(data)

    def _replay(self, note: Callable[[int, bytes], None] = lambda index, data: None) -> Fold:
        """What the journal says, by way of the newest snapshot that holds. Blocking."""
        most = min(self._published, self.head[0])
        base = None if self._snapshots is None else self._snapshots.newest(self.journal, most)
        self._begun = (0, 0) if base is None else (base.events, len(base.ledger))
        if base is not None and self._snapshots is not None:
            path = self._snapshots.path_of(base.events)
            try:
                return self._fold_on(base, note)
            except (EventError, RunFolderError) as error:
                self._snapshots.set_aside(path, str(error))
                self._begun, self.fresh_from = (0, 0), self._published
                self.fresh.clear()
        return self._fold_on(self._nothing(), note)

    def _nothing(self) -> Fold:
        return Fold.empty(self.spec.rollout.max_lag)

    def _fold_on(self, fold: Fold, note: Callable[[int, bytes], None]) -> Fold:
        for event in self.journal.events(fold.events):
            logged = ledger_log.advance(fold.state, fold.ledger, event)
            fold.events += 1
            if logged is not None:
                note(logged[0], logged[2])
        self._check(fold)
        return fold

    def _check(self, fold: Fold) -> None:
        """That the ledger begins with what was signed."""
        size, root = self.head
        if size > len(fold.ledger) or fold.ledger.root(size) != root:
            raise RunFolderError(
                f"{self.journal.path}: its events are not those that the tree head of {size} entries "
                "was signed for: the file is damaged or cut short, restore it from a backup"
            )

    def _compared(self) -> Fold:
        """Everything from the first event on, and whether the snapshots agree."""
        fold, known = self._nothing(), self._snapshots
        wanted = set() if known is None else set(known.events())
        for event in self.journal.events():
            logged = ledger_log.advance(fold.state, fold.ledger, event)
            fold.events += 1
            if logged is not None:
                self._note_fresh(logged[0], logged[2])
            if known is not None and fold.events in wanted and known.compare(fold):
                log.info("the snapshot after %d events agrees with the journal", fold.events)
        self._check(fold)
        return fold

    def entries_from(self, first: int) -> Iterator[bytes]:
        """The durable ledger entries from number ``first`` on, derived once more. Blocking."""
        base = None if self._snapshots is None else self._snapshots.newest(self.journal, first)
        fold = base or self._nothing()
        for event in self.journal.events(fold.events):
            logged = ledger_log.advance(fold.state, fold.ledger, event)
            if logged is not None and logged[0] >= first:
                yield logged[2]

    def sign(self, payload: Message) -> Signed:
        """Sign with the run's key."""
        return sign(payload, self._identity)

    def audit_seed(self, epoch: int) -> bytes:
        """The secret seed (32 bytes) of an audit epoch: from the run's key, so that a restart has it too."""
        domain = b"barnraise/1/audit-seed\0" + self.run_id + epoch.to_bytes(8, "big")
        return hmac.digest(self._identity.private_bytes(), domain, "sha256")

    def segment_draw(self, submission_id: bytes) -> bytes:
        """32 secret bytes that pick the segments of a block unit to do again, and the text to try it on.

        From the run's key: nobody can foresee them, and a restart draws the same.
        """
        domain = b"barnraise/1/segment\0" + self.run_id + submission_id
        return hmac.digest(self._identity.private_bytes(), domain, "sha256")

    @property
    def settings(self) -> RunSpec:
        """``Operations.settings``, remembered until the next amendment."""
        operations = self.state.operations
        newest = operations.amendments[-1].amendment if operations.amendments else b""
        if newest != self._settings[0]:
            self._settings = newest, operations.settings(self.spec)
        return self._settings[1]

    async def record(
        self,
        events: Sequence[Event],
        *,
        payloads: Sequence[Payload] = (),
        manifest: tuple[int, Signed] | None = None,
        drop_payloads: Sequence[bytes] = (),
    ) -> None:
        """Let ``events`` happen, and return once they and the bytes with them are durable.

        Applied before the first checkpoint. If the caller is cancelled while it
        waits, the write still happens.

        Raises:
            StorageError: the disk refused; none of it happened.
            EventError: the first event does not follow from the state.
        """
        if self._defect is not None:
            raise self._defect
        if self._refused is not None:  # the state is one that never came true
            raise self._refused
        write = Write(events=events, payloads=payloads, manifest=manifest, drop_payloads=drop_payloads)
        unsigned, write.entries = self._apply(events)
        queued = _Queued(write, unsigned)
        self._queue.append(queued)
        self._work.set()
        await queued.done.wait()
        if queued.error is not None:
            raise queued.error

    def _apply(self, events: Iterable[Event]) -> tuple[list[tuple[int, Receipt]], list[bytes]]:
        receipts: list[tuple[int, Receipt]] = []
        entries: list[bytes] = []
        for position, event in enumerate(events):
            try:
                logged = ledger_log.advance(self.state, self.ledger, event)
            except EventError as error:
                if position > 0:  # half applied: only a restart can be trusted
                    self._defect = error
                    self._work.set()
                raise
            if logged is not None:
                index, entry, data = logged
                entries.append(data)
                receipt = ledger_log.receipt_of(self.run_id, event, entry, index)
                if receipt is not None:
                    receipts.append((index, receipt))
        return receipts, entries

    async def open(self) -> None:
        """Record the run's first event if the journal is empty. ``run`` must be running."""
        if not self.state.run_id:
            opened = RunOpened(run_id=self.run_id, operator=self.spec.operator, at_ms=self.now_ms())
            await self.record([opened])

    async def run(self) -> None:
        """Commit what is queued, for ever.

        Raises:
            EventError: a defect left the state half changed; restart from the journal.
        """
        while True:
            await self._work.wait()
            self._work = trio.Event()
            if self._defect is not None:
                raise self._defect
            while self._queue:
                await self._commit_some()

    async def _commit_some(self) -> None:
        group: list[_Queued] = []
        size = 0
        while self._queue and len(group) < MAX_GROUP and size < MAX_GROUP_BYTES:
            queued = self._queue.popleft()
            group.append(queued)
            size += queued.size
        writes = [queued.write for queued in group]
        self._head_due = self._head_due or any(write.manifest is not None for write in writes)
        head: tuple[int, bytes] | None = None
        if self._head_due and not self._queue:  # else the log is ahead of what this transaction holds
            head = len(self.ledger), self.ledger.root()
            writes.append(Write(tree_head=self._tree_head(*head)))
            self._head_due = False
        with trio.CancelScope(shield=True):  # a reply may depend on it: never abandon it half way
            try:
                await self.offload(lambda: self._write(group, writes))
            except StorageError as error:
                await self._fail(group, error)
                return
        self.trouble = ""
        self.head = self.head if head is None else head
        for queued in group:
            for listener in self.listeners:
                listener(queued.write)
            queued.done.set()
        self._wake()

    def _write(self, group: list[_Queued], writes: list[Write]) -> None:
        """Sign the receipts (0.1 ms each: many verdicts come at once) and commit. Not on the event loop."""
        for queued in group:
            queued.write.receipts = [
                StoredReceipt(index, receipt.node, self.sign(receipt)) for index, receipt in queued.unsigned
            ]
        self.journal.commit(writes)

    async def _fail(self, group: list[_Queued], error: StorageError) -> None:
        """Undo what the disk refused. Shielded: nobody may go on with a state that never came true."""
        log.error("%s", error)
        self.trouble = str(error)
        # What was queued meanwhile was decided on a state that never became true.
        group.extend(self._queue)
        self._queue.clear()
        self._refused = error
        try:
            fold = await self.offload(self._replay)
        finally:
            self._refused = None
        self.state, self.ledger = fold.state, fold.ledger
        for queued in group:
            queued.error = error
            queued.done.set()
        self._wake()

    def _tree_head(self, size: int, root: bytes) -> tuple[int, Signed]:
        head = TreeHead(run_id=self.run_id, size=size, root=root, issued_at=self.now_ms())
        return size, self.sign(head)

    async def sign_tree_head(self) -> None:
        """Sign the ledger as it stands, durably (also done with every published version).

        Raises:
            StorageError: the disk refused.
        """
        self._head_due = True
        await self.record([])

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        for stir in self.stirs:
            stir()

    @property
    def changed(self) -> trio.Event:
        """Set by the next commit (or failure); take it before looking, wait on it after."""
        return self._changed

"""Decide, journal, reply: the one way in which anything happens to a run.

A decision reads the state and calls ``record`` without an await in between, so no
two decisions ever see the same state. The events are applied at once and queued;
``run`` commits whatever is queued in one transaction (many sessions share one
fsync), and only then does ``record`` return, do listeners hear of it, and does
anything leave this process. State is therefore ahead of the disk only by what
nobody has seen. If the disk refuses, everything still queued fails with
``StorageError``, the state is folded again from the journal, and life goes on.
"""

from __future__ import annotations

import hmac
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import trio

from barnraise.coordinator import ledger_log
from barnraise.coordinator.events import Event, RunOpened
from barnraise.coordinator.journal import Journal, Payload, StoredReceipt, Write
from barnraise.coordinator.state import EventError, State, apply
from barnraise.protocol.envelope import open_signed, sign
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import LedgerEntry, encode_entry
from barnraise.protocol.merkle import EMPTY_ROOT, MerkleLog
from barnraise.protocol.messages import Message, Signed, TreeHead
from barnraise.protocol.spec import RunSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_GROUP = 512  # writes in one transaction
MAX_GROUP_BYTES = 64 * 1024 * 1024

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
    __slots__ = ("done", "error", "size", "write")

    def __init__(self, write: Write) -> None:
        self.write = write
        self.size = sum(len(payload.signed.payload) for payload in write.payloads)
        self.done = trio.Event()
        self.error: StorageError | None = None


class Core:
    """State, ledger and journal of one run, kept in step.

    Attributes:
        state: folded from everything recorded; replaced, not mended, after a disk failure.
        ledger: the Merkle log over the entries derived from the same events.
        head: size and root of the newest tree head that is signed and durable.
        listeners: called in order with each write once it is durable; must not raise.
    """

    def __init__(
        self,
        journal: Journal,
        spec: RunSpec,
        run_id: bytes,
        identity: Identity,
        now_ms: Callable[[], int],
        offload: Offload = in_thread,
    ) -> None:
        self.spec = spec
        self.run_id = run_id
        self.now_ms = now_ms
        self.offload = offload
        self.journal = journal
        self.listeners: list[Listener] = []
        self.trouble = ""  # why the last commit failed, until one succeeds
        self._identity = identity
        self._queue: deque[_Queued] = deque()
        self._work = trio.Event()
        self._changed = trio.Event()
        self._defect: EventError | None = None
        self._head_due = False
        self.state, self.ledger = self._replay()
        self.head = self._last_head()

    def _last_head(self) -> tuple[int, bytes]:
        signed = self.journal.last_tree_head()
        if signed is None:
            return 0, EMPTY_ROOT
        head = open_signed(signed, TreeHead, self.spec.operator)
        if head.size > len(self.ledger) or self.ledger.root(head.size) != head.root:
            raise RunFolderError(
                f"{self.journal.path}: its events are not those that the tree head of {head.size} entries "
                "was signed for: the file is damaged or cut short, restore it from a backup"
            )
        return head.size, head.root

    def _replay(self) -> tuple[State, MerkleLog]:
        state = State(max_lag=self.spec.rollout.max_lag)
        ledger = MerkleLog()
        for event in self.journal.events():
            self._advance(state, ledger, event)
        return state, ledger

    def _advance(
        self, state: State, ledger: MerkleLog, event: Event
    ) -> tuple[int, LedgerEntry, bytes] | None:
        entry = ledger_log.entry_of(state, event)
        apply(state, event)
        if entry is None:
            return None
        data = encode_entry(entry)
        return ledger.append(data), entry, data

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
        write = Write(events=events, payloads=payloads, manifest=manifest, drop_payloads=drop_payloads)
        write.receipts, write.entries = self._apply(events)
        queued = _Queued(write)
        self._queue.append(queued)
        self._work.set()
        await queued.done.wait()
        if queued.error is not None:
            raise queued.error

    def _apply(self, events: Iterable[Event]) -> tuple[list[StoredReceipt], list[bytes]]:
        receipts: list[StoredReceipt] = []
        entries: list[bytes] = []
        for position, event in enumerate(events):
            try:
                logged = self._advance(self.state, self.ledger, event)
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
                    receipts.append(StoredReceipt(index, receipt.node, self.sign(receipt)))
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
                await self.offload(lambda: self.journal.commit(writes))
            except StorageError as error:
                self._fail(group, error)
                return
        self.trouble = ""
        self.head = self.head if head is None else head
        for queued in group:
            for listener in self.listeners:
                listener(queued.write)
            queued.done.set()
        self._wake()

    def _fail(self, group: list[_Queued], error: StorageError) -> None:
        log.error("%s", error)
        self.trouble = str(error)
        # What was queued meanwhile was decided on a state that never became true.
        group.extend(self._queue)
        self._queue.clear()
        self.state, self.ledger = self._replay()
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

    @property
    def changed(self) -> trio.Event:
        """Set by the next commit (or failure); take it before looking, wait on it after."""
        return self._changed

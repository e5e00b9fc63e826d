"""The node's own copy of its signed receipts: what it can show when credit is disputed (R16).

One append-only file. A record is 4 bytes of big-endian body length, 4 bytes of
CRC-32 of the body, and the body: an encoded ``Signed`` receipt. Each record is
synced before it counts. A torn tail, which a crash can leave, is cut off; damage
further in is set aside whole, and the coordinator is asked again for what followed.
"""

from __future__ import annotations

import os
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from zlib import crc32

from msgspec.structs import replace

from barnraise.node.receipt_sums import Sums, Totals
from barnraise.protocol.durable import write_durably
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, MalformedError, StorageError
from barnraise.protocol.frames import FRAME_BY_TYPE
from barnraise.protocol.messages import Receipt, ReceiptPush, Signed
from barnraise.protocol.wire import decode, encode

_HEADER = 8
_LARGEST = FRAME_BY_TYPE[ReceiptPush].limit


class ReceiptBook:
    """The receipts of ``node`` (its public key) in run ``run_id`` signed by ``operator``.

    Opening reads the file and checks lengths and checksums; signatures were
    checked when each receipt was added and are again by ``audit``. Blocking; an
    add costs one fsync.

    Attributes:
        conflicts: pairs of receipts that the operator signed for one ledger index
            with different content: evidence that the ledger was rewritten.
        repaired: what opening had to repair, as a line for a person, or ``""``.

    Raises:
        StorageError: the file cannot be read or repaired.
    """

    def __init__(self, path: Path, operator: bytes, run_id: bytes, node: bytes) -> None:
        self.path = path
        self.repaired = ""
        self.conflicts: list[tuple[Receipt, Receipt]] = []
        self._operator = operator
        self._run_id = run_id
        self._node = node
        self._receipts: dict[int, Receipt] = {}  # by ledger index
        self._conflicting: set[Receipt] = set()
        self._of_lease: dict[bytes, list[int]] = {}  # ledger indices, sorted
        self._newest = -1
        self._sums = Sums()
        self._before, self._sums_before = 0, Sums()  # over what was issued before that moment
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._load()
        except OSError as error:
            raise StorageError(f"cannot read the receipts in {path}: {error.strerror or error}") from error

    def _load(self) -> None:
        data = self.path.read_bytes() if self.path.exists() else b""
        good = 0
        for signed, end in _records(data):
            try:
                receipt = decode(signed.payload, Receipt)
                self._check_subject(receipt)
            except BarnraiseError:
                break
            self._remember(receipt)
            good = end
        if good == len(data):
            return
        lost = len(data) - good
        if not _is_torn(data[good:]):
            names = (self.path.with_name(f"{self.path.name}.damaged-{n}") for n in count(1))
            aside = next(path for path in names if not path.exists())
            write_durably(aside, data)  # before anything is cut: a power cut may come between
            self.repaired = f"{self.path} was damaged after {good} bytes; the whole is kept as {aside}"
        else:
            self.repaired = f"{self.path}: {lost} bytes of an unfinished record were cut off"
        with self.path.open("r+b") as file:
            file.truncate(good)
            os.fsync(file.fileno())

    @property
    def next_index(self) -> int:
        """One more than the largest ledger index kept: where to ask on from.

        The coordinator sends receipts in order of index, so ask for the missing
        ones before accepting pushes; a gap would not be noticed.
        """
        return self._newest + 1

    @property
    def totals(self) -> Totals:
        """Over the submissions; the last receipt of each counts, and of conflicting ones the first."""
        return self._sums.totals

    def credit_before(self, moment_ms: int) -> int:
        """Credit by the receipts issued before a moment (ms since the epoch, the coordinator's clock).

        The same moment as the last costs nothing, whatever came meanwhile; another costs a walk.
        """
        if moment_ms != self._before:
            earlier = (receipt for receipt in self._receipts.values() if receipt.issued_at < moment_ms)
            self._before, self._sums_before = moment_ms, Sums(earlier)
        return self._sums_before.totals.credit

    def verdicts(self, lease_id: bytes) -> list[bool]:
        """What a lease's work was judged to be, oldest first: none yet, one, or two after an appeal."""
        return [self._receipts[index].verdict.accepted for index in self._of_lease.get(lease_id, ())]

    def receipts(self) -> list[Receipt]:
        """All receipts, by ledger index."""
        return [self._receipts[index] for index in sorted(self._receipts)]

    def signed(self, receipt: Receipt) -> Signed:
        """A kept receipt as it was signed, read from the file again.

        Raises:
            MalformedError, StorageError: the file cannot be read, or no longer holds it.
        """
        for signed in read_receipts(self.path):
            if decode(signed.payload, Receipt) == receipt:
                return signed
        raise MalformedError(f"{self.path} no longer holds receipt #{receipt.ledger_index}")

    def add(self, signed: Signed) -> Receipt | None:
        """Verify and keep one receipt; ``None`` if it was here already. See ``add_all``."""
        added = self.add_all((signed,))
        return added[0] if added else None

    def add_all(self, batch: Sequence[Signed]) -> list[Receipt]:
        """Verify all, then append the new ones with one fsync; returns those.

        Raises:
            SignatureError: one is not signed by the run's key. Nothing of the batch is kept.
            MalformedError: one is not a receipt, or of another run or node. Likewise.
            StorageError: the disk refused. Likewise.
        """
        fresh: list[tuple[Receipt, Signed]] = []
        for signed in batch:
            receipt = open_signed(signed, Receipt, self._operator)
            self._check_subject(receipt)
            if not self._is_known(receipt) and all(receipt != other for other, _ in fresh):
                fresh.append((receipt, signed))
        if fresh:
            self._append(b"".join(_record(signed) for _, signed in fresh))
            for receipt, _ in fresh:
                self._remember(receipt)
        return [receipt for receipt, _ in fresh]

    def audit(self) -> int:
        """Check every signature in the file again; returns how many there are (about 9,000/s).

        Raises:
            SignatureError, MalformedError: a record on disk is not what was added.
            StorageError: the file cannot be read.
        """
        kept = read_receipts(self.path) if self.path.exists() else []
        for signed in kept:
            open_signed(signed, Receipt, self._operator)
        if len(kept) != len(self._receipts) + len(self.conflicts):
            raise MalformedError(f"{self.path} was changed meanwhile: it holds {len(kept)} receipts")
        return len(kept)

    def _is_known(self, receipt: Receipt) -> bool:
        return self._receipts.get(receipt.ledger_index) == receipt or receipt in self._conflicting

    def _check_subject(self, receipt: Receipt) -> None:
        if receipt.run_id != self._run_id:
            raise MalformedError(f"the receipt is of another run, {receipt.run_id.hex()[:16]}")
        if receipt.node != self._node:
            raise MalformedError(f"the receipt is of another node, {receipt.node.hex()[:16]}")

    def _remember(self, receipt: Receipt) -> None:
        receipt = replace(receipt, run_id=self._run_id, node=self._node)  # one copy of each for all of them
        first = self._receipts.setdefault(receipt.ledger_index, receipt)
        if first != receipt:
            self.conflicts.append((first, receipt))
            self._conflicting.add(receipt)
        if first is not receipt:
            return
        self._newest = max(self._newest, receipt.ledger_index)
        insort(self._of_lease.setdefault(receipt.lease_id, []), receipt.ledger_index)
        self._sums.add(receipt)
        if receipt.issued_at < self._before:
            self._sums_before.add(receipt)

    def _append(self, data: bytes) -> None:
        try:
            # Unbuffered: what a buffer still holds would be written again by truncating or closing.
            with self.path.open("ab", buffering=0) as file:
                start = file.seek(0, os.SEEK_END)
                try:
                    left = memoryview(data)
                    while left:  # a disk that fills up takes a part first
                        left = left[file.write(left) :]
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(start)  # a half-written record must not precede the next
                    raise
        except OSError as error:
            raise StorageError(
                f"cannot keep a receipt in {self.path} ({len(data)} bytes are needed there): "
                f"{error.strerror or error}"
            ) from error


def read_receipts(path: Path) -> list[Signed]:
    """The signed receipts in a node's file, in order of arrival; nothing is verified or repaired.

    Raises:
        MalformedError: the file is damaged, or ends in the middle of a record.
        StorageError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read the receipts in {path}: {error.strerror or error}") from error
    records = list(_records(data))
    found = [signed for signed, _ in records]
    good = records[-1][1] if records else 0
    if good != len(data):
        raise MalformedError(f"{path} is damaged after {good} of {len(data)} bytes ({len(found)} receipts)")
    return found


def _record(signed: Signed) -> bytes:
    body = encode(signed)
    return len(body).to_bytes(4, "big") + crc32(body).to_bytes(4, "big") + body


def _records(data: bytes) -> Iterator[tuple[Signed, int]]:
    """Yield each whole record and where it ends, up to the first that is torn or damaged."""
    position = 0
    while position + _HEADER <= len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        end = position + _HEADER + length
        body = data[position + _HEADER : end]
        checksum = int.from_bytes(data[position + 4 : position + _HEADER], "big")
        if length > _LARGEST or len(body) < length or crc32(body) != checksum:
            return
        try:
            signed = decode(body, Signed)
        except MalformedError:
            return
        yield signed, end
        position = end


def _is_torn(tail: bytes) -> bool:
    """Whether ``tail`` is one record cut short, as a crash leaves it: no whole record, or only zeros."""
    if len(tail) < _HEADER or not any(tail):
        return True
    length = int.from_bytes(tail[:4], "big")
    return length <= _LARGEST and len(tail) < _HEADER + length

"""``ledger.bin``: a whole ledger in one file, enough for an audit without the coordinator.

Layout: the 20 bytes ``barnraise-ledger-1\\r\\n``, then records of one kind byte, a
big-endian length of four bytes and a MessagePack body: ``S`` the signed run spec
(exactly one, first), ``C`` a checkpoint (a signed note; in copies of the static log),
``H`` signed tree heads, ``U`` signed uses (none in older files), ``E``
entries in order. All others come before entries, so that a reader may stream those.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from barnraise.protocol import wire
from barnraise.protocol.errors import MalformedError, StorageError
from barnraise.protocol.ledger import (
    LedgerEntry,
    LedgerReport,
    decode_entry,
    encode_entry,
    verify_ledger,
)
from barnraise.protocol.ledger_problems import Problem
from barnraise.protocol.ledger_uses import UseCheck
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Signed
from barnraise.protocol.notes import MAX_NOTE
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.signatures import Check, check_here

MAGIC = b"barnraise-ledger-1\r\n"
_SPEC, _CHECKPOINT, _HEAD, _USE, _ENTRY = b"S", b"C", b"H", b"U", b"E"
MAX_SPEC = 1024 * 1024  # bytes
MAX_ENTRY = 4 * 1024  # bytes
_LIMITS = {_SPEC: MAX_SPEC, _CHECKPOINT: MAX_NOTE, _HEAD: 8 * 1024, _USE: 160 * 1024, _ENTRY: MAX_ENTRY}
MAX_HEADS = 1_000_000  # one a minute for almost two years
MAX_USES = 128 * 1024 * 1024  # bytes in all: about 4 million submissions


@dataclass(frozen=True)
class LedgerFile:
    """An open ledger file. ``entries`` streams once, and raises MalformedError where the file is damaged.

    ``uses``: see ``barnraise.protocol.ledger_uses``. ``fraction()``: how much of the file is read, 0 to 1.
    ``checkpoint``: the note under which the static log was copied; such a copy has no tree heads.
    """

    run_spec: Signed
    heads: tuple[Signed, ...]
    entries: Iterator[LedgerEntry]
    uses: tuple[Signed, ...] = ()
    fraction: Callable[[], float] = lambda: 0.0
    checkpoint: bytes | None = None


def write_ledger(
    path: Path,
    run_spec: Signed,
    heads: Iterable[Signed],
    entries: Iterable[LedgerEntry | bytes],
    uses: Iterable[Signed] = (),
    checkpoint: bytes | None = None,
) -> None:
    """Write a ledger file atomically: ``heads`` are taken first, then ``uses``, then ``entries``.

    ``entries``: as they are, or as ``encode_entry`` has them.

    Raises:
        StorageError: the disk refused.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            with partial.open("xb") as file:
                file.write(ledger_beginning(run_spec))
                if checkpoint is not None:
                    file.write(_record(_CHECKPOINT, checkpoint))
                for head in heads:
                    file.write(_record(_HEAD, wire.encode(head)))
                for use in uses:
                    file.write(_record(_USE, wire.encode(use)))
                for entry in entries:
                    data = entry if isinstance(entry, bytes) else encode_entry(entry)
                    file.write(entry_record(data))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write the ledger to {path} ({error.strerror})") from None


@contextmanager
def open_ledger(path: Path) -> Iterator[LedgerFile]:
    """Open a ledger file for one pass over its entries.

    Raises:
        StorageError: the file cannot be read.
        MalformedError: it is no ledger file, or its spec or heads are damaged.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise StorageError(f"cannot read the ledger {path} ({error.strerror})") from None
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise MalformedError(f"{path} is no ledger file of this version (it does not begin as one)")
        records = _records(file)
        kind, body = next(records, (b"", b""))
        if kind != _SPEC:
            raise MalformedError(f"{path}: the signed run spec is missing from the start of the file")
        run_spec = wire.decode(body, Signed)
        heads: list[Signed] = []
        first = next(records, None)
        checkpoint: bytes | None = None
        if first is not None and first[0] == _CHECKPOINT:
            checkpoint = first[1]
            first = next(records, None)
        while first is not None and first[0] == _HEAD:
            if len(heads) == MAX_HEADS:
                raise MalformedError(f"{path} holds more than {MAX_HEADS:,} tree heads: no ledger does")
            heads.append(wire.decode(first[1], Signed))
            first = next(records, None)
        uses: list[Signed] = []
        held = 0
        while first is not None and first[0] == _USE:
            held += len(first[1])
            if held > MAX_USES:
                raise MalformedError(f"{path} holds more than {MAX_USES:,} bytes of use: no ledger does")
            uses.append(wire.decode(first[1], Signed))
            first = next(records, None)
        total = max(1, os.fstat(file.fileno()).st_size)
        yield LedgerFile(
            run_spec,
            tuple(heads),
            _entries(first, records),
            tuple(uses),
            lambda: min(1.0, file.tell() / total),
            checkpoint,
        )


def verify_ledger_file(
    path: Path,
    receipts: Sequence[Signed] = (),
    check: Check = check_here,
    progress: Callable[[float], None] | None = None,
    also: Callable[[MerkleLog, int], Iterable[Problem]] | None = None,
) -> LedgerReport:
    """Audit a ledger file offline (see ``ledger.verify_ledger``). Nothing else is needed.

    ``progress`` hears now and then what fraction of the entries is read; ``also`` as there.

    Raises:
        StorageError: the file cannot be read.
        MalformedError, SignatureError: it is no ledger file, or its run spec is not to be believed.
    """
    with open_ledger(path) as ledger:
        told = None if progress is None else (lambda _: progress(ledger.fraction()))
        seen = UseCheck()
        operator, run = open_run_spec(ledger.run_spec).operator, run_id(ledger.run_spec)

        def more(log: MerkleLog, signed_ms: int) -> Iterator[Problem]:
            yield from seen.problems(ledger.uses, operator, run)
            if also is not None:
                yield from also(log, signed_ms)

        entries = seen.watch(ledger.entries) if ledger.uses else ledger.entries
        return verify_ledger(
            entries, ledger.heads, ledger.run_spec, receipts, check, told, more, ledger.checkpoint
        )


def ledger_beginning(run_spec: Signed) -> bytes:
    """How a ledger file begins; ``entry_record``s may follow."""
    return MAGIC + _record(_SPEC, wire.encode(run_spec))


def entry_record(entry: bytes) -> bytes:
    """An entry (as ``encode_entry`` has it) as it stands in a ledger file."""
    return _record(_ENTRY, entry)


def _record(kind: bytes, body: bytes) -> bytes:
    return kind + len(body).to_bytes(4, "big") + body


def _records(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    while header := file.read(5):
        kind, length = header[:1], int.from_bytes(header[1:], "big")
        limit = _LIMITS.get(kind)
        if limit is None or len(header) < 5:
            raise MalformedError("the file is damaged: a record has no known kind, or ends in its header")
        if length > limit:
            raise MalformedError(f"the file is damaged: a record claims {length} bytes, more than {limit}")
        body = file.read(length)
        if len(body) < length:
            raise MalformedError("the file is cut short: its last record is incomplete")
        yield kind, body


def _entries(
    first: tuple[bytes, bytes] | None, records: Iterator[tuple[bytes, bytes]]
) -> Iterator[LedgerEntry]:
    record = first
    while record is not None:
        kind, body = record
        if kind != _ENTRY:
            raise MalformedError("the file is damaged: a spec, head or use stands among the entries")
        yield decode_entry(body)
        record = next(records, None)

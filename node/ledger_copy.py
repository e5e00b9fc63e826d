"""A copy of a run's whole ledger, taken from its static log by somebody who trusts nobody.

Order of belief: the run spec is the one that the checkpoint's run id is the hash of, and
names the key; the checkpoint is signed by it; the hashes over each 256 entries lead to
the checkpoint's root; each bundle has its hash. What an earlier copy or an interrupted
download left here is taken from there, and checked in the same way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NoReturn

import trio

from barnraise.node.log_site import CONNECTIONS, LogSource
from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError, StorageError
from barnraise.protocol.evidence import encode_evidence
from barnraise.protocol.ledger_entries import decode_entry, encode_entry
from barnraise.protocol.ledger_file import (
    MAX_ENTRY,
    MAX_SPEC,
    entry_record,
    ledger_beginning,
    open_ledger,
    write_ledger,
)
from barnraise.protocol.log_messages import CHECKPOINT
from barnraise.protocol.log_paths import spec_path
from barnraise.protocol.merkle import HASH_BYTES
from barnraise.protocol.messages import Signed
from barnraise.protocol.notes import MAX_NOTE, Ed25519Key, parse_note
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.tlog_checkpoint import Head, log_key, open_checkpoint, origin_of, parse_checkpoint
from barnraise.protocol.tlog_rows import BundleRow, leaf_hashes, row_of
from barnraise.protocol.tlog_tiles import ENTRIES, FULL, MAX_TILE, Tile, tile_of, unbundle
from barnraise.protocol.wire import decode
from barnraise.protocol.witness import Conflict, judge

MAX_ENTRIES = 1 << 27
MAX_BUNDLE = FULL * (2 + MAX_ENTRY)  # bytes, of a ledger's entries
_AHEAD = 2 * CONNECTIONS  # bundles that may wait for one before them

Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Copied:
    """``size`` entries are in the file now, of which ``known`` were in an earlier copy already."""

    run_id: bytes
    size: int
    root: bytes
    known: int


class SplitViewError(BarnraiseError):
    """The log that is served is not the one of the earlier copy; the text says what was kept where."""


@dataclass(frozen=True)
class _Kept:
    """An earlier copy. ``head``: its checkpoint, if it has one."""

    path: Path
    row: BundleRow
    head: Head | None


async def copy_ledger(source: LogSource, target: Path, tell: Tell, run: str = "") -> Copied:
    """Write the newest ledger of the log at ``source`` to ``target``, a ledger file with its checkpoint.

    ``run``: how the run's id must begin (hex). ``tell`` hears what fraction of something is done.

    Raises:
        SplitViewError: ``target`` has another history, or part of one; both are kept.
        MalformedError, SignatureError: what is served, or what ``target`` has, is not to be believed.
        PeerError: the source does not answer.
        StorageError: the disk refused.
    """
    spec, key, head = await _beginning(source, run)
    name = run_id(spec)
    kept = _read_kept(target, spec, key, head.size // FULL) if target.exists() else None
    if kept is not None and kept.row.size >= head.size:
        if kept.row.root(head.size) == head.root:
            if kept.row.size > head.size:
                raise MalformedError(
                    f"an old checkpoint is served, of {head.size:,} entries; {target} has {kept.row.size:,}, "
                    "which begin with the same. It was left as it is"
                )
            return Copied(name, head.size, head.root, kept.row.size)
        proof = kept.row.consistency_proof(head.size)
        await _split(source, kept, spec, key, head, proof, kept.row.root(head.size), tell)
    row = await _row(source, head)
    if kept is not None and kept.row.size:
        before = kept.row.size
        if before % FULL and before // FULL not in row.leaves:
            row.leaves[before // FULL] = leaf_hashes(await _bundle(source, row, before // FULL))
        if row.root(before) != kept.row.root():
            await _split(source, kept, spec, key, head, row.consistency_proof(before), row.root(before), tell)
    await _write(source, target, spec, head, row, None if kept is None else kept.path, tell)
    return Copied(name, head.size, head.root, 0 if kept is None else kept.row.size)


async def _beginning(source: LogSource, run: str) -> tuple[Signed, Ed25519Key, Head]:
    """The run spec, its log's key, and the checkpoint."""
    note = await source.get(CHECKPOINT, MAX_NOTE)
    if note is None:
        raise MalformedError("no log is there: it has no file named checkpoint")
    origin = parse_checkpoint(parse_note(note).text).origin
    try:
        name = bytes.fromhex(origin.removeprefix(origin_of(b"")))
    except ValueError:
        name = b""
    if len(name) != HASH_BYTES or origin != origin_of(name):
        raise MalformedError("the checkpoint is of no run's log")
    if not name.hex().startswith(run.lower()):
        raise MalformedError(f"the log there is of another run, {name.hex()}")
    data = await source.get(spec_path(name), MAX_SPEC)
    if data is None:
        raise MalformedError(
            f"{spec_path(name)} is not there: the log is a copy without the run spec, or by an older release"
        )
    spec = decode(data, Signed)
    if run_id(spec) != name:
        raise MalformedError("the run spec that is served is another run's")
    key = log_key(name, open_run_spec(spec).operator)
    head = open_checkpoint(note, key)
    if head.size > MAX_ENTRIES:
        raise MalformedError(f"the log claims {head.size:,} entries; at most {MAX_ENTRIES:,} are read")
    return spec, key, head


async def _row(source: LogSource, head: Head) -> BundleRow:
    """The hash of each full bundle, and the leaves of the last one: they lead to the checkpoint's root."""
    size, tiles = head.size, -(-(head.size // FULL) // FULL)
    parts: list[bytes] = [b""] * tiles
    left = iter(range(tiles))

    async def draw() -> None:
        for index in left:
            tile = tile_of(1, index, size)
            data = await _tile(source, tile, MAX_TILE)
            if not tile.width * HASH_BYTES <= len(data) <= MAX_TILE:
                raise MalformedError(f"{tile.path} has {len(data)} bytes instead of {tile.limit}")
            parts[index] = data[: tile.limit]

    await _together(draw)
    row = BundleRow(size, b"".join(parts))
    if size % FULL:
        row.leaves[size // FULL] = leaf_hashes(await _entries(source, size, size // FULL))
    if row.root() != head.root:
        raise MalformedError("the hashes that are served do not lead to the checkpoint that was signed")
    return row


async def _tile(source: LogSource, tile: Tile, limit: int) -> bytes:
    """A partial tile that is gone has become a full one."""
    data = await source.get(tile.path, limit)
    if data is None and tile.width < FULL:
        data = await source.get(tile.whole.path, limit)
    if data is None:
        raise MalformedError(f"{tile.path} is not there, of which the checkpoint speaks")
    return data


async def _entries(source: LogSource, size: int, index: int) -> list[bytes]:
    """A bundle as it is served: as many entries as it must have, checked against nothing yet."""
    tile = tile_of(ENTRIES, index, size)
    entries = unbundle(await _tile(source, tile, MAX_BUNDLE))[: tile.width]
    if len(entries) < tile.width:
        raise MalformedError(f"{tile.path} has {len(entries)} entries instead of {tile.width}")
    return entries


async def _bundle(source: LogSource, row: BundleRow, index: int) -> list[bytes]:
    """The entries of a bundle, checked."""
    entries = await _entries(source, row.size, index)
    row.check(index, entries)
    for number, entry in enumerate(entries, index * FULL):
        try:
            good = encode_entry(decode_entry(entry)) == entry
        except MalformedError as error:
            raise MalformedError(f"the operator signed what is no entry, number {number}: {error}") from error
        if not good:
            raise MalformedError(f"the operator signed entry {number} in a form that is not canonical")
    return entries


def _read_kept(path: Path, spec: Signed, key: Ed25519Key, bundle: int) -> _Kept:
    """An earlier copy or an export; the leaves of ``bundle`` are kept, too."""
    try:
        with open_ledger(path) as ledger:
            if run_id(ledger.run_spec) != run_id(spec):
                raise MalformedError("it is another run's ledger")
            head = None if ledger.checkpoint is None else open_checkpoint(ledger.checkpoint, key)
            row = row_of(map(encode_entry, ledger.entries), (bundle,))
        if head is not None and (head.size != row.size or head.root != row.root()):
            raise MalformedError("its entries are not those of its checkpoint")
    except (MalformedError, SignatureError) as error:
        raise MalformedError(f"{path} is in the way: {error}. Name another file") from error
    return _Kept(path, row, head)


async def _split(
    source: LogSource,
    kept: _Kept,
    spec: Signed,
    key: Ed25519Key,
    head: Head,
    proof: tuple[bytes, ...],
    root: bytes,
    tell: Tell,
) -> NoReturn:
    """Keep the proof, then the other ledger beside the one that is here. Always raises."""
    other = kept.path.with_name(f"{kept.path.name}.other-{head.root.hex()[:16]}")
    run = run_id(spec).hex()
    charge = f"SPLIT VIEW: the operator of run {run} signed another history than {kept.path} has"
    found = None if kept.head is None else judge(kept.head, head, proof, root)
    if isinstance(found, Conflict):
        data = encode_evidence(key, found, spec)
        digest = hashlib.sha256(data).hexdigest()[:16]
        evidence = kept.path.with_name(f"evidence-split-view-{digest}.json")
        write_durably(evidence, data)
        charge += f". Proof for anybody: `barnraise ledger evidence {evidence}`"
    try:
        await _write(source, other, spec, head, await _row(source, head), None, tell)
    except BarnraiseError as error:
        raise SplitViewError(f"{charge}. The other ledger could not be had whole: {error}") from error
    raise SplitViewError(
        f"{charge}. It is in {other}; {kept.path} was left as it is: keep both, "
        f"`barnraise ledger diff {kept.path} {other}` says where they part"
    )


async def _write(
    source: LogSource,
    target: Path,
    spec: Signed,
    head: Head,
    row: BundleRow,
    base: Path | None,
    tell: Tell,
) -> None:
    """Bring in what is missing, beside ``target``; then write all of it there at once."""
    part = target.with_name(f"{target.name}.part")
    full = row.size // FULL
    try:
        first = 0 if base is None else _good_bundles(base, row, full)[0]
        with _resumed(part, spec, row, first) as (file, begin):
            await _download(source, row, range(begin, full), file, tell)
        tail = await _bundle(source, row, full) if row.size % FULL else []
        heads, uses = ((), ()) if base is None else _signed_beside(base)
        write_ledger(target, spec, heads, _all(base, part, first, tail, row), uses, head.note)
        part.unlink()
    except OSError as error:
        raise StorageError(f"cannot write {part} ({error.strerror})") from error


def _signed_beside(path: Path) -> tuple[tuple[Signed, ...], tuple[Signed, ...]]:
    """What an export has and the static log has not: tree heads and uses. They hold for what follows, too."""
    with open_ledger(path) as ledger:
        return ledger.heads, ledger.uses


def _all(base: Path | None, part: Path, first: int, tail: list[bytes], row: BundleRow) -> Iterator[bytes]:
    """All entries, from where they are; checked again, for files may change meanwhile."""
    whole = row.size // FULL
    sources = [_of(part, whole - first), iter(tail)]
    if base is not None:
        sources.insert(0, _of(base, first))
    entries = chain.from_iterable(sources)
    for index in range(whole + bool(tail)):
        bundle = list(islice(entries, FULL))
        row.check(index, bundle)
        yield from bundle


def _of(path: Path, bundles: int) -> Iterator[bytes]:
    with open_ledger(path) as ledger:
        yield from map(encode_entry, islice(ledger.entries, bundles * FULL))


def _good_bundles(path: Path, row: BundleRow, most: int, first: int = 0) -> tuple[int, int]:
    """How many full bundles, from ``first`` on, begin a file and are the log's, and their bytes in it."""
    count = taken = 0
    with suppress(MalformedError), open_ledger(path) as ledger:
        while count < most:
            bundle = list(map(encode_entry, islice(ledger.entries, FULL)))
            row.check(first + count, bundle)
            count += 1
            taken += sum(len(entry_record(entry)) for entry in bundle)
    return count, taken


@contextmanager
def _resumed(path: Path, spec: Signed, row: BundleRow, first: int) -> Iterator[tuple[BinaryIO, int]]:
    """The file of whole bundles from ``first`` on, open for more, and which is next.

    What an interrupted download left there is kept as far as it is good.
    """
    beginning, good, taken = ledger_beginning(spec), 0, 0
    if path.exists():
        good, taken = _good_bundles(path, row, row.size // FULL - first, first)
    with path.open("r+b" if good else "wb") as file:
        if good:
            file.truncate(len(beginning) + taken)
            file.seek(0, os.SEEK_END)
        else:
            file.write(beginning)
        yield file, first + good


async def _download(source: LogSource, row: BundleRow, wanted: range, file: BinaryIO, tell: Tell) -> None:
    """Append the bundles in their order; what arrives early waits, but only so many."""
    left, done = iter(wanted), wanted.start
    early: dict[int, list[bytes]] = {}
    moved = trio.Event()

    async def draw() -> None:
        nonlocal done, moved
        for index in left:
            while index >= done + _AHEAD:
                await moved.wait()
            early[index] = await _bundle(source, row, index)
            while done in early:
                file.write(b"".join(map(entry_record, early.pop(done))))
                done += 1
            moved.set()
            moved = trio.Event()
            tell("fetching entries", done * FULL / row.size)

    await _together(draw)


async def _together(draw: Callable[[], Awaitable[None]]) -> None:
    """Run ``draw`` in as many tasks as there may be requests; the first error ends all."""
    trouble: list[BarnraiseError] = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            try:
                await draw()
            except BarnraiseError as error:
                trouble.append(error)
                nursery.cancel_scope.cancel()

        for _ in range(CONNECTIONS):
            nursery.start_soon(run)
    if trouble:
        raise trouble[0]

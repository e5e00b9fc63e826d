"""Snapshots of the fold: what a start need not replay. Never the truth, which is the journal alone.

::

    RUN/snapshots/<events>.bin            the two newest
    RUN/snapshots/<events>.bin.refused    what did not hold, for whoever wants to know why

A snapshot is the state after so many events and the end of the Merkle log over them. It is
made by folding what is durable (never from a living state), and only up to a size that the
run's key has signed and ``RUN/log`` has published, whose root it must give. It is taken if
it belongs to this run, to this journal (the last event's hash), and to this very fold
(``fold_version``), and if the log that goes on from it still leads to the newest signed
roots. Otherwise it is set aside, and the events are folded from the first: losing every
snapshot costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from barnraise.coordinator.events import EventError
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import advance
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.state import DURATIONS_KEPT, State
from barnraise.protocol import wire
from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import MalformedError, RunFolderError
from barnraise.protocol.merkle import MerkleLog

log = logging.getLogger(__name__)

SNAPSHOTS = "snapshots"  # in the run folder
MAGIC = b"barnraise snapshot 1\n"
KEPT = 2
_DIGEST = 32

# Whatever decides what an event does to state and ledger, or how either is written down. A change
# of any of these modules makes older snapshots useless, without anybody having to remember it.
FOLD_MODULES = (
    "coordinator.audit_fold",
    "coordinator.block_draws",
    "coordinator.block_events",
    "coordinator.block_fold",
    "coordinator.block_workers",
    "coordinator.cover",
    "coordinator.events",
    "coordinator.ledger_log",
    "coordinator.operator_events",
    "coordinator.operator_fold",
    "coordinator.pool",
    "coordinator.snapshot",
    "coordinator.state",
    "coordinator.state_parts",
    "coordinator.workers",
    "protocol.amendments",
    "protocol.ledger_entries",
    "protocol.merkle",
    "protocol.messages",
    "protocol.pretrain",
    "protocol.standing",
    "protocol.wire",
)


@dataclass(slots=True)
class Fold:
    """State and ledger after the first ``events`` events of a journal."""

    state: State
    ledger: MerkleLog
    events: int = 0

    @classmethod
    def empty(cls, max_lag: int) -> Fold:
        """Before the first event."""
        return cls(State(max_lag=max_lag), MerkleLog())


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds. ``last_event``: SHA-256 of the bytes of the newest event folded."""

    run_id: bytes
    fold: bytes
    events: int
    last_event: bytes
    size: int
    root: bytes
    tail: tuple[bytes, ...]
    state: bytes


@cache
def fold_version() -> bytes:
    """SHA-256 over the code that folds events (``FOLD_MODULES``)."""
    digest = hashlib.sha256()
    for name in FOLD_MODULES:
        path = importlib.import_module(f"barnraise.{name}").__file__
        assert path is not None
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.digest()


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    raise TypeError(f"a state has no {type(value).__name__}")


def _rich(kind: type, value: Any) -> Any:
    if kind is deque or getattr(kind, "__origin__", None) is deque:
        return deque(value, maxlen=DURATIONS_KEPT)
    raise TypeError(f"a state has no {kind}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(State, dec_hook=_rich)


def encode_state(state: State) -> bytes:
    """The state as MessagePack: maps with every field in declared order, dicts in their own order.

    Two states that decide alike have the same bytes: ``==`` would not see the order of a dict.
    """
    return _encoder.encode(state)


def decode_state(data: bytes) -> State:
    """Inverse of ``encode_state``.

    Raises:
        MalformedError: it is not the encoding of a state of today.
    """
    try:
        state = _decoder.decode(data)
        again = _encoder.encode(state)
    except (msgspec.MsgspecError, TypeError) as error:
        raise MalformedError(f"no state of this version ({error})") from error
    if again != data:
        raise MalformedError("not the state's one encoding")
    return state


class Snapshots:
    """The snapshots of one run, in ``folder``."""

    def __init__(self, folder: Path, run_id: bytes) -> None:
        self.folder = folder
        self.run_id = run_id

    def newest(self, journal: Journal, most: int) -> Fold | None:
        """The newest that fits ``journal`` and has at most ``most`` ledger entries.

        Sets aside what does not hold. Blocking: tens of milliseconds for ten thousand nodes.
        """
        for path in self._paths():
            try:
                fold = self._open(path, journal, most)
            except (MalformedError, OSError) as error:
                self.set_aside(path, str(error))
                continue
            if fold is not None:
                return fold
        return None

    def write(self, fold: Fold, journal: Journal) -> Path:
        """Put a snapshot on the disk, whole or not at all, and drop all but the newest two.

        Raises:
            StorageError: the disk refused.
            ValueError: nothing has been folded yet.
        """
        last = journal.event_hash(fold.events - 1)
        if last is None:
            raise ValueError("there is no event to make a snapshot of")
        body = wire.encode(
            _Body(
                run_id=self.run_id,
                fold=fold_version(),
                events=fold.events,
                last_event=last,
                size=len(fold.ledger),
                root=fold.ledger.root(),
                tail=fold.ledger.tail(),
                state=encode_state(fold.state),
            )
        )
        path = self.path_of(fold.events)
        write_durably(path, MAGIC + hashlib.sha256(body).digest() + body)
        for old in (*self._paths()[KEPT:], *self.folder.glob(".tmp-*")):
            with suppress(OSError):
                old.unlink()
        return path

    def path_of(self, events: int) -> Path:
        """Where the snapshot after so many events lies."""
        return self.folder / f"{events:012d}.bin"

    def set_aside(self, path: Path, why: str) -> None:
        """Do not use it again; whoever wonders finds the newest two that were refused."""
        log.warning("%s is not used (%s): the journal is replayed instead", path, why)
        with suppress(OSError):
            path.replace(path.with_name(path.name + ".refused"))
            for old in sorted(self.folder.glob("*.refused"))[:-KEPT]:
                old.unlink()

    def compare(self, fold: Fold) -> bool | None:
        """Whether the snapshot after as many events says the same as ``fold``; None: there is none.

        One that does not is set aside.
        """
        path = self.path_of(fold.events)
        try:
            body = _read(path)
        except FileNotFoundError:
            return None
        except (MalformedError, OSError) as error:
            self.set_aside(path, str(error))
            return False
        if body.fold != fold_version():
            return None
        same = body.state == encode_state(fold.state) and body.tail == fold.ledger.tail()
        if not same or body.root != fold.ledger.root():
            self.set_aside(path, "the events, folded from the first, give another state")
            return False
        return True

    def events(self) -> list[int]:
        """After how many events there are snapshots, newest first."""
        return [int(path.name.removesuffix(".bin")) for path in self._paths()]

    def _paths(self) -> list[Path]:
        named = (path for path in self.folder.glob("*.bin") if path.name.removesuffix(".bin").isdecimal())
        return sorted(named, key=lambda path: int(path.name.removesuffix(".bin")), reverse=True)

    def _open(self, path: Path, journal: Journal, most: int) -> Fold | None:
        """None: it is sound, and of a ledger that is longer than is published here."""
        body = _read(path)
        if body.run_id != self.run_id:
            raise MalformedError(f"it is of another run, {body.run_id.hex()[:16]}")
        if body.fold != fold_version():
            raise MalformedError("another version of barnraise made it")
        if body.events > journal.length:
            raise MalformedError(
                f"it has {body.events} events, the journal {journal.length}: an older copy of the journal"
            )
        if journal.event_hash(body.events - 1) != body.last_event:
            raise MalformedError(f"its event {body.events - 1} is not the journal's")
        if body.size > most:
            return None
        state = decode_state(body.state)
        try:
            ledger = MerkleLog.resumed(body.size, body.tail)
        except ValueError as error:
            raise MalformedError(str(error)) from error
        if ledger.root() != body.root or state.run_id != self.run_id:
            raise MalformedError("its parts do not belong together")
        return Fold(state, ledger, body.events)


def _read(path: Path) -> _Body:
    data = path.read_bytes()
    start = len(MAGIC) + _DIGEST
    if not data.startswith(MAGIC) or hashlib.sha256(data[start:]).digest() != data[len(MAGIC) : start]:
        raise MalformedError("it is damaged")
    return wire.decode(data[start:], _Body)


def take_snapshot(
    journal: Journal, snapshots: Snapshots, public: LogFolder, max_lag: int, least: int = 1
) -> int | None:
    """Fold what was published of the ledger, on from the newest snapshot, and write it as a new one.

    Blocking; reads only what is durable, so it may run beside a coordinator, in another process.

    Args:
        journal: the run's, which may be open for reading only.
        public: ``RUN/log``; the snapshot ends with the last entry that its checkpoint covers.
        max_lag: from the run spec.
        least: for fewer new ledger entries than this, none is made.

    Returns:
        The number of events it covers; None: there is nothing new that is worth it.

    Raises:
        StorageError: the disk refused.
        RunFolderError: the journal is damaged, or does not lead to what was published.
    """
    head = public.head
    if head is None:
        return None
    fold = snapshots.newest(journal, head.size)
    if head.size - (0 if fold is None else len(fold.ledger)) < max(1, least):
        return None
    fold = fold or Fold.empty(max_lag)
    for event in journal.events(fold.events):
        try:
            advance(fold.state, fold.ledger, event)
        except EventError as error:
            raise RunFolderError(f"{journal.path}: event {fold.events} does not follow ({error})") from error
        fold.events += 1
        if len(fold.ledger) == head.size:
            break
    if len(fold.ledger) != head.size or fold.ledger.root() != head.root:
        raise RunFolderError(
            f"{journal.path} does not lead to the {head.size} entries that {public.folder} was published with"
        )
    snapshots.write(fold, journal)
    return fold.events

"""Proof of one entry under a checkpoint, as c2sp.org/tlog-proof lays it down, checked offline.

::

    c2sp.org/tlog-proof@v1
    extra <base64>
    index <number>
    <base64 of each sibling hash, leaf to root>

    <the checkpoint as it was published, cosignatures and all>

What such a proof is about comes from elsewhere, by the format; ours bring it along in
``extra``, which nobody has to believe: the entry's hash is what is proven, and the signed
run spec's hash is in the log's name. Any tool that knows the log's key and the entry's
bytes can check the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from barnraise.protocol.cosignature import WitnessKey, cosigned_at, node_cosignatures
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.ledger_entries import LedgerEntry, decode_entry
from barnraise.protocol.merkle import HASH_BYTES, verify_inclusion
from barnraise.protocol.messages import Message, Signed
from barnraise.protocol.notes import (
    MAX_NOTE,
    decode_base64,
    encode_base64,
    parse_decimal,
    parse_note,
)
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.tlog_checkpoint import Head, log_key, open_checkpoint
from barnraise.protocol.wire import decode, encode

FIRST = "c2sp.org/tlog-proof@v1"
MAX_PATH = 63  # hashes
MAX_EXTRA = 2 * 1024 * 1024  # characters of base64: a run spec may have a megabyte
MAX_TLOG_PROOF = MAX_EXTRA + MAX_NOTE + 64 * 64  # bytes


@dataclass(frozen=True)
class TlogProof:
    """A proof as it was read: nothing in it is to be believed yet. ``note``: the signed checkpoint."""

    index: int
    path: tuple[bytes, ...]
    note: bytes
    extra: bytes = b""

    def encode(self) -> bytes:
        """Return the proof's file."""
        extra = f"extra {encode_base64(self.extra)}\n" if self.extra else ""
        path = "".join(f"{encode_base64(item)}\n" for item in self.path)
        return f"{FIRST}\n{extra}index {self.index}\n{path}\n".encode() + self.note


class LoggedEntry(Message, frozen=True):
    """What stands in ``extra``: the entry's bytes, and the signed spec of its run."""

    entry: Annotated[bytes, Meta(min_length=1, max_length=4096)]
    run_spec: Signed


@dataclass(frozen=True)
class ProvenEntry:
    """What a proof proves: the key that the run spec names signed ``head`` over a log with this entry.

    ``cosigned``: nodes (and other witnesses whose keys were given) by name, and when they say that
    they saw it (s since the Unix epoch); ``unknown``: signature lines of others, not checked.
    """

    index: int
    entry: LedgerEntry
    head: Head
    run_id: bytes
    operator: bytes
    cosigned: Mapping[str, int]
    unknown: int


def parse_tlog_proof(data: bytes) -> TlogProof:
    """Read a proof without believing it.

    Raises:
        MalformedError: it is none, or larger than ``MAX_TLOG_PROOF`` bytes.
    """
    if len(data) > MAX_TLOG_PROOF:
        raise MalformedError(f"no such proof has more than {MAX_TLOG_PROOF} bytes")
    head, blank, note = data.partition(b"\n\n")
    try:
        lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise MalformedError("this is no tlog-proof: its first lines are not ASCII") from None
    if lines.pop(0) != FIRST or not blank:
        raise MalformedError(f"this is no tlog-proof: it does not begin with {FIRST}, or has no checkpoint")
    extra = b""
    if lines and lines[0].startswith("extra "):
        extra = decode_base64(lines.pop(0).removeprefix("extra "), "the proof's extra data")
    if not lines or not lines[0].startswith("index "):
        raise MalformedError("the proof names no index")
    index = parse_decimal(lines.pop(0).removeprefix("index "), "the proof's index")
    if len(lines) > MAX_PATH:
        raise MalformedError(f"the proof has more than {MAX_PATH} hashes")
    path = tuple(decode_base64(line[:64], "a hash of the proof") for line in lines)
    if any(len(item) != HASH_BYTES for item in path) or any(len(line) > 64 for line in lines):
        raise MalformedError(f"a hash of the proof has not {HASH_BYTES} bytes")
    return TlogProof(index, path, note, extra)


def tlog_proof_of(
    index: int, entry: bytes, path: Sequence[bytes], note: bytes, run_spec: Signed
) -> TlogProof:
    """Put a proof together: ``entry`` (its bytes) has ``index`` below the checkpoint in ``note``.

    Raises:
        MalformedError, SignatureError: the checkpoint is not that run's, or the path does not lead to it.
    """
    proof = TlogProof(index, tuple(path), note, encode(LoggedEntry(entry=entry, run_spec=run_spec)))
    check_tlog_proof(proof)
    return proof


def check_tlog_proof(proof: TlogProof, witnesses: Sequence[WitnessKey] = ()) -> ProvenEntry:
    """Check a proof offline. Compare the result's ``run_id`` with the one known from elsewhere.

    Cosignatures of nodes are checked by the keys in their names, those of ``witnesses`` by theirs.

    Raises:
        MalformedError: it brings no entry and spec along, or the entry is not where it says.
        SignatureError: the spec is not signed, the checkpoint not by the key that it names, or a witness's
            line is not its own.
    """
    if not proof.extra:
        raise MalformedError(
            "the proof does not bring along what it is about: it was not made by `barnraise ledger prove`"
        )
    about = decode(proof.extra, LoggedEntry)
    run, operator = run_id(about.run_spec), open_run_spec(about.run_spec).operator
    head = open_checkpoint(proof.note, log_key(run, operator), tuple(witnesses))
    if not verify_inclusion(about.entry, proof.index, head.size, proof.path, head.root):
        raise MalformedError(
            f"the entry is not number {proof.index} of the {head.size} entries that were signed"
        )
    signatures = parse_note(proof.note).signatures
    cosigned = node_cosignatures(head.checkpoint.text, signatures)
    given = {(key.name, key.key_id) for key in witnesses}
    for item in signatures:
        if (item.name, item.key_id) in given:
            cosigned.setdefault(item.name, cosigned_at(item))
    unknown = len({item.name for item in signatures} - set(cosigned) - {head.checkpoint.origin})
    return ProvenEntry(proof.index, decode_entry(about.entry), head, run, operator, cosigned, unknown)

"""Proof of one ledger entry in one small file, checked without the ledger, the run or a network.

JSON, so that it can be mailed and read: the entry's bytes, its index, the sibling hashes
up to the root (RFC 9162, section 2.1.3), the signed tree head of that root, and the signed
run spec, which names the key that may sign tree heads and whose hash is the run's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.ledger_entries import LedgerEntry, decode_entry, encode_entry
from barnraise.protocol.merkle import MerkleLog, verify_inclusion
from barnraise.protocol.messages import Signed, TreeHead
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.wire import printable

FORMAT = "barnraise-ledger-proof-1"
MAX_PROOF_FILE = 3 * 1024 * 1024  # a run spec may have a megabyte, and is in hex here

_Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
_Hex64 = Annotated[str, Meta(pattern="^[0-9a-f]{128}$", max_length=128)]
_Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=2 * 1024 * 1024)]


class _SignedHex(Struct, frozen=True, forbid_unknown_fields=True):
    payload: _Hex
    signer: _Hex32
    signature: _Hex64


class _ProofFile(Struct, frozen=True, forbid_unknown_fields=True):
    format: Annotated[str, Meta(max_length=64)]
    index: Annotated[int, Meta(ge=0, le=2**53)]
    entry: Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=8 * 1024)]
    path: Annotated[tuple[_Hex32, ...], Meta(max_length=64)]
    tree_head: _SignedHex
    run_spec: _SignedHex


@dataclass(frozen=True)
class LedgerProof:
    """A proof, not yet believed: ``entry`` (its bytes) is number ``index`` below ``tree_head``."""

    index: int
    entry: bytes
    path: tuple[bytes, ...]
    tree_head: Signed
    run_spec: Signed


@dataclass(frozen=True)
class Proven:
    """What a proof proves: ``operator`` signed ``head`` over a ledger with this entry at ``index``."""

    index: int
    entry: LedgerEntry
    head: TreeHead
    run_id: bytes
    operator: bytes


def make_proof(
    entries: Iterable[LedgerEntry], heads: Sequence[Signed], run_spec: Signed, index: int
) -> LedgerProof:
    """Prove entry ``index`` under the largest tree head that the entries bear out. Reads all of them.

    Raises:
        IndexError: there is no such entry.
        MalformedError, SignatureError: no tree head covers it, or none fits the entries.
    """
    spec = open_run_spec(run_spec)
    log, found = MerkleLog(), b""
    for number, entry in enumerate(entries):
        data = encode_entry(entry)
        log.append(data)
        if number == index:
            found = data
    if not 0 <= index < len(log):
        raise IndexError(f"the ledger has {len(log)} entries: there is no entry {index}")
    for signed in reversed(heads):
        head = open_signed(signed, TreeHead, spec.operator)
        if index < head.size <= len(log) and head.root == log.root(head.size):
            return LedgerProof(index, found, log.inclusion_proof(index, head.size), signed, run_spec)
    raise MalformedError(
        f"no tree head of this ledger covers entry {index} and fits the entries: "
        "see what `barnraise ledger verify` says of it"
    )


def check_proof(proof: LedgerProof) -> Proven:
    """Check a proof offline. Compare the result's ``run_id`` with the one known from elsewhere.

    Raises:
        SignatureError: spec or tree head is not signed as it must be.
        MalformedError: it is of two runs, or the entry is not in the log that was signed.
    """
    spec = open_run_spec(proof.run_spec)
    run_id = run_id_of(proof.run_spec)
    head = open_signed(proof.tree_head, TreeHead, spec.operator)
    if head.run_id != run_id:
        raise MalformedError("the tree head belongs to another run than the run spec")
    if not verify_inclusion(proof.entry, proof.index, head.size, proof.path, head.root):
        raise MalformedError(
            f"the entry is not number {proof.index} of the {head.size} entries that were signed"
        )
    return Proven(proof.index, decode_entry(proof.entry), head, run_id, spec.operator)


def encode_proof(proof: LedgerProof) -> bytes:
    """A proof as a file: JSON, one line per field."""
    file = _ProofFile(
        format=FORMAT,
        index=proof.index,
        entry=proof.entry.hex(),
        path=tuple(item.hex() for item in proof.path),
        tree_head=_in_hex(proof.tree_head),
        run_spec=_in_hex(proof.run_spec),
    )
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def decode_proof(data: bytes) -> LedgerProof:
    """Inverse of ``encode_proof``; nothing in it is believed yet.

    Raises:
        MalformedError: no such file, or larger than ``MAX_PROOF_FILE`` bytes.
    """
    if len(data) > MAX_PROOF_FILE:
        raise MalformedError(f"no proof of a ledger entry has more than {MAX_PROOF_FILE} bytes")
    try:
        file = msgspec.json.decode(data, type=_ProofFile)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError(f"this is no proof of a ledger entry: {printable(str(error))}") from None
    if file.format != FORMAT:
        raise MalformedError(f"a proof of another format, {printable(file.format)}; this reads {FORMAT}")
    return LedgerProof(
        index=file.index,
        entry=bytes.fromhex(file.entry),
        path=tuple(bytes.fromhex(item) for item in file.path),
        tree_head=_from_hex(file.tree_head),
        run_spec=_from_hex(file.run_spec),
    )


def _in_hex(signed: Signed) -> _SignedHex:
    return _SignedHex(signed.payload.hex(), signed.signer.hex(), signed.signature.hex())


def _from_hex(signed: _SignedHex) -> Signed:
    return Signed(
        payload=bytes.fromhex(signed.payload),
        signer=bytes.fromhex(signed.signer),
        signature=bytes.fromhex(signed.signature),
    )

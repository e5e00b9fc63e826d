"""Cosignatures: a witness's word that it saw a log only ever grow, as c2sp.org/tlog-cosignature v1 lays down.

What is signed is two lines (``cosignature/v1`` and ``time <seconds>``) and the
checkpoint's text. A node's name as a witness is ``barnraise/node/<peer id>``, and its
key is in the peer id: the name alone says how to check its signatures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.identity import Identity, public_key_of, verify
from barnraise.protocol.notes import NoteSignature, check_name, key_id
from barnraise.protocol.tlog_checkpoint import parse_checkpoint

COSIGNATURE = 0x04  # signature type: timestamped, over a checkpoint
_NODE = "barnraise/node/"
_TIME_BYTES, _BYTES = 8, 72


@dataclass(frozen=True)
class WitnessKey:
    """A witness's key under its name (signature type 0x04). ``public_key``: 32 bytes (RFC 8032)."""

    name: str
    public_key: bytes

    @property
    def key_id(self) -> bytes:
        """The first 4 bytes of SHA-256(name, newline, 0x04, key)."""
        return key_id(self.name, COSIGNATURE, self.public_key)

    def verifies(self, text: str, signature: bytes) -> bool:
        """Whether ``signature`` (8 bytes of time, 64 of Ed25519) is this witness's of a checkpoint's text."""
        if len(signature) != _BYTES:
            return False
        seconds = int.from_bytes(signature[:_TIME_BYTES], "big")
        if seconds >= 2**63:
            return False
        return verify(self.public_key, _message(text, seconds), signature[_TIME_BYTES:])


def witness_name(peer_id: str) -> str:
    """Return what a node is called as a witness."""
    return _NODE + peer_id


def node_witness(name: str) -> WitnessKey | None:
    """Return the key that is in a node's name as a witness; None: it is no node's name."""
    if not name.startswith(_NODE):
        return None
    try:
        return WitnessKey(name, public_key_of(name.removeprefix(_NODE)))
    except MalformedError:
        return None


def cosign(text: str, name: str, identity: Identity, now_s: int) -> NoteSignature:
    """Cosign a checkpoint's text. The witness must have made sure, and durably noted, what it says by this.

    Raises:
        MalformedError: not a checkpoint's text, or not a key's name.
    """
    parse_checkpoint(text)
    check_name(name)
    signature = now_s.to_bytes(_TIME_BYTES, "big") + identity.sign(_message(text, now_s))
    return NoteSignature(name, WitnessKey(name, identity.public_key).key_id, signature)


def cosigned_at(signature: NoteSignature) -> int:
    """Return when a cosignature says it was made, in seconds since the Unix epoch. Check it first."""
    return int.from_bytes(signature.signature[:_TIME_BYTES], "big")


def node_cosignatures(text: str, signatures: Iterable[NoteSignature]) -> dict[str, int]:
    """Return the nodes whose cosignatures of a checkpoint's text are right, and when they made them (s).

    By their names (``witness_name``). What is not a node's, or is wrong, is left out.
    """
    found: dict[str, int] = {}
    for item in signatures:
        key = node_witness(item.name)
        if key is not None and item.key_id == key.key_id and key.verifies(text, item.signature):
            found.setdefault(item.name, cosigned_at(item))
    return found


def _message(text: str, seconds: int) -> bytes:
    return f"cosignature/v1\ntime {seconds}\n{text}".encode()

"""Signed notes: text with signature lines, as c2sp.org/signed-note lays them down.

What outsiders read of a run is signed in this form, so that tools which know nothing
of Barnraise can check it. A note's text holds no control character but newlines, and
no signed message of ``barnraise.protocol.envelope`` is without one (the zero byte after
its domain): a signature of the one can never pass for one of the other, although the
same key makes both.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.identity import Identity, verify
from barnraise.protocol.wire import printable

MAX_NOTE = 64 * 1024  # bytes
MAX_SIGNATURES = 100  # lines; at least 16 must be accepted, Go's implementation takes as many as this
MAX_NAME = 255  # bytes of UTF-8
MAX_SIGNATURE = 8 * 1024  # bytes: post-quantum signatures of strangers may stand in a note
ED25519 = 0x01  # signature type: Ed25519 over the text
_DASH = "\N{EM DASH} "


@dataclass(frozen=True)
class NoteSignature:
    """One signature line. ``key_id``: 4 bytes; ``signature``: at least one byte, as its type lays down."""

    name: str
    key_id: bytes
    signature: bytes

    @property
    def line(self) -> str:
        """The line as it stands in a note, with its newline."""
        return f"{_DASH}{self.name} {encode_base64(self.key_id + self.signature)}\n"


@dataclass(frozen=True)
class Note:
    """A note as it was read: nothing in it is to be believed before ``open_note`` has checked a signature."""

    text: str
    signatures: tuple[NoteSignature, ...]

    def encode(self) -> bytes:
        """Return the note's bytes."""
        return f"{self.text}\n{''.join(item.line for item in self.signatures)}".encode()


class NoteKey(Protocol):
    """A public key under a name, for one type of signature."""

    @property
    def name(self) -> str:
        """The key's name."""

    @property
    def key_id(self) -> bytes:
        """Four bytes that follow from name, type and key."""

    def verifies(self, text: str, signature: bytes) -> bool:
        """Whether ``signature`` is this key's of a note's text. Never raises on bad bytes."""


@dataclass(frozen=True)
class Ed25519Key:
    """A key that signs notes as they are (signature type 0x01). ``public_key``: 32 bytes (RFC 8032)."""

    name: str
    public_key: bytes

    @property
    def key_id(self) -> bytes:
        """The first 4 bytes of SHA-256(name, newline, 0x01, key)."""
        return key_id(self.name, ED25519, self.public_key)

    def verifies(self, text: str, signature: bytes) -> bool:
        """Whether ``signature`` (64 bytes) is this key's of ``text``."""
        return verify(self.public_key, text.encode(), signature)


_NO_NAME = re.compile(r"[\s\x00-\x1f+]")  # ``\s`` is what ``str.isspace`` is


def key_id(name: str, kind: int, public_key: bytes) -> bytes:
    """Return the 4-byte id of a key under a name: a hint which key to try, not a proof of anything."""
    return hashlib.sha256(name.encode() + b"\n" + bytes((kind,)) + public_key).digest()[:4]


def check_name(name: str) -> None:
    """Refuse what may not name a key.

    Raises:
        MalformedError: empty, too long, or with spaces, control characters or a plus sign.
    """
    if not name or len(name.encode()) > MAX_NAME:
        raise MalformedError(f"a key's name has 1 to {MAX_NAME} bytes")
    if _NO_NAME.search(name):
        raise MalformedError(
            f"{printable(name)} names no key: spaces, control characters and + are not allowed"
        )


def format_vkey(name: str, kind: int, public_key: bytes) -> str:
    """Return a verifier key as people pass it on: ``name+id+base64(type, key)``.

    Raises:
        MalformedError: the name cannot be that of a key.
    """
    check_name(name)
    return f"{name}+{key_id(name, kind, public_key).hex()}+{encode_base64(bytes((kind,)) + public_key)}"


def parse_vkey(text: str) -> tuple[str, int, bytes]:
    """Read a verifier key: its name, type of signature, and public key (not empty; 32 bytes for Ed25519).

    Raises:
        MalformedError: it is none, or its id is not that of its key.
    """
    parts = text.split("+", 2)
    if len(text) > 4096 or len(parts) != 3:
        raise MalformedError("not a verifier key (NAME+8 hex digits+base64): copy the whole line")
    name, digits, data = parts
    check_name(name)
    key = decode_base64(data, "the verifier key")
    if len(key) < 2:
        raise MalformedError("the verifier key holds no key: copy the whole line")
    if digits != key_id(name, key[0], key[1:]).hex():
        raise MalformedError("the verifier key's id is not that of its name and key: it was altered or cut")
    return name, key[0], key[1:]


def check_text(text: str) -> None:
    """Refuse what cannot be a note's text.

    Raises:
        MalformedError: empty, not ended by a newline, or with control characters or surrogates.
    """
    if not text.endswith("\n"):
        raise MalformedError("a note's text ends with a newline")
    if any((char < " " and char != "\n") or "\ud800" <= char <= "\udfff" for char in text):
        raise MalformedError("a note's text holds no control characters but newlines, and no surrogates")


def sign_note(text: str, name: str, identity: Identity) -> NoteSignature:
    """Sign a note's text under a name (signature type 0x01). Deterministic.

    Raises:
        MalformedError: not a note's text, or not a key's name.
    """
    check_text(text)
    check_name(name)
    key = Ed25519Key(name, identity.public_key)
    return NoteSignature(name, key.key_id, identity.sign(text.encode()))


def parse_note(data: bytes) -> Note:
    """Read a note without believing it.

    Raises:
        MalformedError: too long, not UTF-8, control characters, or its signature lines are not such.
    """
    if len(data) > MAX_NOTE:
        raise MalformedError(f"a note of {len(data)} bytes; at most {MAX_NOTE} are accepted")
    try:
        whole = data.decode()
    except UnicodeDecodeError:
        raise MalformedError("the note is not UTF-8") from None
    end = whole.rfind("\n\n")
    if end < 0:
        raise MalformedError("the note has no signatures: it must end with a blank line and signature lines")
    text, lines = whole[: end + 1], whole[end + 2 :]
    check_text(text)
    return Note(text, parse_signatures(lines))


def parse_signatures(lines: str) -> tuple[NoteSignature, ...]:
    """Read signature lines, each with its newline; at least one, at most ``MAX_SIGNATURES``.

    Raises:
        MalformedError: they are no such lines.
    """
    if not lines.endswith("\n"):
        raise MalformedError("signature lines end with a newline each")
    if lines.count("\n") > MAX_SIGNATURES:
        raise MalformedError(f"more than {MAX_SIGNATURES} signature lines")
    found = []
    for line in lines[:-1].split("\n"):
        name, space, data = line.removeprefix(_DASH).partition(" ")
        if not line.startswith(_DASH) or not space or len(data) > 2 * MAX_SIGNATURE:
            raise MalformedError("a signature line is not of the form: em dash, name, base64")
        check_name(name)
        blob = decode_base64(data, "a signature")
        if not 4 < len(blob) <= 4 + MAX_SIGNATURE:
            raise MalformedError("a signature line holds no signature, or one too long")
        found.append(NoteSignature(name, blob[:4], blob[4:]))
    return tuple(found)


def open_note(data: bytes, keys: Sequence[NoteKey]) -> tuple[Note, tuple[NoteSignature, ...]]:
    """Read a note and check its signatures: the note, and the first line of each of ``keys`` that signed it.

    Lines of other keys are ignored (they stay in the note).

    Raises:
        MalformedError: it is no note.
        SignatureError: a line of one of ``keys`` is not that key's signature of it, or none of them signed.
    """
    note = parse_note(data)
    known = {(key.name, key.key_id): key for key in keys}
    verified: dict[tuple[str, bytes], NoteSignature] = {}
    for item in note.signatures:
        place = item.name, item.key_id
        key = known.get(place)
        if key is None or place in verified:
            continue
        if not key.verifies(note.text, item.signature):
            raise SignatureError(
                f"the signature of {printable(item.name)} is not one of this note: it was altered, or forged"
            )
        verified[place] = item
    if not verified:
        raise SignatureError("the note is signed by none of the keys that may sign it")
    return note, tuple(verified.values())


def encode_base64(data: bytes) -> str:
    """Return standard base64 with padding (RFC 4648, section 4)."""
    return base64.b64encode(data).decode("ascii")


def decode_base64(text: str, what: str) -> bytes:
    """Read standard base64 in its one canonical form. The caller bounds its length.

    Raises:
        MalformedError: other characters, wrong padding, or bits left over; the text begins with ``what``.
    """
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        data = b""
    if encode_base64(data) != text:
        raise MalformedError(f"{what} is not base64 in its canonical form")
    return data


def parse_decimal(text: str, what: str, most: int = 2**63 - 1) -> int:
    """Read a decimal number without leading zeroes, 0 to ``most``.

    Raises:
        MalformedError: it is none; the text begins with ``what``.
    """
    if (
        not 0 < len(text) <= 19
        or not text.isascii()
        or not text.isdigit()
        or (text[0] == "0" and text != "0")
    ):
        raise MalformedError(f"{what} is not a decimal number in its shortest form")
    number = int(text)
    if number > most:
        raise MalformedError(f"{what} is {number}; at most {most} is accepted")
    return number

"""Checkpoints: the head of a log as a signed note, as c2sp.org/tlog-checkpoint lays them down.

A run's log is called ``barnraise/run/<run id in hex>``. The run id is the hash of the
spec that names the operator's key, so the name alone says whose signature counts. Says
the same as the signed ``TreeHead`` of the same size, to tools that do not know that.
"""

from __future__ import annotations

from dataclasses import dataclass

from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.identity import Identity
from barnraise.protocol.merkle import HASH_BYTES
from barnraise.protocol.notes import (
    MAX_NAME,
    Ed25519Key,
    Note,
    NoteKey,
    decode_base64,
    encode_base64,
    open_note,
    parse_decimal,
    sign_note,
)

MAX_EXTENSIONS = 16  # lines
MAX_LINE = 1024  # characters of an extension line


@dataclass(frozen=True)
class Checkpoint:
    """What it says: the ``size`` entries of log ``origin`` have the RFC 6962 root ``root`` (32 bytes)."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The note's text, which is what is signed."""
        lines = (self.origin, str(self.size), encode_base64(self.root), *self.extensions)
        return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True)
class Head:
    """A checkpoint whose log's signature was checked, with the note that carries it (as bytes)."""

    checkpoint: Checkpoint
    note: bytes

    @property
    def size(self) -> int:
        """Entries in the log."""
        return self.checkpoint.size

    @property
    def root(self) -> bytes:
        """The log's root, 32 bytes."""
        return self.checkpoint.root


def origin_of(run_id: bytes) -> str:
    """Return what a run's log is called, as its origin line and as its key's name."""
    return f"barnraise/run/{run_id.hex()}"


def log_key(run_id: bytes, operator: bytes) -> Ed25519Key:
    """Return the key that must have signed a run's checkpoints; ``operator`` is its 32 bytes."""
    return Ed25519Key(origin_of(run_id), operator)


def parse_checkpoint(text: str) -> Checkpoint:
    """Read a note's text as a checkpoint.

    Raises:
        MalformedError: it is none.
    """
    lines = text.split("\n")
    if lines.pop() or len(lines) < 3 or not all(lines):
        raise MalformedError("not a checkpoint: it has at least three lines, and none that is empty")
    origin, size, root, *extensions = lines
    if len(origin.encode()) > MAX_NAME:
        raise MalformedError(f"the checkpoint's origin has more than {MAX_NAME} bytes")
    if len(extensions) > MAX_EXTENSIONS or any(len(line) > MAX_LINE for line in extensions):
        raise MalformedError(
            f"the checkpoint has more than {MAX_EXTENSIONS} extension lines, or longer ones than {MAX_LINE}"
        )
    digest = decode_base64(root[:64], "the checkpoint's root")
    if len(digest) != HASH_BYTES or len(root) > 64:
        raise MalformedError("the checkpoint's root is not a SHA-256 hash")
    return Checkpoint(origin, parse_decimal(size, "the checkpoint's size"), digest, tuple(extensions))


def sign_checkpoint(checkpoint: Checkpoint, identity: Identity) -> Note:
    """Sign as the log of that origin. Deterministic: signed again, it is the same note.

    The caller answers for never signing two checkpoints that no log can have both.

    Raises:
        MalformedError: the origin can name no key, or an extension line is no line.
    """
    if parse_checkpoint(checkpoint.text) != checkpoint:
        raise MalformedError("the checkpoint's lines cannot be read back as they were written")
    return Note(checkpoint.text, (sign_note(checkpoint.text, checkpoint.origin, identity),))


def open_checkpoint(data: bytes, key: NoteKey, others: tuple[NoteKey, ...] = ()) -> Head:
    """Check a note's signature by the log's key, and read it as a checkpoint of the log of that name.

    Signatures of ``others`` are checked too, if they are there.

    Raises:
        MalformedError: not a checkpoint.
        SignatureError: not signed by ``key``, or it is another log's.
    """
    note, verified = open_note(data, (key, *others))
    if not any(item.name == key.name and item.key_id == key.key_id for item in verified):
        raise SignatureError(f"the checkpoint is not signed by the key of {key.name}")
    checkpoint = parse_checkpoint(note.text)
    if checkpoint.origin != key.name:
        raise SignatureError(f"the checkpoint is of another log than {key.name}")
    return Head(checkpoint, data)

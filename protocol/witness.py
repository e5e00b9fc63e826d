"""What a witness does, sans-I/O: it lets a log only ever grow, and keeps the proof where one did not.

``judge`` compares two heads of one log. A log that shows different entries to
different people has signed both; where the sizes differ, hashes of the larger one
show which root its beginning really has, and with the two signatures that convicts
the log before anybody (``Conflict``). Without such hashes nothing is proven, and
nothing is cosigned either.

``add_checkpoint`` answers requests of c2sp.org/tlog-witness. Its caller makes the head
that it is told to keep durable, and only then signs; between the two no other request
may be answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.merkle import EMPTY_ROOT, HASH_BYTES, proven_roots
from barnraise.protocol.notes import (
    MAX_NOTE,
    Ed25519Key,
    decode_base64,
    encode_base64,
    parse_decimal,
    parse_note,
)
from barnraise.protocol.tlog_checkpoint import Head, open_checkpoint, parse_checkpoint

MAX_PROOF = 63  # hashes
MAX_REQUEST = MAX_NOTE + 64 + MAX_PROOF * 45  # bytes

Grown = Literal["grown", "same"]


@dataclass(frozen=True)
class Unproven:
    """Two heads of one log without a proof that either way. Honest logs can give one at any time."""

    smaller: Head
    larger: Head


@dataclass(frozen=True)
class Conflict:
    """Two signed heads that no log can have both.

    ``proof`` is a consistency proof that gives ``larger``'s root, and with it ``root`` for the
    first ``smaller.size`` entries, which is not ``smaller``'s. Empty where the sizes are equal.
    """

    smaller: Head
    larger: Head
    root: bytes
    proof: tuple[bytes, ...]


def judge(
    one: Head, other: Head, proof: Sequence[bytes] = (), root: bytes | None = None
) -> Grown | Unproven | Conflict:
    """Compare two heads of one log, whose signatures were checked, by a proof that nobody answers for.

    ``root`` (32 bytes) is what the source of ``proof`` says that the larger log's beginning has; a
    proof from a size that is no power of two says so itself. Needs the heads' origins to be the same.
    """
    smaller, larger = sorted((one, other), key=lambda head: head.size)
    if smaller.size == larger.size:
        if smaller.root == larger.root:
            return "same"
        return Conflict(one, other, other.root, ())
    if smaller.size == 0:
        return "grown" if smaller.root == EMPTY_ROOT else Conflict(smaller, larger, EMPTY_ROOT, ())
    roots = proven_roots(smaller.size, larger.size, smaller.root if root is None else root, proof)
    if roots is None or roots[1] != larger.root:
        return Unproven(smaller, larger)
    return "grown" if roots[0] == smaller.root else Conflict(smaller, larger, roots[0], tuple(proof))


@dataclass(frozen=True)
class Answer:
    """What a witness answers: an HTTP status and body, and what it must do first.

    Attributes:
        keep: make this head durable as the last one, then cosign it: the body is the signature's line.
        trouble: the log's two heads that do not go together; a ``Conflict`` is proof against it.
    """

    status: int
    body: str = ""
    content_type: str = "text/plain; charset=utf-8"
    keep: Head | None = None
    trouble: Conflict | Unproven | None = None


def add_checkpoint(request: bytes, key: Ed25519Key, last: Head | None) -> Answer:
    """Judge an ``add-checkpoint`` request for the one log that ``key`` names and signs.

    ``last``: the head that was cosigned last, None if none ever was. Never raises on bad requests.
    """
    try:
        old, proof, note = parse_request(request)
        origin = parse_checkpoint(parse_note(note).text).origin
    except MalformedError as error:
        return Answer(400, f"{error}\n")
    if origin != key.name:
        return Answer(404, "this witness does not know that log\n")
    try:
        head = open_checkpoint(note, key)
    except (SignatureError, MalformedError) as error:
        return Answer(403, f"{error}\n")
    if old > head.size:
        return Answer(400, "the old size is larger than the checkpoint's\n")
    before = 0 if last is None else last.size
    if old != before:
        return Answer(409, f"{before}\n", "text/x.tlog.size")
    if proof and before in (0, head.size):
        return Answer(422, "a proof from size 0, or between equal sizes, is empty\n")
    if last is None:
        if head.size == 0 and head.root != EMPTY_ROOT:
            return Answer(422, "that is not the root of an empty log\n")
        return Answer(200, keep=head)
    verdict = judge(last, head, proof)
    if isinstance(verdict, str):
        return Answer(200, keep=head)
    if head.size == before:
        return Answer(409, f"{before}\n", "text/x.tlog.size", trouble=verdict)
    return Answer(422, "the proof does not show that the log only grew\n", trouble=verdict)


def format_request(old: int, proof: Sequence[bytes], note: bytes) -> bytes:
    """Return the body of an ``add-checkpoint`` request: from which size, the proof, the signed checkpoint."""
    lines = "".join(f"{encode_base64(item)}\n" for item in proof)
    return f"old {old}\n{lines}\n".encode() + note


def parse_request(data: bytes) -> tuple[int, tuple[bytes, ...], bytes]:
    """Read the body of an ``add-checkpoint`` request: old size, proof, and the note as it came.

    Raises:
        MalformedError: it is none.
    """
    if len(data) > MAX_REQUEST:
        raise MalformedError(f"the request has {len(data)} bytes; at most {MAX_REQUEST} are accepted")
    head, blank, note = data.partition(b"\n\n")
    try:
        first, *lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise MalformedError("the request does not begin with an old size and a proof") from None
    if not blank or not first.startswith("old "):
        raise MalformedError(
            "the request does not begin with an old size and end its proof with a blank line"
        )
    if len(lines) > MAX_PROOF:
        raise MalformedError(f"the proof has more than {MAX_PROOF} hashes")
    return parse_decimal(first.removeprefix("old "), "the old size"), _hashes(lines), note


def _hashes(lines: Sequence[str]) -> tuple[bytes, ...]:
    found = tuple(decode_base64(line[:64], "a hash of the proof") for line in lines)
    if any(len(item) != HASH_BYTES for item in found):
        raise MalformedError("a hash of the proof has not 32 bytes")
    return found

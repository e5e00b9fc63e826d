"""Evidence of a split view: two heads that one log signed and cannot have both, in one small file.

JSON, so that it can be mailed and read. Who has it needs nobody's word: both checkpoints
carry the log's signature, the consistency proof leads to the larger one's root, and the
signed run spec, where it is there, shows that the key is the run's operator's. The two
notes carry the log's signature alone, so that whoever finds the same two heads writes
the same file.

``Accusations`` is how it is taken from peers: believed once, whoever it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError
from barnraise.protocol.log_messages import MAX_EVIDENCE
from barnraise.protocol.merkle import HASH_BYTES
from barnraise.protocol.messages import Signed
from barnraise.protocol.notes import (
    ED25519,
    MAX_NOTE,
    Ed25519Key,
    Note,
    decode_base64,
    encode_base64,
    format_vkey,
    parse_note,
    parse_vkey,
)
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.tlog_checkpoint import Head, log_key, open_checkpoint
from barnraise.protocol.wire import printable
from barnraise.protocol.witness import MAX_PROOF, Conflict, Unproven, judge

FORMAT = "barnraise split view 1"
MAX_EVIDENCE_FILE = MAX_EVIDENCE + 3 * 1024 * 1024  # with one, in hex
DEAF_S = 3600.0  # to a peer that handed in what proves nothing
_MOST_LIARS = 4096

_Note = Annotated[str, Meta(max_length=MAX_NOTE)]
_Hash = Annotated[str, Meta(max_length=64)]
_Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=2 * 1024 * 1024)]


class _Spec(Struct, frozen=True):
    payload: _Hex
    signer: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    signature: Annotated[str, Meta(pattern="^[0-9a-f]{128}$", max_length=128)]


class _File(Struct, frozen=True):
    format: Annotated[str, Meta(max_length=64)]
    log: Annotated[str, Meta(max_length=4096)]
    smaller: _Note
    larger: _Note
    root: _Hash | None = None
    proof: Annotated[tuple[_Hash, ...], Meta(max_length=MAX_PROOF)] | None = None
    says: Annotated[str, Meta(max_length=1000)] = ""
    run_spec: _Spec | None = None


@dataclass(frozen=True)
class Evidence:
    """Checked evidence against the log that ``key`` names and signs.

    ``trouble``: a ``Conflict`` is proof, ``Unproven`` a suspicion. ``run_spec``: the signed spec whose
    hash is in the key's name and that names this key as the operator's; None: the file has none, and
    whoever does not know the key from elsewhere must not believe that it is the run's.
    """

    key: Ed25519Key
    trouble: Conflict | Unproven
    run_spec: Signed | None = None


def encode_evidence(key: Ed25519Key, trouble: Conflict | Unproven, run_spec: Signed | None = None) -> bytes:
    """Return a file (JSON) from which anybody can check the charge against a log, offline."""
    proven = isinstance(trouble, Conflict)
    file = _File(
        format=FORMAT,
        log=format_vkey(key.name, ED25519, key.public_key),
        smaller=_bare(trouble.smaller, key),
        larger=_bare(trouble.larger, key),
        root=encode_base64(trouble.root) if isinstance(trouble, Conflict) else None,
        proof=tuple(map(encode_base64, trouble.proof)) if isinstance(trouble, Conflict) else None,
        says=(
            "Both checkpoints are signed by this log, and no log can have both."
            if proven
            else "Both checkpoints are signed by this log; a proof that the log only grew was not given."
        ),
        run_spec=None
        if run_spec is None
        else _Spec(run_spec.payload.hex(), run_spec.signer.hex(), run_spec.signature.hex()),
    )
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def check_evidence(data: bytes) -> Evidence:
    """Check a file of ``encode_evidence`` and say what it proves; compare the key with the one known.

    Raises:
        MalformedError: it is no such file, or proves nothing.
        SignatureError: a checkpoint in it is not signed by that log, or the run spec is not what it claims.
    """
    if len(data) > MAX_EVIDENCE_FILE:
        raise MalformedError(f"the evidence has {len(data)} bytes; at most {MAX_EVIDENCE_FILE} are accepted")
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError(f"the file is no evidence: {printable(str(error))}") from None
    if file.format != FORMAT:
        raise MalformedError("the file is no evidence of this version")
    name, kind, public_key = parse_vkey(file.log)
    if kind != ED25519 or len(public_key) != HASH_BYTES:
        raise MalformedError("the evidence has a key of another kind")
    proof = None if file.proof is None else tuple(_hash(item, "a hash of the proof") for item in file.proof)
    given = None if file.root is None else _hash(file.root, "the root")
    key = Ed25519Key(name, public_key)
    one, other = (open_checkpoint(note.encode(), key) for note in (file.smaller, file.larger))
    verdict = judge(one, other, proof or (), given)
    if isinstance(verdict, str) or (isinstance(verdict, Unproven) and proof is not None):
        raise MalformedError("the evidence proves nothing: these checkpoints can be of one log")
    return Evidence(key, verdict, None if file.run_spec is None else _spec(file.run_spec, key))


class Accusations:
    """Evidence against one log as peers hand it in. Sans-I/O; times are seconds of one monotonic clock.

    Nobody can flood with it: true evidence is only made with the log's own key, and one piece is
    enough, so that everything after the first costs nothing; and whoever hands in what proves
    nothing is not listened to for ``DEAF_S``, which makes each try cost a connection of a new key.
    """

    def __init__(self, key: Ed25519Key, believed: bool = False) -> None:
        self._key = key
        self.believed = believed
        self._deaf: dict[str, float] = {}  # peer: until when

    def hear(self, peer_id: str, data: bytes, now: float) -> Conflict | None:
        """Take evidence from a peer; the conflict, if it is proof and the first.

        Raises:
            MalformedError, SignatureError: it proves nothing against this log.
        """
        if self.believed:
            return None
        if now < self._deaf.get(peer_id, now):
            raise MalformedError("this peer handed in false evidence before, and is not listened to")
        try:
            if len(data) > MAX_EVIDENCE:
                raise MalformedError(f"evidence of {len(data)} bytes; at most {MAX_EVIDENCE} are accepted")
            found = check_evidence(data)
            if found.key != self._key or not isinstance(found.trouble, Conflict):
                raise MalformedError("it is no proof against this log")
        except BarnraiseError:
            self._deaf.pop(peer_id, None)
            self._deaf[peer_id] = now + DEAF_S
            while len(self._deaf) > _MOST_LIARS:
                del self._deaf[next(iter(self._deaf))]
            raise
        self.believed = True
        return found.trouble


def _bare(head: Head, key: Ed25519Key) -> str:
    """A head's note with the log's signature alone."""
    note = parse_note(head.note)
    own = [item for item in note.signatures if (item.name, item.key_id) == (key.name, key.key_id)]
    return Note(note.text, (own[0],)).encode().decode()


def _hash(text: str, what: str) -> bytes:
    found = decode_base64(text, what)
    if len(found) != HASH_BYTES:
        raise MalformedError(f"{what} has not {HASH_BYTES} bytes")
    return found


def _spec(file: _Spec, key: Ed25519Key) -> Signed:
    signed = Signed(
        payload=bytes.fromhex(file.payload),
        signer=bytes.fromhex(file.signer),
        signature=bytes.fromhex(file.signature),
    )
    if log_key(run_id(signed), open_run_spec(signed).operator) != key:
        raise SignatureError("the run spec in the evidence is another run's, or names another operator's key")
    return signed

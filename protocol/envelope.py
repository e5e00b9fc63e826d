"""Signed messages: a canonical payload, its signer, and a signature that names its kind.

The signed bytes are ``b"barnraise/1/" + type name + b"\\0" + payload`` (Ed25519,
RFC 8032). The domain keeps a signature of one kind of message from ever passing as
another; the canonical form keeps one signature from covering two readings.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

from barnraise.protocol import wire
from barnraise.protocol.errors import SignatureError
from barnraise.protocol.identity import Identity, fingerprint, verify
from barnraise.protocol.messages import Message, Signed

M = TypeVar("M", bound=Message)


def domain(type_: type[Message]) -> bytes:
    """Return the prefix that is signed together with a payload of ``type_``."""
    return b"barnraise/1/" + type_.__name__.encode("ascii") + b"\0"


def sign(payload: Message, identity: Identity) -> Signed:
    """Encode ``payload`` canonically and sign it."""
    data = wire.encode(payload)
    return Signed(
        payload=data,
        signer=identity.public_key,
        signature=identity.sign(domain(type(payload)) + data),
    )


def open_signed(signed: Signed, type_: type[M], signer: bytes | None) -> M:
    """Check signer and signature, then read the payload: nothing unsigned is ever parsed.

    ``signer`` is the public key that must have signed, or None where any key may
    (the caller then decides about ``signed.signer``).

    Raises:
        SignatureError: another signer, or the signature is not one of this payload as ``type_``.
        MalformedError: properly signed, but not a canonical ``type_``.
    """
    if signer is not None and signed.signer != signer:
        raise SignatureError(
            f"{type_.__name__} is signed by key {fingerprint(signed.signer)}, "
            f"not by {fingerprint(signer)} as expected"
        )
    if not verify(signed.signer, domain(type_) + signed.payload, signed.signature):
        raise SignatureError(
            f"the signature of {type_.__name__} does not match its content: "
            "it was altered, or signed as something else"
        )
    return wire.decode(signed.payload, type_)


def content_id(signed: Signed) -> bytes:
    """Return the SHA-256 of the payload: the same work has the same id however often it is sent (R17)."""
    return hashlib.sha256(signed.payload).digest()

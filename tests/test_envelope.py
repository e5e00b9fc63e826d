import hashlib

import msgspec
import pytest

from barnraise.protocol import wire
from barnraise.protocol.envelope import content_id, domain, open_signed, sign
from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import Signed, TreeHead, Verdict

ALICE, BOB = (Identity.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
HEAD = TreeHead(run_id=bytes(32), size=7, root=bytes(range(32)), issued_at=1)


def signed_bytes(payload: bytes, kind: bytes, identity: Identity = ALICE) -> Signed:
    signature = identity.sign(b"barnraise/1/" + kind + b"\0" + payload)
    return Signed(payload=payload, signer=identity.public_key, signature=signature)


def test_what_was_signed_opens_as_what_it_was() -> None:
    signed = sign(HEAD, ALICE)
    assert open_signed(signed, TreeHead, ALICE.public_key) == HEAD
    assert open_signed(signed, TreeHead, None) == HEAD
    assert signed == signed_bytes(wire.encode(HEAD), b"TreeHead")


def test_another_signer_is_refused_by_name() -> None:
    with pytest.raises(SignatureError, match=r"not by .* as expected"):
        open_signed(sign(HEAD, BOB), TreeHead, ALICE.public_key)


def test_claiming_another_signer_does_not_help() -> None:
    forged = msgspec.structs.replace(sign(HEAD, BOB), signer=ALICE.public_key)
    with pytest.raises(SignatureError, match="altered"):
        open_signed(forged, TreeHead, ALICE.public_key)


def test_any_altered_byte_is_refused() -> None:
    signed = sign(HEAD, ALICE)
    for name in ("payload", "signer", "signature"):
        data = bytearray(getattr(signed, name))
        for position in range(len(data)):
            data[position] ^= 1
            with pytest.raises(SignatureError):
                open_signed(msgspec.structs.replace(signed, **{name: bytes(data)}), TreeHead, None)
            data[position] ^= 1


def test_a_signature_of_one_kind_never_passes_as_another() -> None:
    with pytest.raises(SignatureError):
        open_signed(sign(HEAD, ALICE), Verdict, ALICE.public_key)
    with pytest.raises(SignatureError):
        open_signed(signed_bytes(wire.encode(HEAD), b"Verdict"), TreeHead, ALICE.public_key)
    assert domain(TreeHead) == b"barnraise/1/TreeHead\0"


def test_a_signed_payload_must_still_be_canonical_and_well_formed() -> None:
    loose = b"\x84" + wire.encode(HEAD)[1:].replace(b"size\x07", b"size\xcd\x00\x07")
    for payload in (b"", b"junk", loose):
        with pytest.raises(MalformedError):
            open_signed(signed_bytes(payload, b"TreeHead"), TreeHead, ALICE.public_key)


def test_nothing_unsigned_is_parsed() -> None:
    junk = Signed(payload=b"\xc1", signer=ALICE.public_key, signature=bytes(64))
    with pytest.raises(SignatureError):
        open_signed(junk, TreeHead, ALICE.public_key)


def test_the_content_id_does_not_depend_on_the_signer() -> None:
    assert content_id(sign(HEAD, ALICE)) == content_id(sign(HEAD, BOB))
    assert content_id(sign(HEAD, ALICE)) == hashlib.sha256(wire.encode(HEAD)).digest()

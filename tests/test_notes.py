import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.envelope import domain
from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import TreeHead
from barnraise.protocol.notes import (
    ED25519,
    MAX_NOTE,
    MAX_SIGNATURES,
    Ed25519Key,
    Note,
    NoteSignature,
    check_text,
    decode_base64,
    format_vkey,
    open_note,
    parse_decimal,
    parse_note,
    parse_vkey,
    sign_note,
)

ALICE = Identity.from_private_bytes(bytes(32))
BOB = Identity.from_private_bytes(bytes([1]) * 32)
ALICE_KEY, BOB_KEY = Ed25519Key("example.com/alice", ALICE.public_key), Ed25519Key("bob", BOB.public_key)
TEXT = "ed è subito sera\n\nand more\n"

# The note with which Go's golang.org/x/mod/sumdb/note documents itself.
PETER_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PETER_NOTE = (
    b"If you think cryptography is the answer to your problem,\n"
    b"then you don't know what your problem is.\n"
    b"\n"
    b"\xe2\x80\x94 PeterNeumann "
    b"x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)


def signed(*signatures: NoteSignature) -> bytes:
    return Note(TEXT, signatures).encode()


def test_a_note_that_gos_documentation_shows_is_read_and_believed() -> None:
    name, kind, public_key = parse_vkey(PETER_KEY)
    note, (line,) = open_note(PETER_NOTE, [Ed25519Key(name, public_key)])
    assert (kind, line.name, note.text) == (
        ED25519,
        "PeterNeumann",
        PETER_NOTE.decode().split("\n\n")[0] + "\n",
    )
    assert note.encode() == PETER_NOTE
    assert format_vkey(name, kind, public_key) == PETER_KEY


def test_strangers_signatures_are_ignored_and_kept() -> None:
    data = signed(sign_note(TEXT, "bob", BOB), sign_note(TEXT, "example.com/alice", ALICE))
    note, verified = open_note(data, [ALICE_KEY])
    assert [item.name for item in verified] == ["example.com/alice"]
    assert [item.name for item in note.signatures] == ["bob", "example.com/alice"]
    assert note.text == TEXT
    assert note.encode() == data


def test_one_false_signature_of_a_known_key_spoils_the_note() -> None:
    false = NoteSignature("bob", BOB_KEY.key_id, ALICE.sign(TEXT.encode()))
    with pytest.raises(SignatureError, match="altered, or forged"):
        open_note(signed(sign_note(TEXT, "example.com/alice", ALICE), false), [ALICE_KEY, BOB_KEY])


def test_a_note_that_nobody_known_signed_is_not_believed() -> None:
    with pytest.raises(SignatureError, match="none of the keys"):
        open_note(signed(sign_note(TEXT, "bob", BOB)), [ALICE_KEY])
    with pytest.raises(SignatureError, match="none of the keys"):  # the same key under another name
        open_note(signed(sign_note(TEXT, "eve", ALICE)), [ALICE_KEY])


def test_a_repeated_signature_counts_once() -> None:
    line = sign_note(TEXT, "bob", BOB)
    _, verified = open_note(signed(line, line), [BOB_KEY])
    assert verified == (line,)


def test_no_signed_message_can_pass_for_a_note() -> None:
    message = domain(TreeHead) + b"any payload\n"
    with pytest.raises(MalformedError, match="control characters"):
        check_text(message.decode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text\n",
        b"text\n\n",
        b"text\n\nno dash\n",
        "text\n\n— bob\n".encode(),
        "text\n\n— bob AAAA\n".encode(),  # an id and no signature
        "text\n\n— bob AAAAAAA\n".encode(),  # wrong padding
        "text\n\n— bob AAAAAAB=\n".encode(),  # bits left over
        "text\n\n— bob AAAAAAA= \n".encode(),
        "text\n\n— bo+b AAAAAAA=\n".encode(),
        "text\n\n— bo\N{NO-BREAK SPACE}b AAAAAAA=\n".encode(),
        "text\n\n— bob AAAAAAA=".encode(),
        "te\rxt\n\n— bob AAAAAAA=\n".encode(),
        b"te\xffxt\n\n\xe2\x80\x94 bob AAAAAAA=\n",
        ("text\n\n" + "— bob AAAAAAA=\n" * (MAX_SIGNATURES + 1)).encode(),
        b"x" * (MAX_NOTE + 1),
    ],
    ids=lambda data: f"{len(data)}-bytes" if isinstance(data, bytes) else None,
)
def test_what_is_no_note_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        parse_note(data)


@given(st.binary(max_size=300))
def test_hostile_bytes_only_ever_raise_malformed(data: bytes) -> None:
    for candidate in (data, b"text\n\n\xe2\x80\x94 " + data):
        try:
            note = parse_note(candidate)
        except MalformedError:
            continue
        assert note.encode() == candidate  # one form only


@pytest.mark.parametrize(
    "vkey",
    [
        "",
        "name",
        PETER_KEY[:-4],
        PETER_KEY.replace("c74f", "c74e"),
        PETER_KEY.replace("Peter", "Pe ter"),
        "a+b+c",
    ],
    ids=["empty", "name", "cut", "id", "space", "short"],
)
def test_a_damaged_verifier_key_is_refused(vkey: str) -> None:
    with pytest.raises(MalformedError):
        parse_vkey(vkey)


@given(st.binary(max_size=40))
def test_base64_has_one_form(data: bytes) -> None:
    import base64

    text = base64.b64encode(data).decode()
    assert decode_base64(text, "it") == data
    for other in (text + "=", text + "\n", " " + text, text.rstrip("=") + "A"):
        with contextlib.suppress(MalformedError):
            assert base64.b64encode(decode_base64(other, "it")).decode() == other


@pytest.mark.parametrize("text", ["", "01", "-1", "+1", "1 ", "٣", "9223372036854775808", "1e3"])
def test_only_plain_decimals_are_numbers(text: str) -> None:
    assert parse_decimal("0", "it") == 0
    assert parse_decimal("9223372036854775807", "it") == 2**63 - 1
    with pytest.raises(MalformedError):
        parse_decimal(text, "it")

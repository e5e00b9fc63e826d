import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.protocol.errors import KeyFileError, MalformedError
from barnraise.protocol.identity import (
    Identity,
    fingerprint,
    load_identity,
    load_or_create,
    peer_id_of,
    public_key_of,
    save_identity,
    verify,
)

as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")


@settings(deadline=None)  # the first example imports libp2p
@given(st.binary(min_size=32, max_size=32))
def test_the_peer_id_is_the_one_that_libp2p_computes(seed: bytes) -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    identity = Identity.from_private_bytes(seed)
    pair = create_new_key_pair(identity.private_bytes())
    assert pair.public_key.to_bytes() == identity.public_key
    assert str(ID.from_pubkey(pair.public_key)) == identity.peer_id
    assert public_key_of(identity.peer_id) == identity.public_key


def test_identity_needs_no_libp2p() -> None:
    code = "import sys, barnraise.protocol.identity; sys.exit('libp2p' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.text(max_size=120))
def test_what_is_no_peer_id_is_refused(text: str) -> None:
    with pytest.raises(MalformedError):
        public_key_of(text)


def test_a_peer_id_of_another_kind_of_key_is_refused() -> None:
    good = Identity.from_private_bytes(bytes(32)).peer_id
    for bad in ("Qm" + good[2:], good[:-1], good + "1", "1" * 52, "1" + "z" * 51, good.replace("2", "0", 1)):
        with pytest.raises(MalformedError):
            public_key_of(bad)
    with pytest.raises(MalformedError, match="32 bytes"):
        peer_id_of(bytes(31))


def test_a_signature_holds_for_its_key_and_its_data_alone() -> None:
    alice, bob = Identity.generate(), Identity.generate()
    signature = alice.sign(b"work")
    assert verify(alice.public_key, b"work", signature)
    assert not verify(alice.public_key, b"Work", signature)
    assert not verify(bob.public_key, b"work", signature)
    assert not verify(alice.public_key, b"work", signature[:-1])
    assert not verify(alice.public_key, b"work", b"")
    assert not verify(b"", b"work", signature)


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_verify_never_raises(key: bytes, signature: bytes) -> None:
    assert not verify(key, b"data", signature)


def test_the_secret_stays_out_of_the_repr() -> None:
    identity = Identity.generate()
    assert repr(identity) == f"Identity({identity.peer_id})"
    assert identity.private_bytes().hex() not in repr(vars(identity))


def test_a_fingerprint_is_short_and_grouped() -> None:
    assert fingerprint(bytes(32)) == "6668 7aad f862 bd77"


def test_a_key_file_is_private_complete_and_read_back(tmp_path: Path) -> None:
    """R8."""
    identity = Identity.generate()
    path = tmp_path / "new" / "folder" / "node.key"
    save_identity(identity, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["node.key"]
    assert load_identity(path).public_key == identity.public_key
    key = load_pem_private_key(path.read_bytes(), password=None)
    assert key.public_key().public_bytes_raw() == identity.public_key  # type: ignore[union-attr]


def test_a_key_file_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    first, second = Identity.generate(), Identity.generate()
    save_identity(first, path)
    with pytest.raises(KeyFileError, match="exists and will not be overwritten"):
        save_identity(second, path)
    assert load_identity(path).public_key == first.public_key
    save_identity(second, path, overwrite=True)
    assert load_identity(path).public_key == second.public_key
    assert os.listdir(tmp_path) == ["node.key"]


def test_a_file_system_without_hard_links_still_refuses_to_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    save_identity(Identity.generate(), tmp_path / "node.key")
    with pytest.raises(KeyFileError, match="exists"):
        save_identity(Identity.generate(), tmp_path / "node.key")
    assert os.listdir(tmp_path) == ["node.key"]


def test_load_or_create_makes_a_key_once(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    made, created = load_or_create(path)
    again, created_again = load_or_create(path)
    assert (created, created_again) == (True, False)
    assert made.peer_id == again.peer_id


def test_a_missing_key_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"no key file at .*barnraise key import"):
        load_identity(tmp_path / "node.key")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    save_identity(Identity.generate(), path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode {mode:04o}.*chmod 600"):
        load_identity(path)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_or_create(path)


def write_private(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_a_damaged_key_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    good = Identity.generate().to_pem()
    for data in (b"", b"hello", good[:60], good.replace(b"M", b"N"), bytes(200), b"x" * 20_000):
        path = write_private(tmp_path / "node.key", data)
        with pytest.raises(KeyFileError, match=r"node\.key"):
            load_or_create(path)
        assert path.read_bytes() == data


def test_a_key_of_another_kind_or_with_a_passphrase_is_refused(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    with pytest.raises(KeyFileError, match="not an Ed25519 key"):
        load_identity(write_private(tmp_path / "a", other))
    locked = load_pem_private_key(Identity.generate().to_pem(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    with pytest.raises(KeyFileError, match="passphrase"):
        load_identity(write_private(tmp_path / "b", locked))


def test_a_folder_in_place_of_a_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"cannot read|not a file"):
        load_identity(tmp_path)
    with pytest.raises(KeyFileError, match="cannot write"):
        save_identity(Identity.generate(), write_private(tmp_path / "file", b"") / "node.key")


@as_user
def test_an_unreadable_key_file_and_a_read_only_folder_are_named(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    save_identity(Identity.generate(), path)
    path.chmod(0)
    with pytest.raises(KeyFileError, match="cannot read"):
        load_identity(path)
    tmp_path.chmod(0o500)
    with pytest.raises(KeyFileError, match="cannot write"):
        save_identity(Identity.generate(), tmp_path / "other.key")
    tmp_path.chmod(0o700)


def test_what_was_judged_once_is_judged_the_same_again() -> None:
    one, other = Identity.generate(), Identity.generate()
    for data in (b"short", bytes(100_000)):
        signature = one.sign(data)
        for _ in range(2):
            assert verify(one.public_key, data, signature)
            assert not verify(other.public_key, data, signature)
            assert not verify(one.public_key, data + b"!", signature)
            assert not verify(one.public_key, data, bytes(64))
    assert verify(one.public_key, bytearray(b"short"), one.sign(b"short"))  # type: ignore[arg-type]

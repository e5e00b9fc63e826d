"""Who somebody is: an Ed25519 key (RFC 8032), which is also the libp2p peer identity.

One key serves both purposes, so that whoever signs a submission is whoever the
transport's handshake proved. The key file is PKCS #8 in PEM, readable by its owner
alone. The peer id is computed here without libp2p (libp2p peer-ids specification:
base58 of the identity multihash of the protobuf-encoded public key).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import KeyFileError, MalformedError

_MAX_KEY_FILE = 16 * 1024
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_REMEMBERED_BYTES = 8192  # a message of at most so many; see ``verify``
# multihash "identity" (0x00), 36 bytes; protobuf: key type 1 (Ed25519), data of 32 bytes
_PEER_ID_PREFIX = bytes.fromhex("002408011220")


class Identity:
    """A private key and what follows from it. Its ``repr`` shows the public part only.

    Attributes:
        public_key: 32 bytes (RFC 8032).
        peer_id: the libp2p peer id, ``12D3KooW...``.
    """

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes_raw()
        self.peer_id: str = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> Identity:
        """Make a new identity from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_private_bytes(cls, seed: bytes) -> Identity:
        """Make the identity of a 32-byte secret seed (for tests and key exchange with libp2p)."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def from_pem(cls, data: bytes) -> Identity:
        """Read an unencrypted PKCS #8 PEM.

        Raises:
            KeyFileError: not such a PEM, encrypted, or a key of another kind.
        """
        try:
            key = load_pem_private_key(data, password=None)
        except TypeError:
            raise KeyFileError(
                "the key is encrypted with a passphrase: export it without one "
                "(openssl pkey -in KEY -out PLAIN) and import that"
            ) from None
        except (ValueError, UnsupportedAlgorithm):
            raise KeyFileError(
                "not a private key in PEM form, or damaged: restore it from a backup, or move it away "
                "and a new identity will be made"
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise KeyFileError("the key is not an Ed25519 key: only Ed25519 identities are supported")
        return cls(key)

    def to_pem(self) -> bytes:
        """Return the private key as unencrypted PKCS #8 PEM."""
        return self._private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def private_bytes(self) -> bytes:
        """Return the 32-byte secret seed, as libp2p's key pair wants it. Keep it out of logs."""
        return self._private_key.private_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of ``data``. For messages use ``envelope.sign``."""
        return self._private_key.sign(data)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether ``signature`` is ``public_key``'s Ed25519 signature of ``data``. Never raises on bad bytes.

    Short messages that were judged lately are remembered: a head comes to a node from several sides.
    """
    if type(data) is type(signature) is type(public_key) is bytes and len(data) <= _REMEMBERED_BYTES:
        return _verify_once(public_key, data, signature)
    return _verify(public_key, data, signature)


def _verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


_verify_once = lru_cache(maxsize=1024)(_verify)  # with _REMEMBERED_BYTES: 8 MiB at most, and some


def peer_id_of(public_key: bytes) -> str:
    """Return the libp2p peer id of a 32-byte Ed25519 public key.

    Raises:
        MalformedError: not 32 bytes.
    """
    if len(public_key) != 32:
        raise MalformedError(f"a public key has 32 bytes, not {len(public_key)}")
    number = int.from_bytes(_PEER_ID_PREFIX + public_key, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_BASE58[digit])
    return "1" + "".join(reversed(digits))  # the leading zero byte of the multihash


def public_key_of(peer_id: str) -> bytes:
    """Return the 32-byte Ed25519 public key inside a libp2p peer id.

    Raises:
        MalformedError: not a peer id, or that of another kind of key.
    """
    number = 0
    if len(peer_id) != 52 or peer_id[0] != "1":
        raise MalformedError("not the peer id of an Ed25519 key (12D3KooW... and 44 more characters)")
    for char in peer_id:
        digit = _BASE58.find(char)
        if digit < 0:
            raise MalformedError("not a peer id: it holds a character that base58 does not have")
        number = number * 58 + digit
    data = number.to_bytes(39, "big")
    if data[:7] != b"\0" + _PEER_ID_PREFIX:
        raise MalformedError("not the peer id of an Ed25519 key (12D3KooW... and 44 more characters)")
    return data[7:]


def fingerprint(public_key: bytes) -> str:
    """Return 16 hex digits in groups of four, of the key's SHA-256: for people to compare."""
    digits = hashlib.sha256(public_key).hexdigest()[:16]
    return " ".join(digits[i : i + 4] for i in range(0, 16, 4))


def load_identity(path: Path) -> Identity:
    """Read the key file at ``path``.

    Raises:
        KeyFileError: missing, unreadable, readable by others, or damaged; the text says what to do.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{path} is not a file: name the key file itself")
            if os.name == "posix" and status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise KeyFileError(
                    f"{path} can be read by other users (mode {mode:04o}), so the key may not be secret: "
                    f"chmod 600 {path}"
                )
            data = file.read(_MAX_KEY_FILE + 1)
    except FileNotFoundError:
        raise KeyFileError(
            f"there is no key file at {path}: copy it there from a backup with `barnraise key import`, "
            "or let `barnraise join` make a new one"
        ) from None
    except OSError as error:
        raise KeyFileError(
            f"cannot read the key file {path} ({error.strerror}): it must belong to the user who runs "
            f"barnraise, with mode 0600"
        ) from None
    if len(data) > _MAX_KEY_FILE:
        raise KeyFileError(f"{path} is too large to be a key file: name the key file itself")
    try:
        return Identity.from_pem(data)
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from None


def save_identity(identity: Identity, path: Path, overwrite: bool = False) -> None:
    """Write the key file atomically, mode 0600, synced to disk. Missing folders are made (mode 0700).

    Raises:
        KeyFileError: a file is there and ``overwrite`` is false, or the disk refused.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(identity.to_pem())
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                partial.replace(path)
            else:
                _move_to_unused(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(path.parent)
    except FileExistsError:
        if not path.exists():  # what exists is a file where the folder should be
            raise KeyFileError(f"cannot write the key file {path}: {path.parent} is not a folder") from None
        raise KeyFileError(
            f"{path} exists and will not be overwritten: a lost key cannot be made again. "
            "Move it away first, or ask for overwriting"
        ) from None
    except OSError as error:
        raise KeyFileError(f"cannot write the key file {path} ({error.strerror})") from None


def load_or_create(path: Path) -> tuple[Identity, bool]:
    """Return the identity at ``path``, made if there was no file, and whether it was made.

    Raises:
        KeyFileError: a file is there but cannot be used, or none can be written.
    """
    if not path.exists():
        identity = Identity.generate()
        try:
            save_identity(identity, path)
        except KeyFileError:
            if not path.exists():  # if it does now, another process was faster: use its key
                raise
        else:
            return identity, True
    return load_identity(path), False


def _move_to_unused(source: Path, target: Path) -> None:
    try:
        os.link(source, target)  # unlike a rename, refuses an existing target atomically
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if target.exists():
            raise FileExistsError(target) from None
        source.replace(target)
    else:
        with contextlib.suppress(OSError):
            source.unlink()

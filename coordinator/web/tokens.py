"""The admin API's one token: a file that only the coordinator's user can read, and a bound on guessing it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import KeyFileError, StorageError

TOKEN_FILE: Final = "admin.token"
_TOKEN: Final = re.compile(r"bra_[A-Za-z0-9_-]{43}")
_MOST_BYTES: Final = 256

FREE_TRIES: Final = 5
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 300.0
FORGET_S: Final = 900.0
ADDRESSES: Final = 4096


def make_token(folder: Path, *, anew: bool = False) -> tuple[Path, bool]:
    """The file with the run's admin token, made if there is none (or ``anew``); whether it was made.

    256 bits from the operating system, mode 0600. The one before counts no more from then on.

    Raises:
        KeyFileError: the file that is there cannot be used; says why.
        StorageError: the disk refused.
    """
    path = folder / TOKEN_FILE
    if not anew and path.exists():
        read_token(path)
        return path, False
    partial = path.with_name(f".tmp-{TOKEN_FILE}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"bra_{secrets.token_urlsafe(32)}\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        sync_folder(folder)
    except OSError as error:
        raise StorageError(f"cannot write {path} ({error.strerror})") from error
    return path, True


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        KeyFileError: it is not there, readable by others, or holds none; never says what it holds.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{path} is not a file")
            if os.name == "posix" and status.st_mode & 0o077:
                raise KeyFileError(
                    f"{path} can be read by other users (mode {stat.S_IMODE(status.st_mode):04o}): make "
                    "another with `barnraise coordinator token RUN --new`"
                )
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise KeyFileError(f"there is no {path}: make it with `barnraise coordinator token RUN`") from None
    except OSError as error:
        raise KeyFileError(f"cannot read {path} ({error.strerror})") from None
    text = data.decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(text):
        raise KeyFileError(
            f"{path} holds no token of ours: make another with `barnraise coordinator token RUN --new`"
        )
    return text


def is_right(given: str, token: str) -> bool:
    """Whether they are the same, in a time that does not say where they differ."""
    ours, theirs = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (token, given))
    return hmac.compare_digest(ours, theirs)


@dataclass(slots=True)
class _Tries:
    wrong: int = 0
    until: float = 0.0
    seen: float = 0.0


@dataclass
class Guesses:
    """Wrong tokens by address. Some are free, then each doubles the time in which none is looked at."""

    _by_address: OrderedDict[str, _Tries] = field(default_factory=OrderedDict)

    def wait_s(self, address: str, now: float) -> float:
        """How long nobody from ``address`` is listened to, seconds; 0: now."""
        tries = self._by_address.get(address)
        return 0.0 if tries is None else max(0.0, tries.until - now)

    def wrong(self, address: str, now: float) -> int:
        """Note a wrong token; returns how many there were lately."""
        tries = self._by_address.pop(address, None)
        if tries is None or now - tries.seen > FORGET_S:
            tries = _Tries()
        self._by_address[address] = tries
        while len(self._by_address) > ADDRESSES:
            self._by_address.popitem(last=False)
        tries.wrong, tries.seen = tries.wrong + 1, now
        if tries.wrong > FREE_TRIES:
            doublings = min(tries.wrong - FREE_TRIES - 1, 16)
            tries.until = now + min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**doublings)
        return tries.wrong

    def right(self, address: str) -> None:
        """Whoever has the token is no guesser."""
        self._by_address.pop(address, None)

"""Keeps the arrivals of new keys over a restart, so that one is no way around their limit.

``RUN/newcomers.bin`` (0600): a random salt (16 bytes), then for each arrival its time (ms, 8 bytes) and
two keyed hashes of 8 bytes (``barnraise.coordinator.newcomers``). Their key is made of the salt and the
run's private key: without that the file tells nothing of an address. Nothing stays for much longer
than the window; a file in which nothing is left is deleted, and the next begins with another salt.
Nothing is flushed: a power cut may forget the last arrivals, ``kill -9`` none.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import struct
from collections.abc import Collection, Iterable
from pathlib import Path

from barnraise.coordinator.newcomers import GROUP_BYTES, MOST_KEPT, Arrival, Groups
from barnraise.protocol.identity import Identity

log = logging.getLogger(__name__)

NEWCOMERS = "newcomers.bin"
_MAGIC = b"barnraise newcomers 1\n"
_SALT_BYTES = 16
_HEAD_BYTES = len(_MAGIC) + _SALT_BYTES
_RECORD = struct.Struct(f">Q{GROUP_BYTES}s{GROUP_BYTES}s")
_MOST_BYTES = _HEAD_BYTES + 2 * MOST_KEPT * _RECORD.size


class NewcomerBook:
    """The file of one run. A disk that refuses costs what is kept over a restart, and nothing else.

    Attributes:
        secret: the key of the hashes in it (32 bytes); another one once nothing is left.
        kept: the arrivals that were in it when it was opened.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        """Never fails: a file that cannot be read or is damaged is begun anew, and the log says so."""
        self._path = folder / NEWCOMERS
        self._identity = identity
        self._failing = False
        self._size = 0  # bytes that more may be written behind; 0: all of it has to be written anew
        salt, self.kept = self._read()
        self._season(salt)

    def _season(self, salt: bytes) -> None:
        self._salt = salt
        domain = b"barnraise/1/newcomers\0" + salt
        self.secret = hmac.digest(self._identity.private_bytes(), domain, "sha256")

    def _read(self) -> tuple[bytes, list[Arrival]]:
        data, trouble = b"", ""
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES)
            if not data.startswith(_MAGIC) or len(data) < _HEAD_BYTES:
                trouble = "it is damaged"
        except FileNotFoundError:
            pass
        except OSError as error:
            trouble = str(error.strerror or error)
        if trouble:
            log.warning("%s: %s; new keys are counted from now on", self._path, trouble)
        if trouble or not data:
            return secrets.token_bytes(_SALT_BYTES), []
        body = data[_HEAD_BYTES:]
        whole = body[: len(body) - len(body) % _RECORD.size]
        if whole == body:  # else the last write was cut short, or others follow
            self._size = len(data)
        kept = [Arrival(at, Groups(near, far)) for at, near, far in _RECORD.iter_unpack(whole)]
        return data[len(_MAGIC) : _HEAD_BYTES], kept

    def add(self, arrival: Arrival, everything: Collection[Arrival]) -> None:
        """Keep one more; ``everything``: all that is to be kept, it included."""
        record = _packed((arrival,))
        if not self._size or self._size + len(record) > _MOST_BYTES:
            self.replace(everything)
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                written = os.write(descriptor, record)
            finally:
                os.close(descriptor)
            if written != len(record):  # all that follows would be read shifted
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += written
        except OSError as error:
            self._failed(error)

    def replace(self, everything: Collection[Arrival]) -> None:
        """Keep these alone; of no arrivals no trace stays."""
        temporary = self._path.with_name(f".tmp-{NEWCOMERS}")
        try:
            if not everything:
                self._path.unlink(missing_ok=True)
                self._size = 0
                self._season(secrets.token_bytes(_SALT_BYTES))
                return
            data = _MAGIC + self._salt + _packed(everything)
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            temporary.replace(self._path)
            self._size, self._failing = len(data), False
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self._size = 0
        if not self._failing:
            self._failing = True
            text = "%s cannot be written (%s): a restart would forget which new keys have come"
            log.warning(text, self._path, error.strerror or error)


def _packed(arrivals: Iterable[Arrival]) -> bytes:
    return b"".join(_RECORD.pack(arrival.at_ms, *arrival.groups) for arrival in arrivals)

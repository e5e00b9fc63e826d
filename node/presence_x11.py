"""Input at an X display, by its screen saver extension, in the X protocol itself.

Not by Xlib, which ends the process that uses it when the X server goes, as it does when
a person logs out. X Window System Protocol, version 11, sections 8 and 9 and appendix B;
"X11 Screen Saver Extension", version 1.1.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from barnraise.node.presence import Answer
from barnraise.node.presence_socket import SocketSource

SOCKETS = Path("/tmp/.X11-unix")
_COOKIE = b"MIT-MAGIC-COOKIE-1"
_LOCAL, _WILD = 256, 65535
_DISPLAY = re.compile(r"(?:unix)?:(\d{1,5})(?:\.\d+)?")
_TIMEOUT_S = 1.0
_AGAIN_S = 5.0  # after it let us not in
_MOST_AUTHORITY = 64 * 1024
_MOST_SETUP = 1024 * 1024
_QUERY_EXTENSION, _QUERY_INFO = 98, 1


class XDisplay(SocketSource):
    """The connection to one display, made anew where it broke."""

    name = "x11"
    again_s = _AGAIN_S

    def __init__(self, display: str, authority: Path | None = None, sockets: Path = SOCKETS) -> None:
        """``display``: such as ``:0``; ``authority``: the file of cookies, by default the user's."""
        super().__init__()
        self.display = display
        self._authority = authority
        self._sockets = sockets
        self._opcode = self._root = self._sequence = 0

    def _look(self) -> Answer:
        reply = self._ask(struct.pack("<BBHI", self._opcode, _QUERY_INFO, 2, self._root))
        idle_ms = int(struct.unpack_from("<I", reply, 16)[0])
        return Answer(self.name, idle_ms / 1000, f"display {self.display}")

    def _open(self) -> None:
        match = _DISPLAY.fullmatch(self.display)
        if match is None:
            raise ValueError(f"{self.display} is no display of this machine")
        number = match[1]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_TIMEOUT_S)
        self._socket, self._sequence = connection, 0
        connection.connect(os.fspath(self._sockets / f"X{number}"))
        cookie = find_cookie(self._authority or default_authority(), number)
        name = _COOKIE if cookie else b""
        self._send(
            struct.pack("<BxHHHHxx", ord("l"), 11, 0, len(name), len(cookie))
            + _padded(name)
            + _padded(cookie)
        )
        accepted, length = struct.unpack("<BxxxxxH", self._read(8))
        body = self._read(min(4 * length, _MOST_SETUP))
        if accepted != 1:
            raise ValueError("the X server let us not in")
        vendor, formats = struct.unpack_from("<H", body, 16)[0], body[21]
        self._root = struct.unpack_from("<I", body, 32 + vendor + -vendor % 4 + 8 * formats)[0]
        extension = b"MIT-SCREEN-SAVER"
        request = struct.pack("<BxHHxx", _QUERY_EXTENSION, 2 + len(extension) // 4, len(extension))
        reply = self._ask(request + extension)
        present, self._opcode = reply[8], reply[9]
        if not present:
            raise ValueError("this X server has no screen saver extension")

    def _ask(self, request: bytes) -> bytes:
        self._sequence = (self._sequence + 1) & 0xFFFF
        self._send(request)
        while True:
            reply = self._read(32)
            kind, sequence, length = struct.unpack_from("<BxHI", reply)
            if kind in (1, 35):  # replies and generic events may be longer
                reply += self._read(min(4 * length, _MOST_SETUP))
            if kind == 0:
                raise ValueError(f"the X server refused: error {reply[1]}")
            if kind == 1 and sequence == self._sequence:
                return reply

    def _send(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.sendall(data)

    def _read(self, size: int) -> bytes:
        assert self._socket is not None
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ConnectionError("the X server is gone")
            data += piece
        return data


def default_authority() -> Path:
    """The user's file of cookies: the environment's, the login manager's or the one at home."""
    named = os.environ.get("XAUTHORITY")
    managed = Path(f"/run/user/{os.getuid()}/gdm/Xauthority")
    if not named and managed.is_file():
        return managed
    return Path(named or Path.home() / ".Xauthority")


def find_cookie(path: Path, display: str) -> bytes:
    """The secret that lets one in at a display's number; empty where there is none."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_AUTHORITY)
    except OSError:
        return b""
    for family, number, name, secret in cookies(data):
        if family in (_LOCAL, _WILD) and name == _COOKIE and number in (b"", display.encode()):
            return secret
    return b""


def cookies(data: bytes) -> Iterator[tuple[int, bytes, bytes, bytes]]:
    """Family, display's number, name and secret of every entry of an Xauthority file; stops at damage."""
    at = 0
    with suppress(struct.error):
        while at < len(data):
            family = struct.unpack_from(">H", data, at)[0]
            at += 2
            fields: list[bytes] = []
            for _ in range(4):
                length = struct.unpack_from(">H", data, at)[0]
                fields.append(data[at + 2 : at + 2 + length])
                at += 2 + length
            if at > len(data):
                return
            yield family, fields[1], fields[2], fields[3]


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)

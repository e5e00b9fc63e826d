"""Input at a Wayland compositor, by the protocol ``ext-idle-notify-v1``, in the wire format itself.

KDE Plasma (5.27 and later), Sway, Hyprland, COSMIC and others offer it; GNOME is asked over
D-Bus instead (``barnraise.node.presence_linux``). The compositor tells once nobody has touched
anything for a second, and once somebody does again. "The Wayland Protocol", chapter 4;
wayland-protocols, staging/ext-idle-notify.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

from barnraise.node.presence import Answer
from barnraise.node.presence_socket import SocketSource

AFTER_MS = 1000
_TIMEOUT_S = 1.0
_AGAIN_S = 30.0  # after it could not say
_MOST_UNREAD = 256 * 1024
_NOTIFIER, _SEAT = "ext_idle_notifier_v1", "wl_seat"
_DISPLAY_ID, _REGISTRY_ID, _SYNC_ID, _SEAT_ID, _NOTIFIER_ID, _NOTIFICATION_ID = range(1, 7)
_IDLED, _RESUMED = 0, 1


class Wayland(SocketSource):
    """The connection to one compositor, made anew where it broke."""

    name = "wayland"
    again_s = _AGAIN_S

    def __init__(self, path: Path) -> None:
        """``path``: the compositor's socket."""
        super().__init__()
        self._path = path
        self._unread = b""
        self._idle_since: float | None = None
        self._synced = False
        self._globals: dict[str, int] = {}

    def _look(self) -> Answer:
        self._read_events()
        if self._idle_since is None:
            return Answer(self.name, 0.0)
        return Answer(self.name, max(0.0, time.monotonic() - self._idle_since))

    def _open(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_TIMEOUT_S)
        self._socket, self._unread, self._idle_since = connection, b"", None
        self._synced, self._globals = False, {}
        connection.connect(os.fspath(self._path))
        connection.sendall(
            message(_DISPLAY_ID, 1, struct.pack("=I", _REGISTRY_ID))
            + message(_DISPLAY_ID, 0, struct.pack("=I", _SYNC_ID))
        )
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._synced:
            if time.monotonic() > deadline:
                raise ValueError("the compositor does not answer")
            self._receive()
        if self._globals.keys() < {_NOTIFIER, _SEAT}:
            raise ValueError("the compositor has no ext-idle-notify-v1")
        connection.sendall(
            self._bind(_SEAT, _SEAT_ID)
            + self._bind(_NOTIFIER, _NOTIFIER_ID)
            + message(_NOTIFIER_ID, 1, struct.pack("=III", _NOTIFICATION_ID, AFTER_MS, _SEAT_ID))
        )
        connection.setblocking(False)

    def _bind(self, interface: str, number: int) -> bytes:
        return message(
            _REGISTRY_ID,
            0,
            struct.pack("=I", self._globals[interface]) + text(interface) + struct.pack("=II", 1, number),
        )

    def _read_events(self) -> None:
        try:
            while True:
                self._receive()
        except BlockingIOError:
            return

    def _receive(self) -> None:
        assert self._socket is not None
        piece = self._socket.recv(65_536)
        if not piece:
            raise ConnectionError("the compositor is gone")
        self._unread += piece
        while len(self._unread) >= 8:
            number, word = struct.unpack_from("=II", self._unread)
            size, opcode = word >> 16, word & 0xFFFF
            if size < 8:
                raise ValueError("the compositor sent an impossible message")
            if len(self._unread) < size:
                break
            body, self._unread = self._unread[8:size], self._unread[size:]
            self._event(number, opcode, body)
        if len(self._unread) > _MOST_UNREAD:
            raise ValueError("the compositor sends too much")

    def _event(self, number: int, opcode: int, body: bytes) -> None:
        if number == _DISPLAY_ID and opcode == 0:
            raise ValueError("the compositor refused")
        if number == _SYNC_ID:
            self._synced = True
        elif number == _REGISTRY_ID and opcode == 0:
            name, length = struct.unpack_from("=II", body)
            interface = body[8 : 8 + max(0, length - 1)].decode(errors="replace")
            self._globals.setdefault(interface, name)
        elif number == _NOTIFICATION_ID and opcode == _IDLED:
            self._idle_since = time.monotonic() - AFTER_MS / 1000
        elif number == _NOTIFICATION_ID and opcode == _RESUMED:
            self._idle_since = None


def message(number: int, opcode: int, body: bytes) -> bytes:
    """One message to or from the object ``number``."""
    return struct.pack("=II", number, (8 + len(body)) << 16 | opcode) + body


def text(value: str) -> bytes:
    """A string argument."""
    data = value.encode() + b"\0"
    return struct.pack("=I", len(data)) + data + bytes(-len(data) % 4)

"""A source that is asked over a local socket: connected at the first question, anew where it broke."""

from __future__ import annotations

import socket
import struct
import time
from abc import ABC, abstractmethod

from barnraise.node.presence import Answer


class SocketSource(ABC):
    """See ``barnraise.node.presence.Source``. A failure ends the connection, and the answer is None.

    ``again_s``: after a connection that could not be made, none is tried for so many seconds.
    """

    name: str
    again_s: float

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._again_at = -float("inf")

    @abstractmethod
    def _open(self) -> None:
        """Connect, and set ``_socket``. Raises OSError, ValueError or struct.error."""

    @abstractmethod
    def _look(self) -> Answer:
        """Ask over the open socket. Raises OSError, ValueError or struct.error."""

    def ask(self) -> Answer | None:
        """See ``Source.ask``."""
        if self._socket is None and time.monotonic() < self._again_at:
            return None
        try:
            if self._socket is None:
                self._again_at = time.monotonic() + self.again_s
                self._open()
                self._again_at = -float("inf")
            return self._look()
        except (OSError, ValueError, struct.error):
            self.close()
            return None

    def close(self) -> None:
        """End the connection; the next ``ask`` makes another."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

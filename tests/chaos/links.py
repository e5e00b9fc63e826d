"""The way from a node to its coordinator, which can be cut, stalled or slowed."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Literal, Protocol

from netns_support import Router

Mode = Literal["through", "cut", "stall", "trickle"]
RATE = 20_000  # bytes per second while it trickles
_LOOK_S = 0.05
_PIECE = 64 * 1024


class Link(Protocol):
    """What the chaos needs of one."""

    def set(self, mode: str) -> None:
        """``through``: heal it; ``cut``, ``stall``, ``trickle``: until the next call."""

    def close(self) -> None: ...


class ProxyLink:
    """A TCP proxy on loopback. ``cut`` resets connections and refuses new ones; ``stall`` keeps them, silent.

    Attributes:
        port: where the node connects.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._mode = "through"
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: str) -> None:
        self._mode = mode
        if mode == "cut":
            self._drop_all()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._drop_all()

    def _drop_all(self) -> None:
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            if self._mode == "cut":
                return
            try:
                upstream = socket.create_connection(self._target, 10)
            except OSError:
                return
            with upstream:
                with self._lock:
                    self._open |= {client, upstream}
                with suppress(OSError):
                    self._pump(client, upstream)
                with self._lock:
                    self._open -= {client, upstream}

    def _pump(self, client: socket.socket, upstream: socket.socket) -> None:
        other = {client: upstream, upstream: client}
        for each in other:
            each.settimeout(20)
        with selectors.DefaultSelector() as ready:
            for each in other:
                ready.register(each, selectors.EVENT_READ)
            while not self._closed and self._mode != "cut":
                if self._mode == "stall":
                    time.sleep(_LOOK_S)
                    continue
                for key, _ in ready.select(_LOOK_S):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    slow = self._mode == "trickle"
                    data = source.recv(int(RATE * _LOOK_S) if slow else _PIECE)
                    if not data:
                        return
                    other[source].sendall(data)
                    if slow:
                        time.sleep(_LOOK_S)


class RouterLink:
    """A router: ``cut`` ends its LAN, ``stall`` forgets all translations, ``trickle`` drops above RATE."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._slow = False

    def set(self, mode: str) -> None:
        self._heal()
        if mode == "cut":
            self._router.run("ip", "link", "set", "lan", "down")
        elif mode == "stall":
            self._router.forget()
        elif mode == "trickle":
            rule = f"limit rate over {RATE // 1000} kbytes/second burst 40 kbytes drop"
            chain = "type filter hook forward priority -10;"
            self._router.run(
                "nft", "-f", "-", text=f"table ip chaos {{\nchain c {{\n{chain}\n{rule}\n}}\n}}\n"
            )
            self._slow = True

    def close(self) -> None:
        """It goes with the internet."""

    def _heal(self) -> None:
        self._router.run("ip", "link", "set", "lan", "up")
        if self._slow:
            self._router.run("nft", "delete", "table", "ip", "chaos")
            self._slow = False

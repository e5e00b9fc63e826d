"""Whether a person is there, by every source that can be had here: X, Wayland, a message bus, terminals."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jeepney import DBusAddress, MessageType, new_method_return
from jeepney.io.blocking import open_dbus_connection

from barnraise.node import presence_linux
from barnraise.node.presence import Answer
from barnraise.node.presence_dbus import Bus, Logind, gnome_idle_s
from barnraise.node.presence_linux import Desktop
from barnraise.node.presence_other import idle_in_ioreg, ticks_between
from barnraise.node.presence_sources import open_sources
from barnraise.node.presence_tty import Terminals
from barnraise.node.presence_wayland import Wayland, message, text
from barnraise.node.presence_x11 import XDisplay, cookies, find_cookie

Serve = Callable[[socket.socket], None]


@contextmanager
def server(path: Path, serve: Serve) -> Iterator[None]:
    """A Unix socket, with a thread for each connection; on leaving they all break."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen()
    connections: list[socket.socket] = []

    def one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            serve(connection)

    def run() -> None:
        with suppress(OSError):
            while True:
                connections.append(listener.accept()[0])
                threading.Thread(target=one, args=(connections[-1],), daemon=True).start()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        for open_one in (listener, *connections):
            with suppress(OSError):
                open_one.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError
        data += piece
    return data


# --- X11


def x_server(idle_ms: list[int], cookie: bytes = b"", extension: bool = True) -> Serve:
    """An X server that knows two requests; it sends an event between any two replies."""

    def serve(connection: socket.socket) -> None:
        _, major, _, names, secrets = struct.unpack("<BxHHHHxx", exactly(connection, 12))
        assert major == 11
        exactly(connection, names + -names % 4)
        given = exactly(connection, secrets + -secrets % 4)[:secrets]
        if given != cookie:
            connection.sendall(struct.pack("<BBHHH", 0, 4, 11, 0, 1) + b"no! ")
            return
        vendor = b"somebody"
        body = struct.pack("<IIIIHHBB6xI", 1, 2, 3, 4, len(vendor), 65535, 1, 2, 0) + vendor + bytes(16)
        body += struct.pack("<I", 0x1D5) + bytes(36)
        connection.sendall(struct.pack("<BxHHH", 1, 11, 0, len(body) // 4) + body)
        sequence = 0
        while True:
            opcode, minor, length = struct.unpack("<BBH", exactly(connection, 4))
            rest = exactly(connection, 4 * length - 4)
            sequence += 1
            connection.sendall(struct.pack("<BBH28x", 12, 0, sequence))  # an Expose event
            if opcode == 98:
                assert rest[4:] == b"MIT-SCREEN-SAVER"
                connection.sendall(struct.pack("<BxHIBB22x", 1, sequence, 0, extension, 140))
            else:
                assert (opcode, minor, struct.unpack("<I", rest)[0]) == (140, 1, 0x1D5)
                reply = struct.pack("<BxHIIII12x", 1, sequence, 0, 7, 0, idle_ms[0])
                connection.sendall(reply)

    return serve


def authority(path: Path, *entries: tuple[int, bytes, bytes]) -> Path:
    data = b""
    for family, number, secret in entries:
        data += struct.pack(">H", family)
        for field in (b"host", number, b"MIT-MAGIC-COOKIE-1", secret):
            data += struct.pack(">H", len(field)) + field
    path.write_bytes(data)
    return path


def test_an_x_display_tells_the_time_since_the_last_input(tmp_path: Path) -> None:
    cookies_file = authority(tmp_path / "auth", (256, b"0", b"wrong" * 3), (256, b"7", b"k" * 16))
    idle = [1500]
    with server(tmp_path / "X7", x_server(idle, cookie=b"k" * 16)):
        display = XDisplay(":7", cookies_file, tmp_path)
        assert display.ask() == Answer("x11", 1.5, "display :7")
        idle[0] = 0
        assert display.ask() == Answer("x11", 0.0, "display :7")
        assert XDisplay(":7", tmp_path / "none", tmp_path).ask() is None  # it lets us not in
    assert display.ask() is None  # the person has logged out, and took nobody along
    with server(tmp_path / "X8", x_server(idle)):
        os.rename(tmp_path / "X8", tmp_path / "X9")
        assert XDisplay("unix:9.0", tmp_path / "none", tmp_path).ask() == Answer(
            "x11", 0.0, "display unix:9.0"
        )


def test_an_x_server_without_the_extension_or_none_at_all_says_nothing(tmp_path: Path) -> None:
    with server(tmp_path / "X7", x_server([0], extension=False)):
        assert XDisplay(":7", tmp_path / "none", tmp_path).ask() is None
    assert XDisplay(":8", tmp_path / "none", tmp_path).ask() is None
    assert XDisplay("far.away:0", tmp_path / "none", tmp_path).ask() is None


@given(st.binary(max_size=200))
def test_no_file_of_cookies_breaks_its_reader(data: bytes) -> None:
    for family, number, name, secret in cookies(data):
        assert 0 <= family <= 65535
        assert len(number) + len(name) + len(secret) <= len(data)


def test_the_cookie_is_that_of_the_display(tmp_path: Path) -> None:
    path = authority(tmp_path / "auth", (256, b"1", b"one"), (0, b"2", b"tcp"), (65535, b"2", b"two"))
    assert [find_cookie(path, number) for number in ("1", "2", "3")] == [b"one", b"two", b""]


@given(st.binary(max_size=120))
def test_whatever_an_x_server_sends_the_node_lives(data: bytes) -> None:
    display = XDisplay(":0")
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        display._socket, display._opcode = ours, 140
        ours.settimeout(1.0)
        answer = display.ask()
    display.close()
    assert answer is None or answer.idle_s is not None


@pytest.mark.skipif(not (shutil.which("Xvfb") and shutil.which("xdotool")), reason="no Xvfb or xdotool here")
def test_a_real_x_server_tells_of_real_input(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(writing), "-screen", "0", "320x240x8", "-nolisten", "tcp"],
        pass_fds=[writing],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            number = pipe.readline().strip()
        display = XDisplay(f":{number}", tmp_path / "none")
        first = display.ask()
        assert first is not None
        subprocess.run(["xdotool", "key", "a"], env={**os.environ, "DISPLAY": f":{number}"}, check=True)
        second = display.ask()
        assert second is not None
        assert second.idle_s is not None
        assert second.idle_s < 60.0
        display.close()
    finally:
        server.terminate()
        server.wait(10)


# --- Wayland


class Compositor:
    """Speaks just enough of the protocol; ``tell`` sends idled (0) or resumed (1)."""

    def __init__(self, interfaces: tuple[str, ...] = ("wl_compositor", "wl_seat", "ext_idle_notifier_v1")):
        self._interfaces = interfaces
        self.connections: list[socket.socket] = []
        self.asked = threading.Event()
        self.notification = 0
        self.timeout_ms = 0

    def serve(self, connection: socket.socket) -> None:
        self.connections.append(connection)
        while True:
            number, word = struct.unpack("=II", exactly(connection, 8))
            body = exactly(connection, (word >> 16) - 8)
            opcode = word & 0xFFFF
            if number == 1 and opcode == 1:
                registry = struct.unpack("=I", body)[0]
                for name, interface in enumerate(self._interfaces):
                    global_ = struct.pack("=I", name) + text(interface) + struct.pack("=I", 1)
                    connection.sendall(message(registry, 0, global_))
            elif number == 1 and opcode == 0:
                connection.sendall(message(struct.unpack("=I", body)[0], 0, struct.pack("=I", 5)))
            elif number == 5 and opcode == 1:
                self.notification, self.timeout_ms, _ = struct.unpack("=III", body)
                self.asked.set()

    def tell(self, opcode: int) -> None:
        assert self.asked.wait(30)
        self.connections[-1].sendall(message(self.notification, opcode, b""))


def until(source: Wayland, wanted: Callable[[Answer | None], bool]) -> Answer:
    for _ in range(6000):
        answer = source.ask()
        if answer is not None and wanted(answer):
            return answer
        time.sleep(0.005)
    pytest.fail("not seen")


def test_a_compositor_tells_when_a_person_goes_and_comes(tmp_path: Path) -> None:
    compositor = Compositor()
    with server(tmp_path / "wayland-0", compositor.serve):
        source = Wayland(tmp_path / "wayland-0")
        assert source.ask() == Answer("wayland", 0.0)
        compositor.tell(0)
        answer = until(source, lambda answer: answer is not None and bool(answer.idle_s))
        assert answer.idle_s is not None
        assert answer.idle_s >= compositor.timeout_ms / 1000 == 1.0
        compositor.tell(1)
        until(source, lambda answer: answer == Answer("wayland", 0.0))
        compositor.connections[-1].shutdown(socket.SHUT_RDWR)
        for _ in range(6000):
            if source.ask() is None:  # noticed, and made anew by the next
                break
            time.sleep(0.005)
        assert source.ask() == Answer("wayland", 0.0)
        source.close()


def test_a_compositor_that_cannot_say_says_nothing(tmp_path: Path) -> None:
    with server(tmp_path / "wayland-0", Compositor(("wl_seat",)).serve):
        assert Wayland(tmp_path / "wayland-0").ask() is None
    assert Wayland(tmp_path / "wayland-1").ask() is None


@given(st.binary(max_size=200))
def test_whatever_a_compositor_sends_the_node_lives(data: bytes) -> None:
    source = Wayland(Path("/nowhere"))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        source._socket = ours
        ours.setblocking(False)
        answer = source.ask()
    source.close()
    assert answer is None or answer.idle_s is not None


# --- D-Bus


class Desk:
    """logind and GNOME as a real bus shows them."""

    def __init__(self, address: str) -> None:
        self.sessions: dict[str, dict[str, Any]] = {}
        self.gnome_ms: int | None = None
        self._connection = open_dbus_connection(bus=address)
        self._names = ("org.freedesktop.login1", "org.gnome.Mutter.IdleMonitor")
        from jeepney import message_bus

        for name in self._names:
            self._connection.send_and_get_reply(message_bus.RequestName(name))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._connection.close()

    def _serve(self) -> None:
        from jeepney import HeaderFields, new_error

        while True:
            try:
                call = self._connection.receive()
            except (OSError, EOFError):
                return
            if call.header.message_type != MessageType.method_call:
                continue
            member, path = call.header.fields[HeaderFields.member], call.header.fields[HeaderFields.path]
            reply = self._answer(member, path, call.body)
            if reply is None:
                self._connection.send(new_error(call, "org.freedesktop.DBus.Error.Failed"))
            else:
                self._connection.send(new_method_return(call, *reply))

    def _answer(self, member: str, path: str, body: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if member == "ListSessions":
            entries = [("1", 1000, "ann", "seat0", name) for name in self.sessions]
            return "a(susso)", (entries,)
        if member == "GetAll":
            return "a{sv}", (
                {
                    name: ("b" if isinstance(value, bool) else "t" if isinstance(value, int) else "s", value)
                    for name, value in self.sessions[path].items()
                },
            )
        if member == "Get":
            value = self.sessions[path].get(body[1], False)
            return "v", (("b" if isinstance(value, bool) else "t", value),)
        if member == "GetIdletime" and self.gnome_ms is not None:
            return "t", (self.gnome_ms,)
        return None


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    """The address of a real message bus of our own."""
    program = shutil.which("dbus-daemon")
    if program is None:
        pytest.skip("no dbus-daemon here")
    config = tmp_path / "bus.conf"
    config.write_text(
        "<busconfig><type>session</type><listen>unix:dir=" + os.fspath(tmp_path) + "</listen>"
        '<policy context="default"><allow send_destination="*"/><allow own="*"/>'
        '<allow eavesdrop="false"/></policy></busconfig>'
    )
    daemon = subprocess.Popen(
        [program, f"--config-file={config}", "--nofork", "--print-address=1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert daemon.stdout is not None
    try:
        yield daemon.stdout.readline().strip()
    finally:
        daemon.terminate()
        daemon.wait(10)
        daemon.stdout.close()


def desktop(bus: str, tmp_path: Path) -> Desktop:
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "x").mkdir(exist_ok=True)
    return Desktop(Bus("SYSTEM", bus), Bus("SESSION", bus), tmp_path / "run", tmp_path / "x")


SESSION = {"Class": "user", "State": "active", "Type": "wayland", "Display": "", "TTY": "", "IdleHint": False}


def test_r14_logind_and_gnome_are_asked_over_a_real_bus(
    bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(presence_linux, "_LOOK_S", 0.0)
    monkeypatch.setattr(presence_linux, "_MISSING_S", 0.0)
    desk = Desk(bus)
    source = desktop(bus, tmp_path)
    assert source.ask() == Answer("logind", None)  # nobody is logged in
    desk.sessions["/s/1"] = {**SESSION, "Type": "tty", "TTY": "pts/3"}
    assert source.ask() is None  # that is for the terminals to tell
    assert source.terminals() == ["pts/3"]
    desk.sessions["/s/2"] = dict(SESSION)
    desk.sessions["/s/3"] = {**SESSION, "Class": "greeter", "IdleHint": True, "IdleSinceHint": 1}
    answer = source.ask()
    assert answer == Answer("logind", 0.0, "the desktop's own hint")
    desk.sessions["/s/2"] |= {"IdleHint": True, "IdleSinceHint": int((time.time() - 90) * 1e6)}
    answer = source.ask()
    assert answer is not None
    assert answer.idle_s == pytest.approx(90, abs=5)
    desk.gnome_ms = 4200
    assert source.ask() == Answer("gnome", 4.2)
    desk.close()


def test_a_bus_that_goes_away_is_no_end(bus: str, tmp_path: Path) -> None:
    desk = Desk(bus)
    line = Bus("SESSION", bus)
    desk.gnome_ms = 1000
    assert gnome_idle_s(line) == 1.0
    desk.close()
    assert gnome_idle_s(line) is None
    assert Logind(Bus("SYSTEM", f"unix:path={tmp_path}/none")).sessions() is None
    assert DBusAddress("/a").object_path == "/a"


def test_an_x_display_is_not_asked_where_wayland_runs(
    bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPLAY", ":7")
    monkeypatch.setenv("XAUTHORITY", os.fspath(tmp_path / "none"))
    monkeypatch.setattr(presence_linux, "_LOOK_S", 0.0)
    desk = Desk(bus)
    source = desktop(bus, tmp_path)
    desk.sessions["/s/2"] = {**SESSION, "Type": "x11", "Display": ":7"}
    with server(tmp_path / "x" / "X7", x_server([2500])):
        assert source.ask() == Answer("x11", 2.5, "display :7")
        desk.sessions["/s/2"] = dict(SESSION)
        assert source.ask() == Answer("logind", 0.0, "the desktop's own hint")
        compositor = Compositor()
        with server(tmp_path / "run" / "wayland-0", compositor.serve):
            assert source.ask() == Answer("wayland", 0.0)
            source._compositors[tmp_path / "run" / "wayland-0"].close()
    desk.close()


# --- terminals, other systems


def test_terminals_tell_when_they_were_last_read_from(tmp_path: Path) -> None:
    (tmp_path / "pts").mkdir()
    for name, age in (("3", 500.0), ("4", 40.0), ("ptmx", 0.0)):
        path = tmp_path / "pts" / name
        path.touch()
        os.utime(path, (time.time() - age, time.time()))
    everybody = Terminals(tmp_path, users=list).ask()
    assert everybody is not None
    assert everybody.detail == "2 terminals"
    assert everybody.idle_s == pytest.approx(40, abs=5)
    one = Terminals(tmp_path, users=lambda: ["pts/3", "pts/99"]).ask()
    assert one is not None
    assert one.detail == "1 terminal"
    assert one.idle_s == pytest.approx(500, abs=5)
    assert Terminals(tmp_path / "none", users=list).ask() is None


def test_what_ioreg_prints_is_read() -> None:
    said = '  | |   "HIDIdleTime" = 2541000000\n  | |   "HIDIdleTime" = 981541250\n  "Other" = 7\n'
    assert idle_in_ioreg(said) == pytest.approx(0.98154125)
    assert idle_in_ioreg("") is None


def test_windows_ticks_go_round() -> None:
    assert ticks_between(0xFFFFFF00, 0x100) == 0x200


@pytest.mark.parametrize(
    ("platform", "names"),
    [
        ("linux", ["desktop", "terminals"]),
        ("darwin", ["macos", "terminals"]),
        ("win32", ["windows"]),
        ("freebsd14", ["terminals"]),
    ],
)
def test_every_system_has_its_sources_and_none_of_them_raises(platform: str, names: list[str]) -> None:
    sources = open_sources(platform)
    assert [source.name for source in sources] == names
    for source in sources:
        source.ask()

"""``barnraise tui`` with a real daemon's socket, with none, and where there is no terminal."""

import asyncio
import os
import pty
import re
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from app_support import press, recorded, text

from barnraise.protocol.control import Changed, serve_control
from barnraise.protocol.errors import BarnraiseError, PeerError
from barnraise.tui import main as command_line
from barnraise.tui.app.app import NodeApp
from barnraise.tui.app.client import Link

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Daemon:
    """A control socket as a node serves it, in a thread of its own; ``state`` may be changed by ``show``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = recorded()
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=trio.run, args=(self._main,), daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.result(30)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._token.run_sync_soon(self._scope.cancel)
            self._thread.join(30)

    def show(self, **changes: Any) -> None:
        def change() -> None:
            self.state = self.state | changes
            self._changed.set()

        self._token.run_sync_soon(change)

    def _handler(self, name: str) -> Handler:
        async def handle(arguments: dict[str, Any]) -> dict[str, Any]:
            self.commands.append((name, arguments))
            if name == "finish":
                raise BarnraiseError("the run is [bold]complete[/]")
            if name == "appeal":
                await trio.sleep_forever()
            if name == "pause":
                self.state = self.state | {"state": "paused", "reason": "paused by command", "unit": None}
                self._changed.set()
            return {"ok": True, "text": f"{name} [red]done[/]"}

        return handle

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._changed = Changed()
        names = ("pause", "resume", "finish", "leave", "limits", "appeal", "agree", "decline")
        handlers = {name: self._handler(name) for name in names}
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_control, self.path, lambda: self.state, handlers, self._changed)
                self._ready.set_result(None)
                await trio.sleep_forever()


@contextmanager
def daemon(folder: Path) -> Iterator[Daemon]:
    it = Daemon(folder / "control.sock")
    it.start()
    try:
        yield it
    finally:
        it.stop()


async def until(condition: Callable[[], bool], app: NodeApp | None = None) -> None:
    """Wait for something that comes from another thread."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def test_the_app_follows_a_real_daemon_and_finds_it_again(tmp_path: Path) -> None:
    async def story() -> None:
        app = NodeApp(tmp_path, ascii=False)
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            await until(lambda: "No node is running here" in text(app))
            with daemon(tmp_path) as it:
                await press(app, pilot, "ctrl+r")
                await until(lambda: "37.4 Gflop" in text(app))
                it.show(credit=41_000)
                await until(lambda: "41.0 Gflop" in text(app))
                await press(app, pilot, "p")
                await until(lambda: "paused by command" in text(app))
                await until(lambda: "pause [red]done[/]" in text(app))
                await press(app, pilot, "f")
                await until(lambda: "finish: the run is [bold]complete[/]" in text(app))
                await press(app, pilot, "P", "f1")
                await press(app, pilot, "l", "y")
                await until(lambda: ("leave", {}) in it.commands)
                assert it.commands[2] == ("pause", {"seconds": 1800})
                it.show(consent={"run_id": "ab", "fields": [["run", "reverse"]]})
                await until(lambda: "Lend this machine to this run?" in text(app))
                await press(app, pilot, "y")
                await until(lambda: ("agree", {"run_id": "ab"}) in it.commands)
                it.show(consent=None)
            await until(lambda: "The node has ended" in text(app))
            with daemon(tmp_path):
                await until(lambda: "The node has ended" not in text(app))
                await pilot.press("q")
        assert (app.return_value or "").startswith("the node goes on")

    asyncio.run(story())


def test_pushes_are_coalesced_and_the_last_one_arrives(tmp_path: Path) -> None:
    came: list[int] = []
    with daemon(tmp_path) as it:
        link = Link(
            tmp_path / "control.sock", lambda state: came.append(state["credit"]), lambda *_: None, 0.3
        )
        link.start()
        begin = time.monotonic()
        for credit in range(50):
            it.show(credit=credit)
            time.sleep(0.008)
        asyncio.run(until(lambda: came[-1:] == [49]))
        assert len(came) <= 3 + (time.monotonic() - begin) / 0.3
        link.stop()


def test_a_command_that_hangs_keeps_nobody_from_quitting(tmp_path: Path) -> None:
    async def story() -> None:
        with daemon(tmp_path) as it:
            app = NodeApp(tmp_path, ascii=False)
            async with app.run_test() as pilot:
                await until(lambda: "37.4 Gflop" in text(app))
                app.order("appeal", receipt="#1")
                await until(lambda: bool(it.commands))
                await pilot.press("q")

    asyncio.run(asyncio.wait_for(story(), 90))


def test_a_command_to_nobody_fails_and_one_under_way_hears_of_the_end(tmp_path: Path) -> None:
    lost = threading.Event()
    seen = threading.Event()
    link = Link(tmp_path / "control.sock", lambda _: seen.set(), lambda *_: lost.set())
    with pytest.raises(PeerError, match="no node is running"):
        link.command("pause", {}).result(30)  # before it began
    link.start()
    assert lost.wait(30)
    with pytest.raises(PeerError, match="no node is running"):
        link.command("pause", {}).result(30)
    with daemon(tmp_path) as it:
        link.retry()
        assert seen.wait(30)
        under_way = link.command("appeal", {})
        asyncio.run(until(lambda: bool(it.commands)))
    with pytest.raises(PeerError, match=r"gone|ended"):
        under_way.result(30)
    link.stop()


# --- the command


def test_without_a_terminal_the_error_names_what_prints_lines(  # R24
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["tui", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "not a terminal" in error
    assert f"barnraise status {tmp_path}" in error


def test_a_folder_that_is_none_or_a_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["tui", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "spec.bin").touch()
    assert command_line.main(["tui", str(tmp_path)]) == 2
    assert "barnraise status" in capsys.readouterr().err


def in_a_terminal(*arguments: str, keys: dict[str, bytes], **environment: str) -> tuple[int, str]:
    """Run the command in a pseudo-terminal of 80x24; when a text is shown, its keys are pressed."""
    import fcntl
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **environment}
    command = [sys.executable, "-P", "-m", "barnraise.tui.main", "tui", *arguments]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, close_fds=True)
    os.close(slave)
    shown = b""
    waiting = dict(keys)
    deadline = time.monotonic() + 40
    try:
        while time.monotonic() < deadline:
            ready, _, _ = select.select([master], [], [], 0.2)
            if ready:
                try:
                    piece = os.read(master, 65_536)
                except OSError:
                    break
                if not piece:
                    break
                shown += piece
            plain = re.sub(rb"\x1b\[[0-9;]*m", b"", shown)
            for wanted in list(waiting):
                if wanted.encode() in plain:
                    os.write(master, waiting.pop(wanted))
        return process.wait(10), shown.decode("utf-8", "replace")
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.e2e
def test_the_real_command_in_a_terminal_watches_commands_and_detaches(tmp_path: Path) -> None:
    with daemon(tmp_path) as it:
        code, shown = in_a_terminal(str(tmp_path), keys={"Gflop": b"p", "paused by command": b"q"})
        assert it.commands == [("pause", {})]
    assert code == 0
    assert shown.rstrip().endswith(f"'barnraise leave {tmp_path}' ends it")


@pytest.mark.e2e
def test_a_poor_terminal_gets_ascii_and_no_colour(tmp_path: Path) -> None:
    with daemon(tmp_path):
        code, shown = in_a_terminal(
            str(tmp_path), keys={"Gflop": b"q"}, LC_ALL="C", LANG="C", NO_COLOR="1", PYTHONUTF8="0"
        )
    assert code == 0
    assert shown.isascii()
    assert "\x1b[38;" not in shown
    assert "\x1b[48;" not in shown
    assert "generating" in shown

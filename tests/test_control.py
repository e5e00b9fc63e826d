from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barnraise.protocol import control, control_place
from barnraise.protocol.control import MAX_VIEWERS, Changed, serve_control
from barnraise.protocol.control_client import connect_control, read_state, send_command
from barnraise.protocol.control_place import socket_path
from barnraise.protocol.errors import BarnraiseError, PeerError


class Daemon:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"kind": "node", "accepted": 0, "loss": [[0, 0.5]]}
        self.changed = Changed()
        self.commands: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "add": self.add,
            "refuse": self.refuse,
            "break": self.break_,
            "sleep": self.sleep,
        }

    async def add(self, args: dict[str, Any]) -> dict[str, Any]:
        self.state["accepted"] += args["count"]
        self.changed.set()
        return {"accepted": self.state["accepted"]}

    async def refuse(self, args: dict[str, Any]) -> dict[str, Any]:
        raise BarnraiseError("the run is complete")

    async def break_(self, args: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError

    async def sleep(self, args: dict[str, Any]) -> dict[str, Any]:
        await trio.sleep(args["seconds"])
        return {}


@asynccontextmanager
async def daemon(path: Path) -> AsyncIterator[Daemon]:
    it = Daemon()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, lambda: it.state, it.commands, it.changed)
        yield it
        nursery.cancel_scope.cancel()


async def test_a_viewer_sees_the_state_and_every_change(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with daemon(path) as it, connect_control(path) as viewer, connect_control(path) as other:
        assert viewer.state == it.state
        assert await viewer.command("add", count=3) == {"accepted": 3}
        with trio.fail_after(30):
            assert (await viewer.wait_change())["accepted"] == 3
            assert (await other.wait_change())["accepted"] == 3
    assert not path.exists()


async def test_many_changes_are_pushed_at_most_five_times_a_second(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with daemon(path) as it, connect_control(path) as viewer:
        pushes, began = 0, trio.current_time()
        with trio.move_on_after(1.0):
            async with trio.open_nursery() as nursery:

                async def change() -> None:
                    while True:
                        it.state["accepted"] += 1
                        it.changed.set()
                        await trio.sleep(0.005)

                nursery.start_soon(change)
                while True:
                    await viewer.wait_change()
                    pushes += 1
        assert 1 <= pushes <= 1 + 5 * (trio.current_time() - began)
        last = it.state["accepted"]
        with trio.fail_after(30):
            while viewer.state["accepted"] != last:
                await viewer.wait_change()


async def test_the_blocking_helpers_read_and_command(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with daemon(path) as it:
        run = trio.to_thread.run_sync
        assert await run(read_state, path) == it.state
        assert await run(partial(send_command, path, "add", count=2)) == {"accepted": 2}
        with pytest.raises(BarnraiseError, match="the run is complete"):
            await run(send_command, path, "refuse")
        with pytest.raises(BarnraiseError, match=r"no command 'dance'; there are: add, break"):
            await run(send_command, path, "dance")
        with pytest.raises(BarnraiseError, match="ZeroDivisionError"):
            await run(send_command, path, "break")
        with pytest.raises(PeerError, match="did not answer sleep"):
            await run(partial(send_command, path, "sleep", timeout_s=0.1, seconds=9))


def test_nobody_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no process serves"):
        read_state(tmp_path / "control.sock")


async def test_only_the_owner_may_open_it(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with daemon(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_dead_process_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert path.exists()
    async with daemon(path) as it:
        assert await trio.to_thread.run_sync(read_state, path) == it.state


async def test_a_living_daemon_is_not_pushed_aside(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with daemon(path) as it:
        with pytest.raises(BarnraiseError, match=r"another process serves .*stop it first"):
            await serve_control(path, dict, {}, Changed())
        assert await trio.to_thread.run_sync(read_state, path) == it.state


async def test_a_file_in_the_way_is_not_deleted(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.write_text("precious")
    with pytest.raises(BarnraiseError, match="in the way"):
        await serve_control(path, dict, {}, Changed())
    assert path.read_text() == "precious"


async def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BarnraiseError, match="cannot make the control socket"):
        await serve_control(tmp_path / "no" / "control.sock", dict, {}, Changed())


@pytest.mark.parametrize("runtime", [True, False])
async def test_a_long_path_gets_a_short_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: bool
) -> None:
    short = Path("/tmp") / f"barnraise-test-{os.getpid()}"
    short.mkdir(mode=0o700)
    try:
        if runtime:
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
        else:
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
            monkeypatch.setattr(control_place.tempfile, "gettempdir", lambda: str(short))
        folder = tmp_path / ("deep" * 20) / ("deeper" * 10)
        folder.mkdir(parents=True)
        path = folder / "control.sock"
        place = socket_path(path)
        assert place.is_relative_to(short)
        async with daemon(path) as it:
            assert stat.S_IMODE(place.stat().st_mode) == 0o600
            assert await trio.to_thread.run_sync(read_state, path) == it.state
            async with connect_control(path) as viewer:
                assert viewer.state == it.state
    finally:
        subprocess.run(["rm", "-rf", str(short)], check=True)


def dial(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return sock


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\xff\xff\xff\xff",  # a length of 4 GiB
        b"\x00\x01\x00\x01",  # just over the limit
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x01\x80",  # an empty map
        b"\x00\x00\xff\xff" + b"\x91" * 0xFFFF,  # nesting without end
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00",  # the end in the middle of a length
    ],
)
async def test_rubbish_drops_its_sender_alone(tmp_path: Path, rubbish: bytes) -> None:
    path = tmp_path / "control.sock"
    async with daemon(path), connect_control(path) as viewer:
        bad = dial(path)
        await trio.to_thread.run_sync(bad.sendall, rubbish)
        bad.shutdown(socket.SHUT_WR)
        bad.settimeout(5)
        with suppress(ConnectionResetError):
            while await trio.to_thread.run_sync(bad.recv, 65536):
                pass
        bad.close()
        assert await viewer.command("add", count=1)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_never_disturb_the_daemon(tmp_path: Path, pieces: list[bytes]) -> None:
    path = tmp_path / "control.sock"

    async def main() -> None:
        async with daemon(path), connect_control(path) as viewer:
            bad = dial(path)
            for piece in pieces:
                await trio.sleep(0)
                try:
                    bad.send(piece, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except OSError:
                    break
            bad.close()
            assert await viewer.command("add", count=1)

    trio.run(main)


async def test_a_viewer_that_does_not_read_is_dropped_and_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "WRITE_TIMEOUT_S", 0.3)
    path = tmp_path / "control.sock"
    async with daemon(path) as it:
        it.state["much"] = "x" * 4_000_000
        deaf = dial(path)
        await trio.sleep(0.6)
        async with connect_control(path) as viewer:
            assert len(viewer.state["much"]) == 4_000_000
        deaf.settimeout(1)
        received = 0
        while piece := await trio.to_thread.run_sync(deaf.recv, 1 << 20):
            received += len(piece)
        assert received < 4_000_000
        deaf.close()


async def test_too_many_viewers_are_turned_away(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with daemon(path):
        crowd = []
        for _ in range(MAX_VIEWERS):
            crowd.append(dial(path))
            await trio.sleep(0.001)
        await trio.sleep(0.1)
        with pytest.raises(PeerError):
            await trio.to_thread.run_sync(read_state, path)
        crowd.pop().close()
        with trio.fail_after(30):  # its place is free once the daemon has noticed
            while True:
                with suppress(PeerError):
                    assert await trio.to_thread.run_sync(read_state, path)
                    break
        for sock in crowd:
            sock.close()


async def test_the_daemons_end_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    it = Daemon()
    async with trio.open_nursery() as outer:
        inner = await outer.start(
            _cancellable, partial(serve_control, path, lambda: it.state, {}, it.changed)
        )
        async with connect_control(path) as viewer:
            inner.cancel()
            with trio.fail_after(30), pytest.raises(PeerError, match="the daemon has ended"):
                await viewer.wait_change()
            with pytest.raises(PeerError, match="the daemon has ended"):
                await viewer.command("add", count=1)


async def _cancellable(
    serve: Callable[..., Awaitable[None]], *, task_status: Any = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            task_status.started(scope)


async def test_a_state_that_cannot_be_encoded_is_logged_not_fatal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "control.sock"
    async with daemon(path) as it, connect_control(path) as viewer:
        it.state["bad"] = object()
        it.changed.set()
        with trio.fail_after(30):
            while "could not be shown" not in caplog.text:
                await trio.sleep(0.01)
        del it.state["bad"]
        assert await viewer.command("add", count=1)

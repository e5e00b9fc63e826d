"""``pause``, ``resume``, ``finish``, ``leave``: obeyed, safe to repeat, clear where nothing runs (R13)."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from barnraise.node.supervise import lock_path
from barnraise.protocol.control import Changed, serve_control
from barnraise.protocol.errors import RefusedError
from barnraise.tui import main as command_line
from barnraise.tui import steer
from barnraise.tui.steer import parse_span


def call(*arguments: object) -> int:
    return command_line.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("90m", 5400),
        ("90min", 5400),
        ("2h", 7200),
        ("1d12h", 129_600),
        ("1h 30m", 5400),
        ("600", 600),
        ("2H", 7200),
        ("", None),
        ("0", None),
        ("h", None),
        ("-2h", None),
        ("2.5h", None),
        ("2 weeks", None),
        ("30s1h", None),
    ],
)
def test_spans_are_read_as_people_write_them_or_refused(text: str, seconds: int | None) -> None:
    if seconds is None:
        with pytest.raises(ValueError, match=r"write|longer"):
            parse_span(text)
    else:
        assert parse_span(text) == seconds


@given(st.text(max_size=20))
def test_no_text_breaks_the_parser(text: str) -> None:
    with suppress(ValueError):
        assert parse_span(text) > 0


class Daemon:
    """What a node would answer, as far as these commands look at it."""

    def __init__(self, obeys: bool = True, kind: str = "node") -> None:
        self.state: dict[str, Any] = {"kind": kind, "mode": "run", "state": "generating", "reason": "8 rows"}
        self.given: list[tuple[str, dict[str, Any]]] = []
        self.changed = Changed()
        self.over = trio.Event()
        self._obeys = obeys

    def commands(self) -> dict[str, Any]:
        return {name: self._command(name) for name in ("pause", "resume", "finish", "leave")}

    def _command(self, name: str) -> Any:
        async def handler(arguments: dict[str, Any]) -> dict[str, Any]:
            self.given.append((name, arguments))
            if arguments.get("seconds", 0) > 366 * 86_400:
                raise RefusedError("bad-argument", "seconds must be at most a year's")
            if self._obeys:
                new = {"pause": ("pause", "paused"), "resume": ("run", "asking"), "finish": ("finish", "x")}
                self.state["mode"], self.state["state"] = new.get(name, ("leave", "leaving"))
                self.changed.set()
                if name == "leave":
                    self.over.set()
            return {"ok": True, "text": f"{name}: done"}

        return handler


@contextmanager
def served(folder: Path, daemon: Daemon) -> Iterator[Path]:
    """``daemon`` behind a control socket, in another thread, until it left or the block ends."""
    folder.mkdir(exist_ok=True)
    ready = threading.Event()
    token: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        daemon.over = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(
                serve_control,
                folder / "control.sock",
                lambda: daemon.state,
                daemon.commands(),
                daemon.changed,
            )
            daemon.changed.set()
            token.append(trio.lowlevel.current_trio_token())
            ready.set()
            await daemon.over.wait()
            await trio.sleep(0.05)  # the reply goes out
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert ready.wait(30)
        yield folder
    finally:
        with suppress(trio.RunFinishedError):
            token[0].run_sync_soon(daemon.over.set)
        thread.join(30)


def test_commands_act_say_so_and_may_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = Daemon()
    with served(tmp_path / "n", daemon) as home:
        for _ in range(2):
            assert call("pause", home, "--for", "2h") == 0
        assert "pause: done" in capsys.readouterr().out
        for _ in range(2):
            assert call("resume", home, "--json") == 0
            told = json.loads(capsys.readouterr().out)
            assert told["ok"]
            assert told["running"]
            assert told["mode"] == "run"
            assert told["seconds"] >= 0.0
        assert call("finish", home) == 0
        assert call("leave", home, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["running"] is False
    assert daemon.given[0] == ("pause", {"seconds": 7200.0})
    assert [name for name, _ in daemon.given] == ["pause", "pause", "resume", "resume", "finish", "leave"]


def test_a_process_that_does_not_answer_is_not_called_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever believed it would start a second one."""
    (tmp_path / "spec.bin").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control.sock"))
        listener.listen()
        crowded = threading.Thread(target=lambda: [listener.accept()[0].close() for _ in range(2)])
        crowded.start()
        for command in (["status", tmp_path], ["admit", "list", tmp_path]):
            assert call(*command) == 1
            complaint = capsys.readouterr().err
            assert "does not answer" in complaint
            assert "start it" not in complaint
        crowded.join()


def test_where_nothing_runs_it_is_said_and_what_is_wished_already_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "known.json").touch()
    for verb in ("pause", "resume"):
        assert call(verb, tmp_path) == 1
        complaint = capsys.readouterr().err
        assert complaint.count("\n") == 1
        assert "nothing is running" in complaint
        assert "barnraise join" in complaint
    for verb in ("finish", "leave"):
        assert call(verb, tmp_path) == 0
        assert "no node runs in" in capsys.readouterr().out
        assert call(verb, tmp_path, "--json") == 0
        assert json.loads(capsys.readouterr().out)["running"] is False
    assert call("pause", tmp_path / "nowhere") == 2


def test_a_node_that_takes_a_command_and_does_not_obey_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steer, "EFFECT_S", 0.2)
    with served(tmp_path / "n", Daemon(obeys=False)) as home:
        assert call("pause", home) == 1
    assert "still generating" in capsys.readouterr().err


def test_a_coordinator_is_not_steered_as_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(tmp_path / "n", Daemon(kind="coordinator")) as home:
        for verb in ("pause", "resume", "finish", "leave"):
            assert call(verb, home) == 1
            assert "run folder" in capsys.readouterr().err


@pytest.mark.parametrize("span", ["0", "soon", "-1h", "400d"])
def test_an_unusable_span_changes_nothing(span: str, tmp_path: Path) -> None:
    daemon = Daemon()
    with served(tmp_path / "n", daemon) as home:
        assert call("pause", home, "--for", span) in (1, 2)
    assert daemon.state["mode"] == "run"


def test_a_node_that_waits_after_a_crash_is_said_and_can_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    lock = lock_path(tmp_path).open("w+b")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(json.dumps({"pid": os.getpid(), "text": "it crashed", "until_ms": 2**42}).encode())
    lock.flush()
    for verb in ("pause", "status"):
        assert call(verb, tmp_path) == 1
        assert "it crashed; it starts again in" in capsys.readouterr().err
    killed: list[int] = []

    def kill(pid: int) -> None:
        killed.append(pid)
        lock.close()

    monkeypatch.setattr(steer, "_signal", kill)
    assert call("leave", tmp_path) == 0
    assert killed == [os.getpid()]

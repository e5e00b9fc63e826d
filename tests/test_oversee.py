"""``coordinator pause|resume|rollback|drain|stop``, ``admit`` and ``run amend`` at the control socket."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from web_support import Web, finish_all, key_of, ordinary, website

from barnraise.coordinator.draining import REASON
from barnraise.protocol.control import Changed, serve_control
from barnraise.protocol.identity import peer_id_of
from barnraise.tui import main as command_line
from barnraise.tui.console import emit_json
from barnraise.tui.status import overview


class Served:
    """A coordinator's commands behind its control socket, in another thread."""

    def __init__(self, web: Web, token: trio.lowlevel.TrioToken) -> None:
        self.web = web
        self.folder = web.run_folder
        self._token = token

    def within(self, work: Any, *arguments: Any) -> Any:
        """Have something done in the coordinator's thread."""
        return trio.from_thread.run(work, *arguments, trio_token=self._token)


@contextmanager
def served(tmp_path: Path) -> Iterator[Served]:
    """The coordinator ends as it does on ``stop``, and with the block."""
    there: list[Served] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with website(tmp_path) as web, trio.open_nursery() as nursery:
            await web.record(ordinary(web.core.run_id).events)
            state, commands = web.service.admin.get_state, web.service.admin.commands
            control = partial(serve_control, web.run_folder / "control.sock", state, commands, Changed())
            await nursery.start(control)
            there.append(Served(web, trio.lowlevel.current_trio_token()))
            ready.set()
            await web.ended.wait()
            await trio.sleep(0.1)  # the reply goes out
            nursery.cancel_scope.cancel()
        over.set()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(60)
    try:
        yield there[0]
    finally:
        if not over.is_set():
            there[0].within(_set, there[0].web.ended)
        thread.join(30)


async def _set(event: trio.Event) -> None:
    event.set()


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code = command_line.main([*(str(argument) for argument in arguments), "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if code == 0 else said.err


def test_what_an_operator_types_is_done_once_and_said_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path) as run:
        coordinator = partial(call, capsys, "coordinator")
        for _ in range(2):
            assert coordinator("pause", run.folder, "--reason", "a move") == (
                0,
                {"paused": {"by": "operator", "reason": "a move"}},
            )
        assert coordinator("resume", run.folder) == (0, {"paused": None})
        code, why = coordinator("rollback", run.folder, 99, "--reason", "x")
        assert code == 1
        assert "not an earlier one" in why
        code, reply = call(capsys, "run", "amend", run.folder, "grpo.learning_rate=5e-7", "--reason", "KL")
        assert (code, reply) == (0, {"number": 1, "changed": {"grpo.learning_rate": "5e-07"}})
        code, reply = call(capsys, "admit", "mode", run.folder, "invite", "--keep-proven")
        assert (code, reply["admission"], reply["amendment"]) == (0, "invite", 2)
        assert peer_id_of(key_of(0)) in reply["allowed"]
        code, reply = call(capsys, "admit", "ban", run.folder, "anna", "--reason", "floods", "--for", "1d")
        assert (code, reply["node"]) == (0, peer_id_of(key_of(0)))
        many = [peer_id_of(number.to_bytes(32, "big")) for number in range(1200)]
        for command, key in (("allow", "allowed"), ("disallow", "disallowed")):
            code, reply = call(capsys, "admit", command, run.folder, *many)
            assert (code, reply[key]) == (0, many)
        assert coordinator("stop", run.folder) == (0, {"stopped": True, "ran": True})
        for command in ("stop", "drain"):
            assert coordinator(command, run.folder) == (0, {"stopped": True, "ran": False})
        assert coordinator("pause", run.folder, "--reason", "x")[0] == 1


def test_what_is_no_run_folder_is_said_so_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        for command in (
            ("coordinator", "stop", place),
            ("coordinator", "drain", place),
            ("run", "card", place),
            ("run", "export-model", place, place / "model"),
        ):
            code, said = call(capsys, *command)
            assert code in (1, 2), command
            assert f"{place} is no" in said, command
    assert list(tmp_path.iterdir()) == []


def test_a_drain_waits_for_the_work_at_hand_and_ends_the_coordinator_unpaused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path) as run:

        async def later() -> None:
            while run.web.core.state.operations.paused is None:
                await trio.sleep(0.02)
            assert run.web.core.state.operations.paused.reason == REASON
            await finish_all(run.web)

        helper = threading.Thread(target=run.within, args=(later,))
        helper.start()
        assert call(capsys, "coordinator", "drain", run.folder, "--within", "1m") == (
            0,
            {"stopped": True, "ran": True},
        )
        helper.join()
        assert run.web.core.state.operations.paused is None


@pytest.mark.parametrize("how", ["late", "interrupted"])
def test_a_drain_that_comes_to_nothing_leaves_the_run_at_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    with served(tmp_path) as run:

        async def later() -> None:
            while run.web.core.state.operations.paused is None:
                await trio.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

        if how == "interrupted":
            helper = threading.Thread(target=run.within, args=(later,))
            helper.start()
        code, why = call(capsys, "coordinator", "drain", run.folder, "--within", "1s")
        assert code != 0
        assert ("units are still at work" in why) is (how == "late")
        state = run.web.service.admin.get_state()
        assert (state["paused"], state["draining_until_ms"]) == (None, None)
        assert not run.web.ended.is_set()


def test_what_programs_read_is_json_whatever_a_statistic_became(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"rewards": [[1, float("nan")], [2, 0.5]], "limit": float("-inf"), "text": "NaN"})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"rewards": [[1, None], [2, 0.5]], "limit": None, "text": "NaN"}


def test_the_state_says_at_a_glance_what_is_wrong_and_what_was_done() -> None:
    alarm = {"kind": "kl", "text": "0.6 nats: lower the rate", "since_ms": 0, "value": 0.6, "limit": 0.5}
    state = {"kind": "coordinator", "alarms": [alarm], "rolling_back_to": 0, "draining_until_ms": 720_000}
    rows = overview({**state, "admission": "invite", "amendments": 3}, 600.0)
    assert rows[2:7] == [
        ("ALARM", "kl, for 10m 00s: 0.6 nats: lower the rate"),
        ("rollback", "to version 0, under way"),
        ("draining", "ends once the work at hand is in, waits 2m 00s more at most"),
        ("open to", "the invited and the list"),
        ("amendments", "3, all in the ledger"),
    ]
    calm = {"kind": "coordinator", "alarms": [], "rolling_back_to": None, "draining_until_ms": None}
    labels = {label for label, _ in overview({**calm, "admission": "open", "amendments": 0}, 600.0)}
    assert not labels & {"ALARM", "rollback", "draining", "open to", "amendments"}

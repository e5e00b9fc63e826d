"""The admin API: what the control socket does, for whoever has the token; nothing for anybody else."""

from __future__ import annotations

import json
import logging
import re
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from trio.testing import MockClock, memory_stream_pair
from web_support import Web, connect, finish_all, key_of, ordinary, website

from barnraise.coordinator.draining import REASON
from barnraise.coordinator.guards import GUARDS, THRESHOLDS, GuardLimits
from barnraise.coordinator.ledger_log import entries_of
from barnraise.coordinator.operator_events import AlarmRaised, OperatorAct, RunPaused
from barnraise.coordinator.web.admin import MAX_BODY, read_body
from barnraise.coordinator.web.admin_words import ACTS, LOOKS
from barnraise.coordinator.web.gate import Access, Gate
from barnraise.coordinator.web.listen import Bind, open_listeners, urls_of
from barnraise.coordinator.web.openapi import description
from barnraise.coordinator.web.shell import Server
from barnraise.coordinator.web.tokens import (
    ADDRESSES,
    FREE_TRIES,
    LONGEST_WAIT_S,
    TOKEN_FILE,
    Guesses,
    _Tries,
    is_right,
    make_token,
    read_token,
)
from barnraise.protocol.errors import BarnraiseError, KeyFileError
from barnraise.protocol.identity import peer_id_of
from barnraise.tui.main import main as command_line

ADMIN = "/api/v1/admin"
HERE = {"Host": "127.0.0.1:8080"}
NOBODY = "bra_" + "A" * 43


@pytest.fixture
async def web(tmp_path: Path, autojump_clock: MockClock) -> AsyncIterator[Web]:
    async with website(tmp_path) as found:
        await found.record(ordinary(found.core.run_id).events)
        make_token(found.run_folder)
        yield found


def token_of(web: Web) -> str:
    return read_token(web.run_folder / TOKEN_FILE)


def right(web: Web) -> dict[str, str]:
    return {**HERE, "Authorization": f"Bearer {token_of(web)}"}


async def act(web: Web, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
    """POST as a program of the operator's does."""
    sent = {**right(web), **{name.replace("_", "-"): value for name, value in headers.items()}}
    reply = await web.client.post(f"{ADMIN}/{path}", json=body if body is not None else {}, headers=sent)
    assert reply.status_code == status, reply.text
    assert reply.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in reply.headers
    return reply.json()


def fingerprint(web: Web) -> tuple[int, bool, int]:
    """What any act would change."""
    state = web.core.state
    return len(web.core.ledger), web.ended.is_set(), hash(repr(state.operations))


async def unchanged(web: Web, before: object) -> None:
    await trio.sleep(5)
    assert fingerprint(web) == before


# --- who may


async def test_nothing_is_shown_or_done_without_the_token(web: Web, autojump_clock: MockClock) -> None:
    before, token = fingerprint(web), token_of(web)
    body = b'{"reason":"x","version":0}'
    wrong = (None, f"Bearer {NOBODY}", "Bearer", f"Basic {token}", token, f"Bearer {token[:-1]}")
    ways = [("GET", path) for path in LOOKS] + [("POST", item.path) for item in ACTS]
    for method, path in ways:
        url = f"{ADMIN}/{path}"
        for authorization in (*wrong, f"Bearer {token} {token}"):
            headers = {**HERE, "Content-Type": "application/json", "X-Token": token}
            if authorization is not None:
                headers["Authorization"] = authorization
            reply = await web.client.request(method, url, content=body, headers=headers)
            assert (reply.status_code, reply.json()) == (401, {"error": "unauthorized", "code": ""})
            assert reply.headers["www-authenticate"] == "Bearer"
        for query in (f"access_token={token}", f"token={token}"):
            reply = await web.client.request(method, f"{url}?{query}", content=body, headers=HERE)
            assert reply.status_code == 400
        twice = [*HERE.items(), *[("Authorization", f"Bearer {token}")] * 2]
        assert (await web.client.request(method, url, content=body, headers=twice)).status_code == 401
        web.service.admin.gate.guesses = Guesses()
    await unchanged(web, before)


PASSED_ON = (
    {"Origin": "http://127.0.0.1:8080"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "same-origin"},
    {"Cookie": "a=b"},
    {"Host": "rebound.example:8080"},
    {"Host": "127.0.0.1.example"},
    {"Host": "localhost.example"},
    {"Host": ""},
    {"X-Forwarded-For": "203.0.113.9"},
    {"X-Forwarded-Host": "run.example.org"},
    {"X-Forwarded-Anything": "x"},
    {"Forwarded": "for=203.0.113.9"},
    {"Via": "1.1 proxy"},
    {"X-Real-IP": "203.0.113.9"},
    {"CF-Connecting-IP": "203.0.113.9"},
)


async def test_a_browser_and_whatever_a_proxy_passed_on_are_refused_with_the_right_token_too(
    web: Web, autojump_clock: MockClock
) -> None:
    before = fingerprint(web)
    for headers in PASSED_ON:
        sent = {**right(web), **headers}
        reply = await web.client.post(f"{ADMIN}/pause", json={"reason": "x"}, headers=sent)
        assert reply.status_code == 403, headers
        assert "access-control-allow-origin" not in reply.headers
    await unchanged(web, before)
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]:8080"):
        await act(web, "resume", Host=host)


async def test_no_other_sites_script_is_told_that_it_may_ask(web: Web, autojump_clock: MockClock) -> None:
    asked = {
        "Origin": "https://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for path in ("pause", "status", "nothing"):
        reply = await web.client.options(f"{ADMIN}/{path}", headers=asked)
        assert reply.status_code in (404, 405)
        assert not [name for name in reply.headers if name.startswith("access-control")]


def client_of(web: Web, address: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=web.service.app, client=(address, 4321))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080")


FROM: tuple[tuple[Access, str, dict[str, str], int], ...] = (
    ("local", "127.0.0.1", {}, 200),
    ("local", "::1", {}, 200),
    ("local", "::ffff:127.0.0.1", {}, 200),
    ("local", "203.0.113.9", {}, 403),
    ("local", "10.0.0.2", {}, 403),
    ("proxy", "127.0.0.1", {}, 200),
    ("proxy", "203.0.113.9", {}, 403),
    ("proxy", "203.0.113.9", {"X-Forwarded-Proto": "https", "X-Forwarded-For": "127.0.0.1"}, 403),
    ("proxy", "127.0.0.1", {"Host": "run.example.org"}, 403),
    ("proxy", "127.0.0.1", {"X-Forwarded-For": "203.0.113.9"}, 403),
    ("proxy", "127.0.0.1", {"X-Forwarded-Proto": "http", "X-Forwarded-For": "203.0.113.9"}, 403),
    ("proxy", "127.0.0.1", {"X-Forwarded-Proto": "http, https", "X-Forwarded-For": "9.9.9.9"}, 403),
    (
        *("proxy", "127.0.0.1"),
        {"X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.9", "Host": "run.example.org"},
        200,
    ),
    ("proxy", "127.0.0.1", {"X-Forwarded-Proto": "https", "Origin": "https://run.example.org"}, 403),
    ("clear", "203.0.113.9", {"Host": "run.example.org:8080"}, 200),
    ("clear", "203.0.113.9", {"Origin": "http://run.example.org"}, 403),
    ("off", "127.0.0.1", {}, 404),
)


async def test_the_admin_api_is_open_to_where_the_run_file_says(web: Web, autojump_clock: MockClock) -> None:
    for access, address, headers, status in FROM:
        web.service.admin.gate = Gate(access, web.run_folder)
        async with client_of(web, address) as client:
            for path, paused in (("pause", status == 200), ("resume", False)):
                sent = {**right(web), **headers}
                body = {"reason": "x"} if path == "pause" else {}
                reply = await client.post(f"{ADMIN}/{path}", json=body, headers=sent)
                assert reply.status_code == status, (access, address, headers, reply.text)
                assert (web.core.state.operations.paused is not None) is paused


@pytest.mark.parametrize(
    ("access", "hosts", "opened"),
    [
        ("local", ["127.0.0.1", "::1"], True),
        ("local", ["0.0.0.0"], False),
        ("local", ["127.0.0.1", "192.168.1.4"], False),
        ("local", ["::"], False),
        ("clear", ["0.0.0.0"], True),
        ("proxy", ["0.0.0.0"], True),
        ("off", ["127.0.0.1"], False),
    ],
    ids=str,
)
def test_a_page_for_more_than_this_machine_has_no_admin_api_unless_the_run_file_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, access: Any, hosts: list[str], opened: bool
) -> None:
    caplog.set_level(logging.INFO)
    gate = Gate(access, tmp_path)
    gate.bound_to(hosts)
    assert gate.is_open() is opened
    assert ("plain HTTP" in caplog.text) is (access == "clear")


async def test_wrong_tokens_are_listened_to_less_and_less_and_requests_without_one_do_not_count(
    web: Web, autojump_clock: MockClock
) -> None:
    async def ask(token: str) -> httpx.Response:
        headers = {**HERE, "Authorization": f"Bearer {token}"}
        return await web.client.post(f"{ADMIN}/resume", json={}, headers=headers)

    for _ in range(50):  # a page in a browser can make these; it must not lock the operator out
        assert (await web.client.post(f"{ADMIN}/resume", headers=HERE)).status_code == 401
        reply = await web.client.post(f"{ADMIN}/resume", headers={**right(web), "Origin": "null"})
        assert reply.status_code == 403
    await act(web, "resume")
    for _ in range(FREE_TRIES + 1):
        assert (await ask(NOBODY)).status_code == 401
    reply = await ask(token_of(web))
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "2")
    async with client_of(web, "127.0.0.1") as same, client_of(web, "::1") as also_here:
        for client in (same, also_here):
            assert (await client.post(f"{ADMIN}/resume", json={}, headers=right(web))).status_code == 429
    await trio.sleep(1.1)
    await act(web, "resume")
    for _ in range(FREE_TRIES):
        assert (await ask(NOBODY)).status_code == 401
    await act(web, "resume")  # the right one began the count anew


FULL = {f"192.0.2.{number}": _Tries(1) for number in range(ADDRESSES)}


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 400)), max_size=200))
def test_guesses_are_bounded_in_memory_and_in_the_wait(tries: list[tuple[int, float]]) -> None:
    guesses, now = Guesses(), 0.0
    guesses._by_address.update(FULL)
    for number, later in tries:
        now += later
        assert 0 <= guesses.wait_s(str(number), now) <= LONGEST_WAIT_S
        assert guesses.wrong(str(number), now) >= 1
        assert len(guesses._by_address) <= ADDRESSES


# --- the token's file


def test_a_token_is_made_once_kept_from_others_and_replaced_when_asked(tmp_path: Path) -> None:
    path, made = make_token(tmp_path)
    first = read_token(path)
    assert made
    assert re.fullmatch(r"bra_[A-Za-z0-9_-]{43}", first)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_token(tmp_path) == (path, False)
    assert read_token(path) == first
    assert make_token(tmp_path, anew=True) == (path, True)
    assert read_token(path) != first
    assert [item.name for item in tmp_path.iterdir()] == [TOKEN_FILE]


@pytest.mark.parametrize("what", ["readable", "empty", "short", "long", "folder", "missing"])
def test_a_token_file_that_others_could_have_read_or_that_holds_none_is_refused_in_words(
    tmp_path: Path, what: str
) -> None:
    path, _ = make_token(tmp_path)
    secret = read_token(path)
    if what == "readable":
        path.chmod(0o640)
    elif what in ("folder", "missing"):
        path.unlink()
        if what == "folder":
            path.mkdir(mode=0o700)
    else:
        path.write_text({"empty": "", "short": "bra_x\n", "long": f"{secret}A" * 100}[what])
    with pytest.raises(KeyFileError) as caught:
        read_token(path)
    assert secret not in str(caught.value)
    assert "barnraise coordinator token" in str(caught.value) or what == "folder"


@given(st.text(max_size=60))
def test_only_the_token_is_the_token(text: str) -> None:
    assert not is_right(text, NOBODY)
    assert is_right(NOBODY, NOBODY)


async def test_a_new_token_counts_at_once_and_one_that_others_can_read_does_not(
    web: Web, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    old = right(web)
    make_token(web.run_folder, anew=True)
    assert (await web.client.get(f"{ADMIN}/status", headers=old)).status_code == 401
    assert (await web.client.get(f"{ADMIN}/status", headers=right(web))).status_code == 200
    good = right(web)
    (web.run_folder / TOKEN_FILE).chmod(0o644)
    assert (await web.client.get(f"{ADMIN}/status", headers=good)).status_code == 401
    assert "can be read by other users" in caplog.text
    (web.run_folder / TOKEN_FILE).unlink()
    reply = await web.client.get(f"{ADMIN}/status", headers=good)
    assert (reply.status_code, reply.json()["error"]) == (401, "unauthorized")


def test_the_command_prints_where_the_token_is_and_never_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from coordinator_support import make_run

    folder = make_run(tmp_path)
    for arguments in ([], ["--json"], ["--new"]):
        assert command_line(["coordinator", "token", str(folder), *arguments]) == 0
        said = capsys.readouterr()
        assert str(folder / TOKEN_FILE) in said.out
        assert read_token(folder / TOKEN_FILE) not in said.out + said.err
    assert command_line(["coordinator", "token", str(tmp_path / "nowhere")]) == 2
    assert not (tmp_path / "nowhere").exists()


# --- what they do

BAN = {"node": peer_id_of(key_of(0)), "reason": "floods others", "seconds": 60}
ALIKE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pause", {"reason": "moving the machine"}),
    ("pause", {"reason": "moving the machine"}),
    ("resume", {}),
    ("resume", {}),
    ("amend", {"changes": {"grpo.learning_rate": 5e-7}, "reason": "KL grew too fast"}),
    ("amend", {"changes": {"grpo.learning_rate": 5e-7}, "reason": "KL grew too fast"}),
    ("amend", {"changes": {"grpo.group": 5}, "reason": "x"}),
    ("admit/ban", BAN),
    ("admit/unban", {"node": peer_id_of(key_of(0)), "reason": "talked"}),
    ("admit/unban", {"node": peer_id_of(key_of(0))}),
    ("admit/ban", {**BAN, "node": "nobody"}),
    ("admit/mode", {"mode": "invite", "keep_proven": True}),
    ("admit/mode", {"mode": "invite"}),
    ("admit/allow", {"nodes": [peer_id_of(key_of(9))], "note": "the lab"}),
    ("admit/allow", {"nodes": [peer_id_of(key_of(9))], "note": "the lab"}),
    ("admit/allow", {"nodes": ["no such"]}),
    ("admit/disallow", {"nodes": [peer_id_of(key_of(9))]}),
    ("admit/allow-known", {}),
    ("admit/revoke", {"id": "abcd"}),
    ("rollback", {"version": 3, "reason": "it collapsed"}),
    ("rollback", {"version": 99, "reason": "it collapsed"}),
    ("pause", {"reason": "   "}),
    ("stop", {}),
)


async def test_the_command_line_and_http_do_the_same(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Two runs with the same past: one is told by the control socket's table, the other over HTTP."""
    told: dict[str, list[Any]] = {}
    kept: dict[str, list[Any]] = {}
    commands = {item.path: item.command for item in ACTS}
    bodies = {item.path: item.body for item in ACTS}
    for way in ("http", "socket"):
        (tmp_path / way).mkdir()
        async with website(tmp_path / way) as web:
            await web.record(ordinary(web.core.run_id).events)
            make_token(web.run_folder)
            told[way] = []
            for path, body in ALIKE:
                web.clock[0] += 1000
                if way == "socket":
                    try:
                        given = read_body(json.dumps(body).encode(), bodies[path]).args()
                        told[way].append(await web.service.admin.commands[commands[path]](given))
                    except BarnraiseError as error:
                        told[way].append(str(error))
                else:
                    reply = await web.client.post(f"{ADMIN}/{path}", json=body, headers=right(web))
                    good = reply.status_code == 200
                    told[way].append(reply.json() if good else reply.json()["error"])
            assert web.ended.is_set()
            state = web.core.state
            entries = list(entries_of(web.core.journal.events(), state.max_lag))
            acts = [event for event in web.core.journal.events() if isinstance(event, OperatorAct)]
            kept[way] = [
                entries,
                [
                    msgspec.structs.replace(e, signed=b"", amendment=b"") if hasattr(e, "signed") else e
                    for e in acts
                ],
                list(state.operations.allowed),
            ]
    assert told["http"] == told["socket"]
    assert kept["http"] == kept["socket"]
    assert len(kept["http"][1]) > 8


async def test_every_act_answers_as_it_is_described(web: Web, autojump_clock: MockClock) -> None:
    kinds = {item.path: item.reply for item in ACTS}
    for path, body in ALIKE:
        if path != "rollback":
            reply = await web.client.post(f"{ADMIN}/{path}", json=body, headers=right(web))
            if reply.status_code == 200:
                msgspec.convert(reply.json(), kinds[path], strict=True)
                assert reply.json().keys() <= set(kinds[path].__struct_fields__)
    made = await act(web, "admit/invite", {"uses": 3, "note": "anna"})
    assert made.keys() == set(kinds["admit/invite"].__struct_fields__)
    drained = await act(web, "drain", {"seconds": 60})
    assert drained.keys() == set(kinds["drain"].__struct_fields__)
    for path, (kind, _) in LOOKS.items():
        found = (await web.client.get(f"{ADMIN}/{path}", headers=right(web))).json()
        msgspec.convert(found, kind, strict=True)
        assert found.keys() == set(kind.__struct_fields__), path


async def test_the_status_says_what_an_operator_decides_by(web: Web, autojump_clock: MockClock) -> None:
    core = web.core
    alarm = AlarmRaised(
        kind="kl",
        value=0.8,
        limit=0.5,
        text="a version moves 0.8 nats away: lower grpo.learning_rate",
        version=5,
        at_ms=core.now_ms(),
    )
    why = f"kl: {alarm.text}; see {web.run_folder}/coordinator.log"
    await core.record([alarm, RunPaused(by="guard", reason=why, at_ms=core.now_ms())])
    await act(web, "amend", {"changes": {"grpo.learning_rate": 5e-7}, "reason": "KL"})
    web.clock[0] += 1000
    found = (await web.client.get(f"{ADMIN}/status", headers=right(web))).json()
    assert found["paused"]["by"] == "guard"
    assert str(web.run_folder) not in json.dumps(found)
    assert found["paused"]["reason"].startswith("kl: a version moves")
    guards = {guard["guard"]: guard for guard in found["guards"]}
    assert list(guards) == list(GUARDS)
    assert (guards["kl"]["alarm"], guards["kl"]["value"], guards["kl"]["limit"]) == (True, 0.8, 0.5)
    assert guards["kl"]["thresholds"] == {"kl": 0.5, "recent": 3.0}
    assert not guards["stall"]["alarm"]
    assert [(item["what"], item["cure"]) for item in found["alarms"] if item["guard"]] == [
        ("a version moves 0.8 nats away", "lower grpo.learning_rate")
    ]
    assert found["queues"]["queue"] == len(core.state.waiting) > 0
    assert found["amendments"][0]["changes"] == {"grpo.learning_rate": "5e-07"}
    assert found["disk_free_bytes"] > 0


def test_every_limit_of_the_guards_is_some_guards_threshold() -> None:
    assert THRESHOLDS.keys() == set(GUARDS)
    named = {name for names in THRESHOLDS.values() for name in names}
    assert named == set(GuardLimits.__struct_fields__) - {"pause"}


async def test_a_drain_ends_the_coordinator_once_nothing_is_at_hand_and_the_next_start_goes_on(
    web: Web, autojump_clock: MockClock
) -> None:
    asked = await act(web, "drain", {"seconds": 600})
    assert asked["at_hand"] > 0
    again = await act(web, "drain", {"seconds": 900})
    assert again["until"] == asked["until"] + 300_000
    paused = web.core.state.operations.paused
    assert paused is not None
    assert (paused.by, paused.reason) == ("operator", REASON)
    await trio.sleep(5)
    assert not web.ended.is_set()
    await finish_all(web)
    with trio.fail_after(5):
        await web.ended.wait()
    assert web.core.state.operations.paused is None
    acts = [type(e).__name__ for e in web.core.journal.events() if isinstance(e, OperatorAct)]
    assert acts == ["RunPaused", "RunResumed"]


@pytest.mark.parametrize("how", ["late", "resumed", "given up", "paused before"])
async def test_a_drain_that_is_given_up_or_late_lets_the_run_go_on_as_it_was(
    web: Web, autojump_clock: MockClock, how: str
) -> None:
    if how == "paused before":
        await act(web, "pause", {"reason": "mine"})
    await act(web, "drain", {"seconds": 5})
    if how == "given up":
        for _ in range(2):
            assert (await act(web, "drain", {"seconds": 0}))["until"] is None
        await finish_all(web)
    if how == "resumed":
        await act(web, "resume")
        await finish_all(web)
    await trio.sleep(10)
    assert not web.ended.is_set()
    assert web.progress.draining_until_ms is None
    paused = web.core.state.operations.paused
    assert (paused.reason if paused else None) == ("mine" if how == "paused before" else None)


@pytest.mark.parametrize("who", ["operator", "guard"])
async def test_what_pauses_the_run_during_a_drain_pauses_it_after_a_drain_that_is_late(
    web: Web, autojump_clock: MockClock, who: str
) -> None:
    await act(web, "drain", {"seconds": 5})
    if who == "operator":
        told = await act(web, "pause", {"reason": "mine"})
        assert told["paused"]["reason"] == "mine"
    else:
        text = "the reward fell: see `barnraise report`"
        now = web.core.now_ms()
        await web.core.record(
            [
                AlarmRaised(kind=kind, value=0.1, limit=0.2, text=text, version=5, at_ms=now)
                for kind in ("stall", "reward-collapse")
            ]
        )
    await trio.sleep(10)
    paused = web.core.state.operations.paused
    assert paused is not None
    assert (paused.by, paused.reason.partition(":")[0]) == (
        who,
        "mine" if who == "operator" else "reward-collapse",
    )


async def test_a_drain_that_died_with_its_coordinator_is_over_at_the_next_start(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with website(tmp_path) as web:
        await web.record(ordinary(web.core.run_id).events)
        await web.service.admin.commands["drain"]({"seconds": 600})
        assert web.core.state.operations.paused is not None
    async with website(tmp_path) as web:
        await web.core.open()
        await trio.sleep(1)
        assert web.core.state.operations.paused is None
        assert not web.ended.is_set()


# --- what is refused of a body


BODIES: tuple[tuple[dict[str, str], bytes, int], ...] = (
    ({"Content-Type": "text/plain"}, b'{"reason":"x"}', 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, b"reason=x", 415),
    ({}, b'{"reason":"x"}', 415),
    ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, b"x", 415),
    ({"Content-Type": "application/json; charset=utf-16"}, b"x", 415),
    ({"Content-Type": "application/json; charset=utf-8"}, b'{"reason":"x"}', 200),
    ({"Content-Type": "application/json"}, b'{"reason":"' + b"x" * MAX_BODY + b'"}', 413),
    ({"Content-Type": "application/json"}, b"[" * 60_000, 400),
    ({"Content-Type": "application/json"}, b"", 400),
    ({"Content-Type": "application/json"}, b"null", 400),
    ({"Content-Type": "application/json"}, b'{"reason":"x","more":1}', 400),
    ({"Content-Type": "application/json"}, b'{"reason":7}', 400),
    ({"Content-Type": "application/json"}, b'{"reason":"' + b"x" * 501 + b'"}', 400),
    ({"Content-Type": "application/json"}, b'{"reason":"\xff"}', 400),
    ({"Content-Type": "application/json"}, b'{"reason":"x"} {}', 400),
)


async def test_a_body_that_is_not_what_it_should_be_does_nothing(web: Web, autojump_clock: MockClock) -> None:
    for headers, content, status in BODIES:
        reply = await web.client.post(f"{ADMIN}/pause", content=content, headers={**right(web), **headers})
        told = (reply.status_code, bool(reply.json().get("error")))
        assert told == (status, status != 200), (headers, content[:80])
        assert (web.core.state.operations.paused is not None) is (status == 200)
        await act(web, "resume")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
words = st.sampled_from(
    ("reason", "version", "changes", "seconds", "node", "nodes", "note", "uses", "mode", "id", "keep_proven")
)


@settings(max_examples=150)
@given(
    st.sampled_from([item.body for item in ACTS]),
    st.binary(max_size=200)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(words, json_values, max_size=4).map(lambda value: json.dumps(value).encode()),
)
def test_any_bytes_are_a_body_of_the_schema_or_a_refusal_in_words(kind: Any, data: bytes) -> None:
    try:
        body = read_body(data, kind)
    except HTTPException as error:
        refused = error
    else:
        assert type(body) is kind
        assert body.args().keys() == set(kind.__struct_fields__)
        return
    assert refused.status_code == 400
    assert refused.detail


header_names = st.sampled_from(
    (
        *("Authorization", "Host", "Origin", "Cookie", "Content-Type", "Content-Length", "X-Forwarded-For"),
        *("X-Forwarded-Proto", "Forwarded", "Transfer-Encoding", "Expect", "Connection", "Upgrade"),
    )
)
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40) | st.sampled_from(
    ("Bearer " + NOBODY, "127.0.0.1", "application/json", "chunked", "5", "99999999")
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([f"POST {ADMIN}/{item.path}" for item in ACTS] + [f"GET {ADMIN}/status"]),
    st.lists(st.tuples(header_names, header_values), max_size=6),
    st.binary(max_size=100),
)
def test_no_header_or_body_gets_past_the_gate_without_the_token(
    tmp_path_factory: pytest.TempPathFactory,
    line: str,
    headers: list[tuple[str, str]],
    body: bytes,
) -> None:
    """Raw bytes through the real accept loop's connection: an answer or the end, and no command is called."""
    called: list[str] = []

    async def story() -> bytes:
        from starlette.applications import Starlette

        from barnraise.coordinator.web.admin import Admin, admin_routes

        class NoSite:
            folder = folder_

            async def work(self, what: Any) -> Any:
                return what()

        async def command(args: dict[str, Any]) -> dict[str, Any]:
            called.append("")
            return {}

        admin = Admin(NoSite(), Gate("clear", folder_), GuardLimits(), dict)  # type: ignore[arg-type]
        admin.commands = {item.command: command for item in ACTS}
        server = Server(Starlette(routes=admin_routes(admin)))  # type: ignore[arg-type]
        near, far = memory_stream_pair()
        data = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve, far, ("127.0.0.1", 5), ("127.0.0.1", 80))
            text = "".join(f"{name}: {value}\r\n" for name, value in headers)
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await near.send_all(f"{line} HTTP/1.1\r\n{text}\r\n".encode() + body)
                await near.send_eof()
                while chunk := await near.receive_some():
                    data += chunk
        return bytes(data)

    folder_ = tmp_path_factory.getbasetemp() / "gate"
    folder_.mkdir(exist_ok=True)
    make_token(folder_)
    reply = trio.run(story, clock=MockClock(autojump_threshold=0))
    assert not called
    statuses = [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3})", reply) if code != b"100"]
    assert all(400 <= code < 600 and code != 500 for code in statuses)


async def test_a_body_that_never_ends_costs_its_sender_the_connection(
    web: Web, autojump_clock: MockClock
) -> None:
    server = Server(web.service.app)
    near, far = memory_stream_pair()
    head = "".join(f"{name}: {value}\r\n" for name, value in right(web).items())
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    got = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, far, ("127.0.0.1", 5), ("127.0.0.1", 80))

        async def read() -> None:
            with suppress(trio.BrokenResourceError):
                while chunk := await near.receive_some():
                    got.extend(chunk)
            nursery.cancel_scope.cancel()

        nursery.start_soon(read)
        await near.send_all(f"POST {ADMIN}/pause HTTP/1.1\r\n{head}\r\n".encode())
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            for _ in range(40):
                await near.send_all(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
    assert b" 413 " in got
    assert web.core.state.operations.paused is None


# --- what strangers see

ADDRESS = "/ip4/198.51.100.77/tcp/4011"


async def test_nothing_public_shows_a_secret_an_address_or_a_path(
    web: Web, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    connect(web, 0)
    web.hub.by_key[key_of(0)].addresses = (ADDRESS,)
    made = await act(web, "admit/invite", {"uses": 2, "note": "a note of mine"})
    await act(web, "admit/allow", {"nodes": [peer_id_of(key_of(9))], "note": "a friend's key"})
    await act(web, "pause", {"reason": f"see {web.run_folder}/coordinator.log"})
    web.progress.learner_trouble = f"{web.run_folder}/checkpoints is full"
    await web.core.record(
        [
            AlarmRaised(
                kind="stall",
                value=1.0,
                limit=0.5,
                text=f"no version: look at {web.run_folder}/learner.log",
                version=5,
                at_ms=web.core.now_ms(),
            )
        ]
    )
    await web.settled()
    key = (web.run_folder / "run.key").read_text()
    secrets = {
        *(token_of(web), made["invite"], made["id"], "a note of mine", "a friend's key", "198.51.100.77"),
        *(line for line in key.splitlines() if not line.startswith("---")),
        *(str(web.run_folder), str(web.run_folder.parent), str(Path.home()) + "/", "PRIVATE KEY"),
    }
    routes = (
        *("/", "/nodes", "/nodes/anna", "/units/3", "/ledger", "/versions", "/about", "/metrics", "/readyz"),
        *("/healthz", "/api/v1/run", "/api/v1/nodes", "/api/v1/nodes/anna", "/api/v1/units/3"),
        *("/api/v1/ledger?limit=500", "/api/v1/versions", "/api/v1/openapi.json", "/log/checkpoint"),
        *("/nodes/none", "/api/v1/units/zz", "/api/v1/admin/nothing", "/nothing"),
    )
    for route in routes:
        reply = await web.client.get(route)
        said = reply.text + str(reply.headers)
        assert not [secret for secret in secrets if secret in said], route
    assert not [secret for secret in (token_of(web), made["invite"]) if secret in caplog.text]


def test_the_description_names_every_act_with_its_schema_and_that_it_wants_the_token() -> None:
    document = description()
    components = document["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"].rpartition("/")[2]} if "$ref" in value else set()
            return own.union(*(references(item) for item in value.values()))
        return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()

    assert references(document) <= components.keys()
    for item in ACTS:
        post = document["paths"][f"/admin/{item.path}"]["post"]
        assert post["security"] == [{"token": []}]
        body = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        schema = components[body]
        assert not schema["additionalProperties"]
        assert schema["properties"].keys() == set(item.body.__struct_fields__)
    names = [op["operationId"] for methods in document["paths"].values() for op in methods.values()]
    assert len(names) == len(set(names))


async def test_the_commands_that_the_documentation_shows_do_what_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs/operate.md").read_text(encoding="utf-8")
    block = re.search(r"### Steering over HTTP.*?```bash\n(.*?)```", page, re.DOTALL)
    assert block
    shown = [line for line in block[1].replace("\\\n", "").splitlines() if line.startswith("curl ")]
    assert len(shown) == 2
    if not shutil.which("curl") or not shutil.which("bash"):
        pytest.skip("curl is not installed (Debian: apt-get install curl)")
    listeners = open_listeners(Bind("127.0.0.1", 0, fall_back=False))
    (home,) = urls_of(listeners)
    async with website(tmp_path, http=listeners) as web:
        make_token(web.run_folder)
        said = []
        for line in shown:
            here = line.replace("http://127.0.0.1:8080/", home).replace("my-run", str(web.run_folder))
            done = await trio.run_process(["bash", "-c", here], capture_stdout=True, capture_stderr=True)
            said.append(json.loads(done.stdout))
        assert said[0]["run"] == "test run"
        assert said[1] == {"paused": {"by": "operator", "reason": "moving the machine"}}
        assert web.core.state.operations.paused is not None

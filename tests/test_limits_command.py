"""``barnraise limits``: amounts as people write them, shown, changed live, kept across a restart."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from barnraise.node.config import NodeConfig
from barnraise.node.traffic import Limits, load_chosen
from barnraise.protocol.control import Changed, serve_control
from barnraise.protocol.errors import StorageError
from barnraise.tui import main as command_line
from barnraise.tui.amounts import parse_rate, parse_size
from barnraise.tui.console import size
from barnraise.tui.limit_words import (
    parse_degrees,
    parse_hours,
    parse_moment,
    parse_share,
    parse_threads,
    parse_yes,
    rows,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500GB", 500 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("40 Gbit", 5 * 10**9),
        ("12B", 12),
        ("7 bytes", 7),
        ("2kb", None),
        ("2KB", 2000),
        ("none", ...),
        ("5", None),
        ("-5GB", None),
        ("1e9B", None),
        ("GB", None),
        ("", None),
        ("nanGB", None),
    ],
)
def test_sizes_are_read_as_people_write_them_or_refused(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(ValueError, match="write"):
            parse_size(text)
    else:
        assert parse_size(text) == (None if size is ... else size)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20MB/s", 20 * 10**6),
        ("5 Mbit/s", 625_000),
        ("300 KiB/s", 307_200),
        ("off", ...),
        ("20MB", None),
        ("20MB/h", None),
        ("5Mb/s", None),
        ("5mbps", None),
    ],
)
def test_rates_are_per_second_and_never_bits_by_mistake(text: str, rate: int | None) -> None:
    if rate is None:
        with pytest.raises(ValueError, match="write"):
            parse_rate(text)
    else:
        assert parse_rate(text) == (None if rate is ... else rate)


@given(st.text(max_size=30))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for parse in (parse_size, parse_rate):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert value is None or value >= 0


@given(st.integers(1, 10**15))
def test_what_is_shown_is_understood_again(count: int) -> None:
    again = parse_size(size(count))
    assert again is not None
    rounding = 50 if count >= 1000 else 0
    assert abs(again - count) <= 0.051 * 10 ** (len(str(count)) - 1) + rounding


def config(folder: Path, **more: Any) -> NodeConfig:
    return NodeConfig(address="/a", data=folder, key=folder / "key", **more)


async def test_what_is_set_holds_after_a_restart_but_for_what_is_then_said(
    tmp_path: Path,
) -> None:
    Limits(config(tmp_path)).change({"up": 5e6, "monthly": 5 * 10**11}, 0)
    again = Limits(config(tmp_path, up_bytes_s=1e6))
    assert (again.up.rate, again.down.rate, again.quota.limit) == (1e6, None, 5 * 10**11)
    again.change({"monthly": None}, 0)
    last = Limits(config(tmp_path))
    assert (last.up.rate, last.quota.limit) == (5e6, None)  # lifted for good; the other one stays
    assert last.warning == ""


@pytest.mark.parametrize("damage", [b"", b"{", b'{"up": 1}', b'{"monthly": -1}', b"\xff" * 9, b"[]"])
async def test_damaged_limits_hold_nobody_up_and_are_said(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "limits.json").write_bytes(damage)
    limits = Limits(config(tmp_path))
    assert limits.up.rate is None
    assert "limits.json" in limits.warning
    assert "limits set" in limits.warning


async def test_a_disk_that_refuses_is_said_and_the_cap_holds_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise StorageError("the disk is full")

    limits = Limits(config(tmp_path))
    monkeypatch.setattr("barnraise.node.chosen.write_durably", refuse)
    with pytest.raises(StorageError, match="only until the node ends: the disk is full"):
        limits.change({"up": 5e6}, 0)
    assert limits.up.rate == 5e6


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def daemon(folder: Path, kind: str = "node") -> Iterator[Path]:
    """A control socket with a node's limits behind it, served by another thread."""
    folder.mkdir(exist_ok=True)
    ready, done = threading.Event(), trio.Event()
    token: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        limits = Limits(config(folder))

        async def change(arguments: dict[str, Any]) -> dict[str, Any]:
            return {"ok": True, "text": limits.change(arguments, now_ms()), "limits": limits.tree(0)}

        def state() -> dict[str, Any]:
            return {"kind": kind, **({"limits": limits.tree(0)} if kind == "node" else {})}

        changed = Changed()
        changed.set()
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, folder / "control.sock", state, {"limits": change}, changed)
            token.append(trio.lowlevel.current_trio_token())
            ready.set()
            await done.wait()
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(10)
    try:
        yield folder
    finally:
        token[0].run_sync_soon(done.set)
        thread.join(10)


def call(*arguments: object) -> int:
    return command_line.main(["limits", *(str(argument) for argument in arguments)])


def test_the_command_changes_a_running_node_and_its_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(tmp_path / "node") as folder:
        assert call("set", folder, "--down", "20MB/s", "--up", "8Mbit/s", "--month", "500GB", "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["down"], shown["up"], shown["monthly"]) == (20_000_000, 1_000_000, 500 * 10**9)
        assert call("set", folder, "--down", "none") == 0
        assert "no cap" in capsys.readouterr().out
        assert call("get", folder) == 0
        text = capsys.readouterr().out
        assert "8.00 Mbit/s" in text
        assert "of 500.0 GB" in text
    chosen, _, _ = load_chosen(tmp_path / "node" / "limits.json")
    assert (chosen.down, chosen.up, chosen.monthly) == (None, 1e6, 500 * 10**9)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--down", "20"), "20MB/s"),
        (("--up", "5Mb/s"), "bits or bytes"),
        (("--month", "lots"), "500GB"),
        ((), "nothing to change"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_an_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert call("set", tmp_path, *arguments) == 2
    assert said in capsys.readouterr().err


def test_without_a_node_limits_are_set_for_its_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.node.config.default_data_path", lambda: tmp_path / "node")
    assert call("get") == 2
    assert "no node has run here yet" in capsys.readouterr().err
    assert call("set", "--down", "20MB/s", "--not-while", "steam") == 0
    assert "holds at its next start" in capsys.readouterr().out
    assert call("set", tmp_path / "node", "--up", "8Mbit/s", "--not-while", "doom", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["down"], shown["up"], shown["programs"]) == (20e6, 1e6, ["steam", "doom"])
    assert call("set", "--up", "1kB/s") == 1
    assert "no usable cap" in capsys.readouterr().err
    assert Limits(config(tmp_path / "node")).tree(0) == {**shown, "monthly_used": 0}
    assert call("get", "--json") == 0
    assert json.loads(capsys.readouterr().out) == shown
    with (tmp_path / "node" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert call("set", "--up", "none") == 1
        assert "does not answer" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert call("set", tmp_path / "other", "--up", "none") == 2
    assert list((tmp_path / "other").iterdir()) == []


def test_a_cap_too_low_is_the_nodes_to_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with daemon(tmp_path / "node") as folder:
        assert call("set", folder, "--up", "1kB/s") == 1
        assert "no usable cap" in capsys.readouterr().err


def test_a_coordinator_has_no_caps_and_says_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(tmp_path / "run", kind="coordinator") as folder:
        assert call("get", folder) == 1
        assert "--upload-copies" in capsys.readouterr().err


def test_r14_rules_are_set_and_shown_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with daemon(tmp_path / "node") as folder:
        options = (
            *("--when", "idle", "--idle-after", "5m", "--hours", "22:00-7:00,12:00-13:00"),
            *("--on-battery", "yes", "--gpu-in-use", "yes", "--not-while", "game", "--not-while", "editor"),
            *("--threads", "8", "--threads-in-use", "3", "--memory", "80%", "--memory-in-use", "25%"),
            *("--gpu-memory", "50 %", "--gpu-temperature", "80C", "--disk", "50GB"),
        )
        assert call("set", folder, *options, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["when"], shown["idle_s"], shown["disk"]) == ("idle", 300.0, 50 * 10**9)
        assert shown["hours"] == ["22:00-07:00", "12:00-13:00"]
        assert (shown["on_battery"], shown["gpu_in_use"]) == (True, True)
        assert (shown["threads_idle"], shown["threads_in_use"]) == (8, 3)
        assert (shown["memory_idle"], shown["memory_in_use"], shown["gpu_memory"]) == (0.8, 0.25, 0.5)
        assert (shown["gpu_temperature"], shown["programs"]) == (80.0, ["game", "editor"])
        assert (
            call("set", folder, "--allow-program", "GAME", "--gpu-temperature", "none", "--threads", "auto")
            == 0
        )
        text = capsys.readouterr().out
        assert "while nobody uses the machine (after 5m 00s without input)" in text
        assert "editor" in text
        assert "game" not in text
        assert "at any temperature" in text
        assert call("set", folder, "--allow-program", "all", "--hours", "any") == 0
        assert "22:00" not in capsys.readouterr().out


def test_r14_a_rule_set_for_a_while_says_when_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(tmp_path / "node") as folder:
        assert call("set", folder, "--when", "idle", "--for", "2h") == 0
        assert "when: ends in 1h 59m" in capsys.readouterr().out
        assert call("set", folder, "--until", "none") == 0
        assert "ends in" not in capsys.readouterr().out
        assert call("set", folder, "--until", "none") == 1
        assert "nothing was set for a while" in capsys.readouterr().err
        assert call("set", folder, "--memory", "50%", "--until", "2099-01-01 00:00") == 1
        assert "a year away" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--when", "sometimes"), "'sometimes' is no rule: always, or idle"),
        (("--idle-after", "0s"), "'0s' is no time at all"),
        (("--hours", "22:00-22:00"), "begins when it ends"),
        (("--not-while", ""), "is no program's name"),
        (("--hours", "22-7"), "22:00-07:00"),
        (("--on-battery", "maybe"), "neither yes nor no"),
        (("--threads", "0"), "1 to 1024"),
        (("--memory", "150%"), "at most 100"),
        (("--gpu-temperature", "9000"), "30 to 120"),
        (("--for", "2h"), "nothing was set for a while"),
        (("--for", "2h", "--until", "07:30"), "not both"),
        (("--for", "soon"), "2h"),
        (("--until", "2001-01-01 00:00"), "has passed"),
        (("--until", "soon"), "07:30"),
    ],
)
def test_r14_what_no_rule_can_be_is_refused_with_an_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    with daemon(tmp_path / "node") as folder:
        assert call("set", folder, *arguments) in (1, 2)
        assert said in capsys.readouterr().err


def test_what_suspends_work_and_who_says_so_are_shown() -> None:
    state: dict[str, Any] = {
        "presence": {"source": "none", "in_use": False, "text": "asked in vain: desktop, terminals"},
        "suspended": [{"reason": "game is running", "cure": "close it", "until_ms": 60_000}],
    }
    shown = dict(rows(Limits(config(Path("/nowhere"))).tree(0), 0.0, state))
    assert shown["you"] == "not known; asked in vain: desktop, terminals"
    assert shown["suspended"] == "game is running, 1m 00s more; close it"
    assert dict(rows({"up": None, "down": None}, 0.0)).keys() == {"up", "down", "month"}


@given(st.text(max_size=20))
def test_no_text_breaks_the_readers_of_rules(text: str) -> None:
    readers = (parse_hours, parse_share, parse_degrees, parse_threads, parse_yes)
    for reader in (*readers, lambda text: parse_moment(text, 1e9)):
        with suppress(ValueError):
            reader(text)


def test_a_moment_is_the_next_of_its_time_of_day() -> None:
    now = time.mktime((2026, 6, 1, 22, 0, 0, 0, 0, -1))
    assert parse_moment("23:30", now) - now == 5400
    assert parse_moment("07:30", now) - now == 9.5 * 3600
    assert parse_moment("22:00", now) - now == 24 * 3600


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--disk", "1000000TB", True),
        ("--disk", "100MB", False),
        ("--disk", "none", False),
        ("--threads", "1024", True),
        ("--threads", "1", False),
        ("--threads", "auto", False),
        ("--threads-in-use", "1024", True),
        ("--threads-in-use", "1", False),
    ],
)
def test_more_than_there_is_is_set_and_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    value: str,
    said: bool,
) -> None:
    monkeypatch.setattr("barnraise.node.config.default_data_path", lambda: tmp_path / "node")
    assert call("set", option, value, "--json") == 0
    shown = capsys.readouterr()
    assert (f"note: {option} " in shown.err and "more than there is" in shown.err) is said
    limits = json.loads(shown.out)
    assert (1024 in (limits["threads_idle"], limits["threads_in_use"]) or limits["disk"] == 10**18) is said


def test_a_running_node_that_is_allowed_more_than_there_is_has_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(tmp_path / "node") as folder:
        assert call("set", folder, "--disk", "1000000TB", "--threads", "1024") == 0
        shown = capsys.readouterr()
        assert "note: --disk " in shown.err
        assert "note: --threads 1024 " in shown.err
        assert call("get", folder, "--json") == 0
        limits = json.loads(capsys.readouterr().out)
        assert (limits["disk"], limits["threads_idle"]) == (10**18, 1024)

"""``barnraise limits``: amounts as people write them, shown, changed live, kept across a restart."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

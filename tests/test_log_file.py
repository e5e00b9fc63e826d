"""The log as records: its end across rotation, followed while it is written, shown level by level."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.node.config import NodeConfig
from barnraise.node.main import _logging
from barnraise.tui import log_file
from barnraise.tui import main as command_line
from barnraise.tui.log_file import at_least, follow, is_for_people, records, spoken, tail


def call(*arguments: object) -> int:
    return command_line.main([str(argument) for argument in arguments])


def write(folder: Path, *said: tuple[int, str, str], rotate: int = 0) -> None:
    """Write as the node does; ``rotate``: after so many lines."""
    folder.mkdir(exist_ok=True)
    handler = RotatingFileHandler(folder / "node.log", backupCount=2, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    for number, (level, source, text) in enumerate(said):
        if rotate and number and number % rotate == 0:
            handler.doRollover()
        handler.emit(logging.LogRecord(source, level, "", 0, text, (), None))
    handler.close()


NODE = "barnraise.node"
INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR


def test_the_end_is_found_across_rotation(tmp_path: Path) -> None:
    write(tmp_path, *((INFO, NODE, f"line {number}") for number in range(9)), rotate=4)
    assert [record.text for record in tail(tmp_path, 6)] == [f"line {n}" for n in range(3, 9)]
    assert tail(tmp_path, 0) == []
    assert tail(tmp_path / "nowhere", 5) == []


def test_a_traceback_belongs_to_its_line(tmp_path: Path) -> None:
    write(tmp_path, (ERROR, NODE, "failed\nTraceback:\n  at 3"), (INFO, NODE, "after"))
    first, second = tail(tmp_path, 5)
    assert first.text == "failed\nTraceback:\n  at 3"
    assert second.text == "after"
    assert spoken(first).splitlines()[1:] == ["    | Traceback:", "    |   at 3"]


def test_what_comes_while_it_is_followed_is_shown_once_and_in_order(tmp_path: Path) -> None:
    steps: list[Callable[[], None]] = [
        lambda: None,
        lambda: write(tmp_path, (INFO, NODE, "c")),
        lambda: write(tmp_path, (INFO, NODE, "d"), (INFO, NODE, "e"), rotate=1),  # d, then a new file
        lambda: (tmp_path / "node.log").open("a").write("2026-12-02 04:05:42,123 INFO x half a li"),
        lambda: (tmp_path / "node.log").open("a").write("ne\n"),
    ]
    write(tmp_path, (INFO, NODE, "a"), (INFO, NODE, "b"))

    def over() -> bool:
        if steps:
            steps.pop(0)()
            return False
        return True

    seen = [record.text for record in follow(tmp_path, 1, over)]
    assert seen == ["b", "c", "d", "e", "half a line"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "LOOK_EVERY_S", 0.0)


def test_following_begins_before_there_is_a_log(tmp_path: Path) -> None:
    turns = iter([lambda: False, lambda: write(tmp_path, (INFO, NODE, "first")) is not None, lambda: True])
    assert [record.text for record in follow(tmp_path, 5, lambda: next(turns)())] == ["first"]


@given(st.lists(st.text(max_size=40), max_size=20))
def test_no_text_breaks_the_reader(lines: list[str]) -> None:
    for record in records(iter(lines)):
        assert spoken(record)
        assert is_for_people(record) in (True, False)


def test_a_log_line_never_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, (WARNING, NODE, "evil \x1b[2J\x07 name"))
    assert call("logs", tmp_path) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "warning: evil" in out


def test_levels_counts_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path,
        (INFO, NODE, "one"),
        (INFO, "barnraise.protocol.session", "inner"),
        (WARNING, "libp2p", "two"),
        (ERROR, NODE, "three"),
    )

    def shown(*options: object) -> list[str]:
        assert call("logs", tmp_path, *options) == 0
        return [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]

    assert shown() == ["one", "warning: two", "error: three"]
    assert shown("--level", "debug")[1] == "inner"
    assert shown("--level", "WARNING") == ["warning: two", "error: three"]
    assert shown("-n", 1) == ["error: three"]
    assert call("logs", tmp_path, "--json", "-n", 1) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (told["level"], told["source"], told["text"]) == ("error", NODE, "three")
    assert told["at_ms"] > 1_700_000_000_000
    assert at_least("error")(tail(tmp_path, 1)[0])


def test_what_cannot_be_shown_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("logs", tmp_path) == 1
    assert "no log" in capsys.readouterr().err
    write(tmp_path, (INFO, NODE, "one"))
    assert call("logs", tmp_path, "--level", "loud") == 2
    assert call("logs", tmp_path / "nowhere") == 2


def test_the_log_rotates_and_a_background_node_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R24: errors are in the log whatever is on the screen."""
    monkeypatch.setattr("barnraise.node.main.LOG_BYTES", 500)
    config = NodeConfig(address="/a", data=tmp_path, key=tmp_path / "key", background=True)
    with _logging(config):
        for number in range(20):
            logging.getLogger(NODE).error("error number %d of twenty", number)
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in tmp_path.glob("node.log*")) == [
        "node.log",
        "node.log.1",
        "node.log.2",
    ]
    assert tail(tmp_path, 1)[0].text == "error number 19 of twenty"

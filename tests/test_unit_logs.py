"""One unit's id in the lines of every process that handles it, and the commands that find them."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from cheats import Greedy, Paced
from hypothesis import given
from hypothesis import strategies as st
from swarm_support import make_model, swarming
from trio.testing import MockClock

from barnraise.coordinator import main as coordinator_main
from barnraise.protocol.child_lines import _Printed
from barnraise.protocol.log_keeping import LogFile, Sparing, logging_to
from barnraise.protocol.log_lines import (
    MOST_EXCEPTION,
    MOST_MESSAGE,
    JsonLines,
    LogLine,
    bounded,
    moment,
    read_line,
    said,
    written,
)
from barnraise.protocol.unit_context import UNITS, Unit, about, unit_at_hand, unit_log
from barnraise.tui import log_file
from barnraise.tui import main as command_line

LEASE, OTHER, SUBMISSION = b"\x3f\xa9" + bytes(14), b"\x3f\xa8" + bytes(14), b"\xb7\x1d" + bytes(30)


def call(*arguments: object) -> int:
    return command_line.main([str(argument) for argument in arguments])


def lines_of(*paths: Path) -> list[LogLine]:
    found = [read_line(line) for path in paths for line in path.read_bytes().split(b"\n") if line]
    assert None not in found
    return [line for line in found if line is not None]


async def test_one_id_runs_through_node_coordinator_verifier_and_published_version(
    tmp_path: Path, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    async with swarming(tmp_path, make_model(tmp_path / "model"), versions=1) as swarm:
        folder = swarm.run.path
        with coordinator_main._logging(folder, lambda line: None):
            await swarm.join("ann", Paced(1.0))
            await swarm.join("eve", Greedy())
            await swarm.finish()
            assert unit_at_hand() is None
        job = swarm.learner.jobs[0]
    told = lines_of(folder / "coordinator.log", folder / "units.log")
    lease = job.parts[0].lease
    of_it = [line for line in told if line.unit == lease.lease_id.hex()[:16]]
    said_by = {line.logger: line for line in of_it}
    assert {"barnraise.node", "barnraise.units.node.actions", "barnraise.node.actions"} <= said_by.keys()
    assert "barnraise.units.coordinator.verifier" in said_by
    story = [line.message for line in of_it if line.logger == "barnraise.units.coordinator"]
    assert [text.split()[0] for text in story] == ["lent", "ann", "accepted", "used"]
    assert {line.number for line in of_it if line.number >= 0} == {lease.unit_id}
    assert {line.run for line in of_it} == {swarm.run.run_id.hex()[:16]}
    rejected = [line for line in told if line.message.startswith("rejected by check sampling")]
    assert {line.logger for line in rejected} == {
        "barnraise.units.coordinator",
        "barnraise.units.coordinator.verifier",
    }
    assert not [line for line in told if "fetched version" in line.message and line.unit]
    everybody = [
        line for line in lines_of(folder / "coordinator.log") if line.logger.startswith("barnraise.units")
    ]
    assert everybody == []

    submission = next(line.submission for line in of_it if line.submission)
    for wanted in (str(lease.unit_id), lease.lease_id.hex(), submission[:8]):
        capsys.readouterr()
        assert call("coordinator", "logs", folder, "--unit", wanted, "--json") == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert len(shown) == len(of_it)
        assert {line["unit"] for line in shown} == {of_it[0].unit}


class Lease:
    lease_id, unit_id, policy_version, run_id = LEASE, 17, 4, bytes(32)


class OfAnotherRun:
    lease_id, unit_id, run_id = OTHER, 17, b"\1" * 32


def log_into(path: Path, most: int = 100_000, kept: int = 1) -> LogFile:
    file = LogFile(path, most, kept)
    file.setFormatter(JsonLines("tester"))
    return file


def test_a_line_says_which_unit_it_is_about_and_a_traceback_stays_in_its_line(tmp_path: Path) -> None:
    log = logging.getLogger("barnraise.tests")
    with logging_to(log_into(tmp_path / "x.log"), propagate=False):
        log.info("of none")
        with about(Lease(), SUBMISSION):
            log.warning("of %s", "one")
            with about(LEASE):  # the bare id of the same: what was known still holds
                log.info("again")
            with about(OTHER):
                log.info("another's")
        try:
            raise ValueError("the cause")
        except ValueError:
            log.exception("it failed")
    none, one, again, another, failed = lines_of(tmp_path / "x.log")
    assert (none.unit, none.number, none.submission, none.version) == ("", -1, "", -1)
    assert (one.unit, one.number, one.submission, one.version) == (LEASE.hex()[:16], 17, "b71d" + "0" * 12, 4)
    assert (one.level, one.role, one.message, one.logger) == (
        "warning",
        "tester",
        "of one",
        "barnraise.tests",
    )
    assert (again.unit, again.number, again.submission) == (one.unit, one.number, one.submission)
    assert one.time <= again.time <= moment(time.time())
    assert (another.unit, another.number, another.version) == (OTHER.hex()[:16], -1, -1)
    assert "ValueError: the cause" in failed.exception
    assert said((tmp_path / "x.log").read_text().splitlines()[-1]) == "it failed: ValueError: the cause"


async def test_tasks_and_threads_take_the_unit_along_and_nobody_else_sees_it() -> None:
    seen: list[Unit | None] = []

    async def look() -> None:
        await trio.lowlevel.checkpoint()
        seen.append(unit_at_hand())

    async with trio.open_nursery() as nursery:
        with about(LEASE):
            nursery.start_soon(look)
            seen.append(await trio.to_thread.run_sync(unit_at_hand))
        nursery.start_soon(look)
        assert unit_at_hand() is None
    assert sorted("" if unit is None else unit.id for unit in seen) == [
        "",
        LEASE.hex()[:16],
        LEASE.hex()[:16],
    ]


FORGED = '{"time": "2026-12-02T00:00:00.000000Z", "level": "error", "logger": "x", "message": "forged"}'


@given(
    st.text(max_size=60)
    | st.sampled_from(["\n" + FORGED + "\n", "\x1b[2J", "a\u2028" + FORGED, "\x9b31m\x85", "\ud800"])
)
def test_no_words_of_a_stranger_make_a_line_of_their_own_or_steer_a_terminal(text: str) -> None:
    record = logging.LogRecord("barnraise.node", logging.INFO, "", 0, "%s joined", (text,), None)
    line = JsonLines("tester").format(record)
    assert line.isascii()
    assert line.isprintable()
    read = read_line(line.encode())
    assert read is not None
    assert read.message == f"{text} joined"
    for record in log_file.records(iter([line, FORGED.replace("forged", "next")])):
        shown = log_file.spoken(record).split("\n")
        assert all(part.isprintable() for part in shown)
        assert all(part.startswith("    | ") for part in shown[1:])


def test_what_is_logged_has_a_bound(tmp_path: Path) -> None:
    with logging_to(log_into(tmp_path / "x.log", most=300_000), propagate=False):
        try:
            raise ValueError("\N{SNOWMAN}" * 10**6)
        except ValueError:
            logging.getLogger("barnraise.tests").exception("x" * 10**6)
    (line,) = lines_of(tmp_path / "x.log")
    assert len(line.message) == MOST_MESSAGE
    assert len(line.exception) <= MOST_EXCEPTION
    assert line.exception.startswith("Traceback")


def test_a_log_file_and_its_older_ones_stay_within_their_bytes(tmp_path: Path) -> None:
    with logging_to(log_into(tmp_path / "x.log", most=2_000, kept=2), propagate=False):
        for number in range(200):
            logging.getLogger("barnraise.tests").info("line %d", number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    assert all(0 < path.stat().st_size <= 2_000 for path in tmp_path.iterdir())
    assert log_file.tail(tmp_path, 1, names=("x.log",))[0].text == "line 199"


def test_who_provokes_one_line_again_and_again_pushes_no_other_out(tmp_path: Path) -> None:
    file, log = log_into(tmp_path / "x.log"), logging.getLogger("barnraise.tests")
    file.addFilter(Sparing(most=3, every_s=600))
    with logging_to(file, propagate=False):
        for period, count in ((0, 10), (1, 2)):
            for number in range(count):
                record = log.makeRecord(log.name, logging.WARNING, "f", 1, "refused %d", (number,), None)
                record.created = 6000.0 + 600 * period
                log.handle(record)
        log.info("all is well")
    assert [line.message for line in lines_of(tmp_path / "x.log")] == [
        "refused 0",
        "refused 1",
        "refused 2 (3 such lines in 10 minutes: further ones are left out)",
        "refused 0 (7 more such lines were left out before)",
        "refused 1",
        "all is well",
    ]


def test_a_disk_that_refuses_is_said_once_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, real = logging.getLogger("barnraise.tests"), os.write

    def torn(descriptor: int, data: bytes) -> int:
        real(descriptor, data[:20])  # a piece of the line is written before the disk is full
        raise OSError(28, "No space left on device")

    with logging_to(log_into(tmp_path / "x.log"), propagate=False):
        monkeypatch.setattr("barnraise.protocol.log_keeping.write_all", torn)
        log.info("lost")
        log.info("lost as well")
        monkeypatch.undo()
        log.info("kept")
    assert capsys.readouterr().err.count("cannot write") == 1
    assert log_file.tail(tmp_path, 5, names=("x.log",))[-1].text == "kept"


def test_what_libraries_print_in_a_child_is_lines_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    out = _Printed(logging.INFO)
    print("one\ntwo", FORGED, file=out)
    print("no end", end="", file=out)
    assert caplog.messages == ["one", f"two {FORGED}"]
    out.flush()
    assert caplog.messages[-1] == "no end"


# --- the commands


def write_run(folder: Path) -> Path:
    """Two units' stories, in the logs of two processes; the first was lent twice."""
    folder.mkdir()
    (folder / "spec.bin").touch()
    second = b"\x51" + bytes(15)
    with logging_to(log_into(folder / "units.log"), of=UNITS, propagate=False):
        log = unit_log("barnraise.coordinator")
        with about(Lease()):
            log.info("lent to ann")
        other = type("Other", (), {"lease_id": OTHER, "unit_id": 18, "run_id": bytes(32)})()
        with about(other):
            log.info("lent to ben")
        again = type("Again", (), {"lease_id": second, "unit_id": 17, "run_id": bytes(32)})()
        with about(again, SUBMISSION):
            log.info("handed in")
    with logging_to(log_into(folder / "verifier.log"), propagate=False):
        with about(LEASE):
            logging.getLogger("barnraise.coordinator.verifier").debug("never written: the level is INFO")
        with about(second):
            logging.getLogger("barnraise.coordinator.verifier").warning("a scorer failed on \x1b[2J")
    with logging_to(log_into(folder / "coordinator.log"), propagate=False):
        logging.getLogger("barnraise.coordinator").info("ann joined")
    return folder


@pytest.mark.parametrize("wanted", ["17", "3fa90", LEASE.hex(), "b71d0000", SUBMISSION.hex(), "51000000"])
def test_a_unit_is_found_by_each_of_its_ids_with_all_its_leases(
    wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    assert call("coordinator", "logs", folder, "--unit", wanted) == 0
    shown = [line[24:] for line in capsys.readouterr().out.splitlines()]
    assert shown[:2] == ["tester: [unit 17] lent to ann", "tester: [unit 17] handed in"]
    assert shown[2] == "tester: [5100000000000000] warning: a scorer failed on \ufffd[2J"
    assert len(shown) == 3


@pytest.mark.parametrize(
    ("wanted", "code", "words"),
    [
        ("99", 1, "no line is about a unit 99 in the logs of"),
        ("abcdef12", 1, "ledger unit"),
        ("3fa", 2, "a unit is a number, or 4 or more hex digits"),
        ("anna", 2, "a unit is a number"),
    ],
)
def test_a_unit_that_is_not_there_is_one_clear_line(
    wanted: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("coordinator", "logs", write_run(tmp_path / "run"), "--unit", wanted) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_an_id_that_several_units_begin_with_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "units.log"
    path.write_bytes(path.read_bytes().replace(OTHER.hex()[:16].encode(), b"3fa9ffffffffffff"))
    assert call("coordinator", "logs", folder, "--unit", "3fa9") == 2
    assert "several units are meant: 17, 18" in capsys.readouterr().err


def test_without_a_unit_what_concerns_everybody_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")

    def shown(*options: object) -> list[str]:
        assert call("coordinator", "logs", folder, *options) == 0
        return [line[24:] for line in capsys.readouterr().out.splitlines()]

    assert [line.split()[-1] for line in shown()] == ["\ufffd[2J", "joined"]
    assert len(shown("--level", "debug")) == 5
    assert shown("--level", "debug", "-n", 1) == ["tester: ann joined"]
    assert len(shown("--level", "warning")) == 1
    assert call("coordinator", "logs", tmp_path) == 1
    assert "no run folder" in capsys.readouterr().err
    (folder / "spec.bin").rename(tmp_path / "spec.bin")
    assert call("coordinator", "logs", tmp_path) == 1
    assert "has not been served yet" in capsys.readouterr().err


def test_a_node_shows_a_unit_from_daemon_and_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(log_into(tmp_path / "node.log"), propagate=False):
        with about(Lease()):
            logging.getLogger("barnraise.node").info("unit 17: generating")
        logging.getLogger("barnraise.node").info("fetching version 3")
    with logging_to(log_into(tmp_path / "engine.log"), propagate=False), about(LEASE):
        logging.getLogger("barnraise.units.node.engine_child").info("drew 8 completions")
    assert call("logs", tmp_path, "--unit", "3fa90000") == 0
    assert [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "[unit 17] unit 17: generating",
        "[3fa9000000000000] drew 8 completions",
    ]
    with logging_to(log_into(tmp_path / "node.log"), propagate=False), about(OfAnotherRun()):
        logging.getLogger("barnraise.node").info("unit 17: generating, years later")
    assert call("logs", tmp_path, "--unit", "17") == 2
    assert "several units are meant: 3fa8000000000000, 3fa9000000000000" in capsys.readouterr().err
    assert call("logs", tmp_path, "--unit", "3fa9") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert call("logs", tmp_path, "--unit", "5") == 1
    assert "barnraise receipts" in capsys.readouterr().err


def test_logs_of_two_releases_and_of_a_child_that_was_emptied_are_followed_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "LOOK_EVERY_S", 0.0)
    child, main = tmp_path / "b.log", tmp_path / "a.log"
    main.write_text(
        "2020-01-02 04:05:42,123 WARNING barnraise.node of an older release\nand its second line\n"
    )

    def say(path: Path, text: str) -> None:
        with path.open("ab") as file:
            file.write(written("engine", "info", "x", text))

    def empty() -> None:
        os.truncate(child, 0)
        say(child, "after")

    say(child, "x" * 5000)
    steps: list[Callable[[], None]] = [lambda: say(child, "one"), empty, lambda: say(main, "two")]

    def over() -> bool:
        if steps:
            steps.pop(0)()
            return False
        return True

    seen = [record.text for record in log_file.follow(tmp_path, 2, over, names=("a.log", "b.log"))]
    older = "of an older release\nand its second line"
    assert seen == [older, bounded("x" * 5000, 4000), "one", "after", "two"]


def test_a_level_that_is_asked_for_by_the_environment_holds_in_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, wanted in (("debug", ["a", "b"]), ("warning", []), ("rubbish", ["b"])):
        monkeypatch.setenv("BARNRAISE_LOG_LEVEL", asked)
        path = tmp_path / f"{asked}.log"
        with logging_to(log_into(path), propagate=False):
            logging.getLogger("barnraise.tests").debug("a")
            logging.getLogger("barnraise.tests").info("b")
        assert [line.message for line in lines_of(path)] == wanted

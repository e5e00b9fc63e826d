"""One unit's id in the lines of every process that handles it, and the commands that find them."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from cheats import Greedy, Paced
from hypothesis import given
from hypothesis import strategies as st
from swarm_support import make_model, swarming
from trio.testing import MockClock

from barnraise.coordinator import main as coordinator_main
from barnraise.protocol import unit_context
from barnraise.protocol.log_lines import (
    MOST_EXCEPTION,
    MOST_MESSAGE,
    JsonLines,
    LogFile,
    LogLine,
    _Printed,
    bounded,
    log_in_child,
    logging_to,
    moment,
    read_line,
    said,
    tell_run,
)
from barnraise.protocol.unit_context import about, unit_at_hand, unit_log
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
    async with swarming(tmp_path, make_model(tmp_path / "model"), versions=2) as swarm:
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
    everybody = [line for line in lines_of(folder / "coordinator.log") if line.logger.startswith("barnraise.units")]
    assert everybody == []

    submission = next(line.submission for line in of_it if line.submission)
    for wanted in (str(lease.unit_id), lease.lease_id.hex(), submission[:8]):
        capsys.readouterr()
        assert call("coordinator", "logs", folder, "--unit", wanted, "--json") == 0
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert len(shown) == len(of_it)
        assert {line["unit"] for line in shown} == {of_it[0].unit}



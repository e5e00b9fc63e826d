"""How much is logged is said once, in the coordinator's environment: workers elsewhere do as it says."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from learner_support import make_run, next_job
from remote_support import worker_command

from barnraise.coordinator.learner_child import ChildLearner
from barnraise.coordinator.remote import Elsewhere, release
from barnraise.coordinator.remote_files import FileHost, Meet
from barnraise.coordinator.verifier_child import ChildVerifier
from barnraise.coordinator.workers import VerifyJob
from barnraise.protocol.log_lines import LEVEL_VARIABLE, LogLine, read_line


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    logger, asked = logging.getLogger("barnraise"), os.environ.pop(LEVEL_VARIABLE, None)
    level = logger.level
    yield
    logger.setLevel(level)
    os.environ.pop(LEVEL_VARIABLE, None)
    if asked is not None:
        os.environ[LEVEL_VARIABLE] = asked


def over_ssh(cache: Path, its_own: str) -> tuple[str, ...]:
    """Started there with what that machine's environment says, and nothing of ours."""
    first, *rest = worker_command(cache)
    own = ("-u", LEVEL_VARIABLE, *([f"{LEVEL_VARIABLE}={its_own}"] if its_own else []))
    return (first, *rest[:2], *own, *rest[2:])


def lines(path: Path) -> list[LogLine]:
    found = [read_line(line) for line in path.read_bytes().splitlines()]
    return [line for line in found if line is not None and line.logger.startswith("barnraise")]


@pytest.mark.parametrize(
    ("ours", "its_own", "details"), [("debug", "warning", True), ("info", "debug", False)]
)
async def test_workers_elsewhere_log_what_the_coordinators_environment_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str, its_own: str, details: bool
) -> None:
    setup = make_run(tmp_path / "run", warm_up=50)
    command = over_ssh(tmp_path / "gpu-box", its_own)
    if ours:
        monkeypatch.setenv(LEVEL_VARIABLE, ours)
    learner = ChildLearner(setup, tmp_path / "learner.log", at=Elsewhere(command, "learner", setup))
    verifier = ChildVerifier(setup, tmp_path / "verifier.log", at=Elsewhere(command, "verifier", setup))
    try:
        await learner.initial()
        job = next_job(setup, 1)
        await verifier.verify(
            (VerifyJob(submission_id=bytes(16), lease=job.parts[0].lease, payload=job.parts[0].payload),)
        )
        await learner.train(job)
    finally:
        await learner.close()
        await verifier.close()
    for name in ("learner", "verifier"):
        told = {line.level for line in lines(tmp_path / f"{name}.log")}
        assert ("debug" in told) is details, name


@pytest.mark.parametrize(
    ("asked", "level"),
    [("debug", "debug"), ("critical", "critical"), ("", "info"), ("rubbish\n", "info"), ("notset", "info")],
)
def test_a_worker_and_what_it_starts_take_a_level_and_nothing_else(
    tmp_path: Path, asked: str, level: str
) -> None:
    logging.getLogger("barnraise").setLevel(logging.INFO)
    FileHost(tmp_path, "verifier", release()).handle(Meet(release=release(), run_id=bytes(32), level=asked))
    assert logging.getLogger("barnraise").level == logging.getLevelNamesMapping()[level.upper()]
    assert os.environ.get(LEVEL_VARIABLE, "info") == level


def test_a_level_of_the_workers_own_holds_where_the_coordinator_asks_for_none(tmp_path: Path) -> None:
    os.environ[LEVEL_VARIABLE] = "debug"
    FileHost(tmp_path, "verifier", release()).handle(Meet(release=release(), run_id=bytes(32)))
    assert os.environ[LEVEL_VARIABLE] == "debug"

"""What libp2p and its like log: warnings into node.log, details nowhere, whatever they do to loggers."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.node.config import NodeConfig
from barnraise.node.main import _logging
from barnraise.protocol.libp2p_log import quiet_libp2p
from barnraise.protocol.log_lines import LEVEL_VARIABLE, LogLine, read_line

THEIRS = ("libp2p", "async_service", "multiaddr")
SWARM = "libp2p.network.swarm"
# What a module might do when it is imported later: it gives its own logger a level of its own.
LATER = "libp2p.network.imported_later"


@pytest.fixture
def loggers() -> Iterator[list[logging.Logger]]:
    """All of theirs; that of one module lets everything through."""
    quiet_libp2p()
    logging.getLogger(LATER).setLevel(logging.DEBUG)
    known = logging.root.manager.loggerDict.items()
    yield [it for name, it in known if isinstance(it, logging.Logger) and name.split(".")[0] in THEIRS]
    logging.getLogger(LATER).setLevel(logging.NOTSET)


def said(folder: Path, loggers: list[logging.Logger], level: int) -> list[LogLine]:
    """What is in a background node's log after each of them said something at ``level``."""
    folder.mkdir(exist_ok=True)
    config = NodeConfig(address="", data=folder, key=folder / "key", background=True)
    with _logging(config):
        for logger in loggers:
            logger.log(level, "of %s", logger.name)
    lines = [read_line(line) for line in config.log_path.read_bytes().splitlines()]
    return [line for line in lines if line is not None]


@pytest.mark.parametrize("chosen", ["", "info", "debug"])
@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_no_detail_of_theirs_gets_into_the_log(
    tmp_path: Path,
    loggers: list[logging.Logger],
    monkeypatch: pytest.MonkeyPatch,
    level: int,
    chosen: str,
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, chosen)
    assert len(loggers) > 20
    assert said(tmp_path, loggers, level) == []


def test_their_warnings_do_but_for_what_peers_do_to_the_swarm(
    tmp_path: Path, loggers: list[logging.Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {line.logger: line.level for line in said(tmp_path, loggers, logging.ERROR)}
    assert told == {it.name: "error" for it in loggers if it.name != SWARM}
    monkeypatch.setenv(LEVEL_VARIABLE, "debug")
    told = {line.logger: line.level for line in said(tmp_path / "debug", loggers, logging.ERROR)}
    assert told == {it.name: "debug" if it.name == SWARM else "error" for it in loggers}


def test_no_module_of_theirs_logs_past_its_logger() -> None:
    """``logging.debug()`` gives the root logger a handler on stderr, which then gets everybody's lines."""
    quiet_libp2p()
    modules = [it for name, it in sorted(sys.modules.items()) if name.split(".")[0] in THEIRS]
    assert len(modules) > 50
    calls = re.compile(r"(?<![\w.])logging\.(debug|info|warning|error|exception|critical|log)\(")
    found = [
        module.__name__
        for module in modules
        if getattr(module, "logging", None) is logging
        and getattr(module, "__file__", None)
        and calls.search(inspect.getsource(module))
    ]
    assert found == []

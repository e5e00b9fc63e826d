"""How the suite runs: compiled once, the longest first, with models that are made once for all workers."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from barnraise.protocol import shards
from barnraise.simulation import plugin

if TYPE_CHECKING:
    from tests.postgres_support import Server

# Python files are compiled once, not by each worker and by each of the processes that tests start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Two workers and their children share the machine's cores; models this small lose by threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MODELS = "BARNRAISE_TEST_MODELS"
"""Names the folder of made models (``swarm_support.make_model``); workers inherit it."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder, in the process that starts the workers."""
    if not config.pluginmanager.has_plugin("barnraise"):  # where the checkout is not installed
        config.pluginmanager.register(plugin, "barnraise")
    if not hasattr(config, "workerinput"):
        os.environ[MODELS] = tempfile.mkdtemp(prefix="barnraise-test-models-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Clear it away there, too."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(MODELS, ""), ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server for as many tests as want one; they are skipped where there is none."""
    from tests.postgres_support import serving

    with serving() as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes first: what takes minutes must not be what is left for one worker at the end."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


@pytest.fixture(autouse=True)
def _no_threads_beside_virtual_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps does not wait for worker threads: minutes pass while one writes a file."""
    if "autojump_clock" in request.fixturenames:
        monkeypatch.setattr(shards, "INLINE_BYTES", 2**40)

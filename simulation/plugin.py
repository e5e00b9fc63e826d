"""A pytest plugin: the fixture ``swarm``. Nothing of barnraise is loaded before a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from barnraise.simulation.swarm import Swarm


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, for ``--strict-markers``."""
    config.addinivalue_line(
        "markers",
        "swarm(scenario='steady', seed=0, **work): what the fixture 'swarm' simulates: a scenario's name "
        "or .toml file (or a Scenario), the seed, and values of its [work] section",
    )


@pytest.fixture
def swarm(request: pytest.FixtureRequest) -> Iterator[Swarm]:
    """A coordinator in virtual time, and nodes that you start, crash, cut off ...

    At the end every invariant is looked at (``barnraise.simulation.invariants``); one that does not
    hold makes the test an error.
    """
    from msgspec import convert, to_builtins

    from barnraise.simulation.scenario import Scenario, load_scenario
    from barnraise.simulation.swarm import Swarm

    marker = request.node.get_closest_marker("swarm")
    options = {} if marker is None else dict(marker.kwargs)
    scenario, seed = options.pop("scenario", "steady"), options.pop("seed", 0)
    if not isinstance(scenario, Scenario):
        scenario = load_scenario(scenario)
    if options:
        built = to_builtins(scenario)
        built["work"] |= options
        scenario = convert(built, Scenario)
    made = Swarm(scenario, seed)
    failed = request.session.testsfailed
    try:
        yield made
    finally:
        try:
            made.close()
        except Exception:
            if request.session.testsfailed == failed:
                raise

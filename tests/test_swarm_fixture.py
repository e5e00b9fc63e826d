"""The pytest fixture ``swarm``, as another project would use it; and that it costs nobody else anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from barnraise.simulation.invariant_record import Broken
from barnraise.simulation.swarm import Swarm

QUICK = {"unit_s": 8, "load_s": 1, "learn_s": 1, "units_per_version": 1, "timeout_s": 40, "deadline_s": 60}


@pytest.mark.swarm(seed=3, **QUICK)
def test_a_swarm_survives_what_a_test_does_to_it(swarm: Swarm) -> None:
    first, second, third = swarm.start(3)
    (liar,) = swarm.cheat("garbage")
    swarm.delay("coordinator", second, 0.4)
    swarm.until(lambda: swarm.head >= 1, patience_s=120)
    swarm.crash(first)
    swarm.partition([third])
    swarm.crash_coordinator()
    swarm.advance(5)
    swarm.return_coordinator()
    swarm.heal()
    swarm.rejoin(first)
    before = swarm.accepted
    swarm.advance(40)
    assert swarm.accepted > before
    assert swarm.credit(second) > 0
    assert swarm.credit(liar) == 0


@pytest.mark.swarm(seed=7, **QUICK)
def test_the_example_in_the_documentation_runs(swarm: Swarm) -> None:
    page = Path(__file__).parent.parent / "docs" / "simulation.md"
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(next(block for block in found if "def test_" in block), str(page), "exec"), names)
    names["test_a_crash_costs_a_unit_at_most"](swarm)


@pytest.mark.swarm(**QUICK)
async def test_it_works_in_an_asynchronous_test(swarm: Swarm) -> None:
    swarm.start(1)
    now = swarm.world.folder  # between two calls the swarm stands still
    swarm.until(lambda: swarm.head == 0)
    assert now == swarm.world.folder


def test_a_broken_invariant_is_told_by_the_next_call_and_at_the_end() -> None:
    swarm = Swarm(seed=1)
    swarm.start(1)
    swarm.checks.broken.append(Broken("planted", "by hand", 1.0))
    with pytest.raises(Broken, match="planted at 1"):
        swarm.advance(1)
    with pytest.raises(Broken, match="planted at 1"):
        swarm.close()


def test_a_fixture_that_is_not_used_starts_nothing(swarm: Swarm) -> None:
    assert swarm.scenario.name == "steady"
    assert swarm._thread is None


def test_the_plugin_loads_nothing_of_barnraise(tmp_path: Path) -> None:
    """Whoever has barnraise installed and tests something else must not pay for it."""
    heavy = "('trio', 'torch', 'numpy', 'barnraise.node')"
    program = f"import sys, barnraise.simulation.plugin; print([n for n in {heavy} if n in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert found.stdout.strip() == "[]"

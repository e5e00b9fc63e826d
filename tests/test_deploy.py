"""What lies in deploy/ names nothing that is not there."""

import json
import re
from pathlib import Path

import pytest
from web_support import ordinary, website

from barnraise.coordinator.guards import GUARDS

DEPLOY = Path(__file__).parent.parent / "deploy"
_METRIC = re.compile(r"\b(?:barnraise|process)_[a-z0-9_]+")


def used(path: Path) -> set[str]:
    """Every metric that a dashboard's or an alert's expressions name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        targets = [target for panel in json.loads(text)["panels"] for target in panel["targets"]]
        return {name for target in targets for name in _METRIC.findall(target["expr"])}
    expressions = re.findall(r"expr: (?:>-\n)?((?:.+\n)(?:^ {10}.+\n)*)", text, flags=re.MULTILINE)
    return {name for expression in expressions for name in _METRIC.findall(expression)}


async def exposed(tmp_path: Path) -> set[str]:
    """The names of a real coordinator's /metrics, once something has happened."""
    async with website(tmp_path) as web:
        await web.record(ordinary(web.core.run_id).events)
        await web.settled()
        text = (await web.get("/metrics")).text
    return set(_METRIC.findall("\n".join(line for line in text.splitlines() if not line.startswith("#"))))


@pytest.mark.parametrize("path", ["grafana/barnraise.json", "prometheus/alerts.yml"])
async def test_dashboard_and_alerts_name_only_metrics_that_there_are(tmp_path, autojump_clock, path):
    there = await exposed(tmp_path)
    named = used(DEPLOY / path)
    assert len(named) > 5
    assert named <= there


async def test_every_guard_has_a_series(tmp_path, autojump_clock):
    assert "barnraise_guard" in await exposed(tmp_path)
    assert len(set(GUARDS)) == len(GUARDS)

"""Every block of docs/simulation.md does what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from barnraise.simulation.block_training import BLOCK_FOUND_BY
from barnraise.simulation.cheats import FOUND_BY
from barnraise.simulation.scenario import (
    Blocks,
    Cheat,
    Churn,
    Happening,
    Line,
    Swarm,
    What,
    Work,
    load_scenario,
)
from barnraise.tui.main import main

PAGE = Path(__file__).parent.parent / "docs" / "simulation.md"


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(blocks("toml")[0])
    return tmp_path


def test_the_commands_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in "".join(blocks("console")).splitlines():
        program, *arguments = shlex.split(line)
        assert program == "barnraise"
        assert main(arguments) == 0, line
        out = capsys.readouterr().out
        if "--json" in arguments:
            told = json.loads(out)
            assert told["error"] is None
            assert set(told["measures"]["cheats"]) <= set(FOUND_BY)
        elif "--list" not in arguments:
            assert "useful work" in out
    assert (here / "swarm.svg").stat().st_size > 1000
    assert json.loads((here / "swarm.json").read_text())
    assert '"what":"line"' in (here / "kept" / "events.jsonl").read_text()
    assert main(["simulate", "steady", "--keep", str(here / "kept")]) == 1  # it is not empty
    assert main(["simulate", "earthquake"]) == 1


def test_the_python_runs(here: Path) -> None:
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, str(PAGE), "exec"), names)


def test_the_scenario_loads_and_every_key_and_word_is_on_the_page(here: Path) -> None:
    assert load_scenario("./mine.toml").happens[1].what == "coordinator-crash"
    text = PAGE.read_text()
    words = [
        name
        for part in (Swarm, Work, Blocks, Churn, Line, Cheat, Happening)
        for name in part.__struct_fields__
    ]
    words += [*FOUND_BY, *What.__args__]
    assert [word for word in words if f"`{word}`" not in text] == []
    for kind, (check, _) in FOUND_BY.items():
        assert re.search(rf"^\| `{kind}` \|.*\| `{check}` \|$", text, re.MULTILINE)
    table = text[text.index("| cheat at blocks |") :]
    for kind, (check, _) in BLOCK_FOUND_BY.items():
        assert re.search(rf"^\| `{kind}` \|.*\| `{check}`", table, re.MULTILINE)

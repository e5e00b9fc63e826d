"""Each requirement of docs on volunteers' complaints that concerns a node is named by a test of its own."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent
OF_A_NODE = [f"R{n}" for n in (*range(1, 10), *range(11, 19), *range(20, 27))]
_IN_NAME, _IN_TEXT = re.compile(r"(?:^|_)r(\d+)(?=_)"), re.compile(r"\bR(\d+)\b")


def named() -> dict[str, list[str]]:
    """For each requirement the tests that name it: in their name, or their or their module's docstring."""
    found = defaultdict(list)
    for path in sorted(TESTS.glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = set(_IN_TEXT.findall(ast.get_docstring(tree) or ""))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                own = {*_IN_NAME.findall(node.name), *_IN_TEXT.findall(ast.get_docstring(node) or "")}
                for number in own | module:
                    found[f"R{number}"].append(f"{path.name}::{node.name}")
    return found


def test_every_requirement_of_a_node_is_named_by_a_test() -> None:
    found = named()
    missing = [name for name in OF_A_NODE if not found[name]]
    assert missing == []
    unknown = sorted(set(found) - {f"R{n}" for n in range(1, 28)})
    assert unknown == []


def test_r15_no_step_opens_a_browser_or_needs_a_desktop() -> None:
    """Nothing imports what would; the node's own page says on which systems it was tested."""
    root = TESTS.parent
    wanted = {"webbrowser", "tkinter", "PyQt5", "PyQt6", "PySide6", "gi", "selenium"}
    parts = ("protocol", "kernels", "node", "coordinator", "simulation", "tui")
    files = [path for part in parts for path in (root / part).rglob("*.py")]
    assert len(files) > 100
    for path in files:
        imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
        assert not imported & wanted, path
    page = (root / "docs" / "node.md").read_text(encoding="utf-8")
    assert "untested" in page
    assert all(system in page for system in ("systemd", "launchd", "Windows"))

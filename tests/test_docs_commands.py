"""Every command that README.md and docs/ show is one that there is; those that need no swarm are run.

A command in a block is read by the real command line as it stands: command, options, values,
required arguments. One within a sentence may be a part or name several, so only its words are held
against the command line. What docs/simulation.md shows is run by test_simulation_docs.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from barnraise.tui.main import app, main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DATA = ("toml", "json", "python", "nginx", "yaml")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
_INLINE = re.compile(r"`(barnraise (?!split view)[^`]+)`")  # that is a file's format
_COMMAND = typer.main.get_command(app)
UsageError: Any = typer.BadParameter.__mro__[1]


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each block's kind and text; "" is a block of no kind."""
    yield from _FENCE.findall(text)
    for block in _INDENTED.findall(_FENCE.sub("", text)):
        yield "", re.sub("^ {4}", "", block, flags=re.MULTILINE)


def shown(path: Path) -> Iterator[list[str]]:
    """Every line of a page's blocks that begins with a program we know, as a shell's words."""
    for kind, block in blocks(path.read_text(encoding="utf-8")):
        if kind in DATA:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s{2,}(?:\(.*\)|->.*)$", "", line)
            known = line.split(maxsplit=1)[:1] and line.split(maxsplit=1)[0] in JUDGES
            if known:
                yield plain(shlex.split(line, comments=True))
            elif kind in ("console", "sh"):
                assert not line.split("#")[0].strip(), f"{path.name}: no test knows the program of {line!r}"


def plain(words: list[str]) -> list[str]:
    """Without another user's name, a program's folder, and where its output goes."""
    if words[:1] == ["sudo"]:
        words = words[3:] if words[1] == "-u" else words[1:]
    if words and words[0].startswith("/opt/barnraise/bin/"):
        words = [words[0].rpartition("/")[2], *words[1:]]
    ends = [index for index, word in enumerate(words) if word in (">", "|")]
    return words[: ends[0]] if ends else words


def parse(words: Sequence[str]) -> None:
    """Read a command line without doing what it says. Raises the command line's own usage errors."""
    command: Any = _COMMAND
    name, rest, parent = "barnraise", list(words), None
    while True:
        if "--help" in rest and not hasattr(command, "commands"):
            return
        context = command.make_context(name, rest, parent=parent)
        if not hasattr(command, "commands"):
            return
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, rest = command.resolve_command(context, rest)
        parent = context


def barnraise(words: Sequence[str]) -> None:
    parse(words)


def make(words: Sequence[str]) -> None:
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    given = [word for word in words if "=" not in word]
    assert given
    assert set(given) <= set(targets)
    for word in words:
        if given == ["demo"] and word.startswith("ARGS="):
            parse(["demo", *shlex.split(word.removeprefix("ARGS="))])


def python(words: Sequence[str]) -> None:
    assert words[0] == "-m"
    package, _, module = words[1].partition(".")
    folder = ROOT / module.split(".")[0] if package == "barnraise" else ROOT / package
    assert folder.is_dir()
    if package == "benchmarks":
        source = (folder / f"{module}.py").read_text(encoding="utf-8")
        for word in words[2:]:
            assert not word.startswith("--") or f'"{word}"' in source, word


def pip(words: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"barnraise\[([\w,]+)\]", " ".join(words)):
        assert set(extra.split(",")) <= set(extras)


def anything(words: Sequence[str]) -> None:
    """A program of others."""


JUDGES = {"barnraise": barnraise, "make": make, "python": python, "pip": pip}
JUDGES |= dict.fromkeys(
    ("source", "git", "torchrun", "while", "do", "done", "sudo", "systemctl", "journalctl", "podman"),
    anything,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_a_block_is_one_that_there_is(page: Path) -> None:
    for program, *words in filter(None, shown(page)):
        try:
            JUDGES.get(program, anything)(words)
        except Exception as error:
            told = error.format_message() if hasattr(error, "format_message") else error
            raise AssertionError(f"{page.name}: {program} {shlex.join(words)}: {told}") from error


@pytest.mark.parametrize(
    "line", ["joyn X", "run init", "coordinator run X --lissten Y", "coordinator rollback X second"]
)
def test_a_command_that_is_wrong_would_be_noticed(line: str) -> None:
    with pytest.raises(UsageError):
        parse(line.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_within_a_sentence_has_words_that_there_are(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in _INLINE.findall(text):
        words = found.split()[1:]
        commands: list[Any] = [_COMMAND]
        while words and hasattr(commands[0], "commands"):
            names = words[0].split("|")
            if words[0].startswith("-") or words[0] in ("...", "COMMAND"):
                break
            group = commands[0].commands
            assert set(names) <= set(group), f"{page.name}: `{found}`"
            commands = [group[name] for name in names]
            words = words[1:]
        options = {option for command in commands for each in command.params for option in each.opts}
        options |= {"--help", "-h"}
        for word in words:
            named = re.match(r"\[?(--[a-z][\w-]*|-[a-z]\b)", word)
            assert named is None or named[1] in options, f"{page.name}: `{found}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_data_can_be_read(page: Path) -> None:
    for kind, block in blocks(page.read_text(encoding="utf-8")):
        if kind == "toml":
            tomllib.loads(block)
        elif kind == "json":
            json.loads(block)


RUN = (
    "barnraise run template",
    "barnraise run check my-run.toml",
    "barnraise run amend --keys",
)
"""Shown somewhere, in need of no coordinator, and done in a second; other tests make and serve runs."""


def test_what_needs_no_swarm_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for line in RUN:
        assert line in text
        assert main(line.split()[1:]) == 0, line + capsys.readouterr().err
        out = capsys.readouterr().out
        assert out, line
        if line == RUN[0]:
            (tmp_path / "my-run.toml").write_text(out)

"""``barnraise join``: lines or app, foreground or background, first start, consent, exit codes (R8, R24)."""

from __future__ import annotations

import os
import pty
import select
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from barnraise.node.chosen import load_chosen
from barnraise.node.config import NodeConfig
from barnraise.node.known import KnownRuns
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.protocol.identity import Identity, load_identity, peer_id_of
from barnraise.tui import attached, background, first_start, join
from barnraise.tui import main as command_line
from barnraise.tui.console import print_rows
from barnraise.tui.first_start import guide, is_first, proposed_disk
from barnraise.tui.join_arguments import as_given

PEER = peer_id_of(bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"))
ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
OTHER = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"


def call(*arguments: object) -> int:
    return command_line.main([str(argument) for argument in arguments])


class Seen:
    """What a ``join`` came to, with nothing started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.what: list[str] = []
        self.config: NodeConfig | None = None
        self.arguments: list[str] = []
        self.state: dict[str, Any] | None = None  # of the node that runs already
        monkeypatch.setattr("barnraise.node.main.run_from_config", self._foreground)
        monkeypatch.setattr(background, "start", self._background)
        monkeypatch.setattr(background, "state_in", lambda data: self.state)
        monkeypatch.setattr(attached, "state_in", lambda data: self.state)
        monkeypatch.setattr(attached, "_app", self._showing("app"))
        monkeypatch.setattr(attached, "lines", self._showing("lines"))

    def _showing(self, what: str) -> Callable[..., int]:
        def shown(*arguments: object) -> int:
            self.what.append(what)
            return 0

        return shown

    def _foreground(self, config: NodeConfig) -> int:
        self.what.append("foreground")
        self.config = config
        return 7

    def _background(self, arguments: list[str], data: Path, say: Callable[[str], None]) -> Any:
        self.what.append("background")
        self.arguments = arguments
        self.state = {"kind": "node", "run": "r", "coordinator": PEER}
        return self, self.state

    def ended(self) -> int | None:
        return None

    def wait(self, seconds: float) -> int | None:
        return None

    def terminate(self) -> None:
        self.what.append("ended")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Seen(monkeypatch)


def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)


def place(folder: Path) -> tuple[object, ...]:
    return ("--data", folder / "data", "--key", folder / "node.key")


def test_without_a_terminal_the_node_runs_in_the_foreground_and_its_exit_code_is_passed_on(
    seen: Seen, tmp_path: Path
) -> None:
    """R24: plain lines and the same exit codes where stdout is no terminal."""
    assert call("join", ADDRESS, *place(tmp_path)) == 7
    assert seen.what == ["foreground"]


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize(("disk", "threads", "said"), [(100_000, 1024, True), (1, 1, False)])
def test_a_node_that_is_given_more_than_there_is_starts_and_has_it_said(
    disk: int,
    threads: int,
    said: bool,
    headless: bool,
    seen: Seen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not headless:
        at_a_terminal(monkeypatch)
    options = ("--disk-gb", disk, "--threads", threads, "--yes")
    assert call("join", ADDRESS, *place(tmp_path), *options) == (7 if headless else 0)
    told = capsys.readouterr().err
    assert ("--disk-gb 100.0 TB is more than there is" in told) is said
    assert ("--threads 1024 is more than there is" in told) is said


@pytest.mark.parametrize("option", ["--headless", "--plain", "--json", "NO_COLOR", "TERM"])
def test_at_a_terminal_plain_lines_can_be_chosen_in_every_usual_way(
    option: str, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R24: --plain, --json, NO_COLOR, a terminal that cannot be drawn on; the node's exit codes."""
    options: list[str] = []
    if option == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    elif option == "TERM":
        monkeypatch.setenv("TERM", "dumb")
    else:
        options.append(option)
    at_a_terminal(monkeypatch)
    assert call("join", ADDRESS, *place(tmp_path), "--yes", *options) == 7
    assert seen.what == ["foreground"]
    assert seen.config is not None
    assert seen.config.json_lines is (option == "--json")


def test_at_a_terminal_the_node_works_in_the_background_and_the_app_shows_it(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R24: the app is a viewer; closing it ends nothing."""
    at_a_terminal(monkeypatch)
    more = ("--yes", "--up-mbit", 5, "--listen", "/ip4/127.0.0.1/tcp/0", "--listen", "/ip4/127.0.0.1/tcp/1")
    monkeypatch.chdir(tmp_path)
    assert call("join", ADDRESS, "--data", "here", "--key", "node.key", *more) == 0
    assert seen.what == ["background", "app"]
    assert seen.arguments == [
        *(ADDRESS, "--data", str(tmp_path / "here"), "--key", str(tmp_path / "node.key")),
        *("--listen", "/ip4/127.0.0.1/tcp/0", "--listen", "/ip4/127.0.0.1/tcp/1"),
        *("--up-mbit", "5.0", "--yes"),
    ]


def test_the_background_gets_the_options_as_they_were_given() -> None:
    app = typer.Typer()
    app.command("join")(join.join)
    command = typer.main.get_command(app)
    given = [ADDRESS, "--data", "/d", "--name", "a b", "--threads", "3", "-y", "--plain", "--headless"]
    again = as_given(command.make_context("join", given))
    assert again == [ADDRESS, "--data", "/d", "--name", "a b", "--threads", "3", "--yes"]
    assert as_given(command.make_context("join", list(again))) == again


def test_a_run_joined_before_needs_no_address(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("join", *place(tmp_path)) == 2
    assert "no run was joined" in capsys.readouterr().err
    data = Path(str(place(tmp_path)[1]))
    known = KnownRuns(data / "known.json")
    known.joined(PEER, b"r" * 32)
    known.reached(PEER, "barn", [ADDRESS, "/dns4/home/tcp/1/p2p/" + PEER])
    for words in ((), ("barn",), ("7272",)):
        assert call("join", *words, *place(tmp_path)) == 7
        assert seen.config is not None
        assert seen.config.addresses == (ADDRESS, "/dns4/home/tcp/1/p2p/" + PEER)
    assert call("join", "cellar", *place(tmp_path)) == 2
    assert "'barn' (72727272" in capsys.readouterr().err
    at_a_terminal(monkeypatch)
    seen.state = {"kind": "node", "run": "r", "coordinator": OTHER.rpartition("/")[2], "pid": 12}
    assert call("join", *place(tmp_path)) == 0  # whatever runs is meant
    assert seen.what[-1] == "app"


def test_a_second_join_shows_the_node_that_runs_and_starts_none(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_a_terminal(monkeypatch)
    seen.state = {"kind": "node", "run": "r", "coordinator": PEER, "pid": 12}
    assert call("join", ADDRESS, *place(tmp_path)) == 0
    assert "process 12" in capsys.readouterr().out
    assert call("join", ADDRESS, *place(tmp_path), "--plain") == 0
    assert seen.what == ["app", "lines"]
    assert not (tmp_path / "node.key").exists()
    seen.what.clear()
    assert call("join", OTHER, *place(tmp_path)) == 1
    assert "works for coordinator" in capsys.readouterr().err
    assert seen.what == []


@pytest.mark.parametrize("yes", [True, False], ids=["agrees", "declines"])
def test_consent_is_asked_at_the_terminal_before_the_app(
    yes: bool, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[tuple[str, str]] = []
    asked = {"run_id": "ab", "fields": [["run", "barn (ab)"], ["disk", "about 1 GB"]]}
    seen.state = {"kind": "node", "run": "", "coordinator": PEER, "consent": asked}
    at_a_terminal(monkeypatch)
    monkeypatch.setattr(attached.typer, "confirm", lambda question, default: yes)
    monkeypatch.setattr(
        attached, "send_command", lambda path, name, run_id: answers.append((name, run_id)) or {}
    )
    assert call("join", ADDRESS, *place(tmp_path)) == (0 if yes else 5)
    shown = capsys.readouterr()
    assert "about 1 GB" in shown.out
    assert answers == [("agree" if yes else "decline", "ab")]
    assert seen.what == (["app"] if yes else [])
    assert yes or "chose not to join" in shown.err


def test_what_was_typed_before_the_question_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, person = pty.openpty()
    with os.fdopen(person, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(terminal, b"y\n\n")
        asked: list[bool] = []

        def confirm(question: str, default: bool) -> bool:
            asked.append(bool(select.select([stdin], [], [], 0)[0]))
            return False

        monkeypatch.setattr(attached.typer, "confirm", confirm)
        monkeypatch.setattr(attached, "send_command", lambda path, name, run_id: {})
        select.select([stdin], [], [], 30)
        assert not attached.answer(tmp_path, {"run_id": "ab", "fields": [["run", "barn"]]}, yes=False)
        assert asked == [False]  # nothing was left to read
    os.close(terminal)


def test_a_strangers_words_reach_no_terminal_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([("run", "\x1b[2Jbarn\x1b]0;x\x07\nnext"), ("\x1b[31mred", "\u202ex")])
    shown = capsys.readouterr().out
    assert "barn" in shown
    assert "next" in shown
    assert not [c for c in shown if not (c.isprintable() or c == "\n")]


def test_an_error_on_the_way_up_reaches_the_person_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R24: as if the node had been started in the foreground."""
    for code, text in ((2, "barnraise: the key cannot be read"), (1, "barnraise: the port is taken")):
        script = f"import sys; print({text!r}, file=sys.stderr); sys.exit({code})"
        monkeypatch.setattr(background, "barnraise", lambda *arguments, s=script: [sys.executable, "-c", s])
        with pytest.raises(typer.Exit) as ended:
            background.start([], tmp_path / "data", lambda text: None)
        assert ended.value.exit_code == code
        assert capsys.readouterr().err == f"{text}\n"
    monkeypatch.setattr(
        background, "barnraise", lambda *arguments: [sys.executable, "-c", "raise SystemExit(1)"]
    )
    with pytest.raises(typer.Exit):
        background.start([], tmp_path / "data", lambda text: None)
    assert "ended with exit code 1" in capsys.readouterr().err


def test_a_data_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot use the data folder"):
        background.start([], tmp_path / "file" / "data", lambda text: None)


def test_a_node_that_never_comes_up_is_ended_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "START_S", 0.2)
    script = "import time; time.sleep(600)"
    monkeypatch.setattr(background, "barnraise", lambda *arguments: [sys.executable, "-c", script])
    ended: list[background.Background] = []
    terminate = background.Background.terminate

    def noted(self: background.Background) -> None:
        terminate(self)
        ended.append(self)

    monkeypatch.setattr(background.Background, "terminate", noted)
    with pytest.raises(BarnraiseError, match="did not come up"):
        background.start([], tmp_path / "data", lambda text: None)
    assert ended[0].wait(60.0) is not None


# --- the first start


def config(folder: Path, **more: Any) -> NodeConfig:
    return NodeConfig(address=ADDRESS, data=folder / "data", key=folder / "cfg" / "node.key", **more)


def test_a_first_start_makes_the_key_names_its_place_and_keeps_what_is_chosen(tmp_path: Path) -> None:
    """R8: the key lies outside of the data, mode 0600, and is named at the start."""
    said: list[str] = []
    answers = iter(["much", "0.1GB", "30GB", "1MB/s", "fast", "none"])
    it = config(tmp_path)
    assert is_first(it)
    guide(it, said.append, lambda question, proposal: next(answers))
    text = "\n".join(said)
    assert str(it.key) in text
    assert "key export" in text
    assert f"--key {it.key}" in text  # a copy of this very key, not of the user's usual one
    assert "free" in text
    assert stat.S_IMODE(it.key.stat().st_mode) == 0o600
    assert load_identity(it.key)
    kept = load_chosen(it.limits_path)[0]
    assert (kept.disk, kept.up, kept.down) == (30 * 10**9, 1e6, None)
    assert not is_first(it)


def test_enter_accepts_every_proposal(tmp_path: Path) -> None:
    asked: list[str] = []

    def enter(question: str, proposal: str) -> str:
        asked.append(question)
        return proposal

    guide(config(tmp_path), lambda text: None, enter)
    assert len(asked) == 3
    kept = load_chosen(config(tmp_path).limits_path)[0]
    assert kept.disk is not None
    assert 10**9 <= kept.disk <= 20 * 10**9
    assert (kept.up, kept.down) == (None, None)


def test_what_the_command_line_gives_is_not_asked(tmp_path: Path) -> None:
    def never(question: str, proposal: str) -> str:
        raise AssertionError(question)

    guide(config(tmp_path, disk_bytes=10**10, up_bytes_s=1e6, down_bytes_s=1e6), lambda text: None, never)


@pytest.mark.parametrize(
    ("free", "proposed"),
    [(None, 20), (10**12, 20), (9 * 10**9, 4), (10**8, 1)],
    ids=["unknown", "plenty", "little", "none"],
)
def test_the_disk_proposed_is_at_most_half_of_what_is_free(free: int | None, proposed: int) -> None:
    assert proposed_disk(free) == proposed * 10**9


@pytest.mark.parametrize("options", [("--yes",), ("--yes", "--plain")], ids=" ".join)
def test_yes_asks_nothing_at_a_first_start(
    options: tuple[str, ...], seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_a_terminal(monkeypatch)
    monkeypatch.setattr(first_start, "guide", lambda *arguments: pytest.fail("asked"))
    call("join", ADDRESS, *place(tmp_path), *options)
    assert len(seen.what) >= 1


def test_a_bad_address_is_refused_before_a_key_is_made(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_a_terminal(monkeypatch)
    assert call("join", "/ip4/1.2.3.4/tcp/1", *place(tmp_path)) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "node.key").exists()
    assert seen.what == []

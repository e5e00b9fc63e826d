"""Services: texts that their systems understand, and commands that are safe to repeat.

The systemd unit is checked by systemd itself where that is installed. launchd's plist and
Windows' task are checked as texts only: nobody has run them.
"""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.identity import peer_id_of
from barnraise.tui import main as command_line
from barnraise.tui import service
from barnraise.tui.service_texts import launchd_plist, quoted, systemd_unit, windows_task

PEER = peer_id_of(bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"))
ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
COMMAND = ["/usr/bin/python3", "-m", "x", "--name", 'a "b" $HOME 100%', "--data", "C:\\new folder\\"]
FOLDER = Path("/tmp/with space/50%")


def call(*arguments: object) -> int:
    return command_line.main([str(argument) for argument in arguments])


def test_the_unit_restarts_crashes_with_backoff_and_leaves_orderly_ends_alone() -> None:
    unit = systemd_unit(COMMAND, FOLDER, {"PATH": "/bin:$x"}, 257)
    lines = unit.splitlines()
    assert "Restart=on-failure" in lines
    assert "RestartPreventExitStatus=2 3 4 5 130" in lines
    assert "RestartSteps=8" in lines
    assert "StartLimitBurst=20" in lines
    assert "WorkingDirectory=/tmp/with space/50%%" in lines
    assert 'Environment="PATH=/bin:$x"' in lines
    assert "RestartSteps" not in systemd_unit(COMMAND, FOLDER, {}, 252)
    assert "RestartSec=30" in systemd_unit(COMMAND, FOLDER, {}, 252)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("version", [252, 254])
def test_systemd_itself_finds_no_fault_with_the_unit(version: int, tmp_path: Path) -> None:
    path = tmp_path / "barnraise.service"
    command = [sys.executable, *COMMAND[1:]]
    path.write_text(systemd_unit(command, tmp_path, {"A": 'b "c" %d'}, version))
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(path)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    complaints = [line for line in done.stderr.splitlines() if "barnraise.service" in line]
    unknown = [line for line in complaints if "Restart" in line and "Unknown" in line]  # an older systemd
    assert complaints == (unknown if version >= 254 else []), done.stderr


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40))
def test_any_word_survives_systemd_s_quoting(word: str) -> None:
    line = quoted(word)
    assert line[0] == line[-1] == '"'
    read = re.sub(r'\\(["\\])|%(%)|\$(\$)', lambda match: match[1] or match[2] or match[3], line[1:-1])
    assert read == word
    assert re.fullmatch(
        r'(?:[^"\\%$]|\\["\\]|%%|\$\$)*', line[1:-1]
    )  # nothing ends it early, nothing expands


@pytest.mark.parametrize("word", ["a\nb", "\0", "\x1b[31m", "\x7f"])
def test_what_no_unit_file_can_hold_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="control character"):
        quoted(word)


def test_the_launch_agent_says_the_same_as_a_property_list() -> None:
    told = plistlib.loads(launchd_plist(COMMAND, FOLDER, {"PATH": "/bin"}, "net.barnraise.a").encode())
    assert told["ProgramArguments"] == COMMAND
    assert told["KeepAlive"] == {"SuccessfulExit": False}
    assert told["ThrottleInterval"] >= 10
    assert told["RunAtLoad"] is True


def test_the_windows_task_is_well_formed_and_restarts_failures() -> None:
    text = windows_task([r"C:\Program Files\python.exe", "-m", 'a "b" & <c>'], r"C:\data", "PC\\anna & co")
    root = ElementTree.fromstring(text.replace(' encoding="UTF-16"', ""))
    space = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    assert root.findtext(".//t:Command", namespaces=space) == r"C:\Program Files\python.exe"
    assert root.findtext(".//t:Arguments", namespaces=space) == '-m "a \\"b\\" & <c>"'
    assert root.findtext(".//t:RestartOnFailure/t:Interval", namespaces=space) == "PT1M"
    assert root.findtext(".//t:ExecutionTimeLimit", namespaces=space) == "PT0S"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose service manager is a script that notes what it is told."""
    tools = tmp_path / "bin"
    tools.mkdir()
    script = tools / "systemctl"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {shlex.quote(str(tmp_path / "told"))}\n'
        '[ "$1" = --version ] && echo "systemd 254 (254)"\n'
        '[ "$2" = is-active ] && echo active\n'
        f"[ ! -e {shlex.quote(str(tmp_path / 'broken'))} ] || {{ echo no bus >&2; exit 1; }}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "cfg"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def told(home: Path) -> list[str]:
    return [line for line in (home / "told").read_text().splitlines() if line != "--version"]


def test_install_writes_enables_and_starts_status_says_so_remove_undoes_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = home / "cfg" / "systemd" / "user" / "barnraise.service"
    assert call("service", "install", ADDRESS, "--up-mbit", 5, "--name", "ann 50%") == 0
    assert "enabled and started" in capsys.readouterr().out
    text = unit.read_text()
    assert '"--up-mbit" "5.0"' in text
    assert '"--name" "ann 50%%"' in text
    assert '"--yes" "--headless"' in text
    assert "RestartSteps" in text
    assert told(home) == [
        "--user daemon-reload",
        "--user enable barnraise.service",
        "--user restart barnraise.service",
    ]
    assert call("service", "install", ADDRESS, "--json") == 0  # again: replaced
    assert json.loads(capsys.readouterr().out)["started"] is True
    assert "ann" not in unit.read_text()
    assert call("service", "status", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["installed"], shown["enabled"], shown["state"]) == (True, True, "active")
    for was in (True, False):
        assert call("service", "remove", "--json") == 0
        assert json.loads(capsys.readouterr().out)["removed"] is was
    assert not unit.exists()
    assert call("service", "status") == 0
    assert "not installed" in capsys.readouterr().out


def test_where_the_manager_does_not_answer_the_person_is_told_what_to_do(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "broken").touch()
    assert call("service", "install", ADDRESS) == 0
    out = capsys.readouterr().out
    assert "not started: no bus" in out
    assert "systemctl --user daemon-reload && systemctl --user enable --now barnraise.service" in out
    assert call("service", "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["enabled"] is False


@pytest.mark.parametrize(
    "arguments",
    [
        ("hello",),
        (ADDRESS, "--nonsense"),
        (ADDRESS, "--threads", 0),
        (ADDRESS, "--name", "a\nb"),
        (ADDRESS, "--name-of-service", "../x"),
        (ADDRESS, "one too many"),
    ],
    ids=["address", "option", "value", "control", "name", "word"],
)
def test_what_join_would_refuse_is_refused_before_anything_is_written(
    arguments: tuple[object, ...], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("service", "install", *arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (home / "cfg").exists()


def test_print_writes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("service", "install", ADDRESS, "--print") == 0
    assert "[Service]" in capsys.readouterr().out
    assert not (home / "cfg").exists()


def test_a_node_that_runs_is_not_doubled(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "state_in", lambda folder: {"kind": "node"})
    assert call("service", "install", ADDRESS) == 1
    assert "barnraise leave" in capsys.readouterr().err
    assert not (home / "cfg").exists()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_systems_that_nobody_has_tried_get_the_text_and_are_told_so(
    platform: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "platform", platform)
    assert call("service", "install", ADDRESS, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert "untested" in shown["problem"]
    assert shown["todo"].startswith("launchctl" if platform == "darwin" else "schtasks")
    assert Path(shown["file"]).exists()
    assert call("service", "remove") == 0
    assert not Path(shown["file"]).exists()

"""``barnraise service``: a node that starts with the machine and comes back after a crash."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from barnraise.node.supervise import read_supervisor
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.tui.background import state_in
from barnraise.tui.console import emit_json, examples, print_rows
from barnraise.tui.demo_processes import barnraise
from barnraise.tui.given_invite import keep_invite
from barnraise.tui.join_arguments import as_given
from barnraise.tui.service_texts import LABEL, launchd_plist, quoted, systemd_unit, windows_task

ASK_S = 20.0
KEPT_VARIABLES = ("PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "XDG_DATA_HOME", "XDG_CONFIG_HOME")
UNTESTED = "this system's services are written to its documentation and untested: please report how it went"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}")

app = typer.Typer(
    help="Run a node as a service of this user.",
    epilog=examples("service install /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...", "service status"),
    no_args_is_help=True,
)

NAME = typer.Option(
    "barnraise", "--name-of-service", metavar="NAME", help="For a second node on one machine."
)
JSON = typer.Option(False, "--json", help="One JSON object.")


@app.callback()
def group() -> None:
    """Run a node as a service of this user: it starts with the machine and comes back after a crash."""


@app.command(
    short_help="Write the service and start it.",
    epilog=examples(
        "service install /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...",
        "service install /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW... --up-mbit 5 --data node-2 --key n2.key",
    )
    + "\n\nAll options of 'barnraise join' can be given; they are checked before anything is written.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def install(
    context: typer.Context,
    address: str = typer.Argument(
        ..., metavar="MULTIADDR", help="The coordinator's address, ending in /p2p/<peer id>."
    ),
    name: str = NAME,
    show: bool = typer.Option(False, "--print", help="Print what would be written, and write nothing."),
    as_json: bool = JSON,
) -> None:
    """Have this machine join a run whenever it is up. Installing again replaces what is there.

    Installing is consent to the run at MULTIADDR: a service has nobody to ask.
    """
    command, folder, invite = _command(context, address)
    place, text = _text(_checked(name), command, folder)
    if show:
        typer.echo(text, nl=False)
        return
    if read_supervisor(folder) is not None or (not place.exists() and state_in(folder) is not None):
        raise BarnraiseError(
            f"a node runs in {folder} already: end it first, with 'barnraise leave{_named(folder)}'"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if invite is not None:
            keep_invite(invite, folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.new")
        partial.write_text(text, encoding="utf-16" if place.suffix == ".xml" else "utf-8")
        partial.replace(place)
    except OSError as error:
        raise StorageError(f"cannot write {place}: {error.strerror or error}") from error
    problem = ""
    if sys.platform.startswith("linux"):
        problem = (
            _systemctl("daemon-reload")
            or _systemctl("enable", place.name)
            or _systemctl("restart", place.name)
        )
        todo = f"systemctl --user daemon-reload && systemctl --user enable --now {place.name}"
    elif sys.platform == "darwin":
        problem, todo = UNTESTED, f"launchctl bootstrap gui/{os.getuid()} {place}"
    else:
        problem, todo = UNTESTED, f'schtasks /Create /TN {name} /XML "{place}"'
    if as_json:
        emit_json(
            {"file": str(place), "started": not problem, "problem": problem, "todo": todo if problem else ""}
        )
        return
    typer.echo(f"written: {place}")
    if problem:
        typer.echo(f"not started: {problem}\nstart it with:\n  {todo}")
        return
    typer.echo(f"enabled and started; 'barnraise status{_named(folder)}' shows the node")
    if not _lingers():
        typer.echo("it runs while you are logged in; for always:\n  loginctl enable-linger")


@app.command(short_help="Stop the service and delete it.", epilog=examples("service remove"))
def remove(name: str = NAME, as_json: bool = JSON) -> None:
    """Stop the service and delete it; the node's key, receipts and weights stay."""
    place = _place(_checked(name))
    was = place.exists()
    problem = ""
    if was:
        if sys.platform.startswith("linux"):
            problem = _systemctl("disable", "--now", place.name)
        elif sys.platform == "darwin":
            problem = f"stop it with: launchctl bootout gui/{os.getuid()} {place}"
        else:
            problem = f"stop it with: schtasks /Delete /TN {name}"
        try:
            place.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot delete {place}: {error.strerror or error}") from error
        if sys.platform.startswith("linux"):
            _systemctl("daemon-reload")
    if as_json:
        emit_json({"file": str(place), "removed": was, "problem": problem})
        return
    typer.echo(f"removed: {place}" if was else f"no service is installed: there is no {place}")
    if problem:
        typer.echo(f"it may still run: {problem}")


@app.command(short_help="Say whether it is installed and runs.", epilog=examples("service status --json"))
def status(name: str = NAME, as_json: bool = JSON) -> None:
    """Say whether the service is installed, starts by itself, and runs now."""
    place = _place(_checked(name))
    told: dict[str, Any] = {"file": str(place), "installed": place.exists(), "enabled": None, "state": None}
    if told["installed"] and sys.platform.startswith("linux"):
        told["enabled"] = _systemctl("is-enabled", place.name) == ""
        told["state"] = _asked("is-active", place.name) or None
        told["lingers"] = _lingers()
    if as_json:
        emit_json(told)
        return
    rows = [("service", str(place) if told["installed"] else f"not installed: there is no {place}")]
    if told["installed"]:
        rows.append(("enabled", {True: "yes", False: "no", None: "unknown here"}[told["enabled"]]))
        rows.append(("state", str(told["state"] or "unknown: the service manager does not answer")))
    print_rows(rows)


def _command(context: typer.Context, address: str) -> tuple[list[str], Path, str | None]:
    """The command that the service runs, its options checked as ``join`` checks them; data folder, invite.

    Raises:
        typer.BadParameter: and other errors of use, as of ``join``.
    """
    from barnraise.node.config import default_data_path
    from barnraise.tui import join

    joining = typer.Typer()
    joining.command("join")(join.join)
    parsed = typer.main.get_command(joining).make_context("join", [address, *context.args])
    arguments = as_given(parsed)  # type: ignore[arg-type]  # the one click, whoever carries it
    join.check_address(address)
    command = barnraise("join", *arguments, *(() if "--yes" in arguments else ("--yes",)), "--headless")
    for word in command:
        try:
            quoted(word)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    data = parsed.params.get("data")
    return command, Path(os.path.abspath(data or default_data_path())), parsed.params.get("invite")


def _text(name: str, command: list[str], folder: Path) -> tuple[Path, str]:
    variables = {key: os.environ[key] for key in KEPT_VARIABLES if os.environ.get(key)}
    place = _place(name)
    if sys.platform.startswith("linux"):
        return place, systemd_unit(command, folder, variables, _systemd_version())
    if sys.platform == "darwin":
        return place, launchd_plist(command, folder, variables, f"{LABEL}.{name}")
    return place, windows_task(command, str(folder), getpass.getuser())


def _place(name: str) -> Path:
    """The file that makes the service."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.{name}.plist"
    if sys.platform.startswith("linux"):
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(base) / "systemd" / "user" / f"{name}.service"
    from barnraise.node.config import default_data_path

    return default_data_path() / f"{name}.xml"


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise typer.BadParameter("letters, digits, - and _ only", param_hint="--name-of-service")
    return name


def _systemctl(*words: str) -> str:
    """Run ``systemctl --user``; why it failed, or ``""``."""
    if shutil.which("systemctl") is None:
        return "this system has no systemd"
    try:
        done = _run(words)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemctl did not answer: {error}"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
    return lines[0] if lines else f"systemctl {words[0]} ended with exit code {done.returncode}"


def _asked(*words: str) -> str:
    """The answer of ``systemctl --user``, whatever its exit code."""
    try:
        return _run(words).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemctl", "--user", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=ASK_S,
    )


def _systemd_version() -> int:
    if shutil.which("systemctl") is None:
        return 0
    try:
        done = subprocess.run(
            ["systemctl", "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.match(r"systemd (\d{1,5})", done.stdout)
    return int(match[1]) if match else 0


def _lingers() -> bool:
    """Whether this user's services run without a login."""
    try:
        return (Path("/var/lib/systemd/linger") / getpass.getuser()).exists()
    except (OSError, KeyError):
        return False


def _named(folder: Path) -> str:
    from barnraise.node.config import default_data_path

    return "" if folder == default_data_path() else f" {folder}"

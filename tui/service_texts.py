"""What an operating system wants to be told about a service: a systemd unit, a launchd plist, a Windows task.

Pure text. The systemd unit is what ``barnraise service install`` writes and tests check with
systemd's own parser; the other two are written to their makers' documentation and untested there.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

LABEL = "net.barnraise"
STEPS_SINCE = 254  # systemd's first version with RestartSteps=
FINAL = "2 3 4 5 130"  # exit codes that a new start would not cure (barnraise.node.supervise)


def quoted(word: str, variables: bool = True) -> str:
    """One argument of ``ExecStart=``, whatever is in it, or of ``Environment=``, which expands no variables.

    Raises:
        ValueError: a line break or another control character, which a unit file cannot hold.
    """
    if any(ord(char) < 32 or ord(char) == 127 for char in word):
        raise ValueError(f"{word!r} holds a control character, which no service can be given")
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text.replace("$", "$$") if variables else text}"'


def systemd_unit(command: Sequence[str], folder: Path, environment: Mapping[str, str], version: int) -> str:
    """A user unit. ``version`` is systemd's: from 254 on it backs off itself, before that it waits 30 s.

    An orderly end (``barnraise leave``, ``finish``, a completed run) stays one; a crash is
    followed by a start, at most 20 an hour.
    """
    backoff = (
        "RestartSec=1\nRestartSteps=8\nRestartMaxDelaySec=300" if version >= STEPS_SINCE else "RestartSec=30"
    )
    variables = "".join(
        f"Environment={quoted(f'{name}={value}', False)}\n" for name, value in environment.items()
    )
    return f"""\
# Written by 'barnraise service install'; 'barnraise service remove' deletes it.
[Unit]
Description=Barnraise: lends this machine to a run
StartLimitIntervalSec=3600
StartLimitBurst=20

[Service]
Type=exec
ExecStart={" ".join(quoted(word) for word in command)}
WorkingDirectory={_path(folder)}
{variables}Restart=on-failure
RestartPreventExitStatus={FINAL}
{backoff}
KillMode=mixed
TimeoutStopSec=15
Nice=10
StandardOutput=null
StandardError=journal

[Install]
WantedBy=default.target
"""


def launchd_plist(command: Sequence[str], folder: Path, environment: Mapping[str, str], label: str) -> str:
    """A launch agent (launchd.plist(5)); launchd starts again after a failure, 30 s apart at least."""
    fields = {
        "Label": label,
        "ProgramArguments": list(command),
        "WorkingDirectory": str(folder),
        "EnvironmentVariables": dict(environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ProcessType": "Background",
        "StandardOutPath": "/dev/null",
        "StandardErrorPath": str(folder / "node.err"),
    }
    return plistlib.dumps(fields, sort_keys=False).decode("utf-8")


def windows_task(command: Sequence[str], folder: str, user: str) -> str:
    """A task for ``schtasks /Create /XML`` (Task Scheduler schema 1.4): at log-on, again after a failure."""
    program, *arguments = command
    return f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.4" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo><Description>Barnraise: lends this machine to a run</Description></RegistrationInfo>
  <Triggers><LogonTrigger><Enabled>true</Enabled><UserId>{escape(user)}</UserId></LogonTrigger></Triggers>
  <Principals><Principal id={quoteattr("Author")}>
    <UserId>{escape(user)}</UserId><LogonType>InteractiveToken</LogonType>
  </Principal></Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>7</Priority>
    <RestartOnFailure><Interval>PT1M</Interval><Count>20</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author"><Exec>
    <Command>{escape(program)}</Command>
    <Arguments>{escape(_windows_words(arguments))}</Arguments>
    <WorkingDirectory>{escape(folder)}</WorkingDirectory>
  </Exec></Actions>
</Task>
"""


def _windows_words(words: Sequence[str]) -> str:
    from subprocess import list2cmdline

    return list2cmdline(words)


def _path(folder: Path) -> str:
    return str(folder).replace("%", "%%")

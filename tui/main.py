"""The command line: one Typer application, one module per group of verbs.

Whatever goes wrong becomes one line on stderr that names the cause and the cure.
Exit codes: 0 done, 1 the work failed or a check found something wrong, 2 the
command was not usable as given.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import typer

from barnraise.protocol.environments import TaskError
from barnraise.protocol.errors import BarnraiseError, KeyFileError, RunFolderError
from barnraise.protocol.wire import printable
from barnraise.tui import (
    admit,
    appeal,
    attach,
    coordinate,
    coordinator_logs,
    data,
    demo,
    doctor,
    join,
    keys,
    ledger,
    limits,
    logs,
    oversee,
    receipts,
    report,
    runs,
    service,
    simulate,
    status,
    steer,
    stores,
    swarm,
    worker,
)
from barnraise.tui.console import examples

app = typer.Typer(
    name="barnraise",
    help="Strangers lend their home GPUs, and together they raise one language model.",
    epilog=examples("demo", "join /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW...", "COMMAND --help"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
oversee.register(coordinate.app)
stores.register(coordinate.app)
coordinator_logs.register(coordinate.app)
app.add_typer(runs.app, name="run")
app.add_typer(coordinate.app, name="coordinator")
app.add_typer(admit.app, name="admit")
app.add_typer(ledger.app, name="ledger")
app.add_typer(keys.app, name="key")
app.add_typer(limits.app, name="limits")
app.add_typer(service.app, name="service")
app.add_typer(data.app, name="data")
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)
app.command("join", epilog=join.EXAMPLES)(join.join)
app.command("tui", epilog=attach.EXAMPLES)(attach.tui)
app.command("status", epilog=status.EXAMPLES)(status.status)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("receipts", epilog=receipts.EXAMPLES)(receipts.receipts)
app.command("appeal", epilog=appeal.EXAMPLES)(appeal.appeal)
app.command("swarm", epilog=swarm.EXAMPLES)(swarm.swarm)
for _verb in ("pause", "resume", "finish", "leave"):
    app.command(_verb, epilog=getattr(steer, f"{_verb.upper()}_EXAMPLES"))(getattr(steer, _verb))
app.command("worker", epilog=worker.EXAMPLES)(worker.worker)
app.command("logs", epilog=logs.EXAMPLES)(logs.logs)
app.command("simulate", epilog=simulate.EXAMPLES)(simulate.simulate)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            typer.echo(f"barnraise {installed('barnraise')}")
        except PackageNotFoundError:
            typer.echo("barnraise (not installed)")
        raise typer.Exit


# Typer carries click inside itself in newer releases and outside in older ones: this is either.
_ShownError: Any = typer.BadParameter.__mro__[2]


def complain(message: str) -> None:
    """One line on stderr, whatever the message's own layout."""
    typer.echo("barnraise: " + " ".join(message.split()), err=True)


def unreadable(arguments: Sequence[str]) -> str:
    """Why a command line cannot be taken as text, in words; ``""``: it can.

    Bytes that are not UTF-8 reach Python as surrogates, which no message, file or ledger entry
    takes; control characters would move the cursor of whoever is shown them.
    """
    for index, word in enumerate(arguments):
        bad = [char for char in word if unicodedata.category(char) in ("Cs", "Cc")]
        if not bad:
            continue
        before = arguments[index - 1] if index else ""
        where = before if before.startswith("-") and not word.startswith("-") else ""
        what = (
            "bytes that are not UTF-8"
            if unicodedata.category(bad[0]) == "Cs"
            else f"the control character U+{ord(bad[0]):04X}"
        )
        place = f"{printable(where, 40)}: " if where else ""
        return f"{place}{printable(word, 60)!r} has {what}: give plain text"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if problem := unreadable(given):
        complain(problem)
        return 2
    command = typer.main.get_command(app)
    try:
        result = command.main(args=given, prog_name="barnraise", standalone_mode=False)
    except _ShownError as error:
        context = getattr(error, "ctx", None)
        text = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":  # a bare command's message is its whole help
            typer.echo(text, err=True)
        else:
            complain(text.rstrip(".") + (f" (see '{context.command_path} --help')" if context else ""))
        return 2
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted")
        return 130
    except (RunFolderError, KeyFileError, TaskError) as error:
        complain(str(error))
        return 2
    except BarnraiseError as error:
        complain(str(error))
        return 1
    except BrokenPipeError:
        # The reader of our output (head, less) went away: not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # What no module foresaw: a folder that cannot be made, a disk that is full.
        complain(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        return 1
    if result == 130:  # newer releases of Typer turn Ctrl-C into this exit code by themselves
        complain("interrupted")
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())

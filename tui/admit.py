"""``barnraise admit``: who may join a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from barnraise.tui.console import emit_json, examples
from barnraise.tui.coordinate import ban, command, seconds_of, unban

app = typer.Typer(
    help="Say who may join a run.",
    epilog=examples(
        "admit mode ./my-run invite",
        "admit invite ./my-run --uses 10 --for 7d --note 'the lab'",
        "admit allow ./my-run 12D3KooW...",
        "admit list ./my-run",
    ),
    no_args_is_help=True,
)

FOLDER = typer.Argument(..., metavar="DIR", help="The folder of a run that is being served.")
NODES = typer.Argument(..., metavar="NODE...", help="Peer ids ('barnraise key show' prints one's own).")
JSON = typer.Option(False, "--json", help="One JSON object.")
NOTE = typer.Option("", "--note", metavar="TEXT", help="For your own eyes: who that is.")
AT_ONCE = 500  # keys, of 64 letters at most, in a command of 64 KiB
MODES = {"open": "everybody", "invite": "the list, and whoever has an invite", "allow": "the list alone"}


@app.callback()
def group() -> None:
    """Say who may join a run."""


@app.command(
    short_help="Open a run to everybody, to the invited, or to a list.",
    epilog=examples("admit mode ./my-run invite --keep-proven", "admit mode ./my-run open"),
)
def mode(
    folder: Path = FOLDER,
    admission: str = typer.Argument(..., metavar="open|invite|allow", help="Who may join from now on."),
    keep: bool = typer.Option(
        False, "--keep-proven", help="First put every node that has had work accepted on the list."
    ),
    reason: str = typer.Option("", "--reason", metavar="TEXT", help="Why; the ledger shows it."),
    as_json: bool = JSON,
) -> None:
    """Change who may join; a signed amendment in the public ledger.

    Whoever is not on the list gets no more work, keeps their credit, and may still fetch receipts.
    """
    if admission not in MODES:
        raise typer.BadParameter("open, invite or allow", param_hint="open|invite|allow")
    reply = command(folder, "admission", mode=admission, keep_proven=keep, reason=reason)
    if as_json:
        emit_json(reply)
        return
    typer.echo(f"open to {MODES[admission]}" + ("" if reply["changed"] else " (as before)"))
    if keep:
        typer.echo(f"{len(reply['allowed'])} nodes that had work accepted were put on the list")


@app.command(
    short_help="Make an invite.",
    epilog=examples("admit invite ./my-run", "admit invite ./my-run --uses 10 --for 7d --note 'the lab'"),
)
def invite(
    folder: Path = FOLDER,
    uses: int = typer.Option(1, "--uses", metavar="N", min=1, max=65_536, help="Good for so many nodes."),
    lasting: str = typer.Option("7d", "--for", metavar="TIME", help="How long: 90m, 12h, 7d."),
    note: str = NOTE,
    as_json: bool = JSON,
) -> None:
    """Print a signed word that lets new nodes in: 'barnraise join ADDRESS --invite WORD'."""
    reply = command(folder, "invite", uses=uses, seconds=seconds_of(lasting), note=note)
    if as_json:
        emit_json(reply)
        return
    typer.echo(reply["invite"])
    typer.echo(f"good for {uses}, until {_moment(reply['expires_at'])}; id {reply['id'][:12]}", err=True)
    if reply["admission"] == "open":
        typer.echo(
            "the run is open to everybody: an invite counts where too many new keys came from one address; "
            f"'barnraise admit mode {folder} invite' takes nobody else",
            err=True,
        )
    elif reply["admission"] == "allow":
        typer.echo(
            f"the run is open to {MODES['allow']}: 'barnraise admit mode {folder} invite' makes invites "
            "count",
            err=True,
        )


@app.command(short_help="Take an invite back.", epilog=examples("admit revoke ./my-run 3fa9"))
def revoke(
    folder: Path = FOLDER,
    identifier: str = typer.Argument(
        ..., metavar="ID", help="Its id, or how it begins (see 'list'); or the word."
    ),
    as_json: bool = JSON,
) -> None:
    """Let nobody more in by an invite. Whoever came by it stays: see 'disallow'."""
    reply = command(folder, "revoke-invite", id=identifier)
    if as_json:
        emit_json(reply)
    elif reply["revoked"]:
        typer.echo(f"invite {reply['revoked'][0][:12]} lets nobody in any more")
    else:
        typer.echo("no invite in force begins so: nothing to take back")


@app.command(
    short_help="Put keys on the list.", epilog=examples("admit allow ./my-run 12D3KooW... --note anna")
)
def allow(folder: Path = FOLDER, nodes: list[str] = NODES, note: str = NOTE, as_json: bool = JSON) -> None:
    """Put keys on the list of those that may have work."""
    _say_list(_by_parts(folder, "allow", "allowed", nodes, note=note), "allowed", "put on the list", as_json)


@app.command(short_help="Take keys off the list.", epilog=examples("admit disallow ./my-run 12D3KooW..."))
def disallow(folder: Path = FOLDER, nodes: list[str] = NODES, as_json: bool = JSON) -> None:
    """Take keys off the list: they get no more work unless the run is open. What they have at hand counts."""
    reply = _by_parts(folder, "disallow", "disallowed", nodes)
    _say_list(reply, "disallowed", "taken off the list", as_json)


@app.command("list", short_help="Show who may join.", epilog=examples("admit list ./my-run --json"))
def show(folder: Path = FOLDER, as_json: bool = JSON) -> None:
    """Show the mode, the list, and the invites and bans in force."""
    reply = command(folder, "admitted")
    if as_json:
        emit_json(reply)
        return
    typer.echo(f"open to {MODES[reply['admission']]}")
    for item in reply["allowed"]:
        typer.echo(f"  {item['node']}  {item['name'] or '(never came)'}  {item['note']}".rstrip())
    for item in reply["invites"]:
        left = f"{item['left']} of {item['uses']} left"
        typer.echo(f"  invite {item['id'][:12]}  {left}, until {_moment(item['expires_at'])}  {item['note']}")
    for item in reply["banned"]:
        typer.echo(
            f"  banned {item['node']}  {item['name']}  until {_moment(item['until'])}  {item['reason']}"
        )
    if reply["admission"] != "open" and reply["not_on_the_list"]:
        typer.echo(
            f"{reply['not_on_the_list']} nodes that were here before are not on the list: no work for them"
        )


app.command(
    "ban",
    short_help="Give a node no work for a while.",
    epilog=examples("admit ban ./my-run anna --reason why"),
)(ban)
app.command("unban", short_help="End a node's ban.", epilog=examples("admit unban ./my-run anna"))(unban)


def _by_parts(folder: Path, name: str, key: str, nodes: list[str], **more: str) -> dict[str, Any]:
    """Many keys are sent as several commands; whoever is cut off between them sends all of them again."""
    done: list[str] = []
    for at in range(0, len(nodes), AT_ONCE):
        reply = command(folder, name, nodes=nodes[at : at + AT_ONCE], **more)
        done += reply[key]
    return {**reply, key: done}


def _say_list(reply: dict[str, Any], key: str, what: str, as_json: bool) -> None:
    if as_json:
        emit_json(reply)
        return
    for node in reply[key]:
        typer.echo(f"{node} {what}")
    if not reply[key]:
        typer.echo("nothing to change")
    if reply["admission"] == "open":
        typer.echo(
            "the run is open to everybody: the list counts where too many new keys came from one address, "
            "and in modes invite and allow ('admit mode')"
        )


def _moment(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_ms / 1000))

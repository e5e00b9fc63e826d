"""``barnraise key``: the volunteer's identity, which is also their name at the ledger (R8)."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from barnraise.protocol.identity import fingerprint, load_identity, load_or_create, save_identity
from barnraise.tui.console import emit_json, examples

app = typer.Typer(
    help="Show, export or import the key that names this node.",
    epilog=examples("key show", "key export --to backup.pem", "key import backup.pem"),
    no_args_is_help=True,
)

KEY_OPTION = typer.Option(
    None, "--key", metavar="FILE", help="Key file (default: ~/.config/barnraise/node.key)."
)


def key_path(given: Path | None) -> Path:
    """The key file asked for, or the node's default outside the program folder."""
    if given is not None:
        return given
    from barnraise.node.config import default_key_path

    return default_key_path()


@app.command(epilog=examples("key show", "key show --key node-1.key --json"))
def show(
    key: Path | None = KEY_OPTION,
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Print the key's peer id, fingerprint and place (never the secret)."""
    path = key_path(key)
    identity = load_identity(path)
    shown = {
        "peer_id": identity.peer_id,
        "public_key": identity.public_key.hex(),
        "fingerprint": fingerprint(identity.public_key),
        "file": str(path),
    }
    if as_json:
        emit_json(shown)
        return
    for name, value in shown.items():
        typer.echo(f"{name.replace('_', ' '):12} {value}")


@app.command(epilog=examples("key create"))
def create(key: Path | None = KEY_OPTION) -> None:
    """Make a key if there is none yet, and say where it lies."""
    path = key_path(key)
    identity, created = load_or_create(path)
    typer.echo(f"{'created' if created else 'exists already'}: {path} ({identity.peer_id})")


@app.command(
    epilog=examples("key export --to backup.pem") + "\n\nKeep it secret: whoever has it has your credit."
)
def export(
    key: Path | None = KEY_OPTION,
    to: Path | None = typer.Option(None, "--to", metavar="FILE", help="Write a 0600 file instead of stdout."),
) -> None:
    """Print the secret key as PEM, for a backup or another machine."""
    identity = load_identity(key_path(key))
    if to is not None:
        save_identity(identity, to)
        typer.echo(f"exported to {to} (mode 0600)", err=True)
        return
    sys.stdout.write(identity.to_pem().decode("ascii"))


@app.command("import", epilog=examples("key import backup.pem", "key import backup.pem --key node-2.key"))
def import_(
    source: Path = typer.Argument(..., metavar="FILE", help="A PEM file made by 'barnraise key export'."),
    key: Path | None = KEY_OPTION,
    replace: bool = typer.Option(
        False, "--replace", help="Overwrite an existing key (its credit stays its own)."
    ),
) -> None:
    """Install a key from a PEM file as this node's key."""
    if not source.is_file():
        raise typer.BadParameter(f"there is no file {source}", param_hint="FILE")
    identity = load_identity(source)
    path = key_path(key)
    if path.exists() and not replace:
        raise typer.BadParameter(f"{path} exists; export it first, then use --replace", param_hint="--key")
    save_identity(identity, path, overwrite=True)
    typer.echo(f"imported {identity.peer_id} to {path}")

"""An invite as a person gives it to ``join``: a word, or a file that has it.

Whoever has the word may join, and every user of a machine sees the arguments of its processes. So
what is started from here gets a file, which is its owner's alone: ``invite`` in the data folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import typer

from barnraise.protocol.errors import MalformedError, StorageError
from barnraise.protocol.invites import MAX_TEXT, PREFIX, read_invite


def invite_word(given: str) -> str:
    """An invite as it was typed, or from the file that has it.

    Raises:
        typer.BadParameter: it is neither.
    """
    text = given
    if _is_file(given):
        with Path(given).open(encoding="utf-8", errors="replace") as file:
            text = file.read(2 * MAX_TEXT)
    try:
        read_invite(text)
    except MalformedError as error:
        raise typer.BadParameter(str(error), param_hint="--invite") from error
    return "".join(text.split())


def invite_file(given: str, data: Path) -> Path:
    """The file for another process that is to have this invite: the one given, else ``keep_invite``'s."""
    return Path(os.path.abspath(given)) if _is_file(given) else data / "invite"


def keep_invite(given: str, data: Path) -> None:
    """Write a word into the file that ``invite_file`` names, mode 0600; one given as a file stays there.

    Raises:
        typer.BadParameter: it is no invite.
        StorageError: the disk refuses.
    """
    word = invite_word(given)
    if _is_file(given):
        return
    path = invite_file(given, data)
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)  # one that others can read would stay so
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{word}\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def _is_file(given: str) -> bool:
    return not given.startswith(PREFIX) and Path(given).is_file()

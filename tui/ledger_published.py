"""Where ``ledger verify`` finds what was published of a ledger: checkpoints, nodes' memories, RUN/log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer

from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.ledger_problems import Problem
from barnraise.protocol.ledger_public import Published, Read
from barnraise.protocol.log_messages import CHECKPOINT
from barnraise.protocol.notes import MAX_NOTE, Ed25519Key
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.tlog_checkpoint import log_key
from barnraise.tui.ledger_source import input_file

HINT = "--checkpoint"


def key_of(ledger: Path) -> Ed25519Key:
    """The key that must have signed the checkpoints of a ledger file's run.

    Raises:
        SignatureError, MalformedError: its run spec is not to be believed.
    """
    with open_ledger(ledger) as opened:
        return log_key(run_id_of(opened.run_spec), open_run_spec(opened.run_spec).operator)


def published_in(places: list[Path], key: Ed25519Key) -> list[Published]:
    """Checkpoints: files, or the data folders of nodes, each with the head that it saw last.

    Raises:
        typer.BadParameter: a place has none.
    """
    found = []
    for place in places:
        if not place.is_dir():
            found.append(Published(input_file(place, HINT, MAX_NOTE), str(place)))
            continue
        run = key.name.rpartition("/")[2]
        files = sorted((place / "runs" / run[:16] / "witness").glob("*.checkpoint"))
        if not files and (place / CHECKPOINT).is_file():
            files = [place / CHECKPOINT]
        if not files:
            raise typer.BadParameter(
                f"{place} holds no checkpoint of this run; name a file, or the --data folder of a node that "
                "has worked for it for some minutes",
                param_hint=HINT,
            )
        found += [Published(input_file(path, HINT, MAX_NOTE), str(path)) for path in files]
    return found


def files_of(source: Path) -> tuple[bytes | None, Read]:
    """A run folder's published checkpoint (None: none yet, or no run folder), and its other files."""

    def read(path: str) -> bytes | None:
        try:
            return (source / "log" / path).read_bytes()
        except OSError:
            return None

    note = read(CHECKPOINT) if source.is_dir() else None
    return (None if note is None else note[: MAX_NOTE + 1]), read


def look_at_mark(source: Path) -> Iterator[Problem]:
    """Whether a run folder's count of acknowledged events is whole."""
    if source.is_dir():
        from barnraise.coordinator.journal_mark import mark_trouble

        if trouble := mark_trouble(source / "state.sqlite"):
            yield Problem(None, "file-damaged", trouble)

"""Where a ledger comes from on the command line, who its nodes are, and words for moments."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer

from barnraise.protocol import moments
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError
from barnraise.protocol.ledger_file import LedgerFile, open_ledger
from barnraise.protocol.ledger_lines import peer_id
from barnraise.protocol.ledger_places import names_of
from barnraise.protocol.messages import TreeHead
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.wire import printable

SOURCE = typer.Argument(
    ..., metavar="DIR|FILE", help="A run folder, or a file made by 'barnraise ledger export' or 'fetch'."
)
SLOW_S = 2.0
LEAST_OF_AN_ID = 4


@contextmanager
def ledger_file(source: Path) -> Iterator[Path]:
    """The ledger as one file: the given one, or a fresh export of a run folder (running or not)."""
    if source.is_file():
        yield source
        return
    if not source.is_dir():
        raise typer.BadParameter(f"there is no {source}; name a run folder or a ledger file")
    from barnraise.coordinator.export import export_run

    with tempfile.TemporaryDirectory(prefix="barnraise-ledger-") as scratch:
        target = Path(scratch) / "ledger.bin"
        export_run(source, target)
        yield target


@contextmanager
def usable(hint: str = "DIR|FILE") -> Iterator[None]:
    """Whoever only reads a ledger needs one that can be read: damage is a wrong argument (exit 2)."""
    try:
        yield
    except (MalformedError, SignatureError) as error:
        raise typer.BadParameter(
            f"{error}; `barnraise ledger verify` says what is wrong with a ledger", param_hint=hint
        ) from error


def moment_of(ledger: LedgerFile) -> int | None:
    """When the newest tree head was signed, ms since the epoch; None where none is the operator's."""
    operator = open_run_spec(ledger.run_spec).operator
    for signed in reversed(ledger.heads):
        try:
            return open_signed(signed, TreeHead, operator).issued_at
        except (MalformedError, SignatureError):
            continue
    return None


def node_names(path: Path) -> dict[bytes, str]:
    """The last name of each node, safe for a terminal."""
    with open_ledger(path) as ledger:
        return {node: printable(name, 64) for node, name in names_of(ledger.entries).items()}


def find_node(names: Mapping[bytes, str], text: str) -> bytes:
    """The node that ``text`` means: a peer id, its beginning or end, or a name that only one has.

    Raises:
        typer.BadParameter: none, or several; some of them are named.
    """
    wanted = text.strip().removeprefix("..")
    found = [node for node in names if peer_id(node) == wanted]
    if not found and len(wanted) >= LEAST_OF_AN_ID:
        found = [node for node in names if peer_id(node).endswith(wanted)]
        found = found or [node for node in names if peer_id(node).startswith(wanted)]
    if len(found) != 1:
        called = [node for node, name in names.items() if name == text.strip()]
        found = called or found
    if len(found) == 1:
        return found[0]
    if not found:
        raise typer.BadParameter(
            f"no node here has this name, or a peer id that begins or ends so: {printable(text, 80)!r}"
        )
    some = ", ".join(f"{names[node]} {peer_id(node)}" for node in found[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise typer.BadParameter(f"several nodes are meant by {printable(text, 80)!r}: {some}{more}")


def read_moment(text: str, hint: str) -> int:
    """As ``moments.read_moment``, with what it raises in typer's words."""
    try:
        return moments.read_moment(text, time.time_ns() // 1_000_000)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None


def input_file(path: Path, hint: str, limit: int) -> bytes:
    """A file's bytes, or standard input's for ``-``; never more than ``limit`` and one.

    Raises:
        typer.BadParameter: there is no such file.
        BarnraiseError: it cannot be read.
    """
    if str(path) == "-":
        return sys.stdin.buffer.read(limit + 1)
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint=hint)
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise BarnraiseError(f"cannot read {path} ({error.strerror})") from error


class SlowProgress:
    """Lines on stderr about work that takes longer than two seconds, one every two seconds."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, subject: str, fraction: float) -> None:
        """``fraction`` of ``subject`` is done, 0 to 1."""
        now = time.monotonic()
        if now - self._told >= SLOW_S:
            self._told = now
            typer.echo(f"{subject} ({fraction:.0%})", err=True)

"""The first start of a node on a machine: its key is made and named, limits are proposed.

Enter accepts each proposal. What is chosen goes where ``barnraise limits set`` keeps it, so
that it holds at every later start. Proposals come from what is measured here and now: free
disk. How fast the line is, is not known before it was used: no cap is proposed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import typer

from barnraise.node.chosen import checked, load_chosen, save_chosen, with_changes
from barnraise.node.config import DEFAULT_DISK_BYTES, NodeConfig, default_key_path
from barnraise.node.needs import free_disk
from barnraise.protocol.identity import fingerprint, load_or_create
from barnraise.tui.amounts import parse_rate, parse_size
from barnraise.tui.console import size

LEAST_DISK = 10**9
SHARE_OF_FREE = 0.5

Ask = Callable[[str, str], str]  # question, proposal


def is_first(config: NodeConfig) -> bool:
    """Whether no node was ever set up with this key and folder."""
    return not (config.key.exists() or config.limits_path.exists() or config.known_path.exists())


def proposed_disk(free: int | None) -> int:
    """Bytes to propose: the usual most, but never more than half of what is free; at least 1 GB."""
    if free is None:
        return DEFAULT_DISK_BYTES
    return max(LEAST_DISK, min(DEFAULT_DISK_BYTES, int(free * SHARE_OF_FREE) // 10**9 * 10**9))


def guide(config: NodeConfig, say: Callable[[str], None], ask: Ask) -> None:
    """Make the key, name its place, ask for limits that the command line did not give, keep them.

    Raises:
        KeyFileError: the key cannot be written.
        StorageError: the folder cannot be used.
    """
    identity, created = load_or_create(config.key)
    say("This is the first start of a node here.")
    say(f"  key     {'made' if created else 'found'}: {config.key} ({fingerprint(identity.public_key)})")
    which = "" if config.key == default_key_path() else f" --key {shlex.quote(str(config.key))}"
    say(f"          it is your credit; 'barnraise key export --to FILE{which}' makes a copy")
    say(f"  data    {config.data}")
    config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    free = free_disk(config.data)
    chosen: dict[str, Any] = {}
    if not config.disk_bytes:
        if free is not None:
            say(f"  disk    {size(free)} free there")
        chosen["disk"] = _asked(ask, "Most disk to use", size(proposed_disk(free)), _disk)
    if config.up_bytes_s is None:
        say("  line    its speed is not known yet; 'barnraise limits set' changes limits later")
        chosen["up"] = _asked(ask, "Most to send, such as 1MB/s", "none", parse_rate)
    if config.down_bytes_s is None:
        chosen["down"] = _asked(ask, "Most to receive, such as 5MB/s", "none", parse_rate)
    if chosen:
        keep(config, chosen)


def keep(config: NodeConfig, chosen: dict[str, Any]) -> None:
    """Write the choices as ``barnraise limits set`` would."""
    before, meanwhile, _ = load_chosen(config.limits_path)
    save_chosen(config.limits_path, with_changes(before, checked(chosen)), meanwhile)


def ask_at_terminal(question: str, proposal: str) -> str:
    """One line from the person; Enter takes the proposal."""
    return str(typer.prompt(question, default=proposal))


def _disk(text: str) -> int:
    most = parse_size(text)
    if most is None or most < LEAST_DISK:
        raise ValueError(f"a node needs at least {size(LEAST_DISK)}")
    return most


def _asked(ask: Ask, question: str, proposal: str, parse: Callable[[str], int | None]) -> int | None:
    while True:
        try:
            return parse(ask(question, proposal))
        except ValueError as error:
            typer.echo(f"  {error}", err=True)

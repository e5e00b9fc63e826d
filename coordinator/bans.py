"""The operator's hand: bans that no rule made, and their end. In the ledger like any other."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from barnraise.coordinator.audit import is_banned
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import BanLifted, NodeBanned
from barnraise.coordinator.state import Node, State
from barnraise.protocol.errors import MalformedError, RefusedError
from barnraise.protocol.identity import fingerprint, peer_id_of, public_key_of
from barnraise.protocol.wire import printable

LONGEST_S = 3650 * 86_400
MOST_REASON = 300
_LEAST_DIGITS = 4


def find_node(state: State, text: str) -> Node:
    """The one node meant by a peer id (or its end), a key (hex, or its start) or a name.

    A whole peer id or key means its node, whatever others call themselves.

    Raises:
        RefusedError: ``unknown-node``, or ``ambiguous-node`` where several fit.
    """
    wanted = text.strip().removeprefix("..")
    digits = wanted.replace(" ", "").lower()
    whole = state.nodes.get(_whole_key(wanted))
    if whole is not None:
        return whole
    found = [
        node
        for node in state.nodes.values()
        if node.name == wanted
        or (
            len(digits) >= _LEAST_DIGITS
            and (
                node.key.hex().startswith(digits)
                or fingerprint(node.key).replace(" ", "") == digits
                or peer_id_of(node.key).endswith(wanted)
            )
        )
    ]
    shown = printable(text, 80)
    if not found:
        raise RefusedError("unknown-node", f"no node {shown}: give the peer id or name that 'status' shows")
    if len(found) > 1:
        some = ", ".join(peer_id_of(node.key) for node in found[:4])
        raise RefusedError(
            "ambiguous-node", f"{len(found)} nodes are meant by {shown}: {some}; give a peer id"
        )
    return found[0]


def _whole_key(text: str) -> bytes:
    with suppress(MalformedError):
        return public_key_of(text)
    with suppress(ValueError):
        return bytes.fromhex(text)
    return b""


async def ban(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``ban``: ``node`` (text), ``reason`` (text), ``seconds`` (from now; replaces a ban in force).

    Raises:
        RefusedError: an argument is missing or makes no sense, or there is no such node.
        StorageError: the disk refused.
    """
    name, reason, seconds = args.get("node"), args.get("reason"), args.get("seconds")
    if not isinstance(name, str) or not isinstance(reason, str) or not reason.strip():
        raise RefusedError("bad-argument", "ban needs a node and a reason: the node is told it")
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not 0 < seconds <= LONGEST_S:
        raise RefusedError("bad-argument", f"a ban lasts from 1 s to {LONGEST_S // 86_400} days")
    node, now = find_node(core.state, name), core.now_ms()
    text = printable(reason.strip(), MOST_REASON)
    event = NodeBanned(
        node=node.key,
        reason=f"by the operator: {text}",
        until=now + seconds * 1000,
        by_rule=False,
        at_ms=now,
    )
    await core.record([event])
    return {"node": peer_id_of(node.key), "name": node.name, "until": event.until}


async def unban(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``unban``: ``node``, ``reason`` (text). A ban of either kind ends now; where none is, nothing.

    Raises:
        RefusedError: no such node, or an argument makes no sense.
        StorageError: the disk refused.
    """
    name, reason = args.get("node"), args.get("reason", "")
    if not isinstance(name, str) or not isinstance(reason, str):
        raise RefusedError("bad-argument", "unban needs a node")
    node, now = find_node(core.state, name), core.now_ms()
    if is_banned(node, now):
        text = printable(reason.strip(), MOST_REASON) or "no reason given"
        await core.record([BanLifted(node=node.key, reason=f"by the operator: {text}", at_ms=now)])
    return {"node": peer_id_of(node.key), "name": node.name, "until": 0}

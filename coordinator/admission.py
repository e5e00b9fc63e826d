"""Who may join: everybody, whoever has an invite, or the keys on a list.

A key that is let in once is on the list from then on. A key that joined before the run
closed its doors and is not on the list may still come for its receipts; it gets no lease.
"""

from __future__ import annotations

import secrets
from typing import Any

from barnraise.coordinator.amending import amend
from barnraise.coordinator.audit import is_banned
from barnraise.coordinator.bans import find_node
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import Event
from barnraise.coordinator.operator_events import (
    InviteMade,
    InviteRevoked,
    InviteUsed,
    NodeAllowed,
    NodeDisallowed,
)
from barnraise.coordinator.operator_fold import ALLOWED_KEPT, INVITES_KEPT
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, MalformedError, RefusedError
from barnraise.protocol.identity import peer_id_of, public_key_of
from barnraise.protocol.invites import PREFIX, Invite, invite_text, read_invite
from barnraise.protocol.messages import Signed
from barnraise.protocol.wire import printable

MOST_USES = 65_536
LONGEST_S = 366 * 86_400
MOST_NOTE = 200
NOT_ADMITTED = "not-admitted"
KEY_BYTES = 32
MODES = {"open": "everybody", "invite": "the list, and whoever has an invite", "allow": "the list alone"}


def is_admitted(core: Core, key: bytes) -> bool:
    """Whether a key may have work."""
    return core.settings.admission == "open" or key in core.state.operations.allowed


def why_not(core: Core) -> str:
    """What somebody is told who may not join, with the cure."""
    if core.settings.admission == "invite":
        return (
            "this run takes only whom its operator invited: ask them for an invite, and join with "
            "`barnraise join ADDRESS --invite WORD`"
        )
    return (
        "this run takes only keys on its operator's list: send them your peer id (`barnraise key show`) "
        "and join again once it is on the list"
    )


def check_joins(core: Core, key: bytes) -> None:
    """Let a session begin.

    Raises:
        RefusedError: ``not-admitted``, with the cure.
    """
    if not is_admitted(core, key) and key not in core.state.nodes:
        raise RefusedError(NOT_ADMITTED, why_not(core))


async def take_invite(core: Core, key: bytes, signed: Signed, *, needed: bool = False) -> None:
    """Let ``key`` in by an invite; one that is in already needs none.

    ``needed``: in an open run, too, since too many new keys came from where it is.

    Raises:
        RefusedError: ``bad-invite``: not this run's, over, used up or revoked.
        StorageError: the disk refused.
    """
    if is_admitted(core, key) and not needed:
        return
    if core.settings.admission == "allow":
        raise RefusedError(NOT_ADMITTED, why_not(core))
    try:
        invite = open_signed(signed, Invite, core.spec.operator)
    except BarnraiseError:
        raise RefusedError("bad-invite", "the invite is not signed by this run's operator") from None
    known, now = core.state.operations.invites.get(invite.invite), core.now_ms()
    if invite.run_id != core.run_id:
        why = "it is for another run"
    elif key in core.state.operations.taken_off:
        why = "the operator took this key off the list"
    elif invite.expires_at < now:
        why = "its time is over"
    elif known is None:
        why = "it was revoked, or is used up"
    elif known.left < 1:
        why = f"it was good for {known.uses} and is used up"
    elif len(core.state.operations.allowed) >= ALLOWED_KEPT:
        why = f"{ALLOWED_KEPT} keys are on the list, which is all it holds"
    else:
        await core.record([InviteUsed(invite=invite.invite, node=key, at_ms=now)])
        return
    raise RefusedError("bad-invite", f"the invite lets nobody in: {why}; ask the operator for another")


async def make_invite(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``invite``: ``uses``, ``seconds`` (from now), ``note`` (for the operator's eyes).

    Raises:
        RefusedError: an argument is missing or makes no sense, or there are too many.
        StorageError: the disk refused.
    """
    uses, seconds, note = args.get("uses"), args.get("seconds"), _note(args)
    if not isinstance(uses, int) or isinstance(uses, bool) or not 1 <= uses <= MOST_USES:
        raise RefusedError("bad-argument", f"an invite is good for 1 to {MOST_USES} nodes")
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not 0 < seconds <= LONGEST_S:
        raise RefusedError("bad-argument", f"an invite lasts from 1 s to {LONGEST_S // 86_400} days")
    now, mine = core.now_ms(), core.state.operations.invites
    events: list[Event] = [
        InviteRevoked(invite=item.invite, at_ms=now)
        for item in mine.values()
        if item.left < 1 or item.expires_at < now
    ]
    if len(mine) - len(events) >= INVITES_KEPT:
        raise RefusedError("too-many", f"{INVITES_KEPT} invites are in force: revoke some")
    invite = Invite(
        run_id=core.run_id, invite=secrets.token_bytes(16), uses=uses, expires_at=now + seconds * 1000
    )
    made = InviteMade(invite=invite.invite, uses=uses, expires_at=invite.expires_at, note=note, at_ms=now)
    await core.record([*events, made])
    return {
        "invite": invite_text(core.sign(invite)),
        "id": invite.invite.hex(),
        "uses": uses,
        "expires_at": invite.expires_at,
        "note": note,
        "admission": core.settings.admission,
    }


async def revoke_invite(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``revoke-invite``: ``id``, or how it begins, or the invite itself; not in force is no error.

    Raises:
        RefusedError: no id, a damaged invite, or several begin so.
        StorageError: the disk refused.
    """
    begins = args.get("id")
    if not isinstance(begins, str) or not begins:
        raise RefusedError("bad-argument", "revoke which invite? `admit list` shows their ids")
    begins = begins.strip()
    if begins.startswith(PREFIX):
        try:
            begins = read_invite(begins)[0].invite.hex()
        except MalformedError as error:
            raise RefusedError("bad-argument", str(error)) from None
    found = [key for key in core.state.operations.invites if key.hex().startswith(begins.lower())]
    if len(found) > 1:
        raise RefusedError("ambiguous", f"{len(found)} invites begin with {printable(begins, 32)}")
    if found:
        await core.record([InviteRevoked(invite=found[0], at_ms=core.now_ms())])
    return {"revoked": [key.hex() for key in found]}


async def allow(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``allow``: ``nodes`` (peer ids or keys in hex; or names of known nodes), ``note``.

    Raises:
        RefusedError: a key that is none, or no room on the list.
        StorageError: the disk refused.
    """
    keys, note, now = _keys(core, args), _note(args), core.now_ms()
    new = [key for key in dict.fromkeys(keys) if key not in core.state.operations.allowed]
    if len(core.state.operations.allowed) + len(new) > ALLOWED_KEPT:
        raise RefusedError("too-many", f"the list holds {ALLOWED_KEPT} keys: take some off")
    await core.record([NodeAllowed(node=key, note=note, at_ms=now) for key in new])
    return {"allowed": [peer_id_of(key) for key in new], "admission": core.settings.admission}


async def disallow(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``disallow``: ``nodes``, as for ``allow``. Their leases are honoured, they get no more.

    No invite brings them back, only ``allow``.

    Raises:
        RefusedError: a key that is none.
        StorageError: the disk refused.
    """
    gone = [key for key in dict.fromkeys(_keys(core, args)) if key in core.state.operations.allowed]
    await core.record([NodeDisallowed(node=key, at_ms=core.now_ms()) for key in gone])
    return {"disallowed": [peer_id_of(key) for key in gone], "admission": core.settings.admission}


async def admitted(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``admitted``: the mode, the list, invites and bans in force. Takes no arguments."""
    if args:
        raise RefusedError("bad-argument", "admitted takes no arguments")
    state, now = core.state, core.now_ms()
    return {
        "admission": core.settings.admission,
        "allowed": [
            {
                "node": peer_id_of(key),
                "name": state.nodes[key].name if key in state.nodes else "",
                "joined": key in state.nodes,
                "note": note,
            }
            for key, note in state.operations.allowed.items()
        ],
        "invites": [
            {
                "id": item.invite.hex(),
                "left": item.left,
                "uses": item.uses,
                "expires_at": item.expires_at,
                "note": item.note,
            }
            for item in state.operations.invites.values()
            if item.expires_at >= now and item.left
        ],
        "banned": [
            {
                "node": peer_id_of(node.key),
                "name": node.name,
                "until": node.banned_until,
                "reason": node.ban_reason,
            }
            for node in state.nodes.values()
            if is_banned(node, now)
        ],
        "not_on_the_list": sum(1 for key in state.nodes if key not in state.operations.allowed),
    }


async def admit_known(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``allow-known``: put every key that has had work accepted on the list.

    Raises:
        RefusedError: the list has no room for them.
        StorageError: the disk refused.
    """
    if args:
        raise RefusedError("bad-argument", "allow-known takes no arguments")
    proven = [peer_id_of(node.key) for node in core.state.nodes.values() if node.accepted]
    return await allow(core, {"nodes": proven, "note": "had work accepted"}) if proven else {"allowed": []}


async def set_mode(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``admission``: ``mode`` (open, invite or allow), ``keep_proven``, ``reason``.

    A signed amendment. ``keep_proven`` first puts every key that has had work accepted on the list.

    Raises:
        RefusedError: no such mode, or no room on the list.
        StorageError: the disk refused.
    """
    mode, keep, reason = args.get("mode"), args.get("keep_proven", False), args.get("reason", "")
    whom = MODES.get(mode) if isinstance(mode, str) else None
    if whom is None or not isinstance(keep, bool) or not isinstance(reason, str):
        raise RefusedError("bad-argument", f"who may join? {', '.join(MODES)}")
    kept = (await admit_known(core, {}))["allowed"] if keep else []
    why = reason.strip() or f"open to {whom}"
    reply = await amend(core, {"changes": {"admission": f'"{mode}"'}, "reason": why})
    return {
        "admission": mode,
        "amendment": reply["number"],
        "changed": bool(reply["changed"]),
        "allowed": kept,
    }


def _note(args: dict[str, Any]) -> str:
    note = args.get("note", "")
    if not isinstance(note, str):
        raise RefusedError("bad-argument", "a note is a text")
    return printable(note.strip(), MOST_NOTE)


def _keys(core: Core, args: dict[str, Any]) -> list[bytes]:
    nodes = args.get("nodes")
    if not isinstance(nodes, list) or not nodes or not all(isinstance(item, str) for item in nodes):
        raise RefusedError("bad-argument", "which nodes? Give peer ids, as `barnraise key show` prints them")
    return [_key(core, item.strip()) for item in nodes]


def _key(core: Core, text: str) -> bytes:
    """A key by peer id or in hex, known or not; else whichever known node is meant."""
    try:
        return public_key_of(text)
    except MalformedError:
        pass
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    return key if len(key) == KEY_BYTES else find_node(core.state, text).key

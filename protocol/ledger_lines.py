"""Ledger entries as plain values for programs and as one line for people."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.ledger_entries import LedgerEntry
from barnraise.protocol.ledger_places import Place
from barnraise.protocol.ledger_standings import Standing
from barnraise.protocol.moments import minute, shown_moment
from barnraise.protocol.wire import printable

peer_id = lru_cache(maxsize=65_536)(peer_id_of)


def short_id(peer_id: str) -> str:
    """A peer id that fits a table: every Ed25519 key's begins alike, so the end tells them apart."""
    return f"..{peer_id[-8:]}"


def shown(index: int, entry: LedgerEntry) -> dict[str, Any]:
    """An entry as plain values: hashes in hex, nodes by peer id, time in ISO 8601; texts as they are."""
    fields = msgspec.structs.asdict(entry)
    plain: dict[str, Any] = {
        "index": index,
        "at": shown_moment(fields.pop("at_ms")),
        "entry": type(entry).__name__,
    }
    for name, value in fields.items():
        if name == "node":
            plain[name] = peer_id(value)
        else:
            plain[name] = value.hex() if isinstance(value, bytes) else value
    return plain


def placed_fields(place: Place, names: dict[str, str]) -> dict[str, Any]:
    """``shown``, with the node, unit and version that the entry's lease says, and the node's name."""
    fields = shown(place.index, place.entry)
    if place.node is not None:
        fields.setdefault("node", peer_id(place.node))
        fields.setdefault("name", names.get(fields["node"], ""))
    if place.unit is not None:
        fields.setdefault("unit_id", place.unit)
    if place.version is not None and "version" not in fields:
        fields.setdefault("policy_version", place.version)
    return fields


def standing_fields(node: Standing) -> dict[str, Any]:
    """A standing as plain values."""
    return {
        "node": peer_id(node.node),
        "name": node.name,
        "names": node.names,
        "joined": shown_moment(node.joined_ms),
        "last": shown_moment(node.last_ms),
        "credit": node.credit,
        "recent_per_day": round(node.recent, 3),
        "leased": node.leased,
        "closed": node.closed,
        "submitted": node.submitted,
        "accepted": node.accepted,
        "unaudited": node.unaudited,
        "rejected": node.rejected,
        "appeals": node.appeals,
        "overturned": node.overturned,
        "clawed_back": node.clawed_back,
        "banned_until": shown_moment(node.banned_until) if node.banned_until else None,
        "ban_reason": node.ban_reason,
    }


def line(fields: dict[str, Any], names: dict[str, str]) -> str:
    """An entry (see ``shown``) for a person: what happened, to whom; hashes by their first digits.

    ``names``: peer id -> the name it joined under. Safe for a terminal whatever the entry holds.
    """
    peer = fields.get("node", "")
    who = f"{printable(names.get(peer, '?'), 64)} {short_id(peer)}" if peer else ""
    what, text = told(fields)
    moment = fields["at"][:19].replace("T", " ")
    text = f"{who}{_JOINTS.get(fields['entry'], ', ')}{text}" if who and text else who or text
    return f"{fields['index']:>6}  {moment}  {what:11}  {text}"


_JOINTS = {"BanLifted": ": "}


def told(fields: dict[str, Any]) -> tuple[str, str]:
    """What happened in an entry (see ``shown``), and the rest of it, without whose it is."""
    lease = f"lease {fields.get('lease_id', '')[:8]}"
    kind = fields["entry"]
    if kind == "RunCreated":
        what, text = "run created", f"id {fields['run_id'][:16]}"
    elif kind == "NodeJoined":
        what, text = "joined", ""
    elif kind == "LeaseIssued":
        work = f"{fields['prompts']} x {fields['group_size']} at version {fields['policy_version']}"
        what, text = "lent", f"{lease}, {work}"
    elif kind == "BlockLeased":
        work = f"block {fields['block']} place {fields['slot']} at version {fields['policy_version']}"
        what, text = "lent", f"{lease}, {work}"
    elif kind == "LeaseClosed":
        what, text = fields["reason"], lease
    elif kind == "Submitted":
        what, text = "submitted", lease
    elif kind == "Judged" and fields["accepted"]:
        what, text = "accepted", f"{lease}, +{fields['credit']:,} Mflop"
    elif kind == "Judged":
        what, text = "REJECTED", f"{lease}, check {printable(fields['check'])}"
    elif kind == "Appealed":
        what, text = "appealed", lease
    elif kind == "Reviewed":
        outcome = f"overturned, +{fields['credit']:,} Mflop" if fields["accepted"] else "upheld"
        what, text = "reviewed", f"{lease}, {outcome}, check {printable(fields['check'])}"
    elif kind in ("ClawedBack", "Restored"):
        sign, what = ("-", "CLAWED BACK") if kind == "ClawedBack" else ("+", "restored")
        text = f"{lease}, {sign}{fields['credit']:,} Mflop, because of {fields['cause'][:12]}"
    elif kind == "NodeBanned":
        what = "BANNED"
        text = f"until {minute(fields['until'])}: {printable(fields['reason'], 500)}"
    elif kind == "BanLifted":
        what, text = "ban lifted", printable(fields["reason"], 500)
    elif kind == "AuditCommitted":
        what, text = "audit seed", f"{fields['epoch']} committed to: {fields['commitment'][:16]}"
    elif kind == "AuditRevealed":
        what, text = "audit seed", f"{fields['epoch']} published: {fields['seed'][:16]}"
    elif kind == "Amended":
        changes = ", ".join(
            f"{printable(key)} = {printable(value)}" for key, value in fields["changes"].items()
        )
        what, text = "AMENDED", f"number {fields['number']}: {changes}; {printable(fields['reason'], 500)}"
    elif kind == "RolledBack":
        what, text = "ROLLED BACK", f"to version {fields['to_version']}: {printable(fields['reason'], 500)}"
    else:
        what, text = "published", f"version {fields['version']}, manifest {fields['manifest'][:16]}"
    return what, text

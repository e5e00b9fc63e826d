"""Ledger entries as plain values for programs and as one line for people."""

from __future__ import annotations

from typing import Any

import msgspec

from barnraise.protocol.ledger import LedgerEntry
from barnraise.protocol.ledger_places import Place
from barnraise.protocol.wire import printable
from barnraise.tui.console import short_id
from barnraise.tui.ledger_source import minute, peer_id, shown_moment


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


def line(fields: dict[str, Any], names: dict[str, str]) -> str:
    """An entry (see ``shown``) for a person: what happened, to whom; hashes by their first digits.

    ``names``: peer id -> the name it joined under. Safe for a terminal whatever the entry holds.
    """
    peer = fields.get("node", "")
    who = f"{printable(names.get(peer, '?'), 64)} {short_id(peer)}" if peer else ""
    lease = f"lease {fields.get('lease_id', '')[:8]}"
    kind = fields["entry"]
    if kind == "RunCreated":
        what, text = "run created", f"id {fields['run_id'][:16]}"
    elif kind == "NodeJoined":
        what, text = "joined", who
    elif kind == "LeaseIssued":
        work = f"{fields['prompts']} x {fields['group_size']} at version {fields['policy_version']}"
        what, text = "lent", f"{who}, {lease}, {work}"
    elif kind == "BlockLeased":
        work = f"block {fields['block']} place {fields['slot']} at version {fields['policy_version']}"
        what, text = "lent", f"{who}, {lease}, {work}"
    elif kind == "LeaseClosed":
        what, text = fields["reason"], f"{who}, {lease}" if who else lease
    elif kind == "Submitted":
        what, text = "submitted", f"{who}, {lease}"
    elif kind == "Judged" and fields["accepted"]:
        what, text = "accepted", f"{who}, {lease}, +{fields['credit']:,} Mflop"
    elif kind == "Judged":
        what, text = "REJECTED", f"{who}, {lease}, check {printable(fields['check'])}"
    elif kind == "Appealed":
        what, text = "appealed", f"{who}, {lease}"
    elif kind == "Reviewed":
        outcome = f"overturned, +{fields['credit']:,} Mflop" if fields["accepted"] else "upheld"
        what, text = "reviewed", f"{who}, {lease}, {outcome}, check {printable(fields['check'])}"
    elif kind in ("ClawedBack", "Restored"):
        sign, what = ("-", "CLAWED BACK") if kind == "ClawedBack" else ("+", "restored")
        text = f"{who}, {lease}, {sign}{fields['credit']:,} Mflop, because of {fields['cause'][:12]}"
    elif kind == "NodeBanned":
        what = "BANNED"
        text = f"{who}, until {minute(fields['until'])}: {printable(fields['reason'], 500)}"
    elif kind == "BanLifted":
        what, text = "ban lifted", f"{who}: {printable(fields['reason'], 500)}"
    elif kind == "AuditCommitted":
        what, text = "audit seed", f"{fields['epoch']} committed to: {fields['commitment'][:16]}"
    elif kind == "AuditRevealed":
        what, text = "audit seed", f"{fields['epoch']} published: {fields['seed'][:16]}"
    else:
        what, text = "published", f"version {fields['version']}, manifest {fields['manifest'][:16]}"
    moment = fields["at"][:19].replace("T", " ")
    return f"{fields['index']:>6}  {moment}  {what:11}  {text}"

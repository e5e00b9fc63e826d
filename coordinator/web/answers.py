"""Questions to the run's history, from a request's query to plain values: for HTML and JSON alike.

All of it runs in worker threads, bounded in rows and in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.exceptions import HTTPException

from barnraise.coordinator.web.index_read import Page, Row
from barnraise.coordinator.web.site import Site
from barnraise.protocol import wire
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.ledger_entries import Judged, LedgerEntry, Reviewed, Submitted, decode_entry
from barnraise.protocol.ledger_lines import peer_id, placed_fields, standing_fields, told
from barnraise.protocol.ledger_places import Filter, Place, kinds_named
from barnraise.protocol.ledger_standings import Standing
from barnraise.protocol.messages import Receipt
from barnraise.protocol.moments import read_moment
from barnraise.protocol.standing import UNAUDITED
from barnraise.protocol.wire import printable

MAX_PAGE: Final = 500
MAX_VALUES: Final = 8  # of one filter
MAX_TEXT: Final = 200  # characters of a value
MAX_NUMBER: Final = 2**53
HEX: Final = frozenset("0123456789abcdef")
LEAST_OF_AN_ID: Final = 4

Query = Mapping[str, Sequence[str]]
"""A query's values by name, empty ones left out."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which entries were asked for. ``query``: the same, as it was written, for links."""

    wanted: Filter
    query: dict[str, list[str]]
    before: int | None
    after: int | None
    limit: int


def refuse(text: str) -> HTTPException:
    """400: what was asked cannot be understood."""
    return HTTPException(400, text)


def whole(query: Query, name: str, most: int = MAX_NUMBER) -> int | None:
    """A number of a query, 0 to ``most``; None where it is not there.

    Raises:
        HTTPException: 400, it is none.
    """
    values = query.get(name, ())
    if not values:
        return None
    text = values[-1].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= most):
        raise refuse(f"{name} is a whole number from 0 to {most}")
    return int(text)


def asked_for(site: Site, query: Query, now_ms: int, limit: int) -> Asked:
    """Read a ledger query. The filters are those of ``barnraise ledger show``.

    Raises:
        HTTPException: 400 with what is wrong; 404 where a node is meant that is not there.
    """
    for name, values in query.items():
        if len(values) > MAX_VALUES or any(len(value) > MAX_TEXT for value in values):
            raise refuse(f"{name[:32]}: at most {MAX_VALUES} values of {MAX_TEXT} characters")
    kinds: frozenset[str] = frozenset()
    nodes: frozenset[bytes] | None = None
    try:
        for text in query.get("kind", ()):
            kinds |= kinds_named(text)
        moments = {
            name: read_moment(values[-1], now_ms) if (values := query.get(name, ())) else None
            for name in ("since", "until")
        }
    except ValueError as error:
        raise refuse(str(error)) from error
    if query.get("node"):
        nodes = frozenset(one_node(site, text, now_ms).node for text in query["node"])
    names = ("node", "kind", "unit", "version", "since", "until")
    return Asked(
        wanted=Filter(
            nodes=nodes,
            kinds=kinds or None,
            unit=whole(query, "unit"),
            version=whole(query, "version"),
            since=moments["since"],
            until=moments["until"],
        ),
        query={name: list(query[name]) for name in names if query.get(name)},
        before=whole(query, "before"),
        after=whole(query, "after"),
        limit=max(1, min(MAX_PAGE, whole(query, "limit") or limit)),
    )


def one_node(site: Site, text: str, now_ms: int) -> Standing:
    """The node that is meant: a peer id, its beginning or end, or a name that only one has.

    Raises:
        HTTPException: 404, none or several.
    """
    found = site.reader.find_nodes(text[:MAX_TEXT], now_ms)
    if not found:
        raise HTTPException(404, f"no node has this name, or a peer id that begins or ends so: {text[:80]!r}")
    if len(found) > 1:
        some = ", ".join(f"{printable(node.name, 64)} ({peer_id(node.node)})" for node in found[:5])
        raise HTTPException(404, f"several nodes are meant by {text[:80]!r}, among them {some}")
    return found[0]


def ledger_page(site: Site, asked: Asked) -> tuple[Page, list[dict[str, Any]]]:
    """The entries that were asked for, newest first."""
    page = site.reader.search(asked.wanted, asked.limit, before=asked.before, after=asked.after)
    return page, [fields for _, fields in entries_at(site, page.rows)]


def entries_at(site: Site, rows: Sequence[Row]) -> list[tuple[LedgerEntry, dict[str, Any]]]:
    """Those of the rows whose entry is to be had, with its plain values (see ``placed_fields``)."""
    found = site.index.entries.get(row.index for row in rows)
    read = []
    for row in rows:
        data = found.get(row.index)
        if data is None:
            continue
        entry = decode_entry(data)
        names = {peer_id(row.node): row.name} if row.node is not None else {}
        fields = placed_fields(Place(row.index, entry, row.node, row.unit, row.version), names)
        fields["what"], fields["text"] = told(fields)
        read.append((entry, fields))
    return read


def unit_story(site: Site, text: str) -> dict[str, Any]:
    """A unit's whole story, by its number or the beginning of a lease's or submission's id.

    Raises:
        HTTPException: 404, none or several; 400, it is no such thing.
    """
    number = _unit_meant(site, text.strip().lower())
    read = entries_at(site, site.reader.unit(number))
    if not read:
        raise HTTPException(404, f"no unit {number} was lent yet")
    submissions = [entry.submission_id for entry, _ in read if isinstance(entry, Submitted)]
    used = site.reader.used_in(submissions)
    for entry, fields in read:
        if isinstance(entry, Judged | Reviewed):
            fields["audited"] = entry.check != UNAUDITED
            fields["verdict"] = _verdict(site, fields["index"], entry)
    uses = []
    for submission in submissions:
        version = used.get(submission)
        uses.append(
            {
                "submission_id": submission.hex(),
                "used_in_version": version if version is not None and version >= 0 else None,
                "skipped": version == -1,
            }
        )
    return {"unit": number, "entries": [fields for _, fields in read], "uses": uses}


def _unit_meant(site: Site, text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= 15
    if is_number and site.reader.unit(int(text)):
        return int(text)
    if not (LEAST_OF_AN_ID <= len(text) <= 64 and HEX.issuperset(text)):
        if is_number:
            raise HTTPException(404, f"no unit {text} was lent yet")
        raise refuse(
            f"a unit is a number, or {LEAST_OF_AN_ID} or more hex digits of a lease's or submission's id"
        )
    meant = site.reader.units_named(text)
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise HTTPException(404, f"several units are meant: {', '.join(map(str, meant))}")
    raise HTTPException(404, f"this ledger has no unit, lease or submission {text}")


def _verdict(site: Site, index: int, entry: Judged | Reviewed) -> dict[str, Any] | None:
    """The numbers, from the signed receipt; the public log has their hash alone."""
    for signed in site.core.journal.receipts(entry.node, index, 1):
        try:
            receipt = wire.decode(signed.payload, Receipt)
        except MalformedError:
            return None
        if receipt.ledger_index == index:
            verdict = receipt.verdict
            return {
                "threshold": verdict.threshold,
                "value": verdict.value,
                "position": printable(verdict.position, 200),
                "message": printable(verdict.message, 500),
            }
    return None


def ranking(site: Site, by: str, page: int, size: int, now_ms: int) -> dict[str, Any]:
    """A page of the leaderboard, from 1."""
    if by not in ("credit", "recent"):
        raise refuse("nodes are ranked by credit or by recent")
    total, found = site.reader.nodes(by, (page - 1) * size, size, now_ms)
    return {
        "by": by,
        "page": page,
        "pages": max(1, -(-total // size)),
        "total": total,
        "nodes": [
            {"rank": (page - 1) * size + place, **node_fields(site, node, now_ms)}
            for place, node in enumerate(found, 1)
        ],
    }


def node_fields(site: Site, node: Standing, now_ms: int) -> dict[str, Any]:
    """A node's standing and what it does now. Its name is safe to show."""
    fields = standing_fields(node)
    fields["name"] = printable(node.name, 64)
    fields["names"] = [printable(name, 64) for name in node.names]
    fields["banned"] = node.banned_until > now_ms
    fields["ban_reason"] = printable(node.ban_reason, 500)
    return {**fields, **site.live(node.node)}


def node_story(site: Site, text: str, now_ms: int, last: int) -> dict[str, Any]:
    """One node: standing, place, and its newest entries."""
    node = one_node(site, text, now_ms)
    rank, total = site.reader.rank(node)
    page = site.reader.search(Filter(nodes=frozenset({node.node})), last)
    return {
        "rank": rank,
        "total": total,
        **node_fields(site, node, now_ms),
        "entries": [fields for _, fields in entries_at(site, page.rows)],
    }


def distinct(query: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """A request's query by name, without empty values: a form sends those of every field."""
    found: dict[str, list[str]] = {}
    for name, value in query:
        if value.strip():
            found.setdefault(name, []).append(value)
    return found

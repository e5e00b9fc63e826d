"""The OpenAPI 3.1 description of ``/api/v1``."""

from __future__ import annotations

from typing import Any

from barnraise.coordinator.web.admin_words import ACTS, LOOKS, schemas
from barnraise.protocol.ledger_places import KINDS


def description() -> dict[str, Any]:
    """The document at ``/api/v1/openapi.json``."""
    admin, components = _admin()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Barnraise coordinator",
            "version": "1",
            "description": "Read-only and public, but for /admin, which wants the token of "
            "`barnraise coordinator token RUN` and answers no browser. Credit is in Mflop (millions of "
            "useful floating-point operations), moments are ISO 8601 in UTC, hashes are hex. Nothing here "
            "has to be believed: /log has the ledger as a signed transparency log.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/api/v1"}],
        "paths": {
            "/run": _path("run", "The run at a glance", [], _RUN),
            "/nodes": _path("nodes", "Nodes by credit", [_BY, _PAGE, _LIMIT], _NODES),
            "/nodes/{node}": _path("node", "One node with its newest entries", [_NODE, _LIMIT], _NODE_STORY),
            "/units/{unit}": _path("unit", "One unit's whole story", [_UNIT], _UNIT_STORY),
            "/ledger": _path("ledger", "Ledger entries, newest first, filtered", _FILTERS, _LEDGER),
            "/versions": _path("versions", "Published versions, newest first", [_PAGE, _LIMIT], _VERSIONS),
            **admin,
        },
        "components": {
            "schemas": {"Entry": _ENTRY, "Node": _STANDING, "Error": _ERROR, **components},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _admin() -> tuple[dict[str, Any], dict[str, Any]]:
    """The paths below ``/admin`` and their schemas, made of what requests are checked by."""
    kinds, components = schemas()
    refused = kinds.pop()
    refusals = {
        code: {"description": why, "content": {"application/json": {"schema": refused}}}
        for code, why in _ADMIN_REFUSALS.items()
    }

    def operation(name: str, text: str, reply: dict[str, Any]) -> dict[str, Any]:
        done = {"description": text, "content": {"application/json": {"schema": reply}}}
        return {
            "operationId": name,
            "summary": text,
            "security": [{"token": []}],
            "responses": {"200": done, **refusals},
        }

    paths: dict[str, Any] = {}
    for act, body, reply in zip(ACTS, kinds[::2], kinds[1::2], strict=False):
        post = operation(f"admin-{act.command}", act.text, reply)
        post["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        paths[f"/admin/{act.path}"] = {"post": post}
    for (path, (_, text)), reply in zip(LOOKS.items(), kinds[2 * len(ACTS) :], strict=True):
        paths[f"/admin/{path}"] = {"get": operation(f"admin-{path}", text, reply)}
    return paths, components


def _object(required: dict[str, Any], more: bool = True) -> dict[str, Any]:
    return {
        "type": "object",
        "required": sorted(required),
        "properties": required,
        "additionalProperties": more,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _maybe(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


def _query(name: str, text: str, schema: dict[str, Any], many: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "in": "query", "description": text, "schema": schema}
    if many:
        found |= {"schema": {**_list(schema), "maxItems": 8}, "explode": True}
    return found


def _in_path(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": text, "schema": _TEXT}


def _path(name: str, text: str, parameters: list[Any], schema: dict[str, Any]) -> dict[str, Any]:
    refusals = {
        code: {"description": why, "content": {"application/json": {"schema": _ref("Error")}}}
        for code, why in (
            ("400", "the query cannot be understood"),
            ("404", "there is no such thing, or several are meant"),
            ("503", "too many requests at once"),
        )
    }
    found = {"description": text, "content": {"application/json": {"schema": schema}}}
    return {
        "get": {
            "operationId": name,
            "summary": text,
            "parameters": parameters,
            "responses": {"200": found, **refusals},
        }
    }


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_ADMIN_REFUSALS = {
    "400": "the body is not of its schema, or a value makes no sense",
    "401": "no token, or not the right one",
    "403": "not asked from where [serve] admin says, or by a browser",
    "404": "there is no admin API here, or no such node",
    "408": "the body came too slowly",
    "409": "not now; the text says why, and code is for programs",
    "413": "the body is longer than 64 KiB",
    "415": "the body is not application/json",
    "429": "too many wrong tokens from this address: Retry-After says how long none is looked at",
    "503": "the disk refused, or too much is under way",
}
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_YES_NO = {"type": "boolean"}
_MOMENT = {"type": "string", "examples": ["2026-01-31T18:00:00+00:00"]}
_CURVE = _list({"type": "array", "prefixItems": [{"type": "integer"}, _NUMBER]})
_ERROR = _object({"error": _TEXT})
_ENTRY = _object(
    {"index": _COUNT, "at": _MOMENT, "entry": {"enum": list(KINDS)}, "what": _TEXT, "text": _TEXT}
)
_STANDING = _object(
    {
        **dict.fromkeys(("node", "name", "state"), _TEXT),
        **dict.fromkeys(("joined", "last"), _MOMENT),
        **dict.fromkeys(("leased", "closed", "submitted", "accepted", "unaudited", "rejected"), _COUNT),
        "credit": {"type": "integer", "description": "balance, Mflop"},
        "recent_per_day": {"type": "number", "description": "recent average, Mflop a day, half-life 7 days"},
        "banned": _YES_NO,
        "have_version": _maybe("integer"),
    }
)
_RUN = _object(
    {
        **dict.fromkeys(("name", "run_id", "model", "phase", "stage", "state", "waiting_for"), _TEXT),
        "version": {"type": "integer", "minimum": -1},
        "target_version": _COUNT,
        "complete": _YES_NO,
        "reward": _maybe("number"),
        "held_out": _maybe("number"),
        "curves": _object({"reward": _CURVE, "held_out": _CURVE}),
        "nodes": _object({"known": _COUNT, "live": _COUNT}),
        "newcomers": {
            **_maybe("object"),
            "description": "keys never seen before: per_day from one address (0: no limit), let_in and "
            "attempts refused since the start, turned_away_1h",
        },
        "work": _object(dict.fromkeys(("accepted", "rejected", "queue", "leases_open"), _COUNT)),
        "rates": _object(
            dict.fromkeys(("seconds", "accepted_per_min", "tokens_per_s", "mflop_per_s"), _NUMBER)
        ),
        "broadcast": _object(dict.fromkeys(("holding", "live", "bytes_in", "bytes_out"), _COUNT)),
        "ledger": _object(dict.fromkeys(("size", "published", "indexed"), _COUNT)),
        "paused": _YES_NO,
        "pause": {**_maybe("object"), "description": "while paused: by (operator, guard), reason, since"},
        "admission": {"enum": ["open", "invite", "allow"]},
        "guards": _list(_TEXT),
        "training": {**_maybe("object"), "description": "the newest trained version's numbers"},
        "alarms": _list(
            _object({**dict.fromkeys(("part", "what", "cure", "guard"), _TEXT), "since": _maybe("string")})
        ),
    }
)
_NODES = _object({"page": _COUNT, "pages": _COUNT, "total": _COUNT, "nodes": _list(_ref("Node"))})
_NODE_STORY = {
    "allOf": [_ref("Node"), _object({"rank": _COUNT, "total": _COUNT, "entries": _list(_ref("Entry"))})]
}
_UNIT_STORY = _object(
    {
        "unit": _COUNT,
        "entries": _list(_ref("Entry")),
        "uses": _list(
            _object({"submission_id": _TEXT, "used_in_version": _maybe("integer"), "skipped": _YES_NO})
        ),
    }
)
_LEDGER = _object(
    {
        "entries": _list(_ref("Entry")),
        "searched": _object({"from": _COUNT, "to": _COUNT}),
        "before": {
            **_maybe("integer"),
            "description": "ask with this for older entries; null: there are none",
        },
        "after": {**_maybe("integer"), "description": "ask with this for newer entries"},
    }
)
_VERSIONS = _object(
    {
        "page": _COUNT,
        "pages": _COUNT,
        "total": _COUNT,
        "versions": _list(
            _object({"version": _COUNT, "at": _MOMENT, "size": _COUNT, "held_out": _maybe("number")})
        ),
    }
)
_NODE = _in_path(
    "node", "A peer id, its beginning or end (4 characters or more), or a name that only one has."
)
_UNIT = _in_path(
    "unit", "A unit's number, or the beginning of the id of one of its leases or submissions (hex)."
)
_BY = _query(
    "by", "Order by balance or by recent average.", {"enum": ["credit", "recent"], "default": "credit"}
)
_PAGE = _query("page", "From 1.", {"type": "integer", "minimum": 1, "default": 1})
_LIMIT = _query("limit", "Rows.", {"type": "integer", "minimum": 1, "maximum": 500, "default": 100})
_FILTERS = [
    _query("node", "Only these nodes': as in /nodes/{node}.", _TEXT, many=True),
    _query("kind", "Only such entries: a kind's name or its beginning.", _TEXT, many=True),
    _query("unit", "Only this unit's.", _COUNT),
    _query("version", "Only what is of this policy version.", _COUNT),
    _query("since", "From then on: 2026-01-31, 2026-01-31T18:00 (UTC), or 2d ago.", _TEXT),
    _query("until", "Before then.", _TEXT),
    _query("before", "Only entries below this number: the next page.", _COUNT),
    _query("after", "The first entries from this number on: the page before.", _COUNT),
    _LIMIT,
]

"""The event log as a Chrome trace, in virtual time: open it at ui.perfetto.dev or chrome://tracing.

Format: "Trace Event Format" (Google, 2016), JSON array of events; timestamps in microseconds.
One row per node with its sessions and units, one for the coordinator with its versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from barnraise.protocol.errors import StorageError
from barnraise.simulation.event_log import Event

_INSTANTS = frozenset(
    {
        "freeze",
        "thaw",
        "skew",
        "disk-full",
        "disk-free",
        "banned",
        "died",
        "coordinator-crash",
        "coordinator-return",
    }
    | {"partition", "heal", "network-down", "network-up", "published", "trained", "batch"}
)


def trace(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Trace events, in the order of ``events``. What is open at the end is left open."""
    rows: dict[str, int] = {}
    units: dict[str, str] = {}
    verdicts = 0
    yield {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "swarm"}}
    for event in events:
        what, who = event["what"], event.get("node", "coordinator")
        if who not in rows:
            rows[who] = len(rows)
            yield {"ph": "M", "pid": 1, "tid": rows[who], "name": "thread_name", "args": {"name": who}}
        at = {"pid": 1, "tid": rows[who], "ts": round(event["t"] * 1e6)}
        if what == "join":
            yield {"ph": "B", "name": "session", **at}
        elif what in ("end", "crash"):
            if units.pop(who, None) is not None:
                yield {"ph": "E", **at}
            yield {"ph": "E", **at, "args": {"how": what}}
        elif what == "begin":
            units[who] = event["lease"]
            yield {"ph": "B", "name": f"unit at v{event['version']}", **at, "args": {"lease": event["lease"]}}
        elif what in ("made", "stopped") and units.get(who) == event["lease"]:
            del units[who]
            yield {"ph": "E", **at, "args": {"how": what}}
        elif what == "judged":
            verdicts += event["accepted"]
            yield {"ph": "C", "name": "accepted", "pid": 1, "ts": at["ts"], "args": {"units": verdicts}}
        elif what in _INSTANTS:
            known = {name: value for name, value in event.items() if name not in ("t", "what", "node")}
            yield {"ph": "i", "s": "t", "name": what, **at, "args": known}


def write_trace(events: Iterable[Event], target: Path) -> None:
    """Write ``trace(events)`` to ``target``.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        with target.open("w") as file:
            for number, item in enumerate(trace(events)):
                file.write(("[\n" if number == 0 else ",\n") + json.dumps(item, separators=(",", ":")))
            file.write("\n]\n")
    except OSError as error:
        raise StorageError(f"cannot write the trace {target}: {error.strerror or error}") from error

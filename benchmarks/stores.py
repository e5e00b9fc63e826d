"""What a durable commit costs in each store, side by side in one run.

    python -m benchmarks.stores [--json] [--postgres URL] [--commits 20]

A write is what a judged unit comes to: three events, a payload and a receipt of 1.7 kB. ``one``: a commit of
one write, as when nobody else waits; ``group``: of 256, as under load. Medians; the stores take turns, so
that the machine's other work falls on all alike. Without ``--postgres`` SQLite alone is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from barnraise.coordinator.events import NodeJoined
from barnraise.coordinator.journal import Journal, Payload, StoredReceipt, Write
from barnraise.coordinator.journal_place import journal_path, place_for, write_place
from barnraise.protocol.messages import Signed

GROUP = 256
SIGNED = Signed(payload=bytes(1700), signer=b"s" * 32, signature=b"t" * 64)


def writes(first: int, count: int) -> list[Write]:
    """So many writes, with ledger indices from ``first`` on."""
    event = NodeJoined(node=b"n" * 32, name="n" * 100, at_ms=1)
    return [
        Write(
            events=[event] * 3,
            payloads=[Payload(os.urandom(32), 0, SIGNED)],
            receipts=[StoredReceipt(first + number, b"n" * 32, SIGNED)],
        )
        for number in range(count)
    ]


def measure(postgres: str, commits: int) -> dict[str, Any]:
    """Milliseconds a commit and writes a second, by store."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="barnraise-stores-") as scratch:
        journals = {}
        for name in ["sqlite", *(["postgres"] if postgres else [])]:
            folder = Path(scratch, name)
            folder.mkdir()
            if name == "postgres":
                write_place(folder, place_for(postgres, os.urandom(32)))
            journals[name] = Journal(journal_path(folder))
        first = 0
        for what, count in (("one", 1), ("group", GROUP)):
            seconds: dict[str, list[float]] = {name: [] for name in journals}
            for _ in range(commits * (1 if count > 1 else 5)):
                for name, journal in journals.items():
                    group = writes(first, count)
                    started = time.perf_counter()
                    journal.commit(group)
                    seconds[name].append(time.perf_counter() - started)
                first += count
            for name, took in seconds.items():
                found[f"{name}_{what}_ms"] = round(statistics.median(took) * 1000, 2)
                found[f"{name}_{what}_per_s"] = round(count / statistics.median(took))
        for journal in journals.values():
            journal.close()
    if postgres:
        found["postgres_vs_sqlite"] = round(found["postgres_group_per_s"] / found["sqlite_group_per_s"], 3)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--postgres", metavar="URL", default="", help="postgresql://USER@HOST/DATABASE")
    parser.add_argument("--commits", type=int, default=20, metavar="N", help="groups of each kind")
    given = parser.parse_args()
    results = measure(given.postgres, given.commits)
    results["load"] = round(os.getloadavg()[0], 1)
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    if given.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:28}{value}")


if __name__ == "__main__":
    main()

"""A ledger of any length is exported in little memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from coordinator_support import make_run, opened

from barnraise.coordinator import ledger_log
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.protocol.errors import StorageError
from barnraise.protocol.ledger import LedgerEntry, NodeJoined, RunCreated
from barnraise.protocol.ledger_file import verify_ledger_file

ENTRIES = 6_000


def test_an_export_holds_no_entries_in_memory_and_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "ledger.bin"
    with opened(make_run(tmp_path)) as run, closing(Journal(run.journal_path)) as journal:

        def story(events: Iterable[Any], max_lag: int) -> Iterator[LedgerEntry]:
            yield RunCreated(at_ms=1, run_id=run.run_id)
            for number in range(1, ENTRIES):
                yield NodeJoined(at_ms=number, node=number.to_bytes(32, "big"), name="n" * 64)

        monkeypatch.setattr(ledger_log, "entries_of", story)
        monkeypatch.setattr(ledger_log, "_FORGET_EVERY", 512)
        tracemalloc.start()
        try:
            export_ledger(journal, run.signed_spec, 1, run.identity, ENTRIES, target)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        with pytest.raises(StorageError, match="cannot write the ledger"):
            export_ledger(journal, run.signed_spec, 1, run.identity, 1, tmp_path / "missing/ledger.bin")
    report = verify_ledger_file(target)
    assert report.ok, report.problems
    assert report.size == ENTRIES
    assert target.stat().st_size > 6 * peak
    assert [path.name for path in tmp_path.iterdir() if "ledger" in path.name] == ["ledger.bin"]

"""Ledger entries as a table: CSV on stdout, or a Parquet file where pyarrow is installed."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.protocol.wire import printable

NUMBERS = (
    "index",
    "unit_id",
    "policy_version",
    "version",
    "block",
    "slot",
    "prompts",
    "group_size",
    "credit",
)
COLUMNS = (
    *("index", "at", "entry", "node", "name", "unit_id", "policy_version", "lease_id", "submission_id"),
    *("accepted", "check", "credit", "cause", "reason", "version", "block", "slot", "prompts", "group_size"),
    *("epoch", "until", "run_id", "manifest", "commitment", "seed", "evidence"),
)
_INTEGERS = {
    *("index", "unit_id", "policy_version", "version", "block", "slot", "prompts", "group_size", "credit"),
    *("epoch", "until"),
}
_BATCH = 10_000


def write_csv(rows: Iterable[dict[str, Any]]) -> None:
    """Rows of ``COLUMNS`` on stdout, RFC 4180 with line feeds. No cell can be taken for a formula."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in COLUMNS])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    clean = printable(value, 500)
    return f"'{clean}" if clean[:1] in ("=", "+", "-", "@") else clean


def write_parquet(rows: Iterable[dict[str, Any]], target: Path) -> int:
    """Rows of ``COLUMNS`` as a Parquet file; returns how many.

    Raises:
        BarnraiseError: pyarrow is not installed.
        StorageError: the disk refused.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BarnraiseError(
            "Parquet needs pyarrow, which is not installed: pip install 'barnraise[parquet]', or use --csv"
        ) from None
    kinds = {name: pyarrow.int64() if name in _INTEGERS else pyarrow.string() for name in COLUMNS}
    kinds["accepted"] = pyarrow.bool_()
    schema = pyarrow.schema(list(kinds.items()))
    count = 0
    partial = target.with_name(f".{target.name}.partial")
    try:
        try:
            with pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
                for batch in _batches(rows):
                    plain = [
                        {name: printable(v, 500) if isinstance(v, str) else v for name, v in row.items()}
                        for row in batch
                    ]
                    writer.write_table(pyarrow.Table.from_pylist(plain, schema))
                    count += len(batch)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {target} ({error.strerror or error})") from error
    return count


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    source = iter(rows)
    while batch := list(islice(source, _BATCH)):
        yield batch

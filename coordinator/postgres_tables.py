"""A run's tables in PostgreSQL, and how rows get into them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA
from sqlalchemy.dialects.postgresql import insert as pg_insert

from barnraise.coordinator.journal_store import COLUMNS

_BYTES = frozenset(("data", "submission", "signer", "signature", "node"))


class Tables:
    """The tables of a run, in its schema."""

    def __init__(self, schema: str) -> None:
        self.meta = sa.MetaData(schema=schema)
        self.writer = sa.Table(
            "writer",
            self.meta,
            sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
            sa.Column("epoch", BYTEA, nullable=False),
            sa.Column("commits", sa.BigInteger, nullable=False),
        )
        self.all = {name: self._table(name) for name in COLUMNS}
        sa.Index("receipt_by_node", self.all["receipts"].c.node, self.all["receipts"].c.ledger_index)
        sa.Index("payload_by_version", self.all["payloads"].c.policy_version)
        self.inserts = {name: self._insert(name) for name in COLUMNS}

    def _table(self, name: str) -> sa.Table:
        columns = []
        for place, column in enumerate(COLUMNS[name]):
            kind: Any = BYTEA if column in _BYTES else sa.BigInteger
            columns.append(
                sa.Column(column, kind, primary_key=not place, autoincrement=False, nullable=column == "crc")
            )
        return sa.Table(name, self.meta, *columns)

    def _insert(self, name: str) -> sa.Insert:
        """All rows in one statement: an array a column (a round trip a row would be the slowest part)."""
        table = self.all[name]
        arrays = [
            sa.cast(sa.bindparam(column.name), ARRAY(BYTEA if column.name in _BYTES else sa.BigInteger))
            for column in table.columns
        ]
        given = sa.func.unnest(*arrays).table_valued(*COLUMNS[name]).render_derived("given")
        rows = sa.select(*(given.c[column] for column in COLUMNS[name]))
        statement = pg_insert(table).from_select(list(COLUMNS[name]), rows)
        if name == "payloads":
            return statement.on_conflict_do_nothing()
        if name in ("events", "receipts"):
            return statement
        key, other = COLUMNS[name]
        return statement.on_conflict_do_update(index_elements=[key], set_={other: statement.excluded[other]})

"""``barnraise ledger show``: the entries, filtered, in pages, for people and for programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import typer

from barnraise.protocol.ledger import NodeJoined
from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.ledger_lines import line, peer_id, placed_fields
from barnraise.protocol.ledger_places import Filter, Place, kinds_named, placed
from barnraise.protocol.wire import printable
from barnraise.tui.console import emit_json, examples
from barnraise.tui.ledger_source import SOURCE, find_node, ledger_file, node_names, read_moment, usable
from barnraise.tui.ledger_table import write_csv, write_parquet

EXAMPLES = examples(
    "ledger show ./my-run --limit 20",
    "ledger show ledger.bin --node anna --kind judged --since 2d",
    "ledger show ledger.bin --unit 17 --json",
    "ledger show ledger.bin --page 3 --page-size 50",
    "ledger show ledger.bin --parquet ledger.parquet",
)


def show(
    source: Path = SOURCE,
    limit: int = typer.Option(
        0, "--limit", metavar="N", min=0, help="Only the last N entries (0: all of them)."
    ),
    node: list[str] = typer.Option(
        [], "--node", metavar="ID", help="Only this node's: peer id, its beginning or end, or name."
    ),
    kind: list[str] = typer.Option(
        [], "--kind", metavar="KIND", help="Only such entries: judged, leased, clawedback, node, ..."
    ),
    unit: int | None = typer.Option(None, "--unit", metavar="N", min=0, help="Only this unit's."),
    version: int | None = typer.Option(
        None, "--version", metavar="N", min=0, help="Only what is of this policy version."
    ),
    since: str | None = typer.Option(
        None, "--since", metavar="TIME", help="From then on: 2026-01-31, 2026-01-31T18:00 (UTC), or 2d ago."
    ),
    until: str | None = typer.Option(None, "--until", metavar="TIME", help="Before then."),
    page: int = typer.Option(0, "--page", metavar="N", min=0, help="Only page N of what is shown, from 1."),
    page_size: int = typer.Option(50, "--page-size", metavar="N", min=1, max=100_000, help="Entries a page."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per entry, nothing shortened."),
    as_csv: bool = typer.Option(False, "--csv", help="A table with a header, nothing shortened."),
    parquet: Path | None = typer.Option(
        None, "--parquet", metavar="FILE", help="Write the table as a Parquet file (needs pyarrow)."
    ),
) -> None:
    """Print the ledger's entries, oldest first; times are UTC, ids are shortened (--json has them whole).

    Filters of one kind given twice widen it, those of different kinds narrow it. Nothing is
    checked here: 'barnraise ledger verify' does that.
    """
    if as_json + as_csv + (parquet is not None) > 1:
        raise typer.BadParameter("choose one of --json, --csv and --parquet")
    if limit and page:
        raise typer.BadParameter("choose one of --limit and --page")
    if parquet is not None and (parquet.is_dir() or not parquet.parent.is_dir()):
        raise typer.BadParameter(f"{parquet} cannot be written there", param_hint="--parquet")
    kinds: frozenset[str] = frozenset()
    for text in kind:
        try:
            kinds |= kinds_named(text)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--kind") from error
    with usable(), ledger_file(source) as path:
        nodes = None
        if node:
            known = node_names(path)
            nodes = frozenset(find_node(known, text) for text in node)
        wanted = Filter(
            nodes=nodes,
            kinds=kinds or None,
            unit=unit,
            version=version,
            since=None if since is None else read_moment(since, "--since"),
            until=None if until is None else read_moment(until, "--until"),
        )
        names: dict[str, str] = {}
        chosen = entries_chosen(path, wanted, names, limit, page, page_size)
        rows = (placed_fields(place, names) for place in chosen)
        if parquet is not None:
            typer.echo(f"{write_parquet(rows, parquet):,} entries written to {parquet}")
        elif as_csv:
            write_csv(rows)
        elif as_json:
            for row in rows:
                emit_json(row)
        else:
            for row in rows:
                typer.echo(line(row, names))


def entries_chosen(
    path: Path, wanted: Filter, names: dict[str, str], limit: int = 0, page: int = 0, page_size: int = 50
) -> Iterator[Place]:
    """What passes, in order: the last ``limit``, a page (from 1), or all. ``names`` fills as nodes join."""
    with open_ledger(path) as ledger:
        passing = (place for place in _noted(placed(ledger.entries), names) if wanted.takes(place))
        if limit:
            yield from deque(passing, maxlen=limit)
        elif page:
            yield from islice(passing, (page - 1) * page_size, page * page_size)
        else:
            yield from passing


def _noted(places: Iterator[Place], names: dict[str, str]) -> Iterator[Place]:
    for place in places:
        if isinstance(place.entry, NodeJoined):
            names[peer_id(place.entry.node)] = printable(place.entry.name, 64)
        yield place

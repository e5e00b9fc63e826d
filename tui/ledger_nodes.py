"""``barnraise ledger top`` and ``ledger node``: who earned what, lately and in all."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.ledger_lines import line, peer_id, placed_fields, standing_fields
from barnraise.protocol.ledger_places import Filter
from barnraise.protocol.ledger_standings import Standing, Standings
from barnraise.protocol.moments import minute, shown_moment
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.wire import printable
from barnraise.tui.console import emit_json, examples, print_rows, short_id
from barnraise.tui.ledger_show import entries_chosen
from barnraise.tui.ledger_source import (
    SOURCE,
    SlowProgress,
    find_node,
    ledger_file,
    moment_of,
    read_moment,
    usable,
)

TOP_EXAMPLES = examples("ledger top ./my-run", "ledger top ledger.bin --by recent --limit 100 --json")
NODE_EXAMPLES = examples("ledger node ./my-run anna", "ledger node ledger.bin ..kRz3x1Qf --json")


def read_standings(path: Path, now_ms: int | None) -> Standings:
    """Fold a ledger file; by default as of its newest signed tree head, so that everybody gets the same."""
    progress = SlowProgress()
    with open_ledger(path) as ledger:
        moment = moment_of(ledger) if now_ms is None else now_ms
        found = Standings(
            time.time_ns() // 1_000_000 if moment is None else moment, open_run_spec(ledger.run_spec)
        )
        for index, entry in enumerate(ledger.entries):
            found.add(entry)
            if not index % 4096:
                progress("reading the ledger", ledger.fraction())
    return found


def _warn(found: Standings) -> None:
    if found.broken:
        typer.echo(
            f"{found.broken:,} entries break a rule and count for nothing: see 'barnraise ledger verify'",
            err=True,
        )


def top(
    source: Path = SOURCE,
    by: str = typer.Option("credit", "--by", metavar="WHAT", help="Order by credit, or by recent average."),
    limit: int = typer.Option(25, "--limit", metavar="N", min=0, help="The first N nodes (0: all)."),
    at: str | None = typer.Option(
        None, "--at", metavar="TIME", help="Averages as of then (default: of the newest signed tree head)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Rank the nodes by credit, with their recent average: credit a day with a half-life of one week.

    The average is BOINC's recent average credit: a node that earns the same every day comes to
    that number, and one that stops keeps half of it a week later. Credit is in Mflop.
    """
    if by not in ("credit", "recent"):
        raise typer.BadParameter("nodes are ordered by credit or by recent", param_hint="--by")
    now_ms = None if at is None else read_moment(at, "--at")
    with usable(), ledger_file(source) as path:
        found = read_standings(path, now_ms)
    ranked = found.ranked(by)
    chosen = ranked[:limit] if limit else ranked
    if as_json:
        emit_json(
            {
                "at": shown_moment(found.now_ms),
                "nodes": [{"rank": n, **standing_fields(node)} for n, node in enumerate(chosen, 1)],
                "total_nodes": len(ranked),
                "broken_entries": found.broken,
            }
        )
        return
    _warn(found)
    typer.echo(f"{'':>4}  {'credit, Mflop':>18}  {'a day, lately':>16}  {'units':>7}  node")
    for rank, node in enumerate(chosen, 1):
        who = f"{printable(node.name, 32)} {short_id(peer_id(node.node))}"
        banned = "  banned" if node.banned_until > found.now_ms else ""
        typer.echo(
            f"{rank:>4}  {node.credit:>18,}  {node.recent:>16,.0f}  {node.accepted:>7,}  {who}{banned}"
        )
    rest = f", {len(ranked) - len(chosen):,} more nodes" if len(ranked) > len(chosen) else ""
    typer.echo(f"as of {minute(found.now_ms)} UTC{rest}")


def node(
    source: Path = SOURCE,
    wanted: str = typer.Argument(..., metavar="ID", help="Peer id, its beginning or end, or a unique name."),
    last: int = typer.Option(10, "--last", metavar="N", min=0, help="Its last N entries besides (0: none)."),
    at: str | None = typer.Option(
        None, "--at", metavar="TIME", help="Averages as of then (default: of the newest signed tree head)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Show what one node did: balance, recent average, verdicts, claw-backs, bans, and its last entries."""
    now_ms = None if at is None else read_moment(at, "--at")
    with usable(), ledger_file(source) as path:
        found = read_standings(path, now_ms)
        key = find_node({node: printable(s.name, 64) for node, s in found.nodes.items()}, wanted)
        names: dict[str, str] = {}
        places = list(entries_chosen(path, Filter(nodes=frozenset({key})), names, last)) if last else []
    rows = [placed_fields(place, names) for place in places]
    standing = found.nodes[key]
    rank = next(n for n, other in enumerate(found.ranked(), 1) if other.node == key)
    if as_json:
        emit_json(
            {"at": shown_moment(found.now_ms), "rank": rank, **standing_fields(standing), "entries": rows}
        )
        return
    _warn(found)
    print_rows(_rows(standing, rank, found))
    for row in rows:
        typer.echo(line(row, names))


def _rows(node: Standing, rank: int, found: Standings) -> list[tuple[str, str]]:
    before = ", before that " + ", ".join(printable(name, 64) for name in reversed(node.names[:-1]))
    overturned = f", {node.overturned:,} overturned" if node.overturned else ""
    rows = [
        ("node", peer_id(node.node)),
        ("name", printable(node.name, 64) + (before if len(node.names) > 1 else "")),
        ("joined", f"{minute(node.joined_ms)} UTC, last entry {minute(node.last_ms)}"),
        ("credit", f"{node.credit:,} Mflop, number {rank} of {len(found.nodes):,}"),
        ("lately", f"{node.recent:,.0f} Mflop a day (half-life one week), as of {minute(found.now_ms)} UTC"),
        ("leases", f"{node.leased:,}, {node.submitted:,} submitted, {node.closed:,} ended without"),
        (
            "verdicts",
            f"{node.accepted:,} accepted ({node.unaudited:,} of them unaudited), {node.rejected:,} rejected",
        ),
    ]
    if node.appeals:
        rows.append(("appeals", f"{node.appeals:,}{overturned}"))
    if node.clawed_back:
        rows.append(("clawback", f"{node.clawed_back:,} Mflop"))
    if node.banned_until:
        rows.append(("banned", f"until {minute(node.banned_until)} UTC: {printable(node.ban_reason, 500)}"))
    return rows

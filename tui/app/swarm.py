"""Swarm: how others reach this node, what moves, and the peers it moves to and from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical

from barnraise.node.fetching import in_words
from barnraise.tui.app.listing import Column, Entry, Listing
from barnraise.tui.app.screen import NodeScreen
from barnraise.tui.app.sheet import Row, Sheet, bar, words
from barnraise.tui.app.view import View, number, rate, short, text, told, version
from barnraise.tui.console import size


class Swarm(NodeScreen):
    """Reach, versions, peers."""

    tab = "swarm"

    def body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield Sheet("Reach", id="reach", label=12, most=2)
            yield Sheet("Versions", id="versions", label=12, most=1)
            yield Sheet("Peers", id="heading", label=0, most=2)
            yield Listing(
                Column("peer", 11),
                Column("way", 12),
                Column("link", 6),
                Column("has", 5, right=True),
                Column("moving", 10),
                Column("in", 10, right=True),
                Column("out", 10, right=True),
                Column("in, all", 10, right=True, from_width=100),
                Column("out, all", 10, right=True, from_width=100),
                empty="no peer yet",
                id="peers",
            )
            yield Sheet(id="detail", classes="bare", label=0, most=1)

    def on_mount(self) -> None:
        self.query_one(Listing).focus()

    def draw(self, view: View) -> None:
        tall = self.size.height >= 30
        self.query_one("#reach", Sheet).show(reach_rows(view))
        self.query_one("#versions", Sheet).show(
            version_rows(view, max(8, self.size.width // 4), 8 if tall else 3)
        )
        self.query_one("#heading", Sheet).show(tree_rows(view))
        peers = view.items("neighbours", "tree")
        coordinator, parent = view.state.get("coordinator"), view.part("tree").get("parent")
        empty = "no peer yet" if view.part("tree") else "takes no part in the tree yet"
        self.query_one(Listing).show([_entry(peer, coordinator, parent) for peer in peers], empty)
        self._detail()

    def on_listing_moved(self) -> None:
        self._detail()

    def _detail(self) -> None:
        peer = self.query_one(Listing).current
        rows: list[Row] = [("", words((peer, "dim")))] if peer else []
        self.query_one("#detail", Sheet).show(rows)


def reach_rows(view: View) -> Iterator[Row]:
    """How others reach this node, why, what would change it; the coordinator."""
    reach = view.part("reach")
    kind = text(reach.get("kind"), "not known yet")
    reason, cure = text(reach.get("reason")), text(reach.get("cure"))
    yield (
        "reachable",
        words((kind, "good" if kind == "direct" else "strong"), f": {reason}" if reason else ""),
    )
    if cure:
        yield "to change", words(cure)
    up = view.state.get("connected")
    yield (
        "coordinator",
        words(
            ("connected", "good") if up else ("not connected", "bad"),
            (f"  {short(view.state.get('coordinator'))}", "dim"),
        ),
    )


def version_rows(view: View, width: int, most: int) -> Iterator[Row]:
    """Versions here and on their way, with what is finished of each."""
    fetch = view.part("fetch")
    if fetch:
        total = number(fetch.get("total"))
        yield (
            "fetching",
            bar(number(fetch.get("done")) / total if total else 0.0, 12)
            + words(f"  {text(fetch.get('what')) or version(fetch.get('version'))}: {told(in_words, fetch)}"),
        )
    versions = view.items("versions", "tree")
    for entry in versions[:most]:
        have, of = number(entry.get("have")), number(entry.get("of"))
        moved = f"{size(number(entry.get('bytes_in')))} in, {size(number(entry.get('bytes_out')))} out"
        yield (
            f"{version(entry.get('version'))} {text(entry.get('what'))}",
            bar(have / of if of else 0.0, width)
            + words(f"  {have:.0f}/{of:.0f} shards", (f"  {moved}", "dim")),
        )
    if not versions:
        here, newest = version(view.state.get("have_version")), version(view.state.get("head_version"))
        yield "here", words(here, (f", newest {newest}", "dim"))


def tree_rows(view: View) -> Iterator[Row]:
    """The tree's figures, and whom it has banned."""
    tree = view.part("tree")
    if not tree:
        return
    yield (
        "",
        words(
            f"{number(tree.get('eager')):.0f} eager, {number(tree.get('lazy')):.0f} lazy links",
            (" · ", "dim"),
            f"{number(tree.get('known')):.0f} more known",
            (" · ", "dim"),
            f"fan-out {number(tree.get('fan_out')):.0f}",
            (" · ", "dim"),
            f"upload {rate(tree.get('upload'))}",
        ),
    )
    for entry in view.items("banned", "tree")[-2:]:
        yield "", words((f"banned {short(entry.get('peer'))}: {text(entry.get('reason'))}", "warn"))


def _entry(peer: Mapping[str, Any], coordinator: Any, parent: Any) -> Entry:
    name = text(peer.get("peer"), "?")
    link = ("eager", "") if peer.get("eager") else ("lazy", "dim")
    if name == parent:
        link = ("parent", "accent")
    sending, receiving = peer.get("sending"), peer.get("receiving")
    moving = []
    if receiving is not None:
        moving.append((f"↓ {version(receiving)} ", "good"))
    if sending is not None:
        moving.append((f"↑ {version(sending)}", "accent"))
    return Entry(
        name,
        (
            words(("coordinator", "strong")) if name == coordinator else words(short(name)),
            words(text(peer.get("way"), "?")),
            words(link),
            words(version(peer.get("version"))),
            tuple(moving) or words(("-", "dim")),
            _rate(peer.get("rate_in")),
            _rate(peer.get("rate_out")),
            words((size(number(peer.get("bytes_in"))), "dim")),
            words((size(number(peer.get("bytes_out"))), "dim")),
        ),
    )


def _rate(value: Any) -> tuple[tuple[str, str], ...]:
    return words(rate(value)) if number(value) >= 1 else words(("-", "dim"))

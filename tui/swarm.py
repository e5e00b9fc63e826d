"""``barnraise swarm``: who has which version, the broadcast tree's links, and their rates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from barnraise.node.fetching import in_words
from barnraise.tui.console import emit_json, examples, print_rows, short_id, size
from barnraise.tui.status import reachable, read_folder

EXAMPLES = examples("swarm ./my-run", "swarm node-1 --json", "swarm     (this user's node)")

Row = tuple[str, str]


def swarm(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A run folder or a node's data folder (default: ~/.local/share/barnraise)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
    watch: float | None = typer.Option(
        None, "--every", metavar="SECONDS", min=0.5, max=3600, help="Go on, until Ctrl-C (default: once)."
    ),
) -> None:
    """Show how versions spread, as a node or coordinator sees it."""
    try:
        while True:
            state = read_folder(folder)
            if as_json:
                emit_json(summary(state))
            else:
                print_rows(overview(state))
            if watch is None:
                return
            time.sleep(watch)
            if not as_json:
                typer.echo("")
    except KeyboardInterrupt:
        return


def summary(state: dict[str, Any]) -> dict[str, Any]:
    """What ``--json`` prints: the part of a state tree that is about versions and their ways."""
    names = (
        "kind",
        "run",
        "run_id",
        "peer_id",
        "policy_version",
        "head_version",
        "have_version",
        "fetch",
        "reach",
    )
    found = {name: state[name] for name in names if name in state}
    found["tree"] = state.get("tree")
    if "nodes" in state:
        fields = ("name", "peer_id", "state", "have_version", "reach")
        found["nodes"] = [{name: node.get(name) for name in fields} for node in state["nodes"]]
    return found


def overview(state: dict[str, Any]) -> list[Row]:
    """The same for a person, as rows of label and text. Rates are of the last few seconds."""
    return list(_rows(state))


def _rows(state: dict[str, Any]) -> Iterator[Row]:
    origin = state.get("kind") == "coordinator"
    yield "run", f"'{state.get('run') or '?'}' ({str(state.get('run_id', ''))[:16]})"
    if origin:
        yield "version", f"{_number(state.get('policy_version'))}, this is its origin"
        nodes = [node for node in state.get("nodes", []) if node.get("state") != "away"]
        held: dict[int, int] = {}
        for node in nodes:
            held[node.get("have_version", -1)] = held.get(node.get("have_version", -1), 0) + 1
        parts = [f"{count} at {_number(version)}" for version, count in sorted(held.items(), reverse=True)]
        yield "nodes", f"{len(nodes)} here" + (f": {', '.join(parts)}" if parts else "")
        ways = Counter(str(node.get("reach") or "unknown") for node in nodes)
        if ways:
            yield "reachable", ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))
    else:
        nodes = []
        yield (
            "version",
            f"{_number(state.get('have_version'))} here, newest {_number(state.get('head_version'))}",
        )
        if state.get("reach"):
            yield "reachable", reachable(state["reach"])
        fetch = state.get("fetch")
        if fetch:
            yield "fetching", f"version {fetch.get('version')}: {in_words(fetch)}"
    tree = state.get("tree")
    if not tree:
        yield "tree", "takes no part" if state.get("run") else "no run joined yet"
        return
    names = {node.get("peer_id"): str(node.get("name", "")) for node in nodes}
    if state.get("coordinator"):
        names[state["coordinator"]] = "coordinator"
    yield from _tree(tree, names)


def _tree(tree: dict[str, Any], names: dict[Any, str]) -> Iterator[Row]:
    def who(peer: Any) -> str:
        name = names.get(peer)
        return f"{name} {short_id(str(peer))}" if name else short_id(str(peer))

    upload = f", upload {size(tree['upload'])}/s" if tree.get("upload") else ""
    limit = f", limit {tree['upload_copies']:g} copies" if tree.get("upload_copies") else ""
    yield (
        "tree",
        f"{tree.get('eager', 0)} eager and {tree.get('lazy', 0)} lazy links, {tree.get('known', 0)} known, "
        f"fan-out {tree.get('fan_out', 0)}{upload}{limit}",
    )
    for entry in tree.get("versions", []):
        yield (
            f"  version {entry.get('version')}",
            f"{entry.get('what')}: {entry.get('have')} of {entry.get('of')} shards; of the version "
            f"{size(entry.get('bytes_in', 0))} in, {size(entry.get('bytes_out', 0))} out",
        )
    for link in tree.get("neighbours", []):
        marks = ["eager" if link.get("eager") else "lazy"]
        if link.get("way") not in (None, "direct"):
            marks.append(str(link["way"]))
        if link.get("peer") == tree.get("parent"):
            marks.append("parent")
        if link.get("version") is not None:
            marks.append(f"has version {link['version']}")
        if link.get("sending") is not None:
            marks.append(f"sending {link['sending']}")
        if link.get("receiving") is not None:
            marks.append(f"receiving {link['receiving']}")
        yield (
            f"  {who(link.get('peer'))}",
            f"{', '.join(marks)}; {size(link.get('rate_in', 0))}/s in, {size(link.get('rate_out', 0))}/s out "
            f"({size(link.get('bytes_in', 0))} in, {size(link.get('bytes_out', 0))} out)",
        )
    for entry in tree.get("banned", []):
        yield "  banned", f"{who(entry.get('peer'))}: {entry.get('reason', '')}"


def _number(version: Any) -> str:
    return f"version {version}" if isinstance(version, int) and version >= 0 else "no version"

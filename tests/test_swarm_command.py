"""``barnraise swarm``: what it says of a coordinator's and of a node's state tree."""

from __future__ import annotations

from typing import Any

from barnraise.tui import status
from barnraise.tui.swarm import overview, summary

TREE: dict[str, Any] = {
    "neighbours": [
        {
            "peer": "12D3KooWaaaaaaaa",
            "eager": True,
            "version": 2,
            "sending": 3,
            "receiving": None,
            "rate_out": 1_500_000,
            "rate_in": 0,
            "bytes_out": 9_000_000,
            "bytes_in": 0,
        }
    ],
    "parent": "12D3KooWaaaaaaaa",
    "eager": 1,
    "lazy": 0,
    "known": 4,
    "upload": 2_000_000,
    "fan_out": 2,
    "banned": [{"peer": "12D3KooWbbbbbbbb", "reason": "sent a corrupt shard"}],
    "versions": [{"version": 3, "what": "files", "have": 5, "of": 9, "bytes_out": 9_000_000, "bytes_in": 1}],
}


def texts(state: dict[str, Any]) -> str:
    return "\n".join(f"{label} {text}" for label, text in overview(state))


def test_a_coordinator_shows_who_has_which_version_and_the_links() -> None:
    nodes = [
        {"name": "ann", "peer_id": "12D3KooWaaaaaaaa", "state": "generating", "have_version": 3},
        {"name": "ben", "peer_id": "12D3KooWcccccccc", "state": "fetching", "have_version": -1},
        {"name": "old", "peer_id": "12D3KooWdddddddd", "state": "away", "have_version": -1},
    ]
    state = {"kind": "coordinator", "run": "barn", "run_id": "ab" * 32, "policy_version": 3, "nodes": nodes}
    shown = texts({**state, "tree": {**TREE, "upload_copies": 1.5}})
    assert "2 here: 1 at version 3, 1 at no version" in shown
    assert "ann ..aaaaaaaa" in shown
    assert "eager, parent, has version 2, sending 3; 0 B/s in, 1.5 MB/s out" in shown
    assert "limit 1.5 copies" in shown
    assert "..bbbbbbbb: sent a corrupt shard" in shown
    assert summary(state)["nodes"][1]["have_version"] == -1


def test_a_node_shows_its_download_with_sources_and_time_left() -> None:
    fetch = {
        "version": 4,
        "done": 250,
        "total": 1000,
        "rate": 50,
        "eta_s": 15.0,
        "sources": [
            {"peer": "a", "kind": "peer", "bytes": 1},
            {"peer": "b", "kind": "peer", "bytes": 1},
            {"peer": "https://m", "kind": "mirror", "bytes": 2},
            {"peer": "boss", "kind": "origin", "bytes": 2},
        ],
    }
    state = {"kind": "node", "run": "barn", "run_id": "", "have_version": 3, "head_version": 4}
    shown = texts({**state, "fetch": fetch, "coordinator": "12D3KooWaaaaaaaa", "tree": TREE})
    assert "version 3 here, newest version 4" in shown
    words = "version 4: 0.2 of 1.0 kB (25 %), 0.1 kB/s from 2 peers, 1 mirror and the coordinator, 15 s left"
    assert words in shown
    assert ("fetching", words) in status.overview({**state, "fetch": fetch}, 0.0)
    assert "coordinator ..aaaaaaaa" in shown


def test_before_a_run_is_joined_there_is_no_tree() -> None:
    assert "no run joined yet" in texts({"kind": "node", "tree": None})

"""Bans by the operator's hand: whom they mean, what they do, what the ledger says of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from coordinator_support import make_run, opened
from typer.testing import CliRunner

from barnraise.coordinator import bans
from barnraise.coordinator.audit import is_banned
from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.events import NodeJoined
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.coordinator.state import fold
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity, peer_id_of
from barnraise.protocol.ledger_file import verify_ledger_file
from barnraise.tui import status
from barnraise.tui.coordinate import app

ANN = Identity.from_private_bytes(b"a" * 32).public_key
BOB = Identity.from_private_bytes(b"b" * 32).public_key
NOW = 5_000


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[tuple[Core, Path]]:
    """A run that Ann and Bob have joined; afterwards its ledger is verified, and it can be replayed."""
    with opened(make_run(tmp_path)) as run:
        journal = Journal(run.journal_path)
        core = Core(journal, run.spec, run.run_id, run.identity, lambda: NOW, in_place)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            await core.open()
            await core.record(
                [NodeJoined(node=ANN, name="ann", at_ms=1), NodeJoined(node=BOB, name="bob", at_ms=2)]
            )
            yield core, run.path
            nursery.cancel_scope.cancel()
        lag = run.spec.rollout.max_lag
        again = fold(journal.events(), lag)
        assert again.nodes[ANN].banned_until == core.state.nodes[ANN].banned_until
        export_ledger(journal, run.signed_spec, lag, run.identity, NOW, tmp_path / "ledger.bin")
        journal.close()
        report = verify_ledger_file(tmp_path / "ledger.bin", ())
        assert report.ok, report.problems


async def test_a_banned_node_is_banned_until_then_and_the_ledger_verifies(tmp_path: Path) -> None:
    async with running(tmp_path) as (core, _):
        reply = await bans.ban(core, {"node": "ann", "reason": "floods\nothers", "seconds": 60})
        ann = core.state.nodes[ANN]
        assert reply == {"node": peer_id_of(ANN), "name": "ann", "until": NOW + 60_000}
        assert is_banned(ann, NOW)
        assert not is_banned(ann, NOW + 60_000)
        assert not is_banned(core.state.nodes[BOB], NOW)
        assert "\n" not in ann.ban_reason
        assert ann.ban_reason.startswith("by the operator: floods")


async def test_a_second_ban_replaces_the_first_and_unban_ends_it_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (core, _):
        await bans.ban(core, {"node": "ann", "reason": "x", "seconds": 86_400})
        await bans.ban(core, {"node": "ann", "reason": "y", "seconds": 60})
        assert core.state.nodes[ANN].banned_until == NOW + 60_000
        await bans.unban(core, {"node": peer_id_of(ANN), "reason": "sorry"})
        assert not is_banned(core.state.nodes[ANN], NOW)
        written = len(core.ledger)
        assert (await bans.unban(core, {"node": "ann"}))["until"] == 0  # safe to repeat
        assert len(core.ledger) == written


@pytest.mark.parametrize("name", [peer_id_of(ANN), ANN.hex()], ids=["peer id", "key"])
async def test_nobody_hides_a_node_by_taking_its_id_for_a_name(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as (core, _):
        await core.record([NodeJoined(node=b"x" * 32, name=name, at_ms=NOW)])
        assert (await bans.ban(core, {"node": name, "reason": "x", "seconds": 60}))["node"] == peer_id_of(ANN)


@pytest.mark.parametrize("number", range(5))
async def test_a_node_is_meant_by_name_key_or_peer_id(tmp_path: Path, number: int) -> None:
    peer = peer_id_of(BOB)
    ways = ["bob", peer, f"..{peer[-8:]}", BOB.hex(), BOB.hex()[:12]]
    async with running(tmp_path) as (core, _):
        assert bans.find_node(core.state, ways[number]).key == BOB


@pytest.mark.parametrize("text", ["", "..", "b", "nobody", "\x1b[2J", "0" * 500])
async def test_nobody_is_banned_by_mistake(tmp_path: Path, text: str) -> None:
    async with running(tmp_path) as (core, _):
        with pytest.raises(RefusedError, match="no node"):
            bans.find_node(core.state, text)


async def test_two_of_one_name_have_to_be_told_apart(tmp_path: Path) -> None:
    async with running(tmp_path) as (core, _):
        await core.record([NodeJoined(node=b"\7" * 32, name="ann", at_ms=3)])
        with pytest.raises(RefusedError, match="2 nodes are meant"):
            bans.find_node(core.state, "ann")


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 0},
        {"seconds": -1},
        {"seconds": 2**70},
        {"seconds": float("nan")},
        {"seconds": True},
        {"seconds": None},
        {"reason": " "},
        {"reason": 7},
        {"node": 7},
    ],
    ids=lambda change: "-".join(f"{key}-{str(value)[:6]}" for key, value in change.items()),
)
async def test_arguments_that_make_no_sense_ban_nobody(tmp_path: Path, change: dict[str, Any]) -> None:
    async with running(tmp_path) as (core, _):
        with pytest.raises(RefusedError):
            await bans.ban(core, {"node": "ann", "reason": "x", "seconds": 60, **change})
        assert not is_banned(core.state.nodes[ANN], NOW)


@pytest.mark.parametrize("lasting", ["", "7", "7w", "-1d", "1e9d", "0h", "99999d", "nan"])
def test_how_long_is_said_with_a_unit(tmp_path: Path, lasting: str) -> None:
    result = CliRunner().invoke(app, ["ban", str(tmp_path), "ann", "--reason", "x", "--for", lasting])
    assert result.exit_code == 2


def test_the_operator_sees_who_is_banned_and_until_when() -> None:
    node = {"name": "ann", "peer_id": "x", "state": "waiting", "banned": "floods", "banned_until": 1_000}
    rows = status.overview({"kind": "coordinator", "run": "r", "nodes": [node]}, 0.0)
    assert any("BANNED until 1970-01-01 00:00 UTC: floods" in text for _, text in rows)

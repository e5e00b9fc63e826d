"""The coordinator publishes its log and real nodes witness it, on one in-memory network."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from coordinator_support import coordinating, make_run, virtual_ms

from barnraise.coordinator import server
from barnraise.coordinator.folder import open_run
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import entries_of
from barnraise.node.config import NodeConfig
from barnraise.node.daemon import run_node
from barnraise.node.handle import NodeHandle
from barnraise.protocol.cosignature import node_cosignatures, witness_name
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.evidence import check_evidence
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import encode_entry
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.notes import parse_note
from barnraise.protocol.tlog_checkpoint import Head, log_key, open_checkpoint
from barnraise.protocol.tlog_tiles import TileTree
from barnraise.protocol.witness import Conflict
from tests.test_node_and_coordinator import Engine, nodes, until


def published(folder: Path) -> Head:
    with open_run(folder) as run:
        return head_in(folder, run.run_id, run.spec.operator)


def head_in(folder: Path, run_id: bytes, operator: bytes) -> Head:
    """What a stranger reads from the static files; each entry is checked against the root."""
    head = open_checkpoint((folder / "log/checkpoint").read_bytes(), log_key(run_id, operator))
    tree = TileTree(head.size, lambda tile: (folder / "log" / tile.path).read_bytes())
    assert tree.root() == head.root
    for index in range(head.size):
        tree.entry(index)
    return head


def journalled(folder: Path, max_lag: int) -> list[bytes]:
    journal = Journal(folder / "state.sqlite")
    try:
        return [encode_entry(entry) for entry in entries_of(journal.events(), max_lag)]
    finally:
        journal.close()


async def test_nodes_cosign_the_ledger_that_the_coordinator_publishes(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    folder = make_run(tmp_path, versions=40)
    swarm = MemorySwarm(latency_s=0.01)
    names = {
        witness_name(Identity.from_private_bytes(bytes([number + 1]) * 32).peer_id) for number in range(2)
    }
    async with coordinating(swarm, folder) as coordinator:
        run = coordinator.run

        def cosigners() -> set[str]:
            path = folder / "log/checkpoint"
            note = parse_note(path.read_bytes()) if path.exists() else None
            return set() if note is None else set(node_cosignatures(note.text, note.signatures))

        async with nodes(
            swarm, tmp_path, (coordinator.address,), [Engine(seconds=90.0), Engine(seconds=80.0)]
        ):
            await until(lambda: cosigners() == names, 3000.0)
            shown = coordinator.state()["witnesses"]
        first = head_in(folder, run.run_id, run.spec.operator)
    assert {(row["node"], row["name"]) for row in shown["cosigned"]} == {
        (Identity.from_private_bytes(bytes([number + 1]) * 32).peer_id, f"node{number}")
        for number in range(2)
    }
    assert (shown["count"], shown["alarm"]) == (2, "")
    assert shown["age_s"] >= 0
    entries = journalled(folder, run.spec.rollout.max_lag)
    log = MerkleLog()
    for entry in entries:
        log.append(entry)
    assert 0 < first.size <= len(log)
    assert first.root == log.root(first.size)
    for number in range(2):
        kept = next((tmp_path / f"node{number}").rglob("witness/*.checkpoint"))
        head = open_checkpoint(kept.read_bytes(), log_key(run.run_id, run.spec.operator))
        assert log.root(head.size) == head.root


async def test_a_restart_goes_on_with_the_log_and_a_lost_folder_is_made_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    folder = make_run(tmp_path, versions=2)
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder) as coordinator:
        await until(lambda: (folder / "log/checkpoint").exists(), 300.0)
    first = published(folder)
    async with coordinating(swarm, folder) as coordinator:
        async with nodes(swarm, tmp_path, (coordinator.address,), [Engine()]) as (codes, _):
            await until(lambda: len(codes) == 1)
        await trio.sleep(2 * server.TREE_HEAD_EVERY_S)
    second = published(folder)
    assert second.size > first.size
    assert len(journalled(folder, coordinator.run.spec.rollout.max_lag)) == second.size
    for path in sorted((folder / "log").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    async with coordinating(swarm, folder):
        await until(lambda: (folder / "log/checkpoint").exists(), 10.0)
    assert published(folder).checkpoint == second.checkpoint


async def test_a_journal_that_is_set_back_is_refused_before_it_signs_another_history(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    folder = make_run(tmp_path, versions=2)
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder):
        await until(lambda: (folder / "log/checkpoint").exists(), 300.0)
    for path in folder.glob("state.sqlite*"):
        path.unlink()
    with pytest.raises(BaseExceptionGroup) as caught:
        async with coordinating(swarm, folder):
            await trio.sleep(1)
    assert caught.group_contains(RunFolderError, match="witnesses raise the alarm", depth=None)


@asynccontextmanager
async def one_node(
    swarm: MemorySwarm, tmp_path: Path, number: int, addresses: tuple[str, ...]
) -> AsyncIterator[NodeHandle]:
    """A daemon, on whose handle commands can be given."""
    identity = Identity.from_private_bytes(bytes([number + 1]) * 32)
    config = NodeConfig(
        address=addresses[0],
        more_addresses=addresses[1:],
        data=tmp_path / f"node{number}",
        key=tmp_path / f"node{number}.key",
        name=f"node{number}",
        assume_yes=True,
    )
    async with swarm.network(identity.peer_id) as network, trio.open_nursery() as nursery:
        live = partial(run_node, config, network, Engine(seconds=90.0), identity, virtual_ms)
        yield await nursery.start(live, random.Random(number))
        nursery.cancel_scope.cancel()


def proofs(folder: Path) -> list[Path]:
    return list(folder.rglob("evidence-split-view-*.json"))


async def test_an_operator_with_two_ledgers_is_caught_and_everybody_hears_of_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    folder = make_run(tmp_path, versions=40)
    swarm = MemorySwarm(latency_s=0.01)
    async with trio.open_nursery() as nursery:
        honest = trio.CancelScope()

        async def serve(task_status: Any) -> None:
            with honest:
                async with coordinating(swarm, folder) as coordinator:
                    task_status.started(coordinator)
                    await trio.sleep_forever()

        coordinator = await nursery.start(serve)
        run = coordinator.run
        peer = run.identity.peer_id
        later = f"/memory/3/p2p/{peer}"
        async with one_node(swarm, tmp_path, 0, (coordinator.address, later)) as old:
            await until(lambda: any((tmp_path / "node0").rglob("witness/*.checkpoint")), 600.0)
            swarm.crash(peer)
            honest.cancel()
            await until(lambda: old.get_state()["state"] == "offline")
            for path in folder.glob("state.sqlite*"):  # all that was recorded is forgotten on purpose
                path.unlink()
            for path in sorted((folder / "log").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            async with coordinating(swarm, folder, seed=7) as again:
                # another node comes, to whom only the second ledger was ever shown
                async with one_node(swarm, tmp_path, 1, (later,)) as new:
                    await until(lambda: bool(proofs(tmp_path / "node0")), 3000.0)
                    await until(lambda: old.get_state()["state"] == "paused")
                    tree = old.get_state()
                    await until(lambda: new.get_state()["state"] == "paused")
                    await until(lambda: again.state()["witnesses"]["alarm"] != "")
                    assert (await new.commands["resume"]({}))["text"].startswith("working on, although")
                    await until(lambda: new.get_state()["state"] != "paused")
                # the choice outlives a restart, and so does the alarm
                async with one_node(swarm, tmp_path, 1, (later,)) as new:
                    await until(lambda: new.get_state()["state"] == "generating")
                    assert new.get_state()["witness"]["alarm"].startswith("SPLIT VIEW")
    (path,) = proofs(tmp_path / "node0")
    evidence = check_evidence(path.read_bytes())
    assert evidence.key == log_key(run.run_id, run.spec.operator)
    assert evidence.run_spec is not None  # so that a stranger knows whose key it is
    assert isinstance(evidence.trouble, Conflict)
    assert any("SPLIT VIEW" in entry["text"] for entry in tree["notices"])
    assert "two ledgers" in tree["reason"]
    assert (tree["witness"]["alarm"][:10], tree["witness"]["evidence"]) == ("SPLIT VIEW", str(path))
    for place in (tmp_path / "node1", folder / "witness"):
        assert [found.read_bytes() for found in proofs(place)] == [path.read_bytes()]

"""The coordinator as nodes meet it, on the in-memory network in virtual time."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.protocol.ledger_file import verify_ledger_file
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import HeadPush, ReceiptPush
from tests.coordinator_support import coordinating, make_run, node


async def work_until_complete(scripted, coordinator) -> None:  # type: ignore[no-untyped-def]
    while not coordinator.state()["complete"]:
        scripted.version = max(0, coordinator.state()["policy_version"])
        with trio.move_on_after(30):
            lease = await scripted.lease()
            await trio.sleep(1)
            await scripted.submit(scripted.signed_work(lease))


async def test_a_run_goes_from_version_0_to_the_last_and_its_ledger_verifies(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm(latency_s=0.02)
    async with coordinating(swarm, folder) as coordinator:
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work_until_complete, ann, coordinator)
                nursery.start_soon(work_until_complete, bob, coordinator)
            await trio.sleep(5)
            assert len(ann.received(HeadPush)) >= 3
            assert ann.received(ReceiptPush)
        state = coordinator.state()
        assert state["policy_version"] == 3
        assert [version for version, _ in state["rewards"]] == [1, 2, 3]
        journal = Journal(folder / "state.sqlite")
        run = coordinator.run
        export_ledger(journal, run.signed_spec, 1, run.identity, 9_000_000, tmp_path / "ledger.bin")
        journal.close()
    report = verify_ledger_file(tmp_path / "ledger.bin")
    assert report.ok, report.problems
    assert report.accepted == state["accepted"] >= 6

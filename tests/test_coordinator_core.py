"""Decide, journal, reply: what is promised is durable, and a refusing disk undoes it all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from coordinator_support import make_run, opened

from barnraise.coordinator.core import Core, in_place, in_thread
from barnraise.coordinator.events import NodeJoined
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.state import EventError
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import StorageError
from barnraise.protocol.messages import TreeHead

T = TypeVar("T")


@asynccontextmanager
async def running(
    tmp_path: Path, offload: Callable[[Callable[[], object]], object] = in_place
) -> AsyncIterator[Core]:
    folder = tmp_path / "run"
    with opened(folder if folder.exists() else make_run(tmp_path)) as run:
        journal = Journal(run.journal_path)
        core = Core(journal, run.spec, run.run_id, run.identity, lambda: 5_000, offload)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            await core.open()
            yield core
            nursery.cancel_scope.cancel()
        journal.close()


def joined(number: int) -> NodeJoined:
    return NodeJoined(node=number.to_bytes(32, "big"), name=f"n{number}", at_ms=number)


async def test_many_waiting_writes_share_one_commit(tmp_path: Path) -> None:
    commits: list[int] = []
    async with running(tmp_path, in_thread) as core:
        commit = core.journal.commit
        core.journal.commit = lambda writes: (commits.append(len(writes)), commit(writes))[1]  # type: ignore[method-assign, func-returns-value]
        async with trio.open_nursery() as nursery:
            for number in range(300):
                nursery.start_soon(core.record, [joined(number)])
        assert sum(commits) >= 300
        assert len(commits) <= 5
        assert core.journal.length == 301


async def test_nothing_leaves_before_it_is_durable(tmp_path: Path) -> None:
    gate = trio.Event()

    async def slow(work: Callable[[], T]) -> T:
        await gate.wait()
        return work()

    heard: list[Write] = []
    gate.set()
    async with running(tmp_path, slow) as core:
        gate = trio.Event()
        core.listeners.append(heard.append)
        done = trio.Event()

        async def record() -> None:
            await core.record([joined(1)])
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(record)
            await trio.testing.wait_all_tasks_blocked()
            assert core.state.nodes  # decided
            assert not done.is_set()
            assert heard == []
            gate.set()
        assert done.is_set()
        assert [list(write.events) for write in heard] == [[joined(1)]]


async def test_a_cancelled_caller_does_not_stop_the_write(tmp_path: Path) -> None:
    async with running(tmp_path) as core:
        with trio.CancelScope() as scope:
            scope.cancel()
            await core.record([joined(1)])
        await core.record([])
        assert core.journal.length == 2


async def test_a_full_disk_fails_everything_queued_and_the_state_is_as_before(tmp_path: Path) -> None:
    async with running(tmp_path) as core:
        await core.record([joined(1)])
        root, size = core.ledger.root(), len(core.ledger)
        core.journal.store.db.execute("PRAGMA max_page_count = 1")
        failed = []

        async def record(number: int) -> None:
            # Many, so that the database needs another page.
            try:
                await core.record([joined(number * 1000 + k) for k in range(1000)])
            except StorageError as error:
                failed.append(str(error))

        async with trio.open_nursery() as nursery:
            for number in range(2, 5):
                nursery.start_soon(record, number)
        assert len(failed) == 3
        assert "free some disk space" in failed[0]
        assert core.trouble
        assert len(core.state.nodes) == 1
        assert (core.ledger.root(), len(core.ledger)) == (root, size)
        core.journal.store.db.execute("PRAGMA max_page_count = 1000000")
        await core.record([joined(2)])
        assert core.trouble == ""
    async with running(tmp_path) as core:
        assert len(core.state.nodes) == 2
        assert len(core.ledger) == size + 1


async def test_an_event_that_does_not_follow_reaches_nobody(tmp_path: Path) -> None:
    from barnraise.coordinator.events import LeaseTimedOut

    async with running(tmp_path) as core:
        with pytest.raises(EventError):
            await core.record([LeaseTimedOut(lease_id=b"x" * 16, at_ms=1)])
        await core.record([joined(1)])
        assert core.journal.length == 2


async def test_a_tree_head_covers_exactly_what_is_durable(tmp_path: Path) -> None:
    async with running(tmp_path) as core:
        await core.record([joined(1), joined(2)])
        await core.sign_tree_head()
        signed = core.journal.last_tree_head()
        assert signed is not None
        head = open_signed(signed, TreeHead, core.spec.operator)
        assert (head.size, head.root) == (3, core.ledger.root(3))

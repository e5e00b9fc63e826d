"""A full disk at each kind of write: the node lives, says how much is needed where, and goes on (R25)."""

from __future__ import annotations

import logging
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from daemon_support import Coordinator, node

from barnraise.node import pending, quota, room
from barnraise.node.config import NodeConfig
from barnraise.node.kept import KeptWork
from barnraise.node.main import _locked, _logging
from barnraise.node.pending import PendingWork
from barnraise.node.receipts import ReceiptBook, read_receipts
from barnraise.protocol import store
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Receipt, Rollout, RolloutSubmission, Signed, Verdict


class Disk:
    """Refuses durable writes below ``full``; and says how much of it is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: str | None = None
        self.free = 10**12
        self.refused: list[Path] = []
        real = pending.write_durably

        def write(path: Path, data: bytes) -> None:
            if self.full is not None and self.full in str(path):
                self.refused.append(path)
                raise StorageError(f"cannot write {path} ({len(data)} bytes): No space left on device")
            real(path, data)

        for module in (pending, quota, room, "barnraise.node.mode", "barnraise.node.chosen"):
            name = module if isinstance(module, str) else module.__name__
            monkeypatch.setattr(sys.modules[name], "write_durably", write)
        monkeypatch.setattr(room, "free_disk", lambda folder: self.free)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


async def test_r25_finished_work_is_delivered_though_the_disk_is_full_and_no_more_is_taken(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, disk: Disk
) -> None:
    """R6, R25: the unit that was at work is not thrown away; once there is room the node goes on."""
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    identity = Identity.generate()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, identity=identity) as it:
        await it.until(lambda tree: tree["accepted"] == 1 and tree["state"] == "generating")
        disk.full, disk.free = "pending", 4096
        swarm.partition(identity.peer_id, boss.identity.peer_id)
        tree = await it.until(lambda tree: bool(tree["suspended"]) and tree["pending"] > 0)
        tree = await it.until(lambda tree: "in memory alone" in tree["suspended"][0]["reason"])
        (why,) = tree["suspended"]
        assert re.search(r"pending/\S+ \(\d+ bytes\): No space left", why["reason"])
        assert str(it.config.data) in why["cure"]
        await trio.sleep(300)
        swarm.heal(identity.peer_id, boss.identity.peer_id)
        await it.until(lambda tree: tree["pending"] == 0 and tree["accepted"] == 2)  # from memory
        asked = len(boss.asked)
        await trio.sleep(60)
        assert it.tree["state"] == "paused"
        assert len(boss.asked) == asked
        assert len(it.engine.works) == len(boss.submissions)  # nothing was done in vain
        disk.full, disk.free = None, 10**12
        await it.until(lambda tree: tree["accepted"] >= 4)
        assert it.tree["suspended"] == []
        assert not it.exit_codes


async def test_r25_work_waits_while_the_disk_is_nearly_full_and_says_how_much_is_needed(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, disk: Disk
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        disk.free = 12_000_000
        tree = await it.until(lambda tree: tree["state"] == "paused")
        assert tree["reason"].startswith(
            f"12 MB are free for {it.config.data}: another 38 MB are needed there"
        )
        assert it.engine.stopped_at == []  # the unit at work was finished
        disk.free = room.ENOUGH - 1
        await trio.sleep(20)
        assert it.tree["state"] == "paused"  # it does not flap
        disk.free = room.ENOUGH
        had = it.tree["accepted"]
        await it.until(lambda tree: tree["accepted"] > had)


async def test_r25_a_version_that_does_not_fit_is_fetched_once_there_is_room(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    free = [10_000_000]
    monkeypatch.setattr(store, "_free_bytes", lambda folder: free[0])
    async with boss.up(swarm) as address:
        async with node(swarm, tmp_path, address) as it:
            await it.until(lambda tree: "not enough disk" in tree["reason"], 60)
            tree = it.tree
            assert str(it.config.store_path) in tree["reason"]
            assert "free another" in tree["reason"]
            assert "tries again" in tree["then"]
            await trio.sleep(300)
            free[0] = 10**12
            it.handle._ctx.store._free_bytes = lambda folder: free[0]
            await it.until(lambda tree: tree["accepted"] >= 1, 60)


async def test_r16_no_receipt_is_missing_after_a_full_disk(
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R16, R25: later receipts are not taken before the one that the disk refused, so no gap is left."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    full, real = [False], ReceiptBook._append

    def append(self: ReceiptBook, data: bytes) -> None:
        if full[0]:
            raise StorageError(f"cannot keep a receipt in {self.path} ({len(data)} bytes are needed there)")
        real(self, data)

    monkeypatch.setattr(ReceiptBook, "_append", append)
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        full[0], disk.full = True, ".room"
        tree = await it.until(lambda tree: bool(tree["suspended"]))
        assert "bytes are needed there" in tree["suspended"][0]["reason"]
        while len(boss.receipts) < 3 and it.tree["state"] != "paused":
            await trio.sleep(1)
        await trio.sleep(60)
        full[0], disk.full = False, None
        await it.until(lambda tree: tree["accepted"] >= len(boss.receipts) >= 3)
        (book,) = it.config.data.glob("runs/*/receipts.bin")
        kept = await trio.to_thread.run_sync(read_receipts, book)
        assert kept == boss.receipts[: len(kept)]
        await it.until(lambda tree: not tree["suspended"])  # looked at every few seconds


async def test_r25_limits_and_a_pause_hold_though_the_disk_refuses_to_keep_them(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, disk: Disk
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        disk.full = str(it.config.data)
        with pytest.raises(StorageError, match=r"only until the node ends.*bytes"):
            await it.handle.commands["limits"]({"up": 1_000_000.0})
        assert it.tree["limits"]["up"] == 1_000_000.0
        reply = await it.handle.commands["pause"]({})
        assert reply["ok"]
        tree = await it.until(lambda tree: tree["state"] == "paused", 2)
        assert any("would not outlive a crash" in notice["text"] for notice in tree["notices"])
        await trio.sleep(120)  # the traffic count is refused, too
        disk.full = None
        await it.handle.commands["resume"]({})
        await it.until(lambda tree: tree["accepted"] >= 2)


# --- the real thing: files that may not grow


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The system takes a part of the write that crosses ``size`` bytes, and refuses the next."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


ROLLOUT = Rollout(prompt=0, sample=0, tokens=b"\1\0\0\0", logprobs=b"\0\0\0\0", proofs=b"p" * 258)
OPERATOR, ME, RUN = Identity.generate(), Identity.generate(), b"r" * 32


def receipt(index: int) -> Signed:
    verdict = Verdict(accepted=True, check="all", threshold=1.0, value=0.0, position="", message="")
    one = Receipt(
        run_id=RUN,
        node=ME.public_key,
        lease_id=bytes(16),
        submission_id=index.to_bytes(32, "big"),
        verdict=verdict,
        credit=1,
        ledger_index=index,
        issued_at=0,
    )
    return sign(one, OPERATOR)


@pytest.mark.parametrize("more", [0, 1, 9, 100])
def test_r25_a_receipt_that_was_written_in_part_leaves_nothing_behind(tmp_path: Path, more: int) -> None:
    path = tmp_path / "receipts.bin"
    book = ReceiptBook(path, OPERATOR.public_key, RUN, ME.public_key)
    book.add(receipt(0))
    size = path.stat().st_size
    with no_file_above(size + more), pytest.raises(StorageError, match="bytes are needed there"):
        book.add(receipt(1))
    assert path.stat().st_size == size
    book.add(receipt(1))
    assert read_receipts(path) == [receipt(0), receipt(1)]
    assert ReceiptBook(path, OPERATOR.public_key, RUN, ME.public_key).repaired == ""


def test_r25_a_submission_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    work = RolloutSubmission(
        run_id=RUN, lease_id=b"l" * 16, policy_version=0, engine="e", generate_ms=1, rollouts=(ROLLOUT,)
    )
    signed = sign(work, ME)
    it = PendingWork(tmp_path / "pending", RUN, ME.public_key)
    with no_file_above(16):
        submission_id = it.add(signed, work.lease_id)
        assert it.unsaved == 1
        assert it.get(submission_id) == signed
        with pytest.raises(StorageError, match=r"pending.*bytes\)"):
            it.save()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    it.save()
    assert it.unsaved == 0
    assert PendingWork(tmp_path / "pending", RUN, ME.public_key).ids == (submission_id,)


def test_r25_an_unsaved_submission_that_was_acknowledged_is_forgotten(tmp_path: Path) -> None:
    work = RolloutSubmission(
        run_id=RUN, lease_id=b"l" * 16, policy_version=0, engine="e", generate_ms=1, rollouts=(ROLLOUT,)
    )
    it = PendingWork(tmp_path / "pending", RUN, ME.public_key)
    with no_file_above(16):
        submission_id = it.add(sign(work, ME), work.lease_id)
    it.drop(submission_id, KeptWork(tmp_path / "kept"))
    assert (it.ids, it.unsaved) == ((), 0)
    it.save()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_r25_a_log_that_cannot_grow_is_said_once_and_goes_on_when_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R24, R25: neither tracebacks on the screen, nor an exit code that is the log's."""
    config = NodeConfig(address="/memory/1", data=tmp_path, key=tmp_path / "key", name="n")
    log = logging.getLogger("barnraise.node")
    with _logging(config):
        log.info("one")
        size = config.log_path.stat().st_size
        with no_file_above(size + 20):
            for _ in range(3):
                log.info("two")
        log.info("three")
        with no_file_above(1):
            log.info("four")
    shown = capsys.readouterr()
    text = config.log_path.read_text()
    assert "one" in text
    assert "three" in text
    assert shown.err.count("cannot write") == 1
    assert str(config.log_path) in shown.err
    assert "Traceback" not in shown.err
    assert "four" in shown.out  # the screen has all of it


def test_r25_a_full_disk_does_not_keep_a_node_from_starting(tmp_path: Path) -> None:
    config = NodeConfig(address="/memory/1", data=tmp_path / "data", key=tmp_path / "key", name="n")
    with no_file_above(0), _locked(config):
        pass

"""A volunteer's caps and monthly quota: counted, kept on disk, changed live, and said when they bite."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon_support import EPOCH_MS, Coordinator, node

from barnraise.node.config import NodeConfig
from barnraise.node.quota import MONTHS_KEPT, Quota, load_quota, month_of, save_quota
from barnraise.node.traffic import Limits
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.shards import ShardClient

DAY_MS = 86_400_000


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_a_month_ends_when_the_next_begins_in_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    new_year = 1_798_761_600_000  # 2027-01-01 00:00 UTC
    assert month_of(new_year - 1) == ("2026-12", new_year)
    assert month_of(new_year)[0] == "2027-01"
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    assert month_of(new_year - 1) == ("2027-01", new_year + 31 * DAY_MS - 13 * 3_600_000)


def test_a_quota_is_spent_until_the_month_ends_and_then_begins_anew() -> None:
    start = 1_772_323_200_000  # 2026-03-01 00:00 UTC
    quota = Quota(1000)
    quota.add(400, 599, start)
    assert quota.spent_until(start) is None
    quota.add(1, 0, start + 30 * DAY_MS)
    assert quota.spent_until(start + 30 * DAY_MS) == start + 31 * DAY_MS
    assert quota.spent_until(start + 31 * DAY_MS) is None
    assert quota.used(start + 31 * DAY_MS) == 0
    quota.limit = None
    assert quota.spent_until(start + 30 * DAY_MS) is None


def test_a_clock_that_was_wrong_for_a_while_costs_no_count(tmp_path: Path) -> None:
    now = 1_772_323_200_000
    quota = Quota(1000)
    quota.add(500, 500, now)
    for year in range(20):
        quota.add(1, 1, year * 366 * DAY_MS)  # a machine without a clock of its own starts in 1970
    assert len(quota.months) == MONTHS_KEPT
    save_quota(tmp_path / "traffic.json", quota)
    again, warning = load_quota(tmp_path / "traffic.json", 1000)
    assert (again.used(now), warning, quota.unsaved) == (1000, "", 0)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"months": {"2026-03": {"up": -1}}}', b"\xff" * 99])
def test_a_damaged_count_begins_at_zero_and_says_so(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "traffic.json"
    path.write_bytes(damage)
    quota, warning = load_quota(path, 1000)
    assert quota.used(0) == 0
    assert "traffic.json" in warning


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"upp": 1},
        {"up": 10},
        {"up": True},
        {"down": "fast"},
        {"down": float("nan")},
        {"monthly": 0},
        {"monthly": float("inf")},
        {"up": 100_000, "monthly": -1},
    ],
)
async def test_an_unusable_limit_is_refused_and_changes_nothing(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    limits = Limits(NodeConfig(address="/a", data=tmp_path, key=tmp_path / "key", up_bytes_s=50_000))
    with pytest.raises(RefusedError):
        limits.change(arguments, 0)
    assert limits.tree(0)["up"] == 50_000
    assert limits.tree(0)["monthly"] is None


async def test_a_spent_quota_pauses_work_and_transfers_and_says_until_when(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R12."""
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    month_ends = month_of(EPOCH_MS)[1]
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, monthly_bytes=40_000) as it:
        tree = await it.until(lambda tree: tree["state"] == "paused", 3600)
        assert "monthly quota" in tree["reason"]
        assert tree["until_ms"] == pytest.approx(month_ends, abs=1100)
        assert tree["then"] == "resumes"
        assert tree["limits"]["spent_until_ms"] == month_ends
        assert tree["limits"]["monthly_used"] >= 40_000
        await trio.sleep(5)
        done = len(boss.submissions)
        boss.publish()
        await trio.sleep(60)
        assert len(boss.submissions) == done  # no new work
        assert it.tree["have_version"] == 0  # no transfers
        assert it.tree["connected"]
        assert it.tree["limits"]["monthly_used"] < 60_000  # heartbeats are all that goes on
        assert boss.network is not None
        digest = next(iter(it.handle._ctx.store._places))
        async with swarm.network(Identity.generate().peer_id) as stranger:
            await stranger.connect(it.handle._ctx.network.addresses[0])
            peer = ShardClient(stranger, it.identity.peer_id)
            with pytest.raises(Exception, match=r"closed|reset"):
                await peer.fetch(digest, 4096)
            # the coordinator may: what it fetches is the work that it has to judge
            assert await ShardClient(boss.network, it.identity.peer_id).fetch(digest, 4096)

        peer = ShardClient(boss.network, it.identity.peer_id)
        reply = await it.handle.commands["limits"]({"monthly": 10**9})
        assert "1.00 GB a month" in reply["text"]
        await it.until(lambda tree: tree["have_version"] == 1, 30)
        await it.until(lambda tree: tree["units_done"] > done, 60)
        assert await peer.fetch(digest, 4096)


async def test_the_count_survives_a_kill_and_loses_a_few_seconds_at_most(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.node.traffic.SAVE_BYTES", 1000)
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    on_disk: list[int] = []
    counted: list[tuple[float, int]] = []
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        for _ in range(60):
            await trio.sleep(1)
            counted.append((trio.current_time(), it.tree["bytes_in"] + it.tree["bytes_out"]))
            months = json.loads(it.config.traffic_path.read_bytes())["months"] if counted[-1][0] > 6 else {}
            on_disk.append(sum(sum(month.values()) for month in months.values()))
    for number in range(10, 60):  # a kill at any of these moments
        assert on_disk[number] >= counted[number - 7][1]
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        assert it.tree["limits"]["monthly_used"] >= counted[-1][1]  # an orderly end loses nothing


async def test_caps_are_shown_changed_by_command_and_obeyed_at_once(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R12."""
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    for _ in range(3):
        boss.publish()
    async with (
        boss.up(swarm) as address,
        node(swarm, tmp_path, address, up_bytes_s=50_000, down_bytes_s=60_000) as it,
        swarm.network("stranger") as stranger,
    ):
        await it.until(lambda tree: tree["have_version"] == 2)
        shown = it.tree["limits"]
        assert (shown["up"], shown["down"], shown["monthly"]) == (50_000, 60_000, None)
        assert shown["spent_until_ms"] is None
        store = it.handle._ctx.store
        digests = [digest for digest in store._places if store.size(digest) == 4096] * 50
        await stranger.connect(f"/memory/2/p2p/{it.identity.peer_id}")
        client = ShardClient(stranger, it.identity.peer_id)
        speeds: list[float] = []

        async def pull() -> None:
            while True:
                for digest in digests:
                    await client.fetch(digest, 4096)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pull)
            nursery.start_soon(pull)
            for rate in (50_000, 200_000, 40_000):
                await it.handle.commands["limits"]({"up": rate})
                await trio.sleep(1)
                before = client.received
                await trio.sleep(5)
                speeds.append((client.received - before) / 5 / rate)
            nursery.cancel_scope.cancel()
    assert all(0.85 < speed < 1.1 for speed in speeds), speeds  # the node's own work takes a little

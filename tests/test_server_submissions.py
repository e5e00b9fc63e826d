"""Leases and submissions: what is taken, what is refused by name, and how often it counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from coordinator_support import (
    ScriptedNode,
    node,
)
from server_support import Clock, stage, until

from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import (
    Acknowledged,
    LeaseReturn,
    Message,
    ReceiptPush,
    RolloutLease,
    Signed,
)

Spoil = Callable[[ScriptedNode, RolloutLease], Signed]


def _flipped(scripted: ScriptedNode, lease: RolloutLease) -> Signed:
    good = scripted.signed_work(lease)
    return msgspec.structs.replace(good, payload=good.payload[:-1] + bytes([good.payload[-1] ^ 1]))


def _nameless(scripted: ScriptedNode, lease: RolloutLease) -> Signed:
    """Properly signed, but not a submission: its engine has no name."""
    return scripted.signed_work(lease, engine="")


BAD: dict[str, Spoil] = {
    "bad-signature": _flipped,
    "malformed": _nameless,
    "wrong-signer": lambda node, lease: sign(node.work(lease), Identity.from_private_bytes(b"z" * 32)),
    "wrong-run": lambda node, lease: node.signed_work(lease, run_id=b"x" * 32),
    "unknown-lease": lambda node, lease: node.signed_work(lease, lease_id=b"x" * 16),
    "wrong-version": lambda node, lease: node.signed_work(lease, policy_version=1),
}


@pytest.mark.parametrize("code", sorted(BAD))
async def test_a_bad_submission_is_refused_by_name_and_the_lease_stays_good(
    code: str, tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):
        lease = await ann.lease()
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(BAD[code](ann, lease))
        assert refusal.value.code == code
        assert coordinator.state()["queue"] == 0
        assert not (await ann.submit(ann.signed_work(lease))).duplicate


async def test_another_nodes_lease_is_of_no_use(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        async with node(swarm, coordinator, b"b") as bob:
            lease = await ann.lease()
            with pytest.raises(RefusedError) as refusal:
                await bob.submit(bob.signed_work(lease))
            assert refusal.value.code == "not-your-lease"
            with pytest.raises(RefusedError) as refusal:
                await bob.ask(
                    lambda number: LeaseReturn(id=number, lease_id=lease.lease_id, reason=""), Acknowledged
                )
            assert refusal.value.code == "not-your-lease"


async def test_the_same_content_is_acknowledged_again_and_counted_once(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):
        lease = await ann.lease()
        work = ann.signed_work(lease)
        answers = []

        async def send() -> None:
            answers.append((await ann.submit(work)).duplicate)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(send)
        await until(lambda: coordinator.state()["accepted"] == 1)
        assert sorted(answers) == [False, True, True, True, True]
        assert (await ann.submit(work)).duplicate
        await trio.sleep(5)
        assert coordinator.state()["accepted"] == 1
        assert len(ann.received(ReceiptPush)) == 1


async def test_a_lease_is_answered_once(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (_, _, ann):
        lease = await ann.lease()
        await ann.submit(ann.signed_work(lease))
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(ann.signed_work(lease, generate_ms=6))
        assert refusal.value.code == "used-lease"


async def test_after_the_timeout_work_is_still_welcome_and_after_the_deadline_it_is_not(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        slow, late = await ann.lease(), None
        await trio.sleep(61)
        assert coordinator.state()["leases_open"] == 0
        async with node(swarm, coordinator, b"b") as bob:
            assert (await bob.lease()).unit_id == slow.unit_id  # reissued
        await ann.submit(ann.signed_work(slow))
        await until(lambda: coordinator.state()["accepted"] == 1)
        late = await ann.lease()
        await trio.sleep(121)
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(ann.signed_work(late))
        assert refusal.value.code == "expired-lease"


async def test_a_returned_lease_is_over(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (_, _, ann):
        lease = await ann.lease()
        give: Callable[[int], Message] = lambda number: LeaseReturn(  # noqa: E731
            id=number, lease_id=lease.lease_id, reason="out of memory"
        )
        assert not (await ann.ask(give, Acknowledged)).duplicate
        assert (await ann.ask(give, Acknowledged)).duplicate
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(ann.signed_work(lease))
        assert refusal.value.code == "returned-lease"
        assert (await ann.lease()).unit_id == lease.unit_id

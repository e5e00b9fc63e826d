"""Faults planted into the real code: in one small, rough story each of them breaks an invariant.

Without a fault, the same story breaks none: ``test_the_story_breaks_nothing``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio
from msgspec import structs

from barnraise.coordinator import core as coordinator_core
from barnraise.coordinator import deadlines, scheduler, sessions, state
from barnraise.coordinator.snapshot import Fold
from barnraise.node import attend, generate, versions
from barnraise.node import core as node_core
from barnraise.protocol import gossip_shards, shards, wire
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.messages import Acknowledged, HeadPush, Manifest, RolloutSubmission
from barnraise.simulation.churn import Planned
from barnraise.simulation.invariants import Broken, Invariants
from barnraise.simulation.run import Outcome, scratch_folder, simulate
from barnraise.simulation.scenario import Scenario, Swarm, Work
from barnraise.simulation.traits import identity_of
from barnraise.simulation.world import World

SEED = 11
SWARM = Scenario(
    swarm=Swarm(nodes=5, hours=0.027, arrive_s=1, model_bytes=8192, shard_bytes=2048),
    work=Work(unit_s=6, load_s=0.5, learn_s=1, units_per_version=0.8, max_lag=1, timeout_s=30, deadline_s=45),
)
HONEST = ("ann", "bob", "cid", "dan", "fay")
STORY = [
    Planned(20.0, "crash", ("bob",)),
    Planned(35.0, "coordinator-crash"),
    Planned(37.0, "coordinator-return"),
    Planned(60.0, "partition", ("cid",)),
    Planned(75.0, "heal", ("cid",)),
]


async def strangers(world: World) -> None:
    """A forger signs wrongly, a spoiler bends shards, a stranger publishes a version."""
    await world.join("eve", cheat="garbage")
    for name in ("mallory", "mike", "moe"):
        await world.join(name, corrupt=True)
    for name in HONEST:
        await world.join(name)
    await world.until(lambda: world.head >= 1, every_s=0.5)
    hub, node = world.hub, world.nodes["ann"]
    assert hub is not None
    assert hub.head is not None
    named = wire.decode(hub.head.payload, Manifest)
    forged = structs.replace(named, version=named.version + 1, patches=())
    hub.by_key[node.key].session.push(HeadPush(head=sign(forged, identity_of(SEED, "stranger"))))


def play(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    eve = identity_of(SEED, "eve").public_key

    def badly(payload: Any, identity: Any) -> Any:
        signed = sign(payload, identity)
        forges = isinstance(payload, RolloutSubmission) and identity.public_key == eve
        return structs.replace(signed, signature=bytes(64)) if forges else signed

    monkeypatch.setattr(generate, "sign", badly)
    checks = Invariants(wait_s=40.0)
    with scratch_folder() as folder:  # in main memory: every event is synced to the disk
        return simulate(
            *(SWARM, SEED, folder), acts=STORY, watch=[checks.watch, strangers], final=[checks.final]
        )


def test_the_story_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = play(monkeypatch)
    assert outcome.error is None
    assert outcome.facts["version"] >= 3  # else it tells little


def unchecked(signed: Any, signer: Any, blocks: bool = False) -> Any:
    return wire.decode(signed.payload, RolloutSubmission)


def skip_the_signature_of_submissions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "open_submission", unchecked)


def credit_twice(patch: pytest.MonkeyPatch) -> None:
    right = state.note_verdict

    def twice(node: Any, submission: Any, event: Any) -> None:
        right(node, submission, event)
        node.credit += event.credit

    patch.setattr(state, "note_verdict", twice)


def forget_leases_on_restart(patch: pytest.MonkeyPatch) -> None:
    right = coordinator_core.Core._fold_on

    def forgetful(self: Any, fold: Any, note: Any) -> Any:
        folded = right(self, fold, note)
        folded.state.leases.clear()
        for node in folded.state.nodes.values():
            node.leases.clear()
        return folded

    patch.setattr(coordinator_core.Core, "_fold_on", forgetful)


def forward_unverified_shards(patch: pytest.MonkeyPatch) -> None:
    for module in (gossip_shards, shards):
        patch.setattr(module, "check_shard", lambda data, digest: True)


def accept_an_unsigned_manifest(patch: pytest.MonkeyPatch) -> None:
    for module in (attend, versions):
        patch.setattr(
            module, "check_manifest", lambda signed, spec, run_id: wire.decode(signed.payload, Manifest)
        )


def acknowledge_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    right = sessions.take_in

    async def later(*arguments: Any) -> None:
        await trio.sleep(1)
        await right(*arguments)

    async def hasty(core: Any, message: Any, *rest: Any) -> Acknowledged:
        trio.lowlevel.spawn_system_task(later, core, message, *rest)
        return Acknowledged(id=message.id, duplicate=False)

    patch.setattr(sessions, "take_in", hasty)


def keep_used_work_in_the_pool(patch: pytest.MonkeyPatch) -> None:
    right = state.leave_pool

    def stays(folded: Any, submission_id: bytes, status: Any) -> None:
        if status != "training":
            right(folded, submission_id, status)

    patch.setattr(state, "leave_pool", stays)


def train_beyond_the_lag(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(coordinator_core.Core, "_nothing", lambda self: Fold.empty(64))
    patch.setattr(scheduler, "form_batch", slow_batch(scheduler.form_batch))


def slow_batch(right: Callable[..., Any]) -> Callable[..., Any]:
    """Newest verdicts first: the oldest lie until they are too old."""

    def newest_first(folded: Any, spec: Any, now_ms: int) -> Any:
        pool = dict(folded.pool)
        folded.pool = dict(reversed(pool.items()))
        formed = right(folded, spec, now_ms)
        folded.pool = pool
        return formed

    return newest_first


def give_receipts_that_the_ledger_lacks(patch: pytest.MonkeyPatch) -> None:
    right = coordinator_core.ledger_log.receipt_of

    def generous(*arguments: Any) -> Any:
        receipt = right(*arguments)
        return receipt and structs.replace(receipt, credit=receipt.credit + 1)

    patch.setattr(coordinator_core.ledger_log, "receipt_of", generous)


def lend_one_unit_twice(patch: pytest.MonkeyPatch) -> None:
    right = state._lease_issued

    def lavish(folded: Any, event: Any) -> None:
        right(folded, event)
        folded.free_units.insert(0, event.lease.unit_id)

    patch.setattr(state, "_lease_issued", lavish)


def never_expire_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deadlines.Deadlines, "due", lambda self, now_ms, spared: [])


def remember_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "_forget", lambda folded, before: None)


def loop_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node_core, "next_wake", lambda decided, now: now + 0.004)


def refuse_work_in_time(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RefusedError("unknown-lease", "planted")

    patch.setattr(sessions, "check_lease", refuse)


def never_lend(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "decide_lease", lambda *_: scheduler.Wait("planted", 1000))


def lose_the_payload(patch: pytest.MonkeyPatch) -> None:
    async def careless(core: Any, message: Any, terms: Any, event: Any, name: str) -> Acknowledged:
        await core.record([event])
        return Acknowledged(id=message.id, duplicate=False)

    patch.setattr(sessions, "take_in", careless)


FAULTS: Sequence[tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = (
    (skip_the_signature_of_submissions, {"submission-signed"}),
    (credit_twice, {"credit-conserved"}),
    (forget_leases_on_restart, {"restart-forgets-nothing"}),
    (forward_unverified_shards, {"shards-verified", "version-signed", "waiting-bounded"}),
    (accept_an_unsigned_manifest, {"version-signed"}),
    (acknowledge_before_it_is_durable, {"acknowledged-kept"}),
    (keep_used_work_in_the_pool, {"used-once"}),
    (train_beyond_the_lag, {"within-lag"}),
    (give_receipts_that_the_ledger_lacks, {"receipts-match"}),
    (lend_one_unit_twice, {"lent-once"}),
    (never_expire_leases, {"leases-expire"}),
    (remember_for_ever, {"memory-bounded"}),
    (loop_without_end, {"no-busy-loop"}),
    (refuse_work_in_time, {"lease-honoured"}),
    (never_lend, {"waiting-bounded"}),
    (lose_the_payload, {"stored-with-payload"}),
)


@pytest.mark.parametrize(("plant", "names"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_breaks_an_invariant(
    plant: Callable[[pytest.MonkeyPatch], None],
    names: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    error = play(monkeypatch).error
    assert isinstance(error, Broken), error
    assert error.name in names, error

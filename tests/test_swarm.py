"""Stories of whole swarms in virtual time: everything is real but the wire and the processes.

Whatever happens in a story, ``swarming`` audits at its end: the exported ledger and all
nodes' receipts agree, credit is conserved, and no unit is trained on twice or too late.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from cheats import (
    AnswerWriter,
    CherryPicker,
    Copier,
    Greedy,
    LogprobLiar,
    OtherModel,
    OwnNoise,
    Paced,
    RewardLiar,
    Shifter,
    StaleWeights,
    Truncator,
)
from swarm_support import Audit, make_model, swarming

from barnraise.protocol import ledger

Clock = trio.testing.MockClock

WEIGHTS = {"toploc-exponents", "toploc-mantissa-mean", "toploc-mantissa-median"}
DRAWS = {"sampling-margin", "sampling-mean"}
LOGPROBS = {"logprob-mean", "logprob-max"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("swarm") / "model")


async def cheated(folder: Path, model: Path, cheat: Callable[[Paced], Paced], versions: int = 2) -> Audit:
    """Two honest nodes and a cheat, who may look at the first; everyone stays to the end."""
    async with swarming(folder, model, versions=versions) as swarm:
        honest = Paced(1.0)
        await swarm.join("ann", honest)
        await swarm.join("ben", Paced(1.5))
        await swarm.join("eve", cheat(honest))
        await swarm.finish()
    audit = swarm.audit
    assert audit is not None
    for name in ("ann", "ben"):
        assert audit.verdicts[name].keys() == {"all"}
        assert audit.balances[name] > 0
    return audit


def earns_nothing(audit: Audit, *checks: set[str]) -> None:
    """The cheat was judged, every time against it, and by these checks alone."""
    found = audit.verdicts["eve"]
    assert found
    assert found.keys() <= set().union(*checks)
    assert audit.balances["eve"] == 0


async def test_versions_rise_and_each_rollout_is_used_once_and_in_time(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    async with swarming(tmp_path, model, learn_s=2.0, versions=6) as swarm:
        for number in range(3):
            await swarm.join(f"node-{number}", Paced(0.5 + number))
        await swarm.finish()
        rewards = [reward for _, reward in swarm.state()["rewards"]]
    audit = swarm.audit
    assert audit is not None
    assert [entry.version for entry in audit.of(ledger.VersionPublished)] == list(range(7))
    lags = {job.version - 1 - part.lease.policy_version for job in swarm.learner.jobs for part in job.parts}
    assert max(lags) >= 1  # nodes did not wait for the learner
    assert len(rewards) == 6
    assert all(credit > 0 for credit in audit.balances.values())
    assert set().union(*audit.verdicts.values()) == {"all"}


async def test_another_model_is_caught_by_its_proofs(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    other = make_model(tmp_path / "other", seed=1)
    earns_nothing(await cheated(tmp_path, model, lambda _: OtherModel(other)), WEIGHTS)


async def test_a_node_that_keeps_stale_weights_earns_nothing_with_them(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    async with swarming(tmp_path, model, versions=5) as swarm:
        await swarm.join("ann", Paced(1.0))
        await swarm.join("eve", StaleWeights(1.0))
        await swarm.finish()
    audit = swarm.audit
    assert audit is not None
    versions = {entry.lease_id: entry.policy_version for entry in audit.of(ledger.LeaseIssued)}
    eve = swarm.members["eve"].identity.public_key
    judged = [entry for entry in audit.of(ledger.Judged) if entry.node == eve]
    stale = [entry for entry in judged if versions[entry.lease_id] > 0]
    assert stale
    assert {entry.check for entry in stale} <= WEIGHTS | DRAWS | LOGPROBS
    assert all(entry.accepted for entry in judged if versions[entry.lease_id] == 0)  # those were honest
    assert audit.verdicts["ann"].keys() == {"all"}


@pytest.mark.parametrize("cheat", [Greedy, OwnNoise, CherryPicker, AnswerWriter, Shifter])
async def test_tokens_that_the_lease_did_not_draw_are_caught_by_the_sampling_check(
    tmp_path: Path, model: Path, autojump_clock: Clock, cheat: type[Paced]
) -> None:
    earns_nothing(await cheated(tmp_path, model, lambda _: cheat()), DRAWS)


async def test_a_copier_is_caught_by_the_proofs_that_it_copied(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    earns_nothing(await cheated(tmp_path, model, lambda honest: Copier(honest, prove=False)), WEIGHTS)


async def test_a_copier_that_makes_proofs_of_its_own_is_caught_by_the_sampling_check(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    earns_nothing(await cheated(tmp_path, model, lambda honest: Copier(honest, prove=True)), DRAWS)


async def test_completions_cut_short_are_caught(tmp_path: Path, model: Path, autojump_clock: Clock) -> None:
    earns_nothing(await cheated(tmp_path, model, lambda _: Truncator(claim_end=False)), {"termination"})


async def test_completions_ended_early_are_caught_by_the_sampling_check(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    # Where the policy ended at once, the claimed end is a second one.
    caught = {*DRAWS, "early-eos"}
    earns_nothing(await cheated(tmp_path, model, lambda _: Truncator(claim_end=True)), caught)


async def test_claimed_log_probabilities_must_be_the_policys(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    earns_nothing(await cheated(tmp_path, model, lambda _: LogprobLiar()), LOGPROBS)


async def test_a_node_that_sends_rewards_is_refused_and_gains_nothing(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    audit = await cheated(tmp_path, model, lambda _: RewardLiar())
    assert not audit.verdicts["eve"]  # nothing of it was ever stored
    assert audit.balances["eve"] == 0


async def test_a_minute_without_the_coordinator_heals(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    async with swarming(tmp_path, model, versions=4) as swarm:
        members = [await swarm.join(name, Paced(1.0)) for name in ("ann", "ben")]
        coordinator = swarm.run.identity.peer_id
        await swarm.until(lambda: swarm.head >= 1)
        for member in members:
            swarm.memory.partition(coordinator, member.peer_id)
        await trio.sleep(60)
        before = swarm.head
        assert all(not member.tree["connected"] for member in members)
        for member in members:
            swarm.memory.heal(coordinator, member.peer_id)
        await swarm.until(lambda: swarm.head > before)
        await swarm.finish()
        assert [member.code for member in members] == [0, 0]
        assert not [n for member in members for n in member.tree["notices"] if n["level"] == "error"]
    audit = swarm.audit
    assert audit is not None
    assert set().union(*audit.verdicts.values()) == {"all"}


async def test_a_node_that_leaves_in_the_middle_of_a_unit_costs_that_unit_alone(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    async with swarming(tmp_path, model, versions=3) as swarm:
        await swarm.join("ann", Paced(1.0))
        leaver = await swarm.join("leaver", Paced(20.0))
        vanisher = await swarm.join("vanisher", Paced(20.0))
        await swarm.until(lambda: {m.tree["state"] for m in (leaver, vanisher)} == {"generating"})
        assert leaver.handle is not None
        await leaver.handle.commands["leave"]({})
        swarm.memory.crash(vanisher.peer_id)
        vanisher.scope.cancel()
        await leaver.ended.wait()
        assert leaver.code == 0
        await swarm.finish()
        await trio.sleep(swarm.run.spec.rollout.deadline_s)  # of what vanished with its node
    audit = swarm.audit
    assert audit is not None
    nodes = {name: member.identity.public_key for name, member in swarm.members.items()}
    leases = {entry.lease_id: entry for entry in audit.of(ledger.LeaseIssued)}
    closed = [(leases[entry.lease_id].node, entry.reason) for entry in audit.of(ledger.LeaseClosed)]
    assert closed.count((nodes["leaver"], "returned")) == 1
    assert closed.count((nodes["vanisher"], "expired")) == 1
    assert audit.verdicts["leaver"] == audit.verdicts["vanisher"] == {}
    assert audit.verdicts["ann"].keys() == {"all"}


async def test_every_verdict_reaches_its_node_as_a_receipt_that_the_ledger_confirms(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    async with swarming(tmp_path, model, versions=3) as swarm:
        for name, engine in {"ann": Paced(1.0), "ben": Paced(2.0), "eve": Greedy(1.0)}.items():
            await swarm.join(name, engine)
        await swarm.finish()
        shown = {name: member.tree for name, member in swarm.members.items()}
    audit = swarm.audit
    assert audit is not None
    for name, receipts in audit.receipts.items():
        assert len(receipts) == audit.verdicts[name].total() > 0
        assert sum(receipt.credit for receipt in receipts) == audit.balances[name] == shown[name]["credit"]


def test_the_same_seed_gives_the_same_ledger(tmp_path: Path, model: Path) -> None:
    def ledger_of(folder: Path, seed: int) -> list[ledger.LedgerEntry]:
        async def story() -> Audit:
            async with swarming(folder, model, seed=seed, versions=3) as swarm:
                for number, engine in enumerate((Paced(1.0), Paced(1.3), Greedy(0.7))):
                    await swarm.join(f"node-{number}", engine)
                await swarm.finish()
            assert swarm.audit is not None
            return swarm.audit

        scheduling = trio._core._run  # type: ignore[attr-defined]
        scheduling._hypothesis_plugin_setup()  # trio's own way to an order that repeats
        scheduling._r.seed(seed)
        folder.mkdir()
        return trio.run(story, clock=trio.testing.MockClock(autojump_threshold=0)).entries

    first, again, other = (
        ledger_of(tmp_path / name, seed) for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert first != other

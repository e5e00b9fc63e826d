"""Faults planted into what lends, judges and adds up blocks: each breaks an invariant in one rough story.

Without a fault, the same story breaks none: ``test_the_story_breaks_nothing``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs

from barnraise.coordinator import (
    block_belt,
    block_desk,
    block_fold,
    block_scheduler,
    deadlines,
    learn_belt,
    server,
)
from barnraise.coordinator import core as coordinator_core
from barnraise.coordinator.block_events import RoundFormed
from barnraise.coordinator.scheduler import Wait
from barnraise.protocol.errors import RefusedError
from barnraise.simulation.churn import Planned
from barnraise.simulation.invariants import Broken, Invariants
from barnraise.simulation.run import Outcome, scratch_folder, simulate
from barnraise.simulation.scenario import Blocks, Scenario, Swarm, Work

SEED = 4
SWARM = Scenario(
    phase="blocks",
    swarm=Swarm(nodes=5, hours=0.045, arrive_s=1, model_bytes=4096, shard_bytes=2048),
    work=Work(unit_s=12, unit_spread=0.5, load_s=0.5, learn_s=1, verify_s=0.3, timeout_s=30, deadline_s=45),
    blocks=Blocks(places=1.2, quorum=0.34, round_s=30, segments=4, weights=32),
)
NAMES = tuple(f"n{number:04d}" for number in range(5))
STORY = [
    *(Planned(0.1 * number, "join", (name,)) for number, name in enumerate(NAMES)),
    Planned(24.0, "crash", NAMES[:1]),
    Planned(34.0, "coordinator-crash"),
    Planned(36.0, "coordinator-return"),
    Planned(50.0, "rejoin", NAMES[:1]),
    Planned(60.0, "partition", NAMES[1:3]),
    Planned(92.0, "heal", NAMES[1:3]),
    Planned(110.0, "power-cut", NAMES[3:4]),
    Planned(125.0, "rejoin", NAMES[3:4]),
]


def play() -> Outcome:
    checks = Invariants(wait_s=60.0)
    with scratch_folder() as folder:  # in main memory: every event is synced to the disk
        return simulate(SWARM, SEED, folder, acts=STORY, watch=[checks.watch], final=[checks.final])


def test_the_story_breaks_nothing() -> None:
    outcome = play()
    assert outcome.error is None
    assert outcome.facts["version"] >= 4  # else it tells little


def lend_a_place_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_fold.Blocks, "reserved", lambda self, version: set(self.accepted))


def lend_one_block_to_a_node_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_fold.Blocks, "blocks_of", lambda self, node, version: set())


def form_a_round_before_its_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_scheduler, "round_ends", lambda state, spec: state.blocks.opened_at)


def form_a_round_of_less_than_a_quorum(patch: pytest.MonkeyPatch) -> None:
    right = learn_belt.form_round

    def hasty(state: Any, spec: Any, now_ms: int) -> Any:
        return right(state, structs.replace(spec, contributors=1, quorum=1), now_ms)

    patch.setattr(learn_belt, "form_round", hasty)


def never_form_a_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(learn_belt, "form_round", lambda state, spec, now_ms: None)


def leave_accepted_work_out(patch: pytest.MonkeyPatch) -> None:
    right = learn_belt.form_round

    def less(state: Any, spec: Any, now_ms: int) -> Any:
        formed = right(state, spec, now_ms)
        filled = Counter() if formed is None else Counter(place[0] for place in state.blocks.accepted)
        if formed is None or now_ms < block_scheduler.round_ends(state, spec) or filled[1] <= spec.quorum:
            return formed
        return structs.replace(formed, submissions=formed.submissions[:-1])  # one of block 1

    patch.setattr(learn_belt, "form_round", less)


def use_differences_of_the_round_before(patch: pytest.MonkeyPatch) -> None:
    right, before = learn_belt.form_round, list[bytes]()

    def thrifty(state: Any, spec: Any, now_ms: int) -> Any:
        formed = right(state, spec, now_ms)
        if formed is None:
            return None
        both = RoundFormed(
            version=formed.version, submissions=(*before, *formed.submissions), at_ms=formed.at_ms
        )
        before[:] = formed.submissions
        return both

    def anything(state: Any, event: Any) -> None:
        for item in event.submissions:
            state.blocks.work[item].status = "training"
        state.blocks.round = event

    patch.setattr(learn_belt, "form_round", thrifty)
    patch.setattr(block_fold, "_formed", anything)


def delete_an_accepted_difference(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_belt, "keep_delta", block_belt.drop_unit)


def accept_without_doing_anything_again(patch: pytest.MonkeyPatch) -> None:
    right = block_belt.drawn
    patch.setattr(block_belt, "drawn", lambda draw, count, depth: right(draw, count, 1))


def do_the_first_segments_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_belt, "drawn", lambda draw, count, depth: tuple(range(min(count, depth))))


def credit_a_unit_twice(patch: pytest.MonkeyPatch) -> None:
    right = block_fold._credit

    def twice(state: Any, node: Any, credit: int, at_ms: int) -> None:
        right(state, node, credit, at_ms)
        node.credit += credit

    patch.setattr(block_fold, "_credit", twice)


def forget_block_leases_on_restart(patch: pytest.MonkeyPatch) -> None:
    right = coordinator_core.Core._fold_on

    def forgetful(self: Any, fold: Any, note: Any) -> Any:
        folded = right(self, fold, note)
        folded.state.blocks.leases.clear()
        folded.state.blocks.held.clear()
        return folded

    patch.setattr(coordinator_core.Core, "_fold_on", forgetful)


def never_expire_block_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deadlines.block_scheduler, "expired", lambda *_: [])


def take_a_place_away_too_early(patch: pytest.MonkeyPatch) -> None:
    right = block_belt.BlockBelt._fetch

    async def impatient(self: Any, key: bytes, unit: Any, item: Any, *rest: Any) -> Any:
        if not item.overdue:
            overdue = block_belt.BlockOverdue(submission_id=key, at_ms=self.core.now_ms())
            await self.core.record([overdue])
        return await right(self, key, unit, item, *rest)

    patch.setattr(block_belt.BlockBelt, "_fetch", impatient)


def refuse_block_units_in_time(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RefusedError("unknown-lease", "planted")

    patch.setattr(block_desk, "check_lease", refuse)


def never_lend_a_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_scheduler, "decide_block_lease", lambda *_: Wait("planted", 1000))


def never_judge(patch: pytest.MonkeyPatch) -> None:
    class Idle(server.BlockBelt):
        def _next(self) -> None:
            return None

    patch.setattr(server, "BlockBelt", Idle)


FAULTS: Sequence[tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = (
    (lend_a_place_twice, {"lent-once", "place-lent-once"}),
    (lend_one_block_to_a_node_again, {"block-once"}),
    (form_a_round_before_its_time, {"round-quota"}),
    (form_a_round_of_less_than_a_quorum, {"round-quota"}),
    (never_form_a_round, {"round-closes"}),
    (leave_accepted_work_out, {"round-whole"}),
    (use_differences_of_the_round_before, {"difference-once"}),
    (delete_an_accepted_difference, {"difference-kept", "round-closes"}),
    (accept_without_doing_anything_again, {"judged-as-drawn"}),
    (do_the_first_segments_again, {"judged-as-drawn"}),
    (credit_a_unit_twice, {"credit-conserved"}),
    (forget_block_leases_on_restart, {"restart-forgets-nothing"}),
    (never_expire_block_leases, {"leases-expire"}),
    (take_a_place_away_too_early, {"place-lent-once"}),
    (refuse_block_units_in_time, {"lease-honoured"}),
    (never_lend_a_place, {"waiting-bounded"}),
)


@pytest.mark.parametrize(("plant", "names"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_breaks_an_invariant(
    plant: Callable[[pytest.MonkeyPatch], None],
    names: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    error = play().error
    assert isinstance(error, Broken), error
    assert error.name in names, error

"""trio's loop as simulations run it: the same order of events as trio's own, and scopes that end as ever."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from barnraise.simulation import quick_trio
from barnraise.simulation.determinism import run_virtual
from barnraise.simulation.run import simulate
from barnraise.simulation.scenario import Scenario, Swarm, Work


def test_this_is_the_trio_that_it_follows() -> None:
    assert version("trio").startswith(quick_trio.FOLLOWS), "compare quick_trio with the new _run.py"


def test_event_logs_are_those_of_trio_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(swarm=Swarm(nodes=3, hours=0.03), work=Work(unit_s=15, load_s=1, learn_s=2))
    quick = simulate(scenario, 3, tmp_path / "quick")
    monkeypatch.setattr(quick_trio, "FOLLOWS", "another")
    slow = simulate(scenario, 3, tmp_path / "slow")
    assert quick.error is None
    assert quick.events > 20
    assert quick.digest == slow.digest


def test_what_was_replaced_is_there_again_afterwards() -> None:
    before = trio.current_time, trio.CancelScope.__enter__, trio.CancelScope.deadline

    async def story() -> None:
        await trio.sleep(1)

    run_virtual(1, story)
    assert before == (trio.current_time, trio.CancelScope.__enter__, trio.CancelScope.deadline)


def test_scopes_nest_move_their_deadlines_and_end() -> None:
    async def story() -> list[float]:
        at: list[float] = []
        with trio.move_on_after(10) as outer:
            with trio.move_on_after(3) as inner:
                inner.deadline += 1
                await trio.sleep_forever()
            at.append(trio.current_time())
            with trio.CancelScope() as late:
                late.deadline = 20
                late.deadline = 30
                await trio.sleep(1)
            with trio.CancelScope(shield=True, deadline=12):
                await trio.sleep_forever()
            at.append(trio.current_time())
            await trio.sleep(1)
        assert inner.cancelled_caught
        assert outer.cancelled_caught
        assert not late.cancelled_caught
        with trio.CancelScope() as called:
            called.cancel()
            await trio.sleep(1)
        assert called.cancelled_caught
        with trio.move_on_after(0) as over:
            await trio.lowlevel.checkpoint()
        assert over.cancelled_caught
        return [*at, trio.current_time()]

    assert run_virtual(1, story) == [4, 12, 12]


def test_errors_and_cancellations_leave_nurseries_as_ever() -> None:
    async def story() -> None:
        async def fails() -> None:
            await trio.sleep(2)
            raise LookupError("lost")

        async def both() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fails)
                nursery.start_soon(trio.sleep_forever)

        async def too_slow() -> None:
            with trio.fail_after(0.5):
                await wait_all_tasks_blocked(0.01)
                await trio.Event().wait()

        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert caught.group_contains(LookupError)
        with trio.move_on_after(1), pytest.raises(trio.TooSlowError):
            await too_slow()
        with pytest.raises(TypeError, match="unrecognized yield"):
            await _Foreign()

    run_virtual(1, story)


class _Foreign:
    def __await__(self):  # type: ignore[no-untyped-def]
        yield "of another loop"


def test_an_exception_of_the_story_comes_out() -> None:
    async def story() -> None:
        await trio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(1, story)

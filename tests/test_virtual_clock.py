"""Virtual time of a simulation: jumps, timers, sleeps that cost little and can be cancelled as ever."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from barnraise.simulation.determinism import run_virtual
from barnraise.simulation.virtual_clock import VirtualClock


def test_a_day_of_sleep_takes_no_time() -> None:
    async def story() -> float:
        await trio.sleep(86_400)
        return trio.current_time()

    assert run_virtual(1, story) == 86_400


def test_sleepers_wake_at_their_times_among_deadlines_of_trio() -> None:
    async def story() -> list[tuple[str, float]]:
        woken: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await trio.sleep(seconds)
            woken.append((name, trio.current_time()))

        async def waiter(name: str, seconds: float) -> None:
            with trio.move_on_after(seconds):
                await trio.Event().wait()
            woken.append((name, trio.current_time()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper, "c", 3)
            nursery.start_soon(waiter, "b", 2)
            nursery.start_soon(sleeper, "a", 1)
            nursery.start_soon(waiter, "d", 4)
        return woken

    assert run_virtual(1, story) == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]


async def _forever() -> None:
    await trio.sleep(float("inf"))


async def _long() -> None:
    await trio.sleep_until(1000)


@pytest.mark.parametrize("rest", [_forever, _long], ids=["forever", "long"])
def test_a_sleep_is_cancelled_by_a_deadline(rest: Callable[[], Awaitable[None]]) -> None:
    async def story() -> tuple[bool, float]:
        with trio.move_on_after(7) as scope:
            await rest()
        await trio.sleep(0)  # what was left of the cancelled sleep wakes nobody
        await trio.sleep(2000)
        return scope.cancelled_caught, trio.current_time()

    assert run_virtual(1, story) == (True, 2007)


def test_a_sleep_of_nothing_sees_a_cancellation() -> None:
    async def story() -> bool:
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio.sleep(0)
        return scope.cancelled_caught

    assert run_virtual(1, story)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_no_sleep_of_a_time_that_is_none(seconds: float) -> None:
    async def story() -> None:
        with pytest.raises(ValueError, match="must"):
            await trio.sleep(seconds)

    run_virtual(1, story)


def test_whoever_waits_for_all_others_comes_before_a_jump() -> None:
    async def story() -> float:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 50)
            await wait_all_tasks_blocked()
            at = trio.current_time()
            nursery.cancel_scope.cancel()
        return at

    assert run_virtual(1, story) == 0


def test_calls_come_in_the_order_of_their_times() -> None:
    async def story() -> list[tuple[str, float]]:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, VirtualClock)
        called: list[tuple[str, float]] = []
        for name, at in (("late", 9.0), ("first", 3.0), ("second", 3.0)):
            clock.call_at(at, lambda name=name: called.append((name, trio.current_time())))  # type: ignore[misc]
        await trio.sleep(10)
        return called

    assert run_virtual(1, story) == [("first", 3), ("second", 3), ("late", 9)]


def test_outside_of_a_simulation_trio_sleeps_as_ever() -> None:
    before = trio.sleep, trio.sleep_until

    async def story() -> None:
        assert trio.sleep is not before[0]

    run_virtual(1, story)
    assert (trio.sleep, trio.sleep_until) == before

"""trio's loop and its cancel scopes for virtual time: the same order of events for half of the price.

A third of what a simulation costs was trio's own work: a round through the operating system and
several calls of instruments for each batch of tasks, two objects for each step that carry nothing,
context managers inside of the scopes' own. What is here does the same with less, for the one case
of a simulation (one thread, no guest mode, ``VirtualClock``), and leaves every rare case to trio's
own code. It follows trio 0.35, whose functions it stands in for while a simulation runs; with another
version of trio nothing is replaced, and all is slower. Event logs are the same either way, which is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from trio._core import _run
from trio.lowlevel import enable_ki_protection

from barnraise.simulation.virtual_clock import VirtualClock

FOLLOWS = "0.35."  # the release of trio whose inner workings these are
_POLL_EVERY = 64  # rounds of the scheduler between two looks at signals (Ctrl-C) and files

_trio: Any = _run
_context: Any = _run.GLOBAL_RUN_CONTEXT
_inner: Any = trio.CancelScope
_NO_SEND = _trio._NO_SEND
_their_enter, _their_exit, _their_deadline = _inner.__enter__, _inner.__exit__, _inner.deadline


class _Nothing:
    """The outcome of a wait that gives nothing, as ``outcome.Value(None)``, but one for all."""

    __slots__ = ()

    def unwrap(self) -> None:
        return None


_NOTHING = _Nothing()


@contextmanager
def quick_trio(clock: VirtualClock) -> Iterator[None]:
    """While it lasts ``trio.run(..., clock=clock)`` runs here. For one run at a time in a process."""
    trio_: Any = trio
    if not trio_.__version__.startswith(FOLLOWS):
        yield
        return
    runner_: Any = _run.Runner
    before = trio.current_time, _trio.current_time, _trio.unrolled_run, runner_.reschedule
    trio_.current_time = _trio.current_time = clock.current_time
    _trio.unrolled_run, runner_.reschedule = _loop, _reschedule
    _inner.__enter__, _inner.__exit__ = _enter, _exit
    _inner.deadline = property(_their_deadline.fget, _set_deadline)
    clock.asks_seldom = False
    try:
        yield
    finally:
        trio_.current_time, _trio.current_time, _trio.unrolled_run, runner_.reschedule = before
        _inner.__enter__, _inner.__exit__, _inner.deadline = _their_enter, _their_exit, _their_deadline


@enable_ki_protection
def _loop(
    runner: Any,
    async_fn: Callable[..., Any],
    args: tuple[Any, ...],
    host_uses_signal_set_wakeup_fd: bool = False,
) -> Iterator[float]:
    """``trio._core._run.unrolled_run``, which yields where it wants the operating system to be asked."""
    __tracebackhide__ = True
    hooks = runner.instruments.data
    try:
        runner.entry_queue.wakeup.wakeup_on_signals()
        if "before_run" in hooks:
            runner.instruments.call("before_run")
        runner.clock.start_clock()
        runner.init_task = runner.spawn_impl(runner.init, (async_fn, args), None, "<init>", system_task=True)
        deadlines, current_time = runner.deadlines, runner.clock.current_time
        rounds = 0
        while runner.tasks:
            timeout = 0.0
            if not runner.runq:
                timeout = runner.clock.deadline_to_sleep_time(deadlines.next_deadline())
            cushion = None
            if runner.waiting_for_idle:
                cushion, _ = runner.waiting_for_idle.keys()[0]
                if cushion < timeout:
                    timeout = cushion
                else:
                    cushion = None
            if "before_io_wait" in hooks:
                runner.instruments.call("before_io_wait", timeout)
            rounds += 1
            events: Any = ()
            if timeout > 0 or not rounds % _POLL_EVERY:
                events = yield min(max(0.0, timeout), 86_400.0)
                runner.io_manager.process_events(events)
            if "after_io_wait" in hooks:
                runner.instruments.call("after_io_wait", timeout)
            heap = deadlines._heap
            due = heap and heap[0][0] <= current_time()
            if (due or not rounds % _POLL_EVERY) and deadlines.expire(current_time()):
                cushion = None
            if cushion is not None and not runner.runq and not events:
                while runner.waiting_for_idle:
                    key, task = runner.waiting_for_idle.peekitem(0)
                    if key[0] != cushion:
                        break
                    del runner.waiting_for_idle[key]
                    runner.reschedule(task)
            batch = list(runner.runq)
            runner.runq.clear()
            if len(batch) > 1:
                batch.sort(key=_age)
                _trio._r.shuffle(batch)
            while batch:
                _step(runner, batch.pop(), hooks)
    except trio.TrioInternalError:
        raise
    except BaseException as error:
        raise trio.TrioInternalError("internal error in the simulation's loop") from error
    finally:
        runner.close()
        _context.__dict__.clear()
        if runner.ki_pending:
            interrupt = KeyboardInterrupt()
            if isinstance(runner.main_task_outcome, _trio.Error):
                interrupt.__context__ = runner.main_task_outcome.error
            runner.main_task_outcome = _trio.Error(interrupt)


def _age(task: Any) -> Any:
    return task._counter


@enable_ki_protection
def _step(runner: Any, task: Any, hooks: Any) -> None:
    _context.task = task
    if "before_task_step" in hooks:
        runner.instruments.call("before_task_step", task)
    send, value = task._next_send_fn, task._next_send
    task._next_send_fn = task._next_send = None
    final: Any = None
    try:
        message = task.context.run(send, value)
    except StopIteration as stop:
        final = _trio.Value(stop.value)
    except BaseException as error:
        traceback = error.__traceback__
        for _ in range(1 + _trio.CONTEXT_RUN_TB_FRAMES):
            if traceback is not None:
                traceback = traceback.tb_next
        final = _trio.Error(error.with_traceback(traceback))
        del traceback
    if final is not None:
        runner.task_exited(task, final)
    else:
        task._schedule_points += 1
        kind = type(message)
        if kind is _trio.WaitTaskRescheduled:
            task._cancel_points += 1
            task._abort_func = message.abort_func
            if runner.ki_pending and task is runner.main_task:
                task._attempt_delivery_of_pending_ki()
            if task._cancel_status.effectively_cancelled:
                task._attempt_delivery_of_any_pending_cancel()
        elif message is _trio.CancelShieldedCheckpoint:
            runner.reschedule(task)
        elif kind is _trio.PermanentlyDetachCoroutineObject:
            runner.task_exited(task, message.final_outcome)
        else:
            runner.reschedule(task, TypeError(f"trio.run received unrecognized yield message {message!r}"))
            task._next_send_fn = task.coro.throw
    if "after_task_step" in hooks:
        runner.instruments.call("after_task_step", task)
    del _context.task


def _reschedule(self: Any, task: Any, next_send: Any = _NO_SEND) -> None:
    """``Runner.reschedule``."""
    if next_send is _NO_SEND:
        next_send = _NOTHING
    assert task._next_send_fn is None
    task._next_send_fn = task.coro.send
    task._next_send = next_send
    task._abort_func = None
    task.custom_sleep_data = None
    self.runq.append(task)
    if "task_scheduled" in self.instruments.data:
        self.instruments.call("task_scheduled", task)


@enable_ki_protection
def _enter(self: Any) -> Any:
    """``CancelScope.__enter__``."""
    if self._has_been_entered or self._cancel_called:
        return _their_enter(self)
    now = _trio.current_time()
    if self._relative_deadline != math.inf:
        self._deadline, self._relative_deadline = now + self._relative_deadline, math.inf
    deadline = self._deadline
    if now >= deadline:
        return _their_enter(self)
    task = _context.task
    around = task._cancel_status
    if around is None:
        return _their_enter(self)
    self._has_been_entered = True
    inside = self._cancel_status = _trio.CancelStatus(self)
    inside._parent = around
    around._children.add(inside)
    inside._tasks.add(task)
    around._tasks.remove(task)
    task._cancel_status = inside
    if around.effectively_cancelled:
        inside.recalculate()
    if deadline != math.inf:
        self._registered_deadline = deadline
        _context.runner.deadlines.add(deadline, self)
    return self


@enable_ki_protection
def _exit(self: Any, kind: Any, error: Any, traceback: Any) -> bool:
    """``CancelScope.__exit__``."""
    inside = self._cancel_status
    task = _context.task
    if error is not None or inside is None or task._cancel_status is not inside or len(inside._tasks) > 1:
        return bool(_their_exit(self, kind, error, traceback))
    around = inside._parent
    if around is None or inside._children or self._cancel_called or around.effectively_cancelled:
        return bool(_their_exit(self, kind, error, traceback))
    inside._tasks.clear()
    task._cancel_status = around
    around._tasks.add(task)
    around._children.remove(inside)
    inside._parent = None
    if self._registered_deadline != math.inf:
        self._registered_deadline = math.inf
        _context.runner.deadlines._active -= 1
    self._cancel_status = None
    return True  # as trio's own does without an exception


@enable_ki_protection
def _set_deadline(self: Any, deadline: float) -> None:
    """``CancelScope.deadline = ``."""
    if self._cancel_called or self._relative_deadline != math.inf or math.isnan(deadline):
        _their_deadline.fset(self, deadline)
        return
    self._deadline = deadline = float(deadline)
    before = self._registered_deadline
    if self._cancel_status is None or before == deadline:
        return
    self._registered_deadline = deadline
    deadlines = _context.runner.deadlines
    if before != math.inf:
        deadlines._active -= 1
    if deadline != math.inf:
        deadlines.add(deadline, self)

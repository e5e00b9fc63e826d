"""Who is on a unit: open leases that have not timed out, and answers that still count.

A unit is free to be lent again only when nobody is. Without this count, a late answer
that is refused would free a unit that another node has answered already, or is at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from barnraise.coordinator.state import State


def hold(state: State, unit_id: int) -> None:
    """One more is on the unit; nobody needs to be lent it."""
    if unit_id in state.free_units:
        state.free_units.remove(unit_id)
    state.cover[unit_id] = state.cover.get(unit_id, 0) + 1


def let_go(state: State, unit_id: int) -> None:
    """One less is; the last one frees it."""
    if not _drop(state, unit_id):
        state.free_units.append(unit_id)


def forget(state: State, unit_id: int) -> None:
    """An answer that was used is forgotten: one less, and the unit is done."""
    _drop(state, unit_id)


def _drop(state: State, unit_id: int) -> int:
    left = state.cover[unit_id] - 1
    if left:
        state.cover[unit_id] = left
    else:
        del state.cover[unit_id]
    return left

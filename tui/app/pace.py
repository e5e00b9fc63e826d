"""When a state is drawn: what a person waits for at once, what only counts on once in a while.

Drawing is what the app costs its machine, and a node at work changes several times a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AT_WORK = frozenset({"generating", "training", "loading", "asking", "uploading", "fetching", "waiting"})
CALM_S = 2.0  # a name that stood so long is missed when it changes; in quick turns nobody reads it
ANSWER_S = 0.5  # by then a node has pushed what a command changed

State = Mapping[str, Any]


class Pace:
    """Says of each state when it is to be shown. Times in s of one clock.

    Args:
        interval_s: at most so long after the last one shown; figures wait for it.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._shown_at = float("-inf")
        self._shown: tuple[object, ...] = ()
        self._name: object = None
        self._hurry_until = float("-inf")
        self._named_at = float("-inf")  # since when the node's state has this name

    def due(self, state: State, now: float) -> float:
        """When to show ``state``, which came at ``now``: ``now`` or later. It may be replaced until then."""
        name = state.get("state")
        stood = now - self._named_at
        changed = name != self._name
        if changed:
            self._name, self._named_at = name, now
        at_once = now < self._hurry_until or (changed and stood >= CALM_S)
        if at_once or _matters(state) != self._shown:
            return now
        return max(now, self._shown_at + self._interval_s)

    def hurry(self, now: float) -> None:
        """Somebody commands something at ``now``: what comes within ``ANSWER_S`` is shown at once."""
        self._hurry_until = now + ANSWER_S

    def show(self, state: State, now: float) -> None:
        """Note that ``state`` is shown."""
        self._shown, self._shown_at = _matters(state), now


def _matters(state: State) -> tuple[object, ...]:
    """What is never late: whether it works, why not, what it asks, what alarms."""
    name, consent, witness = state.get("state"), state.get("consent"), state.get("witness")
    suspended = state.get("suspended")
    return (
        "at work" if isinstance(name, str) and name in AT_WORK else name,
        state.get("mode"),
        state.get("run_id"),
        state.get("connected"),
        state.get("duplicate_key"),
        isinstance(consent, Mapping) and consent.get("run_id"),
        isinstance(witness, Mapping) and witness.get("alarm"),
        [each.get("reason") for each in suspended if isinstance(each, Mapping)]
        if isinstance(suspended, list)
        else None,
    )

"""Tasks and their rewards: what a prompt asks, and how an answer is scored.

Both sides derive the same task from a seed; the reward is computed by the
coordinator alone. An environment is named in the run spec and built from its
settings (a JSON object) by ``build_environment``: ``reverse``, ``mixture`` and ``length``
(``barnraise.protocol.tasks_mixed``), any generator of ``reasoning-gym`` by its name
(``chain_sum``), or whatever an installed package
offers as an entry point of the group ``barnraise.environments``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.spec import EnvironmentSpec

ENTRY_POINT_GROUP = "barnraise.environments"
MAX_DEPTH = 3


class TaskError(BarnraiseError):
    """An environment is unknown, or its settings are wrong; the text names the cure."""


@dataclass(frozen=True)
class Task:
    """One question. ``key`` lets the environment score an answer (its own JSON, never from the network).

    ``target_tokens``: how long the answer is to be, 0 for any; ``length_weight``: what a token costs
    that it is off (``barnraise.protocol.tasks_mixed``).
    """

    prompt: str
    key: str
    target_tokens: int = 0
    length_weight: float = 0.0


class Environment(Protocol):
    """A family of tasks, each determined by a 64-bit seed."""

    def task(self, seed: int, *, held_out: bool) -> Task:
        """The task of ``seed``; held-out tasks and training tasks never coincide."""

    def score(self, task: Task, answer: str) -> float:
        """Reward in [0, 1] of ``answer`` (decoded completion, special tokens removed). Never raises."""


def is_held_out(text: str) -> bool:
    """Which side of the split a task belongs to, from what it asks alone: one in eight is held out.

    Splitting by content and not by seed keeps the sides disjoint even where two
    seeds happen to draw the same task.
    """
    return hashlib.sha256(text.encode()).digest()[0] % 8 == 0


def reverse_prompt(letters: str) -> str:
    """Prompt of the ``reverse`` environment; the right answer is ``letters[::-1]``."""
    return f"r{letters}="


def copy_prompt(letters: str) -> str:
    """Prompt of the copy task, which the demo model's warm-up mixes in; the answer is ``letters``."""
    return f"c{letters}="


def build_environment(spec: EnvironmentSpec) -> Environment:
    """The environment that a run spec names.

    An installed entry point is a callable that takes the settings (a ``dict``)
    and returns an ``Environment``; it wins over a ``reasoning-gym`` generator of
    the same name. Only code that is already installed is ever loaded.

    Raises:
        TaskError: no such environment here, or settings that it cannot take.
    """
    return _build(spec.name, _settings(spec), 0)


def _build(name: str, settings: Mapping[str, Any], depth: int) -> Environment:
    if name in ("mixture", "length"):
        from barnraise.protocol.tasks_mixed import Mixture, WithLength

        if depth >= MAX_DEPTH:
            raise TaskError(f"environments are made of others no more than {MAX_DEPTH} deep")

        def inner(part: str, its: Mapping[str, Any]) -> Environment:
            return _build(part, its, depth + 1)

        if name == "mixture":
            return Mixture.from_settings(settings, inner)
        return WithLength.from_settings(settings, inner)
    if name == "reverse":
        from barnraise.protocol.tasks_reverse import Reverse

        return Reverse.from_settings(settings)
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return cast(Environment, entry.load()(dict(settings)))
        except TaskError:
            raise
        except Exception as error:  # somebody else's code: whatever it raises is about this environment
            raise TaskError(f"environment {name!r} ({entry.value}) could not be built: {error}") from error
    from barnraise.protocol.tasks_gym import build_gym

    return build_gym(name, settings)


def _settings(spec: EnvironmentSpec) -> dict[str, Any]:
    if not spec.settings.strip():
        return {}
    try:
        settings = json.loads(spec.settings)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"settings of environment {spec.name!r} are not JSON: {error}") from error
    if not isinstance(settings, Mapping):
        raise TaskError(f"settings of environment {spec.name!r} must be a JSON object such as {{}}")
    return dict(settings)

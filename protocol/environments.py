"""Tasks and their rewards: what a prompt asks, and how an answer is scored.

Both sides derive the same task from a seed; the reward is computed by the
coordinator alone. An environment is named in the run spec and built from its
settings; ``"module:attribute"`` entry points installed under the group
``barnraise.environments`` add the operator's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Task:
    """One question. ``key`` lets the environment score an answer (its own JSON, never from the network)."""

    prompt: str
    key: str


class Environment(Protocol):
    """A family of tasks, each determined by a 64-bit seed."""

    def task(self, seed: int, *, held_out: bool) -> Task:
        """The task of ``seed``; held-out tasks and training tasks never coincide."""

    def score(self, task: Task, answer: str) -> float:
        """Reward in [0, 1] of ``answer`` (decoded completion, special tokens removed). Never raises."""

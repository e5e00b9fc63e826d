"""The ``reverse`` environment: write a random lowercase string backwards.

Settings (JSON): ``letters`` (length, default 5), ``alphabet`` (how many of a-z,
default 26), ``partial`` (reward each right position instead of all or nothing,
default false). Small enough for the demo model to learn, and no supervised
answer is ever shown: only rewards.
"""

from __future__ import annotations

import hashlib
import itertools
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from barnraise.protocol.environments import Task, TaskError, is_held_out, reverse_prompt

MAX_LETTERS = 256
_ENUMERABLE = 4096


@dataclass(frozen=True)
class Reverse:
    """``Task.key`` is the string itself."""

    letters: int = 5
    alphabet: int = 26
    partial: bool = False

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Reverse:
        """Check ``settings`` and build.

        Raises:
            TaskError: an unknown setting, a value out of bounds, or so few strings
                that training or held-out tasks would not exist.
        """
        unknown = sorted(set(settings) - {"letters", "alphabet", "partial"})
        if unknown:
            raise TaskError(
                f"environment 'reverse' has no setting {unknown[0]!r}: letters, alphabet, partial"
            )
        letters = _bounded("letters", settings.get("letters", 5), 1, MAX_LETTERS)
        alphabet = _bounded("alphabet", settings.get("alphabet", 26), 2, 26)
        partial = settings.get("partial", False)
        if not isinstance(partial, bool):
            raise TaskError("setting 'partial' of environment 'reverse' must be true or false")
        environment = cls(letters, alphabet, partial)
        if alphabet**letters <= _ENUMERABLE:
            sides = {
                is_held_out("".join(word)) for word in itertools.product(environment._symbols, repeat=letters)
            }
            if len(sides) < 2:
                raise TaskError(
                    f"environment 'reverse' with {letters} letters of {alphabet} has too few strings "
                    "to hold any out: use more letters or a larger alphabet"
                )
        return environment

    @property
    def _symbols(self) -> str:
        return string.ascii_lowercase[: self.alphabet]

    def task(self, seed: int, *, held_out: bool) -> Task:
        """Draw strings from ``seed`` until one lies on the wanted side of the split."""
        for attempt in itertools.count():
            stream = _words(seed, attempt)
            text = "".join(self._symbols[next(stream) % self.alphabet] for _ in range(self.letters))
            if is_held_out(text) == held_out:
                return Task(prompt=reverse_prompt(text), key=text)
        raise AssertionError  # unreachable: both sides exist, so some attempt fits

    def score(self, task: Task, answer: str) -> float:
        """1.0 for the exact string backwards, else 0.0 (or the share of right positions)."""
        wanted = task.key[::-1]
        if not self.partial:
            return float(answer == wanted)
        right = sum(a == b for a, b in zip(answer, wanted, strict=False))
        return right / max(len(answer), len(wanted))


def _bounded(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise TaskError(f"setting {name!r} of environment 'reverse' must be an integer from {low} to {high}")
    return value


def _words(seed: int, attempt: int) -> Iterator[int]:
    """64-bit words: SHA-256 in counter mode over (seed, attempt), so that any language can draw the same."""
    for block in itertools.count():
        fields = b"".join(value.to_bytes(8, "big") for value in (seed, attempt, block))
        digest = hashlib.sha256(b"barnraise/1/reverse\0" + fields).digest()
        for start in range(0, 32, 8):
            yield int.from_bytes(digest[start : start + 8], "big")

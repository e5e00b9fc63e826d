"""Any generator of ``reasoning-gym`` (Apache-2.0) as an environment.

Settings (JSON) are the generator's own (``{"min_terms": 2, "max_terms": 2}``)
and two of ours: ``scoring`` (``"native"``, the generator's scorer, or
``"exact"``, equality with its reference answer) and ``reasoning_gym`` (the
version that both sides must have, since another may draw other tasks).

Answers come from strangers. Some generators' scorers hand the answer to
``eval`` or to sympy's parser, which is the same thing: those are refused unless
scored exactly.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

from barnraise.protocol.environments import Task, TaskError, is_held_out
from barnraise.protocol.limits import bounded

MAX_TEXT = 256 * 1024
MAX_ANSWER = 4096
SCORE_SECONDS = 2.0
DRAW_SECONDS = 20.0  # the settings come from the run: they may ask for more than anybody has
WORK_BYTES = 2 * 1024**3
_DRAWS = 512  # the rarer side is one task in eight: (7/8)^512 is 1e-30

_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify|parse_latex|__import__)\s*\(")
# Read by hand in 0.1.25: these evaluate their own problem text, never the answer.
_REVIEWED = frozenset({"basic_arithmetic", "bitwise_arithmetic", "number_sorting", "propositional_logic"})
# 0.1.25: draw different tasks in different processes (iteration over sets), so two sides could not agree.
_NOT_REPRODUCIBLE = frozenset(
    {
        "codeio",
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "list_functions",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
# 0.1.25: their scorers pay in full for answers that take no work ("nan"; any text at all; 0 to any coin).
_GULLIBLE = frozenset({"coin_flip", "complex_arithmetic", "game_of_life_halting"})
_NUMBER = re.compile(r"(?:(?<![\w).])-)?\d[\d,]*(?:\.\d+)?")
_OPEN, _CLOSE = (re.compile(tag, re.IGNORECASE | re.ASCII) for tag in ("<answer>", "</answer>"))


@dataclass(frozen=True)
class Gym:
    """``Task.key`` is the generator's seed as JSON; question and reference answer are drawn again from it."""

    name: str
    config: Mapping[str, Any]
    scoring: Literal["native", "exact"]
    draw: Any = field(repr=False, compare=False)  # seed -> (dataset, entry), cached

    def task(self, seed: int, *, held_out: bool) -> Task:
        """Draw tasks from ``seed`` until one lies on the wanted side of the split.

        Raises:
            TaskError: none did; the generator's settings allow too few questions.
        """
        for attempt in range(_DRAWS):
            drawn = _generator_seed(seed, attempt)
            entry = self.draw(drawn)[1]
            if is_held_out(entry["question"]) == held_out:
                return Task(prompt=entry["question"], key=json.dumps({"seed": drawn}))
        side = "held-out" if held_out else "training"
        raise TaskError(f"environment {self.name!r} has no {side} tasks: widen its settings")

    def score(self, task: Task, answer: str) -> float:
        """The generator's own score of the extracted answer, clamped to [0, 1]; 0 where its scorer fails."""
        try:
            dataset, entry = self.draw(int(json.loads(task.key)["seed"]))
            reference = str(entry["answer"])
            with bounded("scoring", seconds=SCORE_SECONDS, memory=WORK_BYTES):
                given = extract_answer(answer, reference)
                if given is None:
                    return 0.0
                if self.scoring == "exact":
                    return float(given == reference.strip())
                score = float(dataset.score_answer(given, entry))
        except Exception:  # a scorer may raise anything at all on a stranger's answer
            return 0.0
        return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


def build_gym(name: str, settings: Mapping[str, Any]) -> Gym:
    """Check that the generator exists, takes ``settings`` and scores safely.

    Raises:
        TaskError: it does not; or ``reasoning-gym`` is missing or of another version; or
            one task takes absurdly long or much memory (``LimitError`` when a later one does).
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError(
            f"environment {name!r} is not known here: 'reverse', an installed entry point, or a generator "
            f"of reasoning-gym, which is not installed ({error}): pip install reasoning-gym"
        ) from error
    installed = version("reasoning-gym")
    config = dict(settings)
    wanted = config.pop("reasoning_gym", installed)
    scoring = config.pop("scoring", "native")
    if name not in DATASETS or name == "composite":
        raise TaskError(
            f"environment {name!r} is not known here: 'reverse', an installed entry point, or a generator of "
            f"reasoning-gym {installed} such as 'chain_sum'"
        )
    if name in _NOT_REPRODUCIBLE:
        raise TaskError(f"environment {name!r} draws different tasks on different machines: choose another")
    if wanted != installed:
        raise TaskError(
            f"this run needs reasoning-gym {wanted}, here is {installed}: pip install reasoning-gym=={wanted}"
        )
    if scoring not in ("native", "exact"):
        raise TaskError("setting 'scoring' must be 'native' or 'exact'")
    if {"seed", "size"} & config.keys():
        raise TaskError(f"environment {name!r} takes no 'seed' or 'size': tasks are drawn from the run")
    if scoring == "native" and name in _GULLIBLE:
        raise TaskError(
            f"the scorer of {name!r} rewards answers that are not right: "
            'set {"scoring": "exact"} or choose another environment'
        )
    if scoring == "native" and name not in _REVIEWED and _evaluates_answers(DATASETS[name][0]):
        raise TaskError(
            f"the scorer of {name!r} may run a stranger's answer as code: "
            'set {"scoring": "exact"} or choose another environment'
        )

    @functools.lru_cache(maxsize=64)
    def draw(seed: int) -> tuple[Any, Mapping[str, Any]]:
        with bounded(f"one task of environment {name!r}", seconds=DRAW_SECONDS, memory=WORK_BYTES):
            dataset = reasoning_gym.create_dataset(name, size=1, seed=seed, **config)
            return dataset, dataset[0]

    try:
        draw(0)
    except Exception as error:  # generators validate by assert, ValueError, TypeError, ...
        reason = str(error) or type(error).__name__
        raise TaskError(f"environment {name!r} cannot be built from its settings: {reason}") from error
    return Gym(name, config, scoring, draw)


def extract_answer(text: str, reference: str) -> str | None:
    """What ``text`` gives as its answer, or ``None``.

    The last ``<answer>...</answer>`` (the innermost, if they are nested) if there is one;
    else, where the reference answer is a number, the last number (thousands separators
    dropped); else the whole text, stripped. Longer than ``MAX_ANSWER`` characters is no answer.
    """
    text = text[-MAX_TEXT:]
    text = _tagged(text)
    given: str = text.strip()
    if _NUMBER.fullmatch(reference.strip()):
        numbers = _NUMBER.findall(given[-MAX_ANSWER:].replace("\u2212", "-"))
        given = numbers[-1].replace(",", "") if numbers else ""
    return given if 0 < len(given) <= MAX_ANSWER else None


def _tagged(text: str) -> str:
    """What the last closed tag holds; all of ``text`` without one. In linear time, whatever the text."""
    closes = [match.start() for match in _CLOSE.finditer(text)]
    if not closes:
        return text
    last_open = -1
    for match in _OPEN.finditer(text, 0, closes[-1]):
        last_open = match.end()
    if last_open < 0:
        return text
    return text[last_open : next(close for close in closes if close >= last_open)]


def _generator_seed(seed: int, attempt: int) -> int:
    # 31 bits: some generators hand their seed to libraries that take no more.
    fields = seed.to_bytes(8, "big") + attempt.to_bytes(8, "big")
    digest = hashlib.sha256(b"barnraise/1/reasoning-gym\0" + fields).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _evaluates_answers(dataset_class: type) -> bool:
    """Whether the module that scores mentions a way to run text; unreadable source counts as yes."""
    scorer = inspect.getmodule(dataset_class.score_answer)  # type: ignore[attr-defined]
    own = sys.modules.get(dataset_class.__module__)
    try:
        return any(_EVALUATES.search(inspect.getsource(module)) for module in (scorer, own) if module)
    except (OSError, TypeError):
        return True

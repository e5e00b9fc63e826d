"""The scorer in a child process: ``python -m barnraise.coordinator.scoring_child``.

Answers come from strangers, scorers from anywhere: what either does to this process,
by hanging, crashing or eating memory, ends with it. No torch, no weights, no keys here.
"""

from __future__ import annotations

from msgspec import Struct

from barnraise.protocol.child_lines import log_in_child
from barnraise.protocol.child_serve import Send, serve
from barnraise.protocol.environments import Environment, Task, build_environment
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.limits import bounded
from barnraise.protocol.spec import EnvironmentSpec
from barnraise.protocol.unit_context import about, unit_log

story = unit_log("barnraise.coordinator.scoring_child")

SOFT_SECONDS = 3.0  # interrupts Python code; the parent kills what does not listen
ANSWER_BYTES = 2 * 1024**3


class ScorerSetup(Struct, frozen=True, kw_only=True, tag=True):
    """First request: which environment scores."""

    environment: EnvironmentSpec
    seconds: float = SOFT_SECONDS


class ScorerReady(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``ScorerSetup``."""


class ScoreAnswer(Struct, frozen=True, kw_only=True, tag=True):
    """Request: the reward of ``answer`` to the task of ``prompt`` and ``key``.

    ``lease_id``: of the unit that it belongs to, for the log.
    """

    prompt: str
    key: str
    answer: str
    lease_id: bytes = b""


class Scored(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``ScoreAnswer``. ``fault`` says how the scorer failed, if it did; the reward is 0 then."""

    reward: float
    fault: str


def guarded(
    environment: Environment, task: Task, answer: str, seconds: float | None = SOFT_SECONDS
) -> Scored:
    """Score one answer; whatever the environment raises or returns becomes a ``Scored``.

    ``seconds`` bounds Python code in the main thread of a process; None bounds nothing.
    """
    try:
        if seconds is None:
            reward = float(environment.score(task, answer))
        else:
            with bounded("scoring", seconds=seconds, memory=ANSWER_BYTES):
                reward = float(environment.score(task, answer))
    except Exception as error:  # an operator's own code, on a stranger's text: anything at all
        text = " ".join(str(error).split())[:300]
        return Scored(reward=0.0, fault=f"{type(error).__name__}: {text}")
    if not 0.0 <= reward <= 1.0:  # NaN is not either
        return Scored(reward=0.0, fault=f"the reward {reward} is not in [0, 1]")
    return Scored(reward=reward, fault="")


def main() -> None:
    """The child's main thread."""
    log_in_child("scorer", capture=True)  # environments may run answers as programs, which print
    environment: Environment | None = None
    seconds = SOFT_SECONDS

    def handle(request: ScorerSetup | ScoreAnswer, send: Send) -> ScorerReady | Scored:
        nonlocal environment, seconds
        if isinstance(request, ScorerSetup):
            environment, seconds = build_environment(request.environment), request.seconds
            return ScorerReady()
        if environment is None:
            raise BarnraiseError("the scorer was asked before it was set up")
        with about(request.lease_id):
            scored = guarded(
                environment, Task(prompt=request.prompt, key=request.key), request.answer, seconds
            )
            story.debug("an answer of %d characters earns %g", len(request.answer), scored.reward)
            return scored

    serve(handle, ScorerSetup | ScoreAnswer)


if __name__ == "__main__":
    main()

"""Rewards, bounded in time and memory: no answer and no scorer can take the verifier down.

The built-in ``reverse`` compares two strings and is scored in place. Every other
environment runs somebody else's code (parsers, a computer algebra system, an
operator's own package) on what a model wrote, and does so in a child process that is
killed when it does not answer in time, and made anew for the next answer.

What fails is ours, never the sender's: its tokens were proven to be the seeded draws
before anything is scored. An answer whose scoring fails earns 0, as a wrong one does,
and is logged with its task. When a submission has used up its allowance, answers are
left unscored; a group that holds such a one gets 0 throughout, so that it has no
advantage and teaches nothing.
"""

from __future__ import annotations

import logging
import os
import select
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from barnraise.coordinator.scoring_child import (
    SOFT_SECONDS,
    ScoreAnswer,
    Scored,
    ScorerReady,
    ScorerSetup,
    guarded,
)
from barnraise.protocol.child_frames import MAX_PIPE_FRAME, PIPE_HEADER, PipeFrame
from barnraise.protocol.environments import Environment, Task
from barnraise.protocol.errors import BarnraiseError, ChildError
from barnraise.protocol.spec import EnvironmentSpec

log = logging.getLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)

IN_PLACE = frozenset({"reverse"})
START_SECONDS = 120.0  # imports, and the environment's own preparations
HARD_SECONDS = 3 * SOFT_SECONDS  # for one answer, until the child is killed
SUBMISSION_SECONDS = 60.0  # for all answers of one submission
SUBMISSION_DEATHS = 3  # children that one submission may cost


@dataclass
class Scores:
    """Rewards in [0, 1], one per answer, and (answer, how its scoring failed) where it did."""

    rewards: list[float] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)


class Scorer:
    """Scores answers of one environment. Synchronous; one caller at a time."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        soft_seconds: float = SOFT_SECONDS,
        hard_seconds: float = HARD_SECONDS,
        submission_seconds: float = SUBMISSION_SECONDS,
    ) -> None:
        self._spec = spec
        self._soft = soft_seconds
        self._hard = hard_seconds
        self._submission = submission_seconds
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, if there is one."""
        return self._child.pid if self._child is not None else None

    def score(
        self,
        environment: Environment,
        tasks: Sequence[Task],
        answers: Sequence[str],
        group_size: int = 1,
        lease_id: bytes = b"",
    ) -> Scores:
        """Rewards of ``answers``, in order; ``group_size`` consecutive ones are compared with each other.

        ``environment`` is used where scoring in place is safe. ``lease_id``: of the unit, for the log.

        Raises:
            BarnraiseError: the child cannot be started or set up; that says nothing about the answers.
        """
        scores = Scores()
        until = time.monotonic() + self._submission
        deaths, unscored = 0, set()
        for number, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            if self._spec.name in IN_PLACE:
                scored = guarded(environment, task, answer, None)
            elif deaths >= SUBMISSION_DEATHS or time.monotonic() > until:
                unscored.add(number // group_size)
                scored = Scored(reward=0.0, fault="left unscored: the submission has used up its allowance")
            else:
                try:
                    scored = self._ask(task, answer, lease_id)
                except _ChildEnded as error:
                    deaths += 1
                    scored = Scored(reward=0.0, fault=str(error))
            scores.rewards.append(scored.reward)
            if scored.fault:
                scores.faults.append((number, scored.fault))
                log.warning(
                    "environment %r: scoring an answer of %d characters to task %.200r failed: %s; reward 0",
                    self._spec.name,
                    len(answer),
                    task.key,
                    scored.fault,
                )
        for group in unscored:
            first = group * group_size
            scores.rewards[first : first + group_size] = [0.0] * len(
                scores.rewards[first : first + group_size]
            )
        return scores

    def close(self) -> None:
        """End the child; safe to call twice, and to score again afterwards."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _ask(self, task: Task, answer: str, lease_id: bytes) -> Scored:
        if (
            self._child is None or not self._child.alive
        ):  # one that died between answers died of something else
            self.close()
            self._child = self._started()
        # Text with lone surrogates is no UTF-8; a tokenizer's decoder never makes any, a task's author may.
        request = ScoreAnswer(
            prompt=_plain(task.prompt), key=_plain(task.key), answer=_plain(answer), lease_id=lease_id
        )
        try:
            return self._child.request(request, Scored, self._hard)
        except _ChildEnded:
            self.close()
            raise

    def _started(self) -> _Child:
        child = _Child()
        try:
            child.request(ScorerSetup(environment=self._spec, seconds=self._soft), ScorerReady, START_SECONDS)
        except _ChildEnded as error:
            child.kill()
            raise ChildError(
                f"the scorer of environment {self._spec.name!r} did not start: {error}"
            ) from error
        except BaseException:
            child.kill()
            raise
        return child


class _ChildEnded(Exception):
    """The child took too long and was killed, or died by itself; the text says which."""


class _Child:
    """``barnraise.coordinator.scoring_child``, with requests that end at a deadline."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "barnraise.coordinator.scoring_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        self.pid = self._process.pid
        self._number = 0
        # Nobody need remember to close a judge: when it is forgotten, its scorer goes too.
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._end()

    def request(self, message: msgspec.Struct, reply: type[R], seconds: float) -> R:
        """Raises _ChildEnded (it is gone) or BarnraiseError (it refused)."""
        body = msgspec.msgpack.encode(message)
        until = time.monotonic() + seconds
        self._number += 1
        assert self._process.stdin is not None
        try:
            # Its reader thread always reads, unless compiled code holds the interpreter: that one is dead.
            self._write(PIPE_HEADER.pack(PipeFrame.REQUEST, self._number, len(body)) + body, until)
            kind, _, length = PIPE_HEADER.unpack(self._read(PIPE_HEADER.size, until))
            if length > MAX_PIPE_FRAME:
                raise _ChildEnded(f"the scorer announces {length} bytes")
            data = self._read(length, until)
        except _ChildEnded:
            self.kill()
            raise
        except (OSError, struct.error) as error:
            self.kill()
            raise _ChildEnded(f"the scorer ended: {error}") from error
        if kind == PipeFrame.REPLY:
            try:
                return msgspec.msgpack.decode(data, type=reply)
            except (msgspec.MsgspecError, UnicodeError) as error:
                self.kill()
                raise _ChildEnded(f"the scorer sent something unexpected: {error}") from error
        text = data.decode(errors="replace")
        if kind == PipeFrame.ERROR:
            raise BarnraiseError(text)
        self.kill()
        raise _ChildEnded(f"the scorer died: {text}")

    def _write(self, data: bytes, until: float) -> None:
        assert self._process.stdin is not None
        descriptor, view = self._process.stdin.fileno(), memoryview(data)
        os.set_blocking(descriptor, False)
        while view:
            self._wait(descriptor, select.POLLOUT, until)
            view = view[os.write(descriptor, view) :]

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, parts = self._process.stdout.fileno(), bytearray()
        while len(parts) < size:
            self._wait(descriptor, select.POLLIN, until)
            part = os.read(descriptor, size - len(parts))
            if not part:
                raise _ChildEnded(f"the scorer died{_how(self._process)}")
            parts += part
        return bytes(parts)

    def _wait(self, descriptor: int, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise _ChildEnded("the scorer did not answer in time and was killed")
            if poll.poll(left * 1000):
                return


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return ""
    return f" of signal {-code}" if code < 0 else f" with exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _plain(text: Any) -> str:
    return str(text).encode("utf-8", "replace").decode("utf-8")

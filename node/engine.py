"""The engine seam: what turns a lease into rollouts.

``barnraise.node.engine_child`` runs an engine in a child process;
``barnraise.node.torch_engine`` is the engine itself. Tests and the simulator put
an in-process engine behind the same seam.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

from msgspec import Meta, Struct

from barnraise.protocol.messages import Rollout
from barnraise.protocol.spec import RunSpec


class Work(Struct, frozen=True, kw_only=True):
    """One rollout unit, as the engine needs it."""

    run_id: bytes
    lease_id: bytes
    node: bytes
    policy_version: int
    prompts: int
    group_size: int
    shrink: Annotated[int, Meta(ge=0, le=16)] = 0  # how often to halve the batch the engine would use (R5)


class Sized(Struct, frozen=True, kw_only=True):
    """How many sequences the engine holds at once, and by what it chose that (R5).

    ``each``: bytes that one sequence takes, by estimate. ``free``: bytes that were free when
    the unit began. ``most``: sequences that the unit has to offer.
    """

    at_once: Annotated[int, Meta(ge=1)]
    most: Annotated[int, Meta(ge=1)]
    each: Annotated[int, Meta(ge=0)]
    free: Annotated[int, Meta(ge=0)]
    halved: Annotated[int, Meta(ge=0)] = 0  # times, because memory had run out

    def in_words(self) -> str:
        """For a person."""
        text = f"{self.at_once} of up to {self.most} sequences at once: {_megabytes(self.each)} each, "
        text += f"{_megabytes(self.free)} were free"
        return f"{text}; halved {self.halved} time(s) as memory ran out" if self.halved else text


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


class Progress(Struct, frozen=True, kw_only=True, tag=True):
    """Finished work only (R7): completions ended so far, tokens drawn so far."""

    completions: Annotated[int, Meta(ge=0)]
    tokens: Annotated[int, Meta(ge=0)]
    sized: Sized | None = None


class Generated(Struct, frozen=True, kw_only=True, tag=True):
    """A finished unit: ``prompts * group_size`` rollouts, ordered by prompt, then sample."""

    rollouts: tuple[Rollout, ...]
    seconds: float
    tokens: int


class EngineInfo(Struct, frozen=True, kw_only=True, tag=True):
    """What an engine reports once a version is loaded."""

    name: str  # such as "torch-cpu-float32"
    device: str
    memory_bytes: int  # resident memory of the engine's process
    why: str = ""  # this engine and not another


class EngineLimits(Struct, frozen=True, kw_only=True, tag=True):
    """What an engine may use from now on. ``memory``: bytes of main memory, 0 for any;
    ``gpu_memory``: a fraction of the GPU's.
    """

    threads: Annotated[int, Meta(ge=1, le=1024)]
    memory: Annotated[int, Meta(ge=0)] = 0
    gpu_memory: Annotated[float, Meta(gt=0, le=1)] = 1.0


class OutOfMemory(Exception):
    """The engine ran out of memory; the caller retries smaller once, then returns the lease (R5)."""


class Engine(Protocol):
    """Holds one loaded policy version at a time."""

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        """Load a version's files (safetensors, config, tokenizer) from ``folder``.

        A second call with a newer version swaps the weights in place.

        Raises:
            ChildError: the engine died or could not read the files.
        """

    async def generate(self, work: Work, progress: Callable[[Progress], None]) -> Generated:
        """Draw the unit's rollouts with proofs; cancelling stops the engine within 2 s.

        Raises:
            OutOfMemory: memory ran out.
            ChildError: the engine died; the next ``load`` starts a fresh one.
        """

    async def close(self) -> None:
        """End the engine and free its memory; safe to call twice."""


@runtime_checkable
class LimitedEngine(Protocol):
    """An engine that can be limited while it works."""

    async def limit(self, limits: EngineLimits) -> None:
        """Hold ``limits`` from the next step on, and after every start. Never raises."""

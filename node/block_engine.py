"""The engine's other half: what trains one block unit (``barnraise.node.engine`` generates rollouts).

The same engine child does both; a run's stage decides which is asked for. A unit's
folder survives the engine: after a crash or a pause the next ``train`` with the same
folder goes on from the last state that was committed to disk there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

from msgspec import Meta, Struct

from barnraise.node.engine import Sized
from barnraise.protocol.spec import RunSpec

DELTA_FILE = "delta.safetensors"
SHARDS_FOLDER = "shards"  # in a unit's folder: the corpus shards that it reads


class BlockWork(Struct, frozen=True, kw_only=True, tag=True):
    """One block unit, as the engine needs it.

    ``version_folder`` holds the version's files; ``corpus`` the canonical description and
    ``shards`` a folder with the token shards that the unit reads, named by their digests in
    hex; ``folder`` is the unit's own: states ``state-0001.safetensors``..., and the delta.
    ``residual``: file with what earlier units of this block lost to rounding, read and
    replaced when the unit is finished; empty for none.
    """

    run_id: bytes
    lease_id: bytes
    policy_version: int
    block: int
    slot: int
    version_folder: str
    corpus: bytes
    shards: str
    folder: str
    residual: str
    shrink: Annotated[int, Meta(ge=0, le=16)] = 0  # how often to halve what is held at once (R5)


class BlockProgress(Struct, frozen=True, kw_only=True, tag=True):
    """Finished work only (R7): steps done of the unit, tokens trained on, the last loss in nats.

    ``saved``: segments whose state is on the disk. ``loss`` is NaN before the first step.
    """

    steps: Annotated[int, Meta(ge=0)]
    tokens: Annotated[int, Meta(ge=0)]
    loss: float
    saved: Annotated[int, Meta(ge=0)] = 0
    engine: str = ""  # such as "torch-cpu-float32"
    device: str = ""
    memory_bytes: Annotated[int, Meta(ge=0)] = 0  # resident memory of the engine's process
    sized: Sized | None = None


class BlockTrained(Struct, frozen=True, kw_only=True, tag=True):
    """A finished unit: file names inside its folder, one state and one mean loss per segment.

    ``seconds`` and ``tokens`` are of the whole unit, however often it was interrupted.
    """

    states: tuple[str, ...]
    losses: tuple[float, ...]
    delta: str
    seconds: float
    tokens: int
    engine: str = ""


@runtime_checkable
class BlockEngine(Protocol):
    """Trains block units; cancelling stops it within 2 s, with the last segment's state kept."""

    async def train(
        self, spec: RunSpec, work: BlockWork, progress: Callable[[BlockProgress], None]
    ) -> BlockTrained:
        """Do the unit, or what is left of it.

        Raises:
            OutOfMemory: memory ran out (``barnraise.node.engine``).
            ChildError: the engine died, or the version's files or shards cannot be used.
        """


def state_name(segment: int) -> str:
    """File name of the state after a segment, which counts from 0."""
    return f"state-{segment + 1:04d}.safetensors"


def unit_folder(home: Path, lease_id: bytes) -> Path:
    """Where a node keeps a unit's states until the verdict: ``HOME/units/HEX``; HOME is the run's folder."""
    return home / "units" / lease_id.hex()

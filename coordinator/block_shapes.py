"""How large the files of a block unit are: judged before a byte of them is fetched.

Sizes follow from the block's weights alone, whose header the coordinator reads off its
own checkpoint: a stranger's claim about a file is bounded before anything is allocated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from barnraise.protocol.errors import RefusedError, RunFolderError
from barnraise.protocol.messages import MAX_SHARD, FileEntry
from barnraise.protocol.pretrain import BlockSubmission, PretrainSpec, segments

_MAX_HEADER = 100 * 1024 * 1024
_SPARE = 4096  # of a header: metadata, alignment
MOST_LOSS = 1000.0  # nats per token: nothing that trains comes near, and a report can show it
_DELTA_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block's weights: how many values, rows (all dimensions but the last) and bytes of header."""

    values: int
    rows: int
    header: int


def read_shape(part: Path) -> BlockShape:
    """Read the header of a block's safetensors file.

    Raises:
        RunFolderError: the file is missing or damaged.
    """
    try:
        with part.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
        shapes = [entry["shape"] for key, entry in header.items() if key != "__metadata__"]
        rows = sum(prod(shape[:-1]) for shape in shapes)
        return BlockShape(sum(prod(shape) for shape in shapes), rows, length + 8)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{part} is no readable block: {error}; restore it from a backup") from None


def state_range(shape: BlockShape) -> tuple[int, int]:
    """Least and most bytes of a state file: weights and two moments, float32."""
    return _range(12 * shape.values, shape)


def delta_range(shape: BlockShape, kind: str) -> tuple[int, int]:
    """Least and most bytes of a difference in a run's format."""
    scales = 4 * shape.rows if kind == "int8" else 0
    return _range(_DELTA_BYTES[kind] * shape.values + scales, shape)


def _range(data: int, shape: BlockShape) -> tuple[int, int]:
    # three times the names, each with a prefix and longer offsets: four headers are plenty
    return data, data + 4 * shape.header + _SPARE


def check_files(spec: PretrainSpec, shape: BlockShape, submission: BlockSubmission) -> None:
    """Whether a unit's files can be what they should be, by number and size.

    Raises:
        RefusedError: ``wrong-shape``.
    """
    wanted = len(segments(spec))
    if len(submission.states) != wanted or len(submission.losses) != wanted:
        raise RefusedError(
            "wrong-shape",
            f"a unit of this run has {wanted} segments; the submission names {len(submission.states)} states "
            f"and {len(submission.losses)} losses: update barnraise",
        )
    if not all(0 <= loss <= MOST_LOSS for loss in submission.losses):
        raise RefusedError("wrong-shape", f"a mean training loss is a number from 0 to {MOST_LOSS:g}")
    for entry in submission.states:
        _check(entry, *state_range(shape))
    _check(submission.delta, *delta_range(shape, spec.delta))


def _check(entry: FileEntry, least: int, most: int) -> None:
    if not least < entry.size <= most:
        raise RefusedError(
            "wrong-shape",
            f"{entry.path} has {entry.size} bytes, a file of this block has {least} to {most}: "
            "update barnraise",
        )
    if len(entry.shards) != -(-entry.size // MAX_SHARD):
        raise RefusedError(
            "wrong-shape",
            f"{entry.path} of {entry.size} bytes is cut into {len(entry.shards)} shards, "
            f"not into ones of {MAX_SHARD} bytes",
        )

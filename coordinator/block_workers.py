"""Jobs of the block stage for learner (adds rounds up) and verifier (replays segments).

Closed set that crosses the children's pipes, beside ``barnraise.coordinator.workers``.
Paths are relative to the run folder.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from barnraise.protocol.messages import Verdict
from barnraise.protocol.pretrain import BlockLease, BlockSubmission

DELTA_FILE = "delta.safetensors"
REPORT_FILE = "pretrain.jsonl"  # in the run folder: one object a line, for the report


class Contribution(Struct, frozen=True, kw_only=True):
    """One accepted unit of a round: whose place it was, and where its difference lies.

    ``lease_id``: for the log.
    """

    block: int
    slot: int
    delta: str
    lease_id: bytes = b""


class RoundJob(Struct, frozen=True, kw_only=True, tag=True):
    """Make ``version`` from checkpoint ``version - 1``: trimmed mean and outer step, block by block.

    Deterministic; a job cut short by a crash is sent again. The reply is ``Trained``.
    """

    version: int
    contributions: tuple[Contribution, ...]  # by block, then slot


class RecombineJob(Struct, frozen=True, kw_only=True, tag=True):
    """Make ``version``: stack the blocks of ``version - 1`` and adapt the whole. The reply is ``Trained``."""

    version: int


class StageProgress(Struct, frozen=True, kw_only=True, tag=True):
    """How far the learner is with a job of the block stage, in words, and as a share of it."""

    subject: str
    fraction: float


class BlockVerifyJob(Struct, frozen=True, kw_only=True, tag=True):
    """One stored block submission, its fetched files, and the segments to do again.

    ``states``: where the committed states lie that this needs, by the segment after which
    they were made: both ends of each drawn one (the first one's start is ours) and the
    last. ``draw`` picks the text that the whole block is tried on: secret until now.
    """

    submission_id: bytes
    lease: BlockLease
    submission: BlockSubmission
    segments: tuple[int, ...]  # ascending
    states: dict[int, str]
    delta: str
    draw: bytes


class BlockResult(Struct, frozen=True, kw_only=True, tag=True):
    """The verdict on one; ``parameters``: what ``credit_for_block`` counts a token with."""

    submission_id: bytes
    verdict: Verdict
    tokens: int
    parameters: int


def unit_folder(run_folder: Path, submission_id: bytes) -> Path:
    """Where a block submission's fetched files lie: ``RUN/units/HEX``."""
    return run_folder / "units" / submission_id.hex()


def corpus_folder(run_folder: Path) -> Path:
    """``RUN/corpus``: description, tokenizer and shards (``barnraise.coordinator.corpus_files``)."""
    return run_folder / "corpus"

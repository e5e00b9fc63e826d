"""Pretraining by blocks (Mixture of Training): what peers agree on, and what they exchange.

A run of phase ``pretrain`` numbers its policy versions through all of its stages:

=====================  ==========================================================================
version                what its manifest holds
=====================  ==========================================================================
0                      the scaffold and each block's first weights
1 .. rounds            the scaffold (the same shards) and each block after one more outer step
rounds + 1             the recombined and adapted model, one ``model.safetensors``
beyond                 policies of the ``posttrain`` stage, if the run goes on to it
=====================  ==========================================================================

Versions up to ``rounds`` have one weight file per part: ``model-00001-of-000NN`` is the
scaffold, a model of its own under the usual names; part i + 2 is block i, its tensors
named relative to the block's first layer (``"0.mlp.up_proj.weight"``).

A block unit is ``steps`` AdamW steps on one block from version v, in segments of
``commit_every``. The node commits to the state after every segment *in its signed
submission*, as a file entry; only then does the coordinator draw the segment that it
will do again, and fetches the states at that segment's ends as shards from the node.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.messages import (
    Count,
    Digest,
    FileEntry,
    Message,
    Millis,
    Name,
    Nonce,
    PublicKey,
    Version,
)

Positive = Annotated[float, Meta(gt=0.0, le=1e6)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e6)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Small = Annotated[int, Meta(ge=1, le=65_536)]
Steps = Annotated[int, Meta(ge=1, le=10_000_000)]
MAX_SEGMENTS = 64


class BlockRecipe(Message, frozen=True):
    """AdamW on one block; see ``barnraise.kernels.block_training.Recipe``, whose fields these are."""

    learning_rate: Positive
    warmup_steps: Count
    settle_steps: Count
    beta1: Fraction
    beta2: Fraction
    weight_decay: NonNegative
    clip: Positive
    batch: Small  # sequences per step


class JointRecipe(Message, frozen=True):
    """Training of a whole model by the learner (scaffold, adaptation): AdamW, warm-up, then cosine."""

    steps: Count  # 0: none
    learning_rate: Positive
    warmup_fraction: Fraction
    floor: Fraction  # share of the rate that the cosine ends at
    weight_decay: NonNegative
    clip: Positive
    batch: Small


class BlockTolerance(Message, frozen=True):
    """How far a replayed segment may lie from ours (``barnraise.kernels.block_audit.SegmentError``)."""

    update: Positive
    first: Positive
    second: Positive
    worst_tensor: Positive
    loss_increase: NonNegative  # nats per token on held-out text, block in scaffold, against the unit's start


class PretrainSpec(Message, frozen=True):
    """Stages 0 to 2 of Mixture of Training (arXiv 2608.13277, section 2), as one run does them.

    ``scaffold`` names the SHA-256 of an earlier run's scaffold file, to use it again;
    None has the coordinator train one by ``scaffold_recipe``. A block's round closes when
    ``contributors`` units of it were accepted, or ``quorum`` once ``round_s`` is over.
    """

    blocks: Annotated[int, Meta(ge=1, le=64)]
    scaffold_layers: Small
    scaffold: Digest | None
    scaffold_recipe: JointRecipe
    corpus: Digest  # barnraise.protocol.corpus
    sequence: Annotated[int, Meta(ge=2, le=1_048_576)]  # tokens
    init: Literal["grown", "random"]
    data: Literal["disjoint", "shared"]
    rounds: Small
    steps: Steps  # per unit
    commit_every: Steps
    contributors: Annotated[int, Meta(ge=1, le=1024)]  # units per block and round
    quorum: Annotated[int, Meta(ge=1, le=1024)]
    round_s: Positive
    recipe: BlockRecipe
    delta: Literal["float32", "bfloat16", "int8"]
    outer_rate: Positive
    outer_momentum: Fraction
    trim: Annotated[float, Meta(ge=0.0, lt=0.5)]
    tolerance: BlockTolerance
    adapt: JointRecipe
    held_out: Small  # sequences of every evaluation
    timeout_s: Positive
    deadline_s: Positive
    then_posttrain: bool


class BlockLease(Message, frozen=True):
    """*Signed* by the run's key: one block unit lent to one node.

    The sequences that it reads are derived (``unit_start``). Times as in ``RolloutLease``.
    """

    run_id: Digest
    lease_id: Nonce
    unit_id: Count
    node: PublicKey
    policy_version: Version  # whose block weights it starts from; also the round
    block: Count
    slot: Count  # which of the round's contributors
    issued_at: Millis
    timeout_at: Millis
    deadline_at: Millis


class BlockSubmission(Message, frozen=True):
    """*Signed* by the node: the finished unit, by hash. The files are fetched from the node.

    ``states``: one entry per segment, the state after it (``barnraise.kernels.block_training.state_bytes``);
    ``losses``: mean training loss of each segment, nats per token; ``delta``: the difference
    to add up (``barnraise.kernels.deltas``), in the run's format.
    """

    run_id: Digest
    lease_id: Nonce
    policy_version: Version
    engine: Name
    train_ms: Count
    losses: Annotated[tuple[float, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]
    states: Annotated[tuple[FileEntry, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]
    delta: FileEntry


def check_pretrain(spec: PretrainSpec, versions: int) -> None:
    """Refuse what no coordinator could run; ``versions`` is the run's last policy version.

    Raises:
        MalformedError: naming what contradicts what.
    """
    last = model_version(spec)
    if spec.quorum > spec.contributors:
        raise MalformedError(
            f"a quorum of {spec.quorum} of {spec.contributors} contributors is never reached"
        )
    if not spec.blocks <= spec.scaffold_layers:
        raise MalformedError(
            f"{spec.scaffold_layers} scaffold layers cannot be cut into {spec.blocks} slices"
        )
    if -(-spec.steps // spec.commit_every) > MAX_SEGMENTS:
        raise MalformedError(f"a unit of {spec.steps} steps has more than {MAX_SEGMENTS} segments")
    if spec.scaffold is None and spec.scaffold_recipe.steps == 0:
        raise MalformedError("a scaffold that is not imported needs steps to be trained")
    if spec.recipe.beta1 >= 1 or spec.recipe.beta2 >= 1:
        raise MalformedError("AdamW's moving averages need beta1 and beta2 below 1")
    if spec.deadline_s < spec.timeout_s:
        raise MalformedError("a lease's deadline comes before its timeout")
    if versions < last or (versions == last) == spec.then_posttrain:
        raise MalformedError(
            f"the model is version {last}; with versions up to {versions} the run "
            f"{'has no room for' if spec.then_posttrain else 'goes on to'} post-training"
        )


def segments(spec: PretrainSpec) -> tuple[int, ...]:
    """Steps of each segment of a unit; the last may be shorter."""
    whole, rest = divmod(spec.steps, spec.commit_every)
    return (spec.commit_every,) * whole + ((rest,) if rest else ())


def last_block_version(spec: PretrainSpec) -> int:
    """The version after the last round; the next one is the recombined model."""
    return spec.rounds


def model_version(spec: PretrainSpec) -> int:
    """The version that is the recombined and adapted model."""
    return spec.rounds + 1


def stream(spec: PretrainSpec, block: int) -> tuple[int, int]:
    """``(stream, streams)`` of a block's data for ``barnraise.protocol.corpus.sequences``."""
    return (block, spec.blocks) if spec.data == "disjoint" else (0, 1)


def unit_start(spec: PretrainSpec, version: int, slot: int) -> int:
    """Where in its block's stream the unit of a round and slot begins, in sequences."""
    return (version * spec.contributors + slot) * spec.steps * spec.recipe.batch


def part_name(spec: PretrainSpec, part: int) -> str:
    """File name of the scaffold (``part`` 0) or of block ``part - 1``."""
    return f"model-{part + 1:05d}-of-{spec.blocks + 1:05d}.safetensors"


def other_blocks(spec: PretrainSpec, block: int | None) -> frozenset[str]:
    """Those of a version's files that a unit of ``block`` has no use for; None: every block's."""
    return frozenset(part_name(spec, number + 1) for number in range(spec.blocks) if number != block)

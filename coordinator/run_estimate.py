"""What a run will need: disk, memory, bandwidth and time, by arithmetic. Estimates, not measurements.

Sources of the constants: optimiser and master weights as in ``learner_step`` (AdamW, float32); a patch's
share of the weights from arXiv 2602.03839 (about 1 % of bfloat16 values change per step at lr 1e-6) and
``benchmarks/patches.py``; a kept token from docs/operate.md; the time of a broadcast from the bound of
``docs/treecast.md``, max(S / u_seed, N S / (u_seed + sum u_i)), times 1.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from barnraise.coordinator.run_file import Keep
from barnraise.protocol.spec import RolloutSpec

OPTIMISER_BYTES = 12  # master weight and two moments, float32 each
GRADIENT_BYTES = 4
PATCH_SHARE = 0.04  # of the whole version, indices and values packed
CPU_FLOPS = 50e9
TREE_OVER_BOUND = 1.2
MEAN_SHARE = 0.6  # of the longest completion, on average
USABLE_SHARE = 0.6  # of groups have an advantage
NOTHING_S = 5.0  # spreading that takes less holds nobody up
VERIFIERS_HOLD = 2  # policy versions in memory
ROLLOUT_BYTES = 4.7  # a token that is kept as Parquet (docs/operate.md, Rollouts)
PROOF_BYTES = 8.2
GB = 1e9


@dataclass(frozen=True)
class Swarm:
    """The machines to reckon with. Rates in Mbit/s; ``tokens_per_s`` 0: what a processor makes."""

    nodes: int = 10
    tokens_per_s: float = 0.0
    up_mbit: float = 20.0
    own_mbit: float = 100.0


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds; ``troubles``: what will not do, and why."""

    version_bytes: int
    patch_bytes: int
    disk_bytes: int
    learner_bytes: int
    verifier_bytes: int
    node_bytes: int
    patch_s: float
    version_s: float
    rollouts_s: float
    run_s: float
    versions: int
    tokens_per_s: float
    troubles: list[str]


def estimate(
    *,
    parameters: int,
    published_bytes: int,
    compute_bytes: int,
    rollout: RolloutSpec,
    max_new_tokens: int,
    keep: Keep,
    swarm: Swarm,
    trained: int | None = None,
) -> Estimate:
    """What a run will need.

    Args:
        parameters: of the model.
        published_bytes, compute_bytes: per weight, as versions are published and as engines compute.
        trained: parameters of the adapters, where those alone are trained.
    """
    moving = parameters if trained is None else trained
    whole = parameters * published_bytes if trained is None else trained * 4
    patch = round(whole * PATCH_SHARE) if trained is None else whole
    full = whole + moving * OPTIMISER_BYTES
    kept = rollout.max_lag + 2
    whole_kept = min(keep.most, rollout.versions // keep.every) if keep.every else 0
    base = parameters * published_bytes if trained is not None else 0
    checkpoints = base + whole * kept + 2 * moving * OPTIMISER_BYTES + whole_kept * full
    disk = checkpoints + _rollouts(rollout, max_new_tokens, keep)
    speed = swarm.tokens_per_s or CPU_FLOPS / (2 * parameters)
    completions = rollout.groups_per_version / USABLE_SHARE * rollout.group_size
    rollouts_s = completions * max_new_tokens * MEAN_SHARE / (speed * swarm.nodes)
    patch_s, version_s = _spread(patch, swarm), _spread(whole, swarm)
    troubles = []
    if keep.disk_gb and checkpoints > keep.disk_gb * GB:
        troubles.append(
            f"checkpoints may take {checkpoints / GB:.1f} GB, keep.disk_gb allows {keep.disk_gb:g}: older "
            "whole versions will go; lower keep.most or raise keep.every"
        )
    if patch_s > max(NOTHING_S, rollouts_s * max(1, rollout.max_lag)):
        troubles.append(
            f"a patch takes {patch_s:.0f} s to spread, a version's rollouts {rollouts_s:.0f} s: nodes will "
            "fall behind; raise rollout.groups_per_version or rollout.max_lag"
        )
    unit_s = rollout.prompts_per_unit * rollout.group_size * max_new_tokens / speed
    if unit_s > rollout.timeout_s:
        troubles.append(
            f"a unit takes one node up to {unit_s:.0f} s, rollout.timeout_s is {rollout.timeout_s:g}: lower "
            "rollout.prompts_per_unit, or raise rollout.timeout_s and deadline_s"
        )
    return Estimate(
        version_bytes=whole + base,
        patch_bytes=patch,
        disk_bytes=disk,
        learner_bytes=parameters * 4 + moving * (OPTIMISER_BYTES - 4 + GRADIENT_BYTES),
        verifier_bytes=parameters * compute_bytes * VERIFIERS_HOLD,
        node_bytes=parameters * compute_bytes,
        patch_s=patch_s,
        version_s=version_s,
        rollouts_s=rollouts_s,
        run_s=rollout.versions * max(rollouts_s, patch_s / max(1, rollout.max_lag)),
        versions=rollout.versions,
        tokens_per_s=speed,
        troubles=troubles,
    )


def _rollouts(rollout: RolloutSpec, max_new_tokens: int, keep: Keep) -> int:
    """Bytes that kept rollouts will take, accepted ones of all versions or as many as the budget has."""
    if keep.rollouts == "off":
        return 0
    completions = rollout.groups_per_version / USABLE_SHARE * rollout.group_size
    each = ROLLOUT_BYTES + (PROOF_BYTES if keep.rollout_proofs else 0.0)
    size = rollout.versions * completions * max_new_tokens * MEAN_SHARE * each
    return round(min(size, keep.rollouts_gb * GB) if keep.rollouts_gb else size)


def _spread(size: int, swarm: Swarm) -> float:
    """Seconds until ``size`` bytes are everywhere: the bound, times what the tree takes above it."""
    own, all_up = swarm.own_mbit * 125_000, swarm.own_mbit * 125_000 + swarm.nodes * swarm.up_mbit * 125_000
    return TREE_OVER_BOUND * max(size / own, swarm.nodes * size / all_up)

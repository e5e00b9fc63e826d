"""Rollouts as a table: one row per completion, with what became of it and no text. Needs pyarrow, no torch.

What a row says of its submission can be held against the public ledger: ``submission`` is the digest
that stands there. The columns are documented by ``COLUMNS``, which the dataset's card prints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from barnraise.coordinator.rollout_fates import Fate
from barnraise.protocol import wire
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.messages import RolloutSubmission
from barnraise.protocol.seeds import task_seed

FORMAT = 1
METADATA = b"barnraise"
CLAWED_BACK = "clawed-back"
STD_EPSILON = 1e-6  # as in kernels.grpo.group_advantages

COLUMNS: dict[str, tuple[str, str]] = {
    "run": ("string", "the run's id, hex"),
    "policy_version": ("int32", "version of the policy that drew it"),
    "trained_version": ("int32", "version that was made with it; null: none"),
    "lag": ("int32", "trained_version - 1 - policy_version: versions it was old when trained on"),
    "environment": ("string", "where the task comes from, as the run spec names it"),
    "task_seed": ("uint64", "of the task; the environment makes the task of it"),
    "unit": ("int64", "number of the unit of work"),
    "prompt_index": ("int32", "prompt within the unit; rows of one submission with the same are a group"),
    "sample_index": ("int32", "sample within the group"),
    "tokens": ("list<uint32>", "ids of the completion, the end token included if it was drawn"),
    "logprobs": ("list<float>", "log-probability (nats) of each under the policy, at the run's temperature"),
    "reward": ("double", "by the coordinator, in [0, 1]; null: refused before it was scored"),
    "advantage": ("double", "against its group, as in training; null: refused"),
    "accepted": ("bool", "whether the checks accepted it"),
    "check": (
        "string",
        "all; unaudited (spared the model's checks); the check that refused it; or clawed-back",
    ),
    "threshold": ("double", "of that check"),
    "value": ("double", "what was found there"),
    "position": ("string", "where"),
    "message": ("string", "what it means"),
    "node": ("string", "peer id of the volunteer"),
    "engine": ("string", "what drew it, by the node's word"),
    "generate_ms": ("int64", "milliseconds that the whole unit took, by the node's word"),
    "submitted_at": ("timestamp[ms, UTC]", "when it came in, by the coordinator's clock"),
    "lease": ("string", "id of the lease, hex"),
    "submission": ("string", "SHA-256 of the signed payload, hex, as in the ledger"),
    "proofs": ("binary", "TOPLOC proofs; null unless [keep] rollout_proofs"),
}
"""Every column of a kept file: its type, and what it says."""


def need_pyarrow() -> Any:
    """The module ``pyarrow``, with ``pyarrow.parquet`` imported.

    Raises:
        RunFolderError: it is not installed; says how to install it, and how to do without.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise RunFolderError(
            "keeping and exporting rollouts needs pyarrow, which is not installed: "
            "pip install 'barnraise[parquet]', or set rollouts = \"off\" in [keep] of run.toml"
        ) from None
    return pyarrow


def schema(metadata: dict[str, Any] | None = None) -> Any:
    """The pyarrow schema of ``COLUMNS``; ``metadata``: put into the file as JSON under ``barnraise``."""
    pa = need_pyarrow()
    kinds = {
        "list<uint32>": pa.list_(pa.uint32()),
        "list<float>": pa.list_(pa.float32()),
        "double": pa.float64(),
        "timestamp[ms, UTC]": pa.timestamp("ms", tz="UTC"),
        "bool": pa.bool_(),
    }
    fields = [
        (name, kinds[kind] if kind in kinds else pa.type_for_alias(kind))
        for name, (kind, _) in COLUMNS.items()
    ]
    said = None if metadata is None else {METADATA: json.dumps(metadata, sort_keys=True).encode()}
    return pa.schema(fields, metadata=said)


def to_table(work: Sequence[tuple[Fate, bytes]], environment: str, proofs: bool = False) -> Any:
    """Rows of judged submissions, in their order and that of their payloads.

    Args:
        work: each with its payload as signed (a canonical ``RolloutSubmission``).
        environment: the name in the run spec.
        proofs: keep the TOPLOC proofs, about 8 bytes a token.

    Raises:
        MalformedError: a payload is none.
    """
    pa = need_pyarrow()
    rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for fate, payload in work:
        _add(rows, fate, wire.decode(payload, RolloutSubmission), environment, proofs)
    made = schema()
    arrays = []
    for field in made:
        values = rows[field.name]
        if field.name in ("tokens", "logprobs"):
            arrays.append(_lists(pa, values, "<u4" if field.name == "tokens" else "<f4"))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=made)


def _add(
    rows: dict[str, list[Any]],
    fate: Fate,
    told: RolloutSubmission,
    environment: str,
    proofs: bool,
) -> None:
    lease, verdict = fate.lease, fate.verdict
    assert verdict is not None
    seeds = [task_seed(lease.run_id, lease.lease_id, lease.node, at) for at in range(lease.prompts)]
    # Where arrays are no whole values (refused work) the payload cannot be put together again.
    proofs = proofs and all(not len(item.tokens + item.logprobs) % 4 for item in told.rollouts)
    better = advantages(fate.rewards, lease.group_size, fate.normalised) if fate.rewards else []
    same = {
        "run": told.run_id.hex(),  # where the run continues another: that one's
        "policy_version": lease.policy_version,
        "trained_version": fate.trained if fate.trained >= 0 else None,
        "lag": fate.trained - 1 - lease.policy_version if fate.trained >= 0 else None,
        "environment": environment,
        "unit": lease.unit_id,
        "accepted": fate.accepted,
        "check": CLAWED_BACK if fate.void else verdict.check,
        "threshold": verdict.threshold,
        "value": verdict.value,
        "position": verdict.position,
        "message": verdict.message,
        "node": peer_id_of(lease.node),
        "engine": told.engine,
        "generate_ms": told.generate_ms,
        "submitted_at": fate.at_ms,
        "lease": lease.lease_id.hex(),
        "submission": fate.submission.hex(),
    }
    for name, value in same.items():
        rows[name] += [value] * len(told.rollouts)
    for rollout in told.rollouts:
        known = rollout.prompt < lease.prompts and rollout.sample < lease.group_size
        at = rollout.prompt * lease.group_size + rollout.sample
        rows["task_seed"].append(seeds[rollout.prompt] if rollout.prompt < lease.prompts else None)
        rows["prompt_index"].append(rollout.prompt)
        rows["sample_index"].append(rollout.sample)
        rows["tokens"].append(rollout.tokens)
        rows["logprobs"].append(rollout.logprobs)
        rows["reward"].append(fate.rewards[at] if known and at < len(fate.rewards) else None)
        rows["advantage"].append(better[at] if known and at < len(better) else None)
        rows["proofs"].append(rollout.proofs if proofs else None)


def _lists(pa: Any, parts: Sequence[bytes], kind: str) -> Any:
    """A list array of four-byte values; bytes that are no whole value (refused work) are left out."""
    whole = [part[: len(part) // 4 * 4] for part in parts]
    offsets = np.zeros(len(whole) + 1, dtype=np.int32)
    np.cumsum([len(part) // 4 for part in whole], out=offsets[1:])
    values = np.frombuffer(b"".join(whole), dtype=kind)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def raw(column: Any) -> list[bytes]:
    """What ``_lists`` made of: the four-byte values of each row of ``tokens`` or ``logprobs``, little-endian.

    Python's own numbers would take eight times the memory.
    """
    array = column.combine_chunks()
    values = array.values.to_numpy(zero_copy_only=False)
    data = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    ends = (array.offsets.to_numpy() * 4).tolist()
    return [data[start:end] for start, end in pairwise(ends)]


def advantages(rewards: Sequence[float], group_size: int, normalise_std: bool) -> list[float]:
    """As ``barnraise.kernels.grpo.group_advantages``, without torch: one per rollout, by prompt, then sample.

    ``rewards``: whole groups of ``group_size`` >= 2.
    """
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    centred[(groups == groups[:, :1]).all(axis=1)] = 0.0
    if normalise_std:
        centred /= groups.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON
    found: list[float] = centred.reshape(-1).tolist()
    return found

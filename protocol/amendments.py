"""Amendments: what the operator may change about a run that is under way, and how peers learn of it.

The run spec is signed once and names the run, so it never changes. An amendment is
a later statement under the same key: numbered without gaps, public (an entry of the
ledger carries it in full), and limited to settings that no unit at work depends on.
The settings in force are a fold: ``amended(spec, changes)`` for each in turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.messages import Digest, Message, Millis, Text
from barnraise.protocol.spec import RunSpec

Key = Annotated[str, Meta(min_length=1, max_length=64)]
Value = Annotated[str, Meta(min_length=1, max_length=256)]
Changes = Annotated[dict[Key, Value], Meta(min_length=1, max_length=32)]

# Sections of the spec that only the coordinator reads, with the keys of each that may change.
# Everything else is what nodes at work, verdicts or earlier credit depend on.
AMENDABLE: frozenset[str] = frozenset(
    {
        "description",
        "admission",
        "rollout.groups_per_version",
        "rollout.max_groups_per_version",
        "rollout.versions",
        "rollout.timeout_s",
        "rollout.deadline_s",
        "grpo.learning_rate",
        "grpo.warmup_steps",
        "grpo.beta1",
        "grpo.beta2",
        "grpo.weight_decay",
        "grpo.grad_clip",
        "grpo.inner_epochs",
        "grpo.minibatches",
        "grpo.clip_low",
        "grpo.clip_high",
        "grpo.clip_delta",
        "grpo.normalise_std",
        "grpo.kl_coefficient",
        "grpo.entropy_coefficient",
        "grpo.loss_aggregation",
        "evaluation.tasks",
        "evaluation.every",
    }
)


class AmendmentError(BarnraiseError):
    """A change that cannot be made: unknown key, fixed setting, or a value out of its bounds."""


class Amendment(Message, frozen=True):
    """*Signed* by the run's key. ``changes``: dotted key -> the new value as JSON text."""

    run_id: Digest
    number: Annotated[int, Meta(ge=1, le=2**31)]
    at_ms: Millis
    changes: Changes
    reason: Text


def json_value(value: Any) -> str:
    """How a value stands in ``Amendment.changes``: JSON without blanks, one spelling per value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def amended(spec: RunSpec, changes: Mapping[str, str]) -> RunSpec:
    """The settings after ``changes``. The result is no longer what ``run_id`` is the hash of.

    Raises:
        AmendmentError: names the key, what is wrong with it, and what may be changed.
    """
    fields: dict[str, Any] = msgspec.to_builtins(spec, builtin_types=(bytes,))
    for key, text in changes.items():
        _set(fields, key, text)
    try:
        return msgspec.convert(fields, RunSpec, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise AmendmentError(f"{', '.join(changes)}: {error}") from None


def _set(fields: dict[str, Any], key: str, text: str) -> None:
    if key not in AMENDABLE:
        near = ", ".join(sorted(AMENDABLE))
        raise AmendmentError(
            f"{key!r} cannot change while a run is under way (make a new run); these can: {near}"
        )
    try:
        value = json.loads(text)
        spelling = json_value(value)  # refuses what Python reads and JSON has not: NaN, 1e400
        str(value).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        raise AmendmentError(f"{key}: {text[:80]!r} is no JSON value") from None
    if spelling != text:
        raise AmendmentError(f"{key}: {text[:80]!r} is not the one JSON spelling of its value")
    *sections, last = key.split(".")
    for section in sections:
        fields = fields[section]
    if isinstance(fields[last], float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    fields[last] = value

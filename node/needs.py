"""What a run asks of a volunteer's machine, computed from its signed spec, and the spec in words.

Shown before anybody joins. Nothing here is fetched or believed beyond the spec: sizes are
arithmetic on the model's number of parameters, so they say "about", and memory leaves out
what depends on the architecture (key-value caches, activations).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from barnraise.node.versions import KEEP
from barnraise.protocol.identity import fingerprint
from barnraise.protocol.pretrain import segments
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.wire import printable

_BYTES = {"float32": 4, "bfloat16": 2}
_FP32 = 4
_ADAMW = 4 * _FP32  # a trained weight: itself, its gradient, two moments

Field = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes. ``version``: one published version; ``disk``: the versions kept and the one being fetched,
    a block unit's states included; ``memory``: weights while the heaviest kind of unit is at work.
    """

    version: int
    disk: int
    memory: int


def needs(spec: RunSpec) -> Needs:
    """Compute what a run needs; of a run in two phases the larger of both."""
    model = spec.model
    version = model.parameters * _BYTES[model.weights_dtype]
    disk = (KEEP + 1) * version
    memory = model.parameters * _BYTES[model.compute_dtype] + version  # a new version is read beside the old
    adapter = model.adapter
    if adapter is not None:  # the base is one file for all versions, in memory as on disk
        added = adapter.parameters * _BYTES[adapter.dtype]
        disk, version = version + (KEEP + 1) * added, version + added
        memory = model.parameters * _BYTES[model.compute_dtype] + 2 * added
    plan = spec.pretrain
    if plan is not None:
        block = -(-model.parameters // plan.blocks)
        states = (len(segments(plan)) + 1) * block * 3 * _FP32  # weights and moments after each segment
        disk += states
        training = block * _ADAMW + model.parameters * _FP32  # the scaffold is smaller than the whole
        memory = max(memory, training) if plan.then_posttrain else training
    return Needs(version, disk, memory)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the node keeps its things, whom it asks, and what it may use: bytes, threads.

    ``free``: bytes free on that disk, None if that is not known.
    """

    where: Path
    coordinator: str
    disk: int
    free: int | None
    threads: int


def free_disk(folder: Path) -> int | None:
    """Bytes that are free where ``folder`` lies."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def description(spec: RunSpec, run_id: bytes, machine: Machine) -> list[Field]:
    """The signed description as labels and texts, harmless on any terminal: they are a stranger's."""
    asks, model = needs(spec), spec.model
    free = "" if machine.free is None else f", {_size(machine.free)} are free"
    most = machine.disk if machine.free is None else min(machine.free, machine.disk)
    warning = " - NOT ENOUGH" if asks.disk > most else ""
    return [
        ("run", f"{printable(spec.name)} ({run_id.hex()[:16]})"),
        ("about", printable(spec.description, 500) or "-"),
        ("phase", _phase(spec)),
        (
            "run by",
            f"the holder of key {fingerprint(spec.operator)}, at {printable(machine.coordinator, 300)}",
        ),
        ("model", f"{printable(model.name)}, {model.parameters:,} parameters{_adapter(spec)}"),
        ("download", f"about {_size(asks.version)} for a first version ({model.weights_dtype})"),
        ("disk", f"about {_size(asks.disk)}; you allow {_size(machine.disk)}{free}{warning}"),
        (
            "memory",
            f"about {_size(asks.memory)} of weights ({model.compute_dtype}); caches and engine come on top",
        ),
        ("environment", printable(spec.environment.name)),
        ("your part", f"{_part(spec)}, on {machine.threads} thread{'s' if machine.threads > 1 else ''}"),
        ("kept in", str(machine.where)),
    ]


def _adapter(spec: RunSpec) -> str:
    adapter = spec.model.adapter
    if adapter is None:
        return ""
    return (
        f"; of these none change, but {adapter.parameters:,} of adapters (rank {adapter.rank}), "
        f"{_size(adapter.parameters * _BYTES[adapter.dtype])} in every version"
    )


def _phase(spec: RunSpec) -> str:
    if spec.pretrain is None:
        return f"post-training by rewards, {spec.rollout.versions} versions"
    text = f"pretraining in {spec.pretrain.blocks} blocks, {spec.pretrain.rounds} rounds"
    return f"{text}, then post-training by rewards" if spec.pretrain.then_posttrain else text


def _part(spec: RunSpec) -> str:
    if spec.pretrain is None:
        return "generates completions"
    blocks = f"trains one of {spec.pretrain.blocks} blocks of the model at a time"
    return f"{blocks}, later generates completions" if spec.pretrain.then_posttrain else blocks


def _size(count: float) -> str:
    """Decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < (1000 if unit == "B" else 999.95):
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

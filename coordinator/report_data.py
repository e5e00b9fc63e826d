"""What a run came to, gathered from its folder: the numbers behind ``barnraise report``.

Reads only, so that a coordinator may be running: the journal is opened read-only, the
learner's notes (``RUN/pretrain.jsonl``) and the signed submissions that are still stored
are taken as they are. What is not there is left out, never guessed.

Times are seconds, losses nats per token, FLOPs plain numbers. A block unit's FLOPs are the
paper's (arXiv 2608.13277, section 3: forward and backward through the block, forward and
activation gradients above it, forward alone below it), which is what its credit counts;
scaffold and adaptation count 6 x parameters x tokens.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from barnraise.coordinator.block_events import BlockJudged, BlockLeased, BlockSubmitted, RoundFormed
from barnraise.coordinator.block_workers import REPORT_FILE
from barnraise.coordinator.events import Event, EventError, VersionPublished
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_place import journal_begun, journal_path
from barnraise.coordinator.state import State, apply
from barnraise.coordinator.unit_notes import read_notes, read_told
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.ledger_entries import credit_for_block
from barnraise.protocol.pretrain import PretrainSpec, model_version
from barnraise.protocol.spec import RunSpec

_MAX_NOTES = 64 * 1024 * 1024
_MAX_UNITS = 100_000


class Unit(Struct, kw_only=True):
    """One block unit. ``seconds``: trained, by the node's word; None once its submission is dropped."""

    block: int
    version: int
    slot: int
    node: str
    name: str
    leased_ms: int
    returned_s: float | None = None  # from lease to submission, by our clock
    accepted: bool | None = None
    check: str = ""
    tokens: int = 0
    flops: float = 0.0
    seconds: float | None = None
    losses: list[float] = msgspec.field(default_factory=list)
    used: bool = False


class Stage(Struct, kw_only=True):
    """What the learner noted about training a whole model: scaffold, or adaptation."""

    loss: float | None = None
    perplexity: float | None = None
    losses: list[float] = msgspec.field(default_factory=list)
    seconds: float | None = None
    tokens: int = 0
    flops: float = 0.0
    imported: str = ""


class Round(Struct, kw_only=True):
    """One outer step: each block's held-out loss after it, and what had to be waited for."""

    version: int
    block_losses: list[float] = msgspec.field(default_factory=list)
    contributions: int = 0
    merging_s: float = 0.0
    slowest_s: float | None = None
    sum_s: float | None = None


class Member(Struct, kw_only=True):
    """One volunteer's share. ``credit``: millions of useful FLOPs."""

    node: str
    name: str
    credit: int
    accepted: int
    rejected: int
    units: int  # of blocks, accepted


class Report(Struct, kw_only=True):
    """Everything that is known about a run; lists are empty and values None where it is not there yet."""

    name: str
    run_id: str
    phase: str
    model: str
    parameters: int
    made_ms: int
    written_ms: int
    version: int
    target_version: int
    blocks: int = 0
    steps: int = 0
    commit_every: int = 0
    scaffold: Stage | None = None
    rounds: list[Round] = msgspec.field(default_factory=list)
    units: list[Unit] = msgspec.field(default_factory=list)
    cold_perplexity: float | None = None
    adapted_perplexity: float | None = None
    adaptation: Stage | None = None
    seams_cold: list[dict[str, float]] = msgspec.field(default_factory=list)
    seams_adapted: list[dict[str, float]] = msgspec.field(default_factory=list)
    block_flops: float = 0.0
    refused_flops: float = 0.0
    critical_path_s: float | None = None
    serial_s: float | None = None
    wall_s: float | None = None
    members: list[Member] = msgspec.field(default_factory=list)
    rewards: list[tuple[int, float]] = msgspec.field(default_factory=list)
    accuracy: list[tuple[int, float]] = msgspec.field(default_factory=list)
    absent: list[str] = msgspec.field(default_factory=list)


def collect(folder: Path, watch: Callable[[Event], None] = lambda event: None) -> Report:
    """Read a run folder. Bounded work: one pass over the journal, whose events ``watch`` is told.

    Raises:
        RunFolderError: no run folder, or its journal is damaged.
    """
    spec, _, run_id = read_spec(folder)
    report = Report(
        name=spec.name,
        run_id=run_id.hex(),
        phase=spec.phase,
        model=spec.model.name,
        parameters=spec.model.parameters,
        made_ms=spec.created_at,
        written_ms=time.time_ns() // 1_000_000,
        version=-1,
        target_version=spec.rollout.versions,
    )
    if journal_begun(folder):
        _read_journal(journal_path(folder), spec, report, watch)
    else:
        report.absent.append(f"the run has not begun: serve it with `barnraise coordinator run {folder}`")
    if spec.pretrain is None:
        report.absent.append("this run does not pretrain: there are no blocks, perplexities or seams")
    else:
        report.blocks, report.steps = spec.pretrain.blocks, spec.pretrain.steps
        report.commit_every = spec.pretrain.commit_every
        _read_notes(folder / REPORT_FILE, spec.pretrain, report)
        _add_up(spec.pretrain, report)
    _name_gaps(spec, report)
    return report


def _read_journal(path: Path, spec: RunSpec, report: Report, watch: Callable[[Event], None]) -> None:
    state = State(max_lag=spec.rollout.max_lag)
    units: dict[bytes, Unit] = {}  # by lease
    submitted: dict[bytes, bytes] = {}  # submission -> lease
    first_ms = last_ms = 0
    try:
        with closing(Journal(path, reading=True)) as journal:
            for event in journal.events():
                apply(state, event)
                watch(event)
                _note_unit(event, state, units, submitted)
                if isinstance(event, VersionPublished):
                    last_ms = event.at_ms
                    if event.stats is not None:
                        report.rewards.append((event.version, event.stats.reward_mean))
                    if event.accuracy >= 0:
                        report.accuracy.append((event.version, event.accuracy))
                first_ms = first_ms or event.at_ms
            for submission, told in read_notes(path.parent):
                if submission in submitted:
                    unit = units[submitted[submission]]
                    unit.seconds, unit.losses = told
            _read_submissions(journal, units, submitted)
    except EventError as error:
        raise RunFolderError(f"{path} is damaged ({error}): restore it from a backup") from error
    report.version, report.target_version = state.head, state.operations.settings(spec).rollout.versions
    report.wall_s = (last_ms - first_ms) / 1000 if last_ms else None
    report.units = sorted(
        units.values(), key=lambda unit: (unit.version, unit.block, unit.slot, unit.leased_ms)
    )
    blocks: dict[str, int] = {}
    for unit in report.units:
        if unit.accepted:
            blocks[unit.node] = blocks.get(unit.node, 0) + 1
    report.members = [
        Member(
            node=peer_id_of(node.key),
            name=node.name,
            credit=node.credit,
            accepted=node.accepted,
            rejected=node.rejected,
            units=blocks.get(peer_id_of(node.key), 0),
        )
        for node in sorted(state.nodes.values(), key=lambda node: -node.credit)
    ]


def _note_unit(event: Event, state: State, units: dict[bytes, Unit], submitted: dict[bytes, bytes]) -> None:
    match event:
        case BlockLeased() if len(units) < _MAX_UNITS:
            terms = event.lease
            units[terms.lease_id] = Unit(
                block=terms.block,
                version=terms.policy_version,
                slot=terms.slot,
                node=peer_id_of(terms.node),
                name=state.nodes[terms.node].name,
                leased_ms=terms.issued_at,
            )
        case BlockSubmitted() if (unit := units.get(event.lease_id)) is not None:
            submitted[event.submission_id] = event.lease_id
            unit.returned_s = max(0, event.at_ms - unit.leased_ms) / 1000
        case BlockJudged() if (lease := submitted.get(event.submission_id)) is not None:
            unit = units[lease]
            unit.accepted, unit.check = event.verdict.accepted, event.verdict.check
            unit.tokens, unit.flops = event.tokens, event.credit * 1e6
        case RoundFormed():
            for submission in event.submissions:
                if submission in submitted:
                    units[submitted[submission]].used = True


def _read_submissions(journal: Journal, units: dict[bytes, Unit], submitted: dict[bytes, bytes]) -> None:
    """Losses and seconds of the units whose signed submissions are still stored."""
    for submission, lease in submitted.items():
        payload = journal.payloads([submission]).get(submission)
        told = None if payload is None else read_told(payload)
        if told is not None:
            units[lease].seconds, units[lease].losses = told


def _read_notes(path: Path, spec: PretrainSpec, report: Report) -> None:
    """The learner's lines. One cut short by a crash is passed over; of a repeated one the last counts."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_NOTES).splitlines()
    except OSError:
        return
    rounds: dict[int, Round] = {}
    for line in lines:
        try:
            note = json.loads(line)
            stage = note.get("stage")
            if stage == "scaffold":
                report.scaffold = _stage(note)
                report.scaffold.loss, report.scaffold.perplexity = note["loss"], note["perplexity"]
                report.scaffold.imported = str(note.get("imported", ""))
            elif stage == "round":
                rounds[int(note["version"])] = Round(
                    version=int(note["version"]),
                    block_losses=_numbers(note["block_losses"]),
                    contributions=len(note["contributions"]),
                    merging_s=float(note["seconds"]),
                )
            elif stage == "adaptation":
                report.adaptation = _stage(note)
                report.adaptation.loss = float(note["adapted"])
                report.adaptation.perplexity = float(note["adapted_perplexity"])
                report.cold_perplexity = float(note["cold_perplexity"])
                report.adapted_perplexity = float(note["adapted_perplexity"])
                report.seams_cold = _seams(note["seams_cold"])
                report.seams_adapted = _seams(note["seams_adapted"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    report.rounds = [rounds[version] for version in sorted(rounds) if version < model_version(spec)]


def _stage(note: dict[str, Any]) -> Stage:
    tokens, parameters = int(note.get("tokens", 0)), int(note.get("parameters", 0))
    return Stage(
        losses=_numbers(note.get("losses", [])),
        seconds=float(note["seconds"]) if "seconds" in note else None,
        tokens=tokens,
        flops=credit_for_block(parameters, tokens) * 1e6,
    )


def _numbers(values: Any) -> list[float]:
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _seams(values: Any) -> list[dict[str, float]]:
    names = ("block", "relative_error", "cosine", "norm_ratio", "cka")
    return [{name: float(value[name]) for name in names} for value in values]


def _add_up(spec: PretrainSpec, report: Report) -> None:
    """Compute, and what has to happen one after the other if every volunteer has a machine of its own."""
    report.block_flops = sum(unit.flops for unit in report.units if unit.accepted)
    refused = [unit for unit in report.units if unit.accepted is False]
    each = [unit.flops / unit.tokens for unit in report.units if unit.accepted and unit.tokens]
    whole = spec.steps * spec.recipe.batch * spec.sequence
    report.refused_flops = len(refused) * whole * (sum(each) / len(each)) if each else 0.0
    path = serial = 0.0
    complete = len(report.rounds) > 0
    for entry in report.rounds:
        used = [unit for unit in report.units if unit.used and unit.version == entry.version - 1]
        times = [seconds for unit in used if (seconds := _time(unit)) is not None]
        if times:
            entry.slowest_s, entry.sum_s = max(times), sum(times)
            path += entry.slowest_s + entry.merging_s
            serial += entry.sum_s + entry.merging_s
        else:
            complete = False
    for stage in (report.scaffold, report.adaptation):
        if stage is not None:
            path += stage.seconds or 0.0
            serial += stage.seconds or 0.0
    if complete:
        report.critical_path_s, report.serial_s = path, serial


def _time(unit: Unit) -> float | None:
    return unit.returned_s if unit.seconds is None else unit.seconds


def _name_gaps(spec: RunSpec, report: Report) -> None:
    if spec.pretrain is not None:
        if report.scaffold is None:
            report.absent.append("no scaffold yet")
        if not report.units:
            report.absent.append("no block unit was lent yet")
        elif not any(unit.losses for unit in report.units):
            report.absent.append("the units' own losses are no longer stored; held-out losses per round are")
        if report.adaptation is None:
            report.absent.append("the blocks are not recombined yet: no cold or adapted perplexity, no seams")
    if (spec.pretrain is None or spec.pretrain.then_posttrain) and not report.rewards:
        report.absent.append("no version was post-trained yet: no rewards")

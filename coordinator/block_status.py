"""The block stage as viewers see it: which stage, how full each block's round is, what was measured."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from barnraise.coordinator.block_scheduler import round_ends
from barnraise.coordinator.block_workers import REPORT_FILE
from barnraise.coordinator.core import Core
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.state import State
from barnraise.protocol.pretrain import last_block_version, model_version
from barnraise.protocol.spec import RunSpec

_KEPT = ("stage", "version", "perplexity", "loss", "block_losses", "cold_perplexity", "adapted_perplexity")
_MAX_REPORT = 64 * 1024 * 1024
_cache: dict[Path, tuple[tuple[int, int], list[dict[str, Any]]]] = {}


def stage_of(state: State, spec: RunSpec) -> str:
    """``scaffold``, ``blocks round 2 of 4``, ``recombining``, ``posttrain`` or ``complete``."""
    pretrain = spec.pretrain
    if state.head >= spec.rollout.versions:
        return "complete"
    if pretrain is None or state.head >= model_version(pretrain):
        return "posttrain"
    if state.head < 0:
        return "scaffold"
    if state.head >= last_block_version(pretrain):
        return "recombining"
    return f"blocks round {state.head + 1} of {pretrain.rounds}"


def block_state(core: Core, progress: Progress, run_folder: Path | None) -> dict[str, Any] | None:
    """Details of a pretraining run, None for others.

    ``blocks``: one entry each, units of the present round by what became of them.
    ``measured``: what the learner has noted so far (losses in nats per token), oldest first.
    """
    pretrain, state = core.spec.pretrain, core.state
    if pretrain is None:
        return None
    blocks = state.blocks
    now = [hold.terms for hold in blocks.leases.values() if not hold.timed_out]
    leased = Counter(terms.block for terms in now if terms.policy_version == state.head)
    work = [item for item in blocks.work.values() if item.lease.policy_version == state.head]
    waiting = Counter(item.lease.block for item in work if item.status == "waiting")
    accepted = Counter(item.lease.block for item in work if item.status in ("accepted", "training"))
    rejected = Counter(item.lease.block for item in work if item.status == "rejected")
    return {
        "rounds": pretrain.rounds,
        "round": min(state.head + 1, pretrain.rounds),
        "round_closes_ms": round_ends(state, pretrain),
        "share": progress.learner_share,
        "blocks": [
            {
                "block": number,
                "contributors": pretrain.contributors,
                "quorum": pretrain.quorum,
                "leased": leased[number],
                "waiting": waiting[number],
                "accepted": accepted[number],
                "rejected": rejected[number],
            }
            for number in range(pretrain.blocks)
        ],
        "measured": [] if run_folder is None else _measured(run_folder / REPORT_FILE),
    }


def round_in_words(core: Core) -> str:
    """What the round still waits for."""
    pretrain = core.spec.pretrain
    assert pretrain is not None
    filled = Counter(block for block, _ in core.state.blocks.accepted)
    least = min(filled[block] for block in range(pretrain.blocks))
    emptiest = next(block for block in range(pretrain.blocks) if filled[block] == least)
    return f"block {emptiest} has {least} of {pretrain.contributors} units of this round"


def _measured(path: Path) -> list[dict[str, Any]]:
    """The report's lines without their curves; read again only when the file has changed."""
    try:
        status = path.stat()
        stamp = status.st_mtime_ns, status.st_size
        known = _cache.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        with path.open("rb") as file:
            lines = file.read(_MAX_REPORT).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):  # one that a crash cut short
            found.append(json.loads(line))
    kept = [{key: item[key] for key in _KEPT if key in item} for item in found if isinstance(item, dict)]
    _cache.clear()
    _cache[path] = stamp, kept
    return kept

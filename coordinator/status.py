"""The coordinator's state tree: what the control socket pushes to viewers, as plain values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from barnraise.coordinator import scheduler
from barnraise.coordinator.audit import is_banned
from barnraise.coordinator.block_scheduler import in_blocks
from barnraise.coordinator.block_status import block_state, round_in_words, stage_of
from barnraise.coordinator.core import Core
from barnraise.coordinator.door import Door
from barnraise.coordinator.hub import Hub, Live
from barnraise.coordinator.log_belt import LogBelt
from barnraise.coordinator.operator_events import AlarmRaised
from barnraise.coordinator.origin import Origin
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.state import Node, State
from barnraise.coordinator.submissions import bytes_per_token
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.network import Network

MAX_NODES = 256
MAX_HISTORY = 1000


def state_tree(
    core: Core,
    hub: Hub,
    progress: Progress,
    network: Network,
    started_ms: int,
    origin: Origin | None = None,
    run_folder: Path | None = None,
    public_log: LogBelt | None = None,
    door: Door | None = None,
    *,
    with_nodes: bool = True,
) -> dict[str, Any]:
    """Everything that a person or the demo wants to see; keys as the viewers expect them.

    Without nodes its cost does not grow with theirs (but for leases that are open).
    """
    state, spec = core.state, core.settings
    history = state.versions[-MAX_HISTORY:]
    rewards = [[info.version, info.stats.reward_mean] for info in history if info.stats is not None]
    accuracy = [[info.version, info.accuracy] for info in history if info.accuracy >= 0]
    complete = scheduler.is_complete(state, spec.rollout)
    addresses = network.addresses
    return {
        "kind": "coordinator",
        "run": spec.name,
        "run_id": core.run_id.hex(),
        "state": "complete" if complete else progress.learner,
        "reason": _reason(core, progress),
        "stage": stage_of(state, spec),
        "pretrain": block_state(core, progress, run_folder),
        "policy_version": state.head,
        "target_version": spec.rollout.versions,
        "reward": rewards[-1][1] if rewards else None,
        "rewards": rewards,
        "accuracy": accuracy,
        "accepted": state.accepted,
        "rejected": state.rejected,
        "rejections": dict(state.rejections),
        "spared": state.spared,
        "clawed_back": state.clawed_back,
        "appeals_open": len(state.appeals) + len(state.blocks.appeals),
        "leases_open": sum(1 for lease in state.leases.values() if not lease.timed_out)
        + sum(1 for hold in state.blocks.leases.values() if not hold.timed_out),
        "queue": len(state.waiting) + len(state.blocks.waiting),
        "queue_bytes": state.waiting_bytes,
        "queue_tokens": round(state.waiting_bytes / bytes_per_token(spec.verify)),
        "queue_oldest_s": _oldest_s(core),
        "verifying": progress.verifying,
        "verifiers": progress.verifiers,
        "verifiers_busy": progress.verifiers_busy,
        "publishing": progress.publishing,
        "groups_ready": state.pool_groups,
        "groups_usable": state.pool_usable,
        "groups_wanted": spec.rollout.groups_per_version,
        "nodes": [
            _node(node, hub.by_key.get(node.key), core.now_ms(), len(state.blocks.held.get(node.key, ())))
            for node in (_shown(core, hub) if with_nodes else ())
        ],
        "nodes_known": len(state.nodes),
        "nodes_live": len(hub.by_key),
        "newcomers": None if door is None else door.fields(),
        "bytes_in": int(getattr(network, "bytes_in", 0)),
        "bytes_out": int(getattr(network, "bytes_out", 0)),
        "peer_reports": list(hub.reports),
        "tree": None if origin is None else origin.state(),
        "training_seconds": round(sum(info.stats.seconds for info in history if info.stats is not None), 3),
        "ledger_size": len(core.ledger),
        "witnesses": None if public_log is None else public_log.witnesses(),
        "complete": complete,
        "paused": _paused(state),
        "draining_until_ms": progress.draining_until_ms,
        "alarms": [alarm_fields(alarm) for alarm in state.operations.alarms.values()],
        "admission": spec.admission,
        "amendments": len(state.operations.amendments),
        "rolling_back_to": None
        if state.operations.rollback is None
        else state.operations.rollback.to_version,
        "address": addresses[0] if addresses else "",
        "addresses": list(addresses),
        "started_ms": started_ms,
        "pid": os.getpid(),
    }


def _paused(state: State) -> dict[str, Any] | None:
    paused = state.operations.paused
    return None if paused is None else {"by": paused.by, "reason": paused.reason, "since_ms": paused.at_ms}


def alarm_fields(alarm: AlarmRaised) -> dict[str, Any]:
    """An alarm as plain values."""
    return {
        "kind": alarm.kind,
        "text": alarm.text,
        "value": alarm.value,
        "limit": alarm.limit,
        "version": alarm.version,
        "since_ms": alarm.at_ms,
    }


def _reason(core: Core, progress: Progress) -> str:
    """What keeps the run from going on, if anything does (R3)."""
    if core.trouble:
        return core.trouble
    if core.state.operations.rollback is not None and progress.learner_trouble:
        return f"rollback: {progress.learner_trouble}"
    if core.state.operations.paused is not None:
        paused = core.state.operations.paused
        return f"paused by {'a guard' if paused.by == 'guard' else 'the operator'}: {paused.reason}"
    if progress.learner_trouble:
        return f"learner: {progress.learner_trouble}"
    if progress.publisher_trouble:
        return f"publishing: {progress.publisher_trouble}"
    if progress.verifier_trouble:
        return f"verifier: {progress.verifier_trouble}"
    if progress.rollouts_trouble:
        return progress.rollouts_trouble
    if progress.learner == "collecting" and in_blocks(core.state, core.spec.pretrain):
        return round_in_words(core)
    if progress.learner == "collecting":
        spec = core.settings.rollout
        return f"{core.state.pool_usable} of {spec.groups_per_version} usable groups verified"
    return ""


def _oldest_s(core: Core) -> float:
    """How long the oldest submission has been waiting for its verdict, seconds."""
    oldest = next(iter(core.state.waiting), None)
    if oldest is None:
        return 0.0
    return round(max(0, core.now_ms() - core.state.submissions[oldest].at_ms) / 1000, 3)


def _shown(core: Core, hub: Hub) -> list[Node]:
    """Live nodes first, then those with most credit."""
    nodes = list(core.state.nodes.values())
    if len(nodes) > MAX_NODES:
        nodes.sort(key=lambda node: (node.key not in hub.by_key, -node.credit))
    return nodes[:MAX_NODES]


def _node(node: Node, live: Live | None, now_ms: int, blocks: int) -> dict[str, Any]:
    verdict = node.last_verdict
    return {
        "name": node.name,
        "node": node.key.hex(),
        "peer_id": peer_id_of(node.key),
        "state": live.state if live is not None else "away",
        "reach": live.reach if live is not None else "",
        "engine": live.engine if live is not None else "",
        "have_version": live.have_version if live is not None else -1,
        "credit": node.credit,
        "accepted": node.accepted,
        "rejected": node.rejected,
        "strikes": node.strikes,
        "banned": node.ban_reason if is_banned(node, now_ms) else "",
        "banned_until": node.banned_until,
        "verified_in_a_row": node.audit.streak,
        "unaudited": len(node.audit.unaudited),
        "leases": len(node.leases) + blocks,
        "last_verdict": "" if verdict is None else "accepted" if verdict.accepted else verdict.check,
    }

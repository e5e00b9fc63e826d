"""The run at a glance, as plain values: for the page, for ``/api/v1/run`` and for ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec

from barnraise.coordinator.core import Core
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.web.flow import Flow
from barnraise.coordinator.web.index_belt import IndexBelt
from barnraise.protocol.moments import shown_moment
from barnraise.protocol.wire import printable

CURVE_POINTS: Final = 240
_TEXT: Final = 500

View = dict[str, Any]


def overview(core: Core, hub: Hub, flow: Flow, index: IndexBelt, state: dict[str, Any], folder: Path) -> View:
    """Build it, on the event loop: its cost does not grow with the ledger.

    ``state``: the state tree without its nodes. Nothing in the result is secret: no address of a
    node, and no path of this machine.
    """
    witnesses = state.get("witnesses") or {}
    head_version = core.state.head
    holding = sum(1 for live in hub.by_key.values() if live.have_version >= head_version >= 0)
    tree = state["tree"] or {}
    view: View = {
        "name": printable(state["run"], 100),
        "run_id": state["run_id"],
        "model": printable(core.spec.model.name, 100),
        "parameters": core.spec.model.parameters,
        "phase": core.spec.phase,
        "stage": state["stage"],
        "state": state["state"],
        "waiting_for": without_paths(state["reason"], folder),
        "complete": state["complete"],
        "version": state["policy_version"],
        "target_version": state["target_version"],
        "reward": state["reward"],
        "held_out": state["accuracy"][-1][1] if state["accuracy"] else None,
        "started": shown_moment(state["started_ms"], "seconds"),
        "started_ms": state["started_ms"],
        "now": shown_moment(core.now_ms(), "seconds"),
        "now_ms": core.now_ms(),
        "join": state["address"],
        "curves": {
            "reward": thinned(state["rewards"], CURVE_POINTS),
            "held_out": thinned(state["accuracy"], CURVE_POINTS),
        },
        "nodes": {"known": state["nodes_known"], "live": state["nodes_live"]},
        "newcomers": state["newcomers"],
        "work": {
            name: state[name]
            for name in (
                *("accepted", "rejected", "spared", "clawed_back", "appeals_open", "leases_open", "queue"),
                *("queue_bytes", "queue_oldest_s", "verifying", "verifiers", "verifiers_busy"),
                *("groups_ready", "groups_usable", "groups_wanted"),
            )
        },
        "rates": asdict(flow.rates()),
        "recent": flow.recent(),
        "broadcast": {
            "version": head_version,
            "holding": holding,
            "live": state["nodes_live"],
            "publishing": state["publishing"],
            "neighbours": len(tree.get("links") or tree.get("neighbours") or ()),
            "bytes_in": state["bytes_in"],
            "bytes_out": state["bytes_out"],
        },
        "pretrain": state["pretrain"],
        "ledger": {
            "size": len(core.ledger),
            "published": index.entries.folder.size,
            "root": witnesses.get("root", ""),
            "cosigned": list(witnesses.get("cosigned", ()))[:64],
            "cosigned_age_s": witnesses.get("age_s"),
            "indexed": index.size,
        },
    }
    view["work"]["rejections"] = {printable(check, 64): n for check, n in state["rejections"].items()}
    newest = next((info.stats for info in reversed(core.state.versions) if info.stats is not None), None)
    view["training"] = None if newest is None else msgspec.structs.asdict(newest)
    view["guards"] = sorted(core.state.operations.alarms)
    view["paused"] = core.state.operations.paused is not None
    view["pause"] = _pause(core, folder)
    view["admission"] = core.settings.admission
    view["alarms"] = alarms(core, state, index, folder)
    return view


def alarms(core: Core, state: dict[str, Any], index: IndexBelt, folder: Path) -> list[dict[str, Any]]:
    """What somebody should look at now: what was seen, where to begin, and which part it is about.

    ``guard``, ``since``: of a guard's alarm; else empty, and None.
    """
    found: list[dict[str, Any]] = []

    def add(what: str, cure: str, part: str = "run", guard: str = "", since: str | None = None) -> None:
        what, cure = without_paths(what, folder), without_paths(cure, folder)
        found.append({"part": part, "what": what, "cure": cure, "guard": guard, "since": since})

    if core.trouble:
        add(core.trouble, "Nothing is accepted until the disk takes writes again.")
    else:
        reason = str(state["reason"])
        for part, cure in (
            ("learner: ", "learner.log in the run folder has the whole story."),
            ("publishing: ", "coordinator.log in the run folder has the whole story."),
            ("verifier: ", "verifier.log in the run folder has the whole story."),
        ):
            if reason.startswith(part):
                add(reason, cure)
    for guard in core.state.operations.alarms.values():
        what, _, cure = guard.text.partition(": ")
        add(what, cure, guard=guard.kind, since=shown_moment(guard.at_ms, "seconds"))
    alarm = str((state.get("witnesses") or {}).get("alarm", ""))
    if alarm:
        add(alarm, "Stop this coordinator until you know which of the two histories is the run's.", "ledger")
    if index.trouble:
        add(index.trouble, "The run itself goes on; this page may be behind.", "page")
    return found


def _pause(core: Core, folder: Path) -> dict[str, str] | None:
    paused = core.state.operations.paused
    if paused is None:
        return None
    since = shown_moment(paused.at_ms, "seconds")
    return {"by": paused.by, "reason": without_paths(paused.reason, folder), "since": since}


def without_paths(text: str, folder: Path, most: int = _TEXT) -> str:
    """A text of ours for strangers' eyes: where this machine keeps the run is nobody's business."""
    for path in {str(folder), str(folder.absolute()), str(folder.resolve())}:
        if len(path) > 1:
            text = text.replace(path, "RUN")
    return printable(text, most)


def thinned(points: Sequence[Sequence[Any]], most: int) -> list[list[Any]]:
    """At most ``most`` of the points, evenly over their order, first and last included."""
    count = len(points)
    if count <= most:
        return [list(point) for point in points]
    return [list(points[round(place * (count - 1) / (most - 1))]) for place in range(most)]


class Glance:
    """The overview, made at most once in ``keep_ms``, whoever asks."""

    def __init__(self, make: Callable[[], View], now_ms: Callable[[], int], keep_ms: int = 500) -> None:
        self._make = make
        self._now_ms = now_ms
        self._keep_ms = keep_ms
        self._view: View | None = None
        self._made_ms = 0

    def view(self) -> View:
        """Do not change it."""
        now = self._now_ms()
        if self._view is None or not 0 <= now - self._made_ms < self._keep_ms:
            self._view, self._made_ms = self._make(), now
        return self._view

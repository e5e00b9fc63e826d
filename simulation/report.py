"""A simulation's outcome as text for a terminal, and as one JSON object."""

from __future__ import annotations

from typing import Any

import msgspec

from barnraise.simulation.block_training import BLOCK_FOUND_BY
from barnraise.simulation.cheats import FOUND_BY
from barnraise.simulation.measure import Measures
from barnraise.simulation.measure_blocks import BlockFacts
from barnraise.simulation.run import Outcome

Row = tuple[str, str]


def as_json(outcome: Outcome, found: Measures) -> dict[str, Any]:
    """All numbers; keys stay what they are from release to release."""
    return {
        "scenario": outcome.scenario.name,
        "seed": outcome.seed,
        "digest": outcome.digest,
        "events": outcome.events,
        "wall_s": round(outcome.wall_s, 3),
        "pace": round(outcome.virtual_s / outcome.wall_s, 1) if outcome.wall_s else 0.0,
        "interrupted": outcome.interrupted,
        "error": None if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}",
        "ledger": {"entries": outcome.facts.get("ledger"), "root": outcome.facts.get("root")},
        "measures": msgspec.to_builtins(found, str_keys=True),
        "settings": msgspec.to_builtins(outcome.scenario),
    }


def rows(outcome: Outcome, found: Measures) -> list[Row]:
    """The essence; what did not happen is left out."""
    pace = outcome.virtual_s / outcome.wall_s if outcome.wall_s else 0.0
    lines = [
        ("scenario", f"{outcome.scenario.name}: {outcome.scenario.description}".rstrip(": ")),
        (
            "time",
            f"{_clock(outcome.virtual_s)} in {outcome.wall_s:.1f} s ({pace:.0f} x), {outcome.events} events",
        ),
        ("nodes", f"{found.nodes} came, {found.live} there at the end, {found.departures} departures"),
        (
            "units",
            f"{found.leases} lent, {found.submitted} handed in, {found.accepted} accepted"
            + "".join(f", {count} {check}" for check, count in sorted(found.rejected.items())),
        ),
        ("useful work", f"{found.useful:.1%} of {found.computed_s / 3600:.1f} node-hours of computing"),
    ]
    if found.departures:
        lines.append(("lost work", f"{found.lost_per_departure_s:.0f} s of computing per departure"))
    if found.versions:
        gaps = [b - a for a, b in zip(found.versions, found.versions[1:], strict=False)]
        every = f", one every {_clock(sum(gaps) / len(gaps))}" if gaps else ""
        lines.append(("versions", f"{len(found.versions) - 1} after the first{every}"))
    if found.adoption_s:
        halves = [half for half, _ in found.adoption_s.values()]
        lasts = [last for _, last in found.adoption_s.values()]
        lines.append(
            (
                "adoption",
                f"half of the nodes within {max(halves):.0f} s, the last after {max(lasts):.0f} s at most",
            )
        )
    if found.copies:
        lines.append(("broadcast", f"the coordinator sent {found.copies:.1f} copies for {found.nodes} nodes"))
    if found.staleness:
        lags = ", ".join(f"{lag}: {count}" for lag, count in found.staleness.items())
        lines.append(("staleness", f"units by lag in versions: {lags}"))
    if found.blocks is not None:
        lines += _of_blocks(found.blocks)
    known = FOUND_BY if found.blocks is None else BLOCK_FOUND_BY
    for kind, facts in sorted(found.cheats.items()):
        meant, _ = known.get(kind, ("", ""))
        first = "never" if facts.first_found_s is None else f"after {facts.first_found_s:.0f} s"
        checks = ", ".join(f"{check} {count}" for check, count in sorted(facts.found_by.items()))
        lines.append(
            (
                f"cheat {kind}",
                f"{facts.nodes} nodes, {facts.submitted} units, {facts.rejected} rejected "
                f"({checks or 'none'}; meant: {meant}), first {first}; "
                f"{facts.banned} bans, credit {facts.credit}",
            )
        )
    if found.honest_rejected:
        wrong = ", ".join(f"{check} {count}" for check, count in sorted(found.honest_rejected.items()))
        lines.append(("honest work rejected", wrong))
    lines.append(("credit", f"{found.credit} in {outcome.facts.get('ledger') or 0} ledger entries"))
    if found.deaths:
        lines.append(("defects", f"{found.deaths} programs ended by an exception"))
    lines.append(("event log", f"sha256 {outcome.digest}"))
    if outcome.interrupted:
        lines.append(("note", "interrupted: this is what was so far"))
    if outcome.error is not None:
        lines.append(("FAILED", f"{type(outcome.error).__name__}: {outcome.error}"))
    return lines


def _of_blocks(found: BlockFacts) -> list[Row]:
    lines: list[Row] = []
    if found.rounds:
        times = sorted(item.seconds for item in found.rounds)
        full = sum(item.full for item in found.rounds)
        lines.append(
            (
                "rounds",
                f"{len(times)}, {full} of them full, the others by quorum; half within "
                f"{_clock(times[len(times) // 2])}, the longest {_clock(times[-1])}",
            )
        )
        each = [count for item in found.rounds for count in item.differences]
        empty = sum(item.unfilled for item in found.rounds)
        lines.append(
            (
                "differences",
                f"{found.used} used, {min(each)} to {max(each)} of a block a round ({found.places} places), "
                f"{empty} places empty; {found.late} accepted too late",
            )
        )
    lines.append(
        ("used work", f"{found.used_share:.1%} of computing for rounds that are over went into a version")
    )
    if found.lost_s:
        lines.append(("lost units", f"{found.lost_per_departure_s:.0f} s of computing per departure"))
    if found.resumed:
        lines.append(("resumed", f"{found.resumed} units were taken up by a later life of their node"))
    if found.gone or found.overdue:
        checks = ", ".join(f"{check} {count}" for check, count in sorted(found.gone.items()))
        lines.append(("nodes gone", f"{found.overdue} units overdue, rejected: {checks or 'none'}"))
    for block, seconds in sorted(found.held_up_s.items()):
        lines.append((f"block {block}", f"held rounds up for {_clock(seconds)} beyond their time"))
    return lines


def _clock(seconds: float) -> str:
    """``3661`` -> ``"1 h 1 min"``"""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def command(outcome: Outcome, which: str, *, nodes: int | None, hours: float | None) -> str:
    """The command line that runs the same again."""
    parts = ["barnraise simulate", which]
    if nodes is not None:
        parts.append(f"--nodes {nodes}")
    if hours is not None:
        parts.append(f"--hours {hours:g}")
    return " ".join([*parts, f"--seed {outcome.seed}"])

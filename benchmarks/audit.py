"""What cheating earns under the audit policy: ``python -m benchmarks.audit [--json FILE]``.

The coordinator's own functions decide everything (who is audited, what is clawed back,
pauses, bans: ``barnraise.coordinator.audit``, the state's fold, the ledger's draw); the
benchmark supplies time and behaviour. A unit takes a minute; a cheated one takes
``--cost`` of that. A cheat that is audited is caught with chance ``--power``. Under a
backlog of 0.5 the verifier is behind for half of the submissions, at random.

For each rate of cheating: how many submissions until caught; how much of what the node
is credited was not earned; how much honest credit it lost; and the gain: credit per
hour against an honest node on the same machine under the same backlog.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from barnraise.coordinator.audit import epoch_events, is_audited, is_banned, verdict_events
from barnraise.coordinator.events import (
    Event,
    LeaseIssued,
    NodeJoined,
    RunOpened,
    Submitted,
    VersionPublished,
)
from barnraise.coordinator.state import State, apply
from barnraise.coordinator.workers import Judged
from barnraise.protocol.messages import RolloutLease, Verdict
from barnraise.protocol.standing import ALL, UNAUDITED

RATES = (0.0, 0.01, 0.05, 0.10, 0.50, 1.0)
BACKLOGS = (0.0, 0.5, 1.0)
UNIT_MS = 60_000
CREDIT = 1_000  # per unit
PARAMETERS = 500_000_000  # so that a token earns 1,000
NODE = b"n" * 32
RUN = b"r" * 32


@dataclass
class Life:
    """One node over the whole time, and what became of its work."""

    submissions: int = 0
    cheats: int = 0
    audits: int = 0
    first_caught: int = 0  # its submissions when it was first caught; 0: never
    cheats_until_caught: int = 0
    failures: int = 0
    bans: int = 0
    banned_ms: int = 0
    credit: int = 0
    unearned: int = 0  # of it, for cheated units
    honest_lost: int = 0  # clawed back though the work was good
    worked_ms: int = 0
    _cheated: set[bytes] = field(default_factory=set)
    _good: set[bytes] = field(default_factory=set)


def live(rate: float, backlog: float, hours: float, cost: float, power: float, seed: int) -> Life:
    """One node's life. ``rate``: share of units that it cheats on; -1: honest for 100 units, then 5 %."""
    rng = random.Random(f"{seed} {rate} {backlog}")
    secret = sha256(f"secret {seed}".encode()).digest()
    state, life, now = State(max_lag=0), Life(), 1_000
    tell(state, RunOpened(run_id=RUN, operator=NODE, at_ms=now))
    tell(state, *epoch_events(state, False, lambda _: secret, now))
    version = VersionPublished(
        version=0, manifest=RUN, weights="", size=1, stats=None, accuracy=-1.0, at_ms=now
    )
    tell(state, version, NodeJoined(node=NODE, name="n", at_ms=now))
    node = state.nodes[NODE]
    end = now + round(hours * 3_600_000)
    while now < end:
        if is_banned(node, now):
            life.banned_ms += min(node.banned_until, end) - now
            now = node.banned_until
            continue
        now = max(now, node.quiet_until)
        share = (0.05 if life.submissions >= 100 else 0.0) if rate < 0 else rate
        cheats = rng.random() < share
        took = round(UNIT_MS * (cost if cheats else 1.0))
        lease = RolloutLease(
            run_id=RUN,
            lease_id=rng.randbytes(16),
            unit_id=state.free_units[0] if state.free_units else state.next_unit,
            node=NODE,
            policy_version=0,
            prompts=1,
            group_size=2,
            issued_at=now,
            timeout_at=now + took,
            deadline_at=now + took,
        )
        now, life.worked_ms = now + took, life.worked_ms + took
        submission_id = rng.randbytes(32)
        tell(state, LeaseIssued(lease=lease, instance=b"i" * 16))
        submitted = Submitted(submission_id=submission_id, lease_id=lease.lease_id, size=1, at_ms=now)
        tell(state, submitted)
        behind = rng.random() < backlog
        audited = is_audited(state, state.submissions[submission_id], lambda _: secret, behind)
        caught = audited and cheats and rng.random() < power
        life.submissions += 1
        life.cheats += cheats
        life.audits += audited
        (life._cheated if cheats else life._good).add(submission_id)
        result = judged(submission_id, not caught, ALL if audited else UNAUDITED)
        tell(state, *verdict_events(state, [result], lambda _: secret, PARAMETERS, now))
        if caught and not life.first_caught:
            life.first_caught, life.cheats_until_caught = life.submissions, life.cheats
    life.failures, life.bans, life.credit = node.audit.failures, node.bans, node.credit
    life.unearned = sum(state.submissions[key].credit for key in life._cheated)
    life.honest_lost = sum(CREDIT - state.submissions[key].credit for key in life._good)
    assert life.credit == life.unearned + sum(state.submissions[key].credit for key in life._good)
    return life


def tell(state: State, *events: Event) -> None:
    for event in events:
        apply(state, event)


def judged(submission_id: bytes, good: bool, check: str) -> Judged:
    verdict = Verdict(
        accepted=good,
        check=check if good else "toploc-exponents",
        threshold=0.0,
        value=0.0,
        position="",
        message="",
    )
    rewards = (0.0, 1.0) if good else ()
    return Judged(submission_id=submission_id, verdict=verdict, rewards=rewards, tokens=1 if good else 0)


def table(
    hours: float, nodes: int, cost: float, power: float, backlogs: tuple[float, ...] = BACKLOGS
) -> list[dict[str, Any]]:
    """One row for each backlog and rate; gains are against the honest row of the same backlog."""
    rows = []
    for backlog in backlogs:
        honest = 0.0
        for rate in (*RATES, -1.0):
            lives = [live(rate, backlog, hours, cost, power, seed) for seed in range(nodes)]
            credit = statistics.mean(item.credit for item in lives)
            honest = credit if rate == 0 else honest
            found = [item for item in lives if item.first_caught]
            gains = [item.credit / honest - 1 for item in lives]
            rows.append(
                {
                    "backlog": backlog,
                    "rate": "patient: 100 honest, then 0.05" if rate < 0 else rate,
                    "caught": len(found),
                    "of": nodes,
                    "median_submissions_until_caught": median(item.first_caught for item in found),
                    "median_cheats_until_caught": median(item.cheats_until_caught for item in found),
                    "failures_mean": round(statistics.mean(item.failures for item in lives), 2),
                    "bans_mean": round(statistics.mean(item.bans for item in lives), 2),
                    "banned_share": round(
                        statistics.mean(item.banned_ms for item in lives) / (hours * 3_600_000), 4
                    ),
                    "credit_of_honest": round(credit / honest, 4),
                    "unearned_kept_of_honest": round(
                        statistics.mean(item.unearned for item in lives) / honest, 4
                    ),
                    "honest_credit_lost_of_honest": round(
                        statistics.mean(item.honest_lost for item in lives) / honest, 4
                    ),
                    "gain": round(statistics.mean(gains), 4),
                    "gain_error": round(statistics.stdev(gains) / nodes**0.5, 4) if nodes > 1 else None,
                    "best_gain": round(max(gains), 4),
                    "audited_share": round(
                        sum(item.audits for item in lives) / sum(item.submissions for item in lives), 4
                    ),
                }
            )
    return rows


def median(values: Any) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hours", type=float, default=72.0, help="virtual time (default: 72)")
    parser.add_argument("--nodes", type=int, default=40, help="lives for each row (default: 40)")
    parser.add_argument("--cost", type=float, default=0.1, help="time of a cheated unit (default: 0.1)")
    parser.add_argument("--power", type=float, default=1.0, help="chance that an audit finds a cheat")
    parser.add_argument("--backlogs", type=float, nargs="+", default=BACKLOGS, metavar="SHARE")
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write or print the results")
    given = parser.parse_args()
    rows = table(given.hours, given.nodes, given.cost, given.power, tuple(given.backlogs))
    report = {
        "conditions": {
            "virtual_hours": given.hours,
            "lives_per_row": given.nodes,
            "unit_s": UNIT_MS / 1000,
            "cost_of_a_cheated_unit": given.cost,
            "power_of_an_audit": given.power,
        },
        "rows": rows,
    }
    if given.json == "-":
        print(json.dumps(report, indent=2))
        return
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for row in rows:
        print(
            f"backlog {row['backlog']:.1f}  rate {row['rate']!s:31} caught {row['caught']}/{row['of']} after "
            f"{row['median_submissions_until_caught']}  credit {row['credit_of_honest']:.3f}  unearned "
            f"{row['unearned_kept_of_honest']:.3f}  lost {row['honest_credit_lost_of_honest']:.3f}  gain "
            f"{row['gain']:+.4f} +- {row['gain_error']}  bans {row['bans_mean']}  audited "
            f"{row['audited_share']:.3f}"
        )


if __name__ == "__main__":
    main()

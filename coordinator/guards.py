"""What a run's numbers say about its health: pure functions of the history, and what to do about it.

Training by reinforcement collapses in known ways, mostly announced by numbers that
every version records: rewards fall, entropy vanishes or explodes, gradients grow,
the policy runs away from what generated its data (INTELLECT-2, section 4, saw
gradient norms and entropy rise before a collapse). A guard compares the newest
versions with the run's own past, so that one set of limits fits many runs. All
limits are in ``GuardLimits``; none of them is about a single version or evaluation:
medians of ``recent`` ones are compared, so that most of them must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from barnraise.coordinator.state_parts import CLOCK_BACK_MS, VersionInfo
from barnraise.coordinator.workers import TrainStats

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, Meta(gt=0.0, le=1e6)]
Small = Annotated[int, Meta(ge=1, le=1000)]


class GuardLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a guard speaks up. ``recent`` versions are compared with the ``past`` ones before them.

    Attributes:
        pause: whether guards of the grave kinds may pause the run by themselves.
        recent, past: versions; of the held-out accuracy, evaluations.
        reward_share: alarm where the median reward falls below this share of the past's best level.
        accuracy_share: the same for the held-out accuracy.
        entropy_low, entropy_high: alarm where entropy leaves this range, as shares of the past's median.
        gradient_times: alarm where the median gradient norm exceeds the past's so many times.
        clip_share: share of tokens whose ratio was clipped.
        kl: nats per token from the policy that generated to the new one.
        usable_share: least share of groups with a non-zero advantage.
        stale_share: mean lag as a share of ``max_lag``.
        backlog_s: age of the oldest submission that waits for its verdict, seconds.
        volunteers_share: alarm where fewer nodes are there than this share of the most of the last hour.
        stall_s: no version for so long, and ten times as long as the median took, seconds.
        flood: more new keys turned away within an hour, too many having come from where they are.
    """

    pause: bool = True
    recent: Small = 3
    past: Small = 30
    reward_share: Share = 0.5
    accuracy_share: Share = 0.7
    entropy_low: Share = 0.05
    entropy_high: Positive = 3.0
    gradient_times: Positive = 10.0
    clip_share: Share = 0.3
    kl: Positive = 0.5
    usable_share: Share = 0.1
    stale_share: Share = 0.9
    backlog_s: Positive = 600.0
    volunteers_share: Share = 0.5
    stall_s: Positive = 1800.0
    flood: Small = 20


@dataclass(frozen=True, slots=True)
class Seen:
    """What a guard looks at, besides the versions' own numbers. Times in ms."""

    now_ms: int
    max_lag: int
    oldest_waiting_ms: int | None  # when the oldest unjudged submission came; None: none waits
    live: int
    most_live: int  # within the last hour
    working: bool  # the run is neither complete nor paused, and somebody is there to work
    turned_away: int = 0  # new keys, within the last hour


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong now."""

    kind: str
    value: float
    limit: float
    text: str

    @property
    def grave(self) -> bool:
        """Whether going on makes it worse, so that the run may be paused."""
        return self.kind in GRAVE


GUARDS = (
    *("reward-collapse", "held-out-collapse", "entropy-explosion", "entropy-collapse", "gradient-norm"),
    *("clip-ratio", "kl", "zero-advantage", "stale-work", "not-finite", "verifier-backlog"),
    *("no-numbers", "volunteers-lost", "stall", "clock-back", "newcomer-flood"),
)
"""Every kind of finding."""

GRAVE = frozenset(
    ("reward-collapse", "held-out-collapse", "entropy-explosion", "kl", "not-finite", "no-numbers")
)
"""Those that may pause the run."""

OF_THE_MOMENT = frozenset(("verifier-backlog", "volunteers-lost", "stall", "clock-back", "newcomer-flood"))
"""Those that are about now, not about the newest versions."""

THRESHOLDS: dict[str, tuple[str, ...]] = {
    "reward-collapse": ("reward_share", "recent", "past"),
    "held-out-collapse": ("accuracy_share", "recent", "past"),
    "entropy-explosion": ("entropy_high", "recent", "past"),
    "entropy-collapse": ("entropy_low", "recent", "past"),
    "gradient-norm": ("gradient_times", "recent", "past"),
    "clip-ratio": ("clip_share", "recent"),
    "kl": ("kl", "recent"),
    "zero-advantage": ("usable_share", "recent"),
    "stale-work": ("stale_share", "recent"),
    "not-finite": ("recent",),
    "no-numbers": (),
    "verifier-backlog": ("backlog_s",),
    "volunteers-lost": ("volunteers_share",),
    "stall": ("stall_s", "past"),
    "clock-back": (),
    "newcomer-flood": ("flood",),
}
"""Which of ``GuardLimits`` each kind goes by."""

MIN_LEVEL = 0.05  # rewards and accuracies below this are no level to fall from
MIN_VOLUNTEERS = 4
CLOCK_BACK_S = CLOCK_BACK_MS / 1000
ENTROPY_CALM = 0.1  # nats: a policy this sure of each token dissolves nowhere, however sure it was before
ENTROPY_FLOOR = 0.02  # nats: what a policy that has learnt its task may come down to
_BACK = (
    "see `barnraise report`; `barnraise coordinator rollback DIR VERSION` takes an earlier version up again"
)


def look(
    versions: Sequence[VersionInfo],
    seen: Seen,
    limits: GuardLimits,
    is_given_up: Callable[[int], bool] = lambda version: False,
) -> list[Finding]:
    """Everything that is wrong with a run now, by kind, each at most once.

    ``versions`` are all there are, or the newest: evaluations may be many versions apart. Those that a
    rollback left (``is_given_up``) say nothing about the policy; only their times count.
    """
    standing = [info for info in versions if not is_given_up(info.version)]
    newer = standing[-limits.recent - limits.past :]
    trained = [info for info in newer if info.stats is not None and _is_finite(info.stats)]
    newest = trained[-1].version if trained else 0
    stats = [info.stats for info in trained if info.stats is not None]
    recent, past = stats[-limits.recent :], stats[-limits.recent - limits.past : -limits.recent]
    findings: list[Finding | None] = [
        _volunteers(seen, limits),
        _backlog(seen, limits),
        _stall(versions, seen, limits),
        _clock(versions, seen),
        _flood(seen, limits),
        _accuracy(standing, limits),
        _no_numbers(newer),
    ]
    if len(recent) == limits.recent:
        findings += [
            _clip(recent, limits),
            _kl(recent, limits),
            _starved(recent, limits),
            _stale(recent, seen, limits),
            _not_finite(recent),
        ]
        if len(past) >= limits.recent:
            findings += [
                _reward(recent, past, newest, limits),
                _entropy(recent, past, limits),
                _gradient(recent, past, limits),
            ]
    return [finding for finding in findings if finding is not None]


def _middle(stats: Sequence[TrainStats], of: Callable[[TrainStats], float]) -> float:
    return median(of(item) for item in stats)


def _best_level(past: Sequence[float], window: int) -> float:
    """The highest median of ``window`` values in a row: a lucky version is no level."""
    return max(median(past[at : at + window]) for at in range(max(1, len(past) - window + 1)))


def _reward(
    recent: Sequence[TrainStats], past: Sequence[TrainStats], newest: int, limits: GuardLimits
) -> Finding | None:
    now = _middle(recent, lambda item: item.reward_mean)
    best = _best_level([item.reward_mean for item in past], limits.recent)
    if best < MIN_LEVEL or now >= best * limits.reward_share:
        return None
    text = f"the reward fell from {best:.3f} to {now:.3f} (version {newest}): {_BACK}"
    return Finding("reward-collapse", now, best * limits.reward_share, text)


def _accuracy(versions: Sequence[VersionInfo], limits: GuardLimits) -> Finding | None:
    evaluated = [info for info in versions if info.accuracy >= 0][-limits.recent - limits.past :]
    known = [info.accuracy for info in evaluated]
    recent, past = known[-limits.recent :], known[: -limits.recent]
    if len(past) < limits.recent:
        return None
    now, best = median(recent), _best_level(past, limits.recent)
    if best < MIN_LEVEL or now >= best * limits.accuracy_share:
        return None
    text = f"held-out accuracy fell from {best:.3f} to {now:.3f} (version {evaluated[-1].version}): {_BACK}"
    return Finding("held-out-collapse", now, best * limits.accuracy_share, text)


def _entropy(recent: Sequence[TrainStats], past: Sequence[TrainStats], limits: GuardLimits) -> Finding | None:
    now, before = _middle(recent, lambda item: item.entropy), _middle(past, lambda item: item.entropy)
    rewards = _middle(recent, lambda item: item.reward_mean), _middle(past, lambda item: item.reward_mean)
    if now > before * limits.entropy_high and now > ENTROPY_CALM:
        text = (
            f"entropy rose from {before:.3f} to {now:.3f} nats per token: the policy dissolves; "
            f"lower grpo.learning_rate or grpo.entropy_coefficient (`barnraise run amend`), or {_BACK}"
        )
        return Finding("entropy-explosion", now, before * limits.entropy_high, text)
    if now < before * limits.entropy_low and now < ENTROPY_FLOOR and rewards[0] <= rewards[1]:
        text = (
            f"entropy fell from {before:.4f} to {now:.4f} nats per token, and the reward stands still: "
            "the policy tries nothing new; raise grpo.entropy_coefficient or lower grpo.learning_rate"
        )
        return Finding("entropy-collapse", now, before * limits.entropy_low, text)
    return None


def _gradient(
    recent: Sequence[TrainStats], past: Sequence[TrainStats], limits: GuardLimits
) -> Finding | None:
    now, before = _middle(recent, lambda item: item.grad_norm), _middle(past, lambda item: item.grad_norm)
    if before <= 0 or now <= before * limits.gradient_times:
        return None
    text = (
        f"the gradient norm rose from {before:.3g} to {now:.3g}, as it does before a collapse: "
        "lower grpo.learning_rate or grpo.grad_clip (`barnraise run amend`)"
    )
    return Finding("gradient-norm", now, before * limits.gradient_times, text)


def _clip(recent: Sequence[TrainStats], limits: GuardLimits) -> Finding | None:
    now = _middle(recent, lambda item: item.clip_fraction)
    if now <= limits.clip_share:
        return None
    text = (
        f"{now:.0%} of tokens are clipped: most of the work teaches nothing; lower grpo.learning_rate "
        "or grpo.inner_epochs"
    )
    return Finding("clip-ratio", now, limits.clip_share, text)


def _kl(recent: Sequence[TrainStats], limits: GuardLimits) -> Finding | None:
    now = _middle(recent, lambda item: item.kl)
    if now <= limits.kl:
        return None
    text = (
        f"a version moves {now:.3f} nats per token away from what generated its data: lower "
        "grpo.learning_rate, or raise grpo.kl_coefficient"
    )
    return Finding("kl", now, limits.kl, text)


def _starved(recent: Sequence[TrainStats], limits: GuardLimits) -> Finding | None:
    now = _middle(recent, lambda item: item.groups_used / max(1, item.groups))
    if now >= limits.usable_share:
        return None
    reward = _middle(recent, lambda item: item.reward_mean)
    hard = "too hard" if reward < 0.5 else "too easy"
    text = (
        f"only {now:.0%} of groups have an advantage: the tasks are {hard} for this policy "
        f"(mean reward {reward:.2f}); the next run wants other ones"
    )
    return Finding("zero-advantage", now, limits.usable_share, text)


def _stale(recent: Sequence[TrainStats], seen: Seen, limits: GuardLimits) -> Finding | None:
    now = _middle(recent, lambda item: item.lag_mean)
    if seen.max_lag == 0 or now <= seen.max_lag * limits.stale_share:
        return None
    text = (
        f"the work trained on is {now:.1f} versions old, and {seen.max_lag} is the most: the "
        "learner or the broadcast is slower than the volunteers; raise rollout.groups_per_version"
    )
    return Finding("stale-work", now, seen.max_lag * limits.stale_share, text)


def _is_finite(stats: TrainStats) -> bool:
    return all(math.isfinite(value) for value in msgspec.structs.astuple(stats))


def _no_numbers(versions: Sequence[VersionInfo]) -> Finding | None:
    """The newest version's statistics are no numbers: with those nothing can be compared."""
    newest = next((info for info in reversed(versions) if info.stats is not None), None)
    if newest is None or newest.stats is None or _is_finite(newest.stats):
        return None
    text = f"version {newest.version} has statistics that are not finite: {_BACK}"
    return Finding("no-numbers", float(newest.version), 0.0, text)


def _not_finite(recent: Sequence[TrainStats]) -> Finding | None:
    skipped = [item.skipped_steps for item in recent]
    if not all(skipped):
        return None
    text = f"{sum(skipped)} optimiser steps were skipped: loss or gradient was not finite; {_BACK}"
    return Finding("not-finite", float(sum(skipped)), 0.0, text)


def _backlog(seen: Seen, limits: GuardLimits) -> Finding | None:
    if seen.oldest_waiting_ms is None:
        return None
    age = (seen.now_ms - seen.oldest_waiting_ms) / 1000
    if age <= limits.backlog_s:
        return None
    text = (
        f"a submission has been waiting for its verdict for {age:.0f} s: start more verifiers "
        "(`coordinator run --verifiers`), or allow audits at random (without --verify-all)"
    )
    return Finding("verifier-backlog", age, limits.backlog_s, text)


def _volunteers(seen: Seen, limits: GuardLimits) -> Finding | None:
    if seen.most_live < MIN_VOLUNTEERS or seen.live >= seen.most_live * limits.volunteers_share:
        return None
    text = (
        f"{seen.live} nodes are here, {seen.most_live} were within the last hour: look whether this "
        "machine is reachable (`barnraise swarm`), and what volunteers say"
    )
    return Finding("volunteers-lost", float(seen.live), seen.most_live * limits.volunteers_share, text)


def _stall(versions: Sequence[VersionInfo], seen: Seen, limits: GuardLimits) -> Finding | None:
    if not versions or not seen.working:
        return None
    times = [info.at_ms for info in versions[-limits.past :]]
    gaps = [(later - earlier) / 1000 for earlier, later in pairwise(times)]
    limit = max(limits.stall_s, 10 * median(gaps) if gaps else 0.0)
    waited = (seen.now_ms - times[-1]) / 1000
    if waited <= limit:
        return None
    text = (
        f"no version for {waited / 60:.0f} min: `barnraise status` says what the learner waits for; "
        "too few usable groups, a learner that fails, or a full disk"
    )
    return Finding("stall", waited, limit, text)


def _clock(versions: Sequence[VersionInfo], seen: Seen) -> Finding | None:
    """The clock went back: leases and bans have been moved, but nothing seems late until it has caught up."""
    if not versions:
        return None
    behind = (versions[-1].at_ms - seen.now_ms) / 1000
    if behind <= CLOCK_BACK_S:
        return None
    text = (
        f"this machine's clock is {behind:,.0f} s behind the time of version {versions[-1].version}: leases "
        "and bans end as they were meant to, but invites end that much later, and a stall or a backlog "
        "goes unnoticed; set the clock, or wait"
    )
    return Finding("clock-back", behind, CLOCK_BACK_S, text)


def _flood(seen: Seen, limits: GuardLimits) -> Finding | None:
    if seen.turned_away <= limits.flood:
        return None
    text = (
        f"{seen.turned_away} new keys were turned away within the last hour, too many having come from their "
        "addresses: if they are volunteers (a campus, a provider's NAT), `barnraise admit invite` lets them "
        "in, and [serve] new_keys_per_day more of them; if somebody makes keys, `barnraise admit mode DIR "
        "invite --keep-proven` closes the doors"
    )
    return Finding("newcomer-flood", float(seen.turned_away), float(limits.flood), text)

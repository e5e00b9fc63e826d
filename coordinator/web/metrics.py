"""``/metrics``: the run in Prometheus' words; counts are the whole run's, or since the start, as they say.

No label comes from a stranger: reasons are checks of ours, and no node has a series.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector

from barnraise.coordinator.guards import GUARDS
from barnraise.coordinator.web.flow import Flow, Histogram
from barnraise.coordinator.web.overview import View

CONTENT_TYPE = CONTENT_TYPE_LATEST
_TRAINING = {
    "reward_mean": "Mean reward of the newest version's batch.",
    "groups": "Verified groups in it.",
    "groups_used": "Those with an advantage.",
    "loss": "Its loss.",
    "grad_norm": "Gradient norm before clipping, mean of its steps.",
    "clip_fraction": "Share of tokens whose ratio was clipped.",
    "entropy": "Entropy, nats per token.",
    "kl": "From the policy that generated to the new one, nats per token.",
    "lag_mean": "Versions between generating and training, mean.",
    "seconds": "What the learner took.",
    "skipped_steps": "Optimiser steps left out because loss or gradient was not finite.",
}


class Metrics:
    """One registry of this coordinator alone."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._view: View = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def text(self, view: View) -> bytes:
        """Everything, given the overview as it is now. Not on the event loop."""
        self._view = view
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """Nothing is known of the run before somebody asks."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        if not self._view:
            return
        yield from _gauges(self._view)
        yield from _counters(self._view, self._flow)
        yield from _newcomers(self._view["newcomers"] or {})
        for name, help_, histogram in (
            ("barnraise_work_seconds", "From a lease to its submission, by our clock.", self._flow.working),
            ("barnraise_verdict_seconds", "From a submission to its verdict.", self._flow.judging),
            ("barnraise_http_first_byte_seconds", "From a request to its reply's head.", self._flow.http),
        ):
            yield _histogram(name, help_, histogram)


def _gauges(view: View) -> Iterator[Metric]:
    work, nodes, ledger = view["work"], view["nodes"], view["ledger"]
    for name, help_, value in (
        ("policy_version", "The newest published version; -1: none.", view["version"]),
        ("target_version", "The version that the run ends with.", view["target_version"]),
        ("reward", "Mean reward of the newest batch.", view["reward"]),
        ("held_out_accuracy", "Held-out accuracy of the newest evaluated version.", view["held_out"]),
        ("nodes_known", "Keys that ever joined.", nodes["known"]),
        ("nodes_live", "Nodes with a session now.", nodes["live"]),
        ("leases_open", "Units that are lent now.", work["leases_open"]),
        ("queue_submissions", "Submissions that wait for their verdict.", work["queue"]),
        ("queue_bytes", "Bytes of those.", work["queue_bytes"]),
        ("queue_oldest_seconds", "How long the oldest of them has waited.", work["queue_oldest_s"]),
        ("appeals_open", "Appeals that wait.", work["appeals_open"]),
        ("groups_ready", "Verified groups that wait for a batch.", work["groups_ready"]),
        ("groups_wanted", "Usable groups that the next batch needs.", work["groups_wanted"]),
        ("verifiers", "Verifier processes.", work["verifiers"]),
        ("verifiers_busy", "Those at work.", work["verifiers_busy"]),
        ("ledger_entries", "Entries of the ledger.", ledger["size"]),
        ("ledger_published_entries", "Entries under the published checkpoint.", ledger["published"]),
        ("ledger_cosignatures", "Nodes that cosigned the published checkpoint.", len(ledger["cosigned"])),
        ("page_index_entries", "Entries that the page's index has.", ledger["indexed"]),
        ("alarms", "Alarms in force, of guards and all others.", len(view["alarms"])),
        ("paused", "1 while nothing is lent and trained on, by the operator or a guard.", view["paused"]),
        ("start_time_seconds", "When this coordinator started, Unix time.", view["started_ms"] / 1000),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"barnraise_{name}", help_, value=float(value))
    for name, help_ in _TRAINING.items():
        if view["training"] is not None:
            value = float(view["training"][name])
            yield GaugeMetricFamily(f"barnraise_training_{name}", help_, value=value)
    guards = GaugeMetricFamily("barnraise_guard", "1 while a guard's alarm is in force.", labels=("guard",))
    for kind in GUARDS:
        guards.add_metric((kind,), float(kind in view["guards"]))
    yield guards
    run = GaugeMetricFamily("barnraise_run", "Always 1; which run this is.", labels=("run_id", "stage"))
    run.add_metric((view["run_id"], view["stage"].split(" ")[0]), 1.0)
    yield run


def _counters(view: View, flow: Flow) -> Iterator[Metric]:
    work, broadcast = view["work"], view["broadcast"]
    verdicts = CounterMetricFamily("barnraise_verdicts", "Verdicts, of the whole run.", labels=("verdict",))
    verdicts.add_metric(("accepted",), work["accepted"])
    verdicts.add_metric(("rejected",), work["rejected"])
    yield verdicts
    reasons = CounterMetricFamily(
        "barnraise_rejections", "Rejections by the check that failed.", labels=("check",)
    )
    for check, count in sorted(work["rejections"].items()):
        reasons.add_metric((check,), count)
    yield reasons
    for name, help_, value in (
        ("unaudited", "Accepted without the model's checks, of the whole run.", work["spared"]),
        ("leases", "Rollout units lent since the start.", flow.leased),
        ("leases_expired", "Leases that ended at their deadline, since the start.", flow.expired),
        ("leases_returned", "Leases given back, since the start.", flow.returned),
        ("submissions", "Submissions taken in since the start.", flow.submitted),
        ("verified_tokens", "Tokens in accepted work since the start.", flow.tokens),
        ("credit_mflop", "Credit given since the start, millions of useful FLOPs.", flow.credit),
        ("versions", "Versions published since the start.", flow.versions),
        ("network_received_bytes", "Bytes received from nodes since the start.", broadcast["bytes_in"]),
        ("network_sent_bytes", "Bytes sent to nodes since the start.", broadcast["bytes_out"]),
    ):
        yield CounterMetricFamily(f"barnraise_{name}", help_, value=float(value))


def _newcomers(counts: dict[str, int]) -> Iterator[Metric]:
    for kind, name, help_, key in (
        (
            GaugeMetricFamily,
            "new_keys_waiting",
            "New keys turned away within the last hour.",
            "turned_away_1h",
        ),
        (CounterMetricFamily, "new_keys", "Keys never seen before that came in since the start.", "let_in"),
        (
            CounterMetricFamily,
            "new_keys_refused",
            "Attempts of others, too many from there, likewise.",
            "refused",
        ),
    ):
        if key in counts:
            yield kind(f"barnraise_{name}", help_, value=float(counts[key]))


def _histogram(name: str, help_: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, help_)
    buckets: list[Any] = [[bound, count] for bound, count in histogram.buckets()]
    family.add_metric((), buckets, sum_value=histogram.total_s)
    return family

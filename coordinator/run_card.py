"""The run's card: what a model was made of, by whom, and how anybody can check that. Markdown.

The head is what Hugging Face reads of a model card. Names of volunteers are strangers' words: they are
escaped, and shortened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from barnraise.coordinator.events import Event
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_place import journal_begun, journal_path
from barnraise.coordinator.operator_events import RollbackOrdered, SettingsAmended
from barnraise.coordinator.report_data import Report, collect
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.messages import TreeHead
from barnraise.protocol.moments import shown_moment
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.wire import printable

CURVE_POINTS = 12
MOST_VOLUNTEERS = 200
MOST_NAME = 64
_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Facts:
    """What the card says beyond the report."""

    spec: RunSpec
    run_id: str
    report: Report
    amendments: tuple[SettingsAmended, ...]
    rollbacks: tuple[RollbackOrdered, ...]
    head: TreeHead | None


def facts_of(folder: Path) -> Facts:
    """Read a run folder; its coordinator may be running.

    Raises:
        RunFolderError, StorageError: it cannot be read.
    """
    spec, _, run_id = read_spec(folder)
    amendments: list[SettingsAmended] = []
    rollbacks: list[RollbackOrdered] = []

    def note(event: Event) -> None:
        if isinstance(event, SettingsAmended):
            amendments.append(event)
        elif isinstance(event, RollbackOrdered):
            rollbacks.append(event)

    head = None
    if journal_begun(folder):
        with closing(Journal(journal_path(folder), reading=True)) as journal:
            signed = journal.last_tree_head()
        head = None if signed is None else open_signed(signed, TreeHead, spec.operator)
    report = collect(folder, note)
    return Facts(spec, run_id.hex(), report, tuple(amendments), tuple(rollbacks), head)


def card(facts: Facts, version: int, plots: Sequence[str] = ()) -> str:
    """The card of ``version``, in Markdown. ``plots``: names of image files that lie beside it."""
    spec, report = facts.spec, facts.report
    accuracy = [(at, value) for at, value in report.accuracy if at <= version]
    base, count = printable(spec.model.name, MOST_NAME), len(report.members)
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([f"base_model: {json.dumps(base)}"] if _HUB_ID.fullmatch(base) else []),
        "tags: [barnraise, grpo, decentralised-training]",
        "---",
        "",
        f"# {plain(spec.name)}, version {version}",
        "",
        *([plain(spec.description), ""] if spec.description else []),
        f"Raised by {count} volunteer{'' if count == 1 else 's'} with Barnraise from {plain(base)} "
        f"({spec.model.parameters:,} parameters), by "
        + ("Mixture of Training, then rewards." if spec.phase == "pretrain" else "rewards (GRPO)."),
        "",
        "## Quality",
        "",
        *_quality(accuracy, [(at, value) for at, value in report.rewards if at <= version]),
        *(line for name in plots for line in (f"![{name.rpartition('.')[0]}]({name})", "")),
        "## Data and task",
        "",
        f"Environment `{code(spec.environment.name)}`, settings `{code(spec.environment.settings)}`; "
        f"{spec.rollout.group_size} completions a prompt, up to {spec.sampling.max_new_tokens} tokens, "
        f"temperature {spec.sampling.temperature:g}. Rewards were computed by the coordinator alone; every "
        "rollout carried TOPLOC proofs and seeded draws.",
        "",
        "## Settings",
        "",
        *_settings(facts, version),
        "## Credits",
        "",
        *_credits(report),
        "## Check it",
        "",
        *_ledger(facts),
    ]
    return "\n".join(lines) + "\n"


def _quality(accuracy: Sequence[tuple[int, float]], rewards: Sequence[tuple[int, float]]) -> list[str]:
    lines = []
    for what, points in (("Held-out accuracy", accuracy), ("Mean reward in training", rewards)):
        if points:
            chosen = [points[round(k * (len(points) - 1) / (CURVE_POINTS - 1))] for k in range(CURVE_POINTS)]
            told = ", ".join(f"{value:.3f} ({at})" for at, value in dict.fromkeys(chosen))
            lines += [f"{what} by version: {told}.", ""]
    return lines or ["Nothing was evaluated yet.", ""]


def _settings(facts: Facts, version: int) -> list[str]:
    grpo = facts.spec.grpo
    lines = [
        f"Learning rate {grpo.learning_rate:g}, clipping {grpo.clip_low:g}/{grpo.clip_high:g}, delta "
        f"{grpo.clip_delta:g}, KL {grpo.kl_coefficient:g}, entropy {grpo.entropy_coefficient:g}; "
        f"{facts.spec.rollout.groups_per_version} groups a version, at most {facts.spec.rollout.max_lag} "
        "versions old.",
        "",
    ]
    for event in facts.amendments:
        told = ", ".join(f"`{code(key)}` = `{code(value)}`" for key, value in event.changes.items())
        moment = shown_moment(event.at_ms, "seconds")
        lines.append(f"- {moment}: amended {told} ({plain(event.reason)})")
    for order in facts.rollbacks:
        moment = shown_moment(order.at_ms, "seconds")
        lines.append(f"- {moment}: rolled back to version {order.to_version} ({plain(order.reason)})")
    return [*lines, ""] if lines[-1] else lines


def _credits(report: Report) -> list[str]:
    lines = ["| volunteer | key | units accepted | credit, Mflop |", "| --- | --- | --- | --- |"]
    for member in report.members[:MOST_VOLUNTEERS]:
        who = plain(member.name)
        lines.append(f"| {who} | `{code(member.node)}` | {member.accepted:,} | {member.credit:,} |")
    if len(report.members) > MOST_VOLUNTEERS:
        lines += ["", f"And {len(report.members) - MOST_VOLUNTEERS} more, in the ledger."]
    return [*lines, ""]


def _ledger(facts: Facts) -> list[str]:
    lines = [f"Run id `{facts.run_id}`."]
    if facts.head is not None:
        moment = shown_moment(facts.head.issued_at, "seconds")
        lines.append(
            f"The ledger had {facts.head.size:,} entries under root `{facts.head.root.hex()}`, signed by the "
            f"run's key at {moment}. `barnraise ledger verify` derives every credit above from it, offline."
        )
    return lines


def plain(text: str) -> str:
    """Somebody's words as text in Markdown and HTML, in one line."""
    safe = printable(text, 500).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]()#+!|~" else letter for letter in safe)


def code(text: str) -> str:
    """The same between backticks, also within a table."""
    return printable(text, 500).replace("`", "'").replace("|", "/")


def write_card(folder: Path, target: Path, version: int) -> Path:
    """Write ``README.md`` and its curves into ``target``, which is made; return the card's path.

    Raises:
        RunFolderError, StorageError: the run cannot be read, or has no such version.
        OSError: the disk refused.
    """
    from barnraise.coordinator.report_plots import draw

    facts = facts_of(folder)
    if version > max(0, facts.report.version):
        raise RunFolderError(
            f"version {version} of {folder} is not there: the newest is {facts.report.version}"
        )
    target.mkdir(parents=True, exist_ok=True)
    plots = draw(facts.report, target) if facts.report.rewards else {}
    path = target / "README.md"
    path.write_text(card(facts, version, [place.name for place in plots.values()]), encoding="utf-8")
    return path

"""The card of an exported dataset: what the rows are, where they come from, how to check them. Markdown.

The head is what Hugging Face reads of a dataset card. A run's name is somebody's words: it is escaped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from barnraise.coordinator.rollout_source import Source, Wanted
from barnraise.coordinator.rollout_text import export_columns
from barnraise.coordinator.run_card import code, plain
from barnraise.protocol.moments import shown_moment

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


@dataclass(frozen=True)
class Summary:
    """What an export holds. ``first``, ``last``: policy versions; ``size``: bytes of its ``files``."""

    rows: int
    accepted: int
    tokens: int
    first: int
    last: int
    versions: int
    files: int
    size: int


def card(source: Source, wanted: Wanted, summary: Summary) -> str:
    """The card, in Markdown; it says the same for the same rows under the same tree head."""
    spec = source.spec
    lines = [
        "---",
        *_license(wanted),
        f"pretty_name: {json.dumps('Rollouts of ' + spec.name)}",
        "tags: [barnraise, grpo, rollouts, decentralised-training]",
        f"size_categories: [{json.dumps(_category(summary.rows))}]",
        "configs:",
        "- config_name: default",
        "  data_files:",
        "  - split: train",
        "    path: data/*.parquet",
        "---",
        "",
        f"# Rollouts of {plain(spec.name)}",
        "",
        f"What volunteers drew for a run of Barnraise: {summary.rows:,} completions with {summary.tokens:,} "
        f"tokens, of {summary.versions:,} policy versions from {summary.first} to {summary.last}; "
        f"{summary.accepted:,} accepted"
        + (f", {summary.rows - summary.accepted:,} refused (see `accepted`)." if wanted.refused else "."),
        "",
        f"Model {plain(spec.model.name)} ({spec.model.parameters:,} parameters), environment "
        f"`{code(spec.environment.name)}` with settings `{code(spec.environment.settings)}`, prompts "
        f"`{spec.environment.prompt_format}`; {spec.rollout.group_size} completions a prompt, up to "
        f"{spec.sampling.max_new_tokens} tokens at temperature {spec.sampling.temperature:g}. Rewards are "
        "the coordinator's own.",
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'rollouts = load_dataset("parquet", data_files="data/*.parquet", split="train")',
        "```",
        "",
        "## Columns",
        "",
        "| column | type | meaning |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {kind} | {text} |" for name, (kind, text) in export_columns(wanted).items()),
        "",
        "## Check it",
        "",
        *_check(source, wanted),
    ]
    return "\n".join(lines) + "\n"


def _license(wanted: Wanted) -> list[str]:
    if wanted.license:
        return [f"license: {wanted.license}"]
    return [
        "# Under which licence these rows may be used is for the run's operator to say, such as:",
        "# license: cc-by-4.0",
    ]


def _category(rows: int) -> str:
    return next(
        (name for most, name in _SIZES if rows < most), "1M<n<10M" if rows < 10_000_000 else "10M<n<100M"
    )


def _check(source: Source, wanted: Wanted) -> list[str]:
    lines = [f"Run id `{source.run_id.hex()}`."]
    if source.head is not None:
        lines.append(
            f"When this was made, the newest signed head of its ledger had {source.head.size:,} entries "
            f"under root `{source.head.root.hex()}` ({shown_moment(source.head.issued_at, 'seconds')})."
        )
    if wanted.anonymous:
        return [
            *lines,
            "",
            "Volunteers' keys, and all ids that lead to them, are left out; so the rows cannot be held "
            "against the ledger. That is no promise of anonymity: the public ledger has the credit of each, "
            "which counts its tokens, so whoever tries can often tell which rows were whose.",
        ]
    return [
        *lines,
        "",
        "`barnraise run check-rollouts DIR LEDGER` compares every submission here with the run's public "
        "ledger (its export, or its published folder): that it was lent to and handed in by that node at "
        "that policy version, that the verdict is the one in `accepted` and `check`, that the version in "
        "`trained_version` was made with it, and that its tokens are as many as its credit was given for. "
        + (
            "`proofs` are here, so the digest in `submission` is made again from the rows."
            if wanted.proofs
            else "That the tokens are those behind the digest in `submission` takes the proofs as well "
            "(`export-rollouts --proofs`, where the run kept them)."
        ),
    ]

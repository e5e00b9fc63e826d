"""From kept rows to rows for people: prompts and completions as text, and what is left out on request.

The task's text follows from its seed, the completion's from the run's own tokenizer; neither is stored.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from barnraise.coordinator.rollout_source import Wanted
from barnraise.coordinator.rollout_table import COLUMNS, METADATA, need_pyarrow, raw, schema
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.environments import build_environment
from barnraise.protocol.spec import RunSpec

if TYPE_CHECKING:
    from barnraise.protocol.environments import Task

TEXT_COLUMNS: dict[str, tuple[str, str]] = {
    "prompt": ("string", "the task, as the environment words it (before any chat template)"),
    "completion": ("string", "what was drawn, special tokens left out"),
    "task_key": ("string", "what the environment scores an answer by"),
    "prompt_tokens": ("list<uint32>", "ids of the prompt as the policy saw it"),
}
GROUP: tuple[str, str] = ("string", "rows with the same are samples of one prompt by one node")
NAMING = frozenset(
    {"node", "submission", "lease", "unit", "task_seed", "prompt_index", "engine", "generate_ms"}
    | {"submitted_at", "position", "message", "threshold", "value"}
)
"""Columns that lead to a volunteer by way of the public ledger; left out of an anonymous export."""


class Texts:
    """A run's environment and tokenizer."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        """Read them.

        Raises:
            TaskError: the environment is not installed here.
            ModelError: the tokenizer in the run folder is missing or damaged.
        """
        from barnraise.kernels.tokens import Codec

        self._environment = build_environment(spec.environment)
        self._codec = Codec(checkpoint_folder(folder, 0), spec.environment)

    def add(self, table: Any) -> Any:
        """``TEXT_COLUMNS`` beside the others."""
        pa = need_pyarrow()
        tasks: dict[int | None, tuple[Task, list[int]] | None] = {None: None}
        found: dict[str, list[Any]] = {name: [] for name in TEXT_COLUMNS}
        for seed, drawn in zip(table["task_seed"].to_pylist(), raw(table["tokens"]), strict=True):
            if seed not in tasks:
                task = self._environment.task(seed, held_out=False)
                tasks[seed] = task, self._codec.encode_prompt(task.prompt)
            known = tasks[seed]
            found["prompt"].append(None if known is None else _plain(known[0].prompt))
            found["task_key"].append(None if known is None else _plain(known[0].key))
            found["prompt_tokens"].append(None if known is None else known[1])
            found["completion"].append(_plain(self._codec.decode(np.frombuffer(drawn, "<u4").tolist())))
        kinds = {"string": pa.string(), "list<uint32>": pa.list_(pa.uint32())}
        for name, (kind, _) in TEXT_COLUMNS.items():
            table = table.append_column(name, pa.array(found[name], kinds[kind]))
        return table


def _plain(text: Any) -> str:
    """Text that is UTF-8: a task's author may make lone surrogates."""
    return str(text).encode("utf-8", "replace").decode("utf-8")


def export_columns(wanted: Wanted) -> dict[str, tuple[str, str]]:
    """The columns of an export, in order: type, and what they say."""
    found = {**(TEXT_COLUMNS if wanted.text else {}), "group": GROUP, **COLUMNS}
    gone = NAMING if wanted.anonymous else frozenset[str]()
    if not wanted.proofs or wanted.anonymous:
        gone = gone | {"proofs"}
    return {name: said for name, said in found.items() if name not in gone}


def export_schema(wanted: Wanted, metadata: dict[str, Any]) -> Any:
    """Those columns as a pyarrow schema; ``metadata`` as in ``rollout_table.schema``."""
    pa = need_pyarrow()
    known = {field.name: field.type for field in schema()}
    known |= {"prompt_tokens": known["tokens"]}
    fields = [(name, known.get(name, pa.string())) for name in export_columns(wanted)]
    return pa.schema(fields, metadata={METADATA: json.dumps(metadata, sort_keys=True).encode()})


def shown(table: Any, wanted: Wanted, texts: Texts | None, place: str) -> Any:
    """A piece's rows as they are handed on. ``place``: a word that no other piece of the export has.

    An anonymous piece is put into an order that says nothing of when its rows came in.
    """
    pa = need_pyarrow()
    if texts is not None:
        table = texts.add(table)
    groups = [
        f"{submission[:16]}-{prompt}"
        for submission, prompt in zip(
            table["submission"].to_pylist(), table["prompt_index"].to_pylist(), strict=True
        )
    ]
    if wanted.anonymous:
        order, groups = _by_content(table, groups, place)
        table = table.take(pa.array(order, pa.int64()))
    return table.append_column("group", pa.array(groups, pa.string())).select(list(export_columns(wanted)))


def _by_content(table: Any, groups: list[str], place: str) -> tuple[list[int], list[str]]:
    """An order of rows, by a hash of what each group drew, and the groups' new names in that order."""
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    drawn = list(zip(raw(table["tokens"]), raw(table["logprobs"]), strict=True))
    ranked = sorted(members.values(), key=lambda rows: _digest([part for row in rows for part in drawn[row]]))
    order = [row for rows in ranked for row in rows]
    return order, [f"{place}-{number}" for number, rows in enumerate(ranked) for _ in rows]


def _digest(parts: list[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()

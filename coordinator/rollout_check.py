"""An exported dataset held against the public ledger: whose work, under which verdict, for which credit.

What a row says of its submission must be what the ledger says. With proofs in the rows, the payload that
its node signed is put together again, and its digest must be the one in the ledger: then no token, no
log-probability and no proof was changed by whoever published the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from barnraise.coordinator.rollout_files import reading
from barnraise.coordinator.rollout_table import CLAWED_BACK, need_pyarrow, raw
from barnraise.protocol import wire
from barnraise.protocol.errors import BarnraiseError, RunFolderError
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.ledger_entries import (
    ClawedBack,
    Judged,
    LeaseIssued,
    LedgerEntry,
    Restored,
    Reviewed,
    Submitted,
    credit_for,
    evidence_of,
)
from barnraise.protocol.messages import Rollout, RolloutSubmission, Verdict
from barnraise.protocol.standing import UNAUDITED

MOST_PROBLEMS = 100
_NEEDED = ("submission", "run", "node", "lease", "policy_version", "accepted", "check", "tokens")
_ALSO = ("trained_version",)
_VERDICT = ("threshold", "value", "position", "message")
_PAYLOAD = ("engine", "generate_ms", "prompt_index", "sample_index", "logprobs", "proofs")


@dataclass
class Checked:
    """What was found. ``remade``: submissions whose digest was made again; ``elsewhere``: of other runs."""

    submissions: int = 0
    rows: int = 0
    remade: int = 0
    elsewhere: int = 0
    problems: list[str] = field(default_factory=list)
    unnamed: int = 0  # problems beyond MOST_PROBLEMS

    def say(self, submission: bytes, text: str) -> None:
        """Note a problem."""
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(f"submission {submission.hex()[:16]}: {text}")
        else:
            self.unnamed += 1


@dataclass(slots=True)
class _Said:
    """What the rows say of one submission, and then what the ledger does."""

    node: str
    lease: bytes
    version: int
    accepted: bool
    check: str
    evidence: bytes | None
    rows: int
    tokens: int
    trained: int | None
    seen: bool = False  # handed in by that node, by the ledger
    judged: Judged | Reviewed | None = None
    void: bool = False


def check_rollouts(
    folder: Path,
    run_id: bytes,
    parameters: int,
    entries: Iterable[LedgerEntry],
    uses: Mapping[bytes, int] | None = None,
) -> Checked:
    """Compare the dataset in ``folder`` with the ledger of run ``run_id``. Blocking; one pass over each.

    ``parameters``: of the run's model, which credit counts. ``uses``: ``ledger_uses.uses_of``, where the
    ledger came with them. One small record a submission is in memory.

    Raises:
        RunFolderError: no exported dataset, a damaged one, or one without the columns that this takes.
        MalformedError: the ledger is damaged.
    """
    checked = Checked()
    said = _read(folder, run_id, checked)
    terms: dict[bytes, LeaseIssued] = {}
    wanted = {item.lease for item in said.values()}
    for entry in entries:
        match entry:
            case LeaseIssued() if entry.lease_id in wanted:
                terms[entry.lease_id] = entry
            case Submitted() if entry.submission_id in said:
                item = said[entry.submission_id]
                item.seen = peer_id_of(entry.node) == item.node and entry.lease_id == item.lease
            case Judged() | Reviewed() if entry.submission_id in said:
                said[entry.submission_id].judged = entry
            case ClawedBack() | Restored() if entry.submission_id in said:
                said[entry.submission_id].void = isinstance(entry, ClawedBack)
            case _:
                pass
    used, versions = uses or {}, set((uses or {}).values())
    for submission, item in said.items():
        _compare(submission, item, terms.get(item.lease), parameters, checked)
        # Rows that were exported earlier may not know of a use; those that name one must name the right one.
        use = used.get(submission)
        if item.trained is not None and (item.trained in versions or use is not None) and use != item.trained:
            checked.say(submission, f"version {item.trained} was not made with it, by the operator's word")
    return checked


def _compare(
    submission: bytes, item: _Said, terms: LeaseIssued | None, parameters: int, checked: Checked
) -> None:
    judged = item.judged
    if not item.seen or judged is None or terms is None:
        checked.say(submission, "the ledger has no such work of that node for that lease, with a verdict")
        return
    if terms.policy_version != item.version:
        checked.say(submission, f"drawn at version {terms.policy_version}, the rows say {item.version}")
    accepted = judged.accepted and not item.void
    check = CLAWED_BACK if item.void else judged.check
    if (accepted, check) != (item.accepted, item.check):
        checked.say(submission, f"its verdict is {check!r}, the rows say {item.check!r}")
    elif item.evidence is not None and item.evidence != judged.evidence:
        checked.say(submission, "threshold, value, position or message are not those of its verdict")
    if not judged.accepted:
        return
    if item.rows != terms.prompts * terms.group_size:
        checked.say(submission, f"{item.rows} rows of {terms.prompts * terms.group_size} are here")
    elif credit_for(parameters, item.tokens) != judged.credit:
        checked.say(submission, f"its credit was not given for {item.tokens} tokens")


def _read(folder: Path, run_id: bytes, checked: Checked) -> dict[bytes, _Said]:
    said: dict[bytes, _Said] = {}
    for table in _tables(folder):
        wide = {name: raw(table[name]) for name in ("tokens", "logprobs") if name in table.column_names}
        rows = table.drop_columns(list(wide)).to_pylist()
        for name, values in wide.items():
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        checked.rows += len(rows)
        together: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            together.setdefault(row["submission"], []).append(row)
        for text, mine in together.items():
            submission = bytes.fromhex(text)
            if mine[0]["run"] != run_id.hex():
                checked.elsewhere += 1
                continue
            if submission in said:
                checked.say(submission, "its rows are here twice, or apart")
                continue
            checked.submissions += 1
            said[submission] = _said(submission, mine, checked)
    return said


def _said(submission: bytes, rows: list[dict[str, Any]], checked: Checked) -> _Said:
    row = rows[0]
    same = [name for name in (*_NEEDED[:-1], *_ALSO, *_VERDICT) if name in row]
    if any(other[name] != row[name] for other in rows for name in same if row[name] == row[name]):
        checked.say(submission, "its rows do not agree with each other")
    if "proofs" in row and all(item["proofs"] is not None for item in rows):
        if _digest(rows) == submission:
            checked.remade += 1
        else:
            checked.say(submission, "its rows do not make up what was signed: the digest differs")
    plain = row["check"] != CLAWED_BACK and not (row["check"] == UNAUDITED and not row["accepted"])
    evidence = evidence_of(_verdict(row)) if plain and all(name in row for name in _VERDICT) else None
    return _Said(
        node=row["node"],
        lease=bytes.fromhex(row["lease"]),
        version=row["policy_version"],
        accepted=row["accepted"],
        check=row["check"],
        evidence=evidence,
        rows=len(rows),
        tokens=sum(len(item["tokens"]) // 4 for item in rows),
        trained=row.get("trained_version"),
    )


def _verdict(row: dict[str, Any]) -> Verdict:
    return Verdict(accepted=row["accepted"], check=row["check"], **{name: row[name] for name in _VERDICT})


def _digest(rows: list[dict[str, Any]]) -> bytes:
    """The content id of the submission that these rows were."""
    row = rows[0]
    told = RolloutSubmission(
        run_id=bytes.fromhex(row["run"]),
        lease_id=bytes.fromhex(row["lease"]),
        policy_version=row["policy_version"],
        engine=row["engine"],
        generate_ms=row["generate_ms"],
        rollouts=tuple(
            Rollout(
                prompt=item["prompt_index"],
                sample=item["sample_index"],
                tokens=item["tokens"],
                logprobs=item["logprobs"],
                proofs=item["proofs"],
            )
            for item in rows
        ),
    )
    return hashlib.sha256(wire.encode(told)).digest()


def _tables(folder: Path) -> Iterator[Any]:
    """Row groups of the dataset, with the columns that a check takes."""
    pa = need_pyarrow()
    paths = sorted((folder / "data").glob("*.parquet"))
    if not paths:
        raise RunFolderError(f"{folder} holds no exported rollouts (data/*.parquet)")
    for path in paths:
        try:
            with reading(path) as file:
                names = file.schema_arrow.names
                missing = [name for name in _NEEDED if name not in names]
                if missing:
                    raise RunFolderError(
                        f"{path} has no column {missing[0]!r}: an anonymous export cannot be held "
                        "against the ledger"
                    )
                there = (*_NEEDED, *_ALSO, *_VERDICT, *(_PAYLOAD if "proofs" in names else ()))
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group, columns=[name for name in there if name in names])
        except BarnraiseError:
            raise
        except (OSError, pa.ArrowException, ValueError) as error:
            raise RunFolderError(f"{path} is no readable Parquet file: {error}") from error

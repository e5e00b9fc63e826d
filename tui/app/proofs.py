"""How far each receipt is proven: signed, found in the log below a cosigned head, or contradicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from barnraise.tui.app.clean import clean_text
from barnraise.tui.app.sheet import Piece
from barnraise.tui.app.view import View, number, text

MOST = 100_000


@dataclass(frozen=True)
class Proofs:
    """What the node found in the run's log since the app began, by ledger index."""

    run_id: str = ""
    proven: frozenset[int] = frozenset()
    wrong: Mapping[int, str] = field(default_factory=dict)

    def with_answer(self, run_id: str, answer: Mapping[str, Any]) -> Proofs:
        """As it is after one more answer to the command ``prove``."""
        before = self if self.run_id == run_id else Proofs(run_id)
        found, odd = answer.get("proven"), answer.get("wrong")
        good = {i for i in found if isinstance(i, int)} if isinstance(found, list) else set()
        bad = {
            pair[0]: clean_text(str(pair[1]))
            for pair in (odd if isinstance(odd, list) else ())
            if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int)
        }
        wrong = {i: why for i, why in {**before.wrong, **bad}.items() if i not in good}
        return Proofs(run_id, frozenset(sorted((before.proven | good) - bad.keys())[-MOST:]), wrong)


@dataclass(frozen=True)
class Head:
    """The newest head of the ledger that the node cosigned; size 0: none. ``at_ms``: when, or None."""

    size: int = 0
    root: str = ""
    at_ms: Any = None


def head_of(view: View) -> Head:
    """The head in the state tree."""
    witness = view.part("witness")
    return Head(int(number(witness.get("size"))), text(witness.get("root")), witness.get("cosigned_ms"))


def status(index: int, signed: bool, size: int, proofs: Proofs) -> Piece:
    """One word for a receipt, and its tone."""
    if index in proofs.wrong:
        return "WRONG", "bad"
    if index in proofs.proven:
        return "in log", "good"
    if not signed:
        return "unsigned", "warn"
    return ("signed", "") if index < size else ("newer", "dim")

"""The node's receipt book, followed: read from its file, so that it is there without a node, too.

Every signature is checked here, against the key of the run that the folder's own copy of
the signed description names: what the app calls proven was proven on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from barnraise.node.receipt_words import outcome, words
from barnraise.node.receipts import read_receipts
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, SignatureError
from barnraise.protocol.messages import Receipt, Signed
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.wire import decode
from barnraise.tui.app.clean import clean_text

MOST_SPEC = 1024 * 1024


@dataclass(frozen=True)
class Verdict:
    """A receipt for the screen. ``balance``: credit (Mflop) by all receipts up to it; ``at``: Unix, s.

    ``counts``: no later receipt speaks of the same submission.
    """

    index: int
    at: float
    submission: str
    outcome: str
    text: str
    check: str
    credit: int
    balance: int
    counts: bool = True


@dataclass(frozen=True)
class Book:
    """All receipts of one run, by ledger index.

    Attributes:
        operator: the run's key, or ``b""`` where the folder has no copy of the run's description.
        proven: receipts whose signature by that key was checked.
        problem: why the book cannot be shown or trusted whole, or ``""``.
    """

    run_id: str = ""
    operator: bytes = b""
    verdicts: tuple[Verdict, ...] = ()
    proven: int = 0
    problem: str = ""
    stamp: tuple[int, int] = (0, 0)
    receipts: tuple[Receipt, ...] = field(default=(), repr=False)

    @property
    def balance(self) -> int:
        """Credit in Mflop."""
        return self.verdicts[-1].balance if self.verdicts else 0

    def tally(self) -> Mapping[str, int]:
        """How many submissions ended how, by the receipts that count."""
        found: dict[str, int] = {}
        for verdict in self.verdicts:
            if verdict.counts:
                found[verdict.outcome] = found.get(verdict.outcome, 0) + 1
        return found


def read_book(folder: Path, run: str, before: Book) -> Book:
    """The receipts in a node's data folder of the run with id ``run`` (hex; empty: the newest there).

    Blocking. ``before`` is what was read last: it comes back if the file is as it was, and its
    receipts are not checked again.
    """
    path = _book_path(folder, run)
    if path is None:
        return before if before == Book() else Book()
    try:
        info = path.stat()
    except OSError as error:
        return Book(problem=f"cannot read {path}: {error.strerror or error}")
    name = path.parent.name
    stamp = (info.st_size, info.st_mtime_ns)
    if name == before.run_id and stamp == before.stamp:
        return before
    known = before if name == before.run_id else Book()
    operator = known.operator or _operator(path.parent)
    try:
        signed = read_receipts(path)
    except BarnraiseError as error:  # the node may be writing just now: what was read before stays
        return Book(
            name, operator, known.verdicts, known.proven, clean_text(str(error)), (0, 0), known.receipts
        )
    return _book(name, operator, signed, known, stamp)


def _book(name: str, operator: bytes, signed: list[Signed], known: Book, stamp: tuple[int, int]) -> Book:
    fresh = signed[len(known.receipts) :] if known.operator == operator else signed
    receipts = list(known.receipts) if known.operator == operator else []
    proven, problem = (known.proven, "") if known.operator == operator else (0, "")
    for one in fresh:
        try:
            if operator:
                receipts.append(open_signed(one, Receipt, operator))
                proven += 1
            else:
                receipts.append(decode(one.payload, Receipt))
        except SignatureError:
            problem = "a receipt is not signed by the run's key: keep the file, and ask the operator"
        except BarnraiseError as error:
            problem = clean_text(f"a receipt cannot be read: {error}")
    return Book(name, operator, _verdicts(receipts), proven, problem, stamp, tuple(receipts))


def _verdicts(receipts: list[Receipt]) -> tuple[Verdict, ...]:
    ordered = sorted(receipts, key=lambda receipt: receipt.ledger_index)
    last = {receipt.submission_id: receipt.ledger_index for receipt in ordered}
    credit: dict[bytes, int] = {}
    balance = 0
    shown: list[Verdict] = []
    for receipt in ordered:
        balance += receipt.credit - credit.get(receipt.submission_id, 0)
        credit[receipt.submission_id] = receipt.credit
        shown.append(
            Verdict(
                index=receipt.ledger_index,
                at=receipt.issued_at / 1000,
                submission=receipt.submission_id.hex(),
                outcome=outcome(receipt),
                text=clean_text(words(receipt)),
                check=clean_text(receipt.verdict.check),
                credit=receipt.credit,
                balance=balance,
                counts=last[receipt.submission_id] == receipt.ledger_index,
            )
        )
    return tuple(shown)


def _book_path(folder: Path, run: str) -> Path | None:
    name = run[:16].lower()
    if name:
        if any(c not in "0123456789abcdef" for c in name):
            return None
        path = folder / "runs" / name / "receipts.bin"
        return path if path.is_file() else None
    found = [path for path in folder.glob("runs/*/receipts.bin") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _operator(folder: Path) -> bytes:
    """The run's key, if the folder holds the run's description, signed, of the id that names the folder."""
    path = folder / "run.bin"
    try:
        if path.stat().st_size > MOST_SPEC:
            return b""
        signed = decode(path.read_bytes(), Signed)
        spec = open_run_spec(signed)
    except (OSError, BarnraiseError):
        return b""
    return spec.operator if run_id(signed).hex().startswith(folder.name) else b""

"""Which policy version used which work: the operator's signed word beside the ledger, not an entry of it.

Use changes no credit, and logs that are signed cannot be given other entries afterwards.
So a ledger file carries, for each version, one or more signed ``Uses``: whoever was told
two stories has both in writing. An audit holds them against the entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.ledger import Judged, LedgerEntry, Restored, Reviewed, VersionPublished
from barnraise.protocol.ledger_problems import ALTERED, CUT, Problem
from barnraise.protocol.messages import Digest, Message, Signed

MOST = 4096  # submissions in one
UNUSED = -1  # as ``version``: accepted, and nothing in it that a policy could learn from


class Uses(Message, frozen=True):
    """``version`` (or ``UNUSED``) was made from these submissions (SHA-256 of their signed payloads)."""

    run_id: Digest
    version: Annotated[int, Meta(ge=UNUSED, le=2**31)]
    submissions: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MOST)]


@dataclass
class UseCheck:
    """Holds uses against a ledger's entries, which pass through ``watch``."""

    _accepted: set[bytes] = field(default_factory=set)
    _versions: set[int] = field(default_factory=set)

    def watch(self, entries: Iterable[LedgerEntry]) -> Iterator[LedgerEntry]:
        """The same entries; what is needed of them is remembered."""
        for entry in entries:
            match entry:
                case Judged() | Reviewed():
                    if entry.accepted:
                        self._accepted.add(entry.submission_id)
                case Restored():
                    self._accepted.add(entry.submission_id)
                case VersionPublished():
                    self._versions.add(entry.version)
            yield entry

    def problems(self, uses: Sequence[Signed], operator: bytes, run_id: bytes) -> Iterator[Problem]:
        """What is wrong with them, once all entries have passed."""
        used: dict[bytes, int] = {}
        for number, signed in enumerate(uses):
            try:
                use = open_signed(signed, Uses, operator)
            except (MalformedError, SignatureError) as error:
                yield Problem(None, "use-signed", f"use {number}: {error}")
                continue
            if use.run_id != run_id:
                yield Problem(None, "use-of-run", f"use {number} belongs to another run")
                continue
            if use.version != UNUSED and use.version not in self._versions:
                text = f"use {number} is of version {use.version}, never published"
                yield Problem(None, "use-published", text, due_to=frozenset({CUT, ALTERED}))
            for submission in use.submissions:
                if submission not in self._accepted:
                    text = (
                        f"version {use.version} was made from submission {submission.hex()}, never accepted"
                    )
                    due_to = frozenset({CUT, ALTERED, ("submission_id", submission)})
                    yield Problem(None, "use-accepted", text, due_to=due_to)
                if used.setdefault(submission, use.version) != use.version:
                    text = f"submission {submission.hex()} was used for {used[submission]} and {use.version}"
                    yield Problem(None, "use-once", text)


def uses_of(uses: Sequence[Signed], operator: bytes, run_id: bytes) -> dict[bytes, int]:
    """By submission, the version that it went into, or ``UNUSED``; what is not signed is left out."""
    found: dict[bytes, int] = {}
    for signed in uses:
        try:
            use = open_signed(signed, Uses, operator)
        except (MalformedError, SignatureError):
            continue
        if use.run_id == run_id:
            found |= dict.fromkeys(use.submissions, use.version)
    return found

"""The audit rule: how much of a node's work is checked in full, and what a failed check takes back.

Both the coordinator's state and an auditor's fold of the public ledger keep one
``AuditRecord`` per node, by the same code, so that every decision not to check can be
checked by anybody, later.

The rate is BOINC's adaptive rule (D. Anderson, "BOINC: a platform for volunteer
computing", 2020, section on adaptive replication: everything below ten consecutive
valid results, then one in as many as there were), with a floor. The draw comes after
the work: HMAC-SHA256 of the submission's id under a seed whose SHA-256 was in the ledger
before the submission was, and which is published when nothing waits under it any more.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

EVERYTHING_PPM = 1_000_000
FLOOR_PPM = 100_000  # a patient cheat is never checked less than this
PROVEN_AFTER = 10  # verified in a row; twice that after one failure, four times after two, ...
MAX_DOUBLINGS = 7
MAX_UNAUDITED = 64  # submissions that may wait for the next audit to pass: it is due by then

ALL = "all"  # the check named where everything was verified
UNAUDITED = "unaudited"  # where the model's part was left out
UNVERIFIABLE = "unverifiable"  # where our own verifier failed: no mark against the node
CLAWED_BACK = "clawed-back"
RESTORED = "restored"
ACCEPTING = (ALL, UNAUDITED)


@dataclass(slots=True, frozen=True)
class Unproven:
    """Credit of work that was not checked in full. ``number``: how many were submitted before it."""

    lease_id: bytes
    number: int
    credit: int


@dataclass(slots=True)
class AuditRecord:
    """What the rule remembers of one node.

    Attributes:
        streak: submissions verified in full in a row.
        failures: failed audits, for ever (those overturned on appeal left out).
        unaudited: credited and not yet covered by a passed audit, by submission id.
        owed: the same after an audit failed, until it is taken back.
        cause: the submission whose audit failed last.
    """

    streak: int = 0
    failures: int = 0
    unaudited: dict[bytes, Unproven] = field(default_factory=dict)
    owed: dict[bytes, Unproven] = field(default_factory=dict)
    cause: bytes = b""

    @property
    def needed(self) -> int:
        """How many must be verified in a row before anything may be left out."""
        return PROVEN_AFTER << min(self.failures, MAX_DOUBLINGS)

    @property
    def proven(self) -> bool:
        return self.streak >= self.needed

    @property
    def rate_ppm(self) -> int:
        """How many in a million of its submissions are verified in full, if not all can be."""
        if not self.proven or self.owed or len(self.unaudited) >= MAX_UNAUDITED:
            return EVERYTHING_PPM
        return max(FLOOR_PPM, EVERYTHING_PPM // self.streak)

    def passed(self, number: int) -> None:
        """An audit passed: what was submitted before that submission is proven with it."""
        self.streak += 1
        if self.unaudited:
            self.unaudited = {key: item for key, item in self.unaudited.items() if item.number > number}

    def spared(self, submission_id: bytes, item: Unproven) -> None:
        """Work was credited without its audit."""
        self.unaudited[submission_id] = item

    def failed(self, submission_id: bytes) -> int:
        """An audit failed: everything since the last passed one is owed. Returns the streak that ended."""
        ended, self.streak = self.streak, 0
        self.failures += 1
        self.owed |= self.unaudited
        self.unaudited = {}
        self.cause = submission_id
        return ended

    def overturned(self, ended_streak: int) -> None:
        """A failure was none: the streak that it ended goes on."""
        self.failures -= 1
        self.streak += ended_streak


def commitment_of(seed: bytes) -> bytes:
    """What the ledger says of a seed (32 bytes) before the first draw from it."""
    return hashlib.sha256(b"barnraise/1/audit-commitment\0" + seed).digest()


def draw_ppm(seed: bytes, submission_id: bytes) -> int:
    """The draw of one submission, 0 to 999,999: audited if it is below the node's rate."""
    mac = hmac.digest(seed, b"barnraise/1/audit-draw\0" + submission_id, "sha256")
    return int.from_bytes(mac[:8], "big") * EVERYTHING_PPM >> 64

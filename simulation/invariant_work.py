"""One piece of work: whose it is, who signed it, how old it may be. Pure checks that raise ``Broken``."""

from __future__ import annotations

import hashlib

from barnraise.protocol.identity import verify
from barnraise.protocol.messages import RolloutLease, Signed
from barnraise.protocol.pretrain import BlockLease

Terms = RolloutLease | BlockLease

_SUBMISSION = b"barnraise/1/RolloutSubmission\0"  # written out: a fault in the envelope must not hide here
_BLOCK_SUBMISSION = b"barnraise/1/BlockSubmission\0"


class Broken(Exception):
    """An invariant does not hold.

    Attributes:
        name: the invariant's, such as ``"credited-once"``; what: which thing, and how.
        at_s: when it was found, in virtual seconds; None where nobody looked at the clock.
    """

    def __init__(self, name: str, what: str, at_s: float | None = None) -> None:
        self.name, self.what, self.at_s = name, what, at_s
        when = "" if at_s is None else f" at {at_s:.3f} s"
        super().__init__(f"{name}{when}: {what}")


def unit_of(terms: Terms) -> int:
    """A number for what is lent: units of rollouts count up from 0, places of blocks down from -1."""
    return ~terms.unit_id if isinstance(terms, BlockLease) else terms.unit_id


def check_submission(signed: Signed, submission_id: bytes, lease: Terms) -> None:
    """That stored work is its lease holder's own, whole.

    Raises:
        Broken: it has another signer, no valid signature, or another id.
    """
    name = short(submission_id)
    if hashlib.sha256(signed.payload).digest() != submission_id:
        raise Broken("submission-signed", f"submission {name} is stored under another id than its content's")
    domain = _BLOCK_SUBMISSION if isinstance(lease, BlockLease) else _SUBMISSION
    if signed.signer != lease.node or not verify(lease.node, domain + signed.payload, signed.signature):
        raise Broken("submission-signed", f"submission {name} is not signed by {short(lease.node)}")


def check_lag(version: int, lease: Terms, max_lag: int) -> None:
    """That rollouts are not too old for ``version``.

    Raises:
        Broken: they are.
    """
    lag = version - 1 - lease.policy_version
    if not 0 <= lag <= max_lag:
        raise Broken(
            "within-lag", f"version {version} uses rollouts of version {lease.policy_version}: lag {lag}"
        )


def short(identifier: bytes) -> str:
    """The first digits of an id, for a person."""
    return identifier.hex()[:16]

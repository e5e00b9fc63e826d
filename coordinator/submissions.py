"""The cheap checks of a submission, before it is stored: each failure costs the sender alone.

Pure functions; what needs the model (proofs, sampling, rewards) comes later and
elsewhere. The order is that of their price: signature, schema, lease.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import suppress

from barnraise.coordinator.block_fold import BlockHold
from barnraise.coordinator.state import Lease, State
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import MalformedError, RefusedError, SignatureError
from barnraise.protocol.identity import fingerprint
from barnraise.protocol.messages import RolloutSubmission, Signed
from barnraise.protocol.pretrain import BlockSubmission
from barnraise.protocol.spec import VerifySpec

MAX_WAITING = 4096
MAX_WAITING_BYTES = 2 * 1024**3
# Who was turned away for lack of room may come again for this long, whatever the deadline was.
GRACE_MS = 300_000


class TurnedAway:
    """Leases whose submissions were refused for lack of room: our backlog is not the node's fault.

    In memory alone: a restart forgets them, and begins with the room that it then has.
    """

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}  # lease -> when, ms

    def note(self, lease_id: bytes, now_ms: int) -> None:
        """The submission for ``lease_id`` came in time, and there was no room."""
        self._last[lease_id] = now_ms

    def waits(self, lease_id: bytes, now_ms: int) -> bool:
        """Whether ``lease_id`` is honoured beyond its deadline."""
        last = self._last.get(lease_id)
        return last is not None and abs(now_ms - last) < GRACE_MS  # the clock may have gone back

    def forget_all_but(self, *leases: Container[bytes]) -> None:
        """Drop what is not open any longer."""
        if self._last:
            self._last = {key: at for key, at in self._last.items() if any(key in some for some in leases)}


def open_submission(signed: Signed, node: bytes, blocks: bool = False) -> RolloutSubmission | BlockSubmission:
    """Signature, then schema. ``node`` is the key that the session proved.

    With ``blocks``, the run has block units as well: what the signature is one of decides.

    Raises:
        RefusedError: ``wrong-signer``, ``bad-signature`` or ``malformed``.
    """
    if signed.signer != node:
        raise RefusedError(
            "wrong-signer",
            f"the submission is signed by {fingerprint(signed.signer)}, but this session belongs to "
            f"{fingerprint(node)}: submit your own work",
        )
    try:
        if blocks:
            with suppress(SignatureError):
                return open_signed(signed, BlockSubmission, node)
        return open_signed(signed, RolloutSubmission, node)
    except SignatureError as error:
        raise RefusedError("bad-signature", str(error)) from None
    except MalformedError as error:
        raise RefusedError("malformed", str(error)[:400]) from None


def is_duplicate(state: State, submission_id: bytes) -> bool:
    """Whether this very content was stored before (R17)."""
    return submission_id in state.submissions or submission_id in state.blocks.work


def check_lease(
    state: State,
    run_id: bytes,
    node: bytes,
    submission: RolloutSubmission | BlockSubmission,
    now_ms: int,
    turned_away: TurnedAway | None = None,
) -> Lease | BlockHold:
    """The open lease that ``submission`` answers: in time, or in time at first and then turned away by us.

    Raises:
        RefusedError: ``wrong-run``, ``unknown-lease``, ``used-lease``, ``expired-lease``,
            ``returned-lease``, ``not-your-lease`` or ``wrong-version``.
    """
    if submission.run_id != run_id:
        raise RefusedError(
            "wrong-run",
            f"the submission is for run {submission.run_id.hex()[:16]}, this is run {run_id.hex()[:16]}: "
            "join that run's coordinator",
        )
    block = isinstance(submission, BlockSubmission)
    leases: Mapping[bytes, Lease | BlockHold] = state.blocks.leases if block else state.leases
    lease = leases.get(submission.lease_id)
    if lease is None:
        raise _no_lease(state, submission.lease_id)
    terms = lease.terms
    if terms.node != node:
        raise RefusedError("not-your-lease", "this lease was issued to another node")
    if submission.policy_version != terms.policy_version:
        raise RefusedError(
            "wrong-version",
            f"the lease is for policy version {terms.policy_version}, "
            f"the submission says {submission.policy_version}",
        )
    late = terms.deadline_at <= now_ms
    if late and not (turned_away is not None and turned_away.waits(submission.lease_id, now_ms)):
        raise RefusedError(
            "expired-lease",
            f"the deadline passed {(now_ms - terms.deadline_at) / 1000:.1f} s ago "
            "by the coordinator's clock; ask for another lease",
        )
    return lease


def _no_lease(state: State, lease_id: bytes) -> RefusedError:
    why = (state.closed.get(lease_id) or state.blocks.closed.get(lease_id) or ("unknown", 0))[0]
    match why:
        case "used":
            return RefusedError("used-lease", "this lease was answered by another submission already")
        case "expired":
            return RefusedError("expired-lease", "the lease's deadline has passed; ask for another lease")
        case "returned":
            return RefusedError("returned-lease", "this lease was given back; ask for another lease")
        case _:
            return RefusedError("unknown-lease", "no such lease was issued (or it was long ago)")


def bytes_per_token(verify: VerifySpec) -> float:
    """What a completion token weighs in a submission: its id, its log-probability, its part of a proof."""
    return 4 + 4 + (2 + 2 * verify.toploc_top_k) / verify.toploc_chunk


def check_room(waiting: int, waiting_bytes: int) -> None:
    """Bound what may wait for the verifier.

    Raises:
        RefusedError: ``busy``; the lease stays valid (``TurnedAway``), so the node sends again later.
    """
    if waiting >= MAX_WAITING or waiting_bytes >= MAX_WAITING_BYTES:
        raise RefusedError(
            "busy",
            f"{waiting} submissions ({waiting_bytes // 1_000_000} MB) wait for the verifier; "
            "send this one again in some seconds: its lease is kept for you meanwhile",
        )

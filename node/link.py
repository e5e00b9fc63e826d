"""From an address to a session: dial, compare versions, join, check what was answered.

Each step has a time limit and an error that names the address and the cause (R2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import (
    BarnraiseError,
    MalformedError,
    PeerError,
    SignatureError,
)
from barnraise.protocol.hello import our_hello, say_hello
from barnraise.protocol.identity import Identity
from barnraise.protocol.invites import read_invite
from barnraise.protocol.messages import (
    HELLO_PROTOCOL,
    SESSION_PROTOCOL,
    Acknowledged,
    Hello,
    InviteRequest,
    JoinReply,
    JoinRequest,
    RolloutLease,
    Signed,
)
from barnraise.protocol.network import Network, Stream
from barnraise.protocol.pretrain import BlockLease, last_block_version
from barnraise.protocol.runid import open_run_spec, run_id
from barnraise.protocol.session import Session
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.wire import printable

DIAL_S = 20.0
STEP_S = 20.0
MAX_ADDRESSES = 16


@dataclass(frozen=True)
class Run:
    """The run we joined: its checked spec and the id that the spec hashes to."""

    spec: RunSpec
    run_id: bytes


async def dial(network: Network, addresses: Sequence[str]) -> tuple[str, str]:
    """Connect to the first address that answers; return ``(peer id, address)``.

    Raises:
        PeerError: none did; the text has each address and why it failed.
    """
    reasons = []
    for address in addresses:
        try:
            with trio.fail_after(DIAL_S):
                return await network.connect(address), address
        except trio.TooSlowError:
            reasons.append(f"{address}: no answer within {DIAL_S:.0f} s")
        except PeerError as error:
            reasons.append(str(error) if address in str(error) else f"{address}: {error}")
    raise PeerError("; ".join(reasons))


async def greet(
    network: Network,
    peer_id: str,
    ours: Hello | None = None,
    notice: Callable[[str], None] = lambda text: None,
) -> Session:
    """Exchange versions and open a session stream (not yet running).

    ``ours``: what we speak, instead of what this installation does; ``notice`` is told what the
    other side says of it although it serves us.

    Raises:
        VersionError: the two sides do not understand each other; the text has the cure (R20).
        PeerError: the peer went away or was too slow.
    """
    try:
        with trio.fail_after(STEP_S):
            stream = await network.open_stream(peer_id, HELLO_PROTOCOL)
            try:
                reply = await say_hello(stream, ours)
            finally:
                await _close(stream)
            if reply.message:
                notice(printable(reply.message, 500))
            minor = min(reply.minor, (ours or our_hello()).minor)
            return Session(await network.open_stream(peer_id, SESSION_PROTOCOL), minor=minor)
    except trio.TooSlowError:
        raise PeerError(f"{peer_id} did not answer the version exchange within {STEP_S:.0f} s") from None


async def _close(stream: Stream) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
        await stream.close()


async def join(
    session: Session, identity: Identity, instance: bytes, name: str, engine: str, addresses: Sequence[str]
) -> tuple[Run, JoinReply]:
    """Present ourselves and check the signed spec that comes back.

    Raises:
        RefusedError: the coordinator does not want us; says why.
        SignatureError, MalformedError: what it answered is not a run's spec.
        PeerError: it went away or was too slow.
    """
    reply = await session.request(
        lambda number: JoinRequest(
            id=number,
            public_key=identity.public_key,
            instance=instance,
            name=name,
            engine=engine,
            addresses=tuple(a for a in addresses if 0 < len(a) <= 256)[:MAX_ADDRESSES],
        ),
        JoinReply,
        timeout_s=STEP_S,
    )
    return Run(open_run_spec(reply.run_spec), run_id(reply.run_spec)), reply


async def present_invite(session: Session, identity: Identity, text: str) -> None:
    """Show the coordinator an invite for our key, before joining.

    Raises:
        MalformedError: ``text`` is no invite.
        RefusedError: it lets nobody in; says why.
        PeerError: the coordinator went away or was too slow.
    """
    signed = read_invite(text)[1]
    await session.request(
        lambda number: InviteRequest(id=number, public_key=identity.public_key, invite=signed),
        Acknowledged,
        timeout_s=STEP_S,
    )


def open_lease(signed: Signed, run: Run, node: bytes, version: int, now_ms: int) -> RolloutLease | BlockLease:
    """Check a lease: the run's signature, our name on it, the version asked for, not expired.

    Versions up to the last that is made of blocks are for block units, later ones for rollouts.

    Raises:
        SignatureError, MalformedError: it is not a lease for us.
    """
    operator, pretrain = run.spec.operator, run.spec.pretrain
    lease: RolloutLease | BlockLease
    if pretrain is not None and version <= last_block_version(pretrain):
        lease = open_signed(signed, BlockLease, operator)
        if lease.block >= pretrain.blocks or lease.slot >= pretrain.contributors:
            raise MalformedError(f"a lease for block {lease.block}, place {lease.slot}, which do not exist")
    else:
        lease = open_signed(signed, RolloutLease, operator)
    if lease.run_id != run.run_id or lease.node != node:
        raise SignatureError("the lease is for another run or another node")
    if lease.policy_version != version:
        raise MalformedError(f"asked for a lease at version {version}, got one at {lease.policy_version}")
    if lease.deadline_at <= now_ms:
        raise MalformedError(
            f"the lease had expired {(now_ms - lease.deadline_at) / 1000:.0f} s ago on arrival"
        )
    return lease


def cause(error: BaseException) -> str:
    """The text of an error for a person; unexpected ones get their type as well."""
    if isinstance(error, BarnraiseError):
        return str(error)
    return f"{type(error).__name__}: {error}"

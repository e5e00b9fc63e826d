"""Every message that crosses the network: a closed set, one frozen struct each.

A frame on a stream is one byte of type code, four bytes of big-endian length and
the MessagePack body; ``barnraise.protocol.frames`` fixes code and largest body per type, so that a
length is judged before a byte is allocated. Unknown fields, coerced types and
values out of bounds are refused (``barnraise.protocol.wire``).

Structs whose docstring says *signed* travel inside ``Signed`` and are believed
only after ``barnraise.protocol.envelope`` has checked signature and signer.
Byte strings named ``*_id`` are SHA-256 digests or 16-byte nonces as their bound
says; times are milliseconds since the Unix epoch; credit is in millions of
useful floating-point operations (2 x parameters x completion tokens / 1e6).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Nonce = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=500)]
Address = Annotated[str, Meta(min_length=1, max_length=256)]
Url = Annotated[str, Meta(min_length=1, max_length=256)]
PeerId = Annotated[str, Meta(min_length=1, max_length=96)]
Millis = Annotated[int, Meta(ge=0, le=2**53)]
Version = Annotated[int, Meta(ge=0, le=2**31)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Size = Annotated[int, Meta(ge=0, le=2**53)]
RequestId = Annotated[int, Meta(ge=0, le=2**53)]

MAX_SHARD = 4 * 1024 * 1024
MAX_SUBMISSION = 16 * 1024 * 1024

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1  # what each adds: docs/protocol.md, section 5, and ``Frame.since``
HELLO_PROTOCOL = "/barnraise/hello"
SESSION_PROTOCOL = f"/barnraise/{PROTOCOL_MAJOR}/session"
SHARD_PROTOCOL = f"/barnraise/{PROTOCOL_MAJOR}/shards"
RESUMED = "resumed"  # a code of ``NoticePush``


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything on the wire: frozen, keyword-only, no unknown fields."""


class Signed(Message, frozen=True):
    """A canonical payload and an Ed25519 signature over its domain and bytes (RFC 8032)."""

    payload: Annotated[bytes, Meta(max_length=MAX_SUBMISSION)]
    signer: PublicKey
    signature: Signature


# --- version exchange (R20), on HELLO_PROTOCOL, whose id and first fields never change


class Hello(Message, frozen=True):
    """First message of a dialer: what it speaks."""

    major: Count
    minor: Count
    software: Name


class HelloReply(Message, frozen=True):
    """The listener's answer. ``compatible`` false comes with ``message`` saying who must update and how."""

    major: Count
    minor: Count
    software: Name
    compatible: bool
    message: Text


# --- session: requests carry an id that their reply repeats; pushes carry none


class Refusal(Message, frozen=True):
    """Reply to any request that is understood but not granted."""

    id: RequestId
    code: Name
    message: Text


class JoinRequest(Message, frozen=True):
    """A node presents itself; its key is the one that the transport proved."""

    id: RequestId
    public_key: PublicKey
    instance: Nonce  # random per process: tells a reconnect from a second machine with the same key (R9)
    name: Name
    engine: Name
    addresses: Annotated[tuple[Address, ...], Meta(max_length=16)]


class JoinReply(Message, frozen=True):
    """The signed run spec, the current head (a signed ``Manifest``) and the coordinator's clock."""

    id: RequestId
    run_spec: Signed
    head: Signed | None
    now: Millis


class InviteRequest(Message, frozen=True):
    """Before ``JoinRequest``, where that was refused as ``not-admitted``: a *signed* ``Invite``."""

    id: RequestId
    public_key: PublicKey
    invite: Signed


class HeartbeatRequest(Message, frozen=True):
    """Sent every few seconds: which version the node holds and what it is doing."""

    id: RequestId
    have_version: Annotated[int, Meta(ge=-1, le=2**31)]
    state: Name


class Peer(Message, frozen=True):
    """Another node that may hold shards of ``have_version``."""

    peer_id: PeerId
    addresses: Annotated[tuple[Address, ...], Meta(max_length=16)]
    have_version: Annotated[int, Meta(ge=-1, le=2**31)]


class HeartbeatReply(Message, frozen=True):
    """The coordinator's clock and the peers worth asking for shards."""

    id: RequestId
    now: Millis
    head_version: Annotated[int, Meta(ge=-1, le=2**31)]
    peers: Annotated[tuple[Peer, ...], Meta(max_length=64)]


class ManifestRequest(Message, frozen=True):
    """Ask for the head manifest (the coordinator also pushes it when it changes)."""

    id: RequestId


class ManifestReply(Message, frozen=True):
    id: RequestId
    head: Signed | None


class LeaseRequest(Message, frozen=True):
    """Ask for one unit of work at ``policy_version``, which the node has loaded."""

    id: RequestId
    policy_version: Version


class LeaseReply(Message, frozen=True):
    """A signed ``RolloutLease``, or none with the reason and when to ask again."""

    id: RequestId
    lease: Signed | None
    reason: Text
    retry_after_ms: Annotated[int, Meta(ge=0, le=600_000)]


class LeaseReturn(Message, frozen=True):
    """Give a lease back unfinished (leaving, out of memory); never a penalty."""

    id: RequestId
    lease_id: Nonce
    reason: Text


class SubmitRequest(Message, frozen=True):
    """A signed ``RolloutSubmission``."""

    id: RequestId
    submission: Signed


class Acknowledged(Message, frozen=True):
    """Reply to ``LeaseReturn`` and ``SubmitRequest``: durable on the coordinator's disk.

    ``duplicate`` is true when the same content had been stored before (R17).
    """

    id: RequestId
    duplicate: bool


class ReceiptsRequest(Message, frozen=True):
    """Ask for our receipts with a ledger index of at least ``from_index`` (after a reconnect)."""

    id: RequestId
    from_index: Count


class ReceiptsReply(Message, frozen=True):
    """Signed ``Receipt`` payloads, oldest first, at most 256; ask again from the last index + 1."""

    id: RequestId
    receipts: Annotated[tuple[Signed, ...], Meta(max_length=256)]


class PeerReport(Message, frozen=True):
    """A peer sent a corrupt shard or a forged head. Hearsay, for the operator; nobody is judged by it."""

    id: RequestId
    peer_id: PeerId
    code: Literal["corrupt", "forged"]
    message: Text


class AppealRequest(Message, frozen=True):
    """Ask to have a rejected submission verified again (replied to by ``Acknowledged``).

    ``receipt``: its signed ``Receipt``; ``submission``: the work itself, if the node still
    has it. The outcome comes as another receipt for the same submission.
    """

    id: RequestId
    receipt: Signed
    submission: Signed | None


class HeadPush(Message, frozen=True):
    """Unasked: a new policy version was published (signed ``Manifest``)."""

    head: Signed


class ReceiptPush(Message, frozen=True):
    """Unasked: a verdict on one of our submissions (signed ``Receipt``)."""

    receipt: Signed


class NoticePush(Message, frozen=True):
    """Unasked: something a person should read (a second node with the same key, run finished).

    ``RESUMED``: work is lent again, and a node that was told to wait need not.
    """

    code: Name
    message: Text


class AmendmentsPush(Message, frozen=True):
    """Unasked, after joining and with every change: *signed* ``Amendment`` payloads, by number."""

    amendments: Annotated[tuple[Signed, ...], Meta(min_length=1, max_length=64)]


class StandingPush(Message, frozen=True):
    """Unasked, after joining and with every verdict: how the coordinator sees this node.

    ``verified``: submissions verified in full in a row, of ``needed`` before anything may
    be left out; ``strikes``: rejections not yet made good; no lease before ``quiet_until``
    nor ``banned_until`` (0: no ban), and why.
    """

    verified: Count
    needed: Count
    strikes: Count
    quiet_until: Millis
    banned_until: Millis
    reason: Text


# --- shards, on SHARD_PROTOCOL: one request, one reply header, then raw bytes; repeat or close


class ShardRequest(Message, frozen=True):
    """Ask for one shard by its SHA-256."""

    digest: Digest


class ShardReply(Message, frozen=True):
    """``size`` raw bytes follow on the stream; ``found`` false means none do."""

    found: bool
    size: Annotated[int, Meta(ge=0, le=MAX_SHARD)]


# --- signed payloads


class FileEntry(Message, frozen=True):
    """One file of a version, cut into shards of ``shard_size`` (the last may be shorter)."""

    path: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
    size: Size
    sha256: Digest
    shards: Annotated[tuple[Digest, ...], Meta(max_length=65_536)]


class PatchEntry(Message, frozen=True):
    """A patch for the weight file ``path``, cut into shards like a file (``barnraise.kernels.patch_format``).

    It begins with ``path`` of version ``base_version`` and leads to that of the next
    entry for the same path, the last one to the manifest's own.
    """

    path: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
    base_version: Version
    size: Size
    sha256: Digest
    shards: Annotated[tuple[Digest, ...], Meta(max_length=65_536)]


class Manifest(Message, frozen=True):
    """*Signed* by the run's key: one published policy version, whole, and shorter ways to it."""

    run_id: Digest
    version: Version
    created_at: Millis
    shard_size: Annotated[int, Meta(ge=1024, le=MAX_SHARD)]
    files: Annotated[tuple[FileEntry, ...], Meta(min_length=1, max_length=256)]
    patches: Annotated[tuple[PatchEntry, ...], Meta(max_length=64)] = ()
    mirrors: Annotated[tuple[Url, ...], Meta(max_length=8)] = ()  # see barnraise.protocol.mirrors


class RolloutLease(Message, frozen=True):
    """*Signed* by the run's key: one rollout unit lent to one node.

    Prompts are not named: both sides derive them (``barnraise.protocol.seeds``).
    After ``timeout_at`` the unit may go to somebody else as well; after
    ``deadline_at`` a submission is refused.
    """

    run_id: Digest
    lease_id: Nonce
    unit_id: Count
    node: PublicKey
    policy_version: Version
    prompts: Annotated[int, Meta(ge=1, le=4096)]
    group_size: Annotated[int, Meta(ge=1, le=4096)]
    issued_at: Millis
    timeout_at: Millis
    deadline_at: Millis


class Rollout(Message, frozen=True):
    """One completion: sample ``sample`` of the lease's prompt ``prompt``.

    ``tokens``: uint32 little-endian, T of them, the end-of-sequence token included
    if it was drawn. ``logprobs``: float32 little-endian, T of them, log-probability
    (nats) of each token under the policy at the run's temperature. ``proofs``:
    ceil(T / 32) TOPLOC proofs of 258 bytes each (fewer where a chunk has fewer
    than 128 values, see ``barnraise.kernels.toploc``).
    """

    prompt: Count
    sample: Count
    tokens: Annotated[bytes, Meta(max_length=4 * 65_536)]
    logprobs: Annotated[bytes, Meta(max_length=4 * 65_536)]
    proofs: Annotated[bytes, Meta(max_length=258 * 2048)]


class RolloutSubmission(Message, frozen=True):
    """*Signed* by the node: the finished unit. Its content id is the SHA-256 of the payload."""

    run_id: Digest
    lease_id: Nonce
    policy_version: Version
    engine: Name
    generate_ms: Count
    rollouts: Annotated[tuple[Rollout, ...], Meta(min_length=1, max_length=65_536)]


class Verdict(Message, frozen=True):
    """What the checks found. A rejection names check, threshold, value and position (R18).

    ``check`` is ``"all"`` when accepted. ``position`` says where: ``"rollout 3 chunk 0"``.
    """

    accepted: bool
    check: Name
    threshold: float
    value: float
    position: Text
    message: Text


class Receipt(Message, frozen=True):
    """*Signed* by the run's key, kept by the node: with the ledger it settles a dispute offline (R16)."""

    run_id: Digest
    node: PublicKey
    lease_id: Nonce
    submission_id: Digest
    verdict: Verdict
    credit: Size
    ledger_index: Count
    issued_at: Millis


class TreeHead(Message, frozen=True):
    """*Signed* by the run's key: size and RFC 6962 root of the ledger at a moment."""

    run_id: Digest
    size: Count
    root: Digest
    issued_at: Millis


Kind = Literal["request", "reply", "push", "plain"]


class Frame(Struct, frozen=True):
    """How one message type travels: its code, and the largest body in bytes.

    ``since`` is the protocol minor that brought it; it is sent to nobody who speaks an older one.
    """

    code: int
    type: type[Message]
    limit: int
    kind: Kind
    since: int = 0

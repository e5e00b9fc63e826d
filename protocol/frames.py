"""All frames of all streams: code and largest body per message type, for ``barnraise.protocol.wire``."""

from __future__ import annotations

from barnraise.protocol.log_messages import LOG_FRAMES
from barnraise.protocol.messages import (
    MAX_SUBMISSION,
    Acknowledged,
    AmendmentsPush,
    AppealRequest,
    Frame,
    HeadPush,
    HeartbeatReply,
    HeartbeatRequest,
    Hello,
    HelloReply,
    InviteRequest,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
    ManifestReply,
    ManifestRequest,
    Message,
    NoticePush,
    PeerReport,
    ReceiptPush,
    ReceiptsReply,
    ReceiptsRequest,
    Refusal,
    ShardReply,
    ShardRequest,
    StandingPush,
    SubmitRequest,
)
from barnraise.protocol.reach_messages import REACH_FRAMES
from barnraise.protocol.tree_messages import TREE_FRAMES

_SMALL = 8 * 1024
_HEAD = 4 * 1024 * 1024

FRAMES: tuple[Frame, ...] = (
    Frame(1, Hello, 1024, "plain"),
    Frame(2, HelloReply, 4096, "plain"),
    Frame(10, Refusal, 4096, "reply"),
    Frame(11, JoinRequest, _SMALL, "request"),
    Frame(12, JoinReply, _HEAD, "reply"),
    Frame(13, HeartbeatRequest, 1024, "request"),
    Frame(14, HeartbeatReply, 512 * 1024, "reply"),
    Frame(15, ManifestRequest, 64, "request"),
    Frame(16, ManifestReply, _HEAD, "reply"),
    Frame(17, LeaseRequest, 64, "request"),
    Frame(18, LeaseReply, _SMALL, "reply"),
    Frame(19, LeaseReturn, 4096, "request"),
    Frame(20, SubmitRequest, MAX_SUBMISSION + 1024, "request"),
    Frame(21, Acknowledged, 64, "reply"),
    Frame(22, ReceiptsRequest, 64, "request"),
    Frame(23, ReceiptsReply, 1024 * 1024, "reply"),
    Frame(24, PeerReport, 4096, "request"),
    Frame(25, AppealRequest, MAX_SUBMISSION + 16 * 1024, "request"),
    Frame(26, InviteRequest, 4096, "request", since=1),
    Frame(30, HeadPush, _HEAD, "push"),
    Frame(31, ReceiptPush, _SMALL, "push"),
    Frame(32, NoticePush, 4096, "push"),
    Frame(33, StandingPush, 4096, "push"),
    Frame(34, AmendmentsPush, 1024 * 1024, "push", since=1),
    Frame(40, ShardRequest, 128, "plain"),
    Frame(41, ShardReply, 64, "plain"),
    *TREE_FRAMES,
    *REACH_FRAMES,
    *LOG_FRAMES,
)

FRAME_BY_CODE: dict[int, Frame] = {frame.code: frame for frame in FRAMES}
FRAME_BY_TYPE: dict[type[Message], Frame] = {frame.type: frame for frame in FRAMES}

"""All frames of all streams: code and largest body per message type, for ``barnraise.protocol.wire``."""

from __future__ import annotations

from barnraise.protocol import messages
from barnraise.protocol.messages import Frame, Message
from barnraise.protocol.tree_messages import TREE_FRAMES

FRAMES: tuple[Frame, ...] = (*messages.FRAMES, *TREE_FRAMES)
FRAME_BY_CODE: dict[int, Frame] = {frame.code: frame for frame in FRAMES}
FRAME_BY_TYPE: dict[type[Message], Frame] = {frame.type: frame for frame in FRAMES}

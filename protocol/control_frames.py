"""What crosses a control socket: frames of a daemon and of its viewers.

Four bytes of length (big-endian) and a MessagePack map with a ``type``. A length is judged
before anything is read into memory for it.
"""

from __future__ import annotations

import socket
import struct
from typing import Annotated, Any

import msgspec
import trio

from barnraise.protocol.errors import BarnraiseError, MalformedError

State = dict[str, Any]

MAX_COMMAND = 64 * 1024
MAX_STATE = 16 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class CommandFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="command"):
    """A viewer's command."""

    id: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    args: Annotated[dict[str, Any], msgspec.Meta(max_length=64)]


class StateFrame(msgspec.Struct, frozen=True, tag="state"):
    """The whole state, from the daemon."""

    state: State


class ReplyFrame(msgspec.Struct, frozen=True, tag="reply"):
    """The daemon's answer to the command with the same ``id``."""

    id: int
    result: dict[str, Any] | None
    error: str  # "" if it worked


_commands = msgspec.msgpack.Decoder(CommandFrame)
_answers: msgspec.msgpack.Decoder[StateFrame | ReplyFrame] = msgspec.msgpack.Decoder(StateFrame | ReplyFrame)


def encode(message: msgspec.Struct, limit: int) -> bytes:
    """A frame with ``message`` in it.

    Raises:
        MalformedError: its body would be longer than ``limit`` bytes.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > limit:
        raise MalformedError(f"{len(body)} bytes are too many for a frame of at most {limit}")
    return _LENGTH.pack(len(body)) + body


async def receive(stream: trio.SocketStream, limit: int) -> bytearray | None:
    """The body of the next frame, or None at the end.

    Raises:
        MalformedError: longer than ``limit`` bytes, or cut short.
    """
    data = bytearray()
    size = _LENGTH.size
    while len(data) < size:
        piece = await stream.receive_some(min(size - len(data), 65_536))
        if not piece:
            if data:
                raise MalformedError("the connection ended inside a frame")
            return None
        data += piece
        if size == _LENGTH.size and len(data) == size:
            (length,) = _LENGTH.unpack(data)
            if length > limit:
                raise MalformedError(f"a frame of {length} bytes, over the limit of {limit}")
            size += length
    return data[_LENGTH.size :]


def read_blocking(sock: socket.socket) -> bytes:
    """The body of the next frame of a daemon. Blocking.

    Raises:
        MalformedError: longer than ``MAX_STATE``.
        OSError: the connection ended or timed out.
    """

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = sock.recv(min(count - len(data), 65_536))
            if not piece:
                raise ConnectionResetError("it closed the connection")
            data += piece
        return bytes(data)

    (length,) = _LENGTH.unpack(exactly(_LENGTH.size))
    if length > MAX_STATE:
        raise MalformedError(f"a frame of {length} bytes, over the limit of {MAX_STATE}")
    return exactly(length)


def decode_command(body: bytes | bytearray) -> CommandFrame:
    """What a viewer sent.

    Raises:
        MalformedError: no command.
    """
    try:
        return _commands.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError(f"not a command: {error}") from None


def decode_answer(body: bytes | bytearray) -> StateFrame | ReplyFrame:
    """What a daemon sent.

    Raises:
        MalformedError: neither a state nor a reply.
    """
    try:
        return _answers.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedError(f"not a daemon's answer: {error}") from None


def result_of(reply: ReplyFrame) -> dict[str, Any]:
    """The result in a reply.

    Raises:
        BarnraiseError: the daemon refused; its text.
    """
    if reply.error:
        raise BarnraiseError(reply.error)
    return reply.result or {}

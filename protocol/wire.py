"""Messages to bytes and back: canonical MessagePack inside length-prefixed frames.

There is one accepted encoding per message, *the canonical form*: a MessagePack map
with every field in declared order, each value in its shortest form, floats as
float64. Decoding is typed, so that the bounds in the annotations judge a claimed
length or nesting before anything is allocated for it; then the result is encoded
again and must give the same bytes. That one comparison refuses duplicate keys,
reordered fields, long-form integers, an integer where a float belongs, and trailing
bytes, for every type alike: nobody can vary a message without breaking its hash.

``FrameDecoder`` is sans-I/O; ``send_message`` and ``MessageReader`` are its thin
shell around a ``Stream``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.frames import FRAME_BY_CODE, FRAME_BY_TYPE
from barnraise.protocol.messages import Message
from barnraise.protocol.network import Stream

T = TypeVar("T")

HEADER_BYTES = 5
_READ = 256 * 1024
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return the canonical form of ``message``. Values are not validated; the reader does that."""
    return _ENCODER.encode(message)


def decode(data: bytes, type_: type[T]) -> T:
    """Read one message of ``type_`` from exactly ``data``, which must be its canonical form.

    Memory used is bounded by a small multiple of ``len(data)``, whatever lengths
    ``data`` claims; the caller bounds ``len(data)``.

    Raises:
        MalformedError: not MessagePack, not canonical, or fields missing, unknown,
            of another type, out of bounds, NaN or infinite.
    """
    kind: Any = type_  # hashable, which mypy does not know of type[T]
    try:
        message: T = _decoder(kind).decode(data)
        canonical = _ENCODER.encode(message)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        raise MalformedError(f"{_name(type_)}: {printable(str(error))}") from None
    if canonical != data:
        raise MalformedError(
            f"{_name(type_)}: not in canonical form (fields in declared order, each once; shortest "
            "integers; floats as float64; nothing after the end)"
        )
    if _holds_floats(kind):
        reject_nonfinite(message, _name(type_))
    return message


def reject_nonfinite(value: object, where: str = "value") -> None:
    """Refuse NaN and infinities anywhere inside ``value`` (structs, sequences, dicts).

    Raises:
        MalformedError: naming the first field that is not finite.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise MalformedError(f"{where} is {value}: only finite numbers are allowed")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            reject_nonfinite(getattr(value, name), f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            reject_nonfinite(item, where)
    elif isinstance(value, dict):
        for item in value.values():
            reject_nonfinite(item, where)


def printable(text: str, limit: int = 200) -> str:
    """Make text from outside safe for a terminal or a log: no control characters, bounded length."""
    cleaned = "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[: limit + 1]
    )
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def frame(message: Message) -> bytes:
    """Return ``message`` as it travels: type code (1 byte), length (4 bytes, big-endian), body.

    Raises:
        MalformedError: the body is larger than its type's limit, so every peer would refuse it.
    """
    entry = FRAME_BY_TYPE[type(message)]
    body = encode(message)
    if len(body) > entry.limit:
        raise MalformedError(
            f"our own {entry.type.__name__} has {len(body)} bytes, more than the {entry.limit} that peers "
            "accept: send less in one message (smaller units)"
        )
    return bytes((entry.code,)) + len(body).to_bytes(4, "big") + body


class FrameDecoder:
    """Bytes in, messages out. Judges each header before its body is buffered.

    After a ``MalformedError`` the stream has no known frame boundary left: every
    later call raises again, and the caller resets the stream.
    """

    def __init__(self, allowed: Iterable[type[Message]]) -> None:
        self._allowed = frozenset(allowed)
        self._buffer = bytearray()
        self._broken: MalformedError | None = None

    def feed(self, data: bytes) -> None:
        """Add received bytes. Call ``next`` until it returns None before feeding more."""
        if self._broken is None:
            self._buffer += data

    def next(self) -> Message | None:
        """Return the next whole message, or None until more bytes are fed.

        Raises:
            MalformedError: unknown code, a type not allowed here, a length over the
                type's limit, or a body that is not that message.
        """
        if self._broken is not None:
            raise self._broken
        try:
            return self._next()
        except MalformedError as error:
            self._broken = error
            self._buffer.clear()
            raise

    def take(self, limit: int) -> bytes:
        """Remove up to ``limit`` buffered bytes as they are: raw data that follows a message."""
        data = bytes(self._buffer[:limit])
        del self._buffer[:limit]
        return data

    @property
    def buffered(self) -> int:
        """Bytes fed and not yet consumed: non-zero at end-of-file means a truncated frame."""
        return len(self._buffer)

    def _next(self) -> Message | None:
        if not self._buffer:
            return None
        entry = FRAME_BY_CODE.get(self._buffer[0])
        if entry is None:
            raise MalformedError(f"unknown message code {self._buffer[0]}")
        if entry.type not in self._allowed:
            raise MalformedError(f"{entry.type.__name__} is not expected on this stream")
        if len(self._buffer) < HEADER_BYTES:
            return None
        length = int.from_bytes(self._buffer[1:HEADER_BYTES], "big")
        if length > entry.limit:
            raise MalformedError(
                f"{entry.type.__name__} claims {length} bytes; at most {entry.limit} are accepted"
            )
        end = HEADER_BYTES + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return decode(body, entry.type)


async def send_message(stream: Stream, message: Message) -> None:
    """Write one frame.

    Raises:
        PeerError: the stream is gone.
        MalformedError: our message is over its type's limit; nothing was written.
    """
    await stream.write(frame(message))


class MessageReader:
    """Reads the frames of one stream, and raw bytes between them. No timeouts: the caller sets them."""

    def __init__(self, stream: Stream, allowed: Iterable[type[Message]]) -> None:
        self._stream = stream
        self._decoder = FrameDecoder(allowed)

    async def receive(self) -> Message | None:
        """Return the next message, or None when the peer closed its side between two frames.

        Raises:
            MalformedError: what arrived is not a frame allowed here, or ends in the middle of one.
            PeerError: the stream is gone.
        """
        while (message := self._decoder.next()) is None:
            data = await self._stream.read(_READ)
            if not data:
                if self._decoder.buffered:
                    raise MalformedError(
                        f"the stream ended inside a message, after {self._decoder.buffered} bytes of it"
                    )
                return None
            self._decoder.feed(data)
        return message

    async def read_exactly(self, size: int) -> bytes:
        """Return the ``size`` raw bytes that follow the last message. The caller bounds ``size``.

        Raises:
            MalformedError: the stream ended before.
            PeerError: the stream is gone.
        """
        parts = [self._decoder.take(size)]
        missing = size - len(parts[0])
        while missing:
            data = await self._stream.read(min(missing, _READ))
            if not data:
                raise MalformedError(f"the stream ended {missing} bytes before the end of {size} raw bytes")
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)


@lru_cache(maxsize=256)
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_)


@lru_cache(maxsize=256)
def _holds_floats(type_: Any) -> bool:
    return _mentions_float(msgspec.inspect.type_info(type_), set())


def _mentions_float(info: object, seen: set[object]) -> bool:
    if isinstance(info, msgspec.inspect.FloatType | msgspec.inspect.AnyType):
        return True
    if isinstance(info, msgspec.inspect.StructType):
        if info.cls in seen:
            return False
        seen.add(info.cls)
        return any(_mentions_float(field.type, seen) for field in info.fields)
    if isinstance(info, msgspec.inspect.UnionType):
        return any(_mentions_float(item, seen) for item in info.types)
    if isinstance(info, msgspec.inspect.TupleType):
        return any(_mentions_float(item, seen) for item in info.item_types)
    if isinstance(info, msgspec.inspect.CollectionType):
        return _mentions_float(info.item_type, seen)
    if isinstance(info, msgspec.inspect.DictType):
        return _mentions_float(info.value_type, seen)
    return False


def _name(type_: Any) -> str:
    return str(getattr(type_, "__name__", None) or "message")

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from barnraise.protocol import ledger, wire
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.frames import FRAME_BY_TYPE, FRAMES
from barnraise.protocol.messages import (
    MAX_SUBMISSION,
    HeartbeatRequest,
    Hello,
    LeaseRequest,
    Manifest,
    ManifestRequest,
    NoticePush,
    Receipt,
    RolloutLease,
    RolloutSubmission,
    ShardReply,
    Signed,
    SubmitRequest,
    TreeHead,
    Verdict,
)
from barnraise.protocol.spec import RunSpec

FRAMED = [frame.type for frame in FRAMES]
PAYLOADS = [Signed, Manifest, RolloutLease, RolloutSubmission, Verdict, Receipt, TreeHead, RunSpec]
ENTRIES = list(ledger.LedgerEntry.__args__)
EVERY_TYPE = [*FRAMED, *PAYLOADS, *ENTRIES]
every_type = pytest.mark.parametrize("type_", EVERY_TYPE, ids=lambda type_: type_.__name__)
thorough = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


def strategy(info: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a declared type, inside its bounds, small enough to be quick."""
    match info:
        case inspect.IntType():
            high = info.le if info.lt is None else info.lt - 1
            return st.integers(-(2**31) if info.ge is None else info.ge, 2**53 if high is None else high)
        case inspect.FloatType():
            low = info.ge if info.gt is None else info.gt
            return st.floats(
                low,
                info.le if info.lt is None else info.lt,
                exclude_min=info.gt is not None,
                exclude_max=info.lt is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern, fullmatch=True).filter(lambda text: "\n" not in text)
        case inspect.StrType():
            low = info.min_length or 0
            return st.text(min_size=low, max_size=min(info.max_length or 20, low + 20))
        case inspect.BytesType():
            low = info.min_length or 0
            return st.binary(min_size=low, max_size=min(info.max_length or 40, low + 40))
        case inspect.VarTupleType():
            low = info.min_length or 0
            return st.lists(strategy(info.item_type), min_size=low, max_size=low + 2).map(tuple)
        case inspect.DictType():
            low = info.min_length or 0
            keys, items = strategy(info.key_type), strategy(info.value_type)
            return st.dictionaries(keys, items, min_size=low, max_size=low + 3)
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.UnionType():
            return st.one_of([strategy(item) for item in info.types])
        case inspect.StructType():
            fields = {field.name: strategy(field.type) for field in info.fields}
            return st.builds(info.cls, **fields)
    raise NotImplementedError(info)


def values(type_: type[Any]) -> st.SearchStrategy[Any]:
    return strategy(inspect.type_info(type_))


def read_or_refuse(data: bytes, type_: type[Any]) -> None:
    """Hostile bytes have two ends: MalformedError, or a message that is exactly those bytes."""
    try:
        message = wire.decode(data, type_)
    except MalformedError as refusal:
        text = str(refusal)
    else:
        text = ""
        assert wire.encode(message) == data
    assert text == wire.printable(text, 400)


@every_type
@thorough
@given(st.data())
def test_every_message_survives_the_round_trip(type_: type[Any], data: st.DataObject) -> None:
    message = data.draw(values(type_))
    encoded = wire.encode(message)
    assert wire.decode(encoded, type_) == message
    if type_ in FRAME_BY_TYPE:
        decoder = wire.FrameDecoder([type_])
        for byte in wire.frame(message):
            assert decoder.next() is None
            decoder.feed(bytes([byte]))
        assert decoder.next() == message
        assert decoder.buffered == 0


@every_type
@thorough
@given(noise=st.binary(max_size=300))
def test_random_bytes_are_refused(type_: type[Any], noise: bytes) -> None:
    read_or_refuse(noise, type_)


@every_type
@thorough
@given(st.data())
def test_a_truncated_or_lengthened_message_is_refused(type_: type[Any], data: st.DataObject) -> None:
    encoded = wire.encode(data.draw(values(type_)))
    end = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(MalformedError):
        wire.decode(encoded[:end], type_)
    with pytest.raises(MalformedError):
        wire.decode(encoded + data.draw(st.binary(min_size=1, max_size=9)), type_)


@every_type
@thorough
@given(st.data())
def test_a_flipped_bit_never_gives_another_reading_of_the_same_bytes(
    type_: type[Any], data: st.DataObject
) -> None:
    encoded = bytearray(wire.encode(data.draw(values(type_))))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    read_or_refuse(bytes(encoded), type_)


@every_type
@thorough
@given(st.data())
def test_an_unknown_a_missing_or_a_repeated_field_is_refused(type_: type[Any], data: st.DataObject) -> None:
    fields = list(msgspec.msgpack.decode(wire.encode(data.draw(values(type_)))).items())
    with pytest.raises(MalformedError):
        wire.decode(pack_map([*fields, ("surprise", 1)]), type_)
    if not fields:
        return
    where = data.draw(st.integers(0, len(fields) - 1))
    for altered in (
        fields[:where] + fields[where + 1 :],
        [*fields, fields[where]],
        [fields[where], *fields],
    ):
        with pytest.raises(MalformedError):
            wire.decode(pack_map(altered), type_)
    if len(fields) > 1:
        with pytest.raises(MalformedError, match="canonical"):
            wire.decode(pack_map(fields[1:] + fields[:1]), type_)


@every_type
@thorough
@given(st.data())
def test_a_value_of_another_type_is_never_coerced(type_: type[Any], data: st.DataObject) -> None:
    plain = msgspec.msgpack.decode(wire.encode(data.draw(values(type_))))
    places = list(leaves(plain, ()))
    for place in places[:40]:
        value = at(plain, place)
        for other in lookalikes(value):
            try:
                wire.decode(msgspec.msgpack.encode(replaced(plain, place, other)), type_)
            except MalformedError:
                continue
            assert other is None or value is None, place  # an optional field: both are values of its type


def pack_map(items: list[tuple[str, Any]]) -> bytes:
    assert len(items) < 65_536
    body = b"".join(msgspec.msgpack.encode(part) for item in items for part in item)
    return (bytes([0x80 | len(items)]) if len(items) < 16 else b"\xde" + len(items).to_bytes(2, "big")) + body


def leaves(value: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {key: replaced(item, path[1:], new) if key == path[0] else item for key, item in value.items()}
    return [replaced(item, path[1:], new) if i == path[0] else item for i, item in enumerate(value)]


def lookalikes(value: Any) -> list[Any]:
    match value:
        case bool():
            return [int(value), float(value), str(value), "true"]
        case int():
            return [str(value), float(value), value == 1, value + 0.5, [value]]
        case float():
            return [str(value), int(value) % 2**63, float("nan"), float("inf"), float("-inf"), None]
        case str():
            return [value.encode(), [value], None, 7]
        case bytes():
            return [value.hex(), list(value), 7] if value else [0, ""]
    return [0, "", False]


def test_a_long_form_integer_is_refused() -> None:
    assert wire.decode(b"\x81\xa2id\x05", ManifestRequest).id == 5
    with pytest.raises(MalformedError, match="canonical"):
        wire.decode(b"\x81\xa2id\xcd\x00\x05", ManifestRequest)


@every_type
def test_a_claimed_length_is_never_allocated(type_: type[Any]) -> None:
    example = wire.encode(next_example(type_))
    huge = [kind + b"\xff\xff\xff\xff" for kind in (b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9")]
    huge.append(b"\xdd\x00\x01\x00\x00")  # the longest array that any type allows, with nothing inside
    places = range(min(len(example), 400))
    wire.decode(example, type_)
    tracemalloc.start()
    try:
        for place in places:
            for header in huge:
                with pytest.raises(MalformedError):
                    wire.decode(example[:place] + header + example[place:], type_)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def next_example(type_: type[Any]) -> Any:
    found: list[Any] = []

    @settings(max_examples=1, deadline=None, database=None, derandomize=True)
    @given(values(type_))
    def keep(value: Any) -> None:
        found.append(value)

    keep()
    return found[0]


@every_type
def test_deep_nesting_is_refused(type_: type[Any]) -> None:
    for opener in (b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\xff\xff", b"\xc7\x01\x01"):
        with pytest.raises(MalformedError):
            wire.decode(opener * 20_000, type_)
        with pytest.raises(MalformedError):
            wire.decode(b"\x81\xa2id" + opener * 20_000, type_)


def test_numbers_that_are_not_finite_are_refused_in_messages_and_named() -> None:
    good = Verdict(accepted=True, check="all", threshold=1.0, value=0.5, position="", message="")
    for bad in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(MalformedError, match=r"Verdict\.value"):
            wire.decode(wire.encode(msgspec.structs.replace(good, value=bad)), Verdict)
    with pytest.raises(MalformedError, match="finite"):
        wire.reject_nonfinite({"a": [1.0, (2.0, float("nan"))]})


@given(code=st.integers(0, 255), length=st.integers(0, 2**32 - 1), rest=st.binary(max_size=40))
def test_a_hostile_header_is_refused_before_its_body(code: int, length: int, rest: bytes) -> None:
    decoder = wire.FrameDecoder([HeartbeatRequest, NoticePush, SubmitRequest])
    decoder.feed(bytes([code]) + length.to_bytes(4, "big") + rest)
    limit = {13: 1024, 32: 4096, 20: MAX_SUBMISSION + 1024}.get(code, -1)
    try:
        message = decoder.next()
    except MalformedError:
        pass
    else:
        assert length <= limit
        assert message is not None or length > len(rest)


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.type.__name__)
def test_each_limit_is_judged_at_the_header(frame: Any) -> None:
    decoder = wire.FrameDecoder(FRAMED)
    decoder.feed(bytes([frame.code]) + (frame.limit + 1).to_bytes(4, "big"))
    with pytest.raises(MalformedError, match=f"at most {frame.limit}"):
        decoder.next()
    decoder = wire.FrameDecoder(FRAMED)
    decoder.feed(bytes([frame.code]) + frame.limit.to_bytes(4, "big"))
    assert decoder.next() is None


def test_a_type_that_is_not_allowed_is_refused_by_its_first_byte() -> None:
    decoder = wire.FrameDecoder([Hello])
    decoder.feed(bytes([20]))
    with pytest.raises(MalformedError, match="SubmitRequest is not expected"):
        decoder.next()


def test_after_a_bad_frame_nothing_more_is_read_or_kept() -> None:
    decoder = wire.FrameDecoder([ManifestRequest])
    decoder.feed(b"\x0f\x00\x00\x00\x01\xc1" + wire.frame(ManifestRequest(id=1)))
    for _ in range(2):
        with pytest.raises(MalformedError):
            decoder.next()
        decoder.feed(bytes(1000))
        assert decoder.buffered == 0


def test_our_own_oversized_message_is_not_sent() -> None:
    signed = Signed(payload=bytes(MAX_SUBMISSION + 2000), signer=bytes(32), signature=bytes(64))
    with pytest.raises(MalformedError, match="our own SubmitRequest"):
        wire.frame(SubmitRequest(id=1, submission=signed))


def test_text_from_outside_cannot_steer_a_terminal() -> None:
    assert wire.printable("a\x1b[31m\nb") == "a�[31m�b"
    assert len(wire.printable("x" * 10_000)) == 200
    with pytest.raises(MalformedError) as caught:
        wire.decode(msgspec.msgpack.encode({"\x1b]0;owned\x07" * 100: 1}), Hello)
    assert str(caught.value).isprintable()


class Piecewise:
    """A stream that hands out ``data`` in pieces of ``size`` bytes and keeps what is written."""

    peer_id = "somebody"

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size, self.written = memoryview(data), size, b""

    async def read(self, limit: int) -> bytes:
        count = min(limit, self.size)
        piece, self.data = self.data[:count], self.data[count:]
        return bytes(piece)

    async def write(self, data: bytes) -> None:
        self.written += data

    async def close(self) -> None: ...
    async def reset(self) -> None: ...


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
async def test_a_reader_finds_messages_and_the_raw_bytes_between_them(size: int) -> None:
    header = ShardReply(found=True, size=30_000)
    raw = bytes(range(250)) * 120
    reader = wire.MessageReader(Piecewise((wire.frame(header) + raw) * 2, size), [ShardReply])
    for _ in range(2):
        assert await reader.receive() == header
        assert await reader.read_exactly(len(raw)) == raw
    assert await reader.receive() is None


async def test_a_stream_that_ends_early_is_malformed_and_not_merely_closed() -> None:
    data = wire.frame(LeaseRequest(id=7, policy_version=3))
    for end in range(1, len(data)):
        with pytest.raises(MalformedError, match="ended inside"):
            await wire.MessageReader(Piecewise(data[:end], 4), [LeaseRequest]).receive()
    with pytest.raises(MalformedError, match="2 bytes before the end"):
        await wire.MessageReader(Piecewise(b"12345", 4), []).read_exactly(7)


async def test_send_message_writes_one_frame() -> None:
    stream = Piecewise(b"", 1)
    await wire.send_message(stream, ManifestRequest(id=5))
    assert stream.written == b"\x0f\x00\x00\x00\x05\x81\xa2id\x05"

"""A corpus's description, and who reads which part of it."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.corpus import (
    Corpus,
    corpus_bytes,
    corpus_digest,
    permuted,
    read_corpus,
    sequences,
)
from barnraise.protocol.errors import MalformedError

RUN = bytes(32)


def corpus(shards: int = 6, tokens: int = 64, **changes: object) -> Corpus:
    made = Corpus(
        format=1,
        name="test",
        licence="none",
        source="made up",
        tokenizer=bytes(32),
        vocabulary=256,
        width=2,
        shard_tokens=tokens,
        train=tuple(bytes([1, number]) + bytes(30) for number in range(shards)),
        held_out=(b"\2" + bytes(31),),
    )
    return msgspec.structs.replace(made, **changes)


@given(size=st.integers(1, 400), key=st.binary(max_size=16))
def test_a_permutation_sends_every_index_somewhere_else(size: int, key: bytes) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_never_change() -> None:
    # part of the protocol: both sides derive the same sequences for ever
    assert [permuted(index, 10, b"key") for index in range(10)] == [7, 8, 4, 1, 3, 9, 0, 5, 6, 2]


@given(
    shards=st.integers(2, 9), streams=st.integers(1, 2), length=st.integers(1, 64), epochs=st.integers(1, 3)
)
def test_an_epoch_reads_every_sequence_once_and_streams_share_nothing(
    shards: int, streams: int, length: int, epochs: int
) -> None:
    made = corpus(shards)
    each = 64 // length
    seen: list[set[tuple[int, int]]] = []
    for stream in range(streams):
        mine = len(range(stream, shards, streams)) * each
        places = sequences(made, length, RUN, stream, streams, 0, mine * epochs)
        assert set(Counter(places).values()) == {epochs}
        assert all(first % length == 0 and first + length <= 64 for _, first in places)
        assert places[3:5] == sequences(made, length, RUN, stream, streams, 3, len(places[3:5]))
        seen.append(set(places))
    assert sum(map(len, seen)) == len(set().union(*seen)) == shards * each


def test_a_stream_stays_in_a_shard_until_it_is_read() -> None:
    places = sequences(corpus(), 8, RUN, 0, 1, 0, 48)
    shards = [shard for shard, _ in places]
    assert shards == sorted(shards, key=shards.index)


def test_epochs_and_runs_go_different_ways() -> None:
    made = corpus()
    first, second = sequences(made, 8, RUN, 0, 1, 0, 48), sequences(made, 8, RUN, 0, 1, 48, 48)
    assert first != second
    assert sequences(made, 8, bytes([1]) * 32, 0, 1, 0, 48) != first


def test_a_description_is_read_as_written_and_named_by_its_bytes() -> None:
    made = corpus()
    assert read_corpus(corpus_bytes(made)) == made
    assert corpus_digest(made) != corpus_digest(corpus(name="other"))


@pytest.mark.parametrize(
    "changes",
    [
        {"train": ()},
        {"held_out": ()},
        {"held_out": corpus().train[:1]},
        {"vocabulary": 70_000},
        {"shard_tokens": 2**20, "width": 4, "vocabulary": 70_000},
    ],
    ids=[
        "nothing to train on",
        "nothing held out",
        "held out and trained on",
        "ids too narrow",
        "long shard",
    ],
)
def test_an_inconsistent_corpus_is_refused(changes: dict[str, object]) -> None:
    bad = corpus(**changes)
    if changes.get("shard_tokens"):
        bad = corpus(shard_tokens=2 * 1024 * 1024, width=4)
    with pytest.raises(MalformedError):
        corpus_bytes(bad)
    with pytest.raises(MalformedError):
        read_corpus(msgspec.msgpack.encode(bad))


def test_too_many_streams_or_too_long_sequences_are_refused() -> None:
    with pytest.raises(MalformedError, match="smaller shards"):
        sequences(corpus(2), 8, RUN, 0, 3, 0, 1)
    with pytest.raises(MalformedError, match="do not fit"):
        sequences(corpus(), 65, RUN, 0, 1, 0, 1)

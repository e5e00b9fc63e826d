"""A corpus for pretraining: tokenised text in shards, and who trains on which part of it.

The description is itself content-addressed: a run spec names the SHA-256 of its
canonical encoding, nodes fetch it like a shard, and the shards after it. Every shard
holds the same number of tokens, so that a place in the corpus is two integers and a
node needs only the shards that its unit reads.

Which sequences a unit reads is a pure function of the run's id, the block and the
place in its stream: both sides derive it, nobody picks easy text. Within an epoch no
sequence comes twice; with disjoint streams no two blocks share a shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.messages import MAX_SHARD, Digest, Message, Name, Text
from barnraise.protocol.wire import decode, encode

MAX_CORPUS_SHARDS = 100_000
_ROUNDS = 4

Shards = Annotated[tuple[Digest, ...], Meta(max_length=MAX_CORPUS_SHARDS)]


class Corpus(Message, frozen=True):
    """Token shards of ``shard_tokens`` ids each, little-endian unsigned integers of ``width`` bytes.

    ``held_out`` comes from other documents than ``train`` and is never trained on.
    ``tokenizer`` is the SHA-256 of the tokenizer.json that made the ids.
    """

    format: Literal[1]
    name: Name
    licence: Text
    source: Text
    tokenizer: Digest
    vocabulary: Annotated[int, Meta(ge=2, le=2**24)]
    width: Literal[2, 4]
    shard_tokens: Annotated[int, Meta(ge=16, le=MAX_SHARD // 2)]
    train: Shards
    held_out: Shards


def corpus_bytes(corpus: Corpus) -> bytes:
    """The canonical encoding, at most one shard long.

    Raises:
        MalformedError: ``check_corpus`` would refuse it.
    """
    data = encode(corpus)
    _check(corpus, data)
    return data


def corpus_digest(corpus: Corpus) -> bytes:
    """What a run spec names: SHA-256 of ``corpus_bytes``."""
    return hashlib.sha256(corpus_bytes(corpus)).digest()


def read_corpus(data: bytes) -> Corpus:
    """Decode and check a description that was fetched by its digest.

    Raises:
        MalformedError: not canonical, inconsistent, or too long.
    """
    corpus = decode(data, Corpus)
    _check(corpus, data)
    return corpus


def _check(corpus: Corpus, data: bytes) -> None:
    if len(data) > MAX_SHARD:
        raise MalformedError(f"a corpus description of {len(data)} bytes: use larger shards")
    if corpus.width * corpus.shard_tokens > MAX_SHARD:
        raise MalformedError(f"corpus shards of {corpus.width * corpus.shard_tokens} bytes are too large")
    if corpus.vocabulary > 256**corpus.width:
        raise MalformedError(f"{corpus.width}-byte ids cannot tell {corpus.vocabulary} tokens apart")
    if not corpus.train or not corpus.held_out:
        raise MalformedError("a corpus needs at least one shard to train on and one held out")
    if len(set(corpus.train) & set(corpus.held_out)):
        raise MalformedError("a shard is both trained on and held out")


def shard_bytes(corpus: Corpus) -> int:
    """Size of every shard, in bytes."""
    return corpus.width * corpus.shard_tokens


def stream_shards(corpus: Corpus, stream: int, streams: int) -> range:
    """The training shards of one of ``streams`` disjoint streams.

    Raises:
        MalformedError: there are fewer shards than streams.
    """
    if not 0 <= stream < streams <= len(corpus.train):
        raise MalformedError(
            f"{len(corpus.train)} training shards cannot be dealt out to {streams} disjoint streams: "
            "prepare the corpus with smaller shards, or share the data between the blocks"
        )
    return range(stream, len(corpus.train), streams)


def sequences(
    corpus: Corpus, length: int, run_id: bytes, stream: int, streams: int, start: int, count: int
) -> tuple[tuple[int, int], ...]:
    """All of ``places`` at once: for short stretches."""
    return tuple(places(corpus, length, run_id, stream, streams, start, count))


def places(
    corpus: Corpus, length: int, run_id: bytes, stream: int, streams: int, start: int, count: int
) -> Iterator[tuple[int, int]]:
    """Places ``start`` to ``start + count - 1`` of a stream: ``(training shard, first token in it)`` each.

    A stream goes through its shards in an order drawn anew each epoch, and through
    each shard's sequences of ``length`` tokens in an order of its own. Made one by one: a
    long training has millions.

    Raises:
        MalformedError: a sequence is longer than a shard, or as ``stream_shards``; at the first.
    """
    mine = stream_shards(corpus, stream, streams)
    each = _each(corpus, length)
    for place in range(start, start + count):
        epoch, rest = divmod(place, len(mine) * each)
        turn, sequence = divmod(rest, each)
        key = run_id + stream.to_bytes(4, "big") + epoch.to_bytes(8, "big")
        shard = mine[permuted(turn, len(mine), key)]
        yield shard, permuted(sequence, each, key + shard.to_bytes(4, "big")) * length


def drawn_places(corpus: Corpus, length: int, count: int, draw: bytes) -> list[tuple[int, int]]:
    """``count`` sequences (or all there are) anywhere in the training text, as ``draw`` picks them; sorted.

    Raises:
        MalformedError: a sequence is longer than a shard.
    """
    each = _each(corpus, length)
    total = each * len(corpus.train)
    found = (divmod(permuted(place, total, draw), each) for place in range(min(count, total)))
    return sorted((shard, sequence * length) for shard, sequence in found)


def _each(corpus: Corpus, length: int) -> int:
    each = corpus.shard_tokens // length
    if each == 0:
        raise MalformedError(f"sequences of {length} tokens do not fit shards of {corpus.shard_tokens}")
    return each


def permuted(index: int, size: int, key: bytes) -> int:
    """Where a pseudo-random permutation of ``range(size)`` that ``key`` names sends ``index``.

    A balanced Feistel network over SHA-256 with cycle walking (Black and Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002). Pure integers: the same everywhere.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is not in a range of {size}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            digest = hashlib.sha256(
                b"barnraise/1/permute\0" + key + bytes([number]) + right.to_bytes(8, "big")
            ).digest()
            left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
        index = (left << half) | right
        if index < size:
            return index

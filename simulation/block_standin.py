"""What stands in for training a block: weights drawn towards a goal, a little further in each segment.

A block is one float32 vector. Its goal follows from the run; a segment moves it a part of the way, and the
text that the segment reads pushes it aside a little, so that each place of a round has a difference of its
own and a round's mean is better than any of them. Loss is the mean squared distance from the goal. States
and differences are safetensors files of the sizes that a real block of so many weights has: the
coordinator's checks of them, fetching, and the draw of what is done again are the real ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from barnraise.protocol.corpus import Corpus, corpus_bytes, sequences
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.pretrain import PretrainSpec, segments, stream, unit_start

Vector = npt.NDArray[np.float32]

UNIT_SHARE = 0.3  # of the way to the goal that a unit goes, about
ASIDE = 0.01  # how far the text pushes a weight aside in a segment, at most
SHARDS = 32
SHARD_TOKENS = 512
SEQUENCE, BATCH = 16, 4
_NAME = "0.weight"


@dataclass(frozen=True)
class State:
    """A block between two segments: weights, and the two moments that a real state has beside them."""

    weights: Vector
    first: Vector
    second: Vector


@dataclass(frozen=True)
class Place:
    """A unit's place: what its text, and so its segments, follow from."""

    run_id: bytes
    version: int
    block: int
    slot: int


def goal(run_id: bytes, block: int, count: int) -> Vector:
    """Where training leads: ``count`` weights in [-1, 1)."""
    return _spread(b"goal" + run_id + bytes([block]), count)


def first_weights(run_id: bytes, block: int, count: int) -> Vector:
    """A block before its first round: half as large as its goal, and elsewhere."""
    return (_spread(b"first" + run_id + bytes([block]), count) * np.float32(0.5)).astype(np.float32)


def _spread(key: bytes, count: int) -> Vector:
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * count), dtype="<u4")
    return (words.astype(np.float64) / 2**31 - 1).astype(np.float32)


def start(weights: Vector) -> State:
    """The state before a unit's first segment."""
    zeros = np.zeros_like(weights)
    return State(weights, zeros, zeros)


def train_segment(spec: PretrainSpec, corpus: Corpus, place: Place, before: State, segment: int) -> State:
    """The state after ``segment``, which the one before it and the text of the place decide."""
    share = np.float32(UNIT_SHARE / len(segments(spec)))
    aim = goal(place.run_id, place.block, len(before.weights))
    aside = _spread(_text_key(spec, corpus, place, segment), len(before.weights)) * np.float32(ASIDE)
    step = ((aim - before.weights) * share + aside).astype(np.float32)
    return State((before.weights + step).astype(np.float32), step, (step * step).astype(np.float32))


def text_of(spec: PretrainSpec, corpus: Corpus, place: Place, segment: int) -> tuple[tuple[int, int], ...]:
    """The sequences of the corpus that a segment reads: training shard, and first token in it."""
    lengths, batch = segments(spec), spec.recipe.batch
    begin = unit_start(spec, place.version, place.slot) + sum(lengths[:segment]) * batch
    which, streams = stream(spec, place.block)
    count = lengths[segment] * batch
    return sequences(corpus, spec.sequence, place.run_id, which, streams, begin, count)


def _text_key(spec: PretrainSpec, corpus: Corpus, place: Place, segment: int) -> bytes:
    key = hashlib.sha256(bytes([place.block, segment]))
    for shard, at in text_of(spec, corpus, place, segment):
        key.update(corpus.train[shard] + at.to_bytes(4, "big"))
    return key.digest()


def loss(run_id: bytes, block: int, weights: Vector) -> float:
    """Mean squared distance from the goal, for the nats of a real model."""
    apart = (goal(run_id, block, len(weights)) - weights).astype(np.float64)
    return float((apart * apart).mean())


def most_moved(spec: PretrainSpec, weights: Vector) -> float:
    """How far a unit that begins with ``weights`` can move one of them."""
    return UNIT_SHARE * (1.0 + float(np.abs(weights).max())) + 2 * ASIDE * len(segments(spec))


def trimmed_mean(differences: Sequence[Vector], trim: float) -> Vector:
    """Weight by weight, without the ``trim`` smallest and largest shares."""
    rows = np.sort(np.stack(differences).astype(np.float64), axis=0)
    cut = int(trim * len(rows))
    mean: Vector = rows[cut : len(rows) - cut].mean(axis=0).astype(np.float32)
    return mean


# --- files


def block_bytes(weights: Vector) -> bytes:
    """A block's part of a version, or a difference: one tensor of float32."""
    return save({_NAME: weights})


def read_block(data: bytes) -> Vector:
    """Raises MalformedError: no such file, or not of finite numbers."""
    return _tensors(data, (_NAME,))[0]


def state_bytes(state: State) -> bytes:
    """A state file."""
    return save({"w." + _NAME: state.weights, "m." + _NAME: state.first, "v." + _NAME: state.second})


def read_state(data: bytes) -> State:
    """Raises MalformedError: no such file, or not of finite numbers."""
    return State(*_tensors(data, ("w." + _NAME, "m." + _NAME, "v." + _NAME)))


def _tensors(data: bytes, names: tuple[str, ...]) -> tuple[Vector, ...]:
    try:
        found: dict[str, Any] = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise MalformedError(f"{len(data)} bytes are no safetensors file: {error}") from None
    if found.keys() != set(names):
        raise MalformedError(f"the file holds {', '.join(sorted(found))} instead of {', '.join(names)}")
    for name in names:
        if found[name].dtype != np.float32 or found[name].ndim != 1 or not np.isfinite(found[name]).all():
            raise MalformedError(f"{name} is no vector of finite float32")
    return tuple(found[name] for name in names)


def write_corpus(folder: Path, tokenizer: Path, seed: int) -> bytes:
    """A corpus folder of made-up tokens beside ``tokenizer``; the corpus's digest."""
    (folder / "shards").mkdir(parents=True)
    text = tokenizer.read_bytes()
    (folder / "tokenizer.json").write_bytes(text)
    digests = []
    for number in range(SHARDS + 1):
        name = b"corpus" + seed.to_bytes(8, "big") + bytes([number])
        data = (np.frombuffer(hashlib.shake_256(name).digest(2 * SHARD_TOKENS), dtype="<u2") % 64).tobytes()
        digests.append(hashlib.sha256(data).digest())
        (folder / "shards" / digests[-1].hex()).write_bytes(data)
    corpus = corpus_bytes(
        Corpus(
            format=1,
            name="standin",
            licence="CC0-1.0",
            source="drawn",
            tokenizer=hashlib.sha256(text).digest(),
            vocabulary=64,
            width=2,
            shard_tokens=SHARD_TOKENS,
            train=tuple(digests[:-1]),
            held_out=tuple(digests[-1:]),
        )
    )
    (folder / "corpus.bin").write_bytes(corpus)
    return hashlib.sha256(corpus).digest()


def write_model(folder: Path, vocabulary: int, end: int) -> None:
    """A model folder without weights, as a run that pretrains begins with."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "standin", "vocab_size": vocabulary, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "standin"}}))

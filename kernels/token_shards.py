"""From a corpus's shards to batches: the same tensors on whoever holds the bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from barnraise.protocol.corpus import Corpus, drawn_places, shard_bytes
from barnraise.protocol.errors import BarnraiseError

Get = Callable[[bytes], bytes]  # digest -> the shard's bytes
_KEPT = 8  # shards held decoded: a unit reads one after the other


class CorpusError(BarnraiseError):
    """A corpus cannot be made or read; the text says what to change."""


def read_tokens(corpus: Corpus, data: bytes) -> NDArray[np.int64]:
    """A shard's token ids, int64 [shard_tokens].

    Raises:
        CorpusError: not of a shard's size, or an id is outside the vocabulary.
    """
    if len(data) != shard_bytes(corpus):
        raise CorpusError(f"a corpus shard of {len(data)} bytes, not {shard_bytes(corpus)}")
    ids = np.frombuffer(data, dtype=f"<u{corpus.width}").astype(np.int64)
    if int(ids.max()) >= corpus.vocabulary:
        raise CorpusError(f"token {int(ids.max())} is outside the corpus's vocabulary of {corpus.vocabulary}")
    return ids


def batches(
    corpus: Corpus, length: int, places: Iterable[tuple[int, int]], batch: int, get: Get
) -> Iterator[Tensor]:
    """The sequences at ``places`` (``barnraise.protocol.corpus.places``), ``batch`` at a time.

    Yields int64 [batch, length]; what does not fill a last batch is left out.

    Raises:
        CorpusError: a shard is not what the corpus says. Whatever ``get`` raises goes through.
    """
    kept: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
    rows: list[Tensor] = []
    for shard, first in places:
        if shard not in kept:
            kept[shard] = read_tokens(corpus, get(corpus.train[shard]))
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        rows.append(torch.from_numpy(kept[shard][first : first + length].copy()))
        if len(rows) == batch:
            yield torch.stack(rows)
            rows = []


def held_out(corpus: Corpus, length: int, count: int, get: Get, batch: int = 16) -> list[Tensor]:
    """``count`` held-out sequences (or all there are), spread over the shards: int64 [<= batch, length].

    The same for everybody who evaluates this corpus at this length.
    """
    each = corpus.shard_tokens // length
    total = each * len(corpus.held_out)
    chosen = range(0, total, max(1, total // count))[:count]
    rows: list[Tensor] = []
    last: tuple[int, NDArray[np.int64]] | None = None
    for place in chosen:
        shard, sequence = divmod(place, each)
        if last is None or last[0] != shard:
            last = shard, read_tokens(corpus, get(corpus.held_out[shard]))
        rows.append(torch.from_numpy(last[1][sequence * length : (sequence + 1) * length].copy()))
    return [torch.stack(rows[i : i + batch]) for i in range(0, len(rows), batch)]


def drawn_text(
    corpus: Corpus, length: int, count: int, draw: bytes, get: Get, batch: int = 16
) -> list[Tensor]:
    """``count`` sequences of the training text that ``draw`` picks: int64 [<= batch, length].

    Raises:
        CorpusError: as ``batches``.
    """
    places = drawn_places(corpus, length, count, draw)
    whole = len(places) - len(places) % batch
    rest = batches(corpus, length, places[whole:], len(places) - whole, get) if places[whole:] else ()
    return [*batches(corpus, length, places[:whole], batch, get), *rest]

"""The corpus on a volunteer's machine: the description, and the few shards that a unit reads.

Both are content-addressed and come from peers or the coordinator like the shards of a
version. In the store they are spared when versions are tidied up, and go, the longest
unused first, when something else needs the room.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from barnraise.node.asking import Source
from barnraise.protocol.corpus import Corpus, read_corpus, sequences, stream_shards
from barnraise.protocol.errors import MalformedError, PeerError, StorageError
from barnraise.protocol.messages import MAX_SHARD
from barnraise.protocol.network import Network
from barnraise.protocol.pretrain import BlockLease, PretrainSpec, stream, unit_start
from barnraise.protocol.shards import ShardClient, off_loop
from barnraise.protocol.store import DiskStore


def unit_shards(spec: PretrainSpec, corpus: Corpus, lease: BlockLease) -> tuple[bytes, ...]:
    """Digests of the shards that a unit reads, in order of use.

    Raises:
        MalformedError: the corpus is too small for this run.
    """
    which, streams = stream(spec, lease.block)
    most = len(stream_shards(corpus, which, streams))
    each = max(1, corpus.shard_tokens // spec.sequence)  # sequences of a shard, which come one after another
    start = unit_start(spec, lease.policy_version, lease.slot)
    end = start + spec.steps * spec.recipe.batch
    found: dict[bytes, None] = {}
    for turn in range(start // each, (end - 1) // each + 1):
        ((shard, _),) = sequences(corpus, spec.sequence, lease.run_id, which, streams, turn * each, 1)
        found[corpus.train[shard]] = None
        if len(found) == most:
            break
    return tuple(found)


async def fetch_description(
    network: Network, store: DiskStore, digest: bytes, sources: Sequence[Source]
) -> bytes:
    """The description named ``digest``, from the store or the first source that has it.

    Raises:
        PeerError: nobody gave it; the text lists each and why.
        StorageError: the disk refused.
    """
    data = await off_loop(MAX_SHARD, lambda: store.get(digest)) if store.has(digest) else None
    reasons = []
    for source in sources if data is None else ():
        client = ShardClient(network, source.peer_id, source.addresses)
        try:
            data = await client.fetch(digest, MAX_SHARD, exact=False)
        except PeerError as error:
            reasons.append(f"{source.peer_id}: {error}")
        else:
            if data is not None:
                store.put(digest, data, checked=True)
                break
            reasons.append(f"{source.peer_id}: does not have it")
        finally:
            await client.close()
    if data is None:
        raise PeerError("the corpus could not be fetched; " + ("; ".join(reasons) or "nobody offers it"))
    store.spare([digest])
    return data


def spare_corpus(store: DiskStore, digest: bytes) -> None:
    """Spare what an earlier process fetched of the corpus. Blocking; reads the description."""
    data = store.get(digest) if store.has(digest) else None
    if data is not None:
        with suppress(MalformedError):
            store.spare([digest, *read_corpus(data).train])


def missing_shards(store: DiskStore, folder: Path, wanted: Iterable[bytes], size: int) -> dict[bytes, int]:
    """What has to be fetched, with its size: neither in ``folder`` nor whole in the store. Blocking."""
    missing = {}
    for digest in wanted:
        with suppress(OSError):
            if (folder / digest.hex()).stat().st_size == size:  # the engine hashes it
                continue
        if not store.verify(digest):
            missing[digest] = size
    return missing


def lay_out(store: DiskStore, folder: Path, wanted: Iterable[bytes]) -> None:
    """Put the shards into ``folder`` under their names, by hard links where the disk has those. Blocking.

    Raises:
        StorageError: the disk refused, or a shard is gone from the store again.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for digest in wanted:
            path = folder / digest.hex()
            if path.is_file():
                continue
            _place(store, digest, path)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error


def _place(store: DiskStore, digest: bytes, path: Path) -> None:
    with suppress(OSError):
        os.link(store.folder / path.name[:2] / path.name, path)
        return
    data = store.get(digest)
    if data is None:
        raise StorageError(f"shard {path.name[:16]} of the corpus was deleted meanwhile; it is fetched again")
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_bytes(data)
    temporary.replace(path)

"""A small log with its checkpoint and static files, for the tests of the transparency log."""

from barnraise.protocol.identity import Identity
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.tlog_checkpoint import Checkpoint, Head, log_key, origin_of, sign_checkpoint
from barnraise.protocol.tlog_tiles import ENTRIES, FULL, Tile, bundle, hash_tile

OPERATOR = Identity.from_private_bytes(bytes(range(32)))
RUN_ID = bytes(range(100, 132))
ORIGIN = origin_of(RUN_ID)
KEY = log_key(RUN_ID, OPERATOR.public_key)


def entries_of(count: int, salt: str = "") -> list[bytes]:
    return [f"entry {number}{salt}".encode() * (number % 4) for number in range(count)]


def log_of(entries: list[bytes]) -> MerkleLog:
    log = MerkleLog()
    for entry in entries:
        log.append(entry)
    return log


def head_of(log: MerkleLog, size: int | None = None) -> Head:
    size = len(log) if size is None else size
    checkpoint = Checkpoint(ORIGIN, size, log.root(size))
    return Head(checkpoint, sign_checkpoint(checkpoint, OPERATOR).encode())


def forged_head(size: int, root: bytes) -> Head:
    """What an operator who lies could sign."""
    checkpoint = Checkpoint(ORIGIN, size, root)
    return Head(checkpoint, sign_checkpoint(checkpoint, OPERATOR).encode())


def tile_bytes(log: MerkleLog, entries: list[bytes], tile: Tile) -> bytes:
    if tile.level == ENTRIES:
        return bundle(entries[tile.index * FULL : tile.index * FULL + tile.width])
    return hash_tile(log, tile)

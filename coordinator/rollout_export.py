"""``RUN -> OUT``: rollouts as a dataset that Hugging Face ``datasets`` loads, text made on the way.

::

    OUT/README.md                  the dataset's card
    OUT/data/train-00000.parquet   zstd; shards of a bounded size, by policy version

OUT appears whole or not at all. It is made in ``OUT.partial``: an export that was broken off goes on there
with the first shard that is missing, or is not what it would be now. No more than about 32 MB of rows are
in memory at a time. The same run and the same wishes give the same bytes, with one release of pyarrow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from barnraise.coordinator.rollout_card import Summary, card
from barnraise.coordinator.rollout_files import reading, writing
from barnraise.coordinator.rollout_source import Moved, Piece, Source, Tell, Wanted, open_source
from barnraise.coordinator.rollout_table import FORMAT, METADATA, need_pyarrow
from barnraise.coordinator.rollout_text import Texts, export_schema, shown
from barnraise.protocol.durable import replace_file, sync_folder
from barnraise.protocol.errors import RunFolderError, StorageError

ROW_GROUP_BYTES = 32 * 1024 * 1024
TRIES = 8  # plans that a coordinator may overtake


@dataclass(frozen=True)
class Exported:
    """What was made. ``versions``: policy versions, first and last; ``reused``: shards that were there."""

    folder: Path
    summary: Summary
    reused: int


def export_rollouts(
    folder: Path, target: Path, wanted: Wanted, tell: Tell = lambda subject, share: None
) -> Exported:
    """Write the rollouts of the run in ``folder`` to the new folder ``target``. Blocking.

    Raises:
        RunFolderError: no run, nothing to export, or ``target`` is in use; or pyarrow is not installed.
        TaskError, ModelError: text is wanted, and environment or tokenizer are not to be had here.
        StorageError: the disk or the store refused; done again, it goes on.
    """
    need_pyarrow()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunFolderError(f"{target} exists and is not an empty folder: choose another, or remove it")
    partial = target.absolute().with_name(f"{target.absolute().name}.partial")
    texts: Texts | None = None
    for _ in range(TRIES):
        source = open_source(folder, tell)
        if wanted.text and texts is None:
            texts = Texts(folder, source.spec)
        try:
            (partial / "data").mkdir(parents=True, exist_ok=True)
            return _export(source, target, partial, wanted, texts, tell)
        except Moved:
            continue
        except OSError as error:
            raise StorageError(
                f"cannot write {target} ({error.strerror or error}): free some disk space; done again, the "
                f"export goes on with what is in {partial}"
            ) from error
    raise StorageError(f"{folder} changes faster than it can be read: try again, or choose --versions")


def _export(
    source: Source, target: Path, partial: Path, wanted: Wanted, texts: Texts | None, tell: Tell
) -> Exported:
    pieces = source.pieces(wanted)
    if not pieces:
        raise RunFolderError(
            f"{source.folder} has no rollouts of those versions: its run keeps them from the moment that "
            '[keep] of run.toml says rollouts = "accepted"; without, only the newest are there'
        )
    shards = _shards(pieces, wanted.shard_bytes)
    rows, reused, total = _Count(), 0, sum(piece.rows for piece in pieces)
    names = set()
    for number, shard in enumerate(shards):
        path = partial / "data" / f"train-{number:05d}.parquet"
        names.add(path.name)
        key = _key(shard, wanted)
        if _is_whole(path, key):
            rows.add(path)
            reused += 1
            continue
        _write_shard(path, key, number, shard, source, wanted, texts, rows, total, tell)
    for path in (partial / "data").iterdir():
        if path.name not in names:
            path.unlink()
    versions = sorted({piece.version for piece in pieces})
    files = [partial / "data" / name for name in sorted(names)]
    summary = Summary(
        rows=rows.rows,
        accepted=rows.accepted,
        tokens=rows.tokens,
        first=versions[0],
        last=versions[-1],
        versions=len(versions),
        files=len(files),
        size=sum(path.stat().st_size for path in files),
    )
    replace_file(partial / "README.md", card(source, wanted, summary).encode())
    sync_folder(partial)
    if target.exists():
        target.rmdir()
    partial.rename(target)
    sync_folder(target.absolute().parent)
    return Exported(target, summary, reused)


class _Count:
    """What is written so far; kept in each shard's own metadata as well."""

    def __init__(self) -> None:
        self.rows = self.accepted = self.tokens = 0

    def add(self, path: Path) -> None:
        with reading(path) as file:
            for group in range(file.num_row_groups):
                self.note(file.read_row_group(group, columns=["accepted", "tokens"]))

    def note(self, table: Any) -> None:
        self.rows += table.num_rows
        self.accepted += sum(table["accepted"].to_pylist())
        self.tokens += sum(len(chunk.flatten()) for chunk in table["tokens"].chunks)


def _shards(pieces: Sequence[Piece], most: int) -> list[list[Piece]]:
    shards: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not shards or size + piece.size > most:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.size
    return shards


def _key(shard: Sequence[Piece], wanted: Wanted) -> str:
    """Names a shard's content: two with the same key have the same rows."""
    options = {
        name: value for name, value in asdict(wanted).items() if name not in ("license", "first", "last")
    }
    said = [FORMAT, need_pyarrow().__version__, options, [piece.key for piece in shard]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _is_whole(path: Path, key: str) -> bool:
    pa = need_pyarrow()
    with suppress(OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        found = pa.parquet.read_schema(path).metadata[METADATA]
        return bool(json.loads(found)["shard"] == key)
    return False


def _write_shard(
    path: Path,
    key: str,
    number: int,
    shard: Sequence[Piece],
    source: Source,
    wanted: Wanted,
    texts: Texts | None,
    rows: _Count,
    total: int,
    tell: Tell,
) -> None:
    said = {"format": FORMAT, "run": source.run_id.hex(), "shard": key}
    columns = export_schema(wanted, said)
    waiting: list[Any] = []
    with writing(path, columns) as writer:
        for place, piece in enumerate(shard):
            tell("writing rollouts", rows.rows / max(1, total))
            table = shown(piece.read(), wanted, texts, f"{number:05d}-{place:04d}").cast(columns)
            rows.note(table)
            waiting.append(table)
            if place == len(shard) - 1 or sum(item.nbytes for item in waiting) >= ROW_GROUP_BYTES:
                writer.write_table(need_pyarrow().concat_tables(waiting))  # small versions share a row group
                waiting = []

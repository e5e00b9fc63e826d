import os
from pathlib import Path

import pytest
from tlog_support import KEY, entries_of, head_of, log_of, tile_bytes

from barnraise.coordinator.log_folder import LogFolder
from barnraise.protocol.cosignature import cosign, node_cosignatures, witness_name
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.notes import Note, parse_note
from barnraise.protocol.tlog_checkpoint import open_checkpoint
from barnraise.protocol.tlog_tiles import TileTree, tiles_for

ALL = entries_of(1100)
LOG = log_of(ALL)
NODE = Identity.from_private_bytes(bytes([9]) * 32)


class Crash(BaseException):
    pass


def grow(folder: LogFolder, size: int) -> None:
    start = folder.missing_from()
    folder.grow(LOG, head_of(LOG, size), start, ALL[start:size])


def sound(path: Path) -> int:
    """The size that a stranger reads there; everything that its checkpoint speaks of is there, and right."""
    if not (path / "checkpoint").exists():
        return 0
    head = open_checkpoint((path / "checkpoint").read_bytes(), KEY)
    assert head.root == LOG.root(head.size)
    for tile in tiles_for(head.size):
        assert (path / tile.path).read_bytes() == tile_bytes(LOG, ALL, tile), tile.path
    tree = TileTree(head.size, lambda tile: (path / tile.path).read_bytes())
    assert tree.root() == head.root
    return head.size


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("no_sync")
def test_a_log_grows_by_any_steps_and_is_always_whole(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path / "log", KEY)
    for size in (1, 2, 3, 200, 255, 256, 257, 300, 511, 512, 513, 1023, 1024, 1100):
        grow(folder, size)
        assert sound(tmp_path / "log") == size
        folder = LogFolder(tmp_path / "log", KEY)  # as after a restart
        folder.check(LOG)
        assert folder.size == size
    names = {
        str(path.relative_to(tmp_path / "log")) for path in (tmp_path / "log").rglob("*") if path.is_file()
    }
    needed = {tile.path for tile in tiles_for(1100)}
    kept = set(names - needed - {"checkpoint"})
    assert needed <= names
    assert all(name.startswith(("tile/1/000.p/", "tile/entries/004.p/", "tile/0/004.p/")) for name in kept)


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("when", ["before", "after", "cut"])
def test_a_crash_at_any_write_leaves_a_whole_log_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    steps = (130, 300, 620)
    real, left = Path.replace, 0

    def crashing(self: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left == 0 and when == "cut":  # the power fails before the bytes are there
            self.write_bytes(self.read_bytes()[: self.stat().st_size // 2])
        if left == 0 and when != "after":
            raise Crash
        result = real(self, target)
        if left == 0:
            raise Crash
        return result

    monkeypatch.setattr(Path, "replace", crashing)
    point = crashes = 0
    while True:
        point += 1
        path = tmp_path / str(point)
        left = point
        try:
            for size in steps:
                grow(LogFolder(path, KEY), size)
        except Crash:
            crashes += 1
        else:
            break
        left = 0
        published = sound(path)
        assert published in (0, *steps)
        for size in (item for item in steps if item > published):
            folder = LogFolder(path, KEY)
            folder.check(LOG)
            grow(folder, size)
        assert sound(path) == steps[-1]
    assert crashes > 12


@pytest.mark.usefixtures("no_sync")
def test_a_lost_or_damaged_last_bundle_is_written_again(tmp_path: Path) -> None:
    grow(LogFolder(tmp_path, KEY), 300)
    (tmp_path / "tile/entries/001.p/44").unlink()
    folder = LogFolder(tmp_path, KEY)
    assert folder.missing_from() == 256
    grow(folder, 310)
    assert sound(tmp_path) == 310
    bundle = tmp_path / "tile/entries/001.p/54"
    data = bytearray(bundle.read_bytes())
    data[5] ^= 1
    bundle.write_bytes(bytes(data))
    with pytest.raises(RunFolderError, match="not the ledger's"):
        grow(LogFolder(tmp_path, KEY), 400)
    assert LogFolder(tmp_path, KEY).size == 310


@pytest.mark.usefixtures("no_sync")
def test_every_file_that_is_lost_or_flipped_is_written_again(tmp_path: Path) -> None:
    grow(LogFolder(tmp_path, KEY), 600)
    assert LogFolder(tmp_path, KEY).damaged(LOG) == []
    for number, tile in enumerate(tiles_for(600)):
        path = tmp_path / tile.path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1 << number % 8
        path.unlink() if number % 3 == 0 else path.write_bytes(bytes(data))
    folder = LogFolder(tmp_path, KEY)
    bundles = folder.damaged(LOG)
    assert [tile.index for tile in bundles] == [0, 1, 2]
    folder.mend(LOG, bundles[1:], ALL)
    folder.mend(LOG, bundles[:1], ALL)
    assert folder.damaged(LOG) == []
    assert sound(tmp_path) == 600


@pytest.mark.usefixtures("no_sync")
def test_a_journal_older_than_what_was_published_is_refused(tmp_path: Path) -> None:
    grow(LogFolder(tmp_path, KEY), 300)
    folder = LogFolder(tmp_path, KEY)
    with pytest.raises(RunFolderError, match="older"):
        folder.check(log_of(ALL[:299]))
    with pytest.raises(RunFolderError, match="older"):
        folder.check(log_of([*ALL[:299], b"another", *ALL[300:]]))
    folder.check(LOG)
    (tmp_path / "checkpoint").write_bytes(b"rubbish")
    with pytest.raises(RunFolderError, match="damaged"):
        LogFolder(tmp_path, KEY)


@pytest.mark.usefixtures("no_sync")
def test_cosignatures_join_the_checkpoint(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path, KEY)
    grow(folder, 5)
    note = parse_note((tmp_path / "checkpoint").read_bytes())
    line = cosign(note.text, witness_name(NODE.peer_id), NODE, 7)
    folder.put_checkpoint(Note(note.text, (*note.signatures, line)).encode())
    read = parse_note(folder.read("checkpoint") or b"")
    assert node_cosignatures(read.text, read.signatures) == {witness_name(NODE.peer_id): 7}
    assert sound(tmp_path) == 5
    assert folder.read("tile/0/000") is None


def test_a_disk_that_refuses_leaves_what_was(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path / "log", KEY)
    grow(folder, 5)
    (tmp_path / "log/tile/0/000.p/6").mkdir()  # in the way of the next file
    with pytest.raises(StorageError, match="cannot write"):
        grow(folder, 6)
    assert folder.size == sound(tmp_path / "log") == 5


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("size", [1, 255, 256, 700, 66_000])
def test_a_published_log_is_judged_by_its_own_signed_root(tmp_path: Path, size: int) -> None:
    entries = ALL if size <= len(ALL) else [number.to_bytes(4, "big") for number in range(size)]
    log = LOG if size <= len(ALL) else log_of(entries)
    folder = LogFolder(tmp_path, KEY)
    assert folder.intact()  # nothing was published yet
    folder.grow(log, head_of(log, size), 0, entries[:size])
    assert folder.intact()
    for level in range(size.bit_length()):
        assert folder.node(level, (size >> level) - 1) == log._node(level, (size >> level) - 1)
    tiles = list(tiles_for(size))
    for tile in {tiles[0], tiles[-1], tiles[len(tiles) // 2], *(item for item in tiles if item.level > 0)}:
        path = tmp_path / tile.path
        good = path.read_bytes()
        path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        assert not folder.intact()
        path.write_bytes(good[:-1])
        assert not folder.intact()
        path.unlink()
        assert not folder.intact()
        path.write_bytes(good)
    assert folder.intact()

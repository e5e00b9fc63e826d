"""What was acknowledged is on the disk, whatever happens to the process."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from zlib import crc32

import pytest

from barnraise.coordinator.events import NodeJoined, VersionPublished, encode_event
from barnraise.coordinator.journal import MANIFESTS_KEPT, Journal, Payload, StoredReceipt, Write
from barnraise.coordinator.journal_place import place_for, write_place
from barnraise.coordinator.journal_sqlite import SqliteStore
from barnraise.coordinator.journal_store import event_crc
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.messages import Signed

WRITER = """
import sys
from pathlib import Path
from barnraise.coordinator.events import NodeJoined
from barnraise.coordinator.journal import Journal, Payload, Write
from barnraise.protocol.messages import Signed
journal = Journal(Path(sys.argv[1]))
number = journal.length
while True:
    writes = []
    for _ in range(5):
        data = bytes(8000) + number.to_bytes(8, "big")
        signed = Signed(payload=data, signer=b"s" * 32, signature=b"t" * 64)
        event = NodeJoined(node=number.to_bytes(32, "big"), name="n", at_ms=number)
        writes.append(Write(events=[event], payloads=[Payload(number.to_bytes(32, "big"), 0, signed)]))
        number += 1
    journal.commit(writes)
    print(number, flush=True)
"""


def event(number: int) -> NodeJoined:
    return NodeJoined(node=number.to_bytes(32, "big"), name="n", at_ms=number)


def signed(data: bytes = b"payload") -> Signed:
    return Signed(payload=data, signer=b"s" * 32, signature=b"t" * 64)


@pytest.fixture(params=["sqlite", "postgres"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A journal that is not there yet, in either store."""
    if request.param == "sqlite":
        return tmp_path / "state.sqlite"
    write_place(tmp_path, place_for(request.getfixturevalue("postgres").url, os.urandom(32)))
    return tmp_path / "state.postgres"


@pytest.mark.parametrize("acknowledgements", [1, 7, 40])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, acknowledgements: int) -> None:
    killed_and_looked_at(tmp_path / "state.sqlite", acknowledgements)


def killed_and_looked_at(path: Path, acknowledgements: int) -> None:
    """Kill a process that writes to the journal at ``path``, twice, after it printed so many lines."""
    acknowledged = 0
    for _ in range(2):  # the second writer goes on from the first one's ruins
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=path.parent
        )
        assert writer.stdout is not None
        for _ in range(acknowledgements):
            acknowledged = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        journal = Journal(path)
        events = list(journal.events())
        assert len(events) >= acknowledged
        assert len(events) % 5 == 0  # a transaction is there whole or not at all
        assert events == [event(number) for number in range(len(events))]
        stored = journal.payloads([number.to_bytes(32, "big") for number in range(len(events))])
        assert len(stored) == len(events)
        journal.close()


def test_a_refusing_disk_keeps_all_of_a_transaction_out_and_says_where(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state.sqlite")
    journal.commit([Write(events=[event(0)])])
    pages = journal.store.db.execute("PRAGMA page_count").fetchone()[0]
    journal.store.db.execute(f"PRAGMA max_page_count = {pages + 2}")
    too_much = Write(events=[event(1)], payloads=[Payload(b"1" * 32, 0, signed(bytes(100_000)))])
    with pytest.raises(StorageError, match=str(tmp_path)):
        journal.commit([Write(events=[event(9)]), too_much])
    assert list(journal.events()) == [event(0)]
    journal.store.db.execute("PRAGMA max_page_count = 1000000")
    journal.commit([too_much])
    assert list(journal.events()) == [event(0), event(1)]


def test_payloads_are_dropped_when_told(path: Path) -> None:
    journal = Journal(path)
    for version in range(3):
        journal.commit([Write(payloads=[Payload(bytes([version]) * 32, version, signed())])])
    assert journal.payload_ids(2) == [b"\0" * 32, b"\1" * 32]
    journal.commit([Write(drop_payloads=journal.payload_ids(2))])
    assert journal.payloads([b"\0" * 32, b"\2" * 32]) == {b"\2" * 32: b"payload"}
    journal.close()


def test_receipts_are_found_by_node_from_an_index_on(path: Path) -> None:
    journal = Journal(path)
    for index in range(10):
        node = b"ab"[index % 2 : index % 2 + 1] * 32
        journal.commit([Write(receipts=[StoredReceipt(index, node, signed(bytes([index])))])])
    found = journal.receipts(b"a" * 32, 3, 2)
    assert [receipt.payload for receipt in found] == [b"\4", b"\6"]
    journal.close()


def test_old_manifests_go(path: Path) -> None:
    journal = Journal(path)
    for version in range(MANIFESTS_KEPT + 2):
        journal.commit([Write(manifest=(version, signed(bytes([version]))))])
    assert journal.manifest(1) is None
    assert journal.manifest(2) == signed(b"\2")
    journal.close()


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"this is not a database" * 500)
    with pytest.raises(RunFolderError, match=r"state\.sqlite is damaged"):
        Journal(path)


def test_an_event_of_another_version_is_refused_with_the_cure(path: Path) -> None:
    journal = Journal(path)
    journal.store.load("events", [(0, b"\x81\xa4type\xa6Future", None)])
    journal.close()
    with (
        pytest.raises(RunFolderError, match="another version of barnraise"),
        closing(Journal(path)) as again,
    ):
        list(again.events())


def test_a_missing_or_damaged_event_is_noticed(path: Path) -> None:
    journal = Journal(path)
    for seq in (0, 2):
        data = encode_event(event(seq))
        journal.store.load("events", [(seq, data, event_crc(seq, data) ^ seq)])
    with pytest.raises(RunFolderError, match="event 2 is damaged"):
        journal.check_events(2, 3)
    with pytest.raises(RunFolderError, match="event 1 is missing"):
        list(journal.events())
    journal.close()


def crashed(tmp_path: Path, transactions: int) -> tuple[bytes, bytes, list[tuple[int, int]]]:
    """What a kill leaves: file, write-ahead log, and (bytes of that log, events) at each commit."""
    path = tmp_path / "state.sqlite"
    log = tmp_path / "state.sqlite-wal"
    journal = Journal(path)
    commits, number = [], 0
    for size in range(1, transactions + 1):
        count = 1 + size % 3
        group = [event(number + offset) for offset in range(count)]
        payload = Payload(bytes([size]) * 32, 0, signed(bytes(3000)))
        head = (number + count, signed(bytes([size]) * 200))
        journal.commit([Write(events=group, payloads=[payload], tree_head=head)])
        number += count
        commits.append((log.stat().st_size, number))
    found = path.read_bytes(), log.read_bytes(), commits
    journal.close()
    return found


def left(folder: Path, database: bytes, log: bytes, acknowledged: int) -> Path:
    """A folder with what a crash left in it."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    path = folder / "state.sqlite"
    path.write_bytes(database)
    (folder / "state.sqlite-wal").write_bytes(log)
    data = acknowledged.to_bytes(8, "big")
    (folder / "state.sqlite.mark").write_bytes(data + crc32(data).to_bytes(4, "big"))
    return path


def test_cut_at_any_byte_of_its_last_records_it_opens_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    database, log, commits = crashed(tmp_path, 8)
    before = commits[-4][0]
    frames = range(before, len(log), 4096 + 24)
    cuts = {*range(before, len(log) + 1, 523), *(at + step for at in frames for step in range(-2, 27, 4))}
    cuts = {at for at in cuts if before <= at <= len(log)}
    assert len(cuts) > 100
    for cut in sorted(cuts):
        acknowledged = max(events for end, events in commits if end <= cut)
        journal = Journal(left(tmp_path / "cut", database, log[:cut], acknowledged))
        assert list(journal.events()) == [event(number) for number in range(acknowledged)]
        assert journal.store.db.execute("SELECT max(size) FROM heads").fetchone()[0] == acknowledged
        journal.commit([Write(events=[event(acknowledged)])])  # and goes on
        assert journal.length == acknowledged + 1
        journal.close()


def test_a_flipped_bit_in_what_the_log_acknowledged_is_found_at_start(tmp_path: Path) -> None:
    database, log, commits = crashed(tmp_path, 8)
    acknowledged = commits[-1][1]
    whole = [event(number) for number in range(acknowledged)]
    found = 0
    for at in range(commits[-4][0], len(log), 347):
        damaged = bytearray(log)
        damaged[at] ^= 1 << at % 8
        try:
            journal = Journal(left(tmp_path / "flip", database, bytes(damaged), acknowledged))
        except RunFolderError as error:
            assert f"to {acknowledged - 1}, which were acknowledged" in str(error)  # noqa: PT017
            found += 1
        else:
            assert list(journal.events()) == whole  # a byte that nothing depends on
            journal.close()
    assert found > 40


def test_a_flipped_bit_in_the_file_is_found_wherever_an_event_is(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    journal = Journal(path)
    whole = [event(number) for number in range(40)]
    journal.commit([Write(events=whole)])
    journal.close()
    data = path.read_bytes()
    (tmp_path / "flip").mkdir()
    copy = tmp_path / "flip" / "state.sqlite"
    found = 0
    for at in range(data.index(b"NodeJoined") - 20, data.rindex(b"NodeJoined") + 60, 11):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        copy.write_bytes(bytes(damaged))
        try:
            events = list(Journal(copy).events())
        except RunFolderError:
            found += 1
        else:
            assert events == whole
    assert found > 100


def test_an_old_copy_does_not_go_on_as_if_nothing_had_been_signed_since(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    journal = Journal(path)
    journal.commit([Write(events=[event(0)])])
    journal.close()
    old = path.read_bytes()
    journal = Journal(path)
    journal.commit([Write(events=[event(1), event(2)])])
    journal.close()
    path.write_bytes(old)
    with pytest.raises(RunFolderError, match=r"lost events 1 to 2.*delete .*state\.sqlite\.mark"):
        Journal(path)
    (tmp_path / "state.sqlite.mark").unlink()
    assert list(Journal(path).events()) == [event(0)]


def test_a_journal_from_before_checksums_is_read_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, data BLOB NOT NULL)")
        database.execute("INSERT INTO events VALUES (0, ?)", (encode_event(event(0)),))
    database.close()
    journal = Journal(path)
    journal.commit([Write(events=[event(1)])])
    assert list(journal.events()) == [event(0), event(1)]


def published(version: int) -> VersionPublished:
    return VersionPublished(
        version=version, manifest=bytes(32), weights="w", size=1, stats=None, accuracy=-1.0, at_ms=version
    )


def test_every_version_is_found_in_the_journal_also_in_one_from_before_there_was_a_table(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "state.sqlite")
    for version in range(20):
        write = Write(events=[event(version), published(version)], manifest=(version, signed()))
        journal.commit([write])
    newest = [published(version) for version in (6, 5, 4)]
    assert journal.versions(7, 3) == newest
    assert [item.version for item in journal.versions(1 << 40, 100)] == list(range(19, -1, -1))
    assert isinstance(journal.store, SqliteStore)
    journal.store.db.execute("DROP TABLE versions")
    journal.close()
    journal = Journal(tmp_path / "state.sqlite")
    assert journal.versions(7, 3) == newest
    journal.close()


def test_a_journal_opened_for_reading_sees_what_is_durable_and_writes_nothing(path: Path) -> None:
    journal = Journal(path)
    journal.commit([Write(events=[event(1), event(2)])])
    reader = Journal(path, reading=True)
    assert (reader.length, list(reader.events())) == (2, [event(1), event(2)])
    with pytest.raises(StorageError):
        reader.commit([Write(events=[event(3)])])
    journal.commit([Write(events=[event(3)])])
    assert list(reader.events(2)) == [event(3)]
    reader.check_events(0, 3)
    with pytest.raises(RunFolderError, match="event 3 is missing"):
        reader.check_events(0, 4)
    reader.close()
    journal.close()


def test_tree_heads_come_in_order_and_a_few_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("barnraise.coordinator.journal._AT_ONCE", 3)
    journal = Journal(path)
    assert (list(journal.tree_heads()), journal.last_tree_head()) == ([], None)
    journal.commit([Write(tree_head=(size, signed(b"%d" % size))) for size in (300, 2, 9, 40, 0, 7, 12)])
    assert list(journal.tree_heads()) == [signed(b"%d" % size) for size in (0, 2, 7, 9, 12, 40, 300)]
    assert journal.last_tree_head() == signed(b"300")
    journal.close()


def test_of_what_one_group_stores_and_drops_the_last_word_counts(path: Path) -> None:
    journal = Journal(path)
    one, two = b"1" * 32, b"2" * 32
    stored = {item: Write(payloads=[Payload(item, 0, signed())]) for item in (one, two)}
    journal.commit([stored[one], Write(drop_payloads=[one, two]), stored[two]])
    assert journal.payload_ids(1) == [two]
    journal.commit([Write(manifest=(3, signed()), tree_head=(5, signed(b"a")))])
    journal.commit([Write(manifest=(3, signed(b"again")), tree_head=(5, signed(b"b")))])
    assert (journal.manifest(3), journal.last_tree_head()) == (signed(b"again"), signed(b"b"))
    assert list(journal.tree_heads()) == [signed(b"b")]
    journal.close()


def test_a_version_is_found_by_the_number_of_the_event_that_published_it(path: Path) -> None:
    with closing(Journal(path)) as journal:
        for version in (0, 1, 5):
            journal.commit([Write(events=[event(version), published(version)])])
        assert [journal.published_at(version) for version in (0, 1, 5)] == [1, 3, 5]
        assert journal.published_at(3) == journal.published_at(9) == 0  # nobody knows: read from the first on

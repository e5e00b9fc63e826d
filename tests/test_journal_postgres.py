"""What only a database server can do to a coordinator: go away, come back, have two customers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from barnraise.coordinator.journal import Journal, Payload, StoredReceipt, Write
from barnraise.coordinator.journal_place import Place, place_for, read_place, write_place
from barnraise.protocol.errors import RunFolderError, StorageError
from tests.postgres_support import Server
from tests.test_journal import event, killed_and_looked_at, signed


@pytest.fixture
def mortal(postgres: Server) -> Server:
    """The server, which these tests kill and start again."""
    return postgres


@pytest.fixture
def path(mortal: Server, tmp_path: Path) -> Path:
    write_place(tmp_path, place_for(mortal.url, os.urandom(32)))
    return tmp_path / "state.postgres"


def schema(path: Path) -> str:
    return read_place(path).schema


def test_a_second_coordinator_is_refused_and_told_who_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path)
    monkeypatch.setattr("barnraise.coordinator.journal_postgres.OPEN_S", 0.1)
    with pytest.raises(RunFolderError, match=rf"barnraise coordinator on .*, process {os.getpid()}"):
        Journal(path)
    Journal(path, reading=True).close()
    journal.close()
    Journal(path).close()


def test_a_connection_that_breaks_costs_nothing_and_doubles_nothing(path: Path, mortal: Server) -> None:
    journal = Journal(path)
    for number in range(5):
        receipt = StoredReceipt(number, b"n" * 32, signed())
        journal.commit([Write(events=[event(number)], receipts=[receipt])])
        mortal.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name <> ''")
        assert journal.length == number + 1
    assert list(journal.events()) == [event(number) for number in range(5)]
    journal.close()


def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    path: Path, mortal: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server commits, and dies to us before it says so."""
    from barnraise.coordinator.journal_postgres import PostgresStore

    journal = Journal(path)
    transact = PostgresStore._transact
    lost = []

    def half(self: PostgresStore, db: object, fill: object) -> None:
        before = self._commits
        transact(self, db, fill)  # type: ignore[arg-type]
        if not lost:
            lost.append(before)
            self._commits = before
            raise ConnectionResetError("the network went away")

    monkeypatch.setattr(PostgresStore, "_transact", half)
    journal.commit([Write(events=[event(0)], receipts=[StoredReceipt(0, b"n" * 32, signed())])])
    journal.commit([Write(events=[event(1)])])
    assert lost == [0]
    assert list(journal.events()) == [event(0), event(1)]
    assert len(journal.receipts(b"n" * 32, 0, 9)) == 1
    journal.close()


def test_who_lost_its_connection_and_was_replaced_writes_nothing_more(path: Path, mortal: Server) -> None:
    first = Journal(path)
    first.commit([Write(events=[event(0)])])
    mortal.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name <> ''")
    second = Journal(path)
    second.commit([Write(events=[event(1)])])
    second.close()
    with pytest.raises(RunFolderError, match="another coordinator has begun to write"):
        first.commit([Write(events=[event(7)])])
    first.close()
    third = Journal(path)
    assert list(third.events()) == [event(0), event(1)]
    third.close()


def test_kill_9_of_the_server_loses_nothing_that_was_acknowledged(path: Path, mortal: Server) -> None:
    journal = Journal(path)
    acknowledged: list[int] = []
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            payload = Payload(number.to_bytes(32, "big"), 0, signed(bytes(2000)))
            journal.commit([Write(events=[event(number)], payloads=[payload])])
            acknowledged.append(number)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while len(acknowledged) < 20:
            time.sleep(0.01)
        mortal.stop(signal.SIGKILL)
        mortal.start()
        seen = len(acknowledged)
        while len(acknowledged) < seen + 5:
            time.sleep(0.01)
    finally:
        stop.set()
        writer.join()
    assert acknowledged == list(range(len(acknowledged)))
    assert list(journal.events()) == [event(number) for number in acknowledged]
    assert len(journal.payload_ids(1)) == len(acknowledged)
    journal.close()


def test_kill_9_of_the_coordinator_loses_nothing_that_was_acknowledged(path: Path) -> None:
    killed_and_looked_at(path, 7)


def test_a_server_that_stays_away_is_an_error_with_the_cure_and_the_next_commit_finds_its_place(
    path: Path, mortal: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path)
    journal.commit([Write(events=[event(0)])])
    monkeypatch.setattr("barnraise.coordinator.journal_postgres.RETRY_S", 0.2)
    mortal.stop()
    with pytest.raises(StorageError, match=r"cannot be reached .*start the database again"):
        journal.commit([Write(events=[event(1)])])
    mortal.start()
    monkeypatch.setattr("barnraise.coordinator.journal_postgres.RETRY_S", 30)
    journal.commit([Write(events=[event(1)])])
    assert list(journal.events()) == [event(0), event(1)]
    journal.close()


def test_a_flipped_bit_in_a_row_is_noticed(path: Path, mortal: Server) -> None:
    journal = Journal(path)
    journal.commit([Write(events=[event(0), event(1)])])
    flip = "UPDATE {}.events SET data = set_byte(data, 9, get_byte(data, 9) # 1) WHERE seq = 1"
    mortal.ask(flip.format(schema(path)))
    with pytest.raises(RunFolderError, match="event 1 is damaged"):
        list(journal.events())
    journal.close()


def test_a_database_put_back_to_an_older_day_is_refused(path: Path, mortal: Server) -> None:
    journal = Journal(path)
    journal.commit([Write(events=[event(0), event(1), event(2)])])
    journal.close()
    mortal.ask(f"DELETE FROM {schema(path)}.events WHERE seq > 0")
    with pytest.raises(RunFolderError, match="lost events 1 to 2, which were acknowledged"):
        Journal(path)


def test_a_password_is_in_no_message_and_no_file_that_others_read(tmp_path: Path) -> None:
    place = place_for("postgresql://me:s3cret%21@127.0.0.1:1/runs", bytes(32))
    assert place.password == "s3cret!"
    write_place(tmp_path, place)
    path = tmp_path / "state.postgres"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("barnraise.coordinator.journal_postgres.OPEN_S", 0.0)
        with pytest.raises(StorageError) as refused:
            Journal(path)
    assert "s3cret" not in f"{refused.value!r} {refused.value.__cause__!r} {place.shown}"
    path.chmod(0o640)
    with pytest.raises(RunFolderError, match="chmod 600"):
        Journal(path)


@pytest.mark.parametrize("url", ["mysql://a@b/c", "postgresql://host", "postgresql://h:port/d", "x"])
def test_what_is_no_url_of_a_database_is_refused(url: str) -> None:
    with pytest.raises(RunFolderError, match="postgresql://USER@HOST/DATABASE"):
        place_for(url, bytes(32))


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    write_place(tmp_path, Place(url="postgresql://me@host/runs", schema="barnraise_0"))
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "from pathlib import Path\n"
        "from barnraise.coordinator.journal import Journal\n"
        f"Journal(Path({str(tmp_path / 'state.postgres')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install barnraise[postgres]" in done.stderr


def test_another_driver_does_the_same(mortal: Server, tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="needs psycopg, which is no part of barnraise[postgres]")
    url = mortal.url.replace("postgresql:", "postgresql+psycopg:")
    write_place(tmp_path, place_for(url, os.urandom(32)))
    journal = Journal(tmp_path / "state.postgres")
    journal.commit([Write(events=[event(0)], payloads=[Payload(b"1" * 32, 0, signed())])])
    mortal.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name <> ''")
    journal.commit([Write(events=[event(1)], drop_payloads=[b"1" * 32])])
    assert list(journal.events()) == [event(0), event(1)]
    assert not journal.payload_ids(9)
    journal.close()

"""How many new keys come from one address: the rule, the file, the door of a run."""

from __future__ import annotations

import ipaddress
import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.coordinator import newcomers
from barnraise.coordinator.newcomer_book import NEWCOMERS, NewcomerBook
from barnraise.coordinator.newcomers import AROUND, WINDOW_MS, Groups, Newcomers, groups_of
from barnraise.protocol.identity import Identity

SECRET = b"s" * 32
OPERATOR = Identity.from_private_bytes(b"o" * 32)
HOUR_MS = 3_600_000


def at(host: str, secret: bytes = SECRET) -> Groups:
    found = groups_of(f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/4001", secret, False)
    assert found is not None
    return found


def come(door: Newcomers, groups: Groups, now_ms: int) -> bool:
    """One new key comes, as the door of a run has it."""
    if door.wait_ms(groups, now_ms):
        return False
    door.let_in(groups, now_ms)
    return True


hosts = st.one_of(
    st.integers(0, 7).map(lambda n: f"198.51.100.{n}"),
    st.integers(0, 3).map(lambda n: f"203.0.{n}.1"),
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 3)).map(
        lambda n: f"2001:db8:{n[0]}:{n[1]}::{n[2]}"
    ),
)


@settings(max_examples=50)
@given(st.integers(1, 3), st.lists(st.tuples(hosts, st.integers(0, 2 * HOUR_MS)), min_size=15, max_size=50))
def test_no_window_of_a_day_holds_more_than_the_limits_and_nobody_waits_without_need(per_day, coming):
    """Held against the plainest rule there is: look at everybody who came in."""
    door, now, inside = Newcomers(per_day), 10**12, []

    def count(moment: int, host: str, bits: tuple[int, int]) -> int:
        ip = ipaddress.ip_address(host)
        net = ipaddress.ip_network(f"{host}/{bits[0 if ip.version == 4 else 1]}", strict=False)
        return sum(
            when > moment - WINDOW_MS and ipaddress.ip_address(other) in net
            for when, other in inside
            if ipaddress.ip_address(other).version == ip.version
        )

    for host, later in coming:
        now += later
        full = count(now, host, (32, 64)) >= per_day or count(now, host, (24, 48)) >= AROUND * per_day
        wait = door.wait_ms(at(host), now)
        assert (wait > 0) == full
        if full:  # it is told the first moment at which it would be let in, if nobody else comes
            assert count(now + wait, host, (32, 64)) < per_day
            assert count(now + wait, host, (24, 48)) < AROUND * per_day
            assert (
                count(now + wait - 1, host, (32, 64)) >= per_day
                or count(now + wait - 1, host, (24, 48)) >= AROUND * per_day
            )
        else:
            door.let_in(at(host), now)
            inside.append((now, host))


def test_four_times_as_many_come_from_around():
    door = Newcomers(2)
    for number in range(8):
        assert come(door, at(f"198.51.100.{number // 2}"), number)
    assert door.wait_ms(at("198.51.100.200"), 100) == WINDOW_MS - 100
    assert come(door, at("198.51.101.1"), 100)
    for number in range(8):
        assert come(door, at(f"2001:db8:1:{number // 2}::1"), number)
    assert not come(door, at("2001:db8:1:9::1"), 100)
    assert come(door, at("2001:db8:2:9::1"), 100)


def test_a_clock_that_goes_back_makes_nobody_wait_longer_than_a_day():
    door, home = Newcomers(1), at("198.51.100.1")
    assert come(door, home, 9 * WINDOW_MS)
    assert come(door, at("203.0.113.1"), 9 * WINDOW_MS + 1)
    assert door.wait_ms(home, WINDOW_MS) == WINDOW_MS
    assert come(door, home, 2 * WINDOW_MS)
    assert len(door) == 1


@given(st.lists(st.tuples(hosts, st.integers(-2 * WINDOW_MS, 2 * WINDOW_MS)), min_size=10, max_size=40))
def test_whatever_the_clock_does_nobody_waits_longer_than_a_day(coming):
    door, now = Newcomers(1), 10**13
    for host, later in coming:
        now += later
        assert 0 <= door.wait_ms(at(host), now) <= WINDOW_MS
        come(door, at(host), now)
        assert door.wait_ms(at(host), now + WINDOW_MS) == 0


def test_memory_is_bounded_and_a_full_one_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(newcomers, "MOST_KEPT", 100)
    door = Newcomers(1)
    assert come(door, at("198.51.100.1"), 0)
    assert not come(door, at("198.51.100.1"), 1)
    for n in range(100):
        assert come(door, at(f"2001:db8:{n:x}::1"), 2 + n)
    assert len(door) == 100
    assert come(door, at("198.51.100.1"), 200)
    assert len(door) == 100
    assert len(door._times) == 200  # two groups each, of what is kept alone


def test_a_home_is_one_address_in_either_protocol_and_another_home_is_not():
    assert at("2001:db8:1:2::1") == at("2001:db8:1:2:ffff::9")
    assert at("2001:db8:1:2::1").address != at("2001:db8:1:3::1").address
    assert at("2001:db8:1:2::1").around == at("2001:db8:1:3::1").around
    assert at("2001:db8:1:2::1").around != at("2001:db8:2:2::1").around
    assert at("198.51.100.1").address != at("198.51.100.2").address
    assert at("198.51.100.1").around == at("198.51.100.2").around
    assert at("198.51.100.1").around != at("198.51.101.1").around
    assert at("::ffff:198.51.100.1") == at("198.51.100.1")
    assert len({*at("198.51.100.0"), *at("0.0.0.0"), *at("2001:db8::")}) == 6


@pytest.mark.parametrize(
    "observed",
    [
        *("/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1", "/ip4/10.1.2.3/tcp/1", "/ip4/172.16.0.9/tcp/1"),
        *("/ip4/192.168.1.2/tcp/1", "/ip4/100.64.0.1/tcp/1", "/ip4/169.254.0.1/tcp/1", "/memory/7"),
        *("/ip6/fd00::1/tcp/1", "/ip6/fe80::1%eth0/tcp/1", "/ip6/::ffff:10.0.0.1/tcp/1"),
    ],
)
def test_private_addresses_are_counted_only_where_that_is_asked_for(observed):
    assert groups_of(observed, SECRET, False) is None
    assert groups_of(observed, SECRET, True) is not None


@pytest.mark.parametrize("observed", ["", "/", "/ip4", "/ip4/nonsense/tcp/1", "/dns/example.org/tcp/1"])
def test_all_whose_address_is_not_known_are_one_group(observed):
    assert groups_of(observed, SECRET, False) == groups_of("", SECRET, False)
    assert groups_of(observed, SECRET, False) is not None


# --- what is kept on the disk


def filled(folder: Path, hosts: list[str], start_ms: int = 1_000) -> tuple[NewcomerBook, Newcomers]:
    book = NewcomerBook(folder, OPERATOR)
    door = Newcomers(2, book.kept)
    for number, host in enumerate(hosts):
        book.add(door.let_in(at(host, book.secret), start_ms + number), door.arrivals)
    return book, door


def test_a_restart_counts_on(tmp_path):
    filled(tmp_path, ["198.51.100.1", "198.51.100.1", "2001:db8::1"])
    book = NewcomerBook(tmp_path, OPERATOR)
    again = Newcomers(2, book.kept)
    assert again.wait_ms(at("198.51.100.1", book.secret), 5_000) == 1_000 + WINDOW_MS - 5_000
    assert again.wait_ms(at("2001:db8::1", book.secret), 5_000) == 0
    assert len(again) == 3


def test_the_file_holds_no_address_and_without_the_runs_key_nothing_to_try_addresses_on(tmp_path):
    filled(tmp_path, ["198.51.100.1"])
    data = (tmp_path / NEWCOMERS).read_bytes()
    assert stat.S_IMODE((tmp_path / NEWCOMERS).stat().st_mode) == 0o600
    assert b"198" not in data
    assert ipaddress.ip_address("198.51.100.1").packed not in data
    assert at("198.51.100.1", NewcomerBook(tmp_path, OPERATOR).secret).address in data
    stranger = NewcomerBook(tmp_path, Identity.from_private_bytes(b"x" * 32))
    assert at("198.51.100.1", stranger.secret).address not in data


def test_what_counts_no_more_is_gone_from_the_disk_and_then_the_file_and_its_salt(tmp_path):
    book, door = filled(tmp_path, ["198.51.100.1"])
    book.add(door.let_in(at("203.0.113.1", book.secret), 9_000), door.arrivals)
    size, secret = (tmp_path / NEWCOMERS).stat().st_size, book.secret
    door.forget(5_000 + WINDOW_MS)
    book.replace(door.arrivals)
    assert (tmp_path / NEWCOMERS).stat().st_size < size
    assert [arrival.at_ms for arrival in NewcomerBook(tmp_path, OPERATOR).kept] == [9_000]
    door.forget(9_000 + WINDOW_MS)
    book.replace(door.arrivals)
    assert list(tmp_path.iterdir()) == []
    assert book.secret != secret


@pytest.mark.parametrize("data", [b"", b"x" * 1000, b"barnraise newcomers 1\n12"])
def test_a_damaged_file_is_begun_anew(tmp_path, data):
    (tmp_path / NEWCOMERS).write_bytes(data)
    filled(tmp_path, ["198.51.100.1"])
    assert len(NewcomerBook(tmp_path, OPERATOR).kept) == 1


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_write_that_was_cut_short_costs_the_last_arrival_alone(tmp_path, cut):
    filled(tmp_path, ["198.51.100.1", "198.51.100.1"])
    path = tmp_path / NEWCOMERS
    path.write_bytes(path.read_bytes()[:-cut])
    filled(tmp_path, ["203.0.113.1"], 7_000)
    assert [arrival.at_ms for arrival in NewcomerBook(tmp_path, OPERATOR).kept] == [1_000, 7_000]


@pytest.mark.parametrize("taken", range(24))
def test_a_disk_that_takes_a_part_of_an_arrival_costs_none_that_follows(tmp_path, monkeypatch, taken):
    book, door = filled(tmp_path, ["198.51.100.1"])
    write = os.write
    with monkeypatch.context() as full:  # as write(2) does when there is room for a part
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:taken]))
        book.add(door.let_in(at("198.51.100.1", book.secret), 2_000), door.arrivals)
    for moment in (3_000, 4_000):
        book.add(door.let_in(at("198.51.100.1", book.secret), moment), door.arrivals)
    assert [item.at_ms for item in NewcomerBook(tmp_path, OPERATOR).kept] == [1_000, 2_000, 3_000, 4_000]


def test_a_disk_that_refuses_is_said_once_and_stops_nobody(tmp_path, caplog):
    folder = tmp_path / "gone"
    book, door = filled(folder, ["198.51.100.1", "198.51.100.1", "203.0.113.1"])
    assert len(door) == 3
    assert caplog.text.count("a restart would forget") == 1
    for count in (4, 6):
        folder.mkdir()
        book.add(door.let_in(at("203.0.113.1", book.secret), 9_000), door.arrivals)
        assert len(NewcomerBook(folder, OPERATOR).kept) == count
        shutil.rmtree(folder)  # with what could be written behind
        book.add(door.let_in(at("203.0.113.1", book.secret), 9_000), door.arrivals)


def test_a_file_that_only_grew_is_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(newcomers, "MOST_KEPT", 10)
    monkeypatch.setattr("barnraise.coordinator.newcomer_book._MOST_BYTES", 38 + 20 * 24)
    filled(tmp_path, [f"2001:db8:{n:x}::1" for n in range(101)])
    kept = NewcomerBook(tmp_path, OPERATOR).kept
    assert len(kept) <= 20
    assert kept[-1].at_ms == 1_100

"""The index behind the pages: it agrees with a plain reading of the ledger, and cannot be lost for good."""

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import trio
from coordinator_history import history
from web_support import Web, ordinary, website

from barnraise.coordinator.ledger_log import entries_of
from barnraise.coordinator.web.index_read import IndexReader
from barnraise.coordinator.web.index_schema import KIND, key_of, keys_between
from barnraise.coordinator.web.index_write import IndexWriter
from barnraise.protocol.ledger import encode_entry
from barnraise.protocol.ledger_places import KINDS, Filter, Place, placed
from barnraise.protocol.ledger_standings import Standing, standings

NOW = 40_000_000


def filled(path: Path, seed: int, length: int = 400) -> list[Place]:
    """An index over a random history; the same entries, read plainly."""
    entries = list(entries_of(history(seed, length), 1))
    writer = IndexWriter(path)
    rng, data = random.Random(seed), [encode_entry(entry) for entry in entries]
    while writer.size < len(data):
        writer.add(data[writer.size : writer.size + rng.randint(1, 60)], (), b"", 0)
    writer.close()
    return list(placed(entries))


def test_every_kind_of_entry_has_a_number() -> None:
    assert KIND.keys() == set(KINDS)
    assert len(set(KIND.values())) == len(KINDS)


@pytest.mark.parametrize("seed", range(6))
def test_a_search_finds_what_a_plain_reading_finds(tmp_path: Path, seed: int) -> None:
    places = filled(tmp_path / "i", seed)
    reader = IndexReader(tmp_path / "i")
    rng = random.Random(seed)
    nodes = sorted({place.node for place in places if place.node is not None})
    units = [place.unit for place in places if place.unit is not None]
    moments = [place.entry.at_ms for place in places]
    for _ in range(40):
        wanted = Filter(
            nodes=rng.choice((None, frozenset(rng.sample(nodes, min(len(nodes), rng.randint(1, 3)))))),
            kinds=rng.choice((None, None, frozenset(rng.sample(KINDS, rng.randint(1, 4))))),
            unit=rng.choice((None, None, None, rng.choice(units))),
            version=rng.choice((None, None, rng.randint(0, 3))),
            since=rng.choice((None, None, rng.choice(moments))),
            until=rng.choice((None, None, rng.choice(moments))),
        )
        expected = [place.index for place in places if wanted.takes(place)]
        downwards: list[int] = []
        before: int | None = None
        while True:
            page = reader.search(wanted, 7, before=before)
            downwards += [row.index for row in page.rows]
            if not page.older:
                break
            before = page.low
        assert downwards == expected[::-1], wanted
        upwards: list[int] = []
        after = 0
        while True:
            page = reader.search(wanted, 7, after=after)
            upwards += [row.index for row in reversed(page.rows)]
            if not page.newer:
                break
            after = page.high
        assert upwards == expected, wanted
    for place in rng.sample(places, 30):
        (row,) = reader.search(Filter(), 1, before=place.index + 1).rows
        assert (row.index, row.node, row.unit, row.version) == (
            place.index,
            place.node,
            place.unit,
            place.version,
        )


@pytest.mark.parametrize("seed", range(6))
def test_standings_are_those_of_a_plain_reading(tmp_path: Path, seed: int) -> None:
    places = filled(tmp_path / "i", seed)
    expected = standings((place.entry for place in places), NOW)
    reader = IndexReader(tmp_path / "i")
    total, found = reader.nodes("credit", 0, 1000, NOW)
    assert total == len(found) == len(expected.nodes)
    assert [node.credit for node in found] == [node.credit for node in expected.ranked()]
    for node in found:
        other = expected.nodes[node.node]
        assert node.recent == pytest.approx(other.recent, abs=1e-6)
        node.recent = other.recent
        assert node == other
    _, recent = reader.nodes("recent", 0, 1000, NOW)
    assert [node.recent for node in recent] == sorted((node.recent for node in recent), reverse=True)
    best: Standing = found[0]
    assert reader.rank(best) == (1, total)


@pytest.mark.parametrize("seed", range(3))
def test_a_units_story_is_complete(tmp_path: Path, seed: int) -> None:
    places = filled(tmp_path / "i", seed, 600)
    reader = IndexReader(tmp_path / "i")
    for unit in {place.unit for place in places if place.unit is not None}:
        own = [place for place in places if place.unit == unit]
        handed_in = {getattr(place.entry, "submission_id", b"-") for place in own}
        caused = [place for place in places if getattr(place.entry, "cause", b"") in handed_in]
        assert {row.index for row in reader.unit(unit)} == {place.index for place in own + caused}
        lease_id = getattr(own[0].entry, "lease_id")  # noqa: B009
        assert reader.units_named(lease_id.hex()[:12]) == [unit]


def test_a_prefix_spans_the_ids_that_begin_so() -> None:
    for identifier in (bytes(16), b"\xff" * 16, bytes(range(16)), b"\x7f" + bytes(15), b"\x80" + bytes(15)):
        for digits in (1, 4, 7, 16, 32):
            low, high = keys_between(identifier.hex()[:digits])
            assert low <= key_of(identifier) <= high


def test_a_search_that_takes_long_says_how_far_it_came(tmp_path: Path) -> None:
    places = filled(tmp_path / "i", 1)
    reader = IndexReader(tmp_path / "i")
    writer = IndexWriter(tmp_path / "i")
    for _ in range(120):  # the first entries alone fit; many windows of others come after
        writer.add([encode_entry(places[0].entry)] * 200, (), b"", 0)
    page = reader.search(Filter(kinds=frozenset({"Submitted"})), 5, budget_s=0.0)
    assert page.rows == ()
    assert page.older
    while page.older and not page.rows:
        page = reader.search(Filter(kinds=frozenset({"Submitted"})), 5, before=page.low, budget_s=0.0)
    assert len(page.rows) == 5


async def figures(web: Web) -> tuple[object, ...]:
    """What an index is asked for, all of it."""
    units = [await web.json(f"/api/v1/units/{unit}") for unit in range(web.core.state.next_unit)]
    entries = await web.json("/api/v1/ledger?limit=500")
    return entries, units, (await web.json("/api/v1/nodes?limit=500"))["nodes"]


@pytest.mark.parametrize("damage", ["deleted", "flipped", "emptied", "other history", "other events", "none"])
async def test_a_lost_damaged_or_foreign_index_is_made_anew(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, damage: str
) -> None:
    async with website(tmp_path) as web:
        await web.record(ordinary(web.core.run_id).events)
        await web.settled()
        before = await figures(web)
        now = web.clock[0]
    path = tmp_path / "run" / "web.sqlite"
    if damage == "deleted":
        path.unlink()
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "flipped":
        data = bytearray(path.read_bytes())
        data[16:4000:3] = bytes(byte ^ 0x55 for byte in data[16:4000:3])
        path.write_bytes(bytes(data))
    elif damage != "none":
        with sqlite3.connect(path) as database:
            if damage == "other history":
                database.execute("UPDATE meta SET root = x'00'")
            else:
                database.execute("UPDATE meta SET events = 100000")
        database.close()
    async with website(tmp_path) as web:
        web.clock[0] = now - 1000
        await web.settled()
        index = web.service.site.index
        assert (index.size, index.trouble) == (len(web.core.ledger), "")
        after = await figures(web)
    assert after == before


async def test_entries_from_before_a_start_show_once_they_are_published(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with website(tmp_path) as web:
        await web.record(ordinary(web.core.run_id).events)  # and ends before any head was signed
    async with website(tmp_path) as web:
        assert web.service.site.index.entries.folder.size == 0
        while web.service.site.index.size < len(web.core.ledger):
            await trio.sleep(0.5)
        page = await web.json("/api/v1/ledger?limit=500")
        assert [entry["index"] for entry in page["entries"]] == list(reversed(range(len(web.core.ledger))))
        assert not web.service.site.index.entries._recent


@pytest.mark.parametrize(
    "error", [sqlite3.OperationalError("disk full"), sqlite3.DatabaseError("bad"), ValueError()]
)
async def test_an_index_that_fails_is_an_alarm_of_the_page_alone(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    add, failures = IndexWriter.add, [error, error]

    def failing(self: IndexWriter, *args: Any) -> None:
        if failures:
            raise failures.pop()
        add(self, *args)

    monkeypatch.setattr(IndexWriter, "add", failing)
    async with website(tmp_path) as web:
        await web.record(ordinary(web.core.run_id).events)
        index = web.service.site.index
        while not index.trouble:
            await trio.sleep(0.1)
        web.clock[0] += 1000
        (alarm,) = (await web.json("/api/v1/run"))["alarms"]
        assert alarm["part"] == "page"
        assert (await web.json("/readyz"))["ready"]
        await web.settled()
        assert (index.trouble, failures) == ("", [])
        page = await web.json("/api/v1/ledger?limit=500")
        assert [entry["index"] for entry in page["entries"]] == list(reversed(range(len(web.core.ledger))))
        assert (
            sum(node["accepted"] for node in (await web.json("/api/v1/nodes"))["nodes"])
            == web.core.state.accepted
        )

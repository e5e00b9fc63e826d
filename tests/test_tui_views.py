"""What the terminal application's screens are made of: texts, limits, files that are followed."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
from app_support import RECORDING, recorded, use_utc
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from barnraise.tui.app import consent, ledger, limits, overview, screen, swarm, view, work
from barnraise.tui.app.ascii import needs_ascii, to_ascii
from barnraise.tui.app.clean import MOST_TEXT, clean_text, cleaned
from barnraise.tui.app.feed import Book, read_book
from barnraise.tui.app.fields import FIELDS, for_a_while, parse_duration, shown_fields
from barnraise.tui.app.pace import Pace
from barnraise.tui.app.sheet import bar, cut, fit, spark, words, wrapped
from barnraise.tui.app.tail import MOST_BYTES, MOST_LINES, Tail
from barnraise.tui.app.view import History, View, credit


def look(state: dict[str, Any], **more: Any) -> View:
    return View(state=state, now=1_796_184_509.0, history=History(), folder="node-1", **more)


def rows_of(state: Any, **more: Any) -> list[tuple[str, Any]]:
    at = look(state, **more)
    return [
        *overview.now_rows(at, 60),
        *overview.earned_rows(at),
        *overview.speed_rows(at, 20),
        *overview.machine_rows(at),
        *overview.network_rows(at),
        *overview.news_rows(at, 3),
        *swarm.reach_rows(at),
        *swarm.version_rows(at, 20, 3),
        *swarm.tree_rows(at),
        *(("peer", swarm._entry(peer, "c", "p").cells) for peer in at.items("neighbours", "tree")),
        *limits.now_rows(at, 20),
        *(
            ("limit", limits._entry(field, at.part("limits")).cells)
            for field in shown_fields(at.part("limits"))
        ),
        *ledger.balance_rows(at, Book()),
        *work._unit_rows(at, 60),
        *work._flow_rows(at),
        *screen.banner_rows(at),
        *(consent.consent_rows(at.part("consent"))),
    ]


# --- trees of any kind


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = sorted(recorded())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tree_with_anything_in_it_is_shown_somehow(data: st.DataObject) -> None:
    """Nodes of other versions have other trees."""
    state = recorded()
    for key in data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)):
        value = data.draw(st.just(None) | anything)
        if isinstance(state[key], dict) and data.draw(st.booleans()):
            inner = dict(state[key])
            for name in (
                data.draw(st.lists(st.sampled_from(sorted(inner)), max_size=4, unique=True)) if inner else ()
            ):
                inner[name] = data.draw(anything)
            value = inner
        if value is None and data.draw(st.booleans()):
            state.pop(key, None)
        else:
            state[key] = value
    for _, pieces in rows_of(cleaned(state)):
        assert isinstance(pieces, tuple)


def test_an_empty_tree_is_shown_too() -> None:
    assert rows_of({})
    assert rows_of({}, lost="the daemon has ended", retry_at=1_796_184_513.0)


# --- texts


@given(st.text(), st.integers(1, 40))
def test_wrapped_lines_fit_and_lose_no_letter(text: str, width: int) -> None:
    text = clean_text(text)
    lines = ["".join(piece for piece, _ in line) for line in wrapped(words(text), width)]
    assert all(cell_len(line) <= max(width, 2) for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


@given(st.lists(st.text(max_size=12).map(clean_text), max_size=4), st.integers(1, 30), st.booleans())
def test_a_cell_has_exactly_its_width(texts: list[str], width: int, right: bool) -> None:
    line = fit(words(*texts), width, right)
    assert sum(cell_len(text) for text, _ in line) == width


@given(st.text(max_size=60), st.integers(0, 30))
def test_cut_text_has_exactly_its_width(text: str, width: int) -> None:
    assert cell_len(cut(clean_text(text), width)) == width


@given(st.text())
def test_ascii_takes_as_many_cells(text: str) -> None:
    text = clean_text(text)
    assert to_ascii(text).isascii()
    assert cell_len(to_ascii(text)) == sum(map(cell_len, text))


@given(st.text(st.characters()))
def test_clean_text_is_printable_and_bounded(text: str) -> None:
    assert clean_text(text).isprintable()
    assert len(clean_text(text)) <= MOST_TEXT


def test_cleaning_reaches_every_depth_and_ends() -> None:
    deep: Any = "\x1b[2J"
    for _ in range(200):
        deep = {"\x07": [deep]}
    flat = repr(cleaned(deep))
    assert "\\x1b" not in flat
    assert "\\x07" not in flat
    assert cleaned({"a": math.nan, "b": [math.inf], "c": b"\x1b"}) == {
        "a": None,
        "b": [None],
        "c": "b'\\x1b'",
    }
    assert len(cleaned(["x"] * 100_000)) < 5000


def test_a_bar_never_shows_more_than_is_finished() -> None:  # R7
    assert bar(0.999, 10) == (("━" * 9, "bar"), ("─", "track"))
    assert bar(1.0, 4) == (("━━━━", "bar"),)
    assert bar(-3, 4) == bar(0, 4) == (("────", "track"),)
    assert bar(99, 4) == bar(1, 4)


def test_sparks_are_scaled_to_the_largest_and_stand_on_the_right() -> None:
    assert spark([], 4) == "    "
    assert spark([0, 0], 4) == "  ▁▁"
    assert spark([0, 1, 2, 4, 8], 4) == "▁▂▄█"


def test_credit_is_said_in_units_for_people() -> None:
    assert credit(999) == "999 Mflop"
    assert credit(37_359) == "37.4 Gflop"
    assert credit(999_960) == "1.0 Tflop"
    assert credit(10**18) == "1,000,000.0 Eflop"
    assert credit(None) == "0 Mflop"


@pytest.mark.parametrize(
    ("environment", "ascii"),
    [
        ({"LANG": "de_DE.UTF-8", "TERM": "xterm-256color"}, False),
        ({"LANG": "C.utf8"}, False),
        ({"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, True),
        ({"LC_CTYPE": "de_DE.ISO-8859-1", "LANG": "de_DE.UTF-8"}, True),
        ({"LANG": "de_DE.ISO-8859-1"}, True),
        ({"LC_CTYPE": "C.UTF-8"}, True),  # Python's own doing, where there is no locale
        ({"LC_CTYPE": "C.UTF-8", "LANG": "en_US.UTF-8"}, False),
        ({}, True),
        ({"LANG": "de_DE.UTF-8", "TERM": "linux"}, True),
    ],
    ids=["utf8", "c-utf8", "lc-all-c", "latin-ctype", "latin", "coerced", "both", "none", "console"],
)
def test_ascii_is_for_terminals_without_utf_8(environment: dict[str, str], ascii: bool) -> None:
    assert needs_ascii(environment) is ascii


# --- rates


def test_rates_are_between_samples_and_begin_anew_with_another_process() -> None:
    history = History()
    for second in range(7):
        history.add(
            {"pid": 1, "bytes_in": second * 1000, "bytes_out": 0, "state": "generating", "tokens_per_s": 9},
            second,
        )
    assert list(history.down) == [1000.0, 1000.0]
    assert list(history.speed) == [9, 9]
    history.add({"pid": 2, "bytes_in": 0, "bytes_out": 0}, 10.0)
    history.add({"pid": 2, "bytes_in": 300, "bytes_out": 0}, 13.0)
    assert list(history.down) == [1000.0, 1000.0, 100.0]
    history.add({"pid": 2, "bytes_in": 600, "bytes_out": 0}, 5.0)  # the clock was set back
    assert len(history.down) == 3


def test_moments_that_no_clock_shows_are_no_moments() -> None:
    for odd in (None, "x", True, -1, 10**30, math.inf):
        assert not view.is_moment(odd) or odd == 10**3
    assert view.clock(1e30) == "?"


# --- when a state is drawn


def shown_at(changes: list[tuple[float, dict[str, Any]]]) -> list[float]:
    """When a link that waits a second for figures would show the states that come at these times."""
    pace, base, shown, due = Pace(1.0), {"state": "generating", "mode": "run"}, [], math.inf
    for now, change in changes:
        if due < now:
            pace.show(base, due)
            shown.append(due)
            due = math.inf
        base = base | change
        due = min(due, pace.due(base, now))
        if due <= now:
            pace.show(base, now)
            shown.append(now)
            due = math.inf
    return shown if due == math.inf else [*shown, due]


def test_figures_wait_for_their_second() -> None:
    assert shown_at([(i / 5, {"credit": i}) for i in range(13)]) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "change",
    [
        {"state": "paused", "mode": "pause"},
        {"state": "offline"},
        {"connected": False},
        {"suspended": [{"reason": "on battery"}]},
        {"consent": {"run_id": "ab"}},
        {"duplicate_key": True},
        {"witness": {"alarm": "SPLIT VIEW"}},
        {"state": ["odd"]},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_a_person_waits_for_is_shown_at_once_however_busy_the_node(change: dict[str, Any]) -> None:
    busy = [(10 + i / 5, {"credit": i}) for i in range(3)]
    assert shown_at([*busy, (10.5, change)]) == [10.0, 10.5]


def test_what_comes_of_a_command_is_shown_at_once() -> None:
    pace = Pace(1.0)
    pace.show({}, 0.0)
    assert pace.due({"credit": 1}, 0.1) == 1.0
    pace.hurry(0.15)
    assert pace.due({"credit": 2}, 0.2) == 0.2
    pace.show({"credit": 2}, 0.2)
    assert pace.due({"credit": 3}, 0.6) == 0.6  # the state that has it may come second
    pace.show({"credit": 3}, 0.6)
    assert pace.due({"credit": 4}, 0.7) == 1.6


def test_a_new_kind_of_work_is_shown_at_once_but_not_in_quick_turns() -> None:
    assert shown_at([(0, {}), (2.9, {"credit": 1}), (3.0, {"state": "waiting"})]) == [0, 2.9, 3.0]
    turns = [(5 + i / 5, {"state": "generating" if i % 2 else "asking"}) for i in range(13)]
    assert shown_at(turns) == [5.0, 6.0, 7.0, 8.0]


# --- limits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1 h 30 min", 5400),
        ("1d", 86_400),
    ],
)
def test_times_are_read_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-3m", "0", "3x", "30m5", "400d", "1h x", "9" * 40])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="like 30m"):
        parse_duration(text)


GOOD = {
    "down": ("20MB/s", 20_000_000),
    "up": ("none", None),
    "monthly": ("500GB", 500 * 10**9),
    "disk": ("20 GB", 20 * 10**9),
    "idle_s": ("3m", 180),
    "hours": ("22:00-7:00, 12:00-13:00", ["22:00-07:00", "12:00-13:00"]),
    "programs": ("steam, blender", ["steam", "blender"]),
    "threads_idle": ("auto", None),
    "threads_in_use": ("4", 4),
    "memory_idle": ("90 %", 0.9),
    "memory_in_use": ("50", 0.5),
    "gpu_memory": ("12.5%", 0.125),
    "gpu_temperature": ("85 °C", 85.0),
}


@pytest.mark.parametrize("key", sorted(GOOD))
def test_every_limit_reads_what_its_hint_says_and_refuses_nonsense(key: str) -> None:
    field = next(field for field in FIELDS if field.key == key)
    text, value = GOOD[key]
    assert field.read(text) == value
    for example in field.hint.replace(" or ", ", ").split(", "):
        field.read(example)
    if key != "programs":
        for nonsense in ("-1", "fast", "1e99 GB", "²", "nan"):
            with pytest.raises(ValueError, match=r"."):
                field.read(nonsense)
    assert field.show(value)


NOW = 1_796_184_509.0  # 04:08:29 UTC


@pytest.mark.parametrize(
    ("key", "text", "value", "seconds"),
    [
        ("down", "20MB/s for 2h", 20_000_000, 7200),
        ("up", "none until 04:09", None, 31),
        ("when", "idle for 30m", "idle", 1800),
        ("when", "for 1d", "idle", 86_400),
        ("on_battery", "Yes UNTIL 2026-12-03 04:08:29", True, 86_400),
        ("programs", "fit for life for 1h", ["fit for life"], 3600),
    ],
)
def test_a_limit_for_a_while_is_a_value_and_a_time(
    key: str, text: str, value: Any, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_utc(monkeypatch)
    field = next(field for field in FIELDS if field.key == key)
    read = for_a_while(field, NOW, "always" if key == "when" else None)
    assert read(text) == (value, round((NOW + seconds) * 1000))
    for odd in ("20MB/s", "for", "for 2x", "until 25:00", "until 2020-01-01", "maybe for 2h", "²for 2h"):
        if key != "programs":
            with pytest.raises(ValueError, match=r"."):
                read(odd)


def test_a_choice_goes_round() -> None:
    when = next(field for field in FIELDS if field.key == "when")
    assert when.next("always") == "idle"
    assert when.next("idle") == "always"
    assert when.next("something newer") == "always"


# --- files


def test_the_book_is_read_with_every_signature_checked() -> None:
    book = read_book(RECORDING, "", Book())
    assert (len(book.verdicts), book.proven, book.balance, book.problem) == (61, 61, 37_359, "")
    assert book.tally() == {"accepted": 61}
    assert read_book(RECORDING, book.run_id, book) is book
    assert read_book(RECORDING, "ff" * 32, book).verdicts == ()
    assert read_book(RECORDING, "../../etc", Book()).verdicts == ()


def copy_of_recording(folder: Path) -> Path:
    target = folder / "runs" / "06e213deed0897cf"
    target.mkdir(parents=True)
    for name in ("receipts.bin", "run.bin"):
        (target / name).write_bytes((RECORDING / "runs" / "06e213deed0897cf" / name).read_bytes())
    return target


def test_a_receipt_that_is_being_written_does_not_hide_the_others(tmp_path: Path) -> None:
    path = copy_of_recording(tmp_path) / "receipts.bin"
    whole = path.read_bytes()
    book = read_book(tmp_path, "", Book())
    path.write_bytes(whole + whole[:100])
    torn = read_book(tmp_path, "", book)
    assert len(torn.verdicts) == 61
    assert "damaged" in torn.problem
    path.write_bytes(whole)
    assert read_book(tmp_path, "", torn).problem == ""


def test_receipts_of_another_key_are_not_counted(tmp_path: Path) -> None:
    from barnraise.node.receipts import read_receipts
    from barnraise.protocol.envelope import sign
    from barnraise.protocol.identity import Identity
    from barnraise.protocol.messages import Receipt
    from barnraise.protocol.wire import decode, encode

    path = copy_of_recording(tmp_path) / "receipts.bin"
    forged = sign(decode(read_receipts(path)[0].payload, Receipt), Identity.generate())
    from zlib import crc32

    body = encode(forged)
    path.write_bytes(path.read_bytes() + len(body).to_bytes(4, "big") + crc32(body).to_bytes(4, "big") + body)
    book = read_book(tmp_path, "", Book())
    assert len(book.verdicts) == book.proven == 61
    assert "not signed by the run's key" in book.problem


def test_without_the_runs_description_nothing_is_called_proven(tmp_path: Path) -> None:
    (copy_of_recording(tmp_path) / "run.bin").unlink()
    book = read_book(tmp_path, "", Book())
    assert len(book.verdicts) == 61
    assert book.proven == 0
    shown = dict(ledger.balance_rows(look({}), book))
    assert shown["signatures"][0] == ("0 of 61 signatures checked", "warn")


def test_a_log_is_followed_through_rotation(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    tail = Tail(path)
    assert not tail.read()
    assert "cannot read" in tail.problem
    path.write_text("2026-12-02 04:00:00,000 INFO barnraise.node one\n2026-12-02 04:00:01,000 WARN")
    assert tail.read()
    assert [line.text for line in tail.lines] == ["one"]
    assert not tail.read()
    with path.open("a") as file:
        file.write("ING x two\n  more\n")
    tail.read()
    assert [(line.level, line.text) for line in tail.lines] == [
        ("INFO", "one"),
        ("WARNING", "two"),
        ("WARNING", "  more"),
    ]
    path.rename(tmp_path / "node.log.1")
    path.write_text("2026-12-02 04:00:02,000 ERROR x three\n")
    tail.read()
    assert tail.lines[-1].text == "three"
    assert tail.lines[-1].bad
    assert tail.problem == ""


def test_of_a_huge_log_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    line = "2026-12-02 04:00:00,000 INFO barnraise.node " + "x" * 1000 + "\n"
    path.write_text(
        line * (3 * MOST_BYTES // len(line)) + "2026-12-02 04:00:09,000 INFO barnraise.node end\n"
    )
    tail = Tail(path)
    tail.read()
    assert tail.lines[-1].text == "end"
    assert len(tail.lines) <= min(MOST_LINES, MOST_BYTES // len(line) + 1)
    assert all(len(one.text) == 1000 for one in list(tail.lines)[:-1])


def test_utc_is_used_in_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    use_utc(monkeypatch)
    assert os.environ["TZ"] == "UTC"
    assert view.clock(0.5 + 86_400) == "00:00:00"


def test_a_node_that_is_turned_away_for_now_says_why_and_when_it_tries_again():
    reason = (
        "waiting for the coordinator: this run lets 64 keys a day that it has never seen come in from one "
        "internet address (256 from its surroundings), and so many have come from yours: the next may in 5 h"
    )
    at = 1_796_184_509_000
    state = {"state": "connecting", "reason": reason, "since_ms": at - 60_000, "then": "tries again"}
    rows = {
        label: str(row) for label, row in overview.now_rows(look({**state, "until_ms": at + 1_800_000}), 60)
    }
    assert reason in rows["state"]
    assert "tries again in 30m" in rows["for"]

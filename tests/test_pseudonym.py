"""Names of strangers: bounded, harmless on a terminal and in HTML, and no address enters the log."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest
import trio
from coordinator_support import coordinating, make_run, node
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import entries_of
from barnraise.protocol.ledger import LedgerEntry, NodeBanned, NodeJoined, encode_entry
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.pseudonym import MARKS, MOST, pseudonym
from tests.test_ledger import ANN, STORY
from tests.test_ledger_inspect import call, saved

PEER = "12D3KooWNmALBBLao8qSVZaj3apoGkEhV9wUozwNSYgENDhtCAWP"
HOSTILE = [
    "\x1b[2J\x1b[31mred",
    "a\r\nWRONG    ledger: balance",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\u202edesrever",
    "\u2066isolated\u2069",
    "zero\u200bwidth\u200djoiner\ufeff",
    "z" + "\u0301" * 63,
    "\u3164",
    "\u2800\u2800",
    "=cmd|'/c calc'!A1",
    "203.0.113.7",
    "ip-172-31-5-10.ec2.internal",
    "host_203_0_113_7",
    "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW",
    "[2001:db8::7]",
    "fe80::1%eth0",
    "02:42:ac:11:00:02",
    "02-42-ac-11-00-02",
    "1.1.1.1.1.1.1.1",
    "\x85\u2028\u2029next",
    "\U000e0041tag",
    "x" * 64,
    "\ud7ff\ue000",
    " " * 64,
    "\0",
]
PIECES = st.sampled_from([*HOSTILE, ".", ":", "-", "1", "12", "a", "\u0301", "\u1100", "\u1161", " ", "é"])
NAMES = st.one_of(st.text(max_size=80), st.lists(PIECES, max_size=12).map("".join))
V4 = re.compile(r"(?<!\d)\d{1,3}([.\-_])\d{1,3}\1\d{1,3}\1\d{1,3}(?!\d)")
V6 = re.compile(r"(?<![0-9A-Za-z])([0-9a-fA-F]{1,4}:){2,}[0-9a-fA-F]{0,4}(?![0-9A-Za-z])|(?<!\w)::1\b")


def marks_in_a_row(text: str) -> int:
    return max(map(len, re.findall("m+", "".join("m" if is_mark(c) else "." for c in text))), default=0)


def is_mark(char: str) -> bool:
    return unicodedata.category(char).startswith("M")


@given(NAMES)
@example("".join(HOSTILE))
def test_a_name_is_bounded_harmless_and_no_address(text: str) -> None:
    name = pseudonym(text, PEER)
    assert 1 <= len(name) <= MOST
    assert name.isprintable()
    assert name == name.strip()
    assert marks_in_a_row(name) <= MARKS
    assert not V4.search(name)
    assert not V6.search(name)
    assert pseudonym(name, PEER) == name  # or a node would be renamed each time it joins


@pytest.mark.parametrize(
    "name", ["anna", "Zoë B.", "анна", "小红", "R2-D2", "Anna::Node", "v1.2.3", "🐝 hive", "नमस्ते"]
)
def test_ordinary_names_of_every_script_stay(name: str) -> None:
    assert pseudonym(name, PEER) == unicodedata.normalize("NFC", name)


@pytest.mark.parametrize("text", ["", " ", "\n", "\u3164", "203.0.113.7", "::1", "\u202e"])
def test_who_says_nothing_is_called_by_its_key(text: str) -> None:
    assert pseudonym(text, PEER) == "node-htCAWP"


class Texts(HTMLParser):
    """Which elements are opened, and what text is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.shown = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.opened.append(tag)

    def handle_data(self, data: str) -> None:
        self.shown += data


@given(NAMES)
def test_a_name_in_html_is_text_and_nothing_else(text: str) -> None:
    name = pseudonym(text, PEER)
    page = Texts()
    page.feed(f"<td title='{html.escape(name)}'>{html.escape(name)}</td>")
    page.close()
    assert page.opened == ["td"]
    assert page.shown == name


@given(st.text(min_size=1, max_size=64), st.text(max_size=80))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(HOSTILE[0], HOSTILE[1])
@example("a\r\nb\x0b\x0c\x1cc", "\x1b]0;title\x07")
def test_whatever_an_operator_writes_into_its_ledger_a_terminal_is_safe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    """The operator signs what it likes: names that were never made harmless."""
    entries: list[LedgerEntry] = [
        *STORY,
        NodeJoined(at_ms=9, node=ANN, name=name),
        NodeBanned(at_ms=9, node=ANN, reason=reason, until=10),
    ]
    file = saved(tmp_path / "l.bin", entries)
    for command, lines in (
        (("show", file), len(entries)),
        (("top", file), None),
        (("node", file, ann()), None),
        (("unit", file, 1), None),
        (("verify", file), None),
    ):
        assert call("ledger", *command) == 0
        said = capsys.readouterr().out
        assert all(char == "\n" or char.isprintable() for char in said), command
        assert lines is None or said.count("\n") == lines
    assert call("ledger", "show", file, "--csv") == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert not any(cell[:1] in "=+@" and cell for row in rows for cell in row)
    assert call("ledger", "show", file, "--json") == 0
    assert [json.loads(row)["index"] for row in capsys.readouterr().out.splitlines()] == list(
        range(len(entries))
    )


def ann() -> str:
    from barnraise.protocol.identity import peer_id_of

    return peer_id_of(ANN)


async def test_no_address_of_a_node_enters_the_log(tmp_path: Path, autojump_clock: object) -> None:
    folder, swarm = make_run(tmp_path), MemorySwarm()
    names = ["203.0.113.7", "/memory/9/p2p/x", "bob 2001:db8::7", "\x1b[31mred"]
    async with coordinating(swarm, folder) as coordinator:
        for number, name in enumerate(names):
            async with node(swarm, coordinator, bytes([65 + number]), join=False) as scripted:
                await scripted.join(name)  # it announces /memory/9/p2p/x
        lag = coordinator.run.spec.rollout.max_lag
        await trio.sleep(1)
    journal = Journal(folder / "state.sqlite")
    entries = list(entries_of(journal.events(), lag))
    journal.close()
    joined = [entry.name for entry in entries if isinstance(entry, NodeJoined)]
    assert joined[2:] == ["bob *", "\N{REPLACEMENT CHARACTER}[31mred"]
    assert joined[0].startswith("node-")
    log = b"".join(map(encode_entry, entries))
    for address in (b"/ip4/", b"203.0.113", b"2001:db8", b"127.0.0.1"):
        assert address not in log

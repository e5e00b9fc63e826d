"""A download in words: finished bytes, rate, sources, time left; and in the lines that programs read."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.node.fetching import in_words, kind_of
from barnraise.node.main import _Lines
from barnraise.node.state import Transfer


def test_sources_are_told_apart() -> None:
    assert kind_of("boss", "boss") == "origin"
    assert kind_of("https://host/run", "boss") == "mirror"
    assert kind_of("12D3KooW", "boss") == "peer"


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ([], ""),
        (["origin"], " from the coordinator"),
        (["peer"], " from 1 peer"),
        (["peer", "peer", "origin"], " from 2 peers and the coordinator"),
        (["mirror", "mirror", "peer", "origin"], " from 1 peer, 2 mirrors and the coordinator"),
    ],
    ids=["nobody", "origin", "peer", "both", "all"],
)
def test_who_helps_is_named_by_kind(kinds: list[str], words: str) -> None:
    fetch = {"done": 12e6, "total": 48e6, "rate": 2e6, "eta_s": 18, "sources": [{"kind": k} for k in kinds]}
    assert in_words(fetch) == f"12.0 of 48.0 MB (25 %), 2.00 MB/s{words}, 18 s left"


def test_time_left_is_that_of_finished_shards_alone() -> None:
    transfer = Transfer(3, 1000, started=10.0, skipped=200, done=200)
    assert transfer.eta(15.0) is None
    transfer.done = 400
    transfer.sources = {"boss": 200}
    shown = transfer.shown(20.0, "boss")
    assert (shown["rate"], shown["eta_s"]) == (20, 30.0)
    assert shown["sources"] == [{"peer": "boss", "kind": "origin", "bytes": 200}]
    transfer.done = 1000
    assert "left" not in in_words(transfer.shown(30.0, "boss"))


def test_a_line_for_programs_carries_the_download() -> None:
    record = logging.LogRecord("barnraise.node", logging.INFO, "", 0, "fetching", None, None)
    record.data = {"fetch": {"done": 1, "total": 2}}
    assert json.loads(_Lines(True).format(record))["fetch"] == {"done": 1, "total": 2}
    assert _Lines(False).format(record).endswith("fetching")


numbers = st.one_of(st.none(), st.integers(0, 2**60))


@given(numbers, numbers, numbers, numbers)
def test_any_state_has_words(done: int | None, total: int | None, rate: int | None, eta: int | None) -> None:
    assert " of " in in_words({"done": done, "total": total, "rate": rate, "eta_s": eta, "sources": None})

"""Credit with its unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.credit_words import credit_words


@pytest.mark.parametrize(
    ("mflop", "text"),
    [(0, "0 Mflop"), (999, "999 Mflop"), (1000, "1.0 Gflop"), (48_213, "48.2 Gflop"), (999_960, "1.0 Tflop")],
)
def test_credit_is_short_and_has_its_unit(mflop: int, text: str) -> None:
    assert credit_words(mflop) == text


@given(st.integers(-(2**63), 2**63))
def test_no_credit_is_without_a_unit(mflop: int) -> None:
    amount, unit = credit_words(mflop).split(" ")
    assert unit[1:] == "flop"
    assert len(amount) <= 6 or unit == "Eflop"

"""What an operator does to a run is an event like any other: checked, folded, and public where it must be."""

import json
from contextlib import suppress

import pytest
from coordinator_history import MAX_LAG, RUN_ID, published, trained
from hypothesis import given
from hypothesis import strategies as st
from spec_support import run_spec

from barnraise.coordinator.events import RunOpened
from barnraise.coordinator.ledger_log import entry_of
from barnraise.coordinator.operator_events import (
    InviteMade,
    InviteUsed,
    RollbackOrdered,
    SettingsAmended,
)
from barnraise.coordinator.state import EventError, State, apply
from barnraise.protocol import ledger, wire
from barnraise.protocol.amendments import AMENDABLE, AmendmentError, amended, json_value
from barnraise.protocol.ledger_fold import LedgerError, LedgerFold


def amendment(number: int, changes: dict[str, str]) -> SettingsAmended:
    return SettingsAmended(
        number=number, changes=changes, reason="slower", amendment=b"a" * 32, signed=b"", at_ms=9
    )


def opened() -> State:
    state = State(max_lag=MAX_LAG)
    apply(state, RunOpened(run_id=RUN_ID, operator=b"o" * 32, at_ms=1))
    apply(state, published(state, 2))
    return state


def test_an_amendment_changes_one_setting_and_no_other():
    spec = run_spec()
    changed = amended(spec, {"grpo.learning_rate": json_value(1e-6), "rollout.versions": "9"})
    assert (changed.grpo.learning_rate, changed.rollout.versions) == (1e-6, 9)
    assert changed.model == spec.model
    assert changed.sampling == spec.sampling


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("model.name", '"other"', "cannot change"),
        ("sampling.temperature", "0.5", "cannot change"),
        ("grpo.learning_rate", '"fast"', "Expected `float`"),
        ("grpo.learning_rate", "-1.0", "> 0"),
        ("grpo.learning_rate", "0.50", "one JSON spelling"),
        ("rollout.versions", "true", "Expected `int`"),
        ("rollout.versions", "[" * 200, "no JSON value"),
        ("rollout.versions", "9" * 5000, "no JSON value"),
        ("grpo.learning_rate", "NaN", "no JSON value"),
        ("grpo.kl_coefficient", "Infinity", "no JSON value"),
        ("grpo.learning_rate", "1e400", "no JSON value"),
        ("grpo.learning_rate", '{"a":NaN}', "no JSON value"),
        ("admission", '"nobody"', "Invalid enum"),
        ("description", '"\\ud800"', "no JSON value"),
        ("rollout", "{}", "cannot change"),
    ],
)
def test_what_may_not_change_is_refused_by_name(key, value, why):
    with pytest.raises(AmendmentError, match=key.split(".")[0]) as caught:
        amended(run_spec(), {key: value})
    assert why in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(AMENDABLE)), st.text(max_size=40) | JSON.map(json.dumps))
def test_whatever_an_operator_signs_is_an_amendment_or_refused_as_none(key, text):
    """Nodes and auditors read it as well: it may end nobody's process."""
    with suppress(AmendmentError):
        wire.encode(amended(run_spec(), {key: text}))


def test_amendments_are_numbered_without_gaps():
    state = opened()
    apply(state, amendment(1, {"grpo.learning_rate": "0.5"}))
    for number in (1, 3):
        with pytest.raises(EventError):
            apply(state, amendment(number, {"grpo.learning_rate": "0.5"}))


def test_an_auditor_follows_amendments_and_refuses_what_may_not_change():
    spec, fold = run_spec(), LedgerFold(run_spec())
    fold.add(ledger.RunCreated(at_ms=1, run_id=RUN_ID))

    def entry(number, changes):
        return ledger.Amended(at_ms=2, number=number, changes=changes, reason="", amendment=b"a" * 32)

    fold.add(entry(1, {"grpo.learning_rate": "0.5"}))
    assert fold.spec.grpo.learning_rate == 0.5 != spec.grpo.learning_rate
    with pytest.raises(LedgerError, match="amendable"):
        fold.add(entry(2, {"sampling.max_new_tokens": "60000"}))
    with pytest.raises(LedgerError, match="amendments-in-order"):
        fold.add(entry(4, {"grpo.learning_rate": "0.5"}))


def test_an_invite_lets_in_as_many_keys_as_it_says_and_none_after_its_end():
    state = opened()
    invite = bytes(16)
    apply(state, InviteMade(invite=invite, uses=1, expires_at=10, note="lab", at_ms=3))
    with pytest.raises(EventError):
        apply(state, InviteUsed(invite=invite, node=b"n" * 32, at_ms=11))
    apply(state, InviteUsed(invite=invite, node=b"n" * 32, at_ms=10))
    assert state.operations.allowed == {b"n" * 32: "lab"}
    with pytest.raises(EventError):
        apply(state, InviteUsed(invite=invite, node=b"m" * 32, at_ms=10))


def test_a_rollback_is_the_next_version_and_public():
    state = opened()
    with pytest.raises(EventError):
        apply(state, RollbackOrdered(to_version=0, reason="collapse", at_ms=3))  # it is the newest
    state.head = 3
    order = RollbackOrdered(to_version=1, reason="collapse", at_ms=3)
    entry = entry_of(state, order)
    assert isinstance(entry, ledger.RolledBack)
    assert entry.to_version == 1
    apply(state, order)
    with pytest.raises(EventError):
        apply(state, order)
    apply(state, trained(state, 4))
    assert state.operations.rollback is None
    assert state.made == 4
    apply(state, published(state, 5))
    assert state.head == 4

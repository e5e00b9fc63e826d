"""The coordinator's log tells what was done to the run, and strangers' words in it break no line."""

import logging
from types import SimpleNamespace
from typing import get_args

import pytest
from coordinator_history import MAX_LAG

from barnraise.coordinator.act_lines import MOST_LINES, log_acts
from barnraise.coordinator.events import BanLifted, NodeBanned
from barnraise.coordinator.journal import Write
from barnraise.coordinator.operator_events import (
    AlarmCleared,
    AlarmRaised,
    InviteMade,
    InviteRevoked,
    InviteUsed,
    NodeAllowed,
    NodeDisallowed,
    OperatorEvent,
    RollbackOrdered,
    RunPaused,
    RunResumed,
    SettingsAmended,
)
from barnraise.coordinator.state import State
from barnraise.coordinator.state_parts import Node
from barnraise.protocol.identity import peer_id_of

ANN, ID = b"a" * 32, b"\x67\x1b" * 8
ACTS = [
    (
        SettingsAmended(
            number=2, changes={"grpo.kl": "0.1"}, reason="KL", amendment=b"", signed=b"", at_ms=1
        ),
        "amendment 2: grpo.kl = 0.1 (KL)",
    ),
    (RunPaused(by="operator", reason="a\nmove", at_ms=1), "paused by the operator: a\ufffdmove"),
    (RunResumed(at_ms=1), "resumed"),
    (RollbackOrdered(to_version=25, reason="worse", at_ms=1), "rollback to version 25: worse"),
    (AlarmCleared(kind="kl", at_ms=1), "the alarm kl is over"),
    (InviteMade(invite=ID, uses=3, expires_at=0, note="lab", at_ms=1), "for 3, until 1970-01-01 00:00 UTC"),
    (InviteRevoked(invite=ID, at_ms=1), "invite 671b671b671b lets nobody in any more"),
    (InviteUsed(invite=ID, node=ANN, at_ms=1), f"ann ({peer_id_of(ANN)}) came in by invite 671b671b671b"),
    (NodeAllowed(node=ANN, note="", at_ms=1), "was put on the list"),
    (NodeDisallowed(node=b"b" * 32, at_ms=1), f"{peer_id_of(b'b' * 32)} was taken off"),
    (NodeBanned(node=ANN, reason="floods", until=0, by_rule=True, at_ms=1), "UTC: floods"),
    (BanLifted(node=ANN, reason="sorry", at_ms=1), "is over: sorry"),
]


def told(events: list, caplog: pytest.LogCaptureFixture) -> list[str]:
    state = State(max_lag=MAX_LAG)
    state.nodes[ANN] = Node(ANN, "ann", 1)
    caplog.set_level(logging.INFO)
    caplog.clear()
    log_acts(SimpleNamespace(state=state), Write(events=events))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("event", "line"), ACTS, ids=[type(event).__name__ for event, _ in ACTS])
def test_each_act_is_a_line_of_the_log(event, line, caplog):
    (said,) = told([event], caplog)
    assert line in said
    assert said.isprintable()


def test_no_act_is_forgotten_and_a_guards_are_told_by_the_guard(caplog):
    assert {type(event) for event, _ in ACTS} >= set(get_args(OperatorEvent)) - {AlarmRaised}
    assert told([RunPaused(by="guard", reason="kl", at_ms=1)], caplog) == []


def test_a_long_list_is_a_few_lines(caplog):
    said = told([NodeAllowed(node=bytes([i]) * 32, note="", at_ms=1) for i in range(200)], caplog)
    assert len(said) == MOST_LINES + 1
    assert said[-1] == "and 192 more like that"

"""The audit policy: who is spared, what a failed audit costs, and that credit is conserved."""

from __future__ import annotations

import random
from hashlib import sha256

import msgspec
import pytest
from coordinator_history import MAX_LAG, RUN_ID, lease_for, published, verdict
from coordinator_support import ROLLOUT
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from barnraise.coordinator import audit
from barnraise.coordinator.audit import (
    BAN_AFTER,
    FIRST_BAN_MS,
    LONGEST_BAN_MS,
    Pressure,
    ban_ms,
    ban_text,
    epoch_events,
    is_audited,
    offence_events,
    pressed,
    review_events,
    verdict_events,
)
from barnraise.coordinator.events import (
    AppealDecided,
    AppealFiled,
    AuditRevealed,
    BanLifted,
    CreditClawedBack,
    CreditRestored,
    Event,
    EventError,
    LeaseIssued,
    NodeBanned,
    NodeJoined,
    RunOpened,
    SubmissionJudged,
    Submitted,
    decode_event,
    encode_event,
)
from barnraise.coordinator.ledger_log import entries_of
from barnraise.coordinator.scheduler import Wait, decide_lease
from barnraise.coordinator.state import State, apply, fold
from barnraise.coordinator.workers import Judged
from barnraise.protocol.ledger import AuditRevealed as RevealedEntry
from barnraise.protocol.ledger import Judged as JudgedEntry
from barnraise.protocol.ledger import LedgerError, LedgerFold
from barnraise.protocol.ledger import Reviewed as ReviewedEntry
from barnraise.protocol.standing import (
    EVERYTHING_PPM,
    FLOOR_PPM,
    MAX_UNAUDITED,
    PROVEN_AFTER,
    UNAUDITED,
    AuditRecord,
    Unproven,
    commitment_of,
    draw_ppm,
)

ANN, BEN = b"a" * 32, b"b" * 32
PARAMETERS = 500_000  # one credit per token


def seed_of(epoch: int) -> bytes:
    return sha256(b"secret" + bytes([epoch % 256])).digest()


class Story:
    """A run that is told event by event; every event is kept."""

    def __init__(self) -> None:
        self.state = State(max_lag=MAX_LAG)
        self.events: list[Event] = []
        self.rng = random.Random(0)
        self.now = 1_000
        self.tell(RunOpened(run_id=RUN_ID, operator=b"o" * 32, at_ms=self.now))
        self.tell(*epoch_events(self.state, False, seed_of, self.now))
        self.tell(published(self.state, self.now))
        for node in (ANN, BEN):
            self.tell(NodeJoined(node=node, name="n", at_ms=self.now))

    def tell(self, *events: Event) -> None:
        for event in events:
            apply(self.state, event)
            self.events.append(event)

    def submit(self, node: bytes = ANN) -> bytes:
        terms = lease_for(self.state, node, self.rng, self.now)
        submission_id = self.rng.randbytes(32)
        self.tell(LeaseIssued(lease=terms, instance=b"i" * 16))
        self.tell(Submitted(submission_id=submission_id, lease_id=terms.lease_id, size=1, at_ms=self.now))
        return submission_id

    def judge(self, *submission_ids: bytes, good: bool = True, behind: bool = False) -> list[Event]:
        """What the belt does with a batch."""
        results = []
        for submission_id in submission_ids:
            item = self.state.submissions[submission_id]
            audited = is_audited(self.state, item, seed_of, behind)
            results.append(result_of(submission_id, good or not audited, UNAUDITED if not audited else ""))
        events = verdict_events(self.state, results, seed_of, PARAMETERS, self.now)
        self.tell(*events)
        return events

    def prove(self, node: bytes = ANN, times: int = PROVEN_AFTER) -> None:
        for _ in range(times):
            self.judge(self.submit(node))

    def spare(self, node: bytes = ANN, good: bool = True) -> bytes:
        """Submit under a backlog until one is spared."""
        while True:
            submission_id = self.submit(node)
            self.judge(submission_id, behind=True, good=True)
            if submission_id in self.state.nodes[node].audit.unaudited:
                return submission_id

    def ledger(self) -> LedgerFold:
        fold_ = LedgerFold()
        for entry in entries_of(self.events, MAX_LAG):
            fold_.add(entry)
        return fold_


def result_of(submission_id: bytes, good: bool, check: str = "") -> Judged:
    said = verdict(good)
    return Judged(
        submission_id=submission_id,
        verdict=msgspec.structs.replace(said, check=check) if check else said,
        rewards=(0.0, 1.0, 0.0, 1.0) if good else (),
        tokens=7 if good else 0,
    )


def test_newcomers_are_always_audited_and_a_proven_node_never_less_than_the_floor() -> None:
    record = AuditRecord()
    rates = []
    for number in range(40):
        rates.append(record.rate_ppm)
        record.passed(number)
    assert rates[:PROVEN_AFTER] == [EVERYTHING_PPM] * PROVEN_AFTER
    assert set(rates[PROVEN_AFTER:]) == {FLOOR_PPM}  # BOINC's one in the streak is below the floor from here


def test_each_failure_doubles_what_it_takes_to_be_trusted_again() -> None:
    record = AuditRecord()
    needed = []
    for _ in range(9):
        needed.append(record.needed)
        record.failed(b"x")
        record.owed.clear()
    assert needed == [10, 20, 40, 80, 160, 320, 640, 1280, 1280]


def test_too_much_unaudited_credit_makes_the_next_audit_certain() -> None:
    record = AuditRecord(streak=50)
    for number in range(MAX_UNAUDITED):
        assert record.rate_ppm < EVERYTHING_PPM
        record.spared(bytes([number]) * 32, Unproven(b"l" * 16, number, 1))
    assert record.rate_ppm == EVERYTHING_PPM


def test_an_audit_proves_what_was_submitted_before_it_and_nothing_after() -> None:
    record = AuditRecord(streak=50)
    for number in (1, 3):
        record.spared(bytes([number]) * 32, Unproven(b"l" * 16, number, 1))
    record.passed(2)
    assert [item.number for item in record.unaudited.values()] == [3]


def test_draws_are_uniform_and_need_the_seed() -> None:
    ids = [sha256(bytes([a, b])).digest() for a in range(64) for b in range(64)]
    draws = [draw_ppm(seed_of(0), item) for item in ids]
    below = sum(draw < FLOOR_PPM for draw in draws)
    assert 0.08 < below / len(ids) < 0.12
    others = [draw_ppm(seed_of(1), item) for item in ids]
    both = sum(a < FLOOR_PPM and b < FLOOR_PPM for a, b in zip(draws, others, strict=True))
    assert both < 0.03 * len(ids)


def test_only_a_backlog_that_lasts_is_pressure() -> None:
    story = Story()
    pressure = Pressure(submissions=3, age_ms=1_000)
    for _ in range(3):
        assert not pressed(story.state, pressure, story.now + 10_000)
        story.submit()
    assert not pressed(story.state, pressure, story.now + 1_000)
    assert pressed(story.state, pressure, story.now + 1_001)


def test_without_pressure_everything_is_audited() -> None:
    story = Story()
    story.prove(times=30)
    for _ in range(50):
        item = story.state.submissions[story.submit()]
        assert is_audited(story.state, item, seed_of, False)


def test_under_pressure_a_proven_node_is_audited_about_once_in_ten_and_a_newcomer_always() -> None:
    story = Story()
    story.prove(ANN)
    story.now += 1

    def audited(node: bytes) -> int:
        items = [story.state.submissions[story.submit(node)] for _ in range(400)]
        return sum(is_audited(story.state, item, seed_of, True) for item in items)

    assert 20 < audited(ANN) < 65
    assert audited(BEN) == 400


def test_work_submitted_while_no_seed_is_secret_is_always_audited() -> None:
    story = Story()
    story.prove()
    story.tell(AuditRevealed(epoch=0, seed=seed_of(0), at_ms=story.now))
    items = [story.state.submissions[story.submit()] for _ in range(50)]
    assert all(is_audited(story.state, item, seed_of, True) for item in items)


def test_a_failed_audit_takes_back_everything_since_the_last_passed_one_and_nothing_before() -> None:
    story = Story()
    story.prove()
    earned = story.state.nodes[ANN].credit
    assert earned == 7 * PROVEN_AFTER
    first, second = story.spare(), story.spare()
    voided = set(story.state.nodes[ANN].audit.unaudited)
    assert {first, second} <= voided or second in voided
    before = story.state.nodes[ANN].credit - 7 * len(voided)
    events = story.judge(story.submit(), good=False)
    assert {e.submission_id for e in events if isinstance(e, CreditClawedBack)} == voided
    assert story.state.nodes[ANN].credit == before
    assert story.state.clawed_back == 7 * len(voided)
    assert not voided & set(story.state.pool)
    assert all(story.state.submissions[key].status == "void" for key in voided)
    assert not story.state.nodes[ANN].audit.proven
    assert story.state.nodes[BEN].strikes == 0
    assert story.ledger().balances == {ANN: before, BEN: 0}
    assert story.ledger().clawed_back == 7 * len(voided)


def test_a_result_that_a_failure_has_overtaken_is_not_spared_after_all() -> None:
    story = Story()
    story.prove()
    while True:
        late = story.submit()
        if not is_audited(story.state, story.state.submissions[late], seed_of, True):
            break
    bad = story.submit()
    results = [result_of(bad, False), result_of(late, True, UNAUDITED)]
    story.tell(*verdict_events(story.state, results, seed_of, PARAMETERS, story.now))
    assert story.state.submissions[late].status == "waiting"
    assert is_audited(story.state, story.state.submissions[late], seed_of, True)


def test_the_state_refuses_what_the_policy_would_not_do() -> None:
    story = Story()
    early = story.submit()
    said = msgspec.structs.replace(verdict(True), check=UNAUDITED)
    spared = SubmissionJudged(
        submission_id=early,
        verdict=said,
        rewards=(0.0,) * 4,
        tokens=1,
        credit=1,
        blameless=False,
        at_ms=1,
    )
    with pytest.raises(EventError, match="had to be audited"):
        apply(story.state, spared)
    story.judge(early)
    with pytest.raises(EventError, match="not waiting"):
        apply(story.state, spared)
    with pytest.raises(EventError, match="owed"):
        apply(story.state, CreditClawedBack(submission_id=early, cause=early, at_ms=1))
    story.submit()
    with pytest.raises(EventError, match="nothing waits"):
        apply(story.state, AuditRevealed(epoch=0, seed=seed_of(0), at_ms=1))


def test_seeds_change_with_the_version_and_are_published_when_nothing_waits_under_them() -> None:
    story = Story()
    assert story.state.epoch == 0
    waiting = story.submit()
    story.tell(*epoch_events(story.state, False, seed_of, story.now))
    story.tell(*epoch_events(story.state, False, seed_of, story.now))
    assert story.state.epochs == {0: 1, 1: 0}  # the old one is still needed
    story.judge(waiting)
    story.tell(*epoch_events(story.state, False, seed_of, story.now))
    assert story.state.epochs == {1: 0}
    story.tell(*epoch_events(story.state, True, seed_of, story.now))  # the run is complete
    assert story.state.epochs == {}
    assert epoch_events(story.state, True, seed_of, story.now) == []
    story.ledger()


def test_an_auditor_finds_a_friend_that_was_spared_against_the_draw() -> None:
    story = Story()
    story.prove()
    while True:
        friend = story.submit()
        if is_audited(story.state, story.state.submissions[friend], seed_of, True):
            break
    said = msgspec.structs.replace(verdict(True), check=UNAUDITED)
    spared = SubmissionJudged(
        submission_id=friend,
        verdict=said,
        rewards=(0.0,) * 4,
        tokens=1,
        credit=1,
        blameless=False,
        at_ms=1,
    )
    story.tell(spared)  # the state cannot know; whoever reads the ledger can
    story.judge(*story.state.waiting)
    story.tell(*epoch_events(story.state, True, seed_of, story.now))
    with pytest.raises(LedgerError, match="spared-by-draw"):
        story.ledger()


def test_an_auditor_finds_another_seed_than_the_one_committed_to() -> None:
    story = Story()
    story.tell(AuditRevealed(epoch=0, seed=seed_of(1), at_ms=1))
    with pytest.raises(LedgerError, match="seed-committed"):
        story.ledger()


def test_an_auditor_finds_a_claw_back_that_never_came() -> None:
    story = Story()
    story.prove()
    story.spare()
    bad, entries = story.submit(), []
    story.judge(bad, good=False)
    for entry in entries_of(story.events, MAX_LAG):
        if type(entry).__name__ != "ClawedBack":
            entries.append(entry)
    fold_ = LedgerFold()
    for entry in entries:
        fold_.add(entry)
    assert fold_.owing() == [ANN]


def test_an_overturned_verdict_restores_credit_strikes_and_what_was_clawed_back() -> None:
    story = Story()
    story.prove()
    story.spare()
    honest = story.state.nodes[ANN].credit
    bad = story.submit()
    story.judge(bad, good=False)
    node = story.state.nodes[ANN]
    assert (node.credit < honest, node.strikes, node.rejected) == (True, 1, 1)
    story.tell(AppealFiled(submission_id=bad, at_ms=story.now))
    events = review_events(story.state, bad, result_of(bad, True), PARAMETERS, story.now)
    story.tell(*events)
    assert isinstance(events[0], AppealDecided)
    assert any(isinstance(event, CreditRestored) for event in events)
    assert (node.credit, node.strikes, node.rejected, node.offences) == (honest + 7, 0, 0, 0)
    assert node.audit.proven
    assert node.audit.failures == 0
    assert bad in story.state.pool
    assert story.ledger().balances[ANN] == node.credit
    assert story.ledger().clawed_back == 0
    with pytest.raises(EventError, match="once"):
        apply(story.state, AppealFiled(submission_id=bad, at_ms=story.now))
    with pytest.raises(EventError):
        apply(story.state, events[1])


def test_an_upheld_verdict_changes_nothing_but_the_record() -> None:
    story = Story()
    story.prove()
    story.spare()
    bad = story.submit()
    story.judge(bad, good=False)
    credit = story.state.nodes[ANN].credit
    story.tell(AppealFiled(submission_id=bad, at_ms=story.now))
    story.tell(*review_events(story.state, bad, result_of(bad, False), PARAMETERS, story.now))
    assert story.state.nodes[ANN].credit == credit
    assert story.state.nodes[ANN].strikes == 1
    assert story.state.appeals == {}
    assert story.ledger().balances[ANN] == credit


def test_an_appeal_that_cannot_be_verified_takes_the_blame_away_and_gives_no_credit() -> None:
    story = Story()
    bad = story.submit()
    story.judge(bad, good=False)
    story.tell(AppealFiled(submission_id=bad, at_ms=story.now))
    story.tell(*review_events(story.state, bad, result_of(bad, False, "unverifiable"), PARAMETERS, 9))
    node = story.state.nodes[ANN]
    assert (node.strikes, node.offences, node.credit, node.rejected) == (0, 0, 0, 1)


def ban_ann(story: Story) -> NodeBanned:
    for _ in range(BAN_AFTER):
        events = story.judge(story.submit(), good=False)
    return next(event for event in events if isinstance(event, NodeBanned))


def test_a_ban_has_a_reason_and_an_end_and_ends_by_itself() -> None:
    story = Story()
    ban = ban_ann(story)
    node = story.state.nodes[ANN]
    assert ban.until == story.now + FIRST_BAN_MS
    assert ban.reason == "5 submissions failed, the last by check toploc"

    def decide(now: int) -> object:
        return decide_lease(story.state, ROLLOUT, node, b"i" * 16, 0, now)

    refused = decide(story.now)
    assert isinstance(refused, Wait)
    assert ban.reason in refused.reason
    assert "appeal" in refused.reason
    assert "UTC" in refused.reason
    assert len(ban_text(node)) <= 500
    assert not isinstance(decide(ban.until), Wait) or "no work until" not in decide(ban.until).reason  # type: ignore[attr-defined]
    replayed = fold([decode_event(encode_event(event)) for event in story.events], MAX_LAG)
    assert replayed == story.state


def test_bans_grow_geometrically_up_to_a_month() -> None:
    hours = [ban_ms(bans) / 3_600_000 for bans in range(8)]
    assert hours == [1, 4, 16, 64, 256, 720, 720, 720]
    assert ban_ms(1_000_000) == LONGEST_BAN_MS


def test_a_ban_frees_the_units_of_its_node() -> None:
    story = Story()
    for _ in range(BAN_AFTER - 1):
        story.judge(story.submit(), good=False)
    held = lease_for(story.state, ANN, story.rng, story.now)
    story.tell(LeaseIssued(lease=held, instance=b"i" * 16))
    story.judge(story.submit(), good=False)
    assert story.state.leases[held.lease_id].timed_out
    assert held.unit_id in story.state.free_units


def test_overturning_one_of_the_verdicts_behind_a_ban_lifts_it() -> None:
    story = Story()
    ban_ann(story)
    rejected = [key for key, item in story.state.submissions.items() if item.status == "rejected"]
    story.tell(AppealFiled(submission_id=rejected[0], at_ms=story.now))
    events = review_events(story.state, rejected[0], result_of(rejected[0], True), PARAMETERS, story.now)
    assert isinstance(events[-1], BanLifted)
    story.tell(*events)
    assert story.state.nodes[ANN].banned_until == 0
    assert not any(isinstance(event, NodeBanned) for event in story.judge(story.submit(), good=True))


def test_forged_submissions_lead_to_a_ban() -> None:
    story = Story()
    for number in range(BAN_AFTER):
        events = offence_events(story.state.nodes[ANN], "bad-signature", story.now)
        assert (len(events) == 2) == (number == BAN_AFTER - 1)
        story.tell(*events)
    assert story.state.nodes[ANN].banned_until == story.now + FIRST_BAN_MS


def test_a_hundred_verified_in_a_row_make_old_offences_good() -> None:
    story = Story()
    story.judge(story.submit(), good=False)
    assert story.state.nodes[ANN].offences == 1
    story.prove(times=100)
    assert story.state.nodes[ANN].offences == 0


steps = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 1), st.integers(0, 5)), max_size=160)


@given(steps, st.integers(0, 2**16))
@hypothesis_settings(max_examples=60, deadline=None)
def test_credit_is_conserved_whatever_happens(script: list[tuple[int, int, int]], seed: int) -> None:
    """Balances are accepted credit, less what was clawed back, plus what was overturned; nothing twice."""
    story = Story()
    story.rng = random.Random(seed)
    if seed % 2:
        story.prove()
    for what, who, which in script:
        story.now += 500
        act(story, what, (ANN, BEN)[who], which)
    balances = {key: node.credit for key, node in story.state.nodes.items()}
    accepted = sum(e.credit for e in story.events if isinstance(e, SubmissionJudged | AppealDecided))
    assert sum(balances.values()) == accepted - story.state.clawed_back
    assert all(credit >= 0 for credit in balances.values())
    ledger = story.ledger()
    assert ledger.balances == balances
    assert (ledger.accepted, ledger.rejected) == (story.state.accepted, story.state.rejected)
    assert (ledger.spared, ledger.clawed_back) == (story.state.spared, story.state.clawed_back)
    assert ledger.owing() == []
    credited = [
        entry.submission_id
        for entry in entries_of(story.events, MAX_LAG)
        if isinstance(entry, JudgedEntry | ReviewedEntry) and entry.credit
    ]
    assert len(credited) == len(set(credited))
    replayed = fold([decode_event(encode_event(event)) for event in story.events], MAX_LAG)
    assert replayed == story.state


def act(story: Story, what: int, node: bytes, which: int) -> None:
    """One step of a random story; what cannot be done is left out."""
    state = story.state
    waiting = list(state.waiting)
    rejected = [k for k, item in state.submissions.items() if item.status == "rejected" and not item.appealed]
    if what < 4 or (what < 9 and not waiting):
        story.submit(node)
    elif what < 9:
        chosen = waiting[which % len(waiting) :][: 1 + which % 3]
        story.judge(*chosen, good=what != 8, behind=what > 5)
    elif what == 9 and rejected:
        story.tell(AppealFiled(submission_id=rejected[which % len(rejected)], at_ms=story.now))
    elif what == 10 and state.appeals:
        submission_id = next(iter(state.appeals))
        checks = ("", "toploc", "unverifiable")
        result = result_of(submission_id, which % 3 == 0, checks[which % 3])
        story.tell(*review_events(state, submission_id, result, PARAMETERS, story.now))
    elif what == 11:
        story.tell(*epoch_events(state, which == 5, seed_of, story.now))


def test_the_commitment_hides_the_seed_and_binds_it() -> None:
    entry = RevealedEntry(at_ms=1, epoch=0, seed=seed_of(0))
    assert commitment_of(entry.seed) != entry.seed
    assert commitment_of(seed_of(0)) != commitment_of(seed_of(1))
    assert audit.ban_ms(0) == FIRST_BAN_MS

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_support import run_spec

from barnraise.protocol import wire
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import MalformedError, SignatureError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import (
    Judged,
    LeaseClosed,
    LeaseIssued,
    LedgerEntry,
    LedgerError,
    NodeJoined,
    RunCreated,
    Submitted,
    VersionPublished,
    balances,
    credit_for,
    decode_entry,
    encode_entry,
    evidence_of,
    verify_ledger,
)
from barnraise.protocol.ledger_file import MAGIC, open_ledger, verify_ledger_file, write_ledger
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Receipt, Signed, TreeHead, Verdict
from barnraise.protocol.runid import open_run_spec, run_id

OPERATOR, STRANGER = Identity.from_private_bytes(b"o" * 32), Identity.from_private_bytes(b"s" * 32)
ANN, BEN = b"a" * 32, b"b" * 32
PARAMETERS, NEW_TOKENS = 1_000_000, 10

SPEC = run_spec(
    name="reverse",
    operator=OPERATOR.public_key,
    created_at=1,
    seed=7,
    model__name="demo",
    model__parameters=PARAMETERS,
    model__vocabulary=40,
    model__weights_dtype="bfloat16",
    model__eos_token=1,
    model__assets={"config.json": bytes(32)},
    sampling__max_new_tokens=NEW_TOKENS,
    rollout__groups_per_version=8,
    rollout__max_groups_per_version=16,
    rollout__versions=12,
    evaluation__tasks=64,
)
SIGNED_SPEC = sign(SPEC, OPERATOR)
RUN = run_id(SIGNED_SPEC)
GOOD = Verdict(accepted=True, check="all", threshold=0.0, value=0.0, position="", message="")
BAD = Verdict(
    accepted=False, check="toploc", threshold=38.0, value=90.0, position="rollout 3 chunk 0", message="no"
)


def lease(n: int, node: bytes, version: int = 0) -> LeaseIssued:
    return LeaseIssued(
        at_ms=n,
        lease_id=bytes([n]) * 16,
        unit_id=n,
        node=node,
        policy_version=version,
        prompts=2,
        group_size=4,
    )


def submitted(n: int, node: bytes, content: int | None = None) -> Submitted:
    submission = hashlib.sha256(bytes([n if content is None else content])).digest()
    return Submitted(at_ms=n, lease_id=bytes([n]) * 16, submission_id=submission, node=node)


def judged(n: int, node: bytes, verdict: Verdict, credit: int) -> Judged:
    return Judged(
        at_ms=n,
        lease_id=bytes([n]) * 16,
        submission_id=hashlib.sha256(bytes([n])).digest(),
        node=node,
        accepted=verdict.accepted,
        check=verdict.check,
        credit=credit,
        evidence=evidence_of(verdict),
    )


def published(version: int) -> VersionPublished:
    return VersionPublished(at_ms=0, version=version, manifest=bytes(32))


START: list[LedgerEntry] = [
    RunCreated(at_ms=1, run_id=RUN),
    published(0),
    NodeJoined(at_ms=2, node=ANN, name="ann"),
    NodeJoined(at_ms=2, node=BEN, name="ben"),
]
STORY: list[LedgerEntry] = [
    *START,
    lease(1, ANN),
    lease(2, BEN),
    submitted(1, ANN),
    lease(3, ANN),
    judged(1, ANN, GOOD, 120),  # 8
    submitted(2, BEN),
    judged(2, BEN, BAD, 0),  # 10
    LeaseClosed(at_ms=5, lease_id=bytes([3]) * 16, reason="expired"),
    published(1),
    lease(4, BEN, 1),
    submitted(4, BEN),
    judged(4, BEN, GOOD, 160),  # 15
]


def head_of(entries: list[LedgerEntry], identity: Identity = OPERATOR, run: bytes = RUN) -> Signed:
    log = MerkleLog()
    for entry in entries:
        log.append(encode_entry(entry))
    return sign(TreeHead(run_id=run, size=len(log), root=log.root(), issued_at=9), identity)


def receipt_of(index: int, entries: list[LedgerEntry] = STORY, verdict: Verdict = GOOD) -> Receipt:
    entry = entries[index]
    assert isinstance(entry, Judged)
    return Receipt(
        run_id=RUN,
        node=entry.node,
        lease_id=entry.lease_id,
        submission_id=entry.submission_id,
        verdict=verdict,
        credit=entry.credit,
        ledger_index=index,
        issued_at=9,
    )


def test_an_honest_ledger_has_no_problem_and_gives_the_balances() -> None:
    receipts = [sign(receipt_of(8), OPERATOR), sign(receipt_of(10, verdict=BAD), OPERATOR)]
    report = verify_ledger(STORY, [head_of(STORY[:6]), head_of(STORY)], SIGNED_SPEC, receipts)
    assert report.ok, report.problems
    assert report.balances == {ANN: 120, BEN: 160}
    assert (report.size, report.accepted, report.rejected, report.receipts) == (16, 2, 1, 2)
    assert (report.run_id, report.operator) == (RUN, OPERATOR.public_key)
    assert balances(STORY) == report.balances
    assert balances(STORY[:6]) == {ANN: 0, BEN: 0}


RULES: list[tuple[str, list[LedgerEntry], LedgerEntry]] = [
    ("starts-with-run", [], published(0)),
    ("one-run", START, RunCreated(at_ms=1, run_id=RUN)),
    ("versions-increase", START, published(0)),
    ("joined-first", START, lease(1, b"c" * 32)),
    ("version-published", START, lease(1, ANN, 1)),
    ("lease-once", [*START, lease(1, ANN)], lease(1, ANN)),
    ("lease-first", START, submitted(1, ANN)),
    ("lease-first", START, judged(1, ANN, GOOD, 1)),
    ("lease-first", START, LeaseClosed(at_ms=1, lease_id=bytes(16), reason="returned")),
    ("own-lease", [*START, lease(1, ANN)], submitted(1, BEN)),
    ("lease-over", [*START, lease(1, ANN), submitted(1, ANN)], submitted(1, ANN)),
    (
        "lease-over",
        [*START, lease(1, ANN), LeaseClosed(at_ms=1, lease_id=b"\1" * 16, reason="expired")],
        submitted(1, ANN),
    ),
    (
        "lease-over",
        [*START, lease(1, ANN), submitted(1, ANN)],
        LeaseClosed(at_ms=1, lease_id=b"\1" * 16, reason="returned"),
    ),
    ("submission-once", [*START, lease(1, ANN), submitted(1, ANN), lease(2, BEN)], submitted(2, BEN, 1)),
    ("submission-first", [*START, lease(1, ANN)], judged(1, ANN, GOOD, 1)),
    ("submission-first", [*START, lease(1, ANN), submitted(1, ANN, 9)], judged(1, ANN, GOOD, 1)),
    ("own-lease", [*START, lease(1, ANN), submitted(1, ANN)], judged(1, BEN, GOOD, 1)),
    ("judged-twice", STORY[:9], judged(1, ANN, GOOD, 120)),
    ("credit-on-accepted", STORY[:10], judged(2, BEN, BAD, 1)),
    ("credit-bounded", STORY[:10], judged(2, BEN, GOOD, 161)),
    ("check-named", STORY[:10], msgspec.structs.replace(judged(2, BEN, GOOD, 1), check="toploc")),
    ("check-named", STORY[:10], msgspec.structs.replace(judged(2, BEN, BAD, 0), check="all")),
]


@pytest.mark.parametrize(
    ("rule", "before", "entry"), RULES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_entry_that_breaks_a_rule_is_named_and_earns_nothing(
    rule: str, before: list[LedgerEntry], entry: LedgerEntry
) -> None:
    honest = balances(before, SPEC)
    with pytest.raises(LedgerError, match=f"entry {len(before)} breaks the rule {rule}") as caught:
        balances([*before, entry], SPEC)
    assert (caught.value.index, caught.value.rule) == (len(before), rule)
    entries = [*before, entry]
    report = verify_ledger(entries, [head_of(entries)], SIGNED_SPEC)
    assert [(problem.index, problem.rule) for problem in report.problems] == [(len(before), rule)]
    assert report.balances == honest


def test_the_most_that_a_lease_can_earn_is_allowed() -> None:
    assert credit_for(PARAMETERS, 2 * 4 * NEW_TOKENS) == 160
    assert balances([*STORY[:10], judged(2, BEN, GOOD, 160)], SPEC)[BEN] == 160


def test_the_audit_goes_on_after_a_broken_rule() -> None:
    entries = [*STORY[:9], judged(1, ANN, GOOD, 120), *STORY[9:]]
    report = verify_ledger(entries, [head_of(entries)], SIGNED_SPEC)
    assert [problem.rule for problem in report.problems] == ["judged-twice"]
    assert report.balances == {ANN: 120, BEN: 160}


@given(st.lists(st.sampled_from([*STORY, *(entry for _, _, entry in RULES)]), max_size=25))
@settings(suppress_health_check=list(HealthCheck), deadline=None)
def test_no_order_of_entries_credits_work_twice(entries: list[LedgerEntry]) -> None:
    entries = [*START, *entries]
    report = verify_ledger(entries, [head_of(entries)], SIGNED_SPEC)
    best: dict[bytes, int] = {}
    for entry in entries:
        if isinstance(entry, Judged) and entry.accepted:
            best[entry.lease_id] = max(best.get(entry.lease_id, 0), entry.credit)
    assert sum(report.balances.values()) <= sum(best.values())
    assert all(credit >= 0 for credit in report.balances.values())
    assert report.ok == (not raises(lambda: balances(entries, SPEC)))


def raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except LedgerError:
        return True
    return False


@pytest.mark.parametrize("at", range(len(STORY)))
def test_an_entry_changed_removed_or_moved_after_signing_is_noticed(at: int) -> None:
    heads = [head_of(STORY)]
    changed = [*STORY[:at], msgspec.structs.replace(STORY[at], at_ms=77), *STORY[at + 1 :]]
    assert "head-root" in rules_of(changed, heads)
    assert "entries-missing" in rules_of([*STORY[:at], *STORY[at + 1 :]], heads)
    swapped = [*STORY[at + 1 :], *STORY[: at + 1]]
    if swapped != STORY:
        assert "head-root" in rules_of(swapped, heads)


def rules_of(
    entries: list[LedgerEntry], heads: list[Signed], receipts: list[Signed] | None = None
) -> list[str]:
    return [problem.rule for problem in verify_ledger(entries, heads, SIGNED_SPEC, receipts or []).problems]


def test_entries_beyond_the_last_signed_head_are_noticed() -> None:
    assert rules_of(STORY, [head_of(STORY[:10])]) == ["head-covers"]
    assert rules_of(STORY, []) == ["head-covers"]


def test_heads_of_strangers_and_of_other_runs_do_not_count() -> None:
    good = head_of(STORY)
    assert rules_of(STORY, [good, head_of(STORY, STRANGER)]) == ["head-signed"]
    assert rules_of(STORY, [good, head_of(STORY, run=bytes(32))]) == ["head-of-run"]
    assert rules_of(STORY, [good, sign(receipt_of(8), OPERATOR)]) == ["head-signed"]
    assert rules_of(STORY, [head_of(STORY, STRANGER)]) == ["head-signed", "head-covers"]


def test_a_ledger_of_another_run_is_noticed() -> None:
    entries: list[LedgerEntry] = [RunCreated(at_ms=1, run_id=bytes(32)), *STORY[1:]]
    assert rules_of(entries, [head_of(entries)]) == ["own-run"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"credit": 121}, "receipt-matches"),
        ({"node": BEN}, "receipt-matches"),
        ({"submission_id": bytes(32)}, "receipt-matches"),
        ({"lease_id": bytes(16)}, "receipt-matches"),
        ({"verdict": BAD}, "receipt-matches"),
        ({"verdict": msgspec.structs.replace(GOOD, value=1.0)}, "receipt-matches"),
        ({"ledger_index": 15}, "receipt-matches"),
        ({"ledger_index": 7}, "receipt-entry"),
        ({"ledger_index": 16}, "receipt-entry"),
        ({"run_id": bytes(32)}, "receipt-of-run"),
    ],
)
def test_a_receipt_that_the_ledger_contradicts_convicts_its_signer(
    change: dict[str, object], rule: str
) -> None:
    receipt = sign(msgspec.structs.replace(receipt_of(8), **change), OPERATOR)
    assert rules_of(STORY, [head_of(STORY)], [receipt]) == [rule]


def test_a_forged_receipt_proves_nothing() -> None:
    assert rules_of(STORY, [head_of(STORY)], [sign(receipt_of(8), STRANGER)]) == ["receipt-signed"]


def test_a_run_spec_signed_by_another_than_its_operator_is_refused() -> None:
    assert open_run_spec(SIGNED_SPEC) == SPEC
    with pytest.raises(SignatureError, match="names one operator"):
        open_run_spec(sign(SPEC, STRANGER))
    with pytest.raises(SignatureError):
        verify_ledger(STORY, [head_of(STORY)], sign(SPEC, STRANGER))
    assert run_id(SIGNED_SPEC) == hashlib.sha256(wire.encode(SPEC)).digest()


def test_an_entry_is_one_canonical_tagged_map() -> None:
    assert encode_entry(published(3)) == (
        b"\x84\xa5entry\xb0VersionPublished\xa5at_ms\x00\xa7version\x03\xa8manifest\xc4\x20" + bytes(32)
    )
    for entry in STORY:
        assert decode_entry(encode_entry(entry)) == entry
    for data in (b"", encode_entry(published(3)).replace(b"Version", b"version", 1), wire.encode(GOOD)):
        with pytest.raises(MalformedError):
            decode_entry(data)


def test_a_ledger_file_is_all_that_an_auditor_needs(tmp_path: Path) -> None:
    path = tmp_path / "ledger.bin"
    write_ledger(path, SIGNED_SPEC, [head_of(STORY[:3]), head_of(STORY)], iter(STORY))
    report = verify_ledger_file(path, [sign(receipt_of(15), OPERATOR)])
    assert report.ok
    assert report.balances == {ANN: 120, BEN: 160}
    with open_ledger(path) as ledger:
        assert list(ledger.entries) == STORY
        assert ledger.run_spec == SIGNED_SPEC
        assert len(ledger.heads) == 2
    assert [item.name for item in tmp_path.iterdir()] == ["ledger.bin"]


def test_an_empty_ledger_is_written_and_read(tmp_path: Path) -> None:
    write_ledger(tmp_path / "l", SIGNED_SPEC, [head_of([])], [])
    assert verify_ledger_file(tmp_path / "l").ok


def positions(size: int) -> Iterator[int]:
    yield from range(0, size, 7)


def test_every_cut_and_every_flipped_byte_of_a_ledger_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.bin"
    write_ledger(path, SIGNED_SPEC, [head_of(STORY)], STORY)
    data = path.read_bytes()
    for at in positions(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]):
            path.write_bytes(damaged)
            try:
                report = verify_ledger_file(path)
            except (MalformedError, SignatureError):
                continue
            assert not report.ok


def test_a_damaged_entry_is_named_by_its_index(tmp_path: Path) -> None:
    path = tmp_path / "ledger.bin"
    write_ledger(path, SIGNED_SPEC, [head_of(STORY)], STORY)
    path.write_bytes(path.read_bytes()[:-3])
    problems = verify_ledger_file(path).problems
    assert (problems[0].index, problems[0].rule) == (15, "readable")
    assert "cut short" in problems[0].text


def test_a_claimed_record_length_is_judged_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.bin"
    path.write_bytes(MAGIC + b"S\xff\xff\xff\xff")
    with pytest.raises(MalformedError, match="claims 4294967295 bytes"):
        verify_ledger_file(path)


def test_what_is_no_ledger_file_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "ledger.bin"
    for data in (b"", b"hello", MAGIC.replace(b"1", b"2"), MAGIC, MAGIC + b"E\0\0\0\0"):
        path.write_bytes(data)
        with pytest.raises(MalformedError):
            verify_ledger_file(path)
    with pytest.raises(StorageError, match="cannot read the ledger"):
        verify_ledger_file(tmp_path / "missing")
    with pytest.raises(StorageError, match="cannot write the ledger"):
        write_ledger(tmp_path / "missing" / "ledger.bin", SIGNED_SPEC, [], [])

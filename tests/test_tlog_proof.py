"""Proofs under a checkpoint, evidence, and checkpoints held against a ledger, as an auditor does it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.coordinator.log_folder import LogFolder
from barnraise.protocol.cosignature import COSIGNATURE, WitnessKey, cosign, witness_name
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError
from barnraise.protocol.evidence import encode_evidence
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import LedgerEntry, encode_entry
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import TreeHead
from barnraise.protocol.notes import Note, format_vkey
from barnraise.protocol.tlog_checkpoint import Checkpoint, Head, log_key, sign_checkpoint
from barnraise.protocol.tlog_proof import TlogProof, check_tlog_proof, parse_tlog_proof, tlog_proof_of
from barnraise.protocol.witness import Conflict, Unproven, judge
from barnraise.protocol.witness_store import WitnessStore
from tests.test_ledger import BEN, GOOD, OPERATOR, RUN, SIGNED_SPEC, STORY, judged
from tests.test_ledger_inspect import call, saved

KEY = log_key(RUN, OPERATOR.public_key)
NODE, OTHER = (Identity.from_private_bytes(bytes([number]) * 32) for number in (9, 8))
FORK = [*STORY[:10], judged(2, BEN, GOOD, 7), *STORY[11:]]


def log_of(entries: list[LedgerEntry]) -> MerkleLog:
    log = MerkleLog()
    for entry in entries:
        log.append(encode_entry(entry))
    return log


def checkpoint_of(entries: list[LedgerEntry], at_s: int | None = 5) -> Head:
    """Signed by the operator; cosigned by a node, and by a witness that is none, at ``at_s``."""
    log = log_of(entries)
    checkpoint = Checkpoint(KEY.name, len(log), log.root())
    note = sign_checkpoint(checkpoint, OPERATOR)
    lines = note.signatures
    if at_s is not None:
        lines += (cosign(note.text, witness_name(NODE.peer_id), NODE, at_s),)
        lines += (cosign(note.text, "w.example", OTHER, at_s),)
    return Head(checkpoint, Note(note.text, lines).encode())


def proof_of(index: int) -> TlogProof:
    log = log_of(STORY)
    path = log.inclusion_proof(index)
    return tlog_proof_of(index, encode_entry(STORY[index]), path, checkpoint_of(STORY).note, SIGNED_SPEC)


def test_every_entry_is_proven_and_who_saw_the_checkpoint_is_said() -> None:
    for index, entry in enumerate(STORY):
        file = proof_of(index).encode()
        assert parse_tlog_proof(file).encode() == file
        proven = check_tlog_proof(parse_tlog_proof(file))
        assert (proven.index, proven.entry, proven.run_id) == (index, entry, RUN)
        assert dict(proven.cosigned) == {witness_name(NODE.peer_id): 5}
        assert proven.unknown == 1
    known = check_tlog_proof(proof_of(3), [WitnessKey("w.example", OTHER.public_key)])
    assert known.cosigned["w.example"] == 5
    assert known.unknown == 0


@given(st.integers(0, len(STORY) - 1), st.data())
def test_no_changed_proof_proves_anything_else(index: int, data: st.DataObject) -> None:
    good = proof_of(index)
    file = bytearray(good.encode())
    place = data.draw(st.integers(0, len(file) - 1))
    file[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        proven = check_tlog_proof(parse_tlog_proof(bytes(file)))
    except BarnraiseError:
        return
    assert (proven.index, proven.entry, proven.head.root) == (index, STORY[index], checkpoint_of(STORY).root)


@given(st.binary(max_size=300))
def test_hostile_bytes_are_no_proof(data: bytes) -> None:
    for file in (data, b"c2sp.org/tlog-proof@v1\n" + data, b"c2sp.org/tlog-proof@v1\nindex 0\n" + data):
        with pytest.raises(BarnraiseError):
            check_tlog_proof(parse_tlog_proof(file))


def test_what_proves_nothing_is_refused_by_name() -> None:
    good = proof_of(4)
    with pytest.raises(MalformedError, match="not number 5"):
        check_tlog_proof(TlogProof(5, good.path, good.note, good.extra))
    with pytest.raises(MalformedError, match="does not bring along"):
        check_tlog_proof(TlogProof(4, good.path, good.note))
    forged = sign_checkpoint(checkpoint_of(STORY).checkpoint, NODE).encode()
    with pytest.raises(SignatureError):
        check_tlog_proof(TlogProof(4, good.path, forged, good.extra))
    bad = good.note.replace(b"w.example", b"v.example")
    lied = WitnessKey("v.example", OTHER.public_key)
    assert check_tlog_proof(TlogProof(4, good.path, bad, good.extra), [lied]).cosigned.keys() == {
        witness_name(NODE.peer_id)
    }  # the line's key id is not that name's


# --- on the command line


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """As much of one as proofs need: the published files."""
    folder = LogFolder(tmp_path / "run" / "log", KEY)
    head = checkpoint_of(STORY)
    folder.grow(log_of(STORY), head, 0, map(encode_entry, STORY))
    return tmp_path / "run"


def test_a_proof_is_made_from_a_ledger_and_a_checkpoint_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_folder: Path
) -> None:
    file, note = saved(tmp_path / "l.bin", STORY), run_folder / "log" / "checkpoint"
    assert call("ledger", "prove", file, 8, "--tlog", "--checkpoint", note) == 0
    proof = tmp_path / "8.tlog-proof"
    proof.write_text(capsys.readouterr().out, encoding="utf-8")
    assert call("ledger", "check", proof, "--run", RUN.hex()[:8]) == 0
    said = capsys.readouterr().out
    assert "16 entries" in said
    assert f"cosigned: node {NODE.peer_id} saw it" in said
    assert "1 more signatures" in said
    vkey = format_vkey("w.example", COSIGNATURE, OTHER.public_key)
    assert call("ledger", "check", proof, "--witness", vkey, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in found["cosigned"]} == {"w.example", witness_name(NODE.peer_id)}
    assert found["signatures_not_checked"] == 0
    assert call("ledger", "check", proof, "--run", "00") == 1
    assert call("ledger", "check", proof, "--witness", "nobody") == 2
    assert call("ledger", "prove", file, 8, "--tlog") == 2
    assert "name one" in capsys.readouterr().err
    assert call("ledger", "prove", file, 16, "--tlog", "--checkpoint", note) == 2
    short = saved(tmp_path / "s.bin", STORY[:12])
    assert call("ledger", "prove", short, 8, "--tlog", "--checkpoint", note) == 2
    fork = saved(tmp_path / "f.bin", FORK)
    assert call("ledger", "prove", fork, 8, "--tlog", "--checkpoint", note) == 2


def caught(spec: bool = True) -> bytes:
    verdict = judge(checkpoint_of(STORY[:12]), checkpoint_of(FORK), *growth())
    assert isinstance(verdict, Conflict)
    return encode_evidence(KEY, verdict, SIGNED_SPEC if spec else None)


def growth() -> tuple[tuple[bytes, ...], bytes]:
    return log_of(FORK).consistency_proof(12), log_of(FORK).root(12)


@pytest.mark.parametrize("command", ["evidence", "check"])
def test_evidence_is_checked_and_said_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "evidence.json"
    file.write_bytes(caught())
    assert call("ledger", command, file, "--run", RUN.hex()[:6]) == 0
    said = capsys.readouterr().out
    assert f"SPLIT VIEW of run {RUN.hex()}" in said
    assert "12 entries" in said
    assert log_of(FORK).root(12).hex() in said
    assert "names as its operator's" in said
    assert "not proven: which of the two is true" in said
    assert call("ledger", command, file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [head["size"] for head in found["heads"]] == [12, 16]
    assert call("ledger", command, file, "--run", "00") == 1
    file.write_bytes(caught().replace(b'"proof": [', b'"proof": ["AAAA", '))
    assert call("ledger", command, file) == 1


def test_a_suspicion_and_a_strangers_key_are_no_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "evidence.json"
    file.write_bytes(
        encode_evidence(KEY, Unproven(checkpoint_of(STORY[:9]), checkpoint_of(STORY)), SIGNED_SPEC)
    )
    assert call("ledger", "evidence", file) == 1
    assert "a suspicion, no proof" in capsys.readouterr().err
    file.write_bytes(caught(spec=False))
    assert call("ledger", "evidence", file) == 1
    assert "anybody can sign under a run's name" in capsys.readouterr().err
    ledger = saved(tmp_path / "l.bin", STORY)
    assert call("ledger", "evidence", file, "--ledger", ledger) == 0
    assert call("ledger", "evidence", tmp_path / "nothing") == 2


def test_a_checkpoint_that_anybody_holds_is_held_against_a_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, note = saved(tmp_path / "l.bin", STORY), tmp_path / "checkpoint"
    node = tmp_path / "node" / "runs" / RUN.hex()[:16] / "witness"
    WitnessStore(node).keep(KEY, checkpoint_of(STORY[:9]))
    note.write_bytes(checkpoint_of(STORY[:12]).note)
    held = ("--checkpoint", note, "--checkpoint", tmp_path / "node")
    assert call("ledger", "verify", file, *held) == 0
    assert "2 of 2 checkpoints are of this ledger" in capsys.readouterr().out
    note.write_bytes(checkpoint_of(FORK[:12]).note)  # as if it was shown to one node alone
    assert call("ledger", "verify", file, *held, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [problem["rule"] for problem in report["problems"]] == ["two-ledgers"]
    assert call("ledger", "verify", file, "--checkpoint", tmp_path) == 1  # a folder with a checkpoint in it
    assert call("ledger", "verify", file, "--checkpoint", tmp_path / "runs") == 2


@pytest.mark.parametrize(("at_s", "code"), [(None, 0), (5, 0), (10**9, 1)])
def test_a_ledger_that_was_set_back_is_found_by_what_witnesses_saw_before(
    tmp_path: Path, at_s: int | None, code: int
) -> None:
    """``at_s``: when a node cosigned more entries than the ledger has, which was signed later or before."""
    issued_ms = 2 * 10**12 if at_s == 10**9 else 6000
    log = log_of(STORY[:12])
    head = TreeHead(run_id=RUN, size=12, root=log.root(), issued_at=issued_ms)
    signed = [sign(head, OPERATOR)]
    file, note = saved(tmp_path / "l.bin", STORY[:12], signed), tmp_path / "checkpoint"
    note.write_bytes(checkpoint_of(STORY, at_s).note)
    assert call("ledger", "verify", file, "--checkpoint", note) == code

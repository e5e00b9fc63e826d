import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tlog_support import (
    KEY,
    OPERATOR,
    ORIGIN,
    RUN_ID,
    entries_of,
    forged_head,
    head_of,
    log_of,
    tile_bytes,
)

from barnraise.protocol.cosignature import (
    WitnessKey,
    cosign,
    cosigned_at,
    node_cosignatures,
    node_witness,
    witness_name,
)
from barnraise.protocol.errors import MalformedError, SignatureError, StorageError
from barnraise.protocol.evidence import Evidence, check_evidence, encode_evidence
from barnraise.protocol.identity import Identity
from barnraise.protocol.merkle import EMPTY_ROOT, MerkleLog
from barnraise.protocol.notes import Note, NoteSignature, open_note, parse_note, sign_note
from barnraise.protocol.tlog_checkpoint import (
    Checkpoint,
    Head,
    open_checkpoint,
    parse_checkpoint,
    sign_checkpoint,
)
from barnraise.protocol.tlog_tiles import TileTree
from barnraise.protocol.witness import (
    Conflict,
    Unproven,
    add_checkpoint,
    format_request,
    judge,
    parse_request,
)
from barnraise.protocol.witness_store import WitnessStore

NODE = Identity.from_private_bytes(bytes([9]) * 32)
NAME = witness_name(NODE.peer_id)
LOG = log_of(entries_of(300))
FORK = log_of([*entries_of(100), *entries_of(200, "!")])  # the same first 100 entries


def test_a_checkpoint_says_what_was_signed_and_another_logs_is_refused() -> None:
    head = open_checkpoint(head_of(LOG).note, KEY)
    assert (head.checkpoint.origin, head.size, head.root) == (ORIGIN, 300, LOG.root())
    other = Checkpoint("barnraise/run/00", 300, LOG.root())
    note = Note(other.text, (sign_note(other.text, ORIGIN, OPERATOR),)).encode()
    with pytest.raises(SignatureError, match="another log"):
        open_checkpoint(note, KEY)
    with pytest.raises(SignatureError):
        open_checkpoint(sign_checkpoint(head.checkpoint, NODE).encode(), KEY)


def test_extension_lines_are_carried() -> None:
    checkpoint = Checkpoint(ORIGIN, 1, LOG.root(1), ("one", "two words"))
    assert parse_checkpoint(checkpoint.text) == checkpoint
    for bad in (("",), ("a\nb",), ("x" * 2000,), ("x",) * 17, ("\t",)):
        with pytest.raises(MalformedError):
            sign_checkpoint(Checkpoint(ORIGIN, 1, LOG.root(1), bad), OPERATOR)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\n",
        "a\n1\n",
        f"a\n01\n{'A' * 43}=\n",
        "a\n1\nAAAA\n",
        f"a\n-1\n{'A' * 43}=\n",
        f"a\n1\n{'A' * 43}=\n\n",
    ],
    ids=["empty", "one", "two", "zero", "short", "minus", "blank"],
)
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(MalformedError):
        parse_checkpoint(text)


def test_a_nodes_name_is_enough_to_check_its_cosignature() -> None:
    text = head_of(LOG).checkpoint.text
    line = cosign(text, NAME, NODE, 1_700_000_000)
    key = node_witness(NAME)
    assert key == WitnessKey(NAME, NODE.public_key)
    assert key.verifies(text, line.signature)
    assert cosigned_at(line) == 1_700_000_000
    note = Note(text, (sign_checkpoint(parse_checkpoint(text), OPERATOR).signatures[0], line))
    opened, verified = open_note(note.encode(), [KEY, key])
    assert [item.name for item in verified] == [ORIGIN, NAME]
    assert node_cosignatures(opened.text, opened.signatures) == {NAME: 1_700_000_000}
    later = NoteSignature(NAME, line.key_id, (1_700_000_001).to_bytes(8, "big") + line.signature[8:])
    assert node_cosignatures(text, [later, NoteSignature(NAME, line.key_id, b"short")]) == {}
    assert node_cosignatures(head_of(LOG, 299).checkpoint.text, [line]) == {}
    assert node_witness("barnraise/node/nobody") is None
    assert node_witness("example.com") is None


def test_growth_is_cosigned_at_every_pair_of_sizes() -> None:
    heads = [head_of(LOG, size) for size in range(130)]
    for first in range(0, 130, 3):
        for second in range(first, 130):
            proof = LOG.consistency_proof(first, second)
            assert judge(heads[first], heads[second], proof) == ("same" if first == second else "grown")


def test_a_fork_is_proven_at_every_size_from_the_larger_logs_tiles() -> None:
    fork_entries = [*entries_of(100), *entries_of(200, "!")]
    for size in range(1, 300, 7):
        larger = head_of(FORK)
        tree = TileTree(300, lambda tile: tile_bytes(FORK, fork_entries, tile))
        verdict = judge(head_of(LOG, size), larger, tree.consistency_proof(size), tree.root(size))
        if LOG.root(size) == FORK.root(size):
            assert verdict == "grown"
        else:
            assert isinstance(verdict, Conflict)
            assert check_evidence(encode_evidence(KEY, verdict)) == Evidence(KEY, verdict)


def test_two_roots_of_one_size_convict_by_themselves() -> None:
    verdict = judge(head_of(LOG, 200), head_of(FORK, 200))
    assert isinstance(verdict, Conflict)
    assert verdict.proof == ()
    assert check_evidence(encode_evidence(KEY, verdict)) == Evidence(KEY, verdict)
    nothing = judge(forged_head(0, bytes(32)), head_of(LOG, 5))
    assert isinstance(nothing, Conflict)
    assert nothing.root == EMPTY_ROOT
    assert check_evidence(encode_evidence(KEY, nothing)) == Evidence(KEY, nothing)


def test_without_a_proof_nothing_is_proven_either_way() -> None:
    for proof in ((), (bytes(32),), (bytes(32),) * 70, LOG.consistency_proof(100, 299)):
        verdict = judge(head_of(LOG, 100), head_of(LOG, 300), proof)
        assert isinstance(verdict, Unproven)
    assert check_evidence(encode_evidence(KEY, verdict)) == Evidence(KEY, verdict)


@given(st.integers(1, 299), st.data())
def test_no_false_proof_convicts_an_honest_log(size: int, data: st.DataObject) -> None:
    proof = list(LOG.consistency_proof(size, 300))
    place = data.draw(st.integers(0, len(proof) - 1))
    proof[place] = data.draw(st.binary(min_size=32, max_size=32))
    root = data.draw(st.none() | st.binary(min_size=32, max_size=32))
    verdict = judge(head_of(LOG, size), head_of(LOG, 300), proof, root)
    assert verdict == "grown" or isinstance(verdict, Unproven)
    if isinstance(verdict, Unproven):
        lie = Conflict(verdict.smaller, verdict.larger, root or bytes(32), tuple(proof))
        with pytest.raises(MalformedError, match="proves nothing"):
            check_evidence(encode_evidence(KEY, lie))


@pytest.mark.parametrize(
    "change", ["format", "log", "smaller", "larger", "root", "proof", "cut", "list", "deep"]
)
def test_altered_evidence_convicts_nobody(change: str) -> None:
    proof = FORK.consistency_proof(150, 300)
    verdict = judge(head_of(LOG, 150), head_of(FORK), proof)
    assert isinstance(verdict, Conflict)
    data = encode_evidence(KEY, verdict)
    content = json.loads(data)
    match change:
        case "format" | "log" | "smaller" | "larger":
            content[change] = content[change].replace("1", "2")
        case "root":
            content["root"] = "A" * 43 + "="
        case "proof":
            content["proof"] = content["proof"][1:]
        case "list":
            content = [content]
    altered = json.dumps(content).encode()
    altered = {"cut": data[:-30], "deep": b"[" * 100_000}.get(change, altered)
    if change == "root":  # this proof says so itself: the field only helps where sizes are powers of two
        assert isinstance(check_evidence(altered).trouble, Conflict)
    else:
        with pytest.raises((MalformedError, SignatureError)):
            check_evidence(altered)


# --- c2sp.org/tlog-witness


def request(old: int, head: Head, log: MerkleLog = LOG) -> bytes:
    return format_request(old, log.consistency_proof(old, head.size), head.note)


def test_a_witness_follows_a_growing_log() -> None:
    last: Head | None = None
    for size in (0, 5, 5, 128, 300):
        answer = add_checkpoint(request(0 if last is None else last.size, head_of(LOG, size)), KEY, last)
        assert answer.status == 200
        assert answer.keep is not None
        last = answer.keep
    assert last is not None
    assert last.size == 300


def test_a_witness_answers_as_its_specification_says() -> None:
    last = head_of(LOG, 128)
    good = request(128, head_of(LOG, 300))
    assert add_checkpoint(good, KEY, last).status == 200

    stale = add_checkpoint(request(100, head_of(LOG, 300)), KEY, last)
    assert (stale.status, stale.body, stale.content_type) == (409, "128\n", "text/x.tlog.size")
    assert add_checkpoint(good, KEY, None).status == 409
    smaller = add_checkpoint(format_request(128, (), head_of(LOG, 100).note), KEY, last)
    assert smaller.status == 400
    for bad in (
        b"",
        b"old 1\n",
        b"old 01\n\n" + last.note,
        b"old 0\nAAAA\n\n" + last.note,
        good[:40],
        b"x" * 90_000,
    ):
        assert add_checkpoint(bad, KEY, last).status == 400
    stranger = Checkpoint("example.com/log", 300, LOG.root())
    assert (
        add_checkpoint(format_request(0, (), sign_checkpoint(stranger, NODE).encode()), KEY, None).status
        == 404
    )
    unsigned = Note(head_of(LOG).checkpoint.text, (sign_note("x\n", "bob", NODE),)).encode()
    assert add_checkpoint(format_request(0, (), unsigned), KEY, None).status == 403
    broken = format_request(128, LOG.consistency_proof(127, 300), head_of(LOG, 300).note)
    answer = add_checkpoint(broken, KEY, last)
    assert answer.status == 422
    assert isinstance(answer.trouble, Unproven)
    assert answer.keep is None
    assert add_checkpoint(format_request(0, (bytes(32),), head_of(LOG, 3).note), KEY, None).status == 422
    assert add_checkpoint(format_request(128, (bytes(32),), last.note), KEY, last).status == 422
    assert add_checkpoint(format_request(0, (), forged_head(0, bytes(32)).note), KEY, None).status == 422


def test_a_split_view_is_refused_with_the_proof_of_it() -> None:
    same_size = add_checkpoint(request(200, head_of(FORK, 200), FORK), KEY, head_of(LOG, 200))
    assert (same_size.status, same_size.body) == (409, "200\n")
    assert isinstance(same_size.trouble, Conflict)
    grown = add_checkpoint(request(200, head_of(FORK), FORK), KEY, head_of(LOG, 200))
    assert grown.status == 422
    assert isinstance(grown.trouble, Conflict)
    assert grown.keep is None
    checked = check_evidence(encode_evidence(KEY, grown.trouble)).trouble
    assert {checked.smaller.root, checked.larger.root} == {LOG.root(200), FORK.root()}


def test_cosignatures_on_a_checkpoint_do_not_disturb_a_witness() -> None:
    head = head_of(LOG, 7)
    line = cosign(head.checkpoint.text, NAME, NODE, 1)
    note = Note(head.checkpoint.text, (line, *parse_note(head.note).signatures)).encode()
    answer = add_checkpoint(format_request(0, (), note), KEY, None)
    assert answer.status == 200
    assert answer.keep is not None
    assert answer.keep.note == note


@given(st.binary(max_size=200))
def test_hostile_requests_are_answered(data: bytes) -> None:
    for candidate in (data, b"old 0\n" + data, b"old 0\n\n" + data):
        assert add_checkpoint(candidate, KEY, None).status in (400, 403, 404)


def test_a_request_is_read_as_it_was_written() -> None:
    proof = LOG.consistency_proof(77, 300)
    assert parse_request(format_request(77, proof, b"note")) == (77, proof, b"note")


# --- on the disk


def test_a_witness_remembers_over_restarts_and_refuses_to_forget(tmp_path: Path) -> None:
    folder = tmp_path / "witness"
    assert WitnessStore(folder).last(KEY) is None
    WitnessStore(folder).keep(KEY, head_of(LOG, 5))
    WitnessStore(folder).keep(KEY, head_of(LOG, 50))
    assert WitnessStore(folder).last(KEY) == head_of(LOG, 50)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes().replace(b"50", b"40"))
    with pytest.raises(StorageError, match="damaged"):
        WitnessStore(folder).last(KEY)


def test_evidence_is_written_once_and_checks(tmp_path: Path) -> None:
    store = WitnessStore(tmp_path)
    verdict = judge(head_of(LOG, 200), head_of(FORK, 200))
    assert isinstance(verdict, Conflict)
    path = store.keep_evidence(KEY, verdict)
    assert store.keep_evidence(KEY, verdict) == path
    assert list(tmp_path.iterdir()) == [path]
    assert path.name.startswith("evidence-split-view-")
    assert check_evidence(path.read_bytes()) == Evidence(KEY, verdict)
    assert RUN_ID.hex() in path.read_text()

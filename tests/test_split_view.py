"""Evidence of a split view: what is believed of strangers, what not, and how it goes round."""

import json
from collections.abc import Callable

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tlog_support import KEY, OPERATOR, ORIGIN, entries_of, head_of, log_of

from barnraise.protocol import evidence as evidence_of
from barnraise.protocol.cosignature import cosign, witness_name
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError, SignatureError
from barnraise.protocol.evidence import DEAF_S, Accusations, check_evidence, encode_evidence
from barnraise.protocol.identity import Identity
from barnraise.protocol.log_messages import LOG_PROTOCOL, MAX_EVIDENCE, SplitView
from barnraise.protocol.log_stream import accuse, serve_log
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Signed
from barnraise.protocol.notes import Note, parse_note
from barnraise.protocol.runid import run_id
from barnraise.protocol.tlog_checkpoint import Checkpoint, Head, log_key, sign_checkpoint
from barnraise.protocol.wire import frame
from barnraise.protocol.witness import Conflict, Unproven, judge
from tests.test_ledger import SPEC

STRANGER = Identity.from_private_bytes(bytes([5]) * 32)
LOG = log_of(entries_of(40))
FORK = log_of([*entries_of(10), *entries_of(30, "!")])


def conflict(one: Head, other: Head) -> Conflict:
    found = judge(one, other)
    assert isinstance(found, Conflict)
    return found


CAUGHT = conflict(head_of(LOG, 20), head_of(FORK, 20))
PROOF = encode_evidence(KEY, CAUGHT)


def test_the_first_proof_is_believed_and_the_others_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Accusations(KEY)
    assert heard.hear("a", PROOF, 0.0) == CAUGHT
    monkeypatch.setattr(evidence_of, "check_evidence", None)  # nobody looks at them
    assert heard.hear("b", PROOF, 0.0) is None
    assert heard.hear("c", b"rubbish", 0.0) is None
    assert Accusations(KEY, believed=True).hear("a", b"rubbish", 0.0) is None


def suspicion() -> bytes:
    return encode_evidence(KEY, Unproven(head_of(LOG, 20), head_of(LOG, 30)))


def of_another_log() -> bytes:
    key = log_key(bytes(32), STRANGER.public_key)
    heads = []
    for log in (LOG, FORK):
        checkpoint = Checkpoint(key.name, 20, log.root(20))
        heads.append(Head(checkpoint, sign_checkpoint(checkpoint, STRANGER).encode()))
    return encode_evidence(key, conflict(*heads))


def under_the_runs_name() -> bytes:
    """What anybody can make: the run's name, and a key of his own."""
    key = log_key(bytes.fromhex(ORIGIN.rpartition("/")[2]), STRANGER.public_key)
    heads = []
    for log in (LOG, FORK):
        checkpoint = Checkpoint(ORIGIN, 20, log.root(20))
        heads.append(Head(checkpoint, sign_checkpoint(checkpoint, STRANGER).encode()))
    return encode_evidence(key, conflict(*heads))


def honest_growth() -> bytes:
    proof = LOG.consistency_proof(20, 30)
    return encode_evidence(KEY, Conflict(head_of(LOG, 20), head_of(LOG, 30), LOG.root(20), proof))


LIES: dict[str, Callable[[], bytes]] = {
    "rubbish": lambda: b"rubbish",
    "large": lambda: b" " * (MAX_EVIDENCE + 1) + PROOF,
    "suspicion": suspicion,
    "another log": of_another_log,
    "a stranger's key": under_the_runs_name,
    "honest growth": honest_growth,
    "the same head twice": lambda: json.dumps(
        json.loads(PROOF) | {"larger": head_of(LOG, 20).note.decode()}
    ).encode(),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_not_listened_to_for_an_hour_and_keeps_nobody_else_out(lie: str) -> None:
    heard = Accusations(KEY)
    with pytest.raises(BarnraiseError):
        heard.hear("liar", LIES[lie](), 0.0)
    with pytest.raises(MalformedError, match="not listened to"):
        heard.hear("liar", PROOF, DEAF_S - 1)
    assert heard.hear("honest", PROOF, 1.0) == CAUGHT


def test_a_liar_may_come_back_after_an_hour_and_many_liars_fill_nothing() -> None:
    heard = Accusations(KEY)
    for number in range(5000):
        with pytest.raises(MalformedError):
            heard.hear(f"liar {number}", b"", 0.0)
    assert len(heard._deaf) < 5000
    with pytest.raises(MalformedError, match="not listened to"):
        heard.hear("liar 4999", PROOF, 1.0)
    assert heard.hear("liar 4999", PROOF, DEAF_S) == CAUGHT


def test_whoever_finds_the_same_two_heads_writes_the_same_file() -> None:
    text = CAUGHT.smaller.checkpoint.text
    line = cosign(text, witness_name(STRANGER.peer_id), STRANGER, 7)
    note = Note(text, (line, *parse_note(CAUGHT.smaller.note).signatures)).encode()
    cosigned = Conflict(Head(CAUGHT.smaller.checkpoint, note), CAUGHT.larger, CAUGHT.root, CAUGHT.proof)
    assert encode_evidence(KEY, cosigned) == PROOF


def test_the_longest_heads_that_a_liar_can_sign_still_fit_into_the_message() -> None:
    heads = []
    for log in (LOG, FORK):
        checkpoint = Checkpoint(ORIGIN, 20, log.root(20), ('"' * 1024,) * 16)
        heads.append(Head(checkpoint, sign_checkpoint(checkpoint, OPERATOR).encode()))
    proof = encode_evidence(KEY, conflict(*heads))
    assert frame(SplitView(evidence=proof))
    assert Accusations(KEY).hear("a", proof, 0.0) is not None
    wide = Checkpoint(ORIGIN, 20, FORK.root(20), ("\N{EM DASH}" * 1024,) * 16)
    heads[1] = Head(wide, sign_checkpoint(wide, OPERATOR).encode())
    assert frame(SplitView(evidence=encode_evidence(KEY, conflict(*heads))))


# --- whose key it is


def of_a_run(operator: Identity) -> tuple[Signed, bytes]:
    """A signed spec, and evidence against the log of its run that carries it."""
    signed = sign(msgspec.structs.replace(SPEC, operator=operator.public_key), operator)
    key = log_key(run_id(signed), operator.public_key)
    heads = []
    for log in (LOG, FORK):
        checkpoint = Checkpoint(key.name, 20, log.root(20))
        heads.append(Head(checkpoint, sign_checkpoint(checkpoint, operator).encode()))
    return signed, encode_evidence(key, conflict(*heads), signed)


def test_evidence_shows_by_the_run_spec_that_the_key_is_the_operators() -> None:
    signed, data = of_a_run(OPERATOR)
    assert check_evidence(data).run_spec == signed
    assert check_evidence(PROOF).run_spec is None


def test_a_spec_of_another_run_or_another_operator_is_refused() -> None:
    _, data = of_a_run(OPERATOR)
    other, theirs = of_a_run(STRANGER)
    content, foreign = json.loads(data), json.loads(theirs)
    content["run_spec"] = foreign["run_spec"]
    with pytest.raises(SignatureError, match="another run's"):
        check_evidence(json.dumps(content).encode())
    content = json.loads(data)
    content["run_spec"]["signature"] = other.signature.hex()
    with pytest.raises(SignatureError):
        check_evidence(json.dumps(content).encode())


@given(st.data())
def test_no_change_of_one_byte_makes_a_crash(data: st.DataObject) -> None:
    altered = bytearray(PROOF)
    altered[data.draw(st.integers(0, len(PROOF) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = check_evidence(bytes(altered))
    except BarnraiseError:
        return
    assert found.key == KEY
    assert found.trouble == CAUGHT  # what was changed is no part of the charge


# --- over a stream


async def test_evidence_is_handed_in_and_a_liar_loses_the_stream(autojump_clock: object) -> None:
    heard = Accusations(KEY)
    found: list[Conflict] = []

    async def read(path: str) -> bytes | None:
        return None

    def convict(peer_id: str, data: bytes) -> bool:
        conflict = heard.hear(peer_id, data, trio.current_time())
        found.extend([] if conflict is None else [conflict])
        return True

    swarm = MemorySwarm()
    async with swarm.network("server") as server, swarm.network("a") as a, swarm.network("b") as b:
        server.set_handler(LOG_PROTOCOL, serve_log(read, convict=convict))
        for client in (a, b):
            await client.connect(server.addresses[0])
        with pytest.raises(PeerError):
            await accuse(b, "server", b"rubbish")
        assert await accuse(a, "server", PROOF)
        assert await accuse(a, "server", PROOF)
        assert await accuse(b, "server", b"whatever: it is believed already")
        server.set_handler(LOG_PROTOCOL, serve_log(read))
        assert not await accuse(a, "server", PROOF)  # who has no use for it says so
    assert found == [CAUGHT]

"""docs/protocol.md and its vectors say what the code does.

If a row is missing here: ``python tests/test_protocol_vectors.py`` prints the tables and writes the vectors
again, for whoever changes the protocol on purpose.
"""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect

from barnraise.protocol import (
    amendments,
    corpus,
    cosignature,
    frames,
    invites,
    ledger,
    ledger_fold,
    log_messages,
    messages,
    notes,
    opening,
    pretrain,
    reach_messages,
    seeds,
    spec,
    standing,
    tlog_checkpoint,
    tlog_tiles,
    tree_messages,
    wire,
)
from barnraise.protocol.envelope import content_id, domain, open_signed, sign
from barnraise.protocol.identity import Identity, fingerprint, peer_id_of
from barnraise.protocol.merkle import MerkleLog, verify_consistency, verify_inclusion
from barnraise.protocol.runid import open_run_spec, run_id

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "protocol.md"
VECTORS = ROOT / "tests" / "data" / "protocol_vectors.json"

PARTS = (
    messages.Signed,
    messages.Peer,
    messages.FileEntry,
    messages.PatchEntry,
    opening.OpenedFile,
    messages.Rollout,
    messages.Verdict,
    tree_messages.Contact,
    tree_messages.HeadMark,
    reach_messages.PortReach,
    corpus.Corpus,
    spec.Noise,
)
SIGNED = (
    messages.Manifest,
    opening.Opening,
    messages.RolloutLease,
    messages.RolloutSubmission,
    pretrain.BlockLease,
    pretrain.BlockSubmission,
    messages.Receipt,
    messages.TreeHead,
    amendments.Amendment,
    invites.Invite,
    spec.RunSpec,
)
SPECS = (
    *(
        info.type.cls  # type: ignore[attr-defined]
        for info in inspect.type_info(spec.RunSpec).fields  # type: ignore[attr-defined]
        if isinstance(info.type, inspect.StructType)
    ),
    spec.AdapterSpec,
    pretrain.PretrainSpec,
    pretrain.BlockRecipe,
    pretrain.JointRecipe,
    pretrain.BlockTolerance,
)
ENTRIES: tuple[type[messages.Message], ...] = ledger.LedgerEntry.__args__  # type: ignore[attr-defined]


def number(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and value > 2**20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}".replace("e+0", "e") if isinstance(value, float) else str(value)


def span(low: int | None, high: int | None) -> str:
    if low is not None and low == high:
        return f"[{low}]"
    return f"[{low or 0}..{number(high)}]" if high is not None else ""


def describe(info: inspect.Type) -> str:
    """The notation of docs/protocol.md for one field's type."""
    match info:
        case inspect.IntType():
            high = info.le if info.lt is None else info.lt - 1
            return f"int {number(info.ge)}..{number(high)}"
        case inspect.FloatType():
            low = (
                ""
                if info.ge is None and info.gt is None
                else f" {number(info.ge)}"
                if info.gt is None
                else " >0"
            )
            return f"float{low}" + (f"..{number(info.le)}" if info.le is not None else "")
        case inspect.BoolType():
            return "bool"
        case inspect.StrType(pattern=str(pattern)):
            return f"text `{pattern.strip('^$')}`"
        case inspect.StrType():
            return f"text{span(info.min_length, info.max_length)}"
        case inspect.BytesType():
            return f"bytes{span(info.min_length, info.max_length)}"
        case inspect.VarTupleType():
            return f"array{span(info.min_length, info.max_length)} of {describe(info.item_type)}"
        case inspect.DictType():
            most = span(info.min_length, info.max_length)
            return f"map{most} of {describe(info.key_type)} to {describe(info.value_type)}"
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in info.values)
        case inspect.UnionType():
            return " or ".join(
                "nil" if isinstance(item, inspect.NoneType) else describe(item) for item in info.types
            )
        case inspect.StructType():
            return info.cls.__name__
    raise NotImplementedError(info)


def fields(type_: type[Any]) -> str:
    info = inspect.type_info(type_)
    assert isinstance(info, inspect.StructType)
    parts = [f"`{info.tag_field}` = {info.tag}"] if info.tag_field else []
    parts += [f"`{field.encode_name}` {describe(field.type)}" for field in info.fields]
    return "; ".join(parts)


def frame_row(frame: messages.Frame) -> str:
    return f"| {frame.code} | {frame.type.__name__} | {frame.kind} | {frame.limit} | {fields(frame.type)} |"


def row(type_: type[Any]) -> str:
    return f"| {type_.__name__} | {fields(type_)} |"


@pytest.mark.parametrize("frame", frames.FRAMES, ids=lambda frame: frame.type.__name__)
def test_the_document_has_every_frame(frame: messages.Frame) -> None:
    assert frame_row(frame) in DOCUMENT.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("type_", [*PARTS, *SIGNED, *SPECS, *ENTRIES], ids=lambda type_: type_.__name__)
def test_the_document_has_every_part_payload_and_entry(type_: type[Any]) -> None:
    assert row(type_) in DOCUMENT.read_text(encoding="utf-8").splitlines()


def test_the_document_names_every_ledger_rule_and_protocol_id() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    source = Path(ledger_fold.__file__).read_text(encoding="utf-8")
    rules = set(re.findall(r'LedgerError\(\s*index,\s*"([a-z-]+)"', source)) | {"starts-with-run", "one-run"}
    assert len(rules) == 30
    for name in (
        *rules,
        messages.HELLO_PROTOCOL,
        messages.SESSION_PROTOCOL,
        messages.SHARD_PROTOCOL,
        tree_messages.TREE_PROTOCOL,
        tree_messages.BULK_PROTOCOL,
        reach_messages.REACH_PROTOCOL,
        log_messages.LOG_PROTOCOL,
    ):
        assert f"`{name}`" in text, name


def example_spec(operator: bytes) -> spec.RunSpec:
    return spec.RunSpec(
        format=1,
        name="example",
        description="A run that exists only here.",
        operator=operator,
        created_at=1_700_000_000_000,
        phase="posttrain",
        seed=42,
        model=spec.ModelSpec(
            name="tiny",
            parameters=1_000_000,
            vocabulary=64,
            weights_dtype="bfloat16",
            compute_dtype="float32",
            eos_token=1,
            assets={"config.json": sha256(b"{}").digest()},
        ),
        environment=spec.EnvironmentSpec(
            name="reverse", settings="{}", prompt_format="plain", system_prompt=""
        ),
        sampling=spec.SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=12),
        rollout=spec.RolloutSpec(
            prompts_per_unit=4,
            group_size=8,
            groups_per_version=32,
            max_groups_per_version=128,
            max_lag=2,
            versions=12,
            timeout_s=60.0,
            deadline_s=180.0,
        ),
        grpo=spec.GrpoSpec(
            learning_rate=0.001,
            warmup_steps=2,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.0,
            grad_clip=1.0,
            inner_epochs=1,
            minibatches=2,
            clip_low=0.2,
            clip_high=0.2,
            clip_delta=4.0,
            normalise_std=True,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
            loss_aggregation="token",
        ),
        verify=spec.VerifySpec(
            toploc_top_k=128,
            toploc_chunk=32,
            max_exponent_mismatches=38,
            max_mantissa_mean=10.0,
            max_mantissa_median=8.0,
            eos_min_probability=0.1,
            false_alarm=1e-7,
            draws=spec.Noise(mean=0.1, variance=0.01, scale=0.1),
            logprobs=spec.Noise(mean=0.1, variance=0.02, scale=0.1),
            bias=0.1,
        ),
        evaluation=spec.EvalSpec(tasks=64, every=1),
        admission="open",
    )


def derive() -> dict[str, Any]:
    """Every vector, from the code."""
    operator = Identity.from_private_bytes(bytes(range(32)))
    node = Identity.from_private_bytes(bytes(range(32, 64)))
    signed_spec = sign(example_spec(operator.public_key), operator)
    run, lease_id = run_id(signed_spec), bytes(range(16))
    verdict = messages.Verdict(
        accepted=False,
        check="toploc",
        threshold=38.0,
        value=77.0,
        position="rollout 3 chunk 0",
        message="the hidden states are not those of policy version 4",
    )
    entries: list[ledger.LedgerEntry] = [
        ledger.RunCreated(at_ms=1, run_id=run),
        ledger.VersionPublished(at_ms=2, version=0, manifest=sha256(b"manifest").digest()),
        ledger.NodeJoined(at_ms=3, node=node.public_key, name="ann"),
        ledger.LeaseIssued(
            at_ms=4,
            lease_id=lease_id,
            unit_id=0,
            node=node.public_key,
            policy_version=0,
            prompts=4,
            group_size=8,
        ),
        ledger.Submitted(
            at_ms=5, lease_id=lease_id, submission_id=sha256(b"work").digest(), node=node.public_key
        ),
        ledger.Judged(
            at_ms=6,
            lease_id=lease_id,
            submission_id=sha256(b"work").digest(),
            node=node.public_key,
            accepted=False,
            check="toploc",
            credit=0,
            evidence=ledger.evidence_of(verdict),
        ),
    ]
    log = MerkleLog()
    for entry in entries:
        log.append(ledger.encode_entry(entry))
    head = messages.TreeHead(run_id=run, size=len(log), root=log.root(), issued_at=7)
    signed_head = sign(head, operator)
    checkpoint = tlog_checkpoint.Checkpoint(tlog_checkpoint.origin_of(run), len(log), log.root())
    cosigned = cosignature.cosign(
        checkpoint.text, cosignature.witness_name(node.peer_id), node, 1_700_000_000
    )
    log_note = tlog_checkpoint.sign_checkpoint(checkpoint, operator)
    opened_first = opening.Opening(
        run_id=sha256(b"run").digest(),
        version=12,
        created_at=8,
        shard_size=4096,
        files=(
            opening.OpenedFile(path="config.json", size=25),
            opening.OpenedFile(path="model.safetensors", size=20_000),
        ),
        bases=(10, 11),
        shards=(sha256(b"config").digest(), sha256(b"first").digest()),
    )
    signed_opening = sign(opened_first, operator)
    hello = messages.Hello(major=1, minor=0, software="example 1.0")
    return {
        "identity": {
            "secret_seed": operator.private_bytes().hex(),
            "public_key": operator.public_key.hex(),
            "peer_id": operator.peer_id,
            "fingerprint": fingerprint(operator.public_key),
        },
        "frames": {
            "Hello(1, 0, 'example 1.0')": wire.frame(hello).hex(),
            "ManifestRequest(id=5)": wire.frame(messages.ManifestRequest(id=5)).hex(),
            "LeaseRequest(id=300, policy_version=12)": wire.frame(
                messages.LeaseRequest(id=300, policy_version=12)
            ).hex(),
            "Have(version=24, indices=(0, 300))": wire.frame(
                tree_messages.Have(version=24, indices=(0, 300))
            ).hex(),
            "StandingPush(verified=3, needed=10, strikes=0, quiet_until=0, banned_until=0, reason='')": (
                wire.frame(
                    messages.StandingPush(
                        verified=3, needed=10, strikes=0, quiet_until=0, banned_until=0, reason=""
                    )
                ).hex()
            ),
            "Piece(version=25, index=1, offset=262144, size=5, total=262149)": wire.frame(
                tree_messages.Piece(version=25, index=1, offset=262144, size=5, total=262149)
            ).hex(),
        },
        "run_spec": {
            "payload": signed_spec.payload.hex(),
            "signature": signed_spec.signature.hex(),
            "run_id": run.hex(),
        },
        "seeds": {
            "lease_id": lease_id.hex(),
            "node": node.public_key.hex(),
            "task_seed(prompt=3)": str(seeds.task_seed(run, lease_id, node.public_key, 3)),
            "sample_seed(prompt=3, sample=7)": str(seeds.sample_seed(run, lease_id, 3, 7)),
            "held_out_seed(index=5)": str(seeds.held_out_seed(run, 5)),
        },
        "verdict": {"payload": wire.encode(verdict).hex(), "evidence": ledger.evidence_of(verdict).hex()},
        "ledger": {
            "entries": [ledger.encode_entry(entry).hex() for entry in entries],
            "roots": [log.root(size).hex() for size in range(len(entries) + 1)],
            "inclusion_proof(index=3, size=6)": [item.hex() for item in log.inclusion_proof(3, 6)],
            "consistency_proof(first=3, second=6)": [item.hex() for item in log.consistency_proof(3, 6)],
        },
        "audit": {
            "seed": bytes(range(32)).hex(),
            "commitment": standing.commitment_of(bytes(range(32))).hex(),
            "draw_ppm(submission_id=sha256('work'))": standing.draw_ppm(
                bytes(range(32)), sha256(b"work").digest()
            ),
        },
        "opening": {
            "payload": signed_opening.payload.hex(),
            "signature": signed_opening.signature.hex(),
            "list": opening.opening_list(opened_first),
        },
        "tree_head": {
            "payload": signed_head.payload.hex(),
            "signed_bytes": (domain(messages.TreeHead) + signed_head.payload).hex(),
            "signature": signed_head.signature.hex(),
            "content_id": content_id(signed_head).hex(),
        },
        "checkpoint": {
            "log": notes.format_vkey(checkpoint.origin, notes.ED25519, operator.public_key),
            "witness": notes.format_vkey(cosigned.name, cosignature.COSIGNATURE, node.public_key),
            "note": notes.Note(checkpoint.text, (*log_note.signatures, cosigned)).encode().decode(),
            "tile/0/000.p/6": tlog_tiles.hash_tile(log, tlog_tiles.Tile(0, 0, 6)).hex(),
            "tile/entries/000.p/6": tlog_tiles.bundle(
                [ledger.encode_entry(entry) for entry in entries]
            ).hex(),
        },
    }


def test_the_vectors_are_derived_again() -> None:
    assert json.loads(VECTORS.read_text(encoding="utf-8")) == derive()


def test_the_vectors_verify_by_themselves() -> None:
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))
    key = bytes.fromhex(vectors["identity"]["public_key"])
    assert peer_id_of(key) == vectors["identity"]["peer_id"]

    def opened(name: str) -> messages.Signed:
        payload, signature = (bytes.fromhex(vectors[name][field]) for field in ("payload", "signature"))
        return messages.Signed(payload=payload, signer=key, signature=signature)

    assert open_run_spec(opened("run_spec")).operator == key
    assert run_id(opened("run_spec")).hex() == vectors["run_spec"]["run_id"]
    head = open_signed(opened("tree_head"), messages.TreeHead, key)
    log = vectors["ledger"]
    roots = [bytes.fromhex(root) for root in log["roots"]]
    assert head.root == roots[6]
    included = [bytes.fromhex(item) for item in log["inclusion_proof(index=3, size=6)"]]
    assert verify_inclusion(bytes.fromhex(log["entries"][3]), 3, 6, included, head.root)
    consistent = [bytes.fromhex(item) for item in log["consistency_proof(first=3, second=6)"]]
    assert verify_consistency(3, 6, roots[3], roots[6], consistent)


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(derive(), indent=2) + "\n", encoding="utf-8")
    for frame in frames.FRAMES:
        print(frame_row(frame))
    for group in (PARTS, SIGNED, SPECS, ENTRIES):
        print()
        for type_ in group:
            print(row(type_))

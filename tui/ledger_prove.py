"""``barnraise ledger prove`` and ``ledger check``: one entry, proven offline from one small file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from barnraise.protocol.cosignature import COSIGNATURE, WitnessKey, node_witness
from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError
from barnraise.protocol.evidence import FORMAT, MAX_EVIDENCE_FILE
from barnraise.protocol.identity import fingerprint
from barnraise.protocol.ledger import encode_entry
from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.ledger_lines import line, peer_id, shown
from barnraise.protocol.ledger_proof import (
    MAX_PROOF_FILE,
    Proven,
    check_proof,
    decode_proof,
    encode_proof,
    make_proof,
)
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.moments import minute, shown_moment
from barnraise.protocol.notes import MAX_NOTE, parse_note, parse_vkey
from barnraise.protocol.tlog_checkpoint import parse_checkpoint
from barnraise.protocol.tlog_proof import (
    MAX_TLOG_PROOF,
    ProvenEntry,
    TlogProof,
    check_tlog_proof,
    parse_tlog_proof,
    tlog_proof_of,
)
from barnraise.protocol.tlog_tiles import TileTree
from barnraise.protocol.wire import printable
from barnraise.tui.console import emit_json, examples
from barnraise.tui.ledger_evidence import RUN, check_run, judge_evidence
from barnraise.tui.ledger_source import SOURCE, input_file, ledger_file, usable

PROVE_EXAMPLES = examples(
    "ledger prove ./my-run 1234 > proof",
    "ledger prove ledger.bin 1234 > proof",
    "ledger prove ./my-run 1234 --tlog > 1234.tlog-proof",
)
CHECK_EXAMPLES = examples(
    "ledger check proof", "ledger check proof --run 3fa9c1d2 --json", "ledger check evidence-split-view.json"
)


def prove(
    source: Path = SOURCE,
    index: int = typer.Argument(..., metavar="ENTRY", min=0, help="The entry's number in the ledger."),
    tlog: bool = typer.Option(
        False, "--tlog", help="In C2SP's format, under the checkpoint that is published and cosigned."
    ),
    checkpoint: Path | None = typer.Option(
        None,
        "--checkpoint",
        metavar="FILE",
        help="Which checkpoint (with --tlog); a run folder's newest by default.",
    ),
) -> None:
    """Write a proof of one entry to standard output: small, self-contained, checked with 'ledger check'."""
    if checkpoint is not None and not tlog:
        raise typer.BadParameter("proofs without --tlog are under a tree head", param_hint="--checkpoint")
    if checkpoint is not None:
        note: bytes | None = input_file(checkpoint, "--checkpoint", MAX_NOTE)
    else:
        note = _own_checkpoint(source)
    if tlog or note is not None:  # the head of a copy of the static log is a checkpoint
        sys.stdout.buffer.write(_under_checkpoint(source, index, note).encode())
        sys.stdout.flush()
        return
    with usable(), ledger_file(source) as path, open_ledger(path) as ledger:
        try:
            own = make_proof(ledger.entries, ledger.heads, ledger.run_spec, index)
        except IndexError as error:
            raise typer.BadParameter(str(error), param_hint="ENTRY") from error
    sys.stdout.write(encode_proof(own).decode("ascii"))


def _own_checkpoint(source: Path) -> bytes | None:
    """The checkpoint that is in a ledger file; None: a run folder, or an export."""
    if not source.is_file():
        return None
    with usable(), open_ledger(source) as ledger:
        return ledger.checkpoint


def _under_checkpoint(source: Path, index: int, note: bytes | None) -> TlogProof:
    if note is None and source.is_file():
        raise typer.BadParameter(
            "a ledger file has no checkpoint in it: name one, such as a run's log/checkpoint, or what the "
            "coordinator or any node hands out",
            param_hint="--checkpoint",
        )
    with usable():
        return _from_tiles(source, index) if note is None else _from_ledger(source, index, note)


def _from_tiles(folder: Path, index: int) -> TlogProof:
    """By the static files of a run folder: a few of them, however long the log is."""
    from barnraise.coordinator.folder import read_spec

    _, run_spec, _ = read_spec(folder)
    path = folder / "log" / "checkpoint"
    if not path.is_file():
        raise typer.BadParameter(f"{folder} has published no checkpoint yet", param_hint="DIR|FILE")
    note = input_file(path, "DIR|FILE", MAX_NOTE)
    size = _covering(note, index)
    tree = TileTree(size, lambda tile: (folder / "log" / tile.path).read_bytes())
    try:
        entry, proof = tree.entry(index), tree.inclusion_proof(index)
    except (OSError, IndexError) as error:
        raise BarnraiseError(f"{folder / 'log'} is damaged: {error}") from error
    return tlog_proof_of(index, entry, proof, note, run_spec)


def _from_ledger(source: Path, index: int, note: bytes) -> TlogProof:
    """By all entries, under a checkpoint from elsewhere."""
    size, log, found = _covering(note, index), MerkleLog(), b""
    with ledger_file(source) as path, open_ledger(path) as ledger:
        for number, entry in enumerate(ledger.entries):
            if number == size:
                break
            log.append(data := encode_entry(entry))
            found = data if number == index else found
        if len(log) < size:
            raise typer.BadParameter(
                f"the checkpoint is of {size} entries, and this ledger has {len(log)}", param_hint="DIR|FILE"
            )
        return tlog_proof_of(index, found, log.inclusion_proof(index, size), note, ledger.run_spec)


def _covering(note: bytes, index: int) -> int:
    """The size that a checkpoint speaks of, which entry ``index`` is below."""
    size = parse_checkpoint(parse_note(note).text).size
    if index >= size:
        raise typer.BadParameter(
            f"the checkpoint covers {size} entries, not yet entry {index}: a new one is signed every minute",
            param_hint="ENTRY",
        )
    return size


def check(
    file: Path = typer.Argument(..., metavar="FILE", help="Made by 'barnraise ledger prove'; - for stdin."),
    run: str = RUN,
    witness: list[str] = typer.Option(
        [], "--witness", metavar="VKEY", help="A witness's verifier key; nodes' are known by their names."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Check a proof offline; say exactly what it proves and what not. Exit 1 if it proves nothing.

    Reads proofs in both formats, and evidence of a split view.
    """
    check_run(run)
    keys = [_witness(text) for text in witness]
    data = input_file(file, "FILE", max(MAX_PROOF_FILE, MAX_TLOG_PROOF, MAX_EVIDENCE_FILE))
    if FORMAT.encode() in data[:200]:
        judge_evidence(data, run, None, as_json)
        return
    proven: Proven | ProvenEntry
    try:
        if data.startswith(b"c2sp.org/tlog-proof"):
            proven = check_tlog_proof(parse_tlog_proof(data), keys)
        else:
            proven = check_proof(decode_proof(data))
    except (MalformedError, SignatureError) as error:
        raise BarnraiseError(f"this proves nothing: {error}") from error
    if not proven.run_id.hex().startswith(run.lower()):
        raise BarnraiseError(f"this proves something of another run, {proven.run_id.hex()}")
    fields = shown(proven.index, proven.entry)
    if as_json:
        emit_json(
            {
                "ok": True,
                "entry": fields,
                "run_id": proven.run_id.hex(),
                "operator": peer_id(proven.operator),
                **(_head_fields(proven) if isinstance(proven, Proven) else _checkpoint_fields(proven)),
            }
        )
        return
    typer.echo(line(fields, {}))
    for text in _meaning(proven):
        typer.echo(text)


def _witness(vkey: str) -> WitnessKey:
    try:
        name, kind, public_key = parse_vkey(vkey.strip())
    except MalformedError as error:
        raise typer.BadParameter(str(error), param_hint="--witness") from error
    if kind != COSIGNATURE or len(public_key) != 32:
        raise typer.BadParameter(f"{printable(name)} is no witness's key (Ed25519)", param_hint="--witness")
    return WitnessKey(name, public_key)


def _head_fields(proven: Proven) -> dict[str, Any]:
    head = proven.head
    moment = shown_moment(head.issued_at)
    return {"tree_head": {"size": head.size, "root": head.root.hex(), "at": moment}}


def _checkpoint_fields(proven: ProvenEntry) -> dict[str, Any]:
    cosigned = [{"name": name, "at": shown_moment(at * 1000)} for name, at in sorted(proven.cosigned.items())]
    head = proven.head
    return {
        "checkpoint": {"origin": head.checkpoint.origin, "size": head.size, "root": head.root.hex()},
        "cosigned": cosigned,
        "signatures_not_checked": proven.unknown,
    }


def _meaning(proven: Proven | ProvenEntry) -> list[str]:
    head = proven.head
    dated = f" (dated {minute(proven.head.issued_at)} UTC)" if isinstance(proven, Proven) else ""
    texts = [
        f"proven: the key {fingerprint(proven.operator)} ({peer_id(proven.operator)}),",
        f"  which the run spec of run {proven.run_id.hex()} names as its operator's,",
        f"  signed{dated} a ledger of {head.size:,} entries",
        f"  with root {head.root.hex()}",
        f"  in which entry {proven.index} is this one, to the bit.",
    ]
    if isinstance(proven, ProvenEntry):
        texts += _seen_by(proven)
    dates = "" if dated == "" else "that the date is true, "
    return [
        *texts,
        "not proven: that this is the run you mean (compare its id), that the entry follows the rules and",
        f"  what credit stands in the end (barnraise ledger verify), {dates}or that nobody",
        "  was shown another ledger (barnraise ledger diff, and what witnesses say).",
    ]


def _seen_by(proven: ProvenEntry) -> Sequence[str]:
    texts = []
    for name, at in sorted(proven.cosigned.items(), key=lambda item: item[1]):
        key = node_witness(name)
        who = f"node {peer_id(key.public_key)}" if key is not None else f"witness {printable(name)}"
        texts.append(f"cosigned: {who} saw it only grow, to this, at {minute(at * 1000)} UTC")
    if not texts:
        texts.append("cosigned: by nobody whose key is known here")
    if proven.unknown:
        texts.append(f"not checked: {proven.unknown} more signatures (--witness VKEY checks one)")
    return texts

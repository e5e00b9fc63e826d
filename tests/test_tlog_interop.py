"""Our log read by implementations that are not ours, and theirs by us: Go's sumdb packages, and aics-tlog."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from starlette.applications import Starlette
from tlog_support import KEY, OPERATOR, ORIGIN, entries_of, head_of, log_of

from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.web.listen import Bind, open_listeners, urls_of
from barnraise.coordinator.web.log_files import log_routes
from barnraise.coordinator.web.shell import serve_http
from barnraise.protocol.cosignature import COSIGNATURE, WitnessKey, cosign, cosigned_at, witness_name
from barnraise.protocol.identity import Identity
from barnraise.protocol.merkle import verify_consistency, verify_inclusion
from barnraise.protocol.notes import (
    ED25519,
    Ed25519Key,
    Note,
    NoteSignature,
    format_vkey,
    parse_note,
    parse_vkey,
)
from barnraise.protocol.tlog_checkpoint import open_checkpoint
from barnraise.protocol.tlog_proof import TlogProof, parse_tlog_proof
from barnraise.protocol.tlog_tiles import TileTree, tiles_for

GOCODE = Path("/usr/share/gocode")
SIZES = (0, 1, 2, 3, 255, 256, 257, 511, 513, 700)
NODE = Identity.from_private_bytes(bytes([9]) * 32)
NAME = witness_name(NODE.peer_id)
LOG_VKEY = format_vkey(ORIGIN, ED25519, OPERATOR.public_key)
ALL = entries_of(700)
LOG = log_of(ALL)


def publish(folder: Path, size: int) -> bytes:
    """A log's static files as the coordinator writes them, its checkpoint cosigned by one witness."""
    head = head_of(LOG, size)
    line = cosign(head.checkpoint.text, NAME, NODE, 1_700_000_000)
    note = Note(head.checkpoint.text, (*parse_note(head.note).signatures, line)).encode()
    public = LogFolder(folder, KEY)
    for step in (size // 2, size):
        start = public.missing_from()
        public.grow(LOG, head_of(LOG, step), start, ALL[start:step])
    public.put_checkpoint(note)
    return note


def read_back(folder: Path, size: int) -> TileTree:
    return TileTree(size, lambda tile: (folder / tile.path).read_bytes())


@pytest.fixture(scope="module")
def go_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    go = shutil.which("go")
    if go is None or not (GOCODE / "src/golang.org/x/mod/sumdb").is_dir():
        pytest.skip("Go or golang.org/x/mod is not installed (Debian: golang-go golang-golang-x-mod-dev)")
    program = tmp_path_factory.mktemp("go") / "tlog"
    source = Path(__file__).parent / "data/tlog/main.go"
    environment = os.environ | {
        "GO111MODULE": "off",
        "GOPATH": str(GOCODE),
        "GOFLAGS": "",
        "GOCACHE": str(program.parent / "cache"),
    }
    built = subprocess.run(
        [go, "build", "-o", program, source], env=environment, capture_output=True, text=True, timeout=240
    )
    assert built.returncode == 0, built.stderr
    return program


def ask_go(program: Path, what: str, request: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [program, what], input=json.dumps(request), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def hashes(proof: tuple[bytes, ...]) -> list[str]:
    return [b64(item) for item in proof]


def unhash(proof: list[str] | None) -> tuple[bytes, ...]:
    return tuple(base64.b64decode(item) for item in proof or ())


def same_tiles(theirs: Iterable[str], ours: set[str]) -> bool:
    """Older versions of Go's package also name the narrower partial tiles of earlier sizes."""
    full = {path for path in theirs if ".p/" not in path}
    return ours <= set(theirs) and full == {path for path in ours if ".p/" not in path}


def some(size: int) -> list[int]:
    return sorted({0, 1, size // 2, size - 1, 254, 255, 256} & set(range(size)))


def request_for(folder: Path, size: int) -> dict[str, Any]:
    root = LOG.root(size)
    assert root
    return {
        "Dir": str(folder),
        "LogKey": LOG_VKEY,
        "Witness": NAME,
        "WitnessKey": b64(NODE.public_key),
        "Inclusion": [
            {"Index": index, "Proof": hashes(LOG.inclusion_proof(index, size))} for index in some(size)
        ],
        "Growth": [
            {
                "Old": index + 1,
                "OldRoot": b64(LOG.root(index + 1)),
                "Proof": hashes(LOG.consistency_proof(index + 1, size)),
            }
            for index in some(size)
        ],
    }


@pytest.mark.parametrize("size", SIZES)
def test_go_reads_our_checkpoint_tiles_entries_and_proofs(
    tmp_path: Path, go_program: Path, size: int
) -> None:
    publish(tmp_path, size)
    request = request_for(tmp_path, size)
    answer = ask_go(go_program, "read", request)
    assert answer["Verified"] == [ORIGIN, NAME]
    assert answer["Size"] == size
    assert answer["Root"] == b64(LOG.root(size))
    assert [base64.b64decode(item or "") for item in answer["Entries"] or ()] == ALL[:size]
    for kind in ("Inclusion", "Growth"):
        theirs = [item["Proof"] or [] for item in answer[kind] or ()]
        assert theirs == [item["Proof"] for item in request[kind]]
    ours = {tile.path for tile in tiles_for(size) if tile.level >= 0}
    assert same_tiles(answer["Tiles"] or (), ours)


@pytest.mark.parametrize("damage", ["signature", "tile", "entries", "proof"])
def test_go_refuses_ours_with_one_flipped_bit(tmp_path: Path, go_program: Path, damage: str) -> None:
    publish(tmp_path, 300)
    request = request_for(tmp_path, 300)
    name = {"signature": "checkpoint", "tile": "tile/0/000", "entries": "tile/entries/000"}.get(damage)
    if name is None:
        request["Inclusion"][0]["Proof"][0] = b64(bytes(32))
    else:
        data = bytearray((tmp_path / name).read_bytes())
        data[data.index(b"\n\n") + len(ORIGIN) + 30 if damage == "signature" else 20] ^= 1
        (tmp_path / name).write_bytes(bytes(data))
    done = subprocess.run(
        [go_program, "read"], input=json.dumps(request), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr


@pytest.mark.parametrize("size", [1, 2, 255, 256, 300])
def test_we_read_what_go_wrote(tmp_path: Path, go_program: Path, size: int) -> None:
    entries = entries_of(size, " of another log")
    request = {
        "Dir": str(tmp_path),
        "Name": "example.com/log",
        "Seed": b64(bytes(range(32))),
        "Witness": "witness.example/w1",
        "WitnessKey": b64(bytes([7]) * 32),
        "Entries": [b64(entry) for entry in entries],
        "Time": 1_700_000_123,
    }
    answer = ask_go(go_program, "write", request)
    name, kind, public_key = parse_vkey(answer["LogKey"])
    assert kind == ED25519
    assert public_key == OPERATOR.public_key
    witness = WitnessKey("witness.example/w1", Identity.from_private_bytes(bytes([7]) * 32).public_key)
    note = (tmp_path / "checkpoint").read_bytes()
    head = open_checkpoint(note, Ed25519Key(name, public_key), (witness,))
    log = log_of(entries)
    assert (head.size, head.root) == (size, log.root())
    assert head.checkpoint.text == answer["Text"]
    (line,) = [item for item in parse_note(note).signatures if item.name == witness.name]
    assert witness.verifies(head.checkpoint.text, line.signature)
    assert cosigned_at(line) == 1_700_000_123
    assert same_tiles(answer["Tiles"], {tile.path for tile in tiles_for(size)})
    tree = read_back(tmp_path, size)
    assert tree.root() == head.root
    assert [tree.entry(index) for index in range(size)] == entries
    for item in answer["Inclusion"]:
        proof, index = unhash(item["Proof"]), item["Index"]
        assert verify_inclusion(entries[index], index, size, proof, head.root)
        assert tree.inclusion_proof(index) == proof
        file = parse_tlog_proof((tmp_path / f"{index}.tlog-proof").read_bytes())
        assert file == TlogProof(index, proof, note)
    for item in answer["Growth"]:
        proof, old_root = unhash(item["Proof"]), base64.b64decode(item["OldRoot"])
        assert verify_consistency(item["Old"], size, old_root, head.root, proof)
        assert tree.root(item["Old"]) == old_root
        assert tree.consistency_proof(item["Old"]) == proof


def tlog_proof(index: int, size: int) -> TlogProof:
    """As `barnraise ledger prove --tlog` makes them, with something in ``extra`` that nobody can read."""
    head = head_of(LOG, size)
    line = cosign(head.checkpoint.text, NAME, NODE, 1_700_000_000)
    note = Note(head.checkpoint.text, (*parse_note(head.note).signatures, line)).encode()
    return TlogProof(index, LOG.inclusion_proof(index, size), note, b"extra")


PROVEN = [(0, 1), (1, 2), (255, 256), (256, 257), (300, 700), (699, 700)]


@pytest.mark.parametrize(("index", "size"), PROVEN)
def test_go_checks_our_tlog_proofs(tmp_path: Path, go_program: Path, index: int, size: int) -> None:
    (tmp_path / "proof").write_bytes(tlog_proof(index, size).encode())
    request = {
        "Dir": str(tmp_path),
        "LogKey": LOG_VKEY,
        "Witness": NAME,
        "WitnessKey": b64(NODE.public_key),
        "Entries": [b64(ALL[index])],
    }
    answer = ask_go(go_program, "proof", request)
    assert answer["Verified"] == [ORIGIN, NAME]
    assert (answer["Size"], answer["Inclusion"][0]["Index"]) == (size, index)
    other = request | {"Entries": [b64(ALL[index] + b"!")]}
    done = subprocess.run(
        [go_program, "proof"], input=json.dumps(other), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1


@pytest.mark.parametrize(("index", "size"), PROVEN)
def test_aics_checks_the_parts_of_our_tlog_proofs(aics: Any, index: int, size: int) -> None:
    """It knows no file of this format; a reader of one needs these two calls."""
    proof = parse_tlog_proof(tlog_proof(index, size).encode())
    note = aics.parse_note(proof.note)
    witness = aics.parse_vkey(format_vkey(NAME, COSIGNATURE, NODE.public_key))
    result = aics.verify_checkpoint(note, aics.parse_vkey(LOG_VKEY), [witness], quorum=1)
    assert result.ok, result
    assert aics.verify_leaf_inclusion(ALL[index], index, size, list(proof.path), LOG.root(size))


@pytest.fixture(scope="module")
def aics() -> Any:
    return pytest.importorskip(
        "aics_tlog", reason="aics-tlog is absent: pip install --no-deps --ignore-requires-python aics-tlog"
    )


@pytest.mark.parametrize("size", SIZES)
def test_aics_reads_our_checkpoint_tiles_entries_and_proofs(tmp_path: Path, aics: Any, size: int) -> None:
    note = aics.parse_note(publish(tmp_path, size))
    witness = aics.parse_vkey(format_vkey(NAME, COSIGNATURE, NODE.public_key))
    result = aics.verify_checkpoint(note, aics.parse_vkey(LOG_VKEY), [witness], quorum=1)
    assert result.ok, result
    checkpoint = aics.parse_checkpoint(note.text)
    assert (checkpoint.origin, checkpoint.size, checkpoint.root) == (ORIGIN, size, LOG.root(size))
    reader = aics.FileSystemTileReader(tmp_path)
    aics.audit_tiles(reader, size, LOG.root(size))
    if size:
        verified = aics.VerifiedTileReader(reader, size, LOG.root(size))
        for index in some(size):
            assert verified.entry(index) == ALL[index]
            proof = aics.inclusion_proof_from_tiles(verified, index, size)
            assert tuple(proof) == LOG.inclusion_proof(index, size)
            ours = list(LOG.inclusion_proof(index, size))
            assert aics.verify_leaf_inclusion(ALL[index], index, size, ours, LOG.root(size))
            grown = list(LOG.consistency_proof(index + 1, size))
            assert aics.verify_consistency(index + 1, size, LOG.root(index + 1), LOG.root(size), grown)


@pytest.mark.parametrize("size", SIZES)
def test_we_read_what_aics_wrote(tmp_path: Path, aics: Any, size: int) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    entries, log = ALL[:size], log_of(ALL[:size])
    store = aics.DirectoryTileStore(tmp_path, fsync=False)
    writer = aics.IncrementalTileWriter(store)
    writer.append(entries)
    theirs = aics.Checkpoint("example.com/log", size, writer.root())
    signed = aics.sign_checkpoint(
        theirs, Ed25519PrivateKey.from_private_bytes(bytes(range(32))), theirs.origin
    )
    _, line = aics.sign_cosignature(
        Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32),
        "w.example",
        77,
        theirs.origin,
        size,
        theirs.root,
    )
    note = aics.Note(text=signed.text, signatures=(*signed.signatures, line)).to_bytes()
    witness = WitnessKey("w.example", Identity.from_private_bytes(bytes([7]) * 32).public_key)
    head = open_checkpoint(note, Ed25519Key("example.com/log", OPERATOR.public_key), (witness,))
    assert (head.size, head.root) == (size, log.root())
    assert cosign(head.checkpoint.text, "w.example", Identity.from_private_bytes(bytes([7]) * 32), 77) == (
        NoteSignature(line.name, line.key_id, line.signature)
    )
    tree = read_back(tmp_path, size)
    assert tree.root() == head.root
    assert [tree.entry(index) for index in range(size)] == entries
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files - {"checkpoint"} == {tile.path for tile in tiles_for(size)}


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """The folder's files over HTTP, as the coordinator's page serves them; gives the log's URL."""
    out_there = LogFolder(folder, KEY)

    async def read(path: str) -> bytes | None:
        return await trio.to_thread.run_sync(out_there.read, path)

    listeners = open_listeners(Bind("127.0.0.1", 0, fall_back=False))
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_http, Starlette(routes=log_routes(read)), listeners)
        yield f"{urls_of(listeners)[0]}log"
        nursery.cancel_scope.cancel()


async def test_go_reads_what_came_over_http(tmp_path: Path, go_program: Path) -> None:
    size = 700
    publish(tmp_path / "ours", size)
    theirs = tmp_path / "theirs"
    async with served(tmp_path / "ours") as url, httpx.AsyncClient() as client:
        for path in ("checkpoint", *(tile.path for tile in tiles_for(size))):
            reply = (await client.get(f"{url}/{path}")).raise_for_status()
            (theirs / path).parent.mkdir(parents=True, exist_ok=True)
            (theirs / path).write_bytes(reply.content)
    answer = ask_go(go_program, "read", request_for(theirs, size))
    assert answer["Verified"] == [ORIGIN, NAME]
    assert answer["Root"] == b64(LOG.root(size))
    assert [base64.b64decode(item or "") for item in answer["Entries"]] == ALL


async def test_aics_reads_ours_over_http(tmp_path: Path, aics: Any) -> None:
    size = 700
    publish(tmp_path, size)

    def audit(url: str) -> None:
        reader = aics.HttpTileReader(url, proxies={})
        aics.audit_tiles(reader, size, LOG.root(size))
        verified = aics.VerifiedTileReader(reader, size, LOG.root(size))
        assert [verified.entry(index) for index in some(size)] == [ALL[index] for index in some(size)]
        assert reader.stats["errors"] == 0, reader.last_errors
        assert reader.read_tile(0, 9, None) is None

    async with served(tmp_path) as url:
        await trio.to_thread.run_sync(audit, url)


def test_both_agree_on_who_signed(aics: Any) -> None:
    assert aics.key_hash(ORIGIN, ED25519, OPERATOR.public_key) == KEY.key_id

"""What only the operator may hold stays in its files: over a whole run, its exports, pages and backups."""

from __future__ import annotations

import base64
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from coordinator_support import coordinating, make_run, node
from server_support import Clock, head_is, volunteer
from web_support import finish_all, ordinary, website

from barnraise.coordinator.admission import make_invite
from barnraise.coordinator.backup import MANIFEST, back_up
from barnraise.coordinator.journal_place import place_for, write_place
from barnraise.coordinator.restore import restore
from barnraise.coordinator.web.tokens import make_token, read_token
from barnraise.protocol.control import Changed, serve_control
from barnraise.protocol.identity import Identity, save_identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.tui.main import main

PASSWORD = "S3cret-W0rd"
URL = f"postgresql://me:{PASSWORD}@127.0.0.1:1/runs"


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Another default for new files, for the length of a test."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def forms(secret: bytes) -> set[bytes]:
    return {secret, secret.hex().encode(), base64.b64encode(secret), base64.urlsafe_b64encode(secret)}


async def test_a_runs_key_and_its_invites_are_in_no_log_state_or_file_but_the_keys(
    tmp_path: Path, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    folder, swarm = make_run(tmp_path), MemorySwarm()
    key = Identity.from_private_bytes(b"o" * 32)
    pem = key.to_pem()
    body = b"".join(pem.splitlines()[1:-1])
    async with coordinating(swarm, folder, seed=1) as coordinator, trio.open_nursery() as nursery:
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            made = await make_invite(coordinator.state.args[0], {"uses": 1, "seconds": 60})
            nursery.start_soon(volunteer, ann, coordinator)
            nursery.start_soon(volunteer, bob, coordinator)
            await head_is(coordinator, 1)
            state = json.dumps(coordinator.state(), default=repr).encode()
            token = read_token(make_token(folder)[0]).encode()
            back_up(folder, tmp_path / "backup", 5_000)
            nursery.cancel_scope.cancel()
    caplog.set_level(logging.INFO)  # matplotlib has much to say
    assert main(["ledger", "export", str(folder), str(tmp_path / "ledger.bin")]) == 0
    assert main(["run", "card", str(folder), "--to", str(tmp_path / "card")]) == 0
    assert (tmp_path / "card/README.md").is_file()
    secrets = forms(b"o" * 32) | {body}
    invite = made["invite"].encode()
    said = [caplog.text.encode(), state, repr(key).encode()]
    assert not [text for text in said if any(secret in text for secret in (*secrets, invite, token))]
    keys, tokens = [], []
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        data = path.read_bytes()
        assert invite not in data, path
        if any(secret in data for secret in secrets):
            keys.append(path)
        if token in data:
            tokens.append(path)
    assert tokens == [folder / "admin.token"]  # a backup has none: whoever restores it makes another
    assert sorted(keys) == [tmp_path / "backup/run.key", folder / "run.key"]
    assert {mode(path) for path in (*keys, *tokens)} == {0o600}
    assert mode(tmp_path / "backup") == 0o700


async def test_the_pages_the_api_and_the_metrics_show_no_key_no_token_and_no_invite(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with website(tmp_path) as web:
        await web.record(ordinary(web.core.run_id).events)
        await finish_all(web)
        token = read_token(make_token(web.run_folder)[0])
        made = await make_invite(web.core, {"uses": 1, "seconds": 60})
        document = await web.json("/api/v1/openapi.json")
        paths = [path for path, kinds in document["paths"].items() if "get" in kinds and "{" not in path]
        assert len(paths) > 5
        pages = ["/", "/nodes", "/units/1", "/ledger", "/versions", "/metrics", "/healthz", "/readyz"]
        said = {}
        for path in dict.fromkeys([*pages, *paths, "/log/checkpoint"]):
            for headers in ({}, {"Authorization": f"Bearer {token}"}):
                if path.endswith("/live"):
                    continue  # never ends; the same state as /api/v1/run
                reply = await web.client.get(path, headers=headers)
                assert reply.status_code < 500 or path == "/readyz", path
                said[path, bool(headers)] = repr(reply.headers).encode() + reply.content
        identity = Identity.from_private_bytes(b"o" * 32)
        pem = b"".join(identity.to_pem().splitlines()[1:-1])
        secrets = {*forms(b"o" * 32), pem, token.encode(), made["invite"].encode(), bytes(web.run_folder)}
        leaks = [(place, secret) for place, text in said.items() for secret in secrets if secret in text]
        assert not leaks


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], indirect=True, ids=oct)
async def test_what_is_secret_is_its_owners_alone_whatever_the_umask(
    tmp_path: Path, umask: int, autojump_clock: Clock
) -> None:
    folder, backup = make_run(tmp_path), tmp_path / "backup"
    token, _ = make_token(folder)
    async with coordinating(MemorySwarm(), folder) as coordinator, trio.open_nursery() as nursery:
        await head_is(coordinator, 0)
        place = await nursery.start(serve_control, folder / "control.sock", dict, {}, Changed())
        assert mode(Path(place)) == 0o600
        nursery.cancel_scope.cancel()
    back_up(folder, backup, 5_000)
    restore(backup, tmp_path / "same", 9_000, same_run=True)
    restore(backup, tmp_path / "new", 9_000)
    save_identity(Identity.generate(), tmp_path / "deep/node.key")
    write_place(tmp_path, place_for(URL, bytes(32)))
    secret = [tmp_path / "deep/node.key", tmp_path / "state.postgres", token, folder / "run.key"]
    secret += [backup / "run.key", tmp_path / "same/run.key", tmp_path / "new/run.key"]
    assert {path: mode(path) for path in secret} == dict.fromkeys(secret, 0o600)
    assert (mode(backup), mode(tmp_path / "deep")) == (0o700, 0o700)


def test_a_databases_password_is_in_no_output_no_log_and_no_manifest(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("barnraise.coordinator.journal_postgres.OPEN_S", 0.0)
    folder = make_run(tmp_path)
    asked = [["coordinator", "migrate", str(folder), "--to", URL]]
    asked += [["coordinator", "migrate", str(folder), "--to", URL.replace("/runs", "/a/b")]]
    for arguments in asked:
        assert main(arguments) != 0
    write_place(folder, place_for(URL, bytes(32)))
    for arguments in (
        ["coordinator", "backup", str(folder), str(tmp_path / "backup")],
        ["coordinator", "status", str(folder)],
        ["ledger", "export", str(folder), str(tmp_path / "ledger.bin")],
        ["run", "card", str(folder)],
    ):
        assert main(arguments) != 0
    said = capsys.readouterr()
    assert "127.0.0.1" in said.err
    assert PASSWORD not in said.out + said.err + caplog.text
    assert not (tmp_path / "backup" / MANIFEST).exists()
    (folder / "state.postgres").write_text(json.dumps({"url": URL + "/x", "schema": "barnraise_1"}))
    assert main(["coordinator", "backup", str(folder), str(tmp_path / "backup")]) != 0
    assert PASSWORD not in capsys.readouterr().err

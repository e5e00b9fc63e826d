"""What only the operator may hold stays in its files: over a whole run, and over a backup of it."""

from __future__ import annotations

import base64
import json
import logging
import stat
from pathlib import Path

import pytest
import trio
from coordinator_support import coordinating, make_run, node
from server_support import Clock, head_is, volunteer

from barnraise.coordinator.admission import make_invite
from barnraise.coordinator.backup import back_up
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm


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
            back_up(folder, tmp_path / "backup", 5_000)
            nursery.cancel_scope.cancel()
    secrets = forms(b"o" * 32) | {body}
    invite = made["invite"].encode()
    said = [caplog.text.encode(), state, repr(key).encode()]
    assert not [text for text in said if any(secret in text for secret in (*secrets, invite))]
    keys = []
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        data = path.read_bytes()
        assert invite not in data, path
        if any(secret in data for secret in secrets):
            keys.append(path)
    assert sorted(keys) == [tmp_path / "backup/run.key", folder / "run.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}

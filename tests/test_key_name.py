"""A key keeps its name: a start without ``--name`` is not a node of another name (R8)."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from barnraise.node import main
from barnraise.node.config import NodeConfig
from barnraise.node.key_name import name_path, settled_name
from barnraise.protocol.identity import Identity, peer_id_of, save_identity

PEER = peer_id_of(bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"))
ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"


class Started:
    """Starts nodes up to where they would dial, and asks what the coordinator would be told."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = tmp_path
        self.called = ""
        monkeypatch.setattr(main, "_run", self._run)
        for logger in (logging.getLogger("barnraise"), logging.getLogger("barnraise.node")):
            monkeypatch.setattr(logger, "disabled", False)

    async def _run(self, config: NodeConfig, identity: Identity) -> int:
        self.called = config.called(identity.peer_id)
        return 0

    def name(self, given: str | None, key: str = "node.key", data: str = "data") -> str:
        config = NodeConfig(
            address=ADDRESS, data=self.place / data, key=self.place / "keys" / key, name=given
        )
        assert main.run_from_config(config) == 0
        return self.called


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(tmp_path, monkeypatch)


def test_the_name_stays_with_the_key_until_another_is_given(started: Started) -> None:
    assert started.name(None).startswith("node-")
    assert started.name("anna") == "anna"
    assert started.name(None) == "anna"
    assert started.name(None, data="elsewhere") == "anna"
    assert started.name("Berta") == "Berta"
    assert started.name(None) == "Berta"
    assert started.name("").startswith("node-")
    assert started.name(None).startswith("node-")


def test_a_name_is_of_one_key_alone(started: Started) -> None:
    assert started.name("anna") == "anna"
    assert started.name(None, key="other.key").startswith("node-")
    save_identity(Identity.generate(), started.place / "keys" / "node.key", overwrite=True)
    assert started.name(None).startswith("node-")


@pytest.mark.parametrize("damage", [b"", b"\0" * 30, b'{"peer_id": 1}', b"[" * 100_000, b"\xff", None])
def test_a_damaged_name_costs_the_name_only(started: Started, damage: bytes | None) -> None:
    started.name("anna")
    path = name_path(started.place / "keys" / "node.key")
    if damage is None:
        path.unlink()
        path.mkdir()
        assert started.name("anna") == "anna", "it cannot be remembered, and holds"
        assert "needs it again" in (started.place / "data" / "node.log").read_text()
    else:
        path.write_bytes(damage)
        assert started.name(None).startswith("node-")
        assert started.name("anna") == started.name(None) == "anna"


@pytest.mark.parametrize("name", ["x" * 100_000, "a\udcff\x1b[2Jb", "192.168.7.9", "Ünï 田"])
def test_what_is_kept_of_a_name_gives_the_same_name_again(tmp_path: Path, name: str) -> None:
    key = tmp_path / "node.key"
    config = NodeConfig(address=ADDRESS, data=tmp_path, key=key, name=settled_name(key, PEER, name))
    again = NodeConfig(address=ADDRESS, data=tmp_path, key=key, name=settled_name(key, PEER, None))
    assert config.called(PEER) == again.called(PEER)
    assert name_path(key).stat().st_size < 5000
    assert not stat.S_IMODE(name_path(key).stat().st_mode) & 0o022

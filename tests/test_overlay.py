"""Coordinator and daemons with the broadcast tree between them: real but for the wire and the processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from cheats import Paced
from gossip_support import OPERATOR, SPEC
from swarm_support import Member, make_model, swarming

from barnraise.coordinator import origin
from barnraise.coordinator.origin import Origin
from barnraise.node.known import KnownRuns
from barnraise.node.link import Run
from barnraise.node.remembered import MOST, load_contacts, remembered_run, save_contacts, save_run
from barnraise.protocol.envelope import sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.runid import run_id
from barnraise.protocol.tree_messages import Contact

Clock = trio.testing.MockClock


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("overlay") / "model")


async def test_versions_reach_all_daemons_down_the_tree(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    async with swarming(tmp_path, model, versions=3) as swarm:
        members = [await swarm.join(f"node-{number}", Paced(1.0)) for number in range(6)]
        await swarm.until(lambda: swarm.head >= 2)
        await swarm.until(lambda: all(member.tree["have_version"] >= 2 for member in members))
        tree = swarm.state()["tree"]
        assert len(tree["neighbours"]) == 6
        for member in members:
            mine = member.tree["tree"]
            assert len(mine["neighbours"]) == 6
            assert mine["eager"] + mine["lazy"] == 6
            assert mine["banned"] == []
            assert any(v["version"] == 2 and v["have"] == v["of"] for v in mine["versions"])
        assert any(v["bytes_out"] > 0 for v in tree["versions"])
        assert tree["reports"] == []
        await swarm.finish()


async def test_a_daemon_that_sends_corrupt_shards_is_banned_and_reported_and_nobody_misses_a_version(
    tmp_path: Path, model: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "SLOTS", 1)  # so that the others have to help
    async with swarming(tmp_path, model, versions=60) as swarm:
        swarm.memory.wires.bandwidth = 60e3  # of each link from here on
        evil = await swarm.join("evil", Paced(1.0))
        honest = [await swarm.join(f"node-{number}", Paced(1.0)) for number in range(4)]
        assert evil.handle is not None
        store = evil.handle._ctx.store
        real = store.get

        def flipped(digest: bytes) -> bytes | None:
            data = real(digest)
            return None if data is None else bytes([data[0] ^ 1]) + data[1:]

        await swarm.until(lambda: evil.tree["have_version"] >= 0)
        evil.handle._ctx.treecast.gossiper.store = _Other(store, flipped)  # type: ignore[union-attr, assignment]

        def caught() -> set[str]:
            reports = swarm.state()["peer_reports"] + swarm.state()["tree"]["reports"]
            return {report["peer"] for report in reports if report["code"] == "corrupt"}

        await swarm.until(lambda: bool(caught()))  # who uploads to whom differs from version to version
        assert caught() == {evil.peer_id}
        head = swarm.head
        await swarm.until(lambda: all(member.tree["have_version"] > head for member in honest))


class _Other:
    """A store that reads otherwise."""

    def __init__(self, store: Any, get: Callable[[bytes], bytes | None]) -> None:
        self._store = store
        self.get = get

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def test_a_restarted_node_finds_the_others_and_their_versions_while_the_coordinator_is_away(
    tmp_path: Path, model: Path, autojump_clock: Clock
) -> None:
    async with swarming(tmp_path, model, versions=60) as swarm:
        one, two = [await swarm.join(name, Paced(6.0)) for name in ("one", "two")]
        await swarm.until(lambda: min(one.tree["have_version"], two.tree["have_version"]) >= 1)
        await trio.sleep(5)
        one.scope.cancel()
        await one.ended.wait()
        away = one.tree["have_version"]
        boss = swarm.run.identity.peer_id
        swarm.memory.partition(boss, one.peer_id)
        again = Member("one", one.identity, Paced(6.0), one.data)
        again.handle = await swarm.nursery.start(swarm._live, again, 0)
        await swarm.until(lambda: again.tree["have_version"] > away)
        assert not again.tree["connected"]
        assert [link["peer"] for link in again.tree["tree"]["neighbours"]] == [two.peer_id]
        swarm.memory.heal(boss, one.peer_id)
        await swarm.until(lambda: bool(again.tree["connected"]))


def test_what_was_remembered_is_checked_when_it_is_read(tmp_path: Path) -> None:
    contacts = [Contact(peer_id=f"peer-{n}", addresses=(f"/ip4/10.0.0.{n}/tcp/1",)) for n in range(1, 100)]
    save_contacts(tmp_path, [Contact(peer_id="dials-out", addresses=()), *contacts])
    assert load_contacts(tmp_path) == contacts[:MOST]
    good = (tmp_path / "overlay.json").read_bytes()
    for damaged in (
        b"",
        good[:-9],
        good.replace(b'"format":1', b'"format":2'),
        good.replace(b"peer-1", b"p" * 97),
        b'{"format":1,"contacts":[{"peer_id":"a","addresses":[],"more":1}]}',
        b" " * 600_000 + good,
        b"[" * 100_000,
    ):
        (tmp_path / "overlay.json").write_bytes(damaged)
        assert load_contacts(tmp_path) == []
    assert load_contacts(tmp_path / "nowhere") == []


def test_a_remembered_run_is_only_believed_with_the_key_and_the_id_that_were_seen(tmp_path: Path) -> None:
    signed = sign(SPEC, OPERATOR)
    known = KnownRuns(tmp_path / "known.json")
    known.check("boss", SPEC.operator)
    known.joined("boss", run_id(signed))
    folder = tmp_path / run_id(signed).hex()[:16]
    assert remembered_run(known, tmp_path, ["boss"]) is None  # nothing on disk
    save_run(folder, signed)
    again = KnownRuns(tmp_path / "known.json")
    assert remembered_run(again, tmp_path, ["stranger", "boss"]) == ("boss", Run(SPEC, run_id(signed)))
    other = Identity.generate()
    for forged in (
        msgspec.structs.replace(signed, signature=bytes(64)),
        sign(msgspec.structs.replace(SPEC, operator=other.public_key), other),
        sign(msgspec.structs.replace(SPEC, name="another"), OPERATOR),
    ):
        save_run(folder, forged)
        assert remembered_run(again, tmp_path, ["boss"]) is None


async def test_what_the_operator_may_choose() -> None:
    with pytest.raises(ValueError, match="upload copies"):
        Origin(None, b"", None, None, None, 0.5)  # type: ignore[arg-type]

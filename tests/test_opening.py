"""Openings: shards that travel before the manifest, and what may go wrong with them."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from gossip_support import CONFIG, KIB, OPERATOR, RUN, SPEC, Host, Meadow, meadow
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from barnraise.coordinator.opening import OpeningWriter
from barnraise.coordinator.patching import Previous, expected_bases
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.identity import Identity
from barnraise.protocol.manifest import build_manifest, manifest_bytes
from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.opening import (
    MOST_OPENINGS,
    OpenedFile,
    Opening,
    Openings,
    check_opening,
    contradiction,
    opened_shards,
    opening_list,
)
from barnraise.protocol.store import DiskStore
from barnraise.protocol.tree_messages import Opened

Clock = trio.testing.MockClock
SHARD = 16 * KIB
MALLORY = Identity.from_private_bytes(b"m" * 32)


def opening(**changes: Any) -> Opening:
    fields: dict[str, Any] = {
        "run_id": RUN,
        "version": 3,
        "created_at": 5,
        "shard_size": 1024,
        "files": (OpenedFile(path="config.json", size=25), OpenedFile(path="model.safetensors", size=4000)),
        "bases": (),
        "shards": (sha256(b"0").digest(), sha256(b"1").digest(), sha256(b"2").digest()),
    }
    return Opening(**{**fields, **changes})


# --- what is believed


def test_a_good_opening_is_believed_and_names_its_first_shards() -> None:
    good = check_opening(sign(opening(), OPERATOR), SPEC, RUN)
    assert [size for _, size in opened_shards(good)] == [25, 1024, 1024]


def test_an_opening_by_another_key_or_altered_is_refused() -> None:
    with pytest.raises(SignatureError, match="signed by key"):
        check_opening(sign(opening(), MALLORY), SPEC, RUN)
    signed = sign(opening(), OPERATOR)
    with pytest.raises(SignatureError, match="does not match"):
        check_opening(msgspec.structs.replace(signed, payload=signed.payload[:-1] + b"x"), SPEC, RUN)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"run_id": b"x" * 32}, "not of"),
        ({"version": 2**29}, "no version above"),
        (
            {"files": (OpenedFile(path="model.safetensors", size=9), OpenedFile(path="config.json", size=9))},
            "order",
        ),
        ({"files": (OpenedFile(path="model.safetensors", size=9),)}, "config.json, pinned"),
        (
            {"files": (OpenedFile(path="config.json", size=9), OpenedFile(path="virus.exe", size=9))},
            "one model.safe",
        ),
        (
            {
                "files": (
                    OpenedFile(path="config.json", size=25),
                    OpenedFile(path="model.safetensors", size=2**40),
                )
            },
            "at most",
        ),
        ({"shards": tuple(bytes([i]) * 32 for i in range(6))}, "6 shards are named of 5"),
        ({"shards": (b"a" * 32, b"a" * 32)}, "two different sizes"),
    ],
    ids=["run", "version", "order", "asset", "stranger", "size", "count", "twice"],
)
def test_an_opening_that_cannot_be_of_this_run_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(MalformedError, match=why):
        check_opening(sign(opening(**changes), OPERATOR), SPEC, RUN)


def test_an_opening_only_ever_grows() -> None:
    known = Openings()

    def take(one: Opening) -> tuple[bool, str]:
        return known.take(sign(one, OPERATOR), one)

    long, short = opening(), opening(shards=opening().shards[:1])
    assert take(short) == (True, "")
    assert take(long) == (True, "")
    assert take(long) == (False, "")
    assert take(short) == (False, "")  # replayed by somebody
    other = opening(shards=(b"x" * 32,))
    assert take(other) == (False, "two openings of version 3 contradict each other")
    again = opening(created_at=6, shards=(b"x" * 32,))
    assert take(again) == (True, "")  # the operator's machine crashed and began anew
    assert take(long) == (False, "")
    assert opening_list(again) != opening_list(long) == opening_list(short)


def test_what_is_published_is_not_open_any_more() -> None:
    known = Openings()
    one = opening()
    manifest = Manifest(run_id=RUN, version=3, created_at=9, shard_size=1024, files=())
    known.take(sign(one, OPERATOR), one)
    closed, fault = known.published(manifest)
    assert closed == one
    assert fault
    assert known.take(sign(one, OPERATOR), one) == (False, "")
    assert known.due(["a"]) == []


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=30)
)
@hypothesis_settings(max_examples=100, deadline=None)
def test_no_replay_makes_news_twice(steps: list[tuple[int, int, int, bool]]) -> None:
    """Whoever replays signed openings in any order starts no storm: what is passed on only ever grows."""
    known = Openings()
    last = (-1, -1, -1)
    for version, attempt, length, publish in steps:
        one = opening(version=version, created_at=attempt, shards=opening().shards[:length])
        news, fault = known.take(sign(one, OPERATOR), one)
        assert not fault
        if news:
            assert (version, attempt, length) > last
            last = (version, attempt, length)
        if publish and known.opening is not None:
            known.published(Manifest(run_id=RUN, version=version, created_at=9, shard_size=1024, files=()))
            last = max(last, (version, 99, 99))


# --- what is written


class Publication:
    """A version in the making at the origin: hashed in steps, then published (perhaps as something else)."""

    def __init__(self, host: Host, folder: Path, version: int, size: int = 1024 * KIB, **how: Any) -> None:
        self.host, self.version = host, version
        self.folder = folder / f"making-{version}-{how.get('attempt', 0)}"
        self.folder.mkdir(parents=True)
        (self.folder / "config.json").write_bytes(CONFIG)
        data = random.Random(version * 100 + how.get("attempt", 0)).randbytes(size)
        (self.folder / "model.safetensors").write_bytes(data)
        self.files = {name: self.folder / name for name in ("config.json", "model.safetensors")}
        self.openings: list[Opening] = []
        self.puts: list[tuple[bytes, bytes]] = []
        at = how.get("attempt", 0)
        self.writer = OpeningWriter(
            RUN, version, self.files, SHARD, at, how.get("bases", ()), host.store, self._sign, self._tell, 0
        )
        self.manifest = build_manifest(
            RUN, version, self.files, SHARD, at, lambda digest, data: self.puts.append((digest, data))
        )

    def _sign(self, message: Any) -> Signed:
        return sign(message, OPERATOR)

    def _tell(self, signed: Signed, one: Opening) -> None:
        self.openings.append(one)
        self.host.gossiper.openings.publish(signed, one)

    def openings_off(self) -> None:
        self.puts.clear()

    def hash(self, count: int) -> None:
        for digest, data in self.puts[:count]:
            self.writer.put(digest, data)
        del self.puts[:count]

    def publish(self) -> Signed:
        self.hash(len(self.puts))
        for entry in self.manifest.files:
            place = 0
            for digest in entry.shards:
                size = min(SHARD, entry.size - place)
                self.host.store.adopt(self.files[entry.path], [(digest, place, size)])
                place += size
        signed = sign(self.manifest, OPERATOR)
        self.host.gossiper.lists.hold(self.manifest)
        self.host.gossiper.publish(signed, self.manifest)
        return signed


async def sown(field: Meadow, count: int = 3) -> Host:
    origin = await field.add("o")
    for number in range(count):
        await field.add(f"n{number}")
    await trio.sleep(10)
    return origin


def test_openings_are_few_and_grow(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "model.safetensors").write_bytes(random.Random(1).randbytes(1000 * 1024))
    files = {name: tmp_path / name for name in ("config.json", "model.safetensors")}
    made: list[Opening] = []
    store = DiskStore(tmp_path / "store")
    writer = OpeningWriter(
        *(RUN, 1, files, 1024, 7, (0,), store),
        lambda message: sign(message, OPERATOR),
        lambda signed, one: made.append(check_opening(signed, SPEC, RUN)),
        least_bytes=0,
    )
    manifest = build_manifest(RUN, 1, files, 1024, 7, writer.put)
    writer.finish()
    assert [len(one.shards) for one in made] == [4, 8, 16, 32, 64, 128, 256, 512, 1001]
    assert len(made) <= MOST_OPENINGS
    assert all(not contradiction(one, manifest) for one in made)
    assert len({opening_list(one) for one in made}) == 1
    assert all(store.get(digest) is not None for digest, _ in opened_shards(made[-1]))


def test_a_file_that_changes_while_it_is_hashed_is_not_opened_further(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "model.safetensors").write_bytes(bytes(64 * 1024))
    files = {name: tmp_path / name for name in ("config.json", "model.safetensors")}
    made: list[Opening] = []
    writer = OpeningWriter(
        *(RUN, 1, files, 1024, 7, (0,), DiskStore(tmp_path / "store")),
        lambda message: sign(message, OPERATOR),
        lambda signed, one: made.append(one),
        least_bytes=0,
    )
    (tmp_path / "model.safetensors").write_bytes(bytes(64 * 1024 + 5))
    build_manifest(RUN, 1, files, 1024, 7, writer.put)
    writer.finish()
    assert all(len(one.shards) <= 64 for one in made)


def test_nodes_with_a_base_are_told_to_wait_for_the_patch() -> None:
    assert expected_bases(1, None) == ()
    manifest = Manifest(run_id=RUN, version=4, created_at=9, shard_size=1024, files=())
    assert expected_bases(5, Previous(manifest, {})) == (4,)


# --- on the network


async def test_shards_leave_before_the_last_is_hashed(tmp_path: Path, autojump_clock: Clock) -> None:
    async with meadow(tmp_path) as field:
        origin = await sown(field)
        one = Publication(origin, tmp_path, 0)
        one.hash(40)  # 32 of 65 are announced
        await trio.sleep(10)
        for name in ("n0", "n1", "n2"):
            store = field.hosts[name].store
            ahead = [digest for digest, _ in opened_shards(one.openings[-1]) if store.has(digest)]
            assert len(ahead) == 32
            assert not field.hosts[name].versions.on_disk()  # nothing is assembled
            assert not field.hosts[name].heads
        sent = origin.gossiper.lists.sent[0]
        assert sent < 3 * 32 * SHARD  # nodes pass shards on among themselves
        signed = one.publish()
        await field.until_done(0, limit=60)
        for name in ("n0", "n1", "n2"):
            host = field.hosts[name]
            assert host.whole(signed)
            assert host.gossiper.lists.received[0] < 1.25 * manifest_bytes(one.manifest)
            assert not host.reports
            assert host.gossiper.lists.opened == {}
            assert host.store.used_bytes == 0  # all of it lies in the version


async def test_a_node_that_joins_while_a_version_is_open_fetches_it_ahead(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await sown(field, 2)
        one = Publication(origin, tmp_path, 0)
        one.hash(40)
        await trio.sleep(5)
        late = await field.add("late")
        await trio.sleep(15)
        assert sum(late.store.has(digest) for digest, _ in opened_shards(one.openings[-1])) == 32
        signed = one.publish()
        await field.until_done(0, limit=60)
        assert late.whole(signed)


async def test_whoever_has_a_base_waits_for_the_manifest(tmp_path: Path, autojump_clock: Clock) -> None:
    async with meadow(tmp_path) as field:
        origin = await sown(field, 2)
        Publication(origin, tmp_path, 0).publish()
        await field.until_done(0, limit=60)
        newcomer = await field.add("x", fetches=False)
        one = Publication(origin, tmp_path, 1, bases=(0,))
        await trio.sleep(10)
        one.hash(40)
        await trio.sleep(10)
        shards = opened_shards(one.openings[-1])
        assert not any(field.hosts["n0"].store.has(digest) for digest, _ in shards[1:])
        assert all(newcomer.store.has(digest) for digest, _ in shards)
        signed = one.publish()
        await field.until_done(1, "n0", "n1", limit=60)
        assert field.hosts["n0"].whole(signed)


async def test_a_manifest_that_differs_from_its_opening_wins(tmp_path: Path, autojump_clock: Clock) -> None:
    """The coordinator lost the checkpoint in a crash, and what it trained again came out different."""
    async with meadow(tmp_path) as field:
        origin = await sown(field)
        lost = Publication(origin, tmp_path, 0)
        lost.hash(40)
        await trio.sleep(10)
        again = Publication(origin, tmp_path, 0, attempt=1)
        again.hash(10)  # opened as well, in part
        await trio.sleep(5)
        signed = again.publish()
        await field.until_done(0, limit=60)
        await trio.sleep(2)
        for name in ("n0", "n1", "n2"):
            host = field.hosts[name]
            assert host.whole(signed)
            assert not host.gossiper.banned
            assert host.store.used_bytes == 0  # what was fetched ahead for nothing is gone


async def test_the_operator_reads_that_what_was_opened_was_not_published(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await sown(field, 1)
        Publication(origin, tmp_path, 0).hash(40)
        await trio.sleep(5)
        again = Publication(origin, tmp_path, 0, attempt=1)
        again.openings_off()
        signed = again.publish()
        await field.until_done(0, limit=60)
        told = [report for report in field.hosts["n0"].reports if report[0] == "opening"]
        assert told
        assert told[0][1] == ""  # no peer is blamed
        assert "not the one that was opened" in told[0][2]
        assert not field.hosts["n0"].gossiper.banned
        assert field.hosts["n0"].whole(signed)


async def test_whoever_forges_an_opening_is_refused_from_then_on(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        await sown(field, 2)
        victim, liar = field.hosts["n0"], field.hosts["n1"]
        await trio.sleep(5)
        link = liar.gossiper.links[victim.name]
        assert link.post(Opened(opening=sign(opening(), MALLORY)))
        await trio.sleep(5)
        assert liar.name in victim.gossiper.banned
        assert ("forged", liar.name) in [(code, peer) for code, peer, _ in victim.reports]
        assert victim.gossiper.openings.open is None


async def test_a_full_disk_fetches_nothing_ahead(tmp_path: Path, autojump_clock: Clock) -> None:
    async with meadow(tmp_path) as field:
        origin = await sown(field, 1)
        host = field.hosts["n0"]
        host.store.quota_bytes = 100 * KIB
        one = Publication(origin, tmp_path, 0)
        one.hash(40)
        await trio.sleep(10)
        assert host.store.used_bytes == 0
        assert host.prefetch.pulling is None

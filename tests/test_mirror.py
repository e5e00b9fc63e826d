"""Mirrors from the coordinator's export to a node's download, over real HTTP on loopback."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio
from coordinator_support import coordinating, make_run

from barnraise.coordinator.mirror import Exported, export_store
from barnraise.node import entering
from barnraise.node.webseed import WebSeed
from barnraise.protocol.bandwidth import Pacer
from barnraise.protocol.envelope import open_signed, sign
from barnraise.protocol.errors import MalformedError, PeerError, RunFolderError
from barnraise.protocol.manifest import check_manifest, manifest_bytes, manifest_shards
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.mirrors import shard_path
from barnraise.protocol.paced_network import PacedNetwork
from barnraise.protocol.version_folder import folder_matches
from tests.test_weights import OPERATOR, RUN, SPEC, Party, manifest_of, publish
from tests.test_weights import Swarm as Space

KIB = 1024


@contextmanager
def web(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve ``folder`` over HTTP; yields the base URL and the paths asked for."""
    asked: list[str] = []

    class Site(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def raised(folder: Path, until: int, mirrors: tuple[str, ...] = ()) -> list[Manifest]:
    """Run the coordinator of ``folder`` in virtual time until it has published version ``until``."""
    found: list[Manifest] = []

    async def main() -> None:
        async with coordinating(MemorySwarm(), folder, mirrors=mirrors) as boss:
            with trio.fail_after(1000):
                while boss.state()["policy_version"] < until:
                    await trio.sleep(0.1)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    from barnraise.coordinator.journal import Journal

    journal = Journal(folder / "state.sqlite")
    for version in range(until + 1):
        signed = journal.manifest(version)
        assert signed is not None
        found.append(open_signed(signed, Manifest, None))
    journal.close()
    return found


def files_below(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_a_run_s_shards_are_exported_in_the_layout_that_nodes_ask_for(tmp_path: Path) -> None:
    run, target = make_run(tmp_path), tmp_path / "site"
    with pytest.raises(RunFolderError, match="published nothing yet"):
        export_store(run, target)
    (manifest,) = raised(run, 0, ("https://mirror.example/run",))
    assert manifest.mirrors == ("https://mirror.example/run",)
    done = export_store(run, target)
    shards = dict(manifest_shards(manifest))
    assert done == Exported(0, len(shards), sum(shards.values()), len(shards), sum(shards.values()), 0)
    assert files_below(target).keys() == {shard_path(digest) for digest in shards}

    async def fetch_all(url: str) -> None:
        seed = WebSeed(url)
        for digest, size in shards.items():
            assert await seed.fetch(digest, size) is not None
        await seed.close()

    with web(target) as (url, _):
        trio.run(fetch_all, url)


def test_an_export_writes_only_what_is_missing_and_prunes_only_shards(tmp_path: Path) -> None:
    run, target = make_run(tmp_path), tmp_path / "site"
    (manifest,) = raised(run, 0)
    export_store(run, target)
    before = files_below(target)
    assert export_store(run, target).written == 0
    assert files_below(target) == before
    cut, gone = sorted(before)[:2]
    (target / cut).write_bytes(b"half")
    (target / gone).unlink()
    assert export_store(run, target).written == 2
    stranger = target / "shards" / "ab" / ("ab" * 32)
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_bytes(b"old")
    (target / "index.html").write_text("hello")
    (target / "shards" / "ab" / "README").write_text("hello")
    (target / "shards" / "ab" / ".tmp-crashed").write_text("half")
    assert export_store(run, target).removed == 0
    assert stranger.exists()
    assert export_store(run, target, prune=True).removed == 1
    assert files_below(target).keys() == before.keys() | {"index.html", "shards/ab/README"}
    assert len(manifest_shards(manifest)) == len(before)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    raised(run, 0)
    path = run / "checkpoints" / "v000000" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunFolderError, match="not the file that was published"):
        export_store(run, tmp_path / "site")
    os.truncate(path, 100)
    with pytest.raises(RunFolderError):
        export_store(run, tmp_path / "site")
    path.unlink()
    with pytest.raises(RunFolderError, match="is missing"):
        export_store(run, tmp_path / "site")


def mirrored(signed: Signed, *urls: str) -> Signed:
    return sign(msgspec.structs.replace(manifest_of(signed), mirrors=urls), OPERATOR)


@pytest.mark.parametrize("url", ["http://mirror.example", "file:///etc", "https://u@x", "https://x/\n"])
def test_a_manifest_with_another_kind_of_url_is_refused(tmp_path: Path, url: str) -> None:
    from barnraise.protocol.store import DiskStore

    signed = publish(DiskStore(tmp_path / "store"), tmp_path / "made")
    check_manifest(mirrored(signed, "https://mirror.example/a"), SPEC, RUN)
    with pytest.raises(MalformedError):
        check_manifest(mirrored(signed, url), SPEC, RUN)


class Node(Party):
    """A party that asks mirrors, too."""

    def __init__(self, network: Any, folder: Path, cap: int | None = None) -> None:
        super().__init__(network, folder, cap)
        self.fetcher.mirror = lambda url: WebSeed(url, down=self.fetcher.down, timeout=1.0)


async def stage(stack: AsyncExitStack, folder: Path, *names: str) -> list[Node]:
    space = Space(MemorySwarm(latency_s=0.001), folder, stack)
    parties = []
    for name in names:
        network = await stack.enter_async_context(space.space.network(name))
        parties.append(Node(network, folder / name))
    return parties


async def test_a_node_alone_takes_a_version_from_its_mirror_and_spares_the_origin(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        origin, node = await stage(stack, tmp_path, "origin", "node")
        signed = publish(origin.store, tmp_path / "made")
        publish_site(origin, tmp_path / "site")
        url, asked = stack.enter_context(web(tmp_path / "site"))
        node.knows(origin.source(origin=True))
        with trio.fail_after(30):
            path = await node.ensure(mirrored(signed, url))
        assert folder_matches(manifest_of(signed), path)
        assert origin.uploaded == 0
        assert len(asked) == len(manifest_shards(manifest_of(signed)))


def publish_site(party: Party, target: Path) -> None:
    for digest in list(party.store._places):
        path = target / shard_path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cast(bytes, party.store.get(digest)))


async def test_peers_are_asked_before_mirrors(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        peer, node = await stage(stack, tmp_path, "peer", "node")
        signed = publish(peer.store, tmp_path / "made")
        publish_site(peer, tmp_path / "site")
        url, asked = stack.enter_context(web(tmp_path / "site"))
        node.knows(peer.source())
        with trio.fail_after(30):
            await node.ensure(mirrored(signed, url))
        assert asked == []
        assert peer.uploaded == manifest_bytes(manifest_of(signed))


async def test_a_lying_mirror_is_left_and_reported_and_the_rest_comes_from_the_origin(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        origin, node = await stage(stack, tmp_path, "origin", "node")
        signed = publish(origin.store, tmp_path / "made")
        publish_site(origin, tmp_path / "site")
        for path in (tmp_path / "site").rglob("*"):
            if path.is_file() and path.stat().st_size > 1000:
                path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
        url, _ = stack.enter_context(web(tmp_path / "site"))
        node.knows(origin.source(origin=True))
        with trio.fail_after(30):
            path = await node.ensure(mirrored(signed, url))
        assert folder_matches(manifest_of(signed), path)
        assert [peer for peer, _ in node.banned] == [url]
        assert "corrupt" in node.banned[0][1]


async def test_dead_and_half_filled_mirrors_only_cost_time(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        origin, node = await stage(stack, tmp_path, "origin", "node")
        signed = publish(origin.store, tmp_path / "made")
        publish_site(origin, tmp_path / "site")
        for number, path in enumerate((tmp_path / "site").rglob("*")):
            if path.is_file() and number % 2:
                path.unlink()
        url, asked = stack.enter_context(web(tmp_path / "site"))
        node.knows(origin.source(origin=True))
        with trio.fail_after(30):
            path = await node.ensure(mirrored(signed, "http://127.0.0.1:1", url))
        assert folder_matches(manifest_of(signed), path)
        assert 0 < origin.uploaded <= manifest_bytes(manifest_of(signed))
        assert asked
        assert not node.banned


async def test_with_no_source_but_a_dead_mirror_the_error_names_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        origin, node = await stage(stack, tmp_path, "origin", "node")
        signed = publish(origin.store, tmp_path / "made")
        with (
            trio.fail_after(60),
            pytest.raises(PeerError, match=r"http://127\.0\.0\.1:1: .*cannot be reached"),
        ):
            await node.ensure(mirrored(signed, "http://127.0.0.1:1"))


def test_a_strangers_manifest_never_sends_us_to_our_own_machine(tmp_path: Path) -> None:
    network = PacedNetwork(cast(Any, SimpleNamespace(bytes_in=0)), Pacer(), Pacer())
    limits = SimpleNamespace(down=Pacer())

    def mirror(url: str, *addresses: str) -> object:
        config = SimpleNamespace(addresses=addresses)
        return entering._mirror(
            cast(Any, SimpleNamespace(config=config, limits=limits, network=network)), url
        )

    assert mirror("http://127.0.0.1:8000", "/ip4/203.0.113.7/tcp/4001/p2p/x") is None
    assert mirror("https://localhost", "/dns4/coordinator.example/tcp/4001/p2p/x") is None
    assert mirror("https://mirror.example", "/ip4/203.0.113.7/tcp/4001/p2p/x") is not None
    assert mirror("http://127.0.0.1:8000", "/ip4/127.0.0.1/tcp/4001/p2p/x") is not None


def test_the_command_line_exports_and_checks_urls(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from barnraise.tui.coordinate import app

    run, target = make_run(tmp_path), tmp_path / "site"
    raised(run, 0)
    result = CliRunner().invoke(app, ["export-store", str(run), str(target), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["written"] == len(files_below(target))
    result = CliRunner().invoke(app, ["run", str(run), "--mirror", "http://mirror.example"])
    assert result.exit_code == 2

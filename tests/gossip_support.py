"""Shared by the tests of treecast's shell: hosts on any network, each with its store and its tree."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import trio
from spec_support import run_spec

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.presets import demo
from barnraise.node.broadcast import TreecastFetcher
from barnraise.node.prefetch import Prefetch
from barnraise.node.versions import Versions
from barnraise.node.weights import Source, SwarmFetcher
from barnraise.protocol.bandwidth import Pacer
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.gossip import Gossiper
from barnraise.protocol.identity import Identity
from barnraise.protocol.manifest import build_manifest, check_manifest
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import SHARD_PROTOCOL, Manifest, Signed
from barnraise.protocol.network import Network
from barnraise.protocol.opening import check_opening
from barnraise.protocol.paced_network import PacedNetwork
from barnraise.protocol.shards import serve_shards
from barnraise.protocol.store import DiskStore
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree_messages import Contact
from barnraise.protocol.version_folder import folder_matches
from barnraise.protocol.view_state import ViewConfig

OPERATOR = Identity.from_private_bytes(b"o" * 32)
RUN = b"r" * 32
CONFIG = b'{"hidden_size": 64}'
KIB = 1024


_DEMO = demo()
SPEC = run_spec(
    name="test",
    operator=OPERATOR.public_key,
    seed=1,
    model__name="m",
    model__parameters=10_000_000,
    model__assets={"config.json": sha256(CONFIG).digest()},
    environment=_DEMO.environment,
    sampling=_DEMO.sampling,
    rollout=_DEMO.rollout,
    grpo=_DEMO.grpo,
    verify=default_verify_spec("float32"),
    evaluation=_DEMO.evaluation,
)


def make_version(
    store: DiskStore, folder: Path, version: int, size: int = 1024 * KIB, shard: int = 16 * KIB
) -> Signed:
    """A version of random weights, cut into ``store``; its manifest signed by the operator."""
    folder = folder / f"made-{version}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "model.safetensors").write_bytes(random.Random(version).randbytes(size))
    files = {name: folder / name for name in ("config.json", "model.safetensors")}
    return sign(build_manifest(RUN, version, files, shard, 0, store.put), OPERATOR)


def opened(signed: Signed) -> Manifest:
    return check_manifest(signed, SPEC, RUN)


class Host:
    """A node as far as weights go: it fetches every head that the tree brings, and serves it."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        origin: Host | None,
        *,
        up: float | None = None,
        down: float | None = None,
        transfer: TransferConfig | None = None,
        views: ViewConfig | None = None,
        beside: bool = True,
        fetches: bool = True,
    ) -> None:
        self.name = network.peer_id
        self.folder = folder
        self.network = PacedNetwork(network, Pacer(up), Pacer(down))
        self.store = DiskStore(folder / "store")
        self.versions = Versions(folder / "versions", self.store, SPEC, RUN)
        self.origin = origin
        self.heads: list[int] = []
        self.done: dict[int, float] = {}
        self.reports: list[tuple[str, str, str]] = []
        self.errors: list[str] = []
        self.asked = 0  # bytes served beside the tree
        self._fetches = fetches
        self._heads, self._to_fetch = trio.open_memory_channel[Signed](64)
        contact = [] if origin is None else [Contact(peer_id=origin.name, addresses=origin.network.addresses)]
        rng = random.Random(f"gossip/{self.name}")
        self.gossiper = Gossiper(
            self.network,
            self.store,
            contact,
            opened,
            rng,
            on_head=self._on_head,
            on_report=lambda code, peer, text: self.reports.append((code, peer, text)),
            check_opening=lambda signed: check_opening(signed, SPEC, RUN),
            views=views,
            transfer=transfer,
            down=self.network.down,
        )
        sources = (
            []
            if origin is None or not beside
            else [Source(origin.name, origin.network.addresses, origin=True)]
        )
        swarm = SwarmFetcher(
            self.network, self.store, lambda version: sources, down=self.network.down, rng=rng
        )
        self.fetcher = TreecastFetcher(self.gossiper, swarm)
        self.prefetch = Prefetch(self.gossiper, self.versions)
        self.network.set_handler(SHARD_PROTOCOL, serve_shards(self.store, sent=self._sent))

    def _sent(self, peer_id: str, size: int) -> None:
        self.asked += size

    def _on_head(self, signed: Signed, manifest: Manifest) -> None:
        self.heads.append(manifest.version)
        if self._fetches:
            self._heads.send_nowait(signed)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.gossiper.run)
            async for signed in self._to_fetch:
                nursery.start_soon(self.get, signed)

    async def get(self, signed: Signed) -> None:
        manifest = opened(signed)
        try:
            await self.versions.ensure(signed, self.fetcher)
        except BarnraiseError as error:
            self.errors.append(str(error))
            return
        self.gossiper.lists.hold(manifest)
        self.gossiper.lists.retain(self.versions.on_disk())
        self.prefetch.settled()
        self.done[manifest.version] = trio.current_time()

    def publish(self, version: int, size: int = 1024 * KIB, shard: int = 16 * KIB) -> Signed:
        signed = make_version(self.store, self.folder, version, size, shard)
        self.gossiper.lists.hold(opened(signed))
        self.gossiper.publish(signed, opened(signed))
        return signed

    def uploaded(self, version: int) -> int:
        """Bytes of a version sent down the tree."""
        return self.gossiper.lists.sent[version]

    def whole(self, signed: Signed) -> bool:
        manifest = opened(signed)
        return folder_matches(manifest, self.versions.path(manifest.version))


class Meadow:
    """Hosts that come and go in one memory network; "o" is the origin."""

    def __init__(self, folder: Path, nursery: trio.Nursery, latency_s: float) -> None:
        self.space = MemorySwarm(latency_s=latency_s)
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self._nursery = nursery
        self._scopes: dict[str, trio.CancelScope] = {}

    async def add(self, name: str, *, dialable: bool = True, **how: Any) -> Host:
        """Start a host; ``how`` are ``Host``'s settings. One that cannot be dialled knows it."""
        scope = self._scopes[name] = trio.CancelScope()

        async def live(task_status: Any) -> None:
            async with self.space.network(name, dialable=dialable) as network:
                host = Host(network, self.folder / name, self.hosts.get("o"), **how)
                if not dialable:
                    host.gossiper.announce(())
                self.hosts[name] = host
                with scope:
                    task_status.started(host)
                    await host.run()

        host: Host = await self._nursery.start(live)
        return host

    def crash(self, name: str) -> None:
        """The machine is gone, without a word."""
        self.space.crash(name)
        self._scopes[name].cancel()
        del self.hosts[name]

    async def leave(self, name: str) -> None:
        """The program ends in order."""
        self._scopes[name].cancel()
        await trio.sleep(2)
        del self.hosts[name]

    async def until_done(self, version: int, *names: str, limit: float = 300.0) -> float:
        """Wait until these hosts (all but the origin, if none is named) have ``version``."""
        start = trio.current_time()
        wanted = names or tuple(name for name in self.hosts if name != "o")
        while any(version not in self.hosts[name].done for name in wanted):
            missing = [name for name in wanted if version not in self.hosts[name].done]
            assert trio.current_time() < start + limit, f"{missing} lack version {version} after {limit} s"
            await trio.sleep(0.1)
        assert all(host.gossiper.defects == 0 for host in self.hosts.values())
        return max(self.hosts[name].done[version] for name in wanted) - start


@asynccontextmanager
async def meadow(folder: Path, *, latency_s: float = 0.02) -> AsyncIterator[Meadow]:
    async with trio.open_nursery() as nursery:
        yield Meadow(folder, nursery, latency_s)
        nursery.cancel_scope.cancel()

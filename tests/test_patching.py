"""Versions that travel as patches: what the publisher offers, what nodes make of it, and every way back."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import torch
import trio
from learner_support import make_model, run_spec
from safetensors.torch import load_file, save_file

from barnraise.coordinator import publisher
from barnraise.coordinator.patching import PatchPolicy, Previous, is_keyframe, link, patch_path
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.kernels.hot_swap import patch_weights, swap_tensors
from barnraise.kernels.models import ModelError, load_policy
from barnraise.kernels.patch_reader import read_header
from barnraise.kernels.patches import make_patch
from barnraise.node.patching import patches_since, plan
from barnraise.node.torch_engine import Generator
from barnraise.node.versions import Versions
from barnraise.node.weights import Source, SwarmFetcher
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.manifest import check_manifest, manifest_bytes, manifest_shards, patch_shards
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import SHARD_PROTOCOL, Manifest, PatchEntry, Signed
from barnraise.protocol.network import Network
from barnraise.protocol.shards import serve_shards
from barnraise.protocol.store import DiskStore
from barnraise.protocol.version_folder import folder_matches

OPERATOR = Identity.from_private_bytes(b"p" * 32)
RUN = b"r" * 32
CONFIG = b'{"hidden_size": 64}'
SHARD = 16 * 1024
WEIGHTS = "model.safetensors"

_plain = run_spec(model__parameters=200_000, model__weights_dtype="bfloat16")
SPEC = msgspec.structs.replace(
    _plain,
    operator=OPERATOR.public_key,
    model=msgspec.structs.replace(_plain.model, assets={"config.json": sha256(CONFIG).digest()}),
)


class Operator:
    """A run folder whose versions each change 1 % of one tensor in two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = DiskStore(folder / "store")
        self.signed: list[Signed] = []
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: (torch.randn(150, 200, generator=generator) * 0.05).bfloat16() for name in ("a", "b")
        }

    @property
    def manifests(self) -> list[Manifest]:
        return [msgspec.msgpack.decode(signed.payload, type=Manifest) for signed in self.signed]

    def publish(self, fraction: float = 0.01) -> Signed:
        version = len(self.signed)
        folder = checkpoint_folder(self.folder, version)
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(CONFIG)
        if version:
            bits = self.tensors["ab"[version % 2]].view(torch.int16)
            places = torch.randperm(bits.numel(), generator=torch.Generator().manual_seed(version))
            bits.view(-1)[places[: int(fraction * bits.numel())]] += 1
        save_file(self.tensors, folder / WEIGHTS, metadata={"format": "pt"})
        previous = None
        if self.signed:
            files = publisher.version_files(self.folder, SPEC, version - 1, self._weights(version - 1))
            previous = Previous(self.manifests[-1], files)
        signed, _ = publisher.publish(
            self.folder,
            SPEC,
            RUN,
            version,
            self._weights(version),
            self.store,
            lambda message: sign(message, OPERATOR),
            version,
            SHARD,
            previous,
        )
        self.signed.append(signed)
        return signed

    def replace(self, version: int, change: Callable[[Manifest], Manifest]) -> Signed:
        self.signed[version] = sign(change(self.manifests[version]), OPERATOR)
        return self.signed[version]

    def _weights(self, version: int) -> str:
        return str(checkpoint_folder(self.folder, version).relative_to(self.folder) / WEIGHTS)


class Host:
    """One machine that fetches versions and serves what it has."""

    def __init__(self, network: Network, folder: Path, store: DiskStore) -> None:
        self.network = network
        self.folder = folder
        self.store = store
        self.sources: list[Source] = []
        self.uploaded = 0
        self.open()
        network.set_handler(SHARD_PROTOCOL, serve_shards(store, sent=self._sent))
        self.fetcher = SwarmFetcher(network, store, lambda version: self.sources, rng=random.Random(1))

    def open(self) -> None:
        self.versions = Versions(self.folder / "versions", self.store, SPEC, RUN)

    def _sent(self, peer_id: str, size: int) -> None:
        self.uploaded += size

    def source(self, origin: bool = False) -> Source:
        return Source(self.network.peer_id, self.network.addresses, origin=origin)

    async def ensure(self, signed: Signed) -> Path:
        return await self.versions.ensure(signed, self.fetcher)


@asynccontextmanager
async def hosts(folder: Path, operator: Operator, *names: str) -> AsyncIterator[list[Host]]:
    """The coordinator, serving ``operator``'s store, and nodes that know it."""
    swarm = MemorySwarm(latency_s=0.01)
    async with AsyncExitStack() as stack:
        origin = Host(
            await stack.enter_async_context(swarm.network("origin")), folder / "origin", operator.store
        )
        found = [origin]
        for name in names:
            network = await stack.enter_async_context(swarm.network(name))
            host = Host(network, folder / name, DiskStore(folder / name / "store"))
            host.sources = [origin.source(origin=True)]
            found.append(host)
        yield found


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    made = Operator(tmp_path / "run")
    for _ in range(4):
        made.publish()
    return made


# --- what is offered


def test_every_version_but_the_first_offers_a_chain_of_patches(operator: Operator) -> None:
    chains = [[patch.base_version for patch in manifest.patches] for manifest in operator.manifests]
    assert chains == [[], [0], [0, 1], [0, 1, 2]]
    for signed, manifest in zip(operator.signed, operator.manifests, strict=True):
        assert check_manifest(signed, SPEC, RUN) == manifest
        assert sum(patch.size for patch in manifest.patches) < manifest_bytes(manifest) / 2
        for digest, size in (*manifest_shards(manifest), *patch_shards(manifest.patches, SHARD)):
            data = operator.store.get(digest)
            assert data is not None
            assert len(data) == size


def test_a_patch_of_most_of_the_weights_is_not_offered(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    rng = torch.Generator().manual_seed(9)
    operator.tensors["a"] = torch.randn(150, 200, generator=rng).bfloat16()
    operator.tensors["b"] = torch.randn(150, 200, generator=rng).bfloat16()
    operator.publish()
    assert operator.manifests[4].patches == ()
    assert not list(checkpoint_folder(operator.folder, 4).glob("*.patch"))
    operator.publish()  # and the chain begins again after it
    assert [patch.base_version for patch in operator.manifests[5].patches] == [4]


def test_what_cannot_be_patched_is_published_whole(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint_folder(operator.folder, 3) / WEIGHTS).write_bytes(b"damaged")
    size = operator.manifests[3].files[1].size
    assert size > 100
    operator.publish()
    assert operator.manifests[4].patches == ()
    assert "published without a patch" in caplog.text


def test_a_chain_reaches_as_far_back_as_its_files_do(operator: Operator) -> None:
    patch_path(operator.folder, 2, 1, WEIGHTS).unlink()
    operator.publish()
    assert [patch.base_version for patch in operator.manifests[4].patches] == [2, 3]


def test_a_chain_is_bounded_in_length_and_in_bytes() -> None:
    def patch(base: int) -> PatchEntry:
        return PatchEntry(path=WEIGHTS, base_version=base, size=10, sha256=bytes(32), shards=(bytes(32),))

    older = [patch(base) for base in range(20)]
    newest = patch(20)

    def bases(full: int, policy: PatchPolicy) -> list[int]:
        return [step.base_version for step in link(older, newest, full, policy)]

    assert bases(10_000, PatchPolicy(chain=4)) == [17, 18, 19, 20]
    assert bases(60, PatchPolicy(chain=4)) == [18, 19, 20]
    assert bases(20, PatchPolicy(chain=4)) == [20]
    assert [is_keyframe(v, PatchPolicy(keyframe_every=3)) for v in range(5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert not is_keyframe(6)


# --- what a manifest may say


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"path": "config.json"}, "none of its weight files"),
        ({"path": "other.safetensors"}, "none of its weight files"),
        ({"base_version": 3}, "not an earlier one"),
        ({"base_version": 7}, "not an earlier one"),
        ({"size": 0, "shards": ()}, "has 0 bytes"),
        (
            {"size": 10**9, "shards": (bytes(32),) * (-(-(10**9) // SHARD))},
            "two different sizes|has 1000000000",
        ),
        ({"shards": ()}, "must have 1 shards"),
    ],
)
def test_a_manifest_with_impossible_patches_is_refused(
    operator: Operator, change: dict[str, object], match: str
) -> None:
    manifest = operator.manifests[3]
    patches = (*manifest.patches[:-1], msgspec.structs.replace(manifest.patches[-1], **change))
    with pytest.raises(MalformedError, match=match):
        check_manifest(sign(msgspec.structs.replace(manifest, patches=patches), OPERATOR), SPEC, RUN)


def test_patches_come_in_order_and_once(operator: Operator) -> None:
    manifest = operator.manifests[3]
    for patches in (manifest.patches[::-1], manifest.patches + manifest.patches[-1:]):
        with pytest.raises(MalformedError, match="not in order"):
            check_manifest(sign(msgspec.structs.replace(manifest, patches=patches), OPERATOR), SPEC, RUN)


# --- what a node makes of it


async def test_a_node_with_the_version_before_fetches_the_patch_alone(
    tmp_path: Path, operator: Operator, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(tmp_path, operator, "ann") as (origin, ann):
        await ann.ensure(operator.signed[0])
        assert origin.uploaded == manifest_bytes(operator.manifests[0])
        seen: list[tuple[int, int]] = []
        for version in (1, 2, 3):
            before = origin.uploaded
            path = await ann.versions.ensure(
                operator.signed[version], ann.fetcher, lambda done, total: seen.append((done, total))
            )
            manifest = operator.manifests[version]
            assert folder_matches(manifest, path)
            assert origin.uploaded - before == manifest.patches[-1].size
            assert seen[-1] == (manifest.patches[-1].size,) * 2
            assert all(ann.store.get(digest) for digest, _ in manifest_shards(manifest))
        assert ann.store.used_bytes == 0
        assert not [path for path in (ann.folder / "versions").iterdir() if path.name.startswith(".")]


async def test_who_applied_a_patch_serves_the_whole_version_and_the_patch(
    tmp_path: Path, operator: Operator, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(tmp_path, operator, "ann", "ben", "cid") as (origin, ann, ben, cid):
        await ann.ensure(operator.signed[2])
        await cid.ensure(operator.signed[2])
        await ann.ensure(operator.signed[3])
        uploaded = origin.uploaded
        ben.sources = cid.sources = [ann.source()]
        await ben.ensure(operator.signed[3])
        assert ann.uploaded == manifest_bytes(operator.manifests[3])
        await cid.ensure(operator.signed[3])
        assert ann.uploaded == manifest_bytes(operator.manifests[3]) + operator.manifests[3].patches[-1].size
        assert origin.uploaded == uploaded
        for host in (ben, cid):
            assert folder_matches(operator.manifests[3], host.versions.path(3))


async def test_a_node_that_is_versions_behind_takes_the_chain(
    tmp_path: Path, operator: Operator, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(tmp_path, operator, "ann") as (origin, ann):
        await ann.ensure(operator.signed[0])
        before = origin.uploaded
        path = await ann.ensure(operator.signed[3])
        assert folder_matches(operator.manifests[3], path)
        assert origin.uploaded - before == sum(patch.size for patch in operator.manifests[3].patches)
        for base in range(3):
            found = patches_since(path, base)
            assert found is not None
            assert [read_header(step).target_sha256 for step in found[WEIGHTS]] == [
                entry.sha256 for manifest in operator.manifests[base + 1 :] for entry in manifest.files[1:]
            ]
        assert patches_since(path, 7) is None
        assert patches_since(ann.versions.path(0), 0) is None


async def test_the_newest_version_on_disk_is_patched(
    tmp_path: Path, operator: Operator, autojump_clock: trio.testing.MockClock
) -> None:
    held = {version: operator.manifests[version] for version in (0, 2)}
    manifest = operator.manifests[3]
    missing = dict(manifest_shards(manifest))
    (route,) = plan(manifest, held, missing)
    assert route.base_version == 2
    assert route.steps == manifest.patches[-1:]
    assert plan(manifest, {}, missing) == ()
    digest, size = next(iter(missing.items()))
    assert plan(manifest, held, {}) == ()  # nothing is missing
    assert plan(manifest, held, {digest: min(size, 10)}) == ()  # less than the patch
    await trio.lowlevel.checkpoint()


async def test_a_wrong_patch_costs_nothing_but_time(
    tmp_path: Path,
    operator: Operator,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = tmp_path / "wrong"
    folders = [checkpoint_folder(operator.folder, version) / WEIGHTS for version in range(4)]
    lies = [
        ((folders[0], folders[3]), "does not begin with version 2"),
        ((folders[2], folders[1]), "does not lead to the file"),
        (None, "cut short|decompressed|SHA-256|not a patch"),
    ]
    for pair, why in lies:
        if pair is None:
            data = bytearray(patch_path(operator.folder, 3, 2, WEIGHTS).read_bytes())
            data[-20] ^= 1
            wrong.write_bytes(data)
        else:
            make_patch(*pair, wrong)
        data = bytearray(wrong.read_bytes())
        digest = sha256(data).digest()
        operator.store.put(digest, bytes(data))
        entry = PatchEntry(path=WEIGHTS, base_version=2, size=len(data), sha256=digest, shards=(digest,))
        signed = sign(msgspec.structs.replace(operator.manifests[3], patches=(entry,)), OPERATOR)
        async with hosts(tmp_path / why[:12].replace("|", ""), operator, "ann") as (_, ann):
            await ann.ensure(operator.signed[2])
            caplog.clear()
            path = await ann.ensure(signed)
            assert folder_matches(operator.manifests[3], path)
            assert "is fetched whole" in caplog.text
            assert any(part in caplog.text for part in why.split("|"))
            assert not path.with_name("v000003.patches").exists()
            assert patches_since(path, 2) is None


async def test_a_patch_that_nobody_has_is_done_without(
    tmp_path: Path, operator: Operator, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(tmp_path, operator, "ann", "ben") as (_, ann, ben):
        await ann.ensure(operator.signed[2])
        await ben.ensure(operator.signed[3])  # whole: it holds no earlier version
        ann.sources = [ben.source()]
        with trio.fail_after(120):
            path = await _or_origin(ann, operator.signed[3])
        assert folder_matches(operator.manifests[3], path)


async def _or_origin(host: Host, signed: Signed) -> Path:
    """A peer alone, which lacks the patch; after a while the coordinator is known again, as in life."""
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(20)
            host.sources = [*host.sources, Source("origin", (), origin=True)]

        nursery.start_soon(later)
        path = await host.ensure(signed)
        nursery.cancel_scope.cancel()
    return path


async def test_a_damaged_base_is_noticed_and_not_built_upon(
    tmp_path: Path,
    operator: Operator,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with hosts(tmp_path, operator, "ann") as (_, ann):
        path = await ann.ensure(operator.signed[2])
        data = bytearray((path / WEIGHTS).read_bytes())
        data[5000] ^= 1
        (path / WEIGHTS).write_bytes(data)
        path = await ann.ensure(operator.signed[3])
        assert folder_matches(operator.manifests[3], path)
        assert "version 2 is damaged on disk" in caplog.text


async def test_patches_are_served_again_after_a_restart_and_go_with_their_version(
    tmp_path: Path, operator: Operator, autojump_clock: trio.testing.MockClock
) -> None:
    async with hosts(tmp_path, operator, "ann") as (_, ann):
        for version in (0, 1):
            await ann.ensure(operator.signed[version])
        patch = operator.manifests[1].patches[0]
        (ann.folder / "versions" / "v000009.patches").mkdir()  # of a version that never came
        (ann.folder / "versions" / ".v000009.part-x").mkdir()
        ann.store = DiskStore(ann.folder / "store")
        ann.open()
        assert all(ann.store.get(digest) for digest in patch.shards)
        ann.fetcher = SwarmFetcher(ann.network, ann.store, lambda version: ann.sources)
        for version in (2, 3):
            await ann.ensure(operator.signed[version])
        operator.publish()
        await ann.ensure(operator.signed[4])
        names = sorted(path.name for path in (ann.folder / "versions").iterdir() if path.is_dir())
        kept = [f"v{version:06d}" for version in (2, 3, 4)]
        assert names == sorted([*kept, *(f"{name}.patches" for name in kept)])
        assert not any(ann.store.has(digest) for digest in patch.shards)


# --- what an engine makes of it


def test_only_named_tensors_are_swapped(tmp_path: Path) -> None:
    make_model(tmp_path / "v0", seed=0)
    make_model(tmp_path / "v1", seed=1)
    policy = load_policy(tmp_path / "v0")
    old, new = load_file(tmp_path / "v0" / WEIGHTS), load_file(tmp_path / "v1" / WEIGHTS)
    names = sorted(name for name in old if not torch.equal(old[name], new[name]))[:3]
    assert swap_tensors(policy, tmp_path / "v1", names) == 3
    state = policy.model.state_dict()
    for name, tensor in old.items():
        assert torch.equal(state[name], new[name] if name in names else tensor)
    with pytest.raises(ModelError, match="does not hold nothing"):
        swap_tensors(policy, tmp_path / "v1", [*sorted(new), "nothing"])
    assert torch.equal(policy.model.state_dict()[names[0]], new[names[0]])


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_an_engine_follows_patches_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: str, compute: str
) -> None:
    spec = run_spec(model__compute_dtype=compute)
    folders = [tmp_path / f"v{version:06d}" for version in range(4)]
    make_model(folders[0], dtype=published)
    rng = torch.Generator().manual_seed(3)
    for version in range(1, 4):
        folder, before = folders[version], folders[version - 1]
        folder.mkdir()
        for path in before.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        tensors = load_file(folder / WEIGHTS)
        for name in sorted(tensors)[version : version + 4]:
            step = 10.0 ** -(version + 1) * torch.randn(tensors[name].shape, generator=rng)
            if version == 2:
                step *= torch.rand(step.shape, generator=rng) < 0.01
            tensors[name] = (tensors[name].float() + step).to(tensors[name].dtype)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        made = folder.with_name(f"{folder.name}.patches")
        made.mkdir()
        patch = made / f"from-v{version - 1:06d}.{WEIGHTS}.patch"
        assert make_patch(before / WEIGHTS, folder / WEIGHTS, patch)
    # version 3 was reached from version 1 by a chain
    step = folders[2].with_name("v000002.patches") / f"from-v000001.{WEIGHTS}.patch"
    (folders[3].with_name("v000003.patches") / step.name).write_bytes(step.read_bytes())

    engine = Generator("cpu")
    engine.load(spec, folders[0], 0)
    monkeypatch.setattr("barnraise.node.torch_engine.swap_weights", None)  # not needed any more
    for version in (1, 3):
        engine.load(spec, folders[version], version)
        assert engine._loaded is not None
        state = engine._loaded.policy.model.state_dict()
        fresh = load_policy(folders[version], compute).model.state_dict()
        assert all(torch.equal(state[name], fresh[name]) for name in fresh)


def test_parameters_that_lack_the_files_bits_are_swapped_whole(tmp_path: Path) -> None:
    make_model(tmp_path / "v0", dtype="float32")
    make_model(tmp_path / "v1", seed=1, dtype="float32")
    assert make_patch(tmp_path / "v0" / WEIGHTS, tmp_path / "v1" / WEIGHTS, tmp_path / "p")
    narrow, wide = (load_policy(tmp_path / "v0", compute) for compute in ("bfloat16", "float32"))
    assert not patch_weights(narrow, tmp_path / "v1" / WEIGHTS, [tmp_path / "p"])
    assert patch_weights(wide, tmp_path / "v1" / WEIGHTS, [tmp_path / "p"])
    new = load_policy(tmp_path / "v1").model.state_dict()
    assert all(torch.equal(tensor, new[name]) for name, tensor in wide.model.state_dict().items())

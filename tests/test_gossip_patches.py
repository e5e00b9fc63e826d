"""Patches in the broadcast tree: whoever has the version before takes the patch, a newcomer the files."""

from __future__ import annotations

from pathlib import Path

import torch
import trio
import trio.testing
from gossip_support import CONFIG, OPERATOR, RUN, SPEC, Host, meadow, opened
from safetensors.torch import save_file

from barnraise.coordinator import publisher
from barnraise.coordinator.patching import Previous
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.envelope import sign
from barnraise.protocol.manifest import manifest_bytes
from barnraise.protocol.messages import Signed
from barnraise.protocol.tree_index import lists_of, patches_list

WEIGHTS = "model.safetensors"


class Operator:
    """Publishes versions of which each differs from the one before in 1 % of its values."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.folder = host, folder
        self.signed: list[Signed] = []
        self.weights = torch.randn(400, 600, generator=torch.Generator().manual_seed(0)).bfloat16()

    def publish(self) -> Signed:
        version = len(self.signed)
        folder = checkpoint_folder(self.folder, version)
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(CONFIG)
        bits = self.weights.view(torch.int16).view(-1)
        bits[torch.randperm(bits.numel(), generator=torch.Generator().manual_seed(version))[:2400]] += 1
        save_file({"w": self.weights}, folder / WEIGHTS, metadata={"format": "pt"})
        previous = None
        if version:
            files = publisher.version_files(self.folder, SPEC, version - 1, self._place(version - 1))
            previous = Previous(opened(self.signed[-1]), files)
        signed, manifest = publisher.publish(
            *(self.folder, SPEC, RUN, version, self._place(version), self.host.store),
            *(lambda message: sign(message, OPERATOR), version, 16 * 1024, previous),
        )
        self.signed.append(signed)
        self.host.gossiper.lists.hold(manifest)
        self.host.gossiper.publish(signed, manifest)
        return signed

    def _place(self, version: int) -> str:
        return str(checkpoint_folder(self.folder, version).relative_to(self.folder) / WEIGHTS)


async def test_patches_come_down_the_tree_and_newcomers_get_the_files(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o")
        operator = Operator(origin, tmp_path / "run")
        names = [f"n{number}" for number in range(4)]
        for name in names:
            await field.add(name)
        await trio.sleep(10)
        operator.publish()
        await field.until_done(0, limit=30)
        for version in (1, 2):
            signed = operator.publish()
            await field.until_done(version, limit=30)
            manifest = opened(signed)
            patch = sum(size for _, size in lists_of(manifest)[patches_list(version)])
            assert patch * 20 < manifest_bytes(manifest)
            for name in names:
                host = field.hosts[name]
                assert host.whole(signed)
                assert host.gossiper.lists.received[version] == patch
                assert set(lists_of(manifest)) <= set(host.gossiper.lists.shards)  # serves both
        newcomer = await field.add("new")
        await field.until_done(2, "new", limit=60)
        assert newcomer.whole(signed)
        assert newcomer.gossiper.lists.received.total() >= manifest_bytes(manifest)
        back = await field.add("n9")
        await field.until_done(2, "n9", limit=60)
        await field.leave("n9")
        operator.publish()
        latest = operator.publish()
        await field.until_done(4, *names, limit=60)
        back = await field.add("n9")  # two steps behind
        await field.until_done(4, "n9", limit=60)
        assert back.whole(latest)
        assert back.network.bytes_in < manifest_bytes(manifest) / 4
        assert all(not host.errors for host in field.hosts.values())

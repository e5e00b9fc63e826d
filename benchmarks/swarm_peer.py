"""One process of the ``real`` broadcast: libp2p, a disk store and treecast, put together as in production.

Started by ``benchmarks.real`` with one JSON object as its argument. It prints one JSON
object a line: ``ready`` (its address), ``head``, ``shards`` (the last one is verified
and on the disk) and ``whole`` (the files are assembled and their digests checked);
times are of the machine's monotonic clock, which all processes share. On its standard
input it takes ``publish`` (an origin) and ``stats``; its end is the process's end.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import trio

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.origin import Origin
from barnraise.coordinator.presets import demo
from barnraise.node.broadcast import TreecastFetcher
from barnraise.node.versions import Versions
from barnraise.node.weights import Source, SwarmFetcher
from barnraise.protocol.bandwidth import Pacer
from barnraise.protocol.envelope import sign
from barnraise.protocol.gossip import Gossiper
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.manifest import WEIGHTS_FILE, build_manifest, check_manifest, entry_shards
from barnraise.protocol.messages import SHARD_PROTOCOL, Manifest, Signed
from barnraise.protocol.network import Network
from barnraise.protocol.paced_network import PacedNetwork
from barnraise.protocol.shards import serve_shards
from barnraise.protocol.spec import ModelSpec, RunSpec
from barnraise.protocol.store import DiskStore
from barnraise.protocol.tree_messages import Contact

OPERATOR = Identity.from_private_bytes(b"benchmark operator".ljust(32, b"."))
RUN = b"benchmark run".ljust(32, b".")
VERSION = 1


class Peer(msgspec.Struct, forbid_unknown_fields=True):
    """What the process is told. ``origin``: where the origin listens; empty in the origin itself.

    ``host`` is the IPv4 address to listen on, ``shard`` bytes, ``mebibytes`` the
    version's size, ``copies`` the origin's limit (0: none).
    """

    folder: str
    host: str
    seed: int
    mebibytes: int
    shard: int
    origin: str = ""
    copies: float = 0.0


def run_spec(mebibytes: int) -> RunSpec:
    """A run whose model may be as large as the version."""
    settings = demo()
    return RunSpec(
        format=1,
        name="benchmark",
        description="",
        operator=OPERATOR.public_key,
        created_at=0,
        phase="posttrain",
        seed=1,
        model=ModelSpec(
            name="random",
            parameters=mebibytes * 1024 * 1024 // 2,
            vocabulary=64,
            weights_dtype="bfloat16",
            compute_dtype="bfloat16",
            eos_token=0,
            assets={},
        ),
        environment=settings.environment,
        sampling=settings.sampling,
        rollout=settings.rollout,
        grpo=settings.grpo,
        verify=default_verify_spec("bfloat16"),
        evaluation=settings.evaluation,
        admission="open",
    )


def say(event: str, **more: Any) -> None:
    """Tell the benchmark."""
    print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)


async def be_origin(peer: Peer, network: Network) -> None:
    """Hold a version of random bytes; publish it when told to."""
    store = DiskStore(Path(peer.folder) / "store")
    spec = run_spec(peer.mebibytes)
    weights = Path(peer.folder) / WEIGHTS_FILE
    noise = random.Random(peer.seed)
    with weights.open("wb") as file:
        for _ in range(peer.mebibytes):
            file.write(noise.randbytes(1024 * 1024))
    manifest = build_manifest(RUN, VERSION, {WEIGHTS_FILE: weights}, peer.shard, 0, lambda digest, data: None)
    store.adopt(weights, entry_shards(manifest.files[0], manifest.shard_size))
    signed = sign(manifest, OPERATOR)
    origin = Origin(spec, RUN, network, store, noise, peer.copies)
    network.set_handler(SHARD_PROTOCOL, serve_shards(store))

    def publish() -> None:
        say("published")
        origin.publish(signed, manifest)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(origin.run)
        await take_orders(network, origin.gossiper, publish)
        nursery.cancel_scope.cancel()


async def be_node(peer: Peer, network: Network) -> None:
    """Fetch every version that the tree announces, and pass it on."""
    folder = Path(peer.folder)
    spec = run_spec(peer.mebibytes)
    store = DiskStore(folder / "store")
    versions = Versions(folder / "versions", store, spec, RUN)
    paced = PacedNetwork(network, Pacer(None), Pacer(None))
    rng = random.Random(peer.seed)
    origin = peer.origin.rsplit("/", 1)[1]
    heads, to_fetch = trio.open_memory_channel[Signed](8)

    def on_head(signed: Signed, manifest: Manifest) -> None:
        say("head")
        heads.send_nowait(signed)

    gossiper = Gossiper(
        paced,
        store,
        [Contact(peer_id=origin, addresses=(peer.origin,))],
        lambda head: check_manifest(head, spec, RUN),
        rng,
        on_head=on_head,
        on_report=lambda code, other, text: say("report", code=code, peer=other, text=text),
    )
    sources = [Source(origin, (peer.origin,), origin=True)]
    beside = SwarmFetcher(paced, store, lambda version: sources, down=paced.down, rng=rng)
    fetcher = TreecastFetcher(gossiper, beside)
    paced.set_handler(SHARD_PROTOCOL, serve_shards(store))

    async def fetch() -> None:
        async for signed in to_fetch:
            manifest = check_manifest(signed, spec, RUN)
            told = False

            def progress(done: int, total: int) -> None:
                nonlocal told
                if done == total and not told:
                    told = True
                    say("shards", tree=gossiper.lists.received[VERSION])

            await versions.ensure(signed, fetcher, progress)
            gossiper.lists.hold(manifest)
            say("whole")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(gossiper.run)
        nursery.start_soon(fetch)
        await take_orders(paced, gossiper, lambda: None)
        nursery.cancel_scope.cancel()


async def take_orders(network: Network, gossiper: Gossiper, publish: Any) -> None:
    """Obey standard input until it ends."""
    say("ready", addresses=list(network.addresses))
    async with trio.lowlevel.FdStream(os.dup(0)) as orders:
        text = b""
        async for part in orders:
            text += part
            *lines, text = text.split(b"\n")
            for line in lines:
                if line == b"publish":
                    publish()
                elif line == b"stats":
                    say("stats", **stats(network, gossiper))


def stats(network: Network, gossiper: Gossiper) -> dict[str, Any]:
    """What moved so far, and the processor time it took (seconds, this process)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    counts = gossiper.core.transfer.stats
    return {
        "neighbours": len(gossiper.core.views.active),
        "links": len(gossiper.links),
        "sent": gossiper.lists.sent[VERSION],
        "duplicates": counts.duplicates,
        "timeouts": counts.timeouts,
        "defects": gossiper.defects,
        "bytes_in": network.bytes_in,
        "bytes_out": network.bytes_out,
        "cpu_s": used.ru_utime + used.ru_stime,
        "rss_mib": used.ru_maxrss / 1024,
    }


async def live(peer: Peer) -> None:
    """Run to the end of standard input."""
    identity = Identity.from_private_bytes(random.Random(f"peer/{peer.seed}").randbytes(32))
    async with open_libp2p(identity, [f"/ip4/{peer.host}/tcp/0"]) as network:
        await (be_node(peer, network) if peer.origin else be_origin(peer, network))


def main() -> None:
    """The process."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    trio.run(live, msgspec.json.decode(sys.argv[1], type=Peer))


if __name__ == "__main__":
    main()

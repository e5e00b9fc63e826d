"""One hop of treecast on loopback, as a fraction of what py-libp2p's bare stream carries.

    python -m benchmarks.broadcast hop [--json] [--quick] [--mebibytes 256] [--repeats 5]

Two processes each time. ``stock``: py-libp2p's own host, Noise and yamux, one stream,
1 MiB writes, nothing done with the bytes. ``stream``: the same through this project's
network (its own yamux and limits). ``treecast``: an origin and a node as in production:
shards read from disk, hashed, sent in pieces, hashed again, stored, until the last one
is on the disk. The three take turns, so that each repeat compares like with like; keys:

hop_efficiency    treecast / stock, the median of the repeats' ratios
of_our_stream     treecast / stream, likewise
stream_of_stock   stream / stock, likewise
*_MBps            medians, 10^6 bytes a second
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.network import Stream

MIB = 1024 * 1024
PROTOCOL = "/barnraise-benchmark/1/bulk"
KINDS = ("stock", "stream", "treecast")
ROOT = Path(__file__).resolve().parent.parent


class Child:
    """A process that prints JSON lines and lives as long as its standard input."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def wait(self, event: str) -> dict[str, Any]:
        """The next line of this kind.

        Raises:
            RuntimeError: the process ended before.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found: dict[str, Any] = json.loads(line)
            if found["event"] == event:
                return found
        raise RuntimeError(f"a process of the benchmark ended without a line {event!r}; see its words above")

    def order(self, text: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Let it end, or kill it."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def carry(kind: str, mebibytes: int) -> float:
    """Bytes per second of one transfer of ``kind``."""
    return _treecast(mebibytes) if kind == "treecast" else _bare(kind, mebibytes)


def _bare(kind: str, mebibytes: int) -> float:
    sink = Child("benchmarks.hop", "--child", kind, "", str(mebibytes))
    try:
        address = sink.wait("ready")["address"]
        source = Child("benchmarks.hop", "--child", kind, address, str(mebibytes))
        try:
            took: float = sink.wait("done")["seconds"]
        finally:
            source.end()
    finally:
        sink.end()
    return mebibytes * MIB / took


def _treecast(mebibytes: int) -> float:
    folder = Path(tempfile.mkdtemp(prefix="barnraise-hop-"))
    children: list[Child] = []

    def start(name: str, seed: int, **more: str) -> Child:
        (folder / name).mkdir()
        settings = {"folder": str(folder / name), "host": "127.0.0.1", "seed": seed}
        child = Child(
            "benchmarks.swarm_peer",
            json.dumps({**settings, "mebibytes": mebibytes, "shard": 4 * MIB, **more}),
        )
        children.append(child)
        return child

    try:
        origin = start("origin", 1)
        node = start("node", 2, origin=origin.wait("ready")["addresses"][0])
        node.wait("ready")
        time.sleep(1)  # they link
        origin.order("publish")
        began = origin.wait("published")["at"]
        took: float = node.wait("shards")["at"] - began
        return mebibytes * MIB / took
    finally:
        for child in children:
            child.end()
        shutil.rmtree(folder, ignore_errors=True)


def _say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


async def _take(read: Any, total: int) -> None:
    """Count what comes; the clock starts with the first byte."""
    left = total
    began = 0.0
    while left:
        data = await read(256 * 1024)
        if not data:
            raise RuntimeError(f"the stream ended {left} bytes early")
        began = began or time.perf_counter()
        left -= len(data)
    _say("done", seconds=time.perf_counter() - began)


async def _give(write: Any, total: int) -> None:
    piece = os.urandom(MIB)
    for _ in range(total // MIB):
        await write(piece)
    await trio.sleep(30)  # until the parent ends us


async def _stock(address: str, total: int) -> None:
    keys = create_new_key_pair(os.urandom(32))
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
    host = new_host(key_pair=keys, sec_opt={NOISE: noise}, muxer_opt={TProtocol(YAMUX): Yamux})

    async def serve(stream: Any) -> None:
        await _take(stream.read, total)

    host.set_stream_handler(TProtocol(PROTOCOL), serve)
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        if address:
            info = info_from_p2p_addr(Multiaddr(address))
            await host.connect(info)
            stream = await host.new_stream(info.peer_id, [TProtocol(PROTOCOL)])
            await _give(stream.write, total)
        else:
            _say("ready", address=str(host.get_addrs()[0]))
            await _until_input_ends()


async def _stream(address: str, total: int) -> None:
    async with open_libp2p(Identity.from_private_bytes(os.urandom(32)), ["/ip4/127.0.0.1/tcp/0"]) as network:
        if address:
            stream = await network.open_stream(await network.connect(address), PROTOCOL)
            await _give(stream.write, total)
            return

        async def serve(stream: Stream) -> None:
            await _take(stream.read, total)

        network.set_handler(PROTOCOL, serve)
        _say("ready", address=network.addresses[0])
        await _until_input_ends()


async def _until_input_ends() -> None:
    async with trio.lowlevel.FdStream(os.dup(0)) as orders:
        while await orders.receive_some():
            pass


def child(kind: str, address: str, mebibytes: int) -> None:
    """One end of a bare transfer: the sink if ``address`` is empty, else the source."""
    run = _stock if kind == "stock" else _stream

    async def live() -> None:
        async with trio.open_nursery() as nursery:

            async def work() -> None:
                await run(address, mebibytes * MIB)

            nursery.start_soon(work)
            await _until_input_ends()
            nursery.cancel_scope.cancel()

    trio.run(live)


def measure(mebibytes: int, repeats: int) -> dict[str, Any]:
    """All kinds in turn, ``repeats`` times; see the module's docstring for the keys."""
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind in KINDS:
            rates[kind].append(carry(kind, mebibytes))

    def ratio(one: str, other: str) -> float:
        return round(median(a / b for a, b in zip(rates[one], rates[other], strict=True)), 3)

    return {
        "hop_efficiency": ratio("treecast", "stock"),
        "of_our_stream": ratio("treecast", "stream"),
        "stream_of_stock": ratio("stream", "stock"),
        **{f"{kind}_MBps": round(median(values) / 1e6, 1) for kind, values in rates.items()},
        "repeats_MBps": {kind: [round(rate / 1e6, 1) for rate in values] for kind, values in rates.items()},
        "conditions": (
            f"loopback, two processes, {os.cpu_count()} processors, {mebibytes} MiB in 4 MiB shards, "
            f"{repeats} repeats in turn"
        ),
    }


def main(arguments: list[str]) -> None:
    """Run, print a line each, or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks.broadcast hop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="8 MiB, once: does it still run?")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", nargs=3, metavar=("KIND", "ADDRESS", "MIB"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child[0], options.child[1], int(options.child[2]))
        return
    mebibytes, repeats = (8, 1) if options.quick else (options.mebibytes, options.repeats)
    report = measure(mebibytes, repeats)
    if options.json:
        json.dump(report, sys.stdout, indent=2)
        print()
        return
    for key, value in report.items():
        print(f"{key:>16}: {value}")


if __name__ == "__main__":
    main(sys.argv[1:])

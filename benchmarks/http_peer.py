"""One process of an HTTP broadcast: a static file server of shards, and a client as SHARDCAST has one.

What is taken from SHARDCAST (arXiv 2505.07291): numbered shard files, relays that fetch
them in order and serve each as soon as they have it, clients that choose a relay for
every shard with a probability proportional to success rate x bandwidth (moving averages,
alpha 0.3, healing 0.01 for those not chosen), ``PARALLEL`` downloads at a time, and one
digest of the whole at the end. Kinder than the original: polls every ``POLL_S`` instead of
5-30 s, failed downloads are not booked as fast, and everybody knows of the version at once.

Started by ``benchmarks.real`` with one JSON object as its argument; prints JSON lines
(``ready``, ``shards``, ``whole``) and ends with its standard input.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import queue
import random
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec

PARALLEL = 10
POLL_S = 0.5
ALPHA = 0.3
HEALING = 0.01
MIB = 1024 * 1024


class Peer(msgspec.Struct, forbid_unknown_fields=True):
    """What the process is told. ``upstream``: base URLs to fetch from (none: it is the origin).

    ``shard`` is in bytes.
    """

    folder: str
    host: str
    port: int
    seed: int
    mebibytes: int
    shard: int
    upstream: tuple[str, ...] = ()


class Relays:
    """Which relay to ask next. Thread-safe."""

    def __init__(self, urls: tuple[str, ...], rng: random.Random) -> None:
        self._success = dict.fromkeys(urls, 1.0)
        self._rate = dict.fromkeys(urls, 0.0)
        self._rng = rng
        self._lock = threading.Lock()

    def choose(self) -> str:
        """By success x bandwidth; those not yet measured count as the best measured."""
        with self._lock:
            most = max(self._rate.values()) or 1.0
            weights = [self._success[url] * (self._rate[url] or most) for url in self._success]
            return self._rng.choices(list(self._success), weights)[0]

    def note(self, url: str, rate: float | None) -> None:
        """A download's bytes per second; None: it failed."""
        with self._lock:
            good = 0.0 if rate is None else 1.0
            self._success[url] = max(0.01, (1 - ALPHA) * self._success[url] + ALPHA * good)
            if rate is not None:
                before = self._rate[url] or rate
                self._rate[url] = (1 - ALPHA) * before + ALPHA * rate
            for other in self._success:
                if other != url:
                    self._success[other] = min(1.0, self._success[other] + HEALING)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Static files on connections that stay open; nothing on the terminal."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    """One thread a connection."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is its own affair."""


def say(event: str, **more: Any) -> None:
    """Tell the benchmark."""
    print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)


def shard_name(index: int) -> str:
    """The file of one shard."""
    return f"shard_{index:05d}.bin"


def shards_of(peer: Peer) -> int:
    """How many shards there are."""
    return -(-peer.mebibytes * MIB // peer.shard)


def make(peer: Peer) -> None:
    """The origin's shards, of random bytes, all written before anything is served, and their digest."""
    noise = random.Random(peer.seed)
    whole = hashlib.sha256()
    left = peer.mebibytes * MIB
    for index in range(shards_of(peer)):
        data = noise.randbytes(min(left, peer.shard))
        left -= len(data)
        whole.update(data)
        (Path(peer.folder) / shard_name(index)).write_bytes(data)
    (Path(peer.folder) / "sha256").write_text(whole.hexdigest())


def fetch_all(peer: Peer) -> None:
    """Fetch every shard in order, ``PARALLEL`` at a time; what is here is served at once."""
    folder = Path(peer.folder)
    relays = Relays(peer.upstream, random.Random(peer.seed))
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(shards_of(peer)):
        pending.put(index)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with httpx.Client(timeout=httpx.Timeout(60), limits=limits, trust_env=False) as client:

        def work() -> None:
            while True:
                try:
                    index = pending.get_nowait()
                except queue.Empty:
                    return
                fetch(client, relays, folder, shard_name(index))

        with ThreadPoolExecutor(PARALLEL) as pool:
            for worker in [pool.submit(work) for _ in range(PARALLEL)]:
                worker.result()
        say("shards")
        fetch(client, relays, folder, "sha256")
    whole = hashlib.sha256()
    for index in range(shards_of(peer)):
        whole.update((folder / shard_name(index)).read_bytes())
    if whole.hexdigest() != (folder / "sha256").read_text():
        raise RuntimeError("the digest of the whole is wrong")
    say("whole")


def fetch(client: httpx.Client, relays: Relays, folder: Path, name: str) -> None:
    """One file, from whichever relay has it."""
    path = folder / name
    while True:
        url = relays.choose()
        began = time.monotonic()
        try:
            answer = client.get(f"{url}/{name}")
        except httpx.HTTPError:
            relays.note(url, None)
            time.sleep(POLL_S)
            continue
        if answer.status_code == 200:
            part = path.with_suffix(".part")
            part.write_bytes(answer.content)
            part.rename(path)
            relays.note(url, len(answer.content) / max(time.monotonic() - began, 1e-6))
            return
        time.sleep(POLL_S)  # not there yet


def main() -> None:
    """The process."""
    peer = msgspec.json.decode(sys.argv[1], type=Peer)
    if not peer.upstream:
        make(peer)
    handler = functools.partial(Quiet, directory=peer.folder)
    server = Server((peer.host, peer.port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say("ready", url=f"http://{peer.host}:{server.server_port}")
    for line in sys.stdin:
        if line == "fetch\n":
            threading.Thread(target=fetch_all, args=(peer,), daemon=True).start()
        elif line == "stats\n":
            used = resource.getrusage(resource.RUSAGE_SELF)
            say("stats", cpu_s=used.ru_utime + used.ru_stime, rss_mib=used.ru_maxrss / 1024)
    os._exit(0)  # threads may be in the middle of a download


if __name__ == "__main__":
    main()

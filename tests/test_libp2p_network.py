"""What py-libp2p would get wrong, on loopback: each test attacks, then a bystander is served."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from libp2p import new_host
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from barnraise.protocol import libp2p_inbound, yamux
from barnraise.protocol.errors import PeerError
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_inbound import MAX_HALF_OPEN_PER_ADDRESS
from barnraise.protocol.libp2p_log import quiet_libp2p
from barnraise.protocol.libp2p_network import Libp2pNetwork, open_libp2p
from barnraise.protocol.network import Stream
from barnraise.protocol.yamux import GuardedYamux

ECHO = "/test/1/echo"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


async def echo(stream: Stream) -> None:
    while data := await stream.read(65_536):
        await stream.write(data)


@asynccontextmanager
async def victim() -> AsyncIterator[Libp2pNetwork]:
    """A host that echoes, and that still serves a newcomer when the test is over."""
    async with open_libp2p(Identity.generate(), listen=("/ip4/0.0.0.0/tcp/0",)) as host:
        host.set_handler(ECHO, echo)
        yield host
        async with open_libp2p(Identity.generate(), listen=()) as bystander:
            with trio.fail_after(30):
                await bystander.connect(loopback(host))
                stream = await bystander.open_stream(host.peer_id, ECHO)
                await stream.write(b"hello")
                assert await stream.read(100) == b"hello"


def loopback(host: Libp2pNetwork) -> str:
    return next(address for address in host.addresses if "/127.0.0.1/" in address)


def port_of(host: Libp2pNetwork) -> int:
    return int(host.addresses[0].split("/")[4])


@asynccontextmanager
async def attacker(host: Libp2pNetwork) -> AsyncIterator[GuardedYamux]:
    """A raw multiplexed connection, past the Noise handshake."""
    async with open_libp2p(Identity.generate(), listen=()) as network:
        await network.connect(loopback(host))
        connection = network._connection(host.peer_id)
        assert connection is not None
        yield connection


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x04\xff\xfe\xfd\n",  # not UTF-8, where a protocol's name belongs
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # an endless varint
        b"\x13/multistream/1.0.0\n" + b"\xff\xff\xff\x7f",  # a name of 256 MiB
        b"\x13/multistream/1.0.0\n\x03\xc3\x28\n",
        b"",
    ],
)
async def test_rubbish_in_place_of_a_protocols_name_ends_its_stream_alone(rubbish: bytes) -> None:
    async with victim() as host, attacker(host) as connection:
        for _ in range(3):
            stream = await connection.open_stream()
            if rubbish:
                await stream.write(rubbish)
            await stream.close()
            with suppress(Exception), trio.move_on_after(1):
                while await stream.read(1000):
                    pass
        good = await connection.open_stream()
        await good.write(b"\x13/multistream/1.0.0\n")
        with trio.fail_after(30):
            assert b"/multistream/1.0.0" in await good.read(100)


async def test_an_unasked_400_mib_is_cut_off_and_costs_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    async def never_read(stream: Stream) -> None:
        await trio.sleep_forever()

    process = psutil.Process()
    async with victim() as host:
        host.set_handler("/test/1/deaf", never_read)
        async with open_libp2p(Identity.generate(), listen=()) as network:
            await network.connect(loopback(host))
            stream = await network.open_stream(host.peer_id, "/test/1/deaf")
            stream._stream.send_window = 1 << 40  # as a hostile peer would
            before = process.memory_info().rss
            piece = bytes(1024 * 1024)
            sent = 0
            with suppress(PeerError), trio.fail_after(60):
                while sent < 400:
                    await stream.write(piece)
                    sent += 1
            assert sent < 30  # what kernels buffer
            assert process.memory_info().rss - before < 64 * 1024 * 1024
            with trio.fail_after(30):
                while host.connected(network.peer_id):
                    await trio.sleep(0.01)
    assert "overran its receive window" in caplog.text


async def test_somebody_who_hangs_up_is_no_error_in_the_log(tmp_path: Path) -> None:
    file = logging.FileHandler(tmp_path / "node.log")
    file.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    program = logging.getLogger("barnraise")
    program.addHandler(file)
    try:
        quiet_libp2p()
        logging.getLogger("libp2p.network.swarm").error("fail to upgrade mux for peer %s", "x")
        logging.getLogger("libp2p.host").error("something else")
    finally:
        program.removeHandler(file)
        file.close()
    assert (tmp_path / "node.log").read_text().splitlines() == ["ERROR libp2p.host something else"]


async def test_idle_tcp_connections_do_not_keep_others_out() -> None:
    async with victim() as host:
        crowd = []
        for number in range(300):
            sock = socket.socket()
            sock.bind((f"127.0.0.{2 + number % 3}", 0))
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect(("127.0.0.1", port_of(host)))
            crowd.append(sock)
        await trio.sleep(0.3)
        assert host._inbound.half_open.total() <= 3 * MAX_HALF_OPEN_PER_ADDRESS
        began = time.monotonic()
        async with open_libp2p(Identity.generate(), listen=()) as newcomer:
            await newcomer.connect(loopback(host))
        assert time.monotonic() - began < 3
        for sock in crowd:
            sock.close()


async def test_a_connection_that_stays_half_open_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_inbound, "HANDSHAKE_TIMEOUT_S", 1.0)
    async with victim() as host:
        tcp = await trio.open_tcp_stream("127.0.0.1", port_of(host))
        await tcp.send_all(b"\x13/multistream/1.0.0\n")
        with trio.fail_after(30):
            with suppress(trio.BrokenResourceError):
                while await tcp.receive_some(1000):
                    pass
            while host._inbound.half_open:
                await trio.sleep(0.01)
        await tcp.aclose()


async def test_slots_come_back_when_connections_end() -> None:
    async with victim() as host:
        for _ in range(12):
            async with open_libp2p(Identity.generate(), listen=()) as network:
                await network.connect(loopback(host))
                await network.open_stream(host.peer_id, ECHO)
        with trio.fail_after(30):
            while host._inbound.open:
                await trio.sleep(0.01)
        assert not host._inbound.half_open
        assert not host._swarm.connections


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x04\xff\xfe\xfd\n", os.urandom(5000)])
async def test_rubbish_in_place_of_a_handshake_harms_nobody(first: bytes) -> None:
    async with victim() as host:
        for _ in range(5):
            tcp = await trio.open_tcp_stream("127.0.0.1", port_of(host))
            with suppress(trio.BrokenResourceError):
                await tcp.send_all(first)
            await tcp.aclose()


async def test_streams_that_are_opened_and_left_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "MAX_OUTBOUND_STREAMS", 10_000)
    async with victim() as host, attacker(host) as connection:
        for _ in range(600):
            stream = await connection.open_stream()
            await stream.write(b"\x13/multi")
        await trio.sleep(0.3)
        served = [muxed for conns in host._swarm.connections.values() for muxed in conns]
        assert sum(len(each.muxed_conn.streams) for each in served) <= yamux.MAX_INBOUND_STREAMS


async def test_a_port_in_use_is_named_with_the_cure() -> None:
    async with open_libp2p(Identity.generate(), listen=LOOPBACK) as host:
        port = port_of(host)
        with pytest.raises(PeerError, match=rf"port {port} is in use .* choose another port"):
            async with open_libp2p(Identity.generate(), listen=(f"/ip4/127.0.0.1/tcp/{port}",)):
                pass
        with pytest.raises(PeerError, match=rf"port {port} is in use"):
            async with open_libp2p(Identity.generate(), listen=(f"/ip4/0.0.0.0/tcp/{port}",)):
                pass


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "/ip4/127.0.0.1/udp/1",
        "/ip4/127.0.0.1/tcp/70000",
        "/ip4/127.0.0.1/tcp/99999999999999999999",
        "/ip4/192.0.2.1/tcp/0",
        "/ip4/x/tcp/0",
    ],
)
async def test_an_address_that_cannot_be_listened_on_is_refused(address: str) -> None:
    with pytest.raises(PeerError, match="cannot listen on"):
        async with open_libp2p(Identity.generate(), listen=(address,)):
            pass


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/127.0.0.1/tcp/0/p2p/{peer}",
        "/ip4/127.0.0.1/udp/4001/p2p/{peer}",
        "/ip4/999.0.0.1/tcp/4001/p2p/{peer}",
        "/ip6/127.0.0.1/tcp/4001/p2p/{peer}",
        "/ip4/127.0.0.1/tcp/4001/p2p/rubbish!",
        "/unix/127.0.0.1/tcp/4001/p2p/{peer}",
    ],
)
async def test_an_address_that_cannot_be_dialled_is_explained(address: str) -> None:
    async with open_libp2p(Identity.generate(), listen=()) as host:
        with pytest.raises(PeerError, match="looks like /ip4/"):
            await host.connect(address.format(peer=Identity.generate().peer_id))


async def test_wildcard_addresses_are_replaced_by_ones_that_can_be_dialled() -> None:
    async with (
        open_libp2p(Identity.generate(), listen=("/ip4/0.0.0.0/tcp/0",)) as host,
        open_libp2p(Identity.generate(), listen=()) as client,
    ):
        assert host.addresses[0].startswith("/ip4/127.0.0.1/tcp/")
        assert not any("0.0.0.0" in address for address in host.addresses)
        for address in host.addresses:
            assert await client.connect(address) == host.peer_id


async def test_a_peer_is_found_again_at_its_other_address() -> None:
    keys = Identity.generate()
    async with open_libp2p(Identity.generate(), listen=()) as client:
        async with open_libp2p(keys, listen=(*LOOPBACK, *LOOPBACK)) as host:
            first, second = host.addresses
            await client.connect(first)
            connection = client._connection(host.peer_id)
            assert connection is not None
            await connection.close()
            await client.connect(second)
        with trio.fail_after(30):
            while client.connected(keys.peer_id):
                await trio.sleep(0.01)
        port = first.split("/")[4]
        async with open_libp2p(keys, listen=(f"/ip4/127.0.0.1/tcp/{port}",)) as host:
            host.set_handler(ECHO, echo)
            stream = await client.open_stream(keys.peer_id, ECHO)  # the newer address fails first
            await stream.write(b"found")
            assert await stream.read(10) == b"found"


async def test_a_dial_is_quick_and_an_unreachable_peer_is_not_blocked_afterwards() -> None:
    keys = Identity.generate()
    async with open_libp2p(Identity.generate(), listen=()) as client:
        async with open_libp2p(keys, listen=LOOPBACK) as host:
            address = host.addresses[0]
        with pytest.raises(PeerError, match=rf"cannot connect to \S+: {os.strerror(errno.ECONNREFUSED)}$"):
            await client.connect(address)
        port = address.split("/")[4]
        async with open_libp2p(keys, listen=(f"/ip4/127.0.0.1/tcp/{port}",)):
            await client.connect(address)
            taken = []
            for _ in range(5):  # the quickest: a busy machine stops for longer at any moment
                async with open_libp2p(Identity.generate(), listen=()) as another:
                    began = time.monotonic()
                    await another.connect(address)
                    taken.append(time.monotonic() - began)
            assert min(taken) < 0.2


async def test_cancelling_a_host_is_prompt_and_its_peers_notice() -> None:
    async with victim() as host, open_libp2p(Identity.generate(), listen=()) as client:
        await client.connect(loopback(host))
        began = time.monotonic()
        with trio.move_on_after(0.1):
            async with open_libp2p(Identity.generate(), listen=()) as other:
                await other.connect(loopback(host))
                await other.open_stream(host.peer_id, ECHO)
                await trio.sleep_forever()
        assert time.monotonic() - began < 3
        with trio.fail_after(30):
            while len(host._swarm.connections) > 1:
                await trio.sleep(0.01)


async def test_leaving_with_many_connections_is_quick() -> None:
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(open_libp2p(Identity.generate(), listen=())) for _ in range(25)
        ]
        async with open_libp2p(Identity.generate(), listen=LOOPBACK) as host:
            for client in clients:
                await client.connect(host.addresses[0])
            began = time.monotonic()
        assert time.monotonic() - began < 2


async def answer_once(stream: Any) -> None:
    await stream.write(await stream.read(100))
    await stream.close()


async def test_an_unguarded_libp2p_host_understands_us_both_ways() -> None:
    async with open_libp2p(Identity.generate(), listen=LOOPBACK) as host:
        host.set_handler(ECHO, echo)
        other = new_host()
        async with other.run(listen_addrs=[]):
            await other.connect(info_from_p2p_addr(Multiaddr(host.addresses[0])))
            stream = await other.new_stream(ID.from_string(host.peer_id), [TProtocol(ECHO)])
            data = os.urandom(2_000_000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, data)
                got = bytearray()
                with trio.fail_after(60):
                    while len(got) < len(data):
                        got += await stream.read(65_536)
            assert got == data
            await stream.close()
            other.set_stream_handler(TProtocol("/test/1/theirs"), answer_once)
            answer = await host.open_stream(str(other.get_id()), "/test/1/theirs")
            await answer.write(b"the other way")
            assert await answer.read(100) == b"the other way"
            await answer.close()
            with trio.CancelScope(shield=True):
                await other.close()


NOISY = """
import logging, sys, trio
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_network import open_libp2p
async def main():
    async with open_libp2p(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) as host:
        logging.getLogger("libp2p.host").warning("a warning of theirs")
        async with open_libp2p(Identity.generate(), listen=()) as client:
            await client.connect(host.addresses[0])
            stream = await client._connection(host.peer_id).open_stream()
            await stream.write(b"\\x04\\xff\\xfe\\xfd\\n")
            await trio.sleep(0.1)
        tcp = await trio.open_tcp_stream("127.0.0.1", int(host.addresses[0].split("/")[4]))
        await tcp.send_all(b"rubbish" * 100)
        await tcp.aclose()
        await trio.sleep(0.1)
if len(sys.argv) > 1:
    logging.basicConfig(filename=sys.argv[1])
trio.run(main)
"""


def test_libp2ps_log_goes_to_the_log_file_and_never_to_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for arguments in ([], [str(log)]):
        done = subprocess.run([sys.executable, "-c", NOISY, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    assert "a warning of theirs" in log.read_text()
    assert logging.lastResort is not None

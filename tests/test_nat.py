"""Behind home routers (R1): namespaces with real address translation, real processes, real TCP."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Place, barnraise, environment, place
from netns_support import Internet, Namespace, Router, internet, missing

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(missing()), reason=missing())]

PORT = 4001


@pytest.fixture
def net() -> Iterator[Internet]:
    with internet() as made:
        yield made


class Wide:
    """A run whose processes live on machines of their own."""

    def __init__(self, here: Place) -> None:
        self.here = here

    def start(self, machine: Namespace, name: str, *arguments: str) -> subprocess.Popen[Any]:
        log = (self.here.folder / f"{name}.log").open("ab")
        with log:
            process = machine.start(
                barnraise(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
            )
        self.here.processes[name] = process
        return process

    def coordinator(self, machine: Namespace, *more: str) -> str:
        listen = f"/ip4/0.0.0.0/tcp/{PORT}"
        self.start(
            machine, "coordinator", "coordinator", "run", str(self.here.run), "--listen", listen, *more
        )
        state = self.here.wait(self.here.run, lambda state: bool(state.get("address")))
        return f"/ip4/{machine.address}/tcp/{PORT}/p2p/{str(state['address']).rpartition('/')[2]}"

    def node(self, machine: Namespace, name: str, address: str, *more: str) -> Path:
        home = self.here.folder / name
        key = ("--key", str(home / "node.key"))
        options = ("--yes", "--name", name, "--data", str(home), *key, "--threads", "1", *more)
        self.start(machine, name, "join", address, *options)
        return home


def seen(kind: str) -> Callable[[dict[str, Any]], bool]:
    return lambda state: (state.get("reach") or {}).get("kind") == kind


def given(state: dict[str, Any]) -> int:
    """Bytes of shards that a node has sent to others down the tree."""
    tree = state.get("tree") or {}
    return sum(version["bytes_out"] for version in tree.get("versions", []))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_volunteers_behind_routers_fetch_work_and_serve_and_say_how_they_are_reached(
    net: Internet, tmp_path: Path
) -> None:
    """The commands a person would type, on two machines that nobody can dial."""
    public = net.host("public")
    routers = [net.router("r1"), net.router("r2")]
    homes = [router.host(f"h{number}") for number, router in enumerate(routers)]
    with place(tmp_path, versions=2) as here:
        wide = Wide(here)
        address = wide.coordinator(public, "--upload-copies", "1")
        one = wide.node(homes[0], "one", address)
        two = wide.node(homes[1], "two", address)
        for home, router in zip((one, two), routers, strict=True):
            state = here.wait(home, lambda state: not seen("unknown")(state))
            assert f"behind NAT (seen at {router.address})" in state["reach"]["cure"]
            assert "did not answer" in state["reach"]["reason"]
        # Each router lets nobody in, and each of the two is a neighbour of the other all the same.
        here.wait(
            one,
            lambda state: any(
                link["way"] == "hole-punched" for link in (state.get("tree") or {}).get("neighbours", [])
            ),
        )
        here.wait(one, seen("hole-punched"))
        here.wait(here.run, lambda state: any(node["reach"] == "hole-punched" for node in state["nodes"]))
        # The origin sends one copy of a version for the two of them, so what one gets the other gets from it.
        here.wait(here.run, lambda state: given(here.state(one)) + given(here.state(two)) > 0)
        for home in (one, two):
            here.wait(home, lambda state: state.get("accepted", 0) >= 1)
        shown = subprocess.run(
            barnraise("swarm", str(here.run)), capture_output=True, text=True, env=environment(), check=True
        ).stdout
        assert "hole-punched" in shown
        shown = subprocess.run(
            barnraise("status", str(one)), capture_output=True, text=True, env=environment(), check=True
        ).stdout
        assert "reachable" in shown


DRIVER = """
import sys, trio
from barnraise.protocol import circuit
from barnraise.protocol.errors import PeerError
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.reach_messages import REACH_PROTOCOL
from barnraise.protocol.reachability import ask_reach, judge, serve_reach
from barnraise.protocol.relay import LimitSpec, Relay, bulk
from barnraise.protocol.relay_wire import HOP_PROTOCOL

role, mode, where = sys.argv[1:4]
if mode in ("bulk", "signal-lost"):
    circuit.PUNCH_S = 1.5  # nobody gets through there, however long it is tried
who = {name: Identity.from_private_bytes(name.encode() * 32) for name in "rab"}

async def echo(stream):
    while data := await stream.read(65_536):
        await stream.write(data)

async def main():
    async with open_libp2p(who[role], ("/ip4/0.0.0.0/tcp/4001",), circuits=role != "r") as net:
        net.set_handler("/echo", echo)
        if role == "r":
            relay = Relay(net, bulk(5e6) if mode == "bulk" else LimitSpec())
            net.set_handler(HOP_PROTOCOL, relay.serve)
            net.set_handler(REACH_PROTOCOL, serve_reach(net))
            print("ready", flush=True)
            await trio.sleep_forever()
        address = f"/ip4/{where}/tcp/4001/p2p/{who['r'].peer_id}"
        relay = await net.connect(address)
        await net.circuits.reserve(relay)
        print("ready", flush=True)
        if mode == "ask":
            print(judge(net.addresses, await ask_reach(net, relay)).line, flush=True)
            await trio.to_thread.run_sync(sys.stdin.readline)
            while net.connected(relay):
                await trio.sleep(0.1)
            await net.connect(address)
            stream = await net.open_stream(relay, "/echo")
            await stream.write(b"back")
            print((await stream.read(4)).decode(), flush=True)
        if mode == "crossed":
            await trio.to_thread.run_sync(sys.stdin.readline)
        if role == "b":
            if mode == "crossed":
                await net.connect(f"{address}/p2p-circuit/p2p/{who['a'].peer_id}")
            await trio.sleep_forever()
        try:
            peer = await net.connect(f"{address}/p2p-circuit/p2p/{who['b'].peer_id}")
            stream = await net.open_stream(peer, "/echo")
            left = 1_000_000
            while left:
                await stream.write(b"x" * 50_000)
                got = 0
                while got < 50_000:
                    data = await stream.read(50_000)
                    if not data:
                        raise PeerError("the stream ended")
                    got += len(data)
                left -= 50_000
            print(net.way(peer), flush=True)
        except PeerError as error:
            print(f"failed: {error}", flush=True)

trio.run(main)
"""


def meet(net: Internet, kinds: tuple[Any, Any], mode: str) -> str:
    """How A reaches B through a public relay, each behind a router of its kind."""
    public = net.host("public")
    a, b = (net.router(f"r{n}", kind).host(f"h{n}") for n, kind in enumerate(kinds))
    processes = []
    for role, machine in (("r", public), ("b", b), ("a", a)):
        process = machine.start(
            [sys.executable, "-P", "-c", DRIVER, role, mode, public.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        processes.append(process)
        assert process.stdout.readline() == b"ready\n"
    if mode == "crossed":  # only now: who calls a node without a place at the relay uses up its own calls
        for process in processes[1:]:
            process.stdin.write(b"\n")
            process.stdin.flush()
    answer: bytes = processes[-1].stdout.readline()
    close(processes)
    return answer.decode().strip()


def test_a_hole_is_punched_between_two_home_routers(net: Internet) -> None:
    assert meet(net, ("cone", "cone"), "signal") == "hole-punched"


def test_two_that_call_each_other_at_once_meet_all_the_same(net: Internet) -> None:
    assert meet(net, ("cone", "cone"), "crossed") == "hole-punched"


def test_behind_a_symmetric_router_the_relay_carries_the_bytes_if_it_lends_itself(net: Internet) -> None:
    assert meet(net, ("cone", "symmetric"), "bulk") == "relayed"


def test_behind_a_symmetric_router_a_relay_that_only_arranges_punches_says_so(net: Internet) -> None:
    answer = meet(net, ("symmetric", "cone"), "signal-lost")
    assert answer.startswith("failed: no hole could be punched")
    assert "the relay carries nothing else" in answer


def behind_a_forwarded_port(net: Internet) -> tuple[Router, list[subprocess.Popen[Any]]]:
    """A router that forwards a port, the public server and the node behind the router, both ready."""
    public, router = net.host("public"), net.router("r1")
    home = router.host("home")
    router.forward(PORT, home)
    processes = []
    for role, machine in (("r", public), ("a", home)):
        process = machine.start(
            [sys.executable, "-P", "-c", DRIVER, role, "ask", public.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        processes.append(process)
        assert process.stdout.readline() == b"ready\n"
    return router, processes


def close(processes: list[subprocess.Popen[Any]]) -> None:
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def test_a_forwarded_port_is_found(net: Internet) -> None:
    router, processes = behind_a_forwarded_port(net)
    line = processes[-1].stdout.readline().decode()
    assert line.startswith(f"direct: dialled at /ip4/{router.address}/tcp/{PORT}/p2p/")
    close(processes)


@pytest.mark.long
def test_a_router_that_forgets_costs_a_reconnection(net: Internet) -> None:
    router, processes = behind_a_forwarded_port(net)
    node = processes[-1]
    assert node.stdout.readline().startswith(b"direct: ")
    router.forget()
    node.stdin.write(b"\n")
    node.stdin.flush()
    assert node.stdout.readline() == b"back\n"  # the dead connection is noticed within 45 s
    close(processes)

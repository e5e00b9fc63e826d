"""A small internet inside this machine: network namespaces, a switch, and routers that translate addresses.

    with internet() as net:
        server = net.host("server")                  # public, 198.51.100.x
        home = net.router("home")                    # a home router: NAT, drops what comes unasked
        laptop = home.host("laptop")
        process = laptop.start(["python", "-m", "..."])

Needs root, ``ip`` (iproute2) and ``nft`` (nftables); ``missing()`` says what is not there.
No delay is added (not every kernel has ``netem``): round trips are far below a millisecond.
``benchmarks.netns`` has shaped links without routers.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

PUBLIC = "198.51.100"  # TEST-NET-2 (RFC 5737): nothing of it exists outside
Kind = Literal["cone", "symmetric"]
_NUMBERS = itertools.count()


def missing() -> str:
    """Why there can be no such internet here, or ``""``."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            return f"{program} is not installed (package {package})"
    name = f"brn{os.getpid():x}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    table = ["ip", "netns", "exec", name, "nft", "-f", "-"]
    rules = "table ip nat {\nchain c {\ntype nat hook postrouting priority 100; masquerade\n}\n}\n"
    ruled = subprocess.run(table, input=rules, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "" if ruled.returncode == 0 else f"no address translation here: {ruled.stderr.strip()[:200]}"


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclass
class Namespace:
    """One machine. ``address`` is its IPv4 address; ``processes`` those that ``start`` began."""

    name: str
    address: str = ""
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` such that it runs here (the process id is the command's own)."""
        return ["ip", "netns", "exec", self.name, *argv]

    def start(self, argv: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a process here; it is ended with the internet."""
        process: subprocess.Popen[Any] = subprocess.Popen(self.command(argv), **how)
        self.processes.append(process)
        return process

    def run(self, *argv: str, text: str | None = None) -> str:
        """Run a command to its end and return its output; OSError if it fails."""
        return _run(*self.command(argv), text=text)


@dataclass
class Router(Namespace):
    """A home router: one public address for all hosts behind it."""

    net: "Internet | None" = None
    subnet: str = ""
    hosts: list[Namespace] = field(default_factory=list)

    def host(self, label: str) -> Namespace:
        """A private host behind this router."""
        assert self.net is not None
        host: Namespace = self.net._make(Namespace, label)
        number = len(self.hosts) + 2
        host.address = f"{self.subnet}.{number}"
        self.net._wire(self, f"lan{number}", "lan", host, f"{self.subnet}.1")
        self.hosts.append(host)
        return host

    def forward(self, port: int, host: Namespace) -> None:
        """Forward a TCP port of the public address to the same port of ``host``."""
        dnat = f"iif eth0 tcp dport {port} dnat to {host.address}"
        self.run("nft", "add", "rule", "ip", "nat", "prerouting", *dnat.split())
        self.run("nft", "insert", "rule", "ip", "filter", "forward", *f"tcp dport {port} accept".split())

    def forget(self) -> None:
        """Lose all translations, as a router that restarts does: open connections go silent."""
        self.run("ip", "link", "set", "eth0", "down")  # masquerading is forgotten with its device
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "replace", "default", "via", f"{PUBLIC}.1")


@dataclass
class Internet:
    """The switch that public hosts and routers are plugged into."""

    prefix: str
    switch: Namespace
    made: list[Namespace] = field(default_factory=list)
    routers: int = 0
    _plugged: int = 1  # public addresses given away; .1 is the switch itself

    def host(self, label: str) -> Namespace:
        """A public host."""
        host: Namespace = self._make(Namespace, label)
        self._plug(host)
        return host

    def router(self, label: str, kind: Kind = "cone") -> Router:
        """A router with NAT that drops what comes unasked.

        ``cone`` keeps the source port where it can, towards everybody (RFC 4787: endpoint-
        independent mapping, address- and port-dependent filtering); ``symmetric`` takes a
        random port for each connection.
        """
        router: Router = self._make(Router, label)
        router.net = self
        self._plug(router)
        self.routers += 1
        router.subnet = f"10.77.{self.routers}"
        router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        router.run("ip", "link", "add", "lan", "type", "bridge")
        router.run("ip", "address", "add", f"{router.subnet}.1/24", "dev", "lan")
        router.run("ip", "link", "set", "lan", "up")
        how = "masquerade fully-random" if kind == "symmetric" else "masquerade"
        rules = f"""
            table ip nat {{
                chain prerouting {{ type nat hook prerouting priority -100; }}
                chain postrouting {{ type nat hook postrouting priority 100; oif "eth0" {how}; }}
            }}
            table ip filter {{
                chain input {{
                    type filter hook input priority 0; iif "eth0" ct state new,invalid drop;
                }}
                chain forward {{
                    type filter hook forward priority 0; ct state invalid drop; iif "eth0" ct state new drop;
                }}
            }}"""
        router.run("nft", "-f", "-", text=rules)
        # A connection whose translation was lost is not picked up again in the middle.
        router.run("sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_loose=0")
        return router

    def _make(self, kind: type[Any], label: str) -> Any:
        namespace = kind(f"{self.prefix}-{label}")
        _run("ip", "netns", "add", namespace.name)
        self.made.append(namespace)
        namespace.run("ip", "link", "set", "lo", "up")
        return namespace

    def _plug(self, host: Namespace) -> None:
        self._plugged += 1
        host.address = f"{PUBLIC}.{self._plugged}"
        self._wire(self.switch, f"port{self._plugged}", "br0", host, f"{PUBLIC}.1")

    def _wire(self, hub: Namespace, port: str, bridge: str, host: Namespace, gateway: str) -> None:
        ends = ["eth0", "netns", host.name, "type", "veth", "peer", port, "netns", hub.name]
        _run("ip", "link", "add", *ends)
        hub.run("ip", "link", "set", port, "master", bridge, "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "route", "add", "default", "via", gateway)

    def close(self) -> None:
        """End the processes that ``start`` began and remove every namespace; never raises."""
        processes = [process for namespace in self.made for process in namespace.processes]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for namespace in reversed(self.made):
            with suppress(OSError):
                _run("ip", "netns", "del", namespace.name)


@contextmanager
def internet() -> Iterator[Internet]:
    """An empty internet; everything in it is removed at the end, also after a failure.

    Names hold the process id and a number: tests of several processes never meet.
    """
    prefix = f"brn{os.getpid():x}-{next(_NUMBERS)}"
    net = Internet(prefix, Namespace(f"{prefix}-switch"))
    try:
        _run("ip", "netns", "add", net.switch.name)
        net.made.append(net.switch)
        net.switch.run("ip", "link", "add", "br0", "type", "bridge")
        net.switch.run("ip", "address", "add", f"{PUBLIC}.1/24", "dev", "br0")
        net.switch.run("ip", "link", "set", "br0", "up")
        yield net
    finally:
        net.close()

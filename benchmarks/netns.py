"""Machines for a benchmark or a test: network namespaces on one bridge, with shaped links. Linux, as root.

Each host is a namespace with one interface; what it sends and what it receives passes a
token bucket (``tc tbf``). No delay is added: ``netem`` is missing in many kernels, and
what a round trip takes here is the bucket's own queue, up to ``QUEUE_MS`` under load.

Names begin with ``brb<pid>``: a laboratory removes its namespaces and the processes it
started in them when it closes, and those of laboratories whose process is gone when it opens.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

QUEUE_MS = 50
_NAME = re.compile(r"brb(\d+)-")
_LEAST_BURST = 128 * 1024  # bytes: two full segments as the kernel hands them down


class Shape(NamedTuple):
    """A link, in Mb/s (10^6 bits, headers of Ethernet, IP and TCP included). None: not shaped."""

    up: float | None
    down: float | None


class Lab:
    """Hosts by name; made by ``open_lab``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"brb{os.getpid()}-"
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._started: list[subprocess.Popen[str]] = []

    def namespace(self, host: str) -> str:
        """What ``ip netns`` calls it."""
        return self._prefix + host

    def address(self, host: str) -> str:
        """Its IPv4 address, the same for all others."""
        return f"10.77.{self._numbers[host] // 250}.{self._numbers[host] % 250 + 1}"

    def start(self, host: str, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Start a process on ``host`` with pipes for stdin and stdout; ``more`` goes to ``Popen``."""
        process: subprocess.Popen[str] = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **more,
        )
        self._started.append(process)
        return process

    def kill_all(self) -> None:
        """End every process that was started, at once, and wait for it."""
        for process in self._started:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                _close(pipe)
        self._started.clear()

    def build(self, shapes: Mapping[str, Shape]) -> None:
        """Make the namespaces, the bridge and the links."""
        switch = self.namespace("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for host, shape in shapes.items():
            name, port = self.namespace(host), f"p{self._numbers[host]}"
            _run("ip", "netns", "add", name)
            _run(
                "ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/16", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _shape(name, "eth0", shape.up)
            _shape(switch, port, shape.down)

    def remove(self) -> None:
        """Delete what ``build`` made, as far as it came."""
        _remove(lambda name: name.startswith(self._prefix))


@contextmanager
def open_lab(shapes: Mapping[str, Shape]) -> Iterator[Lab]:
    """Hosts with links as in ``shapes``; whatever happens, they and their processes are gone at the end.

    Raises:
        RuntimeError: not root, no ``ip`` or ``tc``, or the kernel refused (its own words).
    """
    missing = why_not()
    if missing:
        raise RuntimeError(missing)
    _remove(_is_leftover)
    lab = Lab(["switch", *shapes])
    try:
        lab.build(shapes)
        yield lab
    finally:
        lab.kill_all()
        lab.remove()


def why_not() -> str:
    """Why there can be no laboratory here; empty if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need the program {tool} (package iproute2)"
    probe = f"brb{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return ""


def _shape(namespace: str, device: str, megabits: float | None) -> None:
    if megabits is None:
        return
    burst = max(_LEAST_BURST, int(megabits * 1e6 / 8 * 0.004))
    _run(
        *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
        *("rate", f"{megabits:g}mbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"),
    )


def _is_leftover(name: str) -> bool:
    match = _NAME.match(name)
    return match is not None and not os.path.exists(f"/proc/{match[1]}")


def _remove(which: Any) -> None:
    """Delete namespaces by name; a process that is still in one of them was started there by us."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in [line.split()[0] for line in listed.splitlines() if line.strip()]:
        if not which(name):
            continue
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in inside.stdout.split():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        with suppress(OSError):
            pipe.close()

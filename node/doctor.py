"""What this machine can do for a run, and why what it has is not used (R11).

Facts are gathered and then judged (``judge_*``, pure, so that every combination can be tested
on a machine that has none of it): the processor and memory in ``barnraise.node.processor``,
GPUs in ``barnraise.node.devices`` and ``barnraise.node.gpus``, the disk in
``barnraise.node.storage``, the network in ``barnraise.node.network_check``, the engine in
``barnraise.node.bench``. Nothing is changed, downloaded or joined. Running without a GPU is a
clear state, not a failure.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import trio

from barnraise.node import processor, storage
from barnraise.node.bench import Measured
from barnraise.node.devices import Signs, TorchFacts, look_for_signs
from barnraise.node.engine_choice import Vllm, choose, find_vllm
from barnraise.node.findings import Finding
from barnraise.node.gpus import find_gpus, judge_devices
from barnraise.node.probe_child import Prober, open_prober
from barnraise.protocol.errors import ChildError, KeyFileError
from barnraise.protocol.identity import load_identity

MIN_PYTHON = (3, 11)
EARLIEST_S = 1_735_689_600  # 2025-01-01: an earlier clock lost its battery
LATEST_S = 4_102_444_800  # 2100-01-01
PACKAGES = ("torch", "transformers", "libp2p", "trio", "msgspec")
BENCH_S = 5.0
_WORTH = ((350e6, "0.35 B"), (1e9, "1 B"), (8e9, "8 B"))  # sizes of models that people know


async def examine(
    data: Path,
    key: Path,
    threads: int = 1,
    *,
    quick: bool = False,
    tell: Callable[[str], None] = lambda doing: None,
    on_measured: Callable[[Measured], None] = lambda measured: None,
) -> AsyncIterator[Finding]:
    """Look at everything on this machine; takes some fifteen seconds, most of it torch and the benchmark.

    Args:
        quick: measure neither the disk nor the engine.
        tell: told what is being done, and how much of it is finished (R7).
        on_measured: told what the engine did, if it was measured.
    """
    yield judge_python(sys.version_info[:3], platform.platform())
    for finding in judge_packages({name: _installed(name) for name in PACKAGES}):
        yield finding
    yield processor.judge_threads(threads, os.cpu_count() or 1, processor.usable_cores())
    memory = psutil.virtual_memory()
    yield processor.judge_memory(memory.total, memory.available, processor.memory_limit())
    yield judge_key(key)
    yield judge_clock(time.time(), _synchronised())
    if not quick:
        tell("measuring the disk")
    speed = None if quick else await trio.to_thread.run_sync(storage.measure_disk, data)
    yield storage.judge_disk(data, *storage.disk_room(data), speed)
    signs = await trio.to_thread.run_sync(look_for_signs)
    findings: list[Finding]
    tell("asking torch what it can use")
    try:
        async with open_prober() as prober:
            torch = await prober.ask_torch()
            findings = _hardware(signs, torch)
            if not quick and not torch.error:
                findings.append(await _bench(prober, signs, torch, threads, tell, on_measured))
    except ChildError as error:
        findings = _hardware(signs, TorchFacts(error=str(error)))
    for finding in findings:
        yield finding


def _hardware(signs: Signs, torch: TorchFacts) -> list[Finding]:
    name, features = processor.processor()
    cpu = processor.judge_processor(name, features, platform.machine(), torch.cpu)
    used = next((gpu for gpu in find_gpus(signs, torch) if gpu.used), None)
    return [
        cpu,
        *judge_devices(signs, torch),
        judge_engine(find_vllm(), used is not None and used.kind == "cuda"),
    ]


async def _bench(
    prober: Prober,
    signs: Signs,
    torch: TorchFacts,
    threads: int,
    tell: Callable[[str], None],
    on_measured: Callable[[Measured], None],
) -> Finding:
    used = next((gpu for gpu in find_gpus(signs, torch) if gpu.used), None)
    device = "cpu" if used is None else "mps" if used.kind == "mps" else f"cuda:{used.index}"

    def progress(so_far: Measured) -> None:
        tell(f"measuring the engine: {so_far.tokens:,} tokens in {so_far.seconds:.1f} of {BENCH_S:.0f} s")

    tell("measuring the engine: building a model")
    try:
        measured = await prober.measure(threads, BENCH_S, progress, device)
    except ChildError as error:
        cure = "" if used is None else "without this device: CUDA_VISIBLE_DEVICES='' barnraise join ..."
        return Finding("engine", "problem", str(error), cure)
    on_measured(measured)
    return judge_speed(measured)


def judge_engine(vllm: Vllm, cuda: bool) -> Finding:
    """Which engine a node would use here, and why."""
    choice = choose("auto", vllm, cuda=cuda)
    return Finding("which engine", "ok", f"{choice.engine}: {choice.why} (join --engine chooses another)")


def judge_speed(measured: Measured) -> Finding:
    """What the benchmark of the engine gave, and what other models would run at, roughly."""
    on = f"{measured.threads} thread(s)" if measured.device == "cpu" else measured.device
    text = (
        f"{measured.tokens_per_s:,.0f} tokens/s of a {measured.weights / 1e6:.0f} M model on {on} "
        f"({measured.tokens:,} tokens in {measured.seconds:.1f} s): {measured.gflops:,.1f} GFLOP/s"
    )
    if measured.tokens == 0:
        return Finding("engine", "warning", f"not one token in {measured.seconds:.1f} s", "see --threads")
    others = ", ".join(f"{measured.speed_of(round(size)):,.1f} of {name}" for size, name in _WORTH)
    return Finding("engine", "ok", f"{text}; so roughly {others} tokens/s")


def judge_python(found: tuple[int, ...], system: str) -> Finding:
    """The interpreter."""
    text = f"Python {'.'.join(map(str, found))} on {system}"
    if found[:2] < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return Finding("python", "problem", f"{text} is too old", f"install Python {wanted} or newer")
    return Finding("python", "ok", text)


def judge_packages(found: dict[str, str]) -> list[Finding]:
    """Installed packages, name -> version, ``""`` where missing."""
    missing = [name for name, number in found.items() if not number]
    have = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    findings = [Finding("packages", "ok", have)] if have else []
    if missing:
        text = f"not installed: {', '.join(missing)}"
        findings.append(Finding("packages", "problem", text, "pip install --upgrade barnraise"))
    return findings


def judge_key(path: Path) -> Finding:
    """The identity file: missing is fine, unreadable is not."""
    if not path.exists():
        return Finding("key", "note", f"none yet; the first join makes {path}")
    try:
        identity = load_identity(path)
    except KeyFileError as error:
        return Finding("key", "problem", str(error))
    mode = stat.S_IMODE(path.stat().st_mode)
    return Finding("key", "ok", f"{path} (mode {mode:04o}): {identity.peer_id}")


def judge_clock(now_s: float, synchronised: bool | None) -> Finding:
    """The wall clock, seconds since the epoch; ``--coordinator`` compares it with the coordinator's."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s)) if 0 <= now_s < 1e11 else f"{now_s}"
    cure = "timedatectl set-ntp true"
    if not EARLIEST_S <= now_s <= LATEST_S:
        return Finding("clock", "warning", f"{text} cannot be right", cure)
    if synchronised is False:
        return Finding("clock", "note", f"{text}, not known to be synchronised", cure)
    return Finding("clock", "ok", f"{text}{', synchronised' if synchronised else ''}")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _synchronised() -> bool | None:
    """Whether the system says that its clock follows a time server; None where it does not say."""
    if not Path("/run/systemd/timesync").is_dir():
        return None
    return Path("/run/systemd/timesync/synchronized").exists()

"""What this machine can do for a run, and why what it has is not used (R11).

``examine`` gathers facts (``probe_*``) and judges them (``judge_*``, pure, so that
every combination can be tested on a machine that has none of it). Nothing is
changed, downloaded or sent. Running without a GPU is a clear state, not a failure.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

from barnraise.protocol.errors import KeyFileError
from barnraise.protocol.identity import load_identity

Status = Literal["ok", "note", "warning", "problem"]

MIN_PYTHON = (3, 11)
MIN_MEMORY = 2 * 10**9
MIN_DISK = 2 * 10**9
MIN_CAPABILITY = (7, 0)  # what current CUDA builds of torch still carry kernels for
EARLIEST_S = 1_735_689_600  # 2025-01-01: an earlier clock lost its battery
LATEST_S = 4_102_444_800  # 2100-01-01
VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
PACKAGES = ("torch", "transformers", "libp2p", "trio", "msgspec")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``note`` is neutral; ``problem`` keeps a node from working."""

    subject: str
    status: Status
    text: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class DisplayDevice:
    """A graphics device on the PCI bus, whether or not anything can use it."""

    slot: str
    vendor: int
    device: int
    driver: str  # kernel driver bound to it, "" for none


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """An accelerator that torch can open. Bytes."""

    kind: str
    index: int
    name: str
    capability: tuple[int, int]
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What torch says about itself; ``error`` is why it could not be asked."""

    version: str = ""
    cuda: str = ""  # version that it was built for, "" for none
    hip: str = ""
    mps_built: bool = False
    mps_available: bool = False
    cuda_error: str = ""
    devices: tuple[TorchDevice, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A device file such as ``/dev/nvidia0`` and whether we may open it."""

    path: str
    readable: bool


def examine(data: Path, key: Path, threads: int = 1) -> list[Finding]:
    """Look at everything; takes a few seconds, most of it importing torch."""
    cores = os.cpu_count() or 1
    findings = [judge_python(sys.version_info[:3], platform.platform())]
    findings += judge_packages({name: _installed(name) for name in PACKAGES})
    findings.append(judge_threads(threads, cores, len(_affinity())))
    memory = psutil.virtual_memory()
    findings.append(judge_memory(memory.total, memory.available, memory_limit()))
    findings += judge_devices(probe_display(), probe_node_files(), nvidia_driver(), probe_torch())
    findings.append(judge_disk(data, *_disk(data)))
    findings.append(judge_key(key))
    findings.append(judge_clock(time.time(), _synchronised()))
    return findings


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


def judge_threads(asked: int, cores: int, usable: int) -> Finding:
    """Threads for the engine against cores."""
    text = f"{asked} of {cores} cores for the engine"
    if usable < cores:
        text += f" ({usable} usable by this process)"
    if asked > usable:
        cure = f"--threads {max(1, usable // 2)}"
        return Finding("threads", "warning", f"{text}: more threads than cores slow it down", cure)
    return Finding("threads", "ok", text)


def judge_memory(total: int, available: int, limit: int | None) -> Finding:
    """Main memory in bytes; ``limit``: of this process's control group."""
    text = f"{_gb(available)} of {_gb(total)} available"
    if limit is not None and limit < total:
        text += f", this process may use {_gb(limit)}"
        available = min(available, limit)
    if available < MIN_MEMORY:
        cure = f"close other programs: the demo model needs {_gb(MIN_MEMORY)}, larger ones more"
        return Finding("memory", "warning", text, cure)
    return Finding("memory", "ok", text)


def judge_devices(
    display: list[DisplayDevice], files: list[NodeFile], driver: str, torch: TorchFacts
) -> list[Finding]:
    """Every device seen, and for each that is not used, why.

    ``driver``: NVIDIA's kernel driver version, "" if it is not loaded.
    """
    if torch.error:
        cure = "pip install --upgrade --force-reinstall torch"
        return [Finding("devices", "problem", f"torch cannot be loaded: {torch.error}", cure)]
    findings = [Finding("cpu", "ok", f"{platform.machine()} processor, always usable")]
    findings += [_judge_torch_device(device) for device in torch.devices]
    usable = {d.kind for d in torch.devices}
    for device in display:
        vendor = VENDORS.get(device.vendor, f"vendor {device.vendor:04x}")
        name = f"{vendor} graphics at {device.slot}"
        if device.vendor == 0x10DE and "cuda" not in usable:
            findings.append(_reject(name, *_why_no_cuda(files, driver, torch)))
        elif device.vendor == 0x1002 and "hip" not in usable:
            findings.append(_reject(name, *_why_no_rocm(torch)))
        elif device.vendor not in (0x10DE, 0x1002):
            findings.append(_reject(name, "no engine supports it", ""))
    if not display and files and "cuda" not in usable:
        findings.append(_reject("NVIDIA device files", *_why_no_cuda(files, driver, torch)))
    if torch.mps_built and not torch.mps_available:
        findings.append(
            _reject("Apple graphics", "Metal is not available to this process", "macOS 12.3 or newer")
        )
    if not torch.devices:
        findings.append(Finding("devices", "note", "no usable GPU: the engine runs on the CPU, which works"))
    return findings


def _judge_torch_device(device: TorchDevice) -> Finding:
    text = f"{device.name}, {_gb(device.free)} of {_gb(device.total)} free"
    subject = f"{device.kind}:{device.index}"
    if device.kind == "cuda":
        text += f", capability {device.capability[0]}.{device.capability[1]}"
        if device.capability < MIN_CAPABILITY:
            least = ".".join(map(str, MIN_CAPABILITY))
            return _reject(subject, f"{text}: below {least}, torch has no kernels for it", "")
    if device.total and device.free < device.total // 10:
        return Finding(subject, "warning", f"{text}: nearly full", "close what else uses it")
    return Finding(subject, "ok", text)


def _why_no_cuda(files: list[NodeFile], driver: str, torch: TorchFacts) -> tuple[str, str]:
    if not driver:
        return "its kernel driver is not loaded", "install NVIDIA's driver and restart (nvidia-smi must work)"
    locked = [f.path for f in files if not f.readable]
    if locked:
        user = "the groups 'video' and 'render'"
        return f"no permission to open {', '.join(locked)}", f"add your user to {user} and log in again"
    if not files:
        return (
            "its driver is loaded, but there is no /dev/nvidia0 here",
            "in a container, start it with the GPU passed through (--gpus all)",
        )
    if not torch.cuda:
        return (
            f"torch {torch.version} was built without CUDA",
            "pip install --force-reinstall torch (a build for your driver, see pytorch.org)",
        )
    detail = f": {torch.cuda_error}" if torch.cuda_error else ""
    return (
        f"torch for CUDA {torch.cuda} cannot use it with driver {driver}{detail}",
        "update the driver, or install a torch built for an older CUDA",
    )


def _why_no_rocm(torch: TorchFacts) -> tuple[str, str]:
    if not torch.hip:
        return f"torch {torch.version} was built without ROCm", "install torch's ROCm build (Linux only)"
    return "ROCm does not offer it", "check rocminfo and membership in the group 'render'"


def _reject(subject: str, reason: str, cure: str) -> Finding:
    return Finding(subject, "note", f"not used: {reason}", cure)


def judge_disk(folder: Path, free: int | None, writable: bool) -> Finding:
    """Where the weights go. Bytes; ``free`` None if it cannot be told."""
    if not writable:
        cure = "choose another folder with --data, or make this one writable"
        return Finding("disk", "problem", f"{folder} cannot be written", cure)
    if free is None:
        return Finding("disk", "warning", f"cannot tell how much of {folder} is free")
    text = f"{_gb(free)} free for {folder}"
    if free < MIN_DISK:
        return Finding("disk", "warning", text, f"free some: at least {_gb(MIN_DISK)}, or choose --data")
    return Finding("disk", "ok", text)


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
    """The wall clock, seconds since the epoch; the daemon measures it against the coordinator's as well."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s)) if 0 <= now_s < 1e11 else f"{now_s}"
    cure = "timedatectl set-ntp true"
    if not EARLIEST_S <= now_s <= LATEST_S:
        return Finding("clock", "warning", f"{text} cannot be right", cure)
    if synchronised is False:
        return Finding("clock", "note", f"{text}, not known to be synchronised", cure)
    return Finding("clock", "ok", f"{text}{', synchronised' if synchronised else ''}")


# --- probes


def probe_display(root: Path = Path("/sys/bus/pci/devices")) -> list[DisplayDevice]:
    """Graphics devices (PCI class 0x03) as Linux lists them; empty elsewhere."""
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            if int((path / "class").read_text(), 16) >> 16 != 0x03:
                continue
            vendor = int((path / "vendor").read_text(), 16)
            device = int((path / "device").read_text(), 16)
        except (OSError, ValueError):
            continue
        driver = path / "driver"
        found.append(
            DisplayDevice(path.name, vendor, device, driver.resolve().name if driver.exists() else "")
        )
    return found


def probe_node_files(folder: Path = Path("/dev")) -> list[NodeFile]:
    """NVIDIA's device files and whether this user may open them."""
    paths = sorted(
        p for p in folder.glob("nvidia*") if p.name in ("nvidiactl", "nvidia-uvm") or p.name[6:].isdigit()
    )
    return [NodeFile(str(p), os.access(p, os.R_OK | os.W_OK)) for p in paths]


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The loaded driver's version, ``""`` if there is none."""
    try:
        words = path.read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def probe_torch() -> TorchFacts:
    """Ask torch, importing it if need be. Never raises."""
    try:
        import torch
    except Exception as error:  # a broken library raises anything from OSError to ImportError
        return TorchFacts(error=f"{type(error).__name__}: {error}")
    devices: list[TorchDevice] = []
    problem = ""
    hip = getattr(torch.version, "hip", None) or ""
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capability = (properties.major, properties.minor)
            kind = "hip" if hip else "cuda"
            devices.append(TorchDevice(kind, index, properties.name, capability, total, free))
    except Exception as error:
        problem = f"{error}".splitlines()[0] if str(error) else type(error).__name__
    mps = getattr(torch.backends, "mps", None)
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda or "",
        hip=hip,
        mps_built=bool(mps and mps.is_built()),
        mps_available=bool(mps and mps.is_available()),
        cuda_error=problem,
        devices=tuple(devices),
    )


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The control group's memory limit in bytes, None if there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((root / name).read_text())
        except (OSError, ValueError):
            continue
        return limit if limit < 2**60 else None
    return None


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _disk(folder: Path) -> tuple[int | None, bool]:
    """Free bytes and writability of the nearest folder that exists."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    writable = place.is_dir() and os.access(place, os.W_OK)
    try:
        return shutil.disk_usage(place).free, writable
    except OSError:
        return None, writable


def _synchronised() -> bool | None:
    """Whether the system says that its clock follows a time server; None where it does not say."""
    if not Path("/run/systemd/timesync").is_dir():
        return None
    return Path("/run/systemd/timesync/synchronized").exists()


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"

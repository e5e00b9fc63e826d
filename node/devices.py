"""GPUs as the kernel, NVIDIA's library and torch each see them: facts, no judgement.

``barnraise.node.gpus`` says what they mean. Everything but ``probe_torch`` is cheap, needs no
torch, and may be asked again and again: a driver may come up minutes after us (R11).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct

NVIDIA, AMD = 0x10DE, 0x1002


class DisplayDevice(Struct, frozen=True):
    """A graphics device on the PCI bus, whether or not anything can use it."""

    slot: str
    vendor: int
    device: int
    driver: str  # kernel driver bound to it, "" for none


class NodeFile(Struct, frozen=True):
    """A device file such as ``/dev/nvidia0`` and whether we may open it."""

    path: str
    readable: bool


class NvmlDevice(Struct, frozen=True):
    """A GPU as NVIDIA's management library has it. Bytes, degrees C."""

    index: int
    name: str
    total: int
    used: int
    temperature: float | None = None


class NvmlFacts(Struct, frozen=True):
    """``error``: why the library could not be asked; empty also where it is not installed."""

    driver: str = ""
    devices: tuple[NvmlDevice, ...] = ()
    error: str = ""


class TorchDevice(Struct, frozen=True):
    """An accelerator that torch can open. Bytes. ``kind``: ``cuda``, ``hip`` or ``mps``."""

    kind: str
    index: int
    name: str
    capability: tuple[int, int]
    total: int
    free: int


class TorchFacts(Struct, frozen=True):
    """What torch says about itself; ``error`` is why it could not be asked."""

    version: str = ""
    cuda: str = ""  # version that it was built for, "" for none
    hip: str = ""
    cpu: str = ""  # the vector instructions that its kernels use, such as "AVX512"
    mps_built: bool = False
    mps_available: bool = False
    cuda_error: str = ""
    devices: tuple[TorchDevice, ...] = ()
    error: str = ""


class Signs(Struct, frozen=True):
    """What tells of a GPU without torch."""

    display: tuple[DisplayDevice, ...] = ()
    files: tuple[NodeFile, ...] = ()
    driver: str = ""  # NVIDIA's kernel driver's version, "" if it is not loaded
    kfd: bool = False  # AMD's compute driver is there
    nvml: NvmlFacts = NvmlFacts()
    hidden: str | None = None  # CUDA_VISIBLE_DEVICES, if it is set
    apple: bool = False

    @property
    def any(self) -> bool:
        """Whether there is anything that torch might be able to use."""
        ours = any(device.vendor in (NVIDIA, AMD) for device in self.display)
        return bool(ours or self.files or self.driver or self.kfd or self.nvml.devices or self.apple)

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """What changes when a driver comes or goes; memory and heat do not."""
        seen = tuple((device.index, device.name) for device in self.nvml.devices)
        return self.display, self.files, self.driver, self.kfd, seen, self.nvml.error, self.apple


def look_for_signs() -> Signs:
    """Look at this machine; some milliseconds, a driver may take longer."""
    return Signs(
        display=tuple(probe_display()),
        files=tuple(probe_node_files()),
        driver=nvidia_driver(),
        kfd=Path("/dev/kfd").exists(),
        nvml=probe_nvml(),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
        apple=sys.platform == "darwin",
    )


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


def probe_nvml(library: Any = None) -> NvmlFacts:
    """Ask NVIDIA's library. Never raises. ``library``: in place of ``pynvml``."""
    try:
        nvml: Any = library or import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # its errors are of types made at run time
        absent = type(error).__name__ in ("NVMLError_LibraryNotFound", "ModuleNotFoundError")
        return NvmlFacts(error="" if absent else str(error)[:200])
    try:
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            temperature = None
            with suppress(Exception):  # some have no sensor
                temperature = float(nvml.nvmlDeviceGetTemperature(handle, 0))
            name = _text(nvml.nvmlDeviceGetName(handle))
            devices.append(NvmlDevice(index, name, int(memory.total), int(memory.used), temperature))
        return NvmlFacts(_text(nvml.nvmlSystemGetDriverVersion()), tuple(devices))
    except Exception as error:
        return NvmlFacts(error=str(error)[:200])
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def probe_torch() -> TorchFacts:
    """Ask torch, importing it if need be. Never raises; a broken driver may make it hang."""
    try:
        import torch
    except Exception as error:  # a broken library raises anything from OSError to ImportError
        return TorchFacts(error=f"{type(error).__name__}: {error}")
    devices: list[TorchDevice] = []
    problem = ""
    hip = str(getattr(torch.version, "hip", None) or "")
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
    available = bool(mps and mps.is_available())
    if available:
        most = int(torch.mps.recommended_max_memory())
        devices.append(TorchDevice("mps", 0, "Apple graphics", (0, 0), most, most))
    return TorchFacts(
        version=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        hip=hip,
        cpu=torch.backends.cpu.get_cpu_capability(),
        mps_built=bool(mps and mps.is_built()),
        mps_available=available,
        cuda_error=problem,
        devices=tuple(devices),
    )

"""Which GPU the engine uses, and of every other one why not, and what would help (R11). Pure."""

from __future__ import annotations

import platform
from typing import Any

from msgspec import Struct

from barnraise.node.devices import AMD, NVIDIA, NvmlDevice, Signs, TorchDevice, TorchFacts
from barnraise.node.findings import Finding, gigabytes

MIN_CAPABILITY = (7, 0)  # what current CUDA builds of torch still carry kernels for
VENDORS = {NVIDIA: "NVIDIA", AMD: "AMD", 0x8086: "Intel"}


class Gpu(Struct, frozen=True):
    """One device. ``reason`` and ``cure`` where it is not used; bytes, degrees C."""

    name: str
    kind: str  # "cuda", "hip", "mps", or "" where no engine could use it as things are
    used: bool
    reason: str = ""
    cure: str = ""
    index: int = -1
    temperature: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    capability: tuple[int, int] = (0, 0)

    def tree(self) -> dict[str, Any]:
        """For the state tree."""
        return {
            "name": self.name,
            "kind": self.kind,
            "used": self.used,
            "reason": self.reason + (f": {self.cure}" if self.reason and self.cure else ""),
            "temperature": self.temperature,
            "memory_used": self.memory_used,
            "memory_total": self.memory_total,
        }


def usable(kind: str, capability: tuple[int, int]) -> bool:
    """Whether torch's kernels run on such a device."""
    return kind != "cuda" or capability >= MIN_CAPABILITY


def find_gpus(signs: Signs, torch: TorchFacts) -> list[Gpu]:
    """Every device that anything sees; the first that can be used is."""
    found: list[Gpu] = []
    for device in torch.devices:
        found.append(_opened(device, signs, torch, taken=any(gpu.used for gpu in found)))
    kinds = {device.kind for device in torch.devices}
    if "cuda" not in kinds and "hip" not in kinds:
        found += _nvidia_unused(signs, torch)
    for card in signs.display:
        vendor = VENDORS.get(card.vendor, f"vendor {card.vendor:04x}")
        name = f"{vendor} graphics at {card.slot}"
        if card.vendor == AMD and "hip" not in kinds:
            found.append(Gpu(name, "", False, *_why_no_rocm(signs, torch)))
        elif card.vendor not in (NVIDIA, AMD):
            found.append(Gpu(name, "", False, "no engine supports it"))
    if torch.mps_built and not torch.mps_available:
        found.append(
            Gpu("Apple graphics", "", False, "Metal is not available to this process", "macOS 12.3 or newer")
        )
    return found


def _same(device: TorchDevice, signs: Signs, torch: TorchFacts) -> NvmlDevice | None:
    """What NVML says now of a device that torch looked at once; None where it cannot be told apart."""
    seen = [item for item in signs.nvml.devices if item.name == device.name]
    if len(seen) <= 1 or signs.hidden is not None:
        return seen[0] if len(seen) == 1 else None
    alike = [item.index for item in torch.devices if item.name == device.name]  # both in the bus's order
    return seen[alike.index(device.index)] if len(alike) == len(seen) else None


def _opened(device: TorchDevice, signs: Signs, torch: TorchFacts, *, taken: bool) -> Gpu:
    reason = cure = ""
    if not usable(device.kind, device.capability):
        least = ".".join(map(str, MIN_CAPABILITY))
        have = ".".join(map(str, device.capability))
        reason = f"its capability {have} is below {least}, torch has no kernels for it"
    elif taken:
        reason = "a node uses one GPU"
        cure = f"a second node for it: CUDA_VISIBLE_DEVICES={device.index} and --data and --key of its own"
    seen = _same(device, signs, torch)
    return Gpu(
        device.name,
        device.kind,
        not reason,
        reason,
        cure,
        device.index,
        None if seen is None else seen.temperature,
        device.total - device.free if seen is None else seen.used,
        device.total,
        device.capability,
    )


def _nvidia_unused(signs: Signs, torch: TorchFacts) -> list[Gpu]:
    why = _why_no_cuda(signs, torch)
    if signs.nvml.devices:
        return [
            Gpu(
                item.name,
                "",
                False,
                *why,
                index=item.index,
                temperature=item.temperature,
                memory_used=item.used,
                memory_total=item.total,
            )
            for item in signs.nvml.devices
        ]
    slots = [card.slot for card in signs.display if card.vendor == NVIDIA]
    if slots:
        return [Gpu(f"NVIDIA graphics at {slot}", "", False, *why) for slot in slots]
    return [Gpu("NVIDIA device files", "", False, *why)] if signs.files else []


def _why_no_cuda(signs: Signs, torch: TorchFacts) -> tuple[str, str]:
    if "mismatch" in signs.nvml.error.lower():
        return "its driver was updated while it ran", "restart the machine"
    if not signs.driver and not signs.nvml.devices:
        return "its kernel driver is not loaded", "install NVIDIA's driver and restart (nvidia-smi must work)"
    locked = [file.path for file in signs.files if not file.readable]
    if locked:
        user = "the groups 'video' and 'render'"
        return f"no permission to open {', '.join(locked)}", f"add your user to {user} and log in again"
    if not signs.files and not signs.nvml.devices:
        return (
            "its driver is loaded, but there is no /dev/nvidia0 here",
            "in a container, start it with the GPU passed through (--gpus all)",
        )
    if torch.error:
        return "torch cannot be loaded", "pip install --upgrade --force-reinstall torch"
    if not torch.cuda:
        return (
            f"torch {torch.version} was built without CUDA",
            "pip install --force-reinstall torch (a build for your driver, see pytorch.org)",
        )
    if signs.hidden is not None:
        return f"CUDA_VISIBLE_DEVICES is {signs.hidden!r}, which hides it", "unset CUDA_VISIBLE_DEVICES"
    detail = f": {torch.cuda_error}" if torch.cuda_error else ""
    version = signs.driver or signs.nvml.driver
    return (
        f"torch for CUDA {torch.cuda} cannot use it with driver {version}{detail}",
        "update the driver, or install a torch built for an older CUDA",
    )


def _why_no_rocm(signs: Signs, torch: TorchFacts) -> tuple[str, str]:
    if torch.error:
        return "torch cannot be loaded", "pip install --upgrade --force-reinstall torch"
    if not torch.hip:
        return f"torch {torch.version} was built without ROCm", "install torch's ROCm build (Linux only)"
    if not signs.kfd:
        return "AMD's compute driver is not loaded: there is no /dev/kfd", "install ROCm's kernel driver"
    return "ROCm does not offer it", "check rocminfo and membership in the group 'render'"


def judge_devices(signs: Signs, torch: TorchFacts) -> list[Finding]:
    """The findings about GPUs."""
    findings = []
    if torch.error:
        cure = "pip install --upgrade --force-reinstall torch"
        findings.append(Finding("devices", "problem", f"torch cannot be loaded: {torch.error}", cure))
    gpus = find_gpus(signs, torch)
    findings += [_finding(gpu) for gpu in gpus]
    if not any(gpu.used for gpu in gpus) and not torch.error:
        findings.append(Finding("devices", "note", no_gpu(platform.machine())))
    return findings


def no_gpu(machine: str) -> str:
    """The state of a node without a GPU, which is none to be sorry for."""
    return f"no usable GPU: the engine runs on the CPU ({machine}), which works"


def _finding(gpu: Gpu) -> Finding:
    subject = f"{gpu.kind}:{gpu.index}" if gpu.kind else "gpu"
    text = gpu.name
    if gpu.memory_total:
        free = gpu.memory_total - (gpu.memory_used or 0)
        text += f", {gigabytes(free)} of {gigabytes(gpu.memory_total)} free"
    if gpu.kind == "cuda":
        text += f", capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.temperature is not None:
        text += f", {gpu.temperature:.0f} degrees C"
    if not gpu.used:
        return Finding(subject, "note", f"{text}: not used: {gpu.reason}", gpu.cure)
    if gpu.memory_total and gpu.memory_total - (gpu.memory_used or 0) < gpu.memory_total // 10:
        return Finding(subject, "warning", f"{text}: nearly full", "close what else uses it")
    return Finding(subject, "ok", text)

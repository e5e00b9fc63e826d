"""The processor: what it can do that matters to an engine, and how much memory we may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from barnraise.node.findings import Finding, gigabytes

MIN_MEMORY = 2 * 10**9
_MOST = 256 * 1024
# As the kernel names them (x86-64, then AArch64), and what people call them.
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "bf16",
}


def processor(path: Path = Path("/proc/cpuinfo")) -> tuple[str, tuple[str, ...]]:
    """The processor's name, and those of its features that speed up an engine; Linux only."""
    try:
        with path.open(errors="replace") as file:
            text = file.read(_MOST)
    except OSError:
        return platform.processor() or platform.machine(), ()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    flags = set(fields.get("flags", fields.get("features", "")).split())
    found = tuple(word for flag, word in _FEATURES.items() if flag in flags)
    return fields.get("model name") or platform.machine(), found


def judge_processor(name: str, features: tuple[str, ...], machine: str, torch_uses: str = "") -> Finding:
    """``machine``: as ``platform.machine`` has it. ``torch_uses``: torch's own word for its kernels."""
    text = f"{name}: {', '.join(features) or 'no vector extensions known'}"
    if torch_uses:
        text += f"; torch uses {torch_uses}"
    if machine in ("x86_64", "AMD64") and features and "AVX2" not in features:
        return Finding("cpu", "warning", f"{text}; without AVX2 the engine is several times slower")
    return Finding("cpu", "ok", f"{text}; always usable")


def judge_threads(asked: int, cores: int, usable: int) -> Finding:
    """Threads for the engine against cores."""
    text = f"{asked} of {cores} cores for the engine"
    if usable < cores:
        text += f" ({usable} usable by this process)"
    if asked > usable:
        cure = f"--threads {max(1, usable // 2)}"
        return Finding("threads", "warning", f"{text}: more threads than cores slow it down", cure)
    return Finding("threads", "ok", text)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def judge_memory(total: int, available: int, limit: int | None) -> Finding:
    """Main memory in bytes; ``limit``: of this process's control group."""
    text = f"{gigabytes(available)} of {gigabytes(total)} available"
    if limit is not None and limit < total:
        text += f", this process may use {gigabytes(limit)}"
        available = min(available, limit)
    if available < MIN_MEMORY:
        cure = f"close other programs: the demo model needs {gigabytes(MIN_MEMORY)}, larger ones more"
        return Finding("memory", "warning", text, cure)
    return Finding("memory", "ok", text)


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The control group's memory limit in bytes, None if there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((root / name).read_text())
        except (OSError, ValueError):
            continue
        return limit if limit < 2**60 else None
    return None

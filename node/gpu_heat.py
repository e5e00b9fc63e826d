"""How hot the GPUs are: NVIDIA's by NVML, AMD's by what the kernel shows. Without torch."""

from __future__ import annotations

import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

DRM = Path("/sys/class/drm")
_AMD = "0x1002"
_AGAIN_S = 60.0  # until a driver that was missing is looked for again


class GpuHeat:
    """Reads the hottest of all GPUs."""

    def __init__(self, drm: Path = DRM) -> None:
        self._drm = drm
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._tried_at = -float("inf")

    def read(self) -> float | None:
        """Degrees C; None where no GPU says."""
        found = [*self._nvidia(), *self._amd()]
        return max(found, default=None)

    def _nvidia(self) -> list[float]:
        now = time.monotonic()
        if not self._handles and now - self._tried_at >= _AGAIN_S:
            self._tried_at = now
            self._open()
        found: list[float] = []
        for handle in self._handles:
            with suppress(Exception):  # NVML's errors are of many types, and come and go with the driver
                found.append(float(self._nvml.nvmlDeviceGetTemperature(handle, 0)))
        if self._handles and not found:
            self._handles = []  # the driver went, or was updated under us
        return found

    def _open(self) -> None:
        with suppress(Exception):
            nvml: Any = import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._handles = [
                nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
            ]

    def _amd(self) -> list[float]:
        found: list[float] = []
        with suppress(OSError):
            for device in self._drm.glob("card[0-9]*/device"):
                with suppress(OSError, ValueError):
                    if (device / "vendor").read_text().strip() != _AMD:
                        continue
                    sensors = device.glob("hwmon/hwmon*/temp1_input")  # the edge, in thousandths
                    found += [int(sensor.read_text()) / 1000 for sensor in sensors]
        return found

"""The engine child's side of its limits: told in one thread, held in the one that computes."""

from __future__ import annotations

import threading

import torch

from barnraise.node.engine import EngineLimits
from barnraise.node.memory import allow


class Limiter:
    """Takes limits from any thread, and holds them in the thread that computes.

    torch's number of threads is a property of the thread that sets it, so that only the
    one that computes can; it asks between two steps.
    """

    def __init__(self, device: str) -> None:
        """``device``: a torch device, as the engine uses it."""
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._wanted: EngineLimits | None = None

    def want(self, message: object) -> None:
        """Take ``EngineLimits``; anything else is none of ours."""
        if isinstance(message, EngineLimits):
            with self._lock:
                self._wanted = message

    def apply(self) -> None:
        """Hold what was wanted last. Cheap where nothing is new."""
        if self._wanted is None:
            return
        with self._lock:
            limits, self._wanted = self._wanted, None
        if torch.get_num_threads() != limits.threads:
            torch.set_num_threads(limits.threads)
        allow(limits.memory, limits.gpu_memory)
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(limits.gpu_memory, self._device)

"""Running out of memory, in the several ways in which Python and torch say so (R5)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from barnraise.node.engine import OutOfMemory

_allowed = {"memory": 0.0, "gpu": 1.0}  # of this process; set by barnraise.node.engine_limits


def allow(memory: int, gpu: float) -> None:
    """What this process may take: bytes of main memory (0: any), a fraction of a GPU's."""
    _allowed.update(memory=float(memory), gpu=gpu)


def gpu_share() -> float:
    """The fraction of a GPU's memory that this process may take."""
    return _allowed["gpu"]


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now, and may be: on the accelerator, or of the machine's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(min(free, _allowed["gpu"] * total - torch.cuda.memory_reserved(device))))
    free = psutil.virtual_memory().available
    if _allowed["memory"]:
        free = min(free, _allowed["memory"] - psutil.Process().memory_info().rss)
    return max(0, int(free))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is one of the several ways in which Python and torch say so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


@contextmanager
def telling_out_of_memory(device: str) -> Iterator[None]:
    """Raise ``OutOfMemory`` in place of whatever torch raises for it, with the memory free again."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        text = str(error).split("\n")[0][:200]
    else:
        return
    # Outside of the handler: the traceback, and with it the frames' tensors, is gone by now.
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    raise OutOfMemory(text or "memory ran out")

"""Running out of memory, in the several ways in which Python and torch say so (R5)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from barnraise.node.engine import OutOfMemory


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

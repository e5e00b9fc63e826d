"""Several learner processes: how the first starts the others, speaks to them and notices their end.

The first is the coordinator's child. On one machine it starts the others itself; over several
machines torchrun starts all of them, the first among them with the coordinator's pipes. Every
request goes to all; each does its part, the first replies. One that dies ends all: the coordinator
starts them anew, from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.rendezvous import rendezvous

from barnraise.coordinator.learner_shards import PATIENCE, Processes, connect
from barnraise.protocol.child_serve import die_with_parent
from barnraise.protocol.errors import BarnraiseError

log = logging.getLogger(__name__)

RANK = "RANK"
"""Set by torchrun, and by us, for every process: 0 is the first."""
STORE = "BARNRAISE_LEARNER_STORE"
"""A file in a folder that only we may enter, by which the processes of one machine find each other."""
NO_MEMORY = 77
"""Exit code of a process that ran out of memory."""
_AGREE_S = 30.0
_EXPLAIN_S = 3.0
_MAX_REQUEST = 2**32


def join(count: int) -> tuple[Processes, Others]:
    """The first process: start ``count - 1`` others, or meet those that torchrun started.

    Raises:
        BarnraiseError: torchrun started another number.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store, rank, found = next(iter(rendezvous("env://", timeout=PATIENCE)))
        if found != count:
            raise BarnraiseError(f"torchrun started {found} learner processes, but {count} were asked for")
        return connect(store, rank, count, device()), Others([])
    folder = tempfile.TemporaryDirectory(prefix="barnraise-learner-")  # mode 0700: strangers cannot join
    path = os.path.join(folder.name, "store")
    # Connections stay on this machine; what crosses them is trusted (README of torch.distributed).
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    argv = [sys.executable, "-m", "barnraise.coordinator.learner_child"]
    others = Others(
        [
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={
                    **os.environ,
                    RANK: str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    STORE: path,
                },
            )
            for rank in range(1, count)
        ]
    )
    processes = connect(FileStore(path, count), 0, count, device())
    folder.cleanup()  # all have met
    return processes, others


def device() -> torch.device:
    """This process's device: of the machine's accelerators, the one with its number there."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


class Others:
    """The processes that the first one started, watched."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        for number, process in enumerate(processes, start=1):
            threading.Thread(target=self._watch, args=(number, process), daemon=True).start()

    def explain(self, error: BaseException) -> BaseException:
        """What to report for ``error``: that another process died, if one did, for that is the cause."""
        ends = time.monotonic() + _EXPLAIN_S
        while self._processes and time.monotonic() < ends:
            for number, process in enumerate(self._processes, start=1):
                status = process.poll()
                if status is not None:
                    text = self._obituary(number, status)
                    return MemoryError(text) if status == NO_MEMORY else RuntimeError(text)
            time.sleep(0.05)
        return error

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        time.sleep(2 * _EXPLAIN_S)  # the main thread, if it was in touch with it, says it better
        log.error("%s", self._obituary(number, status))
        os._exit(1)

    def _obituary(self, number: int, status: int) -> str:
        how = f"ended with exit code {status}"
        if status == NO_MEMORY:
            how = "ran out of memory"
        elif status < 0:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-status).name}"
        count = len(self._processes) + 1
        return f"learner process {number} of 0 to {count - 1} {how}: all start again from the last checkpoint"


def tell(processes: Processes, request: msgspec.Struct) -> None:
    """Give ``request`` to all other processes."""
    data = msgspec.msgpack.encode(request)
    dist.broadcast(torch.tensor([len(data)]), src=0, group=processes.control)
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(body, src=0, group=processes.control)


def settle(processes: Processes, refused: bool) -> None:
    """All have done their part of a request, or have refused it alike; anything else is fatal.

    Raises:
        RuntimeError: the processes are at different places.
    """
    mine = torch.tensor([int(refused)])
    every = [torch.empty_like(mine) for _ in range(processes.count)]
    work = dist.all_gather(every, mine, group=processes.control, async_op=True)
    assert work is not None
    work.wait(datetime.timedelta(seconds=_AGREE_S) if refused else PATIENCE)
    if len({int(each) for each in every}) > 1:
        raise RuntimeError("the learner's processes disagree about a request")


def follow(handle: Callable[[Any, Processes], None], requests: Any) -> NoReturn:
    """Any process but the first: do one's part of every request, until the first one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, count = int(os.environ[RANK]), int(os.environ["WORLD_SIZE"])
    try:
        if STORE in os.environ:
            die_with_parent()
            store: Any = FileStore(os.environ[STORE], count)
        else:
            store, rank, count = next(iter(rendezvous("env://", timeout=PATIENCE)))
        processes = connect(store, rank, count, device())
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(requests)
        while True:
            size = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(size, src=0, group=processes.control)
            if not 0 < int(size) <= _MAX_REQUEST:
                raise RuntimeError(f"a request of {int(size)} bytes")
            body = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(body, src=0, group=processes.control)
            refused = False
            try:
                handle(decoder.decode(body.numpy().tobytes()), processes)
            except BarnraiseError as error:  # the first one refuses too, and says it
                log.warning("process %d: %s", rank, error)
                refused = True
            settle(processes, refused)
    except BaseException as error:
        out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        log.error("process %d ends: %s: %s", rank, type(error).__name__, str(error)[:300])
        os._exit(NO_MEMORY if out else 1)

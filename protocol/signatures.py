"""Many Ed25519 signatures at once: here, or spread over processes when there are enough to be worth it.

``cryptography`` holds the interpreter's lock while it verifies, so threads would not help.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from barnraise.protocol.envelope import domain
from barnraise.protocol.identity import verify
from barnraise.protocol.messages import Message, Signed

CHUNK = 512
WORTH_PROCESSES = 4096  # about 0.4 s of one core; a process takes as long to start


class Claim(NamedTuple):
    """That ``key`` signed ``message`` (as it was signed, with its domain) with ``signature``."""

    key: bytes
    message: bytes
    signature: bytes


Check = Callable[[Sequence[Claim]], list[bool]]
Done = Callable[[int, int], None]
"""Told how many of how many are done."""


def claim_of(signed: Signed, type_: type[Message]) -> Claim:
    """What ``signed`` claims, as a message of ``type_``; the signer is whom it names."""
    return Claim(signed.signer, domain(type_) + signed.payload, signed.signature)


def check_here(claims: Sequence[Claim]) -> list[bool]:
    """Which signatures hold, one after another. Never raises on hostile bytes."""
    return [verify(*claim) for claim in claims]


@contextmanager
def process_pool(
    processes: int = 0, worth: int = WORTH_PROCESSES, done: Done | None = None
) -> Iterator[Check]:
    """A ``Check`` over ``processes`` processes (0: one per core), started when first worth it.

    From fewer than ``worth`` claims on one core they are checked here. If a process dies
    the rest is checked here too. ``done`` hears after every ``CHUNK`` claims.
    """
    count = processes or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else processes or 1
    executor: ProcessPoolExecutor | None = None

    def check(claims: Sequence[Claim]) -> list[bool]:
        nonlocal executor
        chunks = [claims[start : start + CHUNK] for start in range(0, len(claims), CHUNK)]
        found: list[bool] = []
        if count > 1 and len(claims) >= worth:
            if executor is None:
                # Not forked: threads of ours may hold locks.
                executor = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
            try:
                for part in executor.map(check_here, chunks):
                    found += part
                    if done is not None:
                        done(len(found), len(claims))
            except BrokenProcessPool:
                executor = None
        for chunk in islice(chunks, len(found) // CHUNK if len(found) < len(claims) else len(chunks), None):
            found += check_here(chunk)
            if done is not None:
                done(len(found), len(claims))
        return found

    try:
        yield check
    finally:
        if executor is not None:
            executor.shutdown(cancel_futures=True)

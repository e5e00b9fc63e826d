"""How an operator spreads learner and verifiers over processes, devices and machines: options, read."""

from __future__ import annotations

import shlex

from msgspec import Struct

from barnraise.coordinator.verifier_pool import visible_accelerators
from barnraise.coordinator.workers import LearnerScale

MAX_LEARNERS = 4096


class Spread(Struct, frozen=True, kw_only=True):
    """What ``run_from_folder`` starts: the learner, and the devices that verifiers take in turn."""

    learner: LearnerScale = LearnerScale()
    verifier_devices: tuple[str, ...] = ()  # empty: all that this process may use


def read_spread(
    processes: str = "1",
    recompute: bool = False,
    learner_devices: str = "",
    verifier_devices: str = "",
    torchrun: str = "",
) -> Spread:
    """From the options of ``barnraise coordinator run``.

    Args:
        processes: a number, or ``"auto"``: one per device of the learner, one without any.
        learner_devices, verifier_devices: CUDA device numbers or ids, comma-separated; empty for all.
        torchrun: its options, as in a shell.

    Raises:
        ValueError: the text says what is wanted.
    """
    own, theirs = _devices(learner_devices), _devices(verifier_devices)
    if processes == "auto":
        if torchrun:
            raise ValueError("with --learner-torchrun give the number of all learner processes, not auto")
        count = max(1, len(own or visible_accelerators()))
    elif processes.isascii() and processes.isdigit() and 1 <= int(processes) <= MAX_LEARNERS:
        count = int(processes)
    else:
        raise ValueError(f"learner processes are a number from 1 to {MAX_LEARNERS}, or auto")
    if own and not torchrun and count > len(own):
        raise ValueError(
            f"{count} learner processes need as many devices, but --learner-devices names {len(own)}"
        )
    if torchrun and count == 1:
        raise ValueError("--learner-torchrun needs --learner-processes: how many there are on all machines")
    scale = LearnerScale(
        processes=count,
        recompute=recompute,
        devices=",".join(own),
        torchrun=tuple(shlex.split(torchrun)),
    )
    return Spread(learner=scale, verifier_devices=theirs)


def _devices(text: str) -> tuple[str, ...]:
    devices = tuple(item.strip() for item in text.split(",")) if text.strip() else ()
    if not all(devices) or len(set(devices)) < len(devices) or not text.isascii():
        raise ValueError(f"{text!r} names no devices: numbers such as 0,1 are wanted, each once")
    return devices

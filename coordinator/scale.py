"""How an operator spreads learner and verifiers over processes, devices and machines: options, read."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from msgspec import Struct

from barnraise.coordinator.verifier_pool import visible_accelerators
from barnraise.coordinator.workers import LearnerScale

MAX_LEARNERS = 4096


class Spread(Struct, frozen=True, kw_only=True):
    """What ``run_from_folder`` starts: the learner, and the devices that verifiers take in turn.

    ``verifiers_at``: a command each for verifiers on other machines (``barnraise worker``); ``learner_at``:
    one for the learner. Empty: here.
    """

    learner: LearnerScale = LearnerScale()
    verifier_devices: tuple[str, ...] = ()  # empty: all that this process may use
    verifiers_at: tuple[tuple[str, ...], ...] = ()
    learner_at: tuple[str, ...] = ()


def read_spread(
    processes: str = "1",
    recompute: bool = False,
    learner_devices: str = "",
    verifier_devices: str = "",
    torchrun: str = "",
    verifiers_at: Sequence[str] = (),
    learner_at: str = "",
) -> Spread:
    """From the options of ``barnraise coordinator run``.

    Args:
        processes: a number, or ``"auto"``: one per device of the learner, one without any.
        learner_devices, verifier_devices: CUDA device numbers or ids, comma-separated; empty for all.
        torchrun: its options, as in a shell.
        verifiers_at, learner_at: commands that start ``barnraise worker`` elsewhere, as in a shell.

    Raises:
        ValueError: the text says what is wanted.
    """
    own, theirs = _devices(learner_devices), _devices(verifier_devices)
    if learner_at and (torchrun or own):
        raise ValueError(
            "--learner-at starts the learner by a command of its own: name GPUs in it (barnraise worker "
            "--gpu 0), and leave out --learner-torchrun and --learner-devices"
        )
    if processes == "auto":
        if learner_at:
            raise ValueError("with --learner-at give the number of learner processes there, not auto")
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
    return Spread(
        learner=scale,
        verifier_devices=theirs,
        verifiers_at=tuple(_command(text, "--verifier-at") for text in verifiers_at),
        learner_at=_command(learner_at, "--learner-at") if learner_at else (),
    )


def _command(text: str, option: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{option} {text!r} cannot be read as a command: {error}") from error
    if not words:
        raise ValueError(f"{option} needs a command, such as 'ssh gpu-box barnraise worker'")
    return words


def _devices(text: str) -> tuple[str, ...]:
    devices = tuple(item.strip() for item in text.split(",")) if text.strip() else ()
    if not all(devices) or len(set(devices)) < len(devices) or not text.isascii():
        raise ValueError(f"{text!r} names no devices: numbers such as 0,1 are wanted, each once")
    return devices

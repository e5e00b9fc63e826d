"""Which nodes build a run's prompts as its coordinator does: older ones would work for nothing.

Since protocol 1.1 a plain prompt begins with the tokenizer's beginning-of-sequence token, where the
tokenizer puts one before text (docs/protocol.md, Hello). A node from before draws from other prompts,
and all its work is refused. So a run with such a tokenizer has to have a floor.
"""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from barnraise.coordinator.run_file import Serve, floor_of
from barnraise.protocol.messages import PROTOCOL_MAJOR
from barnraise.protocol.spec import EnvironmentSpec

START_SINCE = (1, 1)  # the protocol version


def least_minor(model: Path, environment: EnvironmentSpec) -> int:
    """The oldest minor of our major whose nodes build the prompts that we do; -1: any.

    ``model``: a folder with a tokenizer. One that cannot be read gives -1; whoever makes a run of it
    is told.
    """
    if environment.prompt_format != "plain" or START_SINCE[0] != PROTOCOL_MAJOR or not _names_start(model):
        return -1
    from barnraise.kernels.models import ModelError  # needs torch
    from barnraise.kernels.tokens import Codec

    try:
        return START_SINCE[1] if Codec(model, environment).start else -1
    except ModelError:
        return -1


def _names_start(model: Path) -> bool:
    """Whether it is worth while to read the tokenizer: without a name there is no such token."""
    try:
        settings = json.loads((model / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and bool(settings.get("bos_token"))


def floor_trouble(serve: Serve, model: Path, environment: EnvironmentSpec, now_ms: int) -> str:
    """What is wrong with the floor of a run with this model, and the cure; empty: nothing."""
    floor, needed = floor_of(serve), least_minor(model, environment)
    if needed < 0:
        return ""
    oldest = f"{PROTOCOL_MAJOR}.{needed}"
    why = (
        "this tokenizer begins a plain prompt with a token of its own, which nodes older than protocol "
        f"{oldest} leave out: all their work would be refused"
    )
    if floor is None or floor.minor < needed:
        return f"[serve] floor_minor is {serve.floor_minor}, and {why}; write floor_minor = {needed}"
    if floor.from_ms > now_ms:
        return f"[serve] floor_from lets older nodes in until {serve.floor_from}, and {why}; leave it out"
    return ""


def with_floor(serve: Serve, model: Path, environment: EnvironmentSpec) -> Serve:
    """``serve`` with the floor that a run with this model needs, at once, where it has none."""
    needed = least_minor(model, environment)
    return serve if serve.floor_minor >= needed else replace(serve, floor_minor=needed, floor_from="")

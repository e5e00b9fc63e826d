"""The engine of one child process, chosen when a run's first version is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from msgspec import structs

from barnraise.node.engine import EngineInfo, Generated, Progress, Work
from barnraise.node.engine_choice import Choice, choose, find_vllm
from barnraise.node.torch_engine import Generator, default_device
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.spec import RunSpec


class RolloutEngine(Protocol):
    """What ``Generator`` and ``VllmGenerator`` are."""

    def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo: ...

    def generate(
        self, work: Work, progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> Generated: ...


class PickedEngine:
    """Blocking, as the engines are; errors are theirs."""

    def __init__(self, wanted: str = "auto", device: str | None = None) -> None:
        """``wanted``: see ``barnraise.node.engine_choice``; ``device`` as for ``Generator``."""
        self.device = device or default_device()
        self._wanted = wanted
        self._spec: RunSpec | None = None
        self._engine: RolloutEngine | None = None
        self._why = ""

    def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        """Load a version, with the engine that is chosen for its run.

        Raises:
            BarnraiseError: as the engines do; also where vLLM was asked for and is not there.
            OutOfMemory, MemoryError: as the engines do.
        """
        if self._engine is None or self._spec != spec:
            cuda = torch.device(self.device).type == "cuda" and getattr(torch.version, "hip", None) is None
            choice = choose(self._wanted, find_vllm(), cuda=cuda, adapter=spec.model.adapter is not None)
            self.close()
            self._spec = spec
            info = self._first(choice, spec, folder, version)
        else:
            info = self._engine.load(spec, folder, version)
        return structs.replace(info, why=self._why)

    def generate(
        self, work: Work, progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> Generated:
        """Draw a unit; see the engines."""
        if self._engine is None:
            raise BarnraiseError(f"the unit needs policy version {work.policy_version}, nothing is loaded")
        return self._engine.generate(work, progress, should_stop)

    def close(self) -> None:
        """Free what is loaded; safe to call twice."""
        engine, self._engine, self._spec = self._engine, None, None
        if engine is not None and not isinstance(engine, Generator):
            engine.close()  # type: ignore[attr-defined]

    def _first(self, choice: Choice, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        if choice.engine == "vllm":
            from barnraise.node.vllm_engine import UnsupportedError, VllmGenerator

            fast = VllmGenerator(self.device)
            try:
                info = fast.load(spec, folder, version)
            except UnsupportedError as error:
                if self._wanted == "vllm":
                    raise
                print(f"the torch engine is used: {error}", file=sys.stderr)
                choice = Choice("torch", str(error)[:200])
            else:
                self._engine, self._why = fast, choice.why
                return info
        plain = Generator(self.device)
        info = plain.load(spec, folder, version)
        self._engine, self._why = plain, choice.why
        return info

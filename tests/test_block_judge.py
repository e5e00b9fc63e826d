"""Every known way of not training a block is refused by the check that is meant for it."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import pytest
import torch
from block_stage_support import LIES, Unit, lease_for, lie_unit, make_pretrain_run, setup_of, train_unit
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.coordinator.block_files import state_name, unit_files
from barnraise.coordinator.block_judge import BlockJudge, step_parameters
from barnraise.coordinator.block_reading import BlockReader
from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob
from barnraise.coordinator.workers import WorkerSetup
from barnraise.coordinator.workshop import Workshop
from barnraise.kernels.block_training import read_state, start_state, state_bytes
from barnraise.kernels.deltas import decode_delta, encode_delta
from barnraise.kernels.models import ModelError
from barnraise.protocol.errors import BarnraiseError, RunFolderError
from barnraise.protocol.pretrain import BlockTolerance

TIGHT = BlockTolerance(update=0.05, first=0.05, second=0.05, worst_tensor=0.2, loss_increase=0.1)


@cache
def run_folder(delta: str = "float32", init: str = "grown") -> Path:
    """A run whose version 0 is made."""
    folder = make_pretrain_run(Path(mkdtemp()), delta=delta, tolerance=TIGHT, init=init)
    Workshop(setup_of(folder)).initial()
    return folder


def job_for(
    setup: WorkerSetup,
    unit: Unit,
    folder: Path,
    chosen: tuple[int, ...],
    block: int = 1,
    draw: bytes = b"",
    version: int = 0,
) -> BlockVerifyJob:
    lease = lease_for(setup, version, block)
    submission = unit.submission(lease, Path(setup.folder) / folder)
    return BlockVerifyJob(
        submission_id=bytes(32),
        lease=lease,
        submission=submission,
        segments=chosen,
        states={end: str(folder / state_name(end)) for end in range(len(submission.states))},
        delta=str(folder / "delta.safetensors"),
        draw=draw,
    )


def judged(unit: Unit, segment: int, setup: WorkerSetup, block: int = 1) -> BlockResult:
    folder = Path("units") / "00"
    try:
        return BlockJudge(setup).judge(job_for(setup, unit, folder, (segment,), block))
    finally:
        shutil.rmtree(Path(setup.folder) / folder)


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("segment", [0, 1, 2])
def test_honest_work_is_accepted_whichever_segment_is_drawn(block: int, segment: int) -> None:
    setup = setup_of(run_folder())
    result = judged(train_unit(setup, lease_for(setup, block=block)), segment, setup, block)
    assert result.verdict.accepted, result.verdict
    assert result.verdict.check == "all"
    assert result.verdict.position.startswith(f"segment {segment} ")
    assert result.verdict.value <= result.verdict.threshold
    assert result.tokens == 6 * 4 * 16


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_honest_work_is_accepted_in_every_format(kind: str) -> None:
    setup = setup_of(run_folder(kind))
    assert judged(train_unit(setup, lease_for(setup)), 1, setup).verdict.accepted


CAUGHT: dict[str, tuple[str, ...]] = {  # lie -> the check for each segment drawn; "" where it is true
    "nothing done": ("block-replay",) * 3,
    "fewer steps": ("", "block-replay", "block-replay"),
    "random weights": ("block-bound",) * 3,
    "other data": ("block-replay",) * 3,
    "half the rate": ("block-replay",) * 3,
    "twice the rate": ("block-bound",) * 3,
    "neighbour's block": ("block-bound",) * 3,
    "label noise": ("block-replay",) * 3,
    "scaled difference": ("block-delta",) * 3,
    "backdoor on the difference": ("block-delta",) * 3,
    "backdoor in the states": ("block-bound",) * 3,
    "forged moments": ("block-replay",) * 3,
    "not a number": ("block-format",) * 3,
}


@pytest.mark.parametrize("lie", CAUGHT)
def test_a_lie_is_caught_by_the_check_that_is_meant_for_it(lie: str) -> None:
    setup = setup_of(run_folder())
    unit = lie_unit(setup, lease_for(setup), lie)
    found = [judged(unit, segment, setup).verdict for segment in range(3)]
    assert tuple("" if verdict.accepted else verdict.check for verdict in found) == CAUGHT[lie]
    for verdict in found:
        assert verdict.accepted or (verdict.position and verdict.message and verdict.value > 0)


def test_no_lie_goes_untested() -> None:
    assert LIES.keys() == CAUGHT.keys()


def test_a_coarse_scale_hides_nothing() -> None:
    """Eight bits forgive half a step of rounding; a step may not be made large to be forgiven more."""
    setup = setup_of(run_folder("int8"))
    honest = train_unit(setup, lease_for(setup))
    like = honest.states[0].weights
    moved = decode_delta(honest.delta, "int8", like)
    planted = {name: value + 0.5 for name, value in moved.items()}
    data, _ = encode_delta(planted, "int8")
    assert judged(Unit(honest.states, data, honest.losses), 0, setup).verdict.check == "block-delta"
    from safetensors.torch import load, save

    tensors = load(honest.delta)
    name = "0.mlp.up_proj.weight"
    tensors["s." + name] = torch.full_like(tensors["s." + name], 0.5)
    tensors["q." + name] = torch.ones_like(tensors["q." + name])
    coarse = save(tensors)
    with pytest.raises(ModelError, match="coarser"):
        decode_delta(coarse, "int8", like)
    assert judged(Unit(honest.states, coarse, honest.losses), 0, setup).verdict.check == "block-format"


def test_work_that_makes_text_less_likely_is_refused_by_its_loss() -> None:
    setup = setup_of(run_folder())
    blind = BlockTolerance(update=1e6, first=1e6, second=1e6, worst_tensor=1e6, loss_increase=0.0)
    pretrain = msgspec.structs.replace(setup.spec.pretrain, tolerance=blind)
    blinded = msgspec.structs.replace(setup, spec=msgspec.structs.replace(setup.spec, pretrain=pretrain))
    unit = train_unit(setup, lease_for(setup))
    start = unit.states[0].weights
    worse = [unit.states[0]]
    for state in unit.states[1:]:  # the way back: as far as AdamW goes, uphill
        back = {name: 2 * start[name] - value for name, value in state.weights.items()}
        worse.append(type(state)(back, state.first, state.second, state.step))
    from block_stage_support import encoded

    result = judged(Unit(worse, encoded(worse, pretrain), unit.losses), 0, blinded)
    assert result.verdict.check == "block-loss"
    assert result.verdict.value > result.verdict.threshold


def test_a_training_loss_that_was_not_is_refused() -> None:
    setup = setup_of(run_folder())
    unit = train_unit(setup, lease_for(setup))
    pretty = Unit(unit.states, unit.delta, [loss - 1 for loss in unit.losses])
    verdict = judged(pretty, 1, setup).verdict
    assert (verdict.check, verdict.position) == ("block-loss", "segment 1")


def test_files_cut_short_are_no_crash() -> None:
    setup = setup_of(run_folder())
    unit = train_unit(setup, lease_for(setup))
    for name in ("delta.safetensors", state_name(0), state_name(2)):
        folder = Path("units") / "01"
        job = job_for(setup, unit, folder, (0,))
        path = Path(setup.folder) / folder / name
        path.write_bytes(path.read_bytes()[:-4])
        assert BlockJudge(setup).judge(job).verdict.check == "block-format"
        path.unlink()
        with pytest.raises(RunFolderError):
            BlockJudge(setup).judge(job)
        shutil.rmtree(Path(setup.folder) / folder)


def _retyped(data: bytes, dtype: str, bits: int) -> bytes:
    """A safetensors file whose first tensor claims another dtype, of as many bytes."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    begin, end = header[name]["data_offsets"]
    header[name] |= {"dtype": dtype, "shape": [(end - begin) * 8 // bits]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@pytest.mark.parametrize(
    ("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F8_E8M0", 8), ("F64", 64), ("BOOL", 8)]
)
@pytest.mark.parametrize("name", ["delta.safetensors", state_name(0), state_name(2)])
def test_a_dtype_that_the_format_has_and_torch_has_not_is_the_nodes_fault(
    name: str, dtype: str, bits: int
) -> None:
    """It took the verifier down, which is nobody's fault: a liar's way out whenever its lie was drawn."""
    setup = setup_of(run_folder())
    unit = train_unit(setup, lease_for(setup))
    folder = Path("units") / "04"
    job = job_for(setup, unit, folder, (0,))
    path = Path(setup.folder) / folder / name
    path.write_bytes(_retyped(path.read_bytes(), dtype, bits))
    try:
        assert BlockJudge(setup).judge(job).verdict.check == "block-format"
    finally:
        shutil.rmtree(Path(setup.folder) / folder)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damage_to_a_state_or_difference_is_anything_but_a_refusal(data: st.DataObject) -> None:
    like = {"0.a": torch.zeros(3, 4), "0.b": torch.zeros(4)}
    kind = data.draw(st.sampled_from(["state", "float32", "int8"]))
    whole = bytearray(
        state_bytes(start_state(like)) if kind == "state" else encode_delta(like, kind)[0]  # type: ignore[arg-type]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ModelError):
        if kind == "state":
            read_state(bytes(whole), like, 0)
        else:
            decode_delta(bytes(whole), kind, like)  # type: ignore[arg-type]


def test_a_judge_that_nobody_waits_for_stops() -> None:
    setup = setup_of(run_folder())
    unit = train_unit(setup, lease_for(setup))
    job = job_for(setup, unit, Path("units") / "02", (0,))
    with pytest.raises(BarnraiseError, match="not waited for"):
        BlockJudge(setup).judge(job, lambda: True)
    shutil.rmtree(Path(setup.folder) / "units" / "02")


def test_credit_counts_frozen_layers_by_their_work() -> None:
    setup = setup_of(run_folder())
    reader = BlockReader(setup)
    frame = reader.scaffold(0)

    def size(tensors: Any) -> int:
        return sum(value.numel() for value in tensors.values())

    head = 300 * 16
    lower = step_parameters(reader, frame, 0)
    assert lower == size(reader.block(0, 0)) + 4 * (size(frame.slices[1]) + head) // 6
    upper = step_parameters(reader, frame, 1)
    assert upper == size(reader.block(0, 1)) + (4 * head + 2 * size(frame.slices[0])) // 6


def test_the_files_that_judging_needs_are_the_segments_ends_the_last_state_and_the_difference() -> None:
    setup = setup_of(run_folder())
    unit = train_unit(setup, lease_for(setup))
    work = unit.submission(lease_for(setup), Path(setup.folder) / "units" / "03")
    assert list(unit_files(work, (0,))) == ["delta.safetensors", state_name(2), state_name(0)]
    assert list(unit_files(work, (1,))) == [
        "delta.safetensors",
        state_name(2),
        state_name(0),
        state_name(1),
    ]
    assert list(unit_files(work, (2,))) == ["delta.safetensors", state_name(2), state_name(1)]
    shutil.rmtree(Path(setup.folder) / "units" / "03")


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12),
    power=st.sampled_from([1.0, 1e-10, 1e-28, 1e-33, 0.0]),
)
def test_an_honest_difference_always_has_the_least_scale(values: list[float], power: float) -> None:
    delta = {"w": torch.tensor([values, values[::-1]]) * power, "b": torch.tensor(values) * power}
    data, lost = encode_delta(delta, "int8")
    decode_delta(data, "int8", delta)
    decode_delta(encode_delta(delta, "int8", lost)[0], "int8", delta)

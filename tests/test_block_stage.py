"""The learner's block stage: every step of it can be killed and asked for again, and GRPO goes on from it."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from block_stage_support import lease_for, make_pretrain_run, setup_of, train_unit
from safetensors.torch import load_file, save_file

from barnraise.coordinator import block_stage, checkpoints
from barnraise.coordinator.block_events import RoundFormed
from barnraise.coordinator.block_stage import BlockStages
from barnraise.coordinator.block_status import _measured
from barnraise.coordinator.block_workers import REPORT_FILE, Contribution, RecombineJob, RoundJob
from barnraise.coordinator.core import in_place
from barnraise.coordinator.learn_belt import block_job
from barnraise.coordinator.learner import Trainer
from barnraise.coordinator.publisher import prune, slim, version_files
from barnraise.coordinator.workers import WorkerSetup, checkpoint_folder
from barnraise.coordinator.workshop import Workshop
from barnraise.kernels.deltas import decode_delta
from barnraise.kernels.outer import outer_step, trimmed_mean
from barnraise.protocol import wire
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.messages import FileEntry
from barnraise.protocol.pretrain import BlockSubmission
from barnraise.protocol.store import DiskStore


class Killed(Exception):
    """Stands for SIGKILL."""


def tensors(folder: Path, version: int) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(checkpoint_folder(folder, version).glob("model*.safetensors")):
        found |= {f"{path.name} {name}": value for name, value in load_file(path).items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def round_of(setup: WorkerSetup, version: int = 1, slots: int = 2) -> RoundJob:
    """Real units for every place, in RUN/units as the belt leaves them."""
    parts = []
    for block in (0, 1):
        for slot in range(slots):
            lease = lease_for(setup, version - 1, block, slot)
            folder = Path("units") / f"{version}{block}{slot}"
            target = Path(setup.folder) / folder
            target.mkdir(parents=True, exist_ok=True)
            (target / "delta.safetensors").write_bytes(train_unit(setup, lease).delta)
            parts.append(Contribution(block=block, slot=slot, delta=str(folder / "delta.safetensors")))
    return RoundJob(version=version, contributions=tuple(parts))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (folder / "pretrain.jsonl").read_bytes().splitlines()]


def killed_after(steps: int, name: str) -> Any:
    seen = []

    def report(subject: str, fraction: float) -> None:
        if subject.startswith(name):
            seen.append(fraction)
            if len(seen) == steps:
                raise Killed

    return report


def test_a_scaffold_killed_half_way_is_taken_up_and_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_stage, "SAVE_EVERY_S", 0.0)
    straight, broken = (make_pretrain_run(tmp_path / name) for name in "ab")
    said: list[str] = []
    BlockStages(setup_of(straight), lambda subject, fraction: said.append(subject)).initial()
    assert said[-1].startswith("scaffold: step 4 of 4, loss ")
    with pytest.raises(Killed):
        BlockStages(setup_of(broken), killed_after(3, "scaffold")).initial()
    assert (broken / "scaffold" / "state.json").is_file()
    again: list[str] = []
    made = BlockStages(setup_of(broken), lambda subject, fraction: again.append(subject)).initial()
    assert len(again) < len(said)
    assert same(tensors(straight, 0), tensors(broken, 0))
    assert not (broken / "scaffold").exists()
    assert BlockStages(setup_of(broken)).initial().version == made.version == 0
    assert lines(broken)[0]["perplexity"] == lines(straight)[0]["perplexity"]


def test_an_earlier_runs_scaffold_is_used_by_its_hash(tmp_path: Path) -> None:
    first = make_pretrain_run(tmp_path / "a")
    BlockStages(setup_of(first)).initial()
    part = checkpoint_folder(first, 0) / "model-00001-of-00003.safetensors"
    digest = sha256(part.read_bytes()).digest()
    second = make_pretrain_run(tmp_path / "b", scaffold=digest)
    with pytest.raises(RunFolderError, match="earlier run"):
        BlockStages(setup_of(second)).initial()
    shutil.copy(part, second / "scaffold.safetensors")
    BlockStages(setup_of(second)).initial()
    assert (checkpoint_folder(second, 0) / part.name).read_bytes() == part.read_bytes()
    third = make_pretrain_run(tmp_path / "c", scaffold=bytes(32))
    shutil.copy(part, third / "scaffold.safetensors")
    with pytest.raises(RunFolderError, match="not the scaffold"):
        BlockStages(setup_of(third)).initial()


def test_an_imported_scaffold_of_nothing_but_nan_is_refused_before_it_is_published(tmp_path: Path) -> None:
    first = make_pretrain_run(tmp_path / "a")
    BlockStages(setup_of(first)).initial()
    part = checkpoint_folder(first, 0) / "model-00001-of-00003.safetensors"
    save_file({name: value * float("nan") for name, value in load_file(part).items()}, part)
    second = make_pretrain_run(tmp_path / "b", scaffold=sha256(part.read_bytes()).digest())
    shutil.copy(part, second / "scaffold.safetensors")
    with pytest.raises(RunFolderError, match="not made of finite numbers"):
        BlockStages(setup_of(second)).initial()
    assert not (second / "checkpoints" / "v000000" / part.name).exists()


def test_a_note_that_a_full_disk_cut_short_spoils_no_other(tmp_path: Path) -> None:
    folder = make_pretrain_run(tmp_path)
    stages = BlockStages(setup_of(folder))
    stages.note(stage="scaffold", loss=1.0)
    with (folder / REPORT_FILE).open("a") as file:
        file.write('{"stage": "rou')
    stages.note(stage="round", version=1)
    assert _measured(folder / REPORT_FILE) == [
        {"stage": "scaffold", "loss": 1.0},
        {"stage": "round", "version": 1},
    ]


def test_a_note_that_the_disk_refuses_says_so_and_the_version_is_there(tmp_path: Path) -> None:
    folder = make_pretrain_run(tmp_path)
    stages = BlockStages(setup_of(folder))
    stages.initial()
    job = round_of(setup_of(folder))
    (folder / REPORT_FILE).unlink()
    (folder / REPORT_FILE).mkdir()  # whatever is appended is refused
    with pytest.raises(StorageError, match="free some space"):
        stages.round(job)
    assert stages.round(job).version == 1


def test_a_round_is_the_outer_step_over_the_mean_and_is_made_once(tmp_path: Path) -> None:
    folder = make_pretrain_run(tmp_path)
    setup = setup_of(folder)
    stages = BlockStages(setup)
    stages.initial()
    for version in (1, 2):
        job = round_of(setup, version)
        stages.round(job)
        before, after = stages.blocks(version - 1), stages.blocks(version)
        speed = checkpoint_folder(folder, version - 1) / "outer.safetensors"
        for block in (0, 1):
            deltas = [
                decode_delta((folder / part.delta).read_bytes(), "float32", before[block])
                for part in job.contributions
                if part.block == block
            ]
            old = load_file(speed) if speed.is_file() else {}
            momentum = {name: old[f"{block}.{name}"] for name in before[block]} if old else None
            expected, _ = outer_step(before[block], trimmed_mean(deltas, 0.0), momentum, 0.7, 0.9)
            assert all(torch.equal(expected[name], value) for name, value in after[block].items())
        again = tensors(folder, version)
        shutil.rmtree(folder / "units")
        assert stages.round(job).version == version  # asked again: reported, not made anew
        assert same(again, tensors(folder, version))
    frame = [checkpoint_folder(folder, version) / "model-00001-of-00003.safetensors" for version in range(3)]
    assert len({path.stat().st_ino for path in frame}) == 1  # one file, linked


def test_a_round_whose_differences_are_gone_says_so(tmp_path: Path) -> None:
    folder = make_pretrain_run(tmp_path)
    stages = BlockStages(setup_of(folder))
    stages.initial()
    job = round_of(setup_of(folder), slots=1)
    shutil.rmtree(folder / "units")
    with pytest.raises(RunFolderError, match="delta"):
        stages.round(job)
    assert not checkpoint_folder(folder, 1).exists()


def test_an_adaptation_killed_half_way_ends_in_the_same_model_and_grpo_begins_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_stage, "SAVE_EVERY_S", 0.0)
    models = []
    for name, kill in (("a", False), ("b", True)):
        folder = make_pretrain_run(tmp_path / name, rounds=1, versions=3, then_posttrain=True)
        setup = setup_of(folder)
        stages = BlockStages(setup)
        stages.initial()
        stages.round(round_of(setup, slots=1))
        if kill:
            with pytest.raises(Killed):
                BlockStages(setup, killed_after(3, "adaptation")).recombine(RecombineJob(version=2))
            assert not checkpoint_folder(folder, 2).exists()
        workshop = Workshop(setup)
        made = workshop.make(RecombineJob(version=2))
        assert 0 <= made.accuracy <= 1  # measured, because GRPO goes on from here
        assert Path(made.weights) == checkpoint_folder(folder, 2) / "model.safetensors"
        assert workshop.make(RecombineJob(version=2)) == made
        models.append(tensors(folder, 2))
    assert same(*models)
    trainer = Trainer(setup)
    trainer._load(2)  # a fresh optimiser, because the record says so
    record = checkpoints.read_record(folder, 2)
    assert record is not None
    assert record.fresh_optimizer
    plain = msgspec.structs.replace(
        record,
        fresh_optimizer=False,
        trained=msgspec.structs.replace(record.trained, weights="model.safetensors"),
    )
    checkpoints.write_record(checkpoint_folder(folder, 2), plain)
    with pytest.raises(RunFolderError, match="optimizer"):
        trainer._load(2)
    said = lines(folder)
    assert [line["stage"] for line in said] == ["scaffold", "round", "adaptation"]
    assert said[-1]["cold_perplexity"] > 1 < said[-1]["adapted_perplexity"]
    assert len(said[-1]["seams_cold"]) == 2


def test_what_the_block_stage_needs_is_never_pruned(tmp_path: Path) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, versions=3, then_posttrain=True)
    spec = setup_of(folder).spec
    for version in range(6):
        place = checkpoint_folder(folder, version)
        place.mkdir(exist_ok=True)
        save_file({"w": torch.zeros(1)}, place / "outer.safetensors")
    store = DiskStore(tmp_path / "store")
    assert prune(folder, store, 5, {0, 2}) == [1, 3, 4]
    slim(folder, 5)
    kept = [v for v in range(6) if (checkpoint_folder(folder, v) / "outer.safetensors").is_file()]
    assert kept == [0, 5]
    assert set(version_files(folder, spec, 1, "")) - set(spec.model.assets) == {
        f"model-{part:05d}-of-00003.safetensors" for part in (1, 2, 3)
    }
    assert "model.safetensors" in version_files(folder, spec, 2, "x")


def test_a_corpus_that_is_not_the_runs_is_refused(tmp_path: Path) -> None:
    folder = make_pretrain_run(tmp_path)
    setup = setup_of(folder)
    pretrain = msgspec.structs.replace(setup.spec.pretrain, corpus=bytes(32))
    other = msgspec.structs.replace(setup, spec=msgspec.structs.replace(setup.spec, pretrain=pretrain))
    with pytest.raises(RunFolderError, match="not the corpus"):
        BlockStages(other)
    with pytest.raises(RunFolderError, match="does not pretrain"):
        BlockStages(msgspec.structs.replace(setup, spec=msgspec.structs.replace(setup.spec, pretrain=None)))


async def test_a_difference_that_is_gone_or_damaged_is_left_out_and_a_block_without_any_stops_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lease(block: int, slot: int) -> Any:
        return SimpleNamespace(
            lease=SimpleNamespace(block=block, slot=slot, lease_id=bytes([block, slot]) * 8)
        )

    places = [(0, 0), (0, 1), (1, 0)]
    keys = [bytes([block, slot]) * 16 for block, slot in places]
    work = {key: lease(*place) for key, place in zip(keys, places, strict=True)}
    entry = FileEntry(path="delta", size=1, sha256=sha256(b"x").digest(), shards=(bytes(32),))
    payload = wire.encode(
        BlockSubmission(
            run_id=bytes(32),
            lease_id=bytes(16),
            policy_version=0,
            engine="test",
            train_ms=0,
            losses=(1.0,),
            states=(entry,),
            delta=entry,
        )
    )
    core: Any = SimpleNamespace(
        offload=in_place,
        state=SimpleNamespace(blocks=SimpleNamespace(work=work)),
        journal=SimpleNamespace(payloads=lambda wanted: dict.fromkeys(wanted, payload)),
    )
    for key in keys:
        (tmp_path / "units" / key.hex()).mkdir(parents=True)
        (tmp_path / "units" / key.hex() / "delta.safetensors").write_bytes(b"x")
    formed = RoundFormed(version=1, submissions=tuple(keys), at_ms=0)
    job = await block_job(core, formed, tmp_path)
    assert isinstance(job, RoundJob)
    assert [(part.block, part.slot) for part in job.contributions] == places
    shutil.rmtree(tmp_path / "units" / keys[0].hex())
    job = await block_job(core, formed, tmp_path)
    assert isinstance(job, RoundJob)
    assert [(part.block, part.slot) for part in job.contributions] == places[1:]
    assert "goes on without it" in caplog.text
    (tmp_path / "units" / keys[2].hex() / "delta.safetensors").write_bytes(b"y")  # as a failing disk does
    with pytest.raises(RunFolderError, match="block 1 is gone"):
        await block_job(core, formed, tmp_path)
    last = RoundFormed(version=3, submissions=(), at_ms=0)
    assert await block_job(core, last, tmp_path) == RecombineJob(version=3)

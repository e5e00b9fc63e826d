"""Learner and verifier on another machine: real processes that get what they read through the pipe alone."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_support import make_run, next_job
from msgspec import structs
from remote_support import worker_command

from barnraise.coordinator import remote
from barnraise.coordinator.learner import Trainer
from barnraise.coordinator.learner_child import ChildLearner
from barnraise.coordinator.main import verifiers_of
from barnraise.coordinator.remote import Elsewhere, release
from barnraise.coordinator.remote_files import (
    FileFact,
    FileHost,
    GetPart,
    ListFolder,
    Meet,
    Mirror,
    PutPart,
    check_path,
)
from barnraise.coordinator.scale import read_spread
from barnraise.coordinator.verifier import Judge
from barnraise.coordinator.verifier_child import ChildVerifier
from barnraise.coordinator.workers import TrainJob, VerifyJob, WorkerSetup, checkpoint_folder
from barnraise.protocol.errors import BarnraiseError, ChildError, StorageError

RUN_ID = bytes(32)


def learner_at(cache: Path, setup: WorkerSetup, log: Path) -> ChildLearner:
    return ChildLearner(setup, log, at=Elsewhere(worker_command(cache), "learner", setup))


def submission_of(job: TrainJob) -> VerifyJob:
    part = job.parts[0]
    return VerifyJob(submission_id=bytes(16), lease=part.lease, payload=part.payload)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "state.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


async def test_a_learner_and_a_verifier_elsewhere_do_what_those_here_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (make_run(tmp_path / name, warm_up=50) for name in ("here", "there"))
    cache = tmp_path / "gpu-box"
    near, far = Trainer(here), learner_at(cache, there, tmp_path / "far.log")
    near.initial()
    try:
        await far.initial()
        job = next_job(here, 1)
        near.train(job)
        # A version that could not be brought is not made again.
        with monkeypatch.context() as patch:
            patch.setattr(Elsewhere, "_bring_folder", full_disk)
            with pytest.raises(StorageError, match="No space"):
                await far.train(job)
        made = [path.stat().st_mtime_ns for path in cache.rglob("v000001/optimizer*")]
        one = await far.train(job)
        assert [path.stat().st_mtime_ns for path in cache.rglob("v000001/optimizer*")] == made != []
        folders = [checkpoint_folder(Path(setup.folder), 1) for setup in (here, there)]
        assert contents(folders[0]) == contents(folders[1])
        assert one.weights == str(folders[1] / "model.safetensors")
        assert await far.train(job) == one
        # A learner that is replaced, on a machine that lost all, goes on from what is here.
        assert far.pid is not None
        os.kill(far.pid, signal.SIGKILL)
        shutil.rmtree(cache)
        assert (await far.train(next_job(here, 2))).version == 2
        assert not list(Path(there.folder).rglob(".*"))
    finally:
        await far.close()
    verifier = ChildVerifier(
        there, tmp_path / "verifier.log", at=Elsewhere(worker_command(cache), "verifier", there)
    )
    jobs = (submission_of(next_job(there, 3)),)
    jobs += (structs.replace(jobs[0], payload=jobs[0].payload[:-3]),)
    try:
        assert await verifier.verify(jobs) == Judge(there).judge(jobs)
    finally:
        await verifier.close()
    run = cache / there.run_id.hex()
    kept = [run / kind / "checkpoints/v000002/model.safetensors" for kind in ("learner", "verifier")]
    assert kept[0].stat().st_ino == kept[1].stat().st_ino  # what was made there is not sent there
    assert not list((run / "verifier").rglob("optimizer*"))


async def full_disk(*args: object) -> None:
    raise StorageError("cannot write: No space left on device")


async def test_what_a_worker_still_has_of_another_history_is_not_taken_for_the_runs_own(
    tmp_path: Path,
) -> None:
    """After a restore from a backup the same version is made again, of other work."""
    setup = make_run(tmp_path / "run", warm_up=50)
    cache = tmp_path / "gpu-box"
    far = learner_at(cache, setup, tmp_path / "far.log")
    try:
        await far.initial()
        first = next_job(setup, 1)
        await far.train(first)
        before = contents(checkpoint_folder(Path(setup.folder), 1))
    finally:
        await far.close()
    shutil.rmtree(checkpoint_folder(Path(setup.folder), 1))
    other = structs.replace(first, parts=first.parts[:1])
    far = learner_at(cache, setup, tmp_path / "far.log")
    try:
        await far.train(other)
    finally:
        await far.close()
    assert contents(checkpoint_folder(Path(setup.folder), 1)) != before


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("no-such-program",), "cannot start"),
        (
            ("sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"),
            "exit code 255.*Permission denied",
        ),
        (("echo", "Welcome to gpu-box, the last login was yesterday at noon"), "prints something"),
    ],
)
async def test_a_command_that_starts_no_worker_is_named_with_what_it_said(
    tmp_path: Path, argv: tuple[str, ...], problem: str
) -> None:
    setup = make_run(tmp_path / "run")
    verifier = ChildVerifier(setup, tmp_path / "log", at=Elsewhere(argv, "verifier", setup))
    with pytest.raises(ChildError, match=problem):
        await verifier.verify((submission_of(next_job(setup, 1)),))
    await verifier.close()


async def test_a_worker_of_another_release_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_run(tmp_path / "run")
    monkeypatch.setattr(remote, "release", lambda: "barnraise 99")
    far = learner_at(tmp_path / "cache", setup, tmp_path / "log")
    with pytest.raises(ChildError, match=r"same release on both machines.*started as: env"):
        await far.initial()
    await far.close()


def test_verifiers_elsewhere_take_the_place_of_the_one_here_unless_both_are_asked_for(tmp_path: Path) -> None:
    spread = read_spread(
        verifiers_at=["ssh a barnraise worker", "ssh b 'barnraise worker'"], learner_at="ssh a w"
    )
    assert spread.learner_at == ("ssh", "a", "w")
    assert spread.verifiers_at[1] == ("ssh", "b", "barnraise worker")
    setup = make_run(tmp_path / "run")
    assert len(verifiers_of(setup, tmp_path / "log", None, spread).members) == 2
    assert len(verifiers_of(setup, tmp_path / "log", 1, spread).members) == 3
    assert len(verifiers_of(setup, tmp_path / "log", None, read_spread()).members) == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"learner_at": "ssh 'a"}, "--learner-at"),
        ({"verifiers_at": [" "]}, "--verifier-at needs a command"),
        ({"learner_at": "ssh a w", "learner_devices": "0"}, "leave out"),
        ({"learner_at": "ssh a w", "processes": "auto"}, "not auto"),
    ],
)
def test_commands_that_cannot_be_meant_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_spread(**options)  # type: ignore[arg-type]


# --- the worker's side of the files


def host(tmp_path: Path) -> FileHost:
    made = FileHost(tmp_path / "cache", "verifier", release())
    made.handle(Meet(release=release(), run_id=RUN_ID))
    return made


@given(
    path=st.text(max_size=40)
    | st.sampled_from(["checkpoints/../x", "/etc/passwd", "checkpoints//a", "units/."])
)
def test_only_paths_of_a_run_folder_are_taken(path: str) -> None:
    try:
        parts = check_path(path).split("/")
    except BarnraiseError:
        return
    assert parts[0] in ("checkpoints", "corpus", "units", "scaffold.safetensors", "pretrain.jsonl")
    assert not {"", ".", ".."} & set(parts)


def test_a_worker_is_asked_nothing_before_it_is_told_of_which_run(tmp_path: Path) -> None:
    with pytest.raises(BarnraiseError, match="of which run"):
        FileHost(tmp_path, "verifier", release()).handle(ListFolder(folder="checkpoints"))


def test_a_file_is_in_its_place_only_whole_and_as_announced(tmp_path: Path) -> None:
    import hashlib

    one = host(tmp_path)
    data = b"weights" * 100
    fact = FileFact(path="checkpoints/v000000/a", size=len(data), sha256=hashlib.sha256(data).digest())
    mirror = Mirror(files=(fact,), folders=("checkpoints/v000000",), versions=(0,))
    assert one.handle(mirror).paths == (fact.path,)  # type: ignore[union-attr]
    with pytest.raises(BarnraiseError, match="out of turn"):
        one.handle(PutPart(fact=fact, offset=7, data=data[7:]))
    one.handle(PutPart(fact=fact, offset=0, data=data[:7]))
    assert one.handle(mirror).paths == (fact.path,)  # type: ignore[union-attr]
    with pytest.raises(BarnraiseError, match="changed while it was sent"):
        one.handle(PutPart(fact=fact, offset=7, data=bytes(len(data) - 7)))
    one.handle(PutPart(fact=fact, offset=0, data=data[:7]))
    with pytest.raises(BarnraiseError, match="out of turn"):
        one.handle(PutPart(fact=fact, offset=7, data=data))
    one.handle(PutPart(fact=fact, offset=0, data=data[:7]))
    one.handle(PutPart(fact=fact, offset=7, data=data[7:]))
    assert one.handle(mirror).paths == ()  # type: ignore[union-attr]
    assert one.handle(GetPart(path=fact.path, offset=7)).data == data[7:]  # type: ignore[union-attr]
    # What is not named goes, and so does what rots.
    (one.folder / fact.path).with_name("b").write_bytes(b"old")
    (one.folder / fact.path).write_bytes(bytes(len(data)))
    assert one.handle(mirror).paths == (fact.path,)  # type: ignore[union-attr]
    assert not (one.folder / fact.path).with_name("b").exists()
    one.handle(Mirror(files=(), folders=(), versions=()))
    assert not (one.folder / "checkpoints/v000000").exists()

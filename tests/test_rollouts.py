"""Rollouts kept and handed on: what volunteers drew, whole and once, checkable against the ledger."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio
import trio.testing
from coordinator_support import coordinating, make_run, node
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_support import EVERYTHING, NODES, REFUSED, Told, closed, told_run
from typer.testing import CliRunner

from barnraise.coordinator import rollout_export, rollout_files
from barnraise.coordinator.backup import back_up
from barnraise.coordinator.events import CreditClawedBack, CreditRestored
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.operator_events import SettingsAmended
from barnraise.coordinator.rollout_export import export_rollouts
from barnraise.coordinator.rollout_fates import Fate, Story
from barnraise.coordinator.rollout_files import parts_of
from barnraise.coordinator.rollout_source import Wanted, open_source
from barnraise.coordinator.rollout_table import advantages
from barnraise.coordinator.run_file import Keep
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.kernels.grpo import group_advantages
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import build_environment
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.seeds import task_seed
from barnraise.tui.main import app, main
from tests.server_support import head_is, until, volunteer

parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'barnraise[parquet]'")
Clock = trio.testing.MockClock
BARE = Wanted(text=False)
ALL = Wanted(text=False, refused=True, proofs=True)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        row for path in sorted((folder / "data").iterdir()) for row in parquet.read_table(path).to_pylist()
    ]


def submissions(folder: Path, target: Path, wanted: Wanted = ALL) -> dict[str, int]:
    """What an export has, and how many rows of each."""
    export_rollouts(folder, target, wanted)
    found: dict[str, int] = {}
    for row in rows_of(target):
        found[row["submission"]] = found.get(row["submission"], 0) + 1
    return found


def refused(told: Told) -> list[bytes]:
    return [key for key, (_, work, _) in told.work.items() if work.engine == "cheat"]


def test_every_row_says_what_was_drawn_and_what_became_of_it(tmp_path: Path) -> None:
    told = told_run(tmp_path)
    told.keep(3)
    export_rollouts(closed(told), tmp_path / "out", ALL)
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 4 * len(told.work)
    for row in rows:
        lease, work, rewards = told.work[bytes.fromhex(row["submission"])]
        at = 2 * row["prompt_index"] + row["sample_index"]
        drawn = work.rollouts[at]
        assert np.array(row["tokens"], "<u4").tobytes() == drawn.tokens
        assert np.array(row["logprobs"], "<f4").tobytes() == drawn.logprobs
        assert row["proofs"] == drawn.proofs
        assert row["task_seed"] == task_seed(told.run_id, lease.lease_id, lease.node, row["prompt_index"])
        assert (row["run"], row["lease"], row["unit"]) == (
            told.run_id.hex(),
            lease.lease_id.hex(),
            lease.unit_id,
        )
        assert row["policy_version"] == lease.policy_version
        assert row["node"] in {who.peer_id for who in NODES}
        if work.engine == "cheat":
            assert (row["accepted"], row["check"], row["message"]) == (False, "toploc", "forged")
            assert (row["reward"], row["advantage"], row["trained_version"], row["lag"]) == (None,) * 4
        else:
            group = torch.tensor([rewards[at - at % 2 : at - at % 2 + 2]])
            wanted = group_advantages(group, told.spec.grpo.normalise_std)[0, at % 2]
            assert (row["accepted"], row["check"], row["reward"]) == (True, "all", rewards[at])
            assert row["advantage"] == pytest.approx(float(wanted), abs=1e-12)
            assert (row["trained_version"], row["lag"]) == (lease.policy_version + 1, 0)


def test_text_is_the_tasks_own_and_the_tokenizers(tmp_path: Path) -> None:
    told = told_run(tmp_path, versions=1)
    export_rollouts(closed(told), tmp_path / "out", Wanted())
    codec = Codec(told.folder / "checkpoints" / "v000000", told.spec.environment)
    environment = build_environment(told.spec.environment)
    for row in rows_of(tmp_path / "out"):
        task = environment.task(row["task_seed"], held_out=False)
        assert (row["prompt"], row["task_key"]) == (task.prompt, task.key)
        assert row["prompt_tokens"] == codec.encode_prompt(task.prompt)
        assert row["completion"] == codec.decode(row["tokens"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5),
    st.booleans(),
)
def test_advantages_are_those_of_training(rewards: list[list[float]], normalise: bool) -> None:
    wanted = group_advantages(torch.tensor(rewards, dtype=torch.float64), normalise).reshape(-1).tolist()
    found = advantages([reward for group in rewards for reward in group], 3, normalise)
    assert found == pytest.approx(wanted, abs=1e-9)
    assert [not value for value in found] == [not value for value in wanted]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 2, *[st.binary(max_size=9)] * 3), min_size=1, max_size=6))
def test_whatever_a_cheat_sends_becomes_rows(sent: list[tuple[int, int, bytes, bytes, bytes]]) -> None:
    from barnraise.coordinator.rollout_table import to_table
    from barnraise.protocol import wire
    from barnraise.protocol.messages import Rollout, RolloutLease, RolloutSubmission

    lease = RolloutLease(
        **dict.fromkeys(("issued_at", "timeout_at", "deadline_at", "unit_id", "policy_version"), 1),
        run_id=b"r" * 32,
        lease_id=b"l" * 16,
        node=NODES[0].public_key,
        prompts=2,
        group_size=2,
    )
    work = RolloutSubmission(
        run_id=b"r" * 32,
        lease_id=b"l" * 16,
        policy_version=1,
        engine="\0\N{RIGHT-TO-LEFT OVERRIDE}",
        generate_ms=0,
        rollouts=tuple(
            Rollout(prompt=prompt, sample=sample, tokens=tokens, logprobs=logprobs, proofs=proofs)
            for prompt, sample, tokens, logprobs, proofs in sent
        ),
    )
    fate = Fate(b"s" * 32, lease, 100, 1, True, REFUSED)
    table = to_table([(fate, wire.encode(work))], "reverse", proofs=True)
    assert table.num_rows == len(sent)
    assert [len(tokens) for tokens in table["tokens"].to_pylist()] == [len(item[2]) // 4 for item in sent]


def test_what_was_refused_is_kept_and_handed_on_only_where_that_was_asked_for(tmp_path: Path) -> None:
    told = told_run(tmp_path)
    told.keep(3)
    cheats = {key.hex() for key in refused(told)}
    assert not cheats & submissions(told.folder, tmp_path / "good", BARE).keys()
    assert cheats < submissions(told.folder, tmp_path / "all", ALL).keys()
    spare = told_run(tmp_path, name="spare")
    spare.keep(3, Keep(rollouts="accepted"))
    there = submissions(spare.folder, tmp_path / "spare-all", ALL)
    late = [key for key in refused(spare) if spare.work[key][0].policy_version >= 3]
    assert cheats_in(spare, there) == {key.hex() for key in late}  # the journal has them still
    assert len(there) == len(spare.work) - 3


def cheats_in(told: Told, there: dict[str, int]) -> set[str]:
    return {key.hex() for key in refused(told)} & there.keys()


def test_an_export_is_the_same_bytes_each_time_and_from_a_backup(tmp_path: Path) -> None:
    told = told_run(tmp_path)
    told.keep(3)
    shutil.copytree(checkpoint_folder(told.folder, 0), checkpoint_folder(told.folder, told.head))
    back_up(told.folder, tmp_path / "backup", 5)
    for source, name in ((told.folder, "one"), (told.folder, "two"), (tmp_path / "backup", "three")):
        done = export_rollouts(source, tmp_path / name, replace(BARE, license="cc-by-4.0"))
        assert done.summary.rows == 48
    for name in ("README.md", "data/train-00000.parquet"):
        assert len({(tmp_path / place / name).read_bytes() for place in ("one", "two", "three")}) == 1
    card = (tmp_path / "one" / "README.md").read_text()
    assert card.startswith("---\nlicense: cc-by-4.0\n")
    assert told.run_id.hex() in card
    assert "path: data/*.parquet" in card


def test_hugging_face_datasets_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets: pip install datasets")
    told = told_run(tmp_path, versions=2)
    export_rollouts(closed(told), tmp_path / "out", Wanted())
    found = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert found.num_rows == 24
    assert found[0]["tokens"] == rows_of(tmp_path / "out")[0]["tokens"]


def test_a_broken_off_export_goes_on_and_nothing_is_seen_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = told_run(tmp_path, versions=5)
    told.keep(5)
    wanted = replace(BARE, shard_bytes=1)  # a shard for each version
    export_rollouts(told.folder, tmp_path / "whole", wanted)
    real, written = rollout_export.writing, []

    def full(path: Path, columns: Any, sealed: bool = False) -> Any:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path)
        return real(path, columns)

    monkeypatch.setattr(rollout_export, "writing", full)
    with pytest.raises(StorageError, match=r"No space left.*goes on"):
        export_rollouts(told.folder, tmp_path / "out", wanted)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(rollout_export, "writing", real)
    (tmp_path / "out.partial" / "data" / "train-00099.parquet").write_bytes(b"of another export")
    done = export_rollouts(told.folder, tmp_path / "out", wanted)
    assert (done.reused, done.summary.files) == (2, 5)
    assert not (tmp_path / "out.partial").exists()
    for path in (tmp_path / "whole").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes()


def test_an_export_follows_a_coordinator_that_goes_on_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between plan and reading, payloads go from the journal into a file, and the oldest file goes."""
    told = told_run(tmp_path)
    told.keep(2)
    real, moved = rollout_export.shown, []

    def going_on(*arguments: Any) -> Any:
        if not moved:
            moved.append(told.keep(4))
            parts_of(told.folder)[1].path.unlink()
        return real(*arguments)

    monkeypatch.setattr(rollout_export, "shown", going_on)
    there = submissions(told.folder, tmp_path / "out", replace(ALL, shard_bytes=1))
    assert len(there) == len(told.work) - 4
    assert set(there.values()) == {4}


def test_a_submission_that_is_in_a_file_already_is_not_written_again(tmp_path: Path) -> None:
    """Killed between the file and the journal's word that its payloads are gone."""
    told = told_run(tmp_path)
    told.keep(3, drop=False)
    files = {part.path.name: part.path.read_bytes() for part in parts_of(told.folder)}
    there = submissions(told.folder, tmp_path / "before")
    assert set(there.values()) == {4}
    kept = told.keep(3)
    assert kept.files == []
    assert {part.path.name: part.path.read_bytes() for part in parts_of(told.folder)} == files
    there = submissions(told.folder, tmp_path / "out")
    assert set(there.values()) == {4}
    assert len(there) == len(told.work)


def test_what_is_settled_late_gets_a_part_of_its_own_and_an_appeal_overturns_a_refusal(
    tmp_path: Path,
) -> None:
    told = told_run(tmp_path)
    told.keep(3)
    cheat = refused(told)[0]
    told.appealed(cheat)
    kept = told.keep(3)
    assert [path.name for path in kept.files] == ["v000000-1.parquet"]
    export_rollouts(told.folder, tmp_path / "out", ALL)
    mine = [row for row in rows_of(tmp_path / "out") if row["submission"] == cheat.hex()]
    assert [(row["accepted"], row["check"]) for row in mine] == [(True, "all")] * 4


def test_credit_clawed_back_after_it_was_kept_is_seen_in_an_export(tmp_path: Path) -> None:
    told = told_run(tmp_path)
    told.keep(3)
    victim = next(key for key, (_, work, _) in told.work.items() if work.engine != "cheat")
    told.commit(CreditClawedBack(submission_id=victim, cause=refused(told)[0], at_ms=told.now()))
    assert victim.hex() not in submissions(told.folder, tmp_path / "good", BARE)
    export_rollouts(told.folder, tmp_path / "all", ALL)
    checks = {row["check"] for row in rows_of(tmp_path / "all") if row["submission"] == victim.hex()}
    assert checks == {"clawed-back"}
    told.commit(CreditRestored(submission_id=victim, cause=refused(told)[0], at_ms=told.now()))
    assert victim.hex() in submissions(told.folder, tmp_path / "again", BARE)


def test_advantages_go_by_the_settings_that_were_in_force(tmp_path: Path) -> None:
    told = told_run(tmp_path, versions=1)
    changes = {"grpo.normalise_std": json.dumps(not told.spec.grpo.normalise_std)}
    told.commit(
        SettingsAmended(
            number=1, changes=changes, reason="", amendment=bytes(32), signed=b"", at_ms=told.now()
        )
    )
    told.publish((told.judged(told.submitted()),))
    story = Story(told.work, told.spec).read(told.journal.events())
    found = {fate.lease.policy_version: fate.normalised for fate in story.fates.values()}
    assert found == {0: told.spec.grpo.normalise_std, 1: not told.spec.grpo.normalise_std}


def test_the_oldest_files_go_when_the_budget_is_used_up(tmp_path: Path) -> None:
    told = told_run(tmp_path, versions=6)
    told.keep(1)
    one = parts_of(told.folder)[0].path.stat().st_size
    for version in range(2, 7):
        told.keep(version, replace_keep(3.5 * one))
        assert sum(part.path.stat().st_size for part in parts_of(told.folder)) <= 3.5 * one
    assert [part.version for part in parts_of(told.folder)][-1] == 5
    assert 2 <= len(parts_of(told.folder)) <= 3
    told.keep(7, replace_keep(one / 2))
    assert parts_of(told.folder) == []  # a budget is a budget


def replace_keep(size: float) -> Keep:
    return msgspec.structs.replace(EVERYTHING, rollouts_gb=size / 1e9)


def test_what_the_disk_refuses_stays_in_the_journal_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = told_run(tmp_path, versions=4)
    real = rollout_files.writing

    def full(path: Path, columns: Any, sealed: bool = False) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rollout_files, "writing", full)
    kept = told.keep(3)
    assert kept.dropped == []
    assert "No space left" in kept.trouble
    assert "free some disk space" in kept.trouble
    half = sum(len(told.journal.payloads([key])[key]) for key in told.work) / 2
    lost = told.keep(4, replace_keep(half), drop=False)
    assert 0 < len(lost.dropped) < len(told.work)
    assert "lost" in lost.trouble
    oldest = {told.work[key][0].policy_version for key in lost.dropped}
    assert min(oldest) == 0
    monkeypatch.setattr(rollout_files, "writing", real)
    kept = told.keep(4)
    assert (kept.trouble, len(kept.dropped)) == ("", len(told.work))
    assert len(submissions(told.folder, tmp_path / "out")) == len(told.work)


def test_without_keys_nothing_in_the_rows_leads_to_a_volunteer_by_its_id(tmp_path: Path) -> None:
    told = told_run(tmp_path)
    told.keep(3)
    export_rollouts(closed(told), tmp_path / "out", Wanted(anonymous=True, refused=True))
    table = parquet.read_table(tmp_path / "out" / "data")
    gone = {"node", "submission", "lease", "unit", "task_seed", "engine", "submitted_at", "proofs"}
    assert not gone & set(table.column_names)
    everything = json.dumps(table.drop_columns(["logprobs"]).to_pylist()).encode()
    everything += (tmp_path / "out" / "README.md").read_bytes()
    for submission, (lease, _, _) in told.work.items():
        for text in (submission.hex(), lease.lease_id.hex(), lease.node.hex()):
            assert text.encode() not in everything
            assert text[:16].encode() not in everything or text.startswith("0000")
    groups: dict[str, int] = {}
    for group in table["group"].to_pylist():
        groups[group] = groups.get(group, 0) + 1
    assert set(groups.values()) == {2}
    assert "no promise of anonymity" in (tmp_path / "out" / "README.md").read_text()


def test_a_flipped_bit_in_a_kept_file_is_found(tmp_path: Path) -> None:
    """Parquet's own checksums miss some: in the heads of pages they are of no use."""
    told = told_run(tmp_path, versions=1)
    told.keep(2)
    path = parts_of(told.folder)[0].path
    good = path.read_bytes()
    assert len(rows_in(told)) == 16
    for place in range(4, len(good), len(good) // 120):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(RunFolderError, match="version 0"):
            rows_in(told)


def rows_in(told: Told) -> list[dict[str, Any]]:
    pieces = open_source(told.folder, lambda *_: None).pieces(ALL)
    return [row for piece in pieces for row in piece.read().to_pylist()]


def test_beside_a_damaged_file_what_comes_later_is_kept(tmp_path: Path) -> None:
    told = told_run(tmp_path)
    told.keep(3)
    path = parts_of(told.folder)[0].path
    path.write_bytes(path.read_bytes()[:-100])
    told.appealed(refused(told)[0])
    kept = told.keep(3)
    assert ([item.name for item in kept.files], kept.trouble) == (["v000000-1.parquet"], "")


# --- against the ledger


def checked(*arguments: Any) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["run", "check-rollouts", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An export with everything, and its ledger."""
    place = tmp_path_factory.mktemp("dataset")
    told = told_run(place)
    told.keep(3)
    folder = closed(told)
    export_rollouts(folder, place / "out", ALL)
    done = CliRunner().invoke(app, ["ledger", "export", str(folder), str(place / "ledger.bin")])
    assert done.exit_code == 0, done.output
    return place / "out", place / "ledger.bin"


def test_an_export_agrees_with_the_ledger_and_digests_are_made_again(dataset: tuple[Path, Path]) -> None:
    code, found = checked(*dataset)
    assert (code, found["ok"], found["problems"]) == (0, True, [])
    assert (found["submissions"], found["remade"], found["rows"]) == (16, 16, 64)


LIES: dict[str, tuple[str, Any, str]] = {
    "another's work": ("node", NODES[1].peer_id, "no such work"),
    "a version": ("policy_version", 77, "rows do not agree|drawn at"),
    "a verdict": ("accepted", None, "verdict|agree"),
    "a reason": ("message", "mended", "agree|threshold"),
    "a token": ("tokens", [3, 3, 3, 3, 3, 3, 3, 3], "digest differs"),
    "a log-probability": ("logprobs", [0.5], "digest differs"),
    "a proof": ("proofs", b"x", "digest differs"),
    "what it was used for": ("trained_version", 2, "not made with it"),
    "work that was never done": ("submission", "ab" * 32, "no such work|digest"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_changed_row_is_found(lie: str, dataset: tuple[Path, Path], tmp_path: Path) -> None:
    name, value, why = LIES[lie]
    shutil.copytree(dataset[0], tmp_path / "out")
    (path,) = (tmp_path / "out" / "data").iterdir()
    table = parquet.read_table(path)
    rows = table.to_pylist()
    at = next(number for number, row in enumerate(rows) if row["node"] == NODES[0].peer_id)
    changed = [at]
    if name == "trained_version":  # of all its rows: only the operator's signed word knows better
        changed = [number for number, row in enumerate(rows) if row["submission"] == rows[at]["submission"]]
    for number in changed:
        rows[number][name] = not rows[number][name] if value is None else value
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), path)
    code, found = checked(tmp_path / "out", dataset[1])
    assert code == 1
    assert any(word in " ".join(found["problems"]) for word in why.split("|")), found["problems"]


def test_a_missing_row_is_found_by_the_credit(dataset: tuple[Path, Path], tmp_path: Path) -> None:
    """Also where there are no proofs to make a digest of."""
    shutil.copytree(dataset[0], tmp_path / "out")
    (path,) = (tmp_path / "out" / "data").iterdir()
    table = parquet.read_table(path).drop_columns(["proofs"])
    parquet.write_table(table.slice(1), path)
    code, found = checked(tmp_path / "out", dataset[1])
    assert (code, found["remade"]) == (1, 0)
    assert "3 rows of 4" in found["problems"][0]


# --- the command


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = told_run(tmp_path, versions=1)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").write_text("")
    run, out = str(closed(told)), str(tmp_path / "out")
    for arguments, why in (
        ([run, str(tmp_path / "used")], "not an empty folder"),
        ([run, out, "--versions", "9..3"], "is before"),
        ([run, out, "--versions", "x"], "5..9"),
        ([run, out, "--versions", "7.."], "no rollouts of those versions"),
        ([run, out, "--anonymous", "--proofs"], "takes the keys"),
        ([run, out, "--license", "a: b"], "Hugging Face's ids"),
        ([str(make_run(tmp_path, "new")), out], "has not begun"),
        ([str(tmp_path / "nothing"), out], "no complete run folder"),
    ):
        assert main(["run", "export-rollouts", *arguments]) == 2
        assert why in capsys.readouterr().err
    assert main(["run", "export-rollouts", run, out, "--versions", "..0", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["first"], said["last"], said["files"]) == (12, 0, 0, 1)


def test_without_pyarrow_it_is_said_what_to_install_and_a_run_that_keeps_none_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = closed(told_run(tmp_path, versions=1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["run", "export-rollouts", str(folder), str(tmp_path / "out")]) == 2
    assert "pip install 'barnraise[parquet]'" in capsys.readouterr().err


async def test_a_coordinator_that_keeps_rollouts_needs_pyarrow_and_one_that_keeps_none_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: Clock
) -> None:
    folder = make_run(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with coordinating(MemorySwarm(), folder, keep=Keep(rollouts="accepted")):
            pass
    assert caught.group_contains(RunFolderError, match="pyarrow")
    async with coordinating(MemorySwarm(), folder) as coordinator:
        await head_is(coordinator, 0)


# --- in a running coordinator


def stored(folder: Path) -> dict[str, bytes]:
    paths = [*folder.glob("state.sqlite*"), *folder.glob("rollouts/*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.suffix != "-shm"}


def put_back(folder: Path, files: dict[str, bytes]) -> None:
    for path in [*folder.glob("state.sqlite*"), *folder.glob("rollouts/*")]:
        path.unlink()
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


async def test_killed_at_any_durable_step_every_verified_rollout_is_there_once(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, swarm = make_run(tmp_path, versions=5), MemorySwarm()
    moments: list[dict[str, bytes]] = []
    commit, move = Journal.commit, Path.replace

    def committing(self: Journal, writes: list[Write]) -> None:
        if any(write.drop_payloads for write in writes):
            moments.append(stored(folder))
        commit(self, writes)
        if any(write.drop_payloads for write in writes):
            moments.append(stored(folder))

    def moving(self: Path, target: Path) -> Path:
        if target.parent.name != "rollouts":
            return move(self, target)
        moments.append(stored(folder))
        made = move(self, target)
        moments.append(stored(folder))
        return made

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "commit", committing)
        patched.setattr(Path, "replace", moving)
        async with (
            coordinating(swarm, folder, keep=EVERYTHING) as coordinator,
            trio.open_nursery() as nursery,
        ):
            await head_is(coordinator, 0)
            async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
                nursery.start_soon(volunteer, ann, coordinator)
                nursery.start_soon(volunteer, bob, coordinator)
                await head_is(coordinator, 4)
                nursery.cancel_scope.cancel()
    assert len(moments) >= 12
    for number, files in enumerate(moments):
        put_back(folder, files)
        with closing(Journal(folder / "state.sqlite")) as journal:  # as a start does
            story = Story(Everything(), open_source(folder, lambda *_: None).spec).read(journal.events())
        judged = {key.hex(): 4 for key, fate in story.fates.items() if fate.verdict is not None}
        assert submissions(folder, tmp_path / f"out-{number}") == judged
        shutil.rmtree(tmp_path / f"out-{number}")


class Everything:
    def __contains__(self, item: object) -> bool:
        return True


async def test_a_full_disk_holds_nothing_up_and_what_waited_is_kept_afterwards(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, swarm = make_run(tmp_path, versions=8), MemorySwarm()
    real, refusals = rollout_files.writing, []

    def full(path: Path, columns: Any, sealed: bool = False) -> Any:
        refusals.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rollout_files, "writing", full)
    async with coordinating(swarm, folder, keep=EVERYTHING) as coordinator:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator, b"a") as ann, trio.open_nursery() as nursery:
            nursery.start_soon(volunteer, ann, coordinator)
            await head_is(coordinator, 4)
            assert refusals
            assert "No space left" in caplog.text
            assert parts_of(folder) == []
            monkeypatch.setattr(rollout_files, "writing", real)
            await head_is(coordinator, 6)
            await until(lambda: len(parts_of(folder)) >= 5)
            await head_is(coordinator, 8)
    there = submissions(folder, tmp_path / "out")
    with closing(Journal(folder / "state.sqlite", reading=True)) as journal:
        story = Story(Everything(), open_source(folder, lambda *_: None).spec).read(journal.events())
    assert there == {key.hex(): 4 for key, fate in story.fates.items() if fate.verdict is not None}

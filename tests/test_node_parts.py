"""The node's small parts: what it keeps on disk, whom it trusts, its clock, its start."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.node import main
from barnraise.node.clock import Clock, duration
from barnraise.node.config import NodeConfig, default_data_path, default_key_path
from barnraise.node.core import initial
from barnraise.node.describe import sentence
from barnraise.node.known import KnownRuns
from barnraise.node.model import Activity
from barnraise.node.pending import PendingWork
from barnraise.node.state import Facts, state_tree
from barnraise.protocol.durable import write_durably
from barnraise.protocol.envelope import content_id, sign
from barnraise.protocol.errors import KeyFileError, PeerError, SignatureError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import Rollout, RolloutLease, RolloutSubmission, Signed
from barnraise.tui.status import overview

RUN = b"r" * 32
ME = Identity.generate()


def submission(number: int, identity: Identity = ME, run: bytes = RUN) -> Signed:
    rollout = Rollout(prompt=0, sample=0, tokens=b"", logprobs=b"", proofs=b"")
    work = RolloutSubmission(
        run_id=run,
        lease_id=number.to_bytes(16, "big"),
        policy_version=0,
        engine="e",
        generate_ms=1,
        rollouts=(rollout,),
    )
    return sign(work, identity)


def lease(number: int) -> Signed:
    return sign(
        RolloutLease(
            run_id=RUN,
            lease_id=number.to_bytes(16, "big"),
            unit_id=1,
            node=ME.public_key,
            policy_version=0,
            prompts=1,
            group_size=1,
            issued_at=0,
            timeout_at=1,
            deadline_at=2,
        ),
        ME,
    )


def test_unacknowledged_work_survives_a_restart_in_order(tmp_path: Path) -> None:
    work = PendingWork(tmp_path / "pending", RUN, ME.public_key)
    ids = [work.add(submission(n), n.to_bytes(16, "big")) for n in (3, 1, 2)]
    work.drop(ids[1])
    again = PendingWork(tmp_path / "pending", RUN, ME.public_key)
    assert again.ids == (ids[0], ids[2])
    assert again.lease_ids == {(3).to_bytes(16, "big"), (2).to_bytes(16, "big")}
    signed = again.get(ids[0])
    assert signed is not None
    assert content_id(signed) == ids[0]
    assert again.add(submission(9), (9).to_bytes(16, "big")) == again.ids[-1]
    assert again.get(b"unknown") is None


def test_damaged_or_foreign_work_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "pending"
    work = PendingWork(folder, RUN, ME.public_key)
    good = work.add(submission(1), (1).to_bytes(16, "big"))
    other = PendingWork(folder, RUN, ME.public_key)
    other.add(submission(2, Identity.generate()), bytes(16))
    other.add(submission(3, run=b"x" * 32), bytes(16))
    (folder / "00000009-rubbish.bin").write_bytes(b"rubbish")
    (folder / "no-number.bin").write_bytes((next(iter(folder.glob("00000000*")))).read_bytes())
    (folder / ".tmp-00000010").write_bytes(b"torn")
    again = PendingWork(folder, RUN, ME.public_key)
    assert again.ids == (good,)
    assert len(list(folder.iterdir())) == 1
    assert caplog.text.count("no submission of ours") == 4


@pytest.mark.parametrize("at", [0, 3, -1], ids=str)
@pytest.mark.parametrize("cut", [False, True], ids=["flipped", "torn"])
def test_a_damaged_lease_is_forgotten_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int, cut: bool
) -> None:
    """Unless what is damaged is its signature, which the coordinator's own record makes up for."""
    path = tmp_path / "lease.bin"
    PendingWork(tmp_path / "pending", RUN, ME.public_key).keep_lease(lease(5))
    data = bytearray(path.read_bytes())
    data[at] ^= 0x80
    path.write_bytes(bytes(data[:at]) if cut else bytes(data))
    again = PendingWork(tmp_path / "pending", RUN, ME.public_key)
    if again.left_lease() is None:
        assert not path.exists()
        assert "lease.bin, which is no lease" in caplog.text
    else:
        assert (at, cut) == (-1, False)


def test_the_lease_at_work_is_remembered_until_its_work_is_signed(tmp_path: Path) -> None:
    work = PendingWork(tmp_path / "pending", RUN, ME.public_key)
    assert work.left_lease() is None
    work.keep_lease(lease(5))
    assert PendingWork(tmp_path / "pending", RUN, ME.public_key).left_lease() == (5).to_bytes(16, "big")
    work.clear_lease((6).to_bytes(16, "big"))
    assert work.left_lease() is not None
    work.add(submission(5), (5).to_bytes(16, "big"))
    assert work.left_lease() is None


def test_a_refusing_disk_is_a_storage_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        write_durably(tmp_path / "file" / "x", b"data")


def test_a_changed_run_key_is_refused_until_the_person_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    first, second = Identity.generate().public_key, Identity.generate().public_key
    KnownRuns(path).check("12D3coordinator", first)
    known = KnownRuns(path)
    known.check("12D3coordinator", first)
    with pytest.raises(SignatureError, match=r"known\.json"):
        known.check("12D3coordinator", second)
    known.check("12D3another", second)
    assert not known.approved(RUN)
    known.approve(RUN)
    assert KnownRuns(path).approved(RUN)
    path.write_text("{")
    with pytest.raises(StorageError, match="delete it"):
        KnownRuns(path)


def test_a_run_is_found_again_by_name_id_or_as_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    with pytest.raises(PeerError, match="no run was joined"):
        KnownRuns(path).lead(None)
    for peer_id, run, name in (
        ("p1", b"\x11" * 32, "barn"),
        ("p2", b"\x12" * 32, "barn"),
        ("p3", RUN, "roof"),
    ):
        known = KnownRuns(path)
        known.joined(peer_id, run)
        known.reached(peer_id, name, [f"/ip4/1.2.3.4/tcp/1/p2p/{peer_id}"])
    known.reached("p1", "barn", ["/dns4/new/tcp/1/p2p/p1"])
    known = KnownRuns(path)
    assert known.lead(None).addresses == ("/dns4/new/tcp/1/p2p/p1", "/ip4/1.2.3.4/tcp/1/p2p/p1")
    assert known.lead("roof").run_id == RUN.hex()
    assert known.lead("1212").addresses == ("/ip4/1.2.3.4/tcp/1/p2p/p2",)
    with pytest.raises(PeerError, match=r"may be any of 'barn' \(1111.*'barn' \(1212.*by its id"):
        known.lead("barn")
    with pytest.raises(PeerError, match=r"'cellar' is neither an address.*'roof'"):
        known.lead("cellar")


def test_peers_are_the_other_nodes_connected_now_wherever_they_are_shown() -> None:
    facts = Facts("name", "me", coordinator="boss", peers=3)
    assert state_tree(initial(False, 0.0), facts, 0.0, 0)["peers"] == 3  # without a tree
    facts.tree = {"neighbours": [{"peer": "boss"}, {"peer": "ann"}]}
    tree = state_tree(initial(False, 0.0), facts, 0.0, 0)
    assert tree["peers"] == 1
    assert ("peers", "1 connected") in overview(tree, 0.0)


def test_sleep_is_told_apart_from_a_clock_that_was_set() -> None:
    wall = [1_000_000_000]
    clock = Clock(lambda: wall[0])
    assert clock.compare(wall[0], wall[0], wall[0] + 50, 0.0) == []
    assert clock.offset_ms == 50
    wall[0] += 3_600_000  # an hour on the wall, ten seconds on the clock that stands still
    (line,) = clock.compare(wall[0], wall[0], wall[0] + 50, 10.0)
    assert "slept for about 59 min 50 s" in line
    wall[0] += 5_000 + 120_000
    (line,) = clock.compare(wall[0], wall[0], wall[0] - 120_000 + 50, 15.0)
    assert "was set by 2 min" in line


def test_skew_over_five_minutes_warns_once_with_the_number() -> None:
    clock = Clock(lambda: 0)
    (line,) = clock.compare(0, 0, 400_000, 0.0)
    assert "6 min 40 s behind" in line
    assert clock.compare(5_000, 5_000, 405_000, 5.0) == []
    assert clock.coordinator_ms() == 400_000
    assert clock.local(410_000, 7.0) == 17.0


@given(st.integers(0, 10**6), st.integers(0, 9_999), st.integers(-(10**6), 10**6))
def test_the_offset_is_wrong_by_half_the_round_trip_at_most(sent: int, trip: int, offset: int) -> None:
    for share in (0.0, 0.3, 1.0):
        clock = Clock(lambda: 0)
        clock.compare(sent, sent + trip, sent + int(trip * share) + offset + 10**6, 0.0)
        assert clock.offset_ms is not None
        assert abs(clock.offset_ms - offset - 10**6) <= trip / 2 + 1


def test_durations_and_sentences_are_for_people() -> None:
    assert duration(0) == "0 s"
    assert duration(90_000) == "1 min 30 s"
    assert duration(-86_400_000 * 2 - 3_600_000) == "-2 d 1 h"
    text = sentence(Activity("offline", "no answer", 100.0, 160.0, "tries again"), 130.0, 1_800_000_000_000)
    assert text.startswith("offline: no answer (since ")
    assert text.endswith(", tries again in 30 s)")


def config(folder: Path, **settings: object) -> NodeConfig:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{ME.peer_id}"
    values: dict[str, object] = {"address": address, "data": folder / "data", "key": folder / "node.key"}
    return NodeConfig(**{**values, **settings})  # type: ignore[arg-type]


def test_names_are_made_presentable(tmp_path: Path) -> None:
    assert config(tmp_path, name="a\nb\x1b[31m").called(ME.peer_id) == "a b\N{REPLACEMENT CHARACTER}[31m"
    assert len(config(tmp_path, name="x" * 100).called(ME.peer_id)) == 64
    assert config(tmp_path, name=" \n").called(ME.peer_id) == config(tmp_path).called(ME.peer_id)
    assert config(tmp_path).called(ME.peer_id) == f"node-{ME.peer_id[-6:]}"  # not the host's name


def test_the_key_lies_outside_of_the_data_folder() -> None:
    assert default_data_path() not in default_key_path().parents


@pytest.mark.parametrize(
    "address", ["", "localhost:4001", "/ip4/1.2.3.4/tcp/4001", "/ip4/1.2.3.4/tcp/1/p2p/xyz", "\x1b[31m/p2p/"]
)
def test_an_unusable_address_is_one_line_and_exit_code_2(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run_from_config(config(tmp_path, address=address)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert not (tmp_path / "data").exists()


def test_two_daemons_never_share_a_data_folder(tmp_path: Path) -> None:
    with main._locked(config(tmp_path)):
        with pytest.raises(StorageError, match="--data"), main._locked(config(tmp_path)):
            pass
    with main._locked(config(tmp_path)):
        pass


def test_a_bad_key_is_an_error_on_the_way_up_and_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "node.key").write_text("rubbish")
    (tmp_path / "node.key").chmod(0o600)
    with pytest.raises(KeyFileError):
        main.run_from_config(config(tmp_path))
    assert "rubbish" not in (tmp_path / "data" / "node.log").read_text()
    assert '"level": "error"' in (tmp_path / "data" / "node.log").read_text()
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


def test_lines_are_plain_or_json_and_never_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for as_json in (False, True):
        (tmp_path / "data").mkdir(exist_ok=True)
        with main._logging(config(tmp_path, json_lines=as_json)):
            logging.getLogger("barnraise.node").warning("evil \x1b[2J %s", "name\n")
            logging.getLogger("barnraise.protocol.session").info("detail")
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert out.count("\n") == 1
        assert "detail" not in out
        if as_json:
            assert json.loads(out)["level"] == "warning"
        else:
            assert "warning: evil" in out
    assert "detail" in (tmp_path / "data" / "node.log").read_text()

"""A volunteer's side of a wrong verdict: the real daemon, its receipts, an appeal, the commands for it."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from coordinator_support import Coordinator, coordinating, make_run, virtual_ms

from barnraise.node.config import NodeConfig
from barnraise.node.daemon import run_node
from barnraise.node.handle import NodeHandle
from barnraise.node.kept import MAX_FILES, KeptWork
from barnraise.node.receipt_words import find_receipt, latest, words
from barnraise.protocol import wire
from barnraise.protocol.envelope import content_id, sign
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Receipt, RolloutSubmission, Verdict
from barnraise.tui.main import main
from barnraise.tui.status import standing
from tests.test_node_and_coordinator import Engine, until
from tests.test_standing import Wrong

ANN = Identity.from_private_bytes(b"a" * 32)


@asynccontextmanager
async def volunteering(
    swarm: MemorySwarm, coordinator: Coordinator, data: Path, engine: Engine
) -> AsyncIterator[NodeHandle]:
    config = NodeConfig(address=coordinator.address, data=data, key=data.with_suffix(".key"), name="ann")
    async with swarm.network(ANN.peer_id) as network, trio.open_nursery() as nursery:

        async def live(task_status: Any) -> None:
            await run_node(
                config, network, engine, ANN, virtual_ms, random.Random(1), task_status=task_status
            )

        yield await nursery.start(live)
        nursery.cancel_scope.cancel()


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


async def test_a_wrong_verdict_is_seen_appealed_and_made_good(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = make_run(tmp_path, versions=50), tmp_path / "ann"
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder, Wrong()) as coordinator:
        async with volunteering(swarm, coordinator, data, Engine()) as handle:
            appeal, tree = handle.commands["appeal"], handle.get_state
            with pytest.raises(BarnraiseError, match="not joined"):
                await appeal({"receipt": "#1"})
            await until(lambda: tree()["rejected"] == 1)
            (entry,) = json.loads(shown(capsys, "receipts", str(data), "--rejected", "--json"))["receipts"]
            assert (entry["check"], entry["threshold"], entry["value"]) == ("toploc", 10.0, 99.0)
            assert entry["outcome"] == "rejected"
            line = shown(capsys, "receipts", str(data))
            assert "rejected by check toploc: 99, the threshold is 10" in line
            told = tree()["standing"]
            assert "1 rejections not made good yet: the last by check toploc" in standing(told, 0.0)
            await handle.commands["pause"]({})
            reply = await appeal({"receipt": entry["submission"][:12]})
            assert reply["submission"] == entry["submission"]
            await until(lambda: coordinator.state()["appeals_open"] == 0)
            await until(lambda: tree()["credit"] > 0)
            assert tree()["standing"]["strikes"] == 0
            with pytest.raises(BarnraiseError, match="nothing to appeal"):
                await appeal({"receipt": f"#{entry['ledger_index']}"})
            with pytest.raises(BarnraiseError, match="no receipt begins"):
                await appeal({"receipt": "ffffffffffff"})
            found = json.loads(shown(capsys, "receipts", str(data), "--json"))["receipts"]
            mine = [item for item in found if item["submission"] == entry["submission"]]
            assert [item["counts"] for item in mine] == [False, True]
            assert mine[-1]["outcome"] == "accepted"


async def test_rejected_work_is_kept_for_an_appeal_and_accepted_work_is_not(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    folder, data = make_run(tmp_path, versions=50), tmp_path / "ann"
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder) as coordinator:
        engine = Engine("bad")
        async with volunteering(swarm, coordinator, data, engine) as handle:
            await until(lambda: handle.get_state()["rejected"] == 2)
            assert len(list(data.glob("runs/*/kept/*.bin"))) == 2
    good = make_run(tmp_path, "other", versions=50)
    async with coordinating(swarm, good) as coordinator:
        async with volunteering(swarm, coordinator, tmp_path / "ben", Engine()) as handle:
            await until(lambda: handle.get_state()["accepted"] >= 2)
            await handle.commands["pause"]({})
            await until(lambda: not list((tmp_path / "ben").glob("runs/*/kept/*.bin")))


def submission(number: int) -> tuple[bytes, bytes]:
    work = RolloutSubmission(
        run_id=bytes(32), lease_id=bytes(16), policy_version=number, engine="e", generate_ms=1, rollouts=()
    )
    signed = sign(work, ANN)
    return content_id(signed), wire.encode(signed)


def test_what_is_kept_is_bounded_and_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    kept = KeptWork(tmp_path / "kept")
    ids = []
    for number in range(MAX_FILES + 5):
        submission_id, data = submission(number)
        path = tmp_path / "pending.bin"
        path.write_bytes(data)
        kept.take(submission_id, path)
        assert not path.exists()
        ids.append(submission_id)
    assert len(list((tmp_path / "kept").iterdir())) == MAX_FILES
    assert kept.get(ids[-1]) is not None
    (tmp_path / "kept" / f"{ids[-1].hex()}.bin").write_bytes(submission(99)[1])
    assert kept.get(ids[-1]) is None
    kept.drop(ids[-1])
    kept.drop(ids[-1])
    assert kept.get(ids[-1]) is None


def receipt(index: int, submission_id: bytes, check: str = "all", credit: int = 5) -> Receipt:
    accepted = check in ("all", "unaudited", "restored")
    verdict = Verdict(
        accepted=accepted, check=check, threshold=0.1, value=0.1, position="rollout 3", message="why"
    )
    return Receipt(
        run_id=bytes(32),
        node=ANN.public_key,
        lease_id=bytes(16),
        submission_id=submission_id,
        verdict=verdict,
        credit=credit if accepted else 0,
        ledger_index=index,
        issued_at=1,
    )


def test_a_receipt_is_found_by_index_or_by_the_start_of_an_id_and_the_newest_counts() -> None:
    one, two = b"\x12" * 32, b"\x12\x13" + b"\x14" * 30
    known = [receipt(3, one), receipt(9, one, "clawed-back"), receipt(4, two, "toploc")]
    assert latest(known)[one].ledger_index == 9
    assert find_receipt(known, "#3").ledger_index == 9
    assert find_receipt(known, "4").submission_id == two
    assert find_receipt(known, "121314").submission_id == two
    for text in ("1", "1200", "#77", "zzzz"):
        with pytest.raises(BarnraiseError, match="barnraise receipts"):
            find_receipt(known, text)
    with pytest.raises(BarnraiseError, match="no receipt begins"):
        find_receipt([msgspec.structs.replace(known[2], ledger_index=1)], "1299")


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("all", "accepted, every check passed: +5 Mflop"),
        ("unaudited", "accepted, without an audit, by a draw: +5 Mflop"),
        ("toploc", "rejected by check toploc at rollout 3: 0.1, the threshold is 0.1. why"),
        (
            "block-replay",
            "rejected by check block-replay (does a segment, done again, end in the same state?) "
            "at rollout 3: 0.1, the threshold is 0.1. why",
        ),
        ("unverifiable", "not verified, and no mark against you: why"),
        ("clawed-back", "0 Mflop taken back: why"),
        ("restored", "5 Mflop count again: why"),
    ],
)
def test_every_kind_of_receipt_has_words(check: str, text: str) -> None:
    assert words(receipt(1, bytes(32), check)) == text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "3 of 10 in a row verified, until then all work is checked"),
        ({"verified": 1200}, "proven, 1,200 in a row verified"),
        (
            {"strikes": 2, "quiet_until": 104_000, "reason": "the last by check toploc"},
            "3 of 10 in a row verified, until then all work is checked; 2 rejections not made good yet: "
            "the last by check toploc, next work in 4s",
        ),
        (
            {"banned_until": 3_700_000, "reason": "5 submissions failed"},
            "banned until 1970-01-01 01:01 UTC (1h 00m left): 5 submissions failed; see "
            "'barnraise receipts --rejected'",
        ),
        (
            {"banned_until": 99_000, "reason": "x"},
            "3 of 10 in a row verified, until then all work is checked",
        ),
    ],
    ids=["newcomer", "proven", "strikes", "banned", "over"],
)
def test_standing_in_words(change: dict[str, Any], text: str) -> None:
    told = {"verified": 3, "needed": 10, "strikes": 0, "quiet_until": 0, "banned_until": 0, "reason": ""}
    assert standing(told | change, 100.0) == text
    assert standing(None, 100.0) == ""


def test_receipts_and_appeal_say_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node").mkdir()
    assert main(["receipts", str(tmp_path / "none")]) == 2
    assert "not a folder" in capsys.readouterr().err
    assert main(["receipts", str(tmp_path / "node")]) == 1
    assert "no receipts yet" in capsys.readouterr().err
    assert main(["appeal", "#1", str(tmp_path / "node")]) == 1
    assert "start it with" in capsys.readouterr().err
    damaged = tmp_path / "node" / "runs" / "ab"
    damaged.mkdir(parents=True)
    (damaged / "receipts.bin").write_bytes(b"\0" * 11)
    assert main(["receipts", str(tmp_path / "node")]) == 1
    assert "the node repairs it" in capsys.readouterr().err

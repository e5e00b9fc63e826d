"""The whole loop with real processes, and what kill -9 does to it.

Starting a process that imports torch is what costs time here, so the stories share one
coordinator and two nodes on a run that never ends (one that is completed:
``test_pretrain_end_to_end``). Each leaves them at work, and none relies on another.
"""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_support import PATIENCE_S, Place, barnraise, call, environment, words_of
from swarm_support import make_model, make_run

from barnraise.kernels import demo_model
from barnraise.node.receipts import read_receipts
from barnraise.protocol import ledger
from barnraise.protocol.control_client import send_command
from barnraise.protocol.ledger_file import open_ledger, verify_ledger_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

State = dict[str, Any]
NAMES = ("node-1", "node-2")


def audit(here: Place, *homes: Path) -> dict[str, int]:
    """Verify the ledger offline from an exported file, with the receipts that the nodes kept."""
    target = here.folder / "ledger.bin"
    assert call("ledger", "export", str(here.run), str(target)).returncode == 0
    receipts = [
        signed
        for home in homes
        for path in home.glob("runs/*/receipts.bin")
        for signed in read_receipts(path)
    ]
    report = verify_ledger_file(target, receipts)
    assert report.problems == ()
    assert len(receipts) > 0
    return {"accepted": report.accepted, "rejected": report.rejected, "receipts": len(receipts)}


def test_ctrl_c_ends_the_demo_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The demo finds its model in the cache: a small one, since nobody is to learn here.
    small = make_model(tmp_path / "small")
    monkeypatch.setattr(
        demo_model, "_write_model", lambda folder, *how: shutil.copytree(small, folder, dirs_exist_ok=True)
    )
    cache = tmp_path / "cache"
    demo_model.create_demo_model(tmp_path / "model", 0, cache=cache / "barnraise")
    log = tmp_path / "demo.log"
    with log.open("wb") as out:
        demo = psutil.Popen(
            barnraise(
                "demo", "--phase", "posttrain", "--plain", "--nodes", "1", "--keep", str(tmp_path / "kept")
            ),
            env={**environment(), "XDG_CACHE_HOME": str(cache)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    below: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not any("join" in words_of(child) for child in below):
            assert time.monotonic() < deadline, log.read_text()
            assert demo.is_running(), log.read_text()
            time.sleep(0.1)
            below = demo.children(recursive=True)
        assert len(below) >= 2  # and the coordinator, whose children may not be up yet
        demo.send_signal(signal.SIGINT)
        below = demo.children(recursive=True)
        assert demo.wait(PATIENCE_S) == 130, log.read_text()
    finally:
        if demo.is_running():
            demo.kill()
    _, alive = psutil.wait_procs(below, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


# --- one place for all


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A coordinator and two nodes at work, whose first units were accepted."""
    folder = tmp_path_factory.mktemp("living")
    run = make_run(folder / "run", make_model(folder / "model"), time.time_ns() // 1_000_000, versions=60_000)
    here = Place(folder, run)
    try:
        address = here.coordinator()
        for name in NAMES:
            here.node(name, address)
        for name in NAMES:
            here.wait(folder / name, lambda state: state["accepted"] > 0)
        yield here
    finally:
        here.stop()


def homes(here: Place) -> list[Path]:
    return [here.folder / name for name in NAMES]


def rises(here: Place, before: State, versions: int = 1) -> State:
    """Wait for newer versions than ``before``, out of more accepted work."""
    head, accepted = before["policy_version"] + versions, before["accepted"]
    return here.wait(here.run, lambda state: state["policy_version"] >= head and state["accepted"] > accepted)


def nothing_is_lost(here: Place) -> None:
    """Pause the nodes; all they handed in was judged, and the ledger agrees with every receipt."""
    for home in homes(here):
        send_command(home / "control.sock", "pause", PATIENCE_S)
    for home in homes(here):
        idle: Callable[[State], bool] = lambda state: (  # noqa: E731
            state["connected"] and state["unit"] is None and not state["pending"] + state["awaiting_verdict"]
        )
        here.wait(home, idle)
    here.wait(here.run, lambda state: state["queue"] == 0)
    counted = audit(here, *homes(here))
    assert counted["receipts"] == counted["accepted"] + counted["rejected"]
    assert counted["rejected"] == 0
    with open_ledger(here.folder / "ledger.bin") as opened:
        entries = list(opened.entries)
    submitted = {entry.submission_id for entry in entries if isinstance(entry, ledger.Submitted)}
    assert submitted == {entry.submission_id for entry in entries if isinstance(entry, ledger.Judged)}
    for home in homes(here):
        send_command(home / "control.sock", "resume", PATIENCE_S)


def test_three_processes_raise_a_model_and_the_ledger_agrees(living: Place) -> None:
    here = living
    after = rises(here, here.now(here.run), versions=3)
    made = [version for version, _ in after["rewards"]]
    assert made[-3:] == list(range(after["policy_version"] - 2, after["policy_version"] + 1))
    assert after["rejected"] == 0
    shown = call("status", str(here.run), "--json")
    assert json.loads(shown.stdout)["policy_version"] >= after["policy_version"]
    nothing_is_lost(here)
    verified = call("ledger", "verify", str(here.run), "--receipts", str(here.folder / NAMES[0]))
    assert verified.returncode == 0, verified.stdout
    assert "Traceback" not in "".join(path.read_text() for path in here.folder.glob("*.log"))


def test_kill_9_of_the_coordinator_loses_nothing_acknowledged(living: Place) -> None:
    here = living
    before = here.now(here.run)
    here.kill("coordinator")
    assert here.coordinator() == before["address"]
    after = rises(here, before)
    assert after["ledger_size"] > before["ledger_size"]
    for home in homes(here):
        here.wait(home, lambda state: state["connected"])
    nothing_is_lost(here)


def test_kill_9_of_the_learner_only_costs_time(living: Place) -> None:
    here = living
    before = here.now(here.run)
    (learner,) = here.children("coordinator", "learner_child")
    learner.kill()
    after = rises(here, before, versions=2)  # the first may have been made already
    (another,) = here.children("coordinator", "learner_child")
    assert another.pid != learner.pid
    made = [version for version, _ in after["rewards"]]
    assert made == list(range(made[0], after["policy_version"] + 1))
    nothing_is_lost(here)


@pytest.mark.long
def test_kill_9_of_a_node_and_of_an_engine_stops_nobody(living: Place) -> None:
    here = living
    first, second = homes(here)
    before, had = here.now(here.run), here.now(second)
    (engine,) = here.children("node-2", "engine_child")
    engine.kill()
    here.kill("node-1")
    here.node("node-1", before["address"])  # the same key comes back (R4)
    here.wait(first, lambda state: state["connected"] and state["units_done"] > 0)
    here.wait(second, lambda state: state["accepted"] > had["accepted"] + 2)
    (another,) = here.children("node-2", "engine_child")
    assert another.pid != engine.pid
    after = rises(here, before)
    assert len(after["nodes"]) == 2
    assert here.processes["node-2"].poll() is None
    nothing_is_lost(here)


def test_a_port_in_use_is_one_clear_line_and_exit_code(living: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_run(other, living.folder / "model", 0)
    done = call("coordinator", "run", str(other), "--listen", living.listen)
    assert done.returncode in (1, 2)
    assert len(done.stderr.strip().splitlines()) == 1
    assert living.listen.rsplit("/", 1)[1] in done.stderr
    again = call("coordinator", "run", str(living.run), "--listen", "/ip4/127.0.0.1/tcp/0")
    assert again.returncode == 2
    assert "another coordinator" in again.stderr

"""The whole loop with real processes, and what kill -9 does to it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from e2e_support import Place, barnraise, call, descendants, environment, place

from barnraise.node.receipts import read_receipts
from barnraise.protocol.ledger_file import verify_ledger_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]


def version_at_least(version: int, **more: int):  # type: ignore[no-untyped-def]
    return lambda state: state["policy_version"] >= version and all(state[k] >= v for k, v in more.items())


def audit(here: Place, *homes: Path) -> dict[str, object]:
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


def test_three_processes_raise_a_model_and_the_ledger_agrees(tmp_path: Path) -> None:
    with place(tmp_path, versions=3) as here:
        address = here.coordinator()
        homes = [here.node(name, address) for name in ("node-1", "node-2")]
        final = here.wait(here.run, lambda state: state["complete"])
        assert final["policy_version"] == 3
        assert final["rejected"] == 0
        assert {row["name"] for row in final["nodes"] if row["credit"] > 0} == {"node-1", "node-2"}
        for home in homes:  # every verdict reaches its node
            here.wait(home, lambda state: state["accepted"] > 0 and state["awaiting_verdict"] == 0)
        shown = call("status", str(here.run), "--json")
        assert json.loads(shown.stdout)["complete"] is True
        counted = audit(here, *homes)
        assert counted["accepted"] == here.state(here.run)["accepted"]
        assert counted["receipts"] == counted["accepted"]
        verified = call("ledger", "verify", str(here.run), "--receipts", str(homes[0]))
        assert verified.returncode == 0, verified.stdout
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("*.log"))


def test_kill_9_of_the_coordinator_loses_nothing_acknowledged(tmp_path: Path) -> None:
    with place(tmp_path, versions=5) as here:
        address = here.coordinator()
        home = here.node("node-1", address)
        before = here.wait(here.run, version_at_least(1, accepted=1))
        here.kill("coordinator")
        assert here.coordinator() == address
        after = here.wait(here.run, lambda state: state["complete"])
        assert after["accepted"] > before["accepted"]
        assert after["ledger_size"] > before["ledger_size"]
        here.wait(home, lambda state: state["awaiting_verdict"] == 0 and state["pending"] == 0)
        audit(here, home)


def test_kill_9_of_the_learner_only_costs_time(tmp_path: Path) -> None:
    with place(tmp_path, versions=4) as here:
        address = here.coordinator()
        home = here.node("node-1", address)
        here.wait(here.run, version_at_least(1))
        (learner,) = here.children("coordinator", "learner_child")
        learner.kill()
        final = here.wait(here.run, lambda state: state["complete"])
        assert [version for version, _ in final["rewards"]] == [1, 2, 3, 4]
        here.wait(home, lambda state: state["awaiting_verdict"] == 0)
        audit(here, home)


def test_kill_9_of_a_node_and_of_an_engine_stops_nobody(tmp_path: Path) -> None:
    with place(tmp_path, versions=6) as here:
        address = here.coordinator()
        homes = [here.node(name, address) for name in ("node-1", "node-2")]
        for home in homes:
            here.wait(home, lambda state: state["accepted"] > 0)
        (engine,) = here.children("node-2", "engine_child")
        engine.kill()
        here.kill("node-1")
        name_before = here.state(here.run)
        here.node("node-1", address)  # the same key comes back (R4)
        here.wait(homes[0], lambda state: state["connected"])
        final = here.wait(here.run, lambda state: state["complete"])
        assert final["accepted"] > name_before["accepted"]
        assert len(final["nodes"]) == 2
        assert here.processes["node-2"].poll() is None
        audit(here, homes[1])


def test_a_port_in_use_is_one_clear_line_and_exit_code(tmp_path: Path) -> None:
    with place(tmp_path, versions=1) as here:
        here.coordinator()
        other = tmp_path / "other"
        done = call(
            "run",
            "init",
            str(other),
            "--model",
            str(tmp_path / "model"),
            "--plain-prompts",
            "--environment",
            "reverse",
        )
        assert done.returncode == 0, done.stderr
        done = call("coordinator", "run", str(other), "--listen", here.listen)
        assert done.returncode in (1, 2)
        assert len(done.stderr.strip().splitlines()) == 1
        assert here.listen.rsplit("/", 1)[1] in done.stderr
        again = call("coordinator", "run", str(here.run), "--listen", "/ip4/127.0.0.1/tcp/0")
        assert again.returncode == 2
        assert "another coordinator" in again.stderr


def test_ctrl_c_ends_the_demo_and_leaves_no_process(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    cache = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    demo = subprocess.Popen(
        barnraise("demo", "--plain", "--nodes", "1", "--keep", str(keep)),
        env={**environment(), **cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.stdout is not None
    try:
        for line in demo.stdout:
            if "coordinator ready" in line:
                break
        time.sleep(1.0)  # its node is being started
        below = descendants()
        assert len(below) >= 3
        demo.send_signal(signal.SIGINT)
        assert demo.wait(20) == 130
    finally:
        demo.kill()
        demo.stdout.close()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in below if psutil.pid_exists(pid)], timeout=5)
    assert not [process for process in alive if process.is_running() and process.status() != "zombie"]

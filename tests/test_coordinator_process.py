"""``barnraise coordinator run`` as a real process: ready, visible, ended by a signal, back after kill -9."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from coordinator_support import make_run

from barnraise.coordinator import main
from barnraise.coordinator.main import run_from_folder
from barnraise.coordinator.web.listen import Bind
from barnraise.protocol.control_client import read_state, send_command
from barnraise.protocol.errors import PeerError, RunFolderError
from barnraise.protocol.ledger_file import verify_ledger_file

CODE = (
    "import sys\nfrom pathlib import Path\nfrom barnraise.coordinator.main import run_from_folder\n"
    "from barnraise.coordinator.web.listen import Bind\n"
    "page = Bind('127.0.0.1', 0, fall_back=False)\n"
    "sys.exit(run_from_folder(Path(sys.argv[1]), listen=('/ip4/127.0.0.1/tcp/0',), http=page))\n"
)


def test_a_runs_name_moves_no_cursor(tmp_path: Path) -> None:
    said: list[str] = []
    with main._logging(tmp_path, said.append):
        main.log.info("run %s", "a\x1b[2J\x9bb\r")
    assert [line.partition(" ")[2] for line in said] == ["run a\ufffd[2J\ufffdb\ufffd"]


@contextmanager
def coordinator(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CODE, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            found = re.search(r"barnraise join (/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)", line)
            if found:
                break
        else:
            pytest.fail("".join(lines))
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.e2e
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_signal_ends_it_cleanly_and_a_kill_leaves_no_orphan(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with coordinator(folder) as (process, address):
        state = read_state(folder / "control.sock")
        assert (state["kind"], state["pid"], state["address"]) == ("coordinator", process.pid, address)
        wait_for(lambda: children_of(process.pid))  # the learner
        children = children_of(process.pid)
        assert process.stdout is not None
        page = re.search(r"page: (http://127\.0\.0\.1:\d+/)", process.stdout.readline())
        assert page is not None
        assert httpx.get(f"{page[1]}healthz", trust_env=False).text == "ok\n"
        assert "barnraise join" in httpx.get(page[1], trust_env=False).text
        result = send_command(folder / "control.sock", "export-ledger")
        assert verify_ledger_file(Path(result["path"])).ok
        with pytest.raises(RunFolderError, match=f"process {process.pid}"):
            run_from_folder(folder)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert time.monotonic() - started < 10  # 2 s, and room for a busy machine
        wait_for(lambda: not any(map(alive, children)))
        assert not (folder / "control.sock").exists()
    with coordinator(folder) as (process, _):
        wait_for(lambda: children_of(process.pid))
        children = children_of(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(alive, children)))
    with coordinator(folder) as (process, _):
        assert read_state(folder / "control.sock")["ledger_size"] <= 2  # the run, once, and an audit seed


@pytest.mark.e2e
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=f"port {port} is in use"):
            run_from_folder(make_run(tmp_path), listen=(f"/ip4/127.0.0.1/tcp/{port}",), out=lambda text: None)
        page = Bind("127.0.0.1", port, fall_back=False)
        with pytest.raises(PeerError, match=f"127.0.0.1:{port} .*--no-http"):
            run_from_folder(
                tmp_path / "run", listen=("/ip4/127.0.0.1/tcp/0",), http=page, out=lambda text: None
            )

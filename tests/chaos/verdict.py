"""What has to be so after any chaos."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from e2e_support import PATIENCE_S, call

from barnraise.node.receipts import read_receipts
from barnraise.protocol import ledger
from barnraise.protocol.control_client import send_command
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.ledger_file import open_ledger
from barnraise.protocol.messages import Receipt
from barnraise.protocol.wire import decode
from chaos.plan import NODES
from chaos.swarm import Chaos

LONG_S = 2 * PATIENCE_S
REWARD_NOISE = 0.15  # between means of five versions of 16 completions and more, each in 0..1
ACCURACY_NOISE = 0.27  # three standard deviations of the difference of two counts of 64 in the worst case
MOST_BYTES = 1_200 * 2**20  # a process with torch has some 450 MB
_ACKNOWLEDGED = re.compile(r"submission ([0-9a-f]{64}) is acknowledged")


def goes_on(here: Chaos) -> dict[str, Any]:
    """Every node works again and new versions come; all is healed already. Returns the last state."""
    before = here.now(here.run)
    for name in NODES:
        had = here.now(here.home(name)).get("accepted", 0)
        here.wait(
            here.home(name),
            lambda state, had=had: state["connected"] and state["accepted"] > had,  # type: ignore[misc]
            LONG_S,
        )
    head = before["policy_version"] + 2
    return here.wait(here.run, lambda s: s["complete"] or s["policy_version"] >= head, LONG_S)


def come_to_rest(here: Chaos) -> None:
    """Pause every node, and wait until all it did is judged and the verdicts are with it."""
    for name in NODES:
        _tell(here.home(name), "pause")
    for name in NODES:
        here.wait(
            here.home(name),
            lambda state: (
                state["connected"]
                and state["unit"] is None
                and not state["pending"] + state["awaiting_verdict"]
            ),
            LONG_S,
        )
    here.wait(here.run, lambda state: state["queue"] == 0, LONG_S)


def _tell(home: Path, command: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            send_command(home / "control.sock", command, PATIENCE_S)
            return
        except (BarnraiseError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def problems(here: Chaos) -> list[str]:
    """Everything that is not as it has to be, while nodes rest; none: ``[]``."""
    found = [text for outcome in here.outcomes if (text := outcome())]
    found += _ledger(here)
    found += _learning(here.now(here.run))
    for memory in here.memory.values():
        if memory.most > MOST_BYTES or (memory.first and memory.last > 1.5 * memory.first + 100 * 2**20):
            found.append(f"memory: {memory}")
    return found


def _ledger(here: Chaos) -> list[str]:
    found: list[str] = []
    for name in NODES:
        verified = call("ledger", "verify", str(here.run), "--receipts", str(here.home(name)))
        if verified.returncode:
            found.append(
                f"ledger verify with {name}'s receipts: {verified.stdout[-1500:]}{verified.stderr[-500:]}"
            )
    target = here.folder / "ledger.bin"
    exported = call("ledger", "export", str(here.run), str(target))
    if exported.returncode:
        return [*found, f"ledger export: {exported.stderr}"]
    with open_ledger(target) as opened:
        entries = list(opened.entries)
    submitted = {e.submission_id: e for e in entries if isinstance(e, ledger.Submitted)}
    judged = [e for e in entries if isinstance(e, ledger.Judged)]
    # A unit that timed out is lent anew, and late work is paid all the same: once for each lease. Where
    # late work is refused, the unit is lent once more even if another has done it (known, and wasteful).
    leases = Counter(entry.lease_id for entry in judged if entry.credit > 0)
    if twice := [lease.hex() for lease, times in leases.items() if times > 1]:
        found.append(f"leases credited twice: {twice}")
    if len({entry.submission_id for entry in judged}) != len(judged):
        found.append("a submission was judged twice")
    if unjudged := submitted.keys() - {entry.submission_id for entry in judged}:
        found.append(f"{len(unjudged)} submissions were never judged")
    # Work that came so late that its version is gone cannot be verified; that is nobody's fault.
    refused = {entry.check for entry in judged if not entry.accepted} - {"unverifiable"}
    found += [f"honest work was rejected: {check}" for check in sorted(refused)]
    for name in NODES:
        told = _acknowledged(here, name)
        kept = [
            receipt for path in here.home(name).glob("runs/*/receipts.bin") for receipt in read_receipts(path)
        ]
        received = {decode(signed.payload, Receipt).submission_id for signed in kept}
        if not told or not received:
            found.append(f"{name} has {len(told)} submissions acknowledged and {len(received)} receipts")
        for what, ids in (("acknowledged submissions", told), ("receipts", received)):
            if lost := ids - {each.hex() if what != "receipts" else each for each in submitted}:
                found.append(f"{len(lost)} {what} of {name} are not in the ledger")
        mine = {each for each, entry in submitted.items() if each in received or each.hex() in told}
        if lacking := mine - received:
            found.append(f"{name} has no receipt for {len(lacking)} submissions that were judged")
    return found


def _acknowledged(here: Chaos, name: str) -> set[str]:
    logs = here.home(name).glob("node.log*")
    return {found for path in logs for found in _ACKNOWLEDGED.findall(path.read_text(errors="replace"))}


def _learning(state: dict[str, Any]) -> list[str]:
    found = []
    rewards = [reward for _, reward in state["rewards"]]
    if len(rewards) >= 10 and mean(rewards[-5:]) < mean(rewards[:5]) - REWARD_NOISE:
        found.append(f"the reward collapsed: {rewards}")
    accuracy = [value for _, value in state["accuracy"]]
    if accuracy and accuracy[-1] < accuracy[0] - ACCURACY_NOISE:
        found.append(f"held-out tasks are answered worse than at the start: {accuracy}")
    return found


def left_behind(here: Chaos) -> list[str]:
    """After all was told to end: which processes did not, and what the logs should not have."""
    _, alive = psutil.wait_procs(here.ours(), timeout=30)
    found = [f"left behind: {process}" for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    for path in [*here.folder.glob("*.log"), *here.folder.glob("*/*.log*"), *here.folder.glob("*/node.err")]:
        text = path.read_text(errors="replace")
        if (at := text.find("Traceback")) >= 0:
            found.append(f"a traceback in {path}:\n{text[max(0, at - 300) : at + 4000]}")
    return found

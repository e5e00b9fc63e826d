"""A verifier that is stuck is ended, and what it was stuck at costs nobody else anything."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from coordinator_support import FakeVerifier, make_run
from msgspec import structs

from barnraise.coordinator.folder import open_run
from barnraise.coordinator.patience import FACTOR, FLOOR_S, Patience, StalledError, stalled, tokens_at_most
from barnraise.coordinator.verifier_child import ChildVerifier
from barnraise.coordinator.verifier_pool import VerifierPool
from barnraise.coordinator.workers import Judged, VerifyJob, WorkerSetup
from barnraise.protocol.messages import RolloutLease
from tests.test_server import until
from tests.test_verifier_pool import stage

Clock = trio.testing.MockClock
PARAMETERS = 10**8
# A real process that says when it is stuck, and stays so.
HANGING = """
import sys, time
from barnraise.coordinator.verifier_child import Ready, VerifyBatch
from barnraise.coordinator.workers import WorkerSetup
from barnraise.protocol.child_serve import serve

def handle(request, send):
    if isinstance(request, WorkerSetup) and sys.argv[2] == "batch":
        return Ready()
    with open(sys.argv[1], "w") as pipe:
        pipe.write("stuck")
    time.sleep(10**6)

serve(handle, WorkerSetup | VerifyBatch)
"""


def _job(size: int, number: int = 0, version: int = 0, model_check: bool = True) -> VerifyJob:
    lease = RolloutLease(
        run_id=bytes(32),
        lease_id=bytes(16),
        unit_id=number,
        node=bytes(32),
        policy_version=version,
        prompts=1,
        group_size=2,
        issued_at=0,
        timeout_at=1,
        deadline_at=2,
    )
    return VerifyJob(
        submission_id=number.to_bytes(32, "big"), lease=lease, payload=bytes(size), model_check=model_check
    )


def test_a_batch_may_take_many_times_what_its_tokens_usually_take() -> None:
    patience = Patience(PARAMETERS)
    job = _job(80_000)
    assert tokens_at_most([job]) == 10_000
    patience.note([job], 100.0)
    empty = patience.allowance([structs.replace(job, payload=b"")])
    assert patience.allowance([job]) - empty == pytest.approx(FACTOR * 100.0)
    assert empty > FLOOR_S


def test_one_odd_batch_changes_little() -> None:
    patience = Patience(PARAMETERS)
    for seconds in (10.0, 10.0, 5_000.0, 10.0, 0.01):
        patience.note([_job(8_000)], seconds)
    assert patience.token_s == 10.0 / 1_000


def test_before_anything_is_measured_a_slow_core_is_assumed() -> None:
    job = _job(8_000)
    assert Patience(7 * 10**9).allowance([job]) > 1_000 * 10
    assert Patience(10**6).allowance([job]) < 2 * FLOOR_S


def test_versions_to_load_and_answers_to_score_are_allowed_for() -> None:
    patience = Patience(PARAMETERS)
    one = patience.allowance([_job(0)])
    assert patience.allowance([_job(0), _job(0)]) > one
    assert patience.allowance([_job(0), _job(0, version=1)]) > patience.allowance([_job(0), _job(0)])


def test_work_that_the_model_never_sees_teaches_nothing() -> None:
    patience = Patience(PARAMETERS)
    before = patience.token_s
    patience.note([_job(80_000, model_check=False)], 0.001)
    assert patience.token_s == before


@pytest.mark.parametrize("when", ["batch", "start"])
async def test_a_process_that_hangs_is_killed_and_not_asked_again(
    when: str, tmp_path: Path, mock_clock: Clock
) -> None:
    folder = make_run(tmp_path)
    with open_run(folder) as run:
        setup = WorkerSetup(spec=run.spec, run_id=run.run_id, folder=str(folder), threads=1)
    fifo = tmp_path / "stuck"
    os.mkfifo(fifo)
    pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    verifier = ChildVerifier(setup, tmp_path / "verifier.log")
    verifier.program = (sys.executable, "-c", HANGING, str(fifo), when)
    text = "one submission" if when == "batch" else "not ready within 10 minutes"
    pids: list[int | None] = []
    try:
        async with trio.open_nursery() as nursery:

            async def let_time_pass() -> None:
                await trio.lowlevel.wait_readable(pipe)
                pids.append(verifier.pid)
                mock_clock.jump(4 * FLOOR_S)

            nursery.start_soon(let_time_pass)
            with pytest.raises(StalledError, match=text):
                await verifier.verify((_job(1_000),))
        assert verifier.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0] or 0, 0)
    finally:
        os.close(pipe)
        await verifier.close()


@dataclass
class Stuck(FakeVerifier):
    """As ``ChildVerifier`` with a child that hangs at ``bad``, in virtual time."""

    bad: bytes = b"good-hang"

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        if any(self.bad in job.payload for job in jobs):
            self.batches.append(len(jobs))
            await trio.sleep(FLOOR_S)
            raise stalled(jobs, FLOOR_S)
        return await super().verify(jobs)


async def test_a_submission_at_which_verifiers_hang_is_given_up_and_the_others_of_its_batch_are_not(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    verifier = Stuck(delay_s=5.0)
    async with stage(tmp_path, VerifierPool([verifier]), nodes=4) as (coordinator, nodes):
        first, bad, *others = nodes
        leases = [await each.lease() for each in (bad, *others)]
        await first.submit(first.signed_work(await first.lease()))  # keeps the verifier busy meanwhile
        await bad.submit(bad.signed_work(leases[0], engine="good-hang"))
        for each, lease in zip(others, leases[1:], strict=True):
            await each.submit(each.signed_work(lease))

        def told() -> str:
            state: dict[str, Any] = coordinator.state()
            return str(state["reason"])

        await trio.sleep(FLOOR_S)
        await until(lambda: "far longer than they can take" in told())
        await trio.sleep(FLOOR_S)  # the culprit is the first to be tried alone
        await until(lambda: coordinator.state()["accepted"] == 3)
        await trio.sleep(2 * FLOOR_S)
        await until(lambda: coordinator.state()["queue"] == 0)
        assert coordinator.state()["rejections"] == {"unverifiable": 1}
        rows = {row["node"]: row for row in coordinator.state()["nodes"]}
        assert rows[bad.identity.public_key.hex()]["strikes"] == 0
    assert verifier.batches.count(3) == 1, "once together, then alone"

"""Two minutes of everything that can go wrong with real processes; then nothing is lost.

    BARNRAISE_CHAOS_SEED=7 make test-long ARGS="tests/chaos -n 0 -s"

repeats what a failure was told with; ``BARNRAISE_CHAOS_SECONDS`` makes it longer or shorter.
The plan is the same for the same seed, the machine's own timing is not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import netns_support
import pytest
from swarm_support import ROLLOUT, make_model

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.folder import create_run
from barnraise.coordinator.presets import demo
from barnraise.coordinator.run_file import RUN_FILE
from barnraise.protocol.identity import Identity
from chaos import verdict
from chaos.links import ProxyLink, RouterLink
from chaos.plan import NODES, SMALL, plan
from chaos.swarm import SMALL_DISK, TOKEN, Chaos

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

# It is to learn, however slowly: with fewer groups and larger steps this model forgets what it can.
LONG = {"versions": 60_000, "groups_per_version": 8, "max_groups_per_version": 16}
SEED = int(os.environ.get("BARNRAISE_CHAOS_SEED", "1"))
SECONDS = float(os.environ.get("BARNRAISE_CHAOS_SECONDS", "120"))


def make_run(run: Path, folder: Path) -> None:
    """Three letters of eight, each right place rewarded; 64 held-out tasks are looked at now and then."""
    base = demo()
    # Of three letters only three strings are held out, and one of them lost would look like a collapse.
    tasks = json.dumps({"letters": 3, "alphabet": 8, "partial": True})
    settings = replace(
        base,
        environment=msgspec.structs.replace(base.environment, settings=tasks),
        sampling=msgspec.structs.replace(base.sampling, max_new_tokens=5),
        rollout=msgspec.structs.replace(base.rollout, **{**ROLLOUT, **LONG}),
        grpo=msgspec.structs.replace(base.grpo, learning_rate=1e-4),
        evaluation=msgspec.structs.replace(base.evaluation, tasks=64, every=10),
    )
    made = folder / "made"
    create_run(
        *(made, make_model(folder / "model"), settings, default_verify_spec("float32")),
        name="chaos",
        description="",
        model_name="small",
        seed=0,
        now_ms=time.time_ns() // 1_000_000,
        identity=Identity.from_private_bytes(b"c" * 32),
    )
    # Its held-out tasks are few, and what a run has learnt by then differs: the verdict judges rewards.
    (made / RUN_FILE).write_text("[guards]\npause = false\n")
    shutil.copytree(made, run, dirs_exist_ok=True)  # nothing can be renamed to where a disk is mounted


@contextmanager
def small_disks(here: Chaos) -> Iterator[None]:
    """The run's folder and the second node's data on disks of their own, where any may be mounted."""
    with ExitStack() as mounted:
        for name in SMALL:
            home = here.home(name)
            home.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "chaos", str(home)]
            here.small_disks = (
                os.geteuid() == 0 and not subprocess.run(mount, check=False, capture_output=True).returncode
            )
            if not here.small_disks:
                break
            mounted.callback(subprocess.run, ["umount", "-l", str(home)], check=False)
        yield


def survive(here: Chaos, seed: int) -> None:
    """The plan, and what has to be so after it."""
    acts = plan(seed, SECONDS)
    where = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    repeat = (
        f"BARNRAISE_CHAOS_SEED={seed} BARNRAISE_CHAOS_SECONDS={SECONDS:g} .venv/bin/pytest -m long -s {where}"
    )
    print(f"repeat with: {repeat}")
    try:
        for name in NODES:
            here.wait(here.home(name), lambda state: state["accepted"] > 0)
        here.perform(acts, Random(seed))
        here.heal()
        state = verdict.goes_on(here)
        verdict.come_to_rest(here)
        found = verdict.problems(here)
        print(
            f"version {state['policy_version']}, {state['accepted']} accepted, {state['rejected']} rejected"
        )
    except BaseException as error:
        error.add_note("\n".join([f"repeat with: {repeat}", *here.done]))
        raise
    finally:
        print("\n".join(here.done))
        here.stop()
        for link in here.links.values():
            link.close()
    found += verdict.left_behind(here)
    assert not found, "\n".join([*found, f"repeat with: {repeat}", *here.done])


def test_nothing_acknowledged_is_lost_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, str(tmp_path))
    here = Chaos(tmp_path, tmp_path / "run")
    with small_disks(here):
        make_run(here.run, tmp_path)
        address = here.coordinator()
        port = int(here.listen.rsplit("/", 1)[1])
        for name in NODES:
            link = here.links[name] = ProxyLink("127.0.0.1", port)
            here.addresses[name] = address.replace(f"/tcp/{port}/", f"/tcp/{link.port}/")
            here.begin(name)
        survive(here, SEED)


def test_nothing_acknowledged_is_lost_behind_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := netns_support.missing():
        pytest.skip(reason)
    monkeypatch.setenv(TOKEN, str(tmp_path))
    here = Chaos(tmp_path, tmp_path / "run")
    with netns_support.internet() as net, small_disks(here):
        make_run(here.run, tmp_path)
        server = here.hosts["coordinator"] = net.host("server")
        here.listen = f"/ip4/{server.address}/tcp/4001"
        for name in NODES:
            router = net.router(name)
            here.hosts[name] = router.host(f"{name}-host")
            here.links[name] = RouterLink(router)
        address = here.coordinator()
        for name in NODES:
            here.addresses[name] = address
            here.begin(name)
        survive(here, SEED + 1)

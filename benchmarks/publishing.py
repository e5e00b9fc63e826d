"""What publishing costs the learner, and how soon shards leave: before and after the two were parted.

    python -m benchmarks.publishing [--json] [--mebibytes 512] [--train 6] [--versions 4] [--shard 4]

The coordinator's own belts, journal, hashing, patches, openings and broadcast tree, on
bfloat16 weights on a real disk. The learner computes nothing: it sleeps for ``--train``
seconds, as one does whose accelerator is in another process, then writes weights of
which 1 % changed. Accepted work is always there, so that nothing but publishing makes the
learner wait. A peer without any version takes part in the tree over an in-memory
network, as whoever needs whole files does, and stops at its first shard.

``serial`` is how it was: no batch and no shard before the version is published.
``pipelined`` is how it is. Seconds, medians over versions 1 to ``--versions``:

idle_s             from the end of one training to the start of the next
trained_to_shard_s from the learner's report to the first shard, verified, at the peer
trained_to_head_s  from the learner's report to the manifest at the peer
idle_saved         1 - idle_s / idle_s of ``serial``
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import trio

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import LeaseIssued, NodeJoined, SubmissionJudged, Submitted
from barnraise.coordinator.folder import Run, Settings, create_run, open_run
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.journal import Journal, Payload
from barnraise.coordinator.learn_belt import LearnBelt
from barnraise.coordinator.origin import Origin
from barnraise.coordinator.presets import demo
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.publish_belt import PublishBelt
from barnraise.coordinator.server import wall_clock_ms
from barnraise.coordinator.workers import Trained, TrainJob, checkpoint_folder
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.gossip import Gossiper
from barnraise.protocol.gossip_lists import Watch
from barnraise.protocol.manifest import check_manifest
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Manifest, RolloutLease, Signed, Verdict
from barnraise.protocol.network import Network
from barnraise.protocol.opening import Opening, check_opening, opening_list
from barnraise.protocol.spec import RolloutSpec
from barnraise.protocol.store import DiskStore
from barnraise.protocol.tree_index import files_list, lists_of
from barnraise.protocol.tree_messages import Contact

MIB = 1024 * 1024
NODE = b"n" * 32
CHANGED = 0.01
PEER = "peer"


def write_model(folder: Path, mebibytes: int) -> Path:
    """A model folder with that many bytes of random weights, as one bfloat16 tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 40, "eos_token_id": 1}))
    (folder / "tokenizer.json").write_text("{}")
    count = mebibytes * MIB // 2
    tensor = {"w": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}
    header = json.dumps(tensor).encode()
    header += b" " * (-len(header) % 8)
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(mebibytes):
            file.write(generator.integers(0, 2**16, MIB // 2, dtype=np.uint16).tobytes())
    return folder


def make_run(folder: Path, mebibytes: int, versions: int) -> None:
    """A run around such a model, whose batches are a single group."""
    base = demo()
    settings = Settings(
        environment=base.environment,
        sampling=base.sampling,
        rollout=RolloutSpec(
            prompts_per_unit=1,
            group_size=2,
            groups_per_version=1,
            max_groups_per_version=2,
            max_lag=2,
            versions=versions,
            timeout_s=600.0,
            deadline_s=600.0,
        ),
        grpo=base.grpo,
        evaluation=base.evaluation,
        weights_dtype="bfloat16",
        compute_dtype="float32",
    )
    model = write_model(folder.with_name("model"), mebibytes)
    create_run(
        folder,
        model,
        settings,
        default_verify_spec("float32"),
        name="publishing",
        description="",
        model_name="random",
        seed=1,
        now_ms=wall_clock_ms(),
    )
    shutil.rmtree(model)


@dataclass
class SleepingLearner:
    """Makes versions without computing; notes when it was asked and when it was done."""

    folder: Path
    train_s: float
    began: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)

    async def initial(self) -> Trained:
        weights = checkpoint_folder(self.folder, 0) / "model.safetensors"
        self.done[0] = trio.current_time()
        return Trained(version=0, weights=str(weights), stats=None, accuracy=-1.0)

    async def train(self, job: TrainJob) -> Trained:
        self.began[job.version] = trio.current_time()
        await trio.sleep(self.train_s)
        weights = await trio.to_thread.run_sync(self._write, job.version)
        self.done[job.version] = trio.current_time()
        return Trained(version=job.version, weights=str(weights), stats=None, accuracy=-1.0)

    def _write(self, version: int) -> Path:
        before, target = (checkpoint_folder(self.folder, number) for number in (version - 1, version))
        target.mkdir()
        for source in before.iterdir():
            if source.suffix != ".patch":
                shutil.copyfile(source, target / source.name)
        path = target / "model.safetensors"
        with path.open("rb") as file:
            offset = 8 + int.from_bytes(file.read(8), "little")
        values = np.memmap(path, np.uint16, "r+", offset)
        values[np.random.default_rng(version).integers(0, len(values), int(CHANGED * len(values)))] += 1
        values.flush()
        return path

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


@dataclass
class Peer:
    """Somebody who holds nothing: notes the first shard and the manifest of each version."""

    gossiper: Gossiper
    shard: dict[int, float] = field(default_factory=dict)
    head: dict[int, float] = field(default_factory=dict)

    def opened(self, opening: Opening) -> None:
        if opening.version in self.shard:
            return
        self.gossiper.lists.open(opening, self._watch(opening.version, opening_list(opening)))

    def published(self, signed: Signed, manifest: Manifest) -> None:
        version = manifest.version
        self.head[version] = trio.current_time()
        if version not in self.shard:
            number = files_list(version)
            self.gossiper.lists.want(number, lists_of(manifest)[number], self._watch(version, number))

    def _watch(self, version: int, number: int) -> Watch:
        def got(digest: bytes, size: int, peer: str) -> None:
            if size > 64 * 1024:  # of the weights: config and tokenizer are here from version 0 on
                self.shard.setdefault(version, trio.current_time())
                self.gossiper.spawn(self._enough, number)

        return Watch(got, lambda error: None)

    async def _enough(self, number: int) -> None:
        await trio.lowlevel.checkpoint()
        self.gossiper.lists.close(number)
        self.gossiper.store.sweep()


async def provide_work(core: Core) -> None:
    """Accepted work for the next batch, whenever there is none in the pool."""
    rng = random.Random(1)
    await core.record([NodeJoined(node=NODE, name="ann", at_ms=core.now_ms())])
    while True:
        changed, state = core.changed, core.state
        if state.head < 0 or state.pool:
            await changed.wait()
            continue
        now = core.now_ms()
        lease = RolloutLease(
            run_id=core.run_id,
            lease_id=rng.randbytes(16),
            unit_id=state.next_unit,
            node=NODE,
            policy_version=state.head,
            prompts=1,
            group_size=2,
            issued_at=now,
            timeout_at=now + 600_000,
            deadline_at=now + 600_000,
        )
        work = Signed(payload=rng.randbytes(64), signer=NODE, signature=bytes(64))
        submission = rng.randbytes(32)
        verdict = Verdict(accepted=True, check="all", threshold=0.0, value=0.0, position="", message="")
        await core.record([LeaseIssued(lease=lease, instance=bytes(16))])
        await core.record(
            [Submitted(submission_id=submission, lease_id=lease.lease_id, size=64, at_ms=now)],
            payloads=[Payload(submission, lease.policy_version, work)],
        )
        await core.record(
            [
                SubmissionJudged(
                    submission_id=submission,
                    verdict=verdict,
                    rewards=(0.0, 1.0),
                    tokens=1,
                    credit=1,
                    blameless=False,
                    at_ms=now,
                )
            ]
        )


async def once(
    run: Run, network: Network, outside: Network, args: argparse.Namespace, serial: bool
) -> dict[str, Any]:
    """One run from version 0 to the last."""
    journal = Journal(run.journal_path)
    core = Core(journal, run.spec, run.run_id, run.identity, wall_clock_ms)
    learner = SleepingLearner(run.path, args.train)
    store, progress = DiskStore(run.store_path), Progress()
    origin = Origin(run.spec, run.run_id, network, store, random.Random(1))
    learn = LearnBelt(core, learner, run.path, progress, serial)
    publish = PublishBelt(
        *(core, Hub(), learner, store, run.path, progress, lambda line: None, args.shard * MIB),
        origin=origin,
        opens=not serial,
    )
    peer = Peer(
        Gossiper(
            outside,
            DiskStore(run.path.with_name(f"{run.path.name}-peer")),
            [Contact(peer_id=network.peer_id, addresses=network.addresses)],
            lambda head: check_manifest(head, run.spec, run.run_id),
            random.Random(2),
            on_head=lambda signed, manifest: peer.published(signed, manifest),
            check_opening=lambda signed: check_opening(signed, run.spec, run.run_id),
        )
    )
    peer.gossiper.openings.on_opening = peer.opened
    async with trio.open_nursery() as nursery:
        for task in (core.run, origin.run, peer.gossiper.run):
            nursery.start_soon(task)
        await core.open()
        await trio.sleep(2)  # for the link
        nursery.start_soon(partial(provide_work, core))
        nursery.start_soon(learn.run)
        await publish.run()
        await trio.sleep(2)
        nursery.cancel_scope.cancel()
    journal.close()
    versions = range(1, args.versions + 1)
    later = [number for number in versions if number > 1]
    return {
        "idle_s": round(median(learner.began[number] - learner.done[number - 1] for number in later), 3),
        "trained_to_shard_s": round(median(peer.shard[n] - learner.done[n] for n in versions), 3),
        "trained_to_head_s": round(median(peer.head[n] - learner.done[n] for n in versions), 3),
        "version_0_shard_s": round(peer.shard[0] - learner.done[0], 3),
        "version_0_head_s": round(peer.head[0] - learner.done[0], 3),
        "seconds": round(learner.done[args.versions] - learner.done[0], 1),
    }


async def both(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The two ways, one after the other, from the same weights."""
    results: dict[str, Any] = {}
    for name, serial in (("serial", True), ("pipelined", False)):
        place = folder / name / "run"
        make_run(place, args.mebibytes, args.versions)
        swarm = MemorySwarm(latency_s=0.001)
        with open_run(place) as run:
            async with swarm.network(run.identity.peer_id) as network, swarm.network(PEER) as outside:
                results[name] = await once(run, network, outside, args, serial)
        with contextlib.suppress(OSError):
            shutil.rmtree(folder / name)
    before, after = results["serial"], results["pipelined"]
    results["idle_saved"] = round(1 - after["idle_s"] / before["idle_s"], 3)
    results["first_shard_sooner"] = round(before["trained_to_shard_s"] / after["trained_to_shard_s"], 1)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--mebibytes", type=int, default=512, help="of weights")
    parser.add_argument("--train", type=float, default=6.0, help="seconds that a version takes to train")
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--shard", type=int, default=4, help="MiB")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        try:
            results = trio.run(both, Path(folder), args)
        except BarnraiseError as error:
            raise SystemExit(f"benchmark failed: {error}") from error
    results["conditions"] = {
        "mebibytes": args.mebibytes,
        "train_s": args.train,
        "versions": args.versions,
        "shard_mib": args.shard,
        "changed_fraction": CHANGED,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "took_s": round(time.monotonic() - began, 1),
    }
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for name in ("serial", "pipelined"):
        print(f"{name:10}", "  ".join(f"{key} {value}" for key, value in results[name].items()))
    print(f"idle_saved {results['idle_saved']}  first_shard_sooner {results['first_shard_sooner']}")


if __name__ == "__main__":
    main()

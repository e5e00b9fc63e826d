"""A run of a few versions by its events alone: no worker and no clock, and a ledger that holds."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from coordinator_support import make_run

from barnraise.coordinator.events import (
    AppealDecided,
    AppealFiled,
    BatchFormed,
    Event,
    LeaseIssued,
    NodeJoined,
    RunOpened,
    SubmissionJudged,
    Submitted,
    VersionPublished,
    VersionTrained,
)
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal, Payload, Write
from barnraise.coordinator.rollout_files import Kept, keep_rollouts
from barnraise.coordinator.run_file import Keep
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.kernels.demo_model import write_tokenizer
from barnraise.protocol.envelope import content_id, sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger_entries import credit_for
from barnraise.protocol.messages import Rollout, RolloutLease, RolloutSubmission, Verdict

NODES = [Identity.from_private_bytes(bytes([65 + number]) * 32) for number in range(2)]
REFUSED = Verdict(
    accepted=False, check="toploc", threshold=10.0, value=99.0, position="rollout 0 chunk 0", message="forged"
)
SOUND = Verdict(accepted=True, check="all", threshold=10.0, value=1.5, position="", message="")
EVERYTHING = Keep(rollouts="all", rollout_proofs=True)


@dataclass
class Told:
    """A run being told: ``work`` is what was submitted, by id."""

    folder: Path
    seed: int = 1
    work: dict[bytes, tuple[RolloutLease, RolloutSubmission, tuple[float, ...]]] = field(default_factory=dict)
    at: int = 1_000_000
    units: int = 0
    head: int = -1
    later: list[Write] | None = field(default_factory=list)  # until it is told: one transaction for all

    def __post_init__(self) -> None:
        self.spec, _, self.run_id = read_spec(self.folder)
        self.random = random.Random(self.seed)
        self.journal = Journal(self.folder / "state.sqlite")
        self.commit(RunOpened(run_id=self.run_id, operator=self.spec.operator, at_ms=self.at))
        for node in NODES:
            self.commit(NodeJoined(node=node.public_key, name="ann", at_ms=self.now()))
        self.publish()

    def now(self) -> int:
        self.at += 1000
        return self.at

    def commit(self, *events: Event, payloads: tuple[Payload, ...] = ()) -> None:
        write = Write(events=events, payloads=payloads)
        if self.later is None:
            self.journal.commit([write])
        else:
            self.later.append(write)

    def publish(self, batch: tuple[bytes, ...] = ()) -> None:
        self.head += 1
        if batch:
            groups = sum(self.work[item][0].prompts for item in batch)
            self.commit(
                BatchFormed(
                    version=self.head, submissions=batch, groups=groups, usable=groups, at_ms=self.now()
                )
            )
        same = {"version": self.head, "weights": "w", "stats": None, "accuracy": -1.0, "at_ms": self.now()}
        self.commit(VersionTrained(**same))
        self.commit(VersionPublished(manifest=bytes(32), size=1, **same))

    def submitted(self, engine: str = "torch", node: int = 0, version: int | None = None) -> bytes:
        """One unit lent and handed in: 2 prompts of 2 samples."""
        who, number = NODES[node], self.units
        self.units += 1
        at = self.now()
        lease = RolloutLease(
            run_id=self.run_id,
            lease_id=number.to_bytes(16, "big"),
            unit_id=number,
            node=who.public_key,
            policy_version=self.head if version is None else version,
            prompts=2,
            group_size=2,
            issued_at=at,
            timeout_at=at + 60_000,
            deadline_at=at + 120_000,
        )
        rollouts = tuple(
            Rollout(
                prompt=prompt,
                sample=sample,
                tokens=np.array([self.random.randrange(3, 20) for _ in range(count)], "<u4").tobytes(),
                logprobs=np.array([-self.random.random() for _ in range(count)], "<f4").tobytes(),
                proofs=self.random.randbytes(20),
            )
            for prompt in range(2)
            for sample in range(2)
            for count in [self.random.randrange(1, 6)]
        )
        work = RolloutSubmission(
            run_id=self.run_id,
            lease_id=lease.lease_id,
            policy_version=lease.policy_version,
            engine=engine,
            generate_ms=7,
            rollouts=rollouts,
        )
        signed = sign(work, who)
        submission = content_id(signed)
        self.commit(LeaseIssued(lease=lease, instance=b"i" * 16))
        self.commit(
            Submitted(
                submission_id=submission, lease_id=lease.lease_id, size=len(signed.payload), at_ms=self.now()
            ),
            payloads=(Payload(submission, lease.policy_version, signed),),
        )
        self.work[submission] = lease, work, ()
        return submission

    def tokens(self, submission: bytes) -> int:
        return sum(len(item.tokens) // 4 for item in self.work[submission][1].rollouts)

    def judged(self, submission: bytes, verdict: Verdict = SOUND, appeal: bool = False) -> bytes:
        lease, work, _ = self.work[submission]
        rewards = tuple(self.random.choice((0.0, 0.25, 1.0)) for _ in range(4)) if verdict.accepted else ()
        count = self.tokens(submission) if verdict.accepted else 0
        same = {
            "submission_id": submission,
            "verdict": verdict,
            "rewards": rewards,
            "tokens": count,
            "credit": credit_for(self.spec.model.parameters, count),
            "at_ms": self.now(),
        }
        self.commit(AppealDecided(**same) if appeal else SubmissionJudged(blameless=False, **same))
        self.work[submission] = lease, work, rewards
        return submission

    def appealed(self, submission: bytes) -> bytes:
        """Filed with its payload, and granted."""
        lease, work, _ = self.work[submission]
        signed = sign(work, next(node for node in NODES if node.public_key == lease.node))
        self.commit(
            AppealFiled(submission_id=submission, at_ms=self.now()),
            payloads=(Payload(submission, lease.policy_version, signed),),
        )
        return self.judged(submission, appeal=True)

    def keep(self, before: int, keep: Keep = EVERYTHING, drop: bool = True) -> Kept:
        """As the publishing belt does once versions below ``before`` are of no more use."""
        settled = self.journal.payload_ids(before)
        kept = keep_rollouts(self.journal, self.folder, self.spec, self.run_id, keep, settled)
        if drop:
            self.journal.commit([Write(drop_payloads=kept.dropped)])
        return kept


def told_run(tmp_path: Path, versions: int = 4, units: int = 3, name: str = "run") -> Told:
    """``versions`` published after version 0, from ``units`` accepted units each and one that was refused."""
    folder = make_run(tmp_path, name, versions=versions + 4)
    write_tokenizer(checkpoint_folder(folder, 0))
    told = Told(folder)
    for _ in range(versions):
        batch = tuple(told.judged(told.submitted(node=number % 2)) for number in range(units))
        told.judged(told.submitted("cheat"), REFUSED)
        told.publish(batch)
    told.journal.commit(told.later or [])
    told.later = None
    return told


def closed(told: Told) -> Path:
    with closing(told.journal):
        return told.folder

"""A run in miniature on which every attack is performed for real.

The state is the coordinator's own fold over its own events, submissions go through
``coordinator.submissions`` and the real ``Judge``, versions are made by the real
``Trainer`` on honest work. Only the network and the disk's journal are left out.
Everything follows from the stage's number: leases, keys, draws.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from barnraise.coordinator import presets
from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.events import (
    BatchFormed,
    LeaseIssued,
    NodeJoined,
    RunOpened,
    SubmissionJudged,
    Submitted,
    VersionPublished,
)
from barnraise.coordinator.folder import Settings, create_run, open_run
from barnraise.coordinator.learner import Trainer
from barnraise.coordinator.model_source import prepare_model
from barnraise.coordinator.state import State, apply, usable_groups
from barnraise.coordinator.submissions import check_lease, check_room, is_duplicate, open_submission
from barnraise.coordinator.verifier import Judge
from barnraise.coordinator.workers import BatchPart, TrainJob, VerifyJob, WorkerSetup, checkpoint_folder
from barnraise.kernels.generate import Completion, generate
from barnraise.kernels.logprobs import token_logprobs
from barnraise.kernels.models import Policy, load_policy
from barnraise.kernels.prefill import prefill
from barnraise.kernels.tokens import Codec
from barnraise.kernels.toploc import build_proofs
from barnraise.protocol.envelope import content_id, sign
from barnraise.protocol.environments import Task, build_environment
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import credit_for
from barnraise.protocol.messages import Rollout, RolloutLease, RolloutSubmission, Signed
from barnraise.protocol.seeds import sample_seed, task_seed
from barnraise.protocol.spec import Noise, SamplingSpec, VerifySpec

Tokens = list[list[int]]
MINUTE = 60_000


def exact_verify_spec() -> VerifySpec:
    """Thresholds for a run whose engines all compute in float32, and round no worse than by 1e-3.

    The default ones leave room for an engine in bfloat16 beside a verifier in float32. An
    operator who knows that there is none may have these: between batch shapes of one float32
    engine, log-probabilities differ by 1e-6 on average and no draw changes.
    """
    return structs.replace(
        default_verify_spec("float32"),
        draws=Noise(mean=2e-5, variance=1e-7, scale=1e-3),
        logprobs=Noise(mean=1e-4, variance=1e-6, scale=1e-3),
        bias=1e-4,
    )


@dataclass(frozen=True)
class Outcome:
    """What became of one submission. ``check`` is the verdict's, or the refusal's code."""

    accepted: bool
    check: str
    value: float
    tokens: int
    credit: int
    reward: float
    message: str


class Stage:
    """One run at version 1 (one learner step from version 0), with a verifier and no clock of its own.

    Attributes:
        state: the coordinator's.
        head: the version that leases are for.
        patience: how many submissions a patient cheat is honest for, before its first try.
    """

    def __init__(
        self,
        folder: Path,
        model: str = "demo",
        settings: Settings | None = None,
        verify: VerifySpec | None = None,
        verify_in: str | None = None,
        number: int = 0,
    ) -> None:
        """Make the run in ``folder``, which must not exist.

        Args:
            model: ``"demo"`` or ``"smollm2"``.
            settings: the preset of ``model`` by default.
            verify: thresholds; by default those that ``run init`` writes for the run.
            verify_in: compute dtype of the verifier, where it is not the engines'.
            number: stages of another number lend other leases.
        """
        settings = settings or (presets.demo() if model == "demo" else presets.smollm2())
        self.folder = folder
        self.operator = Identity.from_private_bytes(b"o" * 32)
        self._random = np.random.default_rng(number)
        self.now = 1_000_000
        self.patience = 2
        self._honest_tokens = self._honest_count = 0
        prepare_model(
            _source(model, folder.parent),
            folder.parent / "start",
            settings.weights_dtype,
            settings.environment,
        )
        create_run(
            folder,
            folder.parent / "start",
            settings,
            verify or default_verify_spec(settings.compute_dtype),
            name="stage",
            description="",
            model_name=model,
            seed=number,
            now_ms=self.now,
            identity=self.operator,
        )
        shutil.rmtree(folder.parent / "start")
        with open_run(folder) as run:
            self.spec, self.run_id = run.spec, run.run_id
        setup = WorkerSetup(spec=self.spec, run_id=self.run_id, folder=str(folder), threads=1)
        judged_in = self.spec
        if verify_in is not None:
            judged_in = structs.replace(
                self.spec, model=structs.replace(self.spec.model, compute_dtype=verify_in)
            )
        self.judge = Judge(structs.replace(setup, spec=judged_in))
        self.environment = build_environment(self.spec.environment)
        self.codec = Codec(checkpoint_folder(folder, 0), self.spec.environment)
        self._policies: dict[str, Policy] = {}
        self.state = State(max_lag=self.spec.rollout.max_lag)
        apply(self.state, RunOpened(run_id=self.run_id, operator=self.spec.operator, at_ms=self.now))
        trainer = Trainer(setup)
        self._published(trainer.initial().weights)
        self._learn(trainer)

    @property
    def head(self) -> int:
        return self.state.head

    @property
    def usual_tokens(self) -> float:
        """Tokens of a submission, on average over the honest ones."""
        return self._honest_tokens / max(self._honest_count, 1)

    # --- who is there, and what is lent

    def join(self, name: str) -> Identity:
        """The key of ``name``, joined."""
        key = Identity.from_private_bytes(hashlib.sha256(name.encode()).digest())
        if key.public_key not in self.state.nodes:
            apply(self.state, NodeJoined(node=key.public_key, name=name[:64], at_ms=self.now))
        return key

    def lend(self, node: Identity) -> RolloutLease:
        """A fresh lease for the head version, as the coordinator would issue it."""
        self.now += 1000
        lease = RolloutLease(
            run_id=self.run_id,
            lease_id=self._random.bytes(16),
            unit_id=self.state.next_unit,
            node=node.public_key,
            policy_version=self.head,
            prompts=self.spec.rollout.prompts_per_unit,
            group_size=self.spec.rollout.group_size,
            issued_at=self.now,
            timeout_at=self.now + MINUTE,
            deadline_at=self.now + 2 * MINUTE,
        )
        apply(self.state, LeaseIssued(lease=lease, instance=bytes(16)))
        return lease

    # --- what a node computes

    def policy(
        self, version: int | None = None, kind: str = "", change: Callable[[Policy], None] | None = None
    ) -> Policy:
        """The weights of a version (the head's), or ``kind``: those after ``change``. Kept.

        ``kind`` may begin with a dtype and a colon to compute in another one.
        """
        version = self.head if version is None else version
        name = f"{version} {kind}"
        if name not in self._policies:
            dtype = kind.partition(":")[0] if ":" in kind else self.spec.model.compute_dtype
            policy = load_policy(checkpoint_folder(self.folder, version), dtype)
            if change is not None:
                with torch.enable_grad():
                    change(policy)
            self._policies[name] = policy
        return self._policies[name]

    def tasks(self, lease: RolloutLease) -> list[Task]:
        """One per prompt."""
        seeds = [
            task_seed(self.run_id, lease.lease_id, lease.node, prompt) for prompt in range(lease.prompts)
        ]
        return [self.environment.task(seed, held_out=False) for seed in seeds]

    def prompts(self, lease: RolloutLease) -> Tokens:
        """One per rollout."""
        encoded = [self.codec.encode_prompt(task.prompt) for task in self.tasks(lease)]
        return [prompt for prompt in encoded for _ in range(lease.group_size)]

    def seeds(self, lease: RolloutLease) -> list[int]:
        """One per rollout."""
        return [
            sample_seed(self.run_id, lease.lease_id, prompt, sample)
            for prompt in range(lease.prompts)
            for sample in range(lease.group_size)
        ]

    def draw(
        self,
        lease: RolloutLease,
        policy: Policy | None = None,
        *,
        prompts: Tokens | None = None,
        seeds: Sequence[int] | None = None,
        sampling: SamplingSpec | None = None,
    ) -> list[Completion]:
        """What an engine draws; each argument is something that a cheat may change."""
        return generate(
            policy or self.policy(),
            prompts or self.prompts(lease),
            seeds or self.seeds(lease),
            sampling or self.spec.sampling,
            self.spec.model.eos_token,
        )

    def pack(self, lease: RolloutLease, drawn: Sequence[Completion]) -> list[Rollout]:
        """Rollouts with the log-probabilities and proofs that came with the draw."""
        return self._rollouts(
            lease,
            [completion.tokens for completion in drawn],
            [np.asarray(completion.logprobs, dtype="<f4").tobytes() for completion in drawn],
            [completion.states for completion in drawn],
        )

    def forge(
        self,
        lease: RolloutLease,
        chosen: Tokens,
        *,
        prompts: Tokens | None = None,
        policy: Policy | None = None,
        sampling: SamplingSpec | None = None,
    ) -> list[Rollout]:
        """Rollouts around any tokens, with the log-probabilities and proofs that the right model gives them.

        A cheat's best move: whatever it did to choose the tokens, one prefill with the
        right weights makes them look as if those had.
        """
        sampling = sampling or self.spec.sampling
        states = self.states(lease, chosen, prompts=prompts, policy=policy)
        return self._rollouts(lease, chosen, self.logprobs(states, chosen, policy, sampling), states)

    def states(
        self,
        lease: RolloutLease,
        chosen: Tokens,
        *,
        prompts: Tokens | None = None,
        policy: Policy | None = None,
    ) -> list[Tensor]:
        """The states behind ``chosen``, by one prefill."""
        with torch.no_grad():
            return prefill(policy or self.policy(), prompts or self.prompts(lease), chosen)

    def logprobs(
        self, states: list[Tensor], chosen: Tokens, policy: Policy | None, sampling: SamplingSpec
    ) -> list[bytes]:
        """Log-probabilities as a rollout carries them."""
        policy = policy or self.policy()
        with torch.no_grad():
            values, _ = token_logprobs(
                torch.cat(states),
                policy.head_weight,
                torch.tensor([token for tokens in chosen for token in tokens]),
                sampling.temperature,
                policy.head_bias,
                policy.softcap,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
        parts = torch.split(values, [len(tokens) for tokens in chosen])
        return [part.numpy().astype("<f4").tobytes() for part in parts]

    def _rollouts(
        self, lease: RolloutLease, chosen: Tokens, logprobs: list[bytes], states: list[Tensor]
    ) -> list[Rollout]:
        verify = self.spec.verify
        proofs = build_proofs(states, verify.toploc_top_k, verify.toploc_chunk)
        return [
            Rollout(
                prompt=row // lease.group_size,
                sample=row % lease.group_size,
                tokens=np.asarray(tokens, dtype="<u4").tobytes(),
                logprobs=logprobs[row],
                proofs=proofs[row],
            )
            for row, tokens in enumerate(chosen)
        ]

    def scores(self, lease: RolloutLease, chosen: Tokens) -> list[float]:
        """What each rollout would earn: a cheat can compute it as well as anybody."""
        tasks = [task for task in self.tasks(lease) for _ in range(lease.group_size)]
        return [
            self.environment.score(task, self.codec.decode(tokens))
            for task, tokens in zip(tasks, chosen, strict=True)
        ]

    # --- the coordinator's side

    def sign(
        self, node: Identity, lease: RolloutLease, rollouts: Sequence[Rollout], **changes: object
    ) -> Signed:
        """A submission of ``rollouts`` for ``lease``, signed by ``node``."""
        submission = RolloutSubmission(
            run_id=self.run_id,
            lease_id=lease.lease_id,
            policy_version=lease.policy_version,
            engine="torch",
            generate_ms=1000,
            rollouts=tuple(rollouts),
        )
        return sign(structs.replace(submission, **changes), node)

    def submit(self, node: Identity, signed: Signed) -> Outcome:
        """Hand ``signed`` in over the session of ``node``; refused, or stored and judged."""
        self.now += 500
        try:
            submission = open_submission(signed, node.public_key)
            submission_id = content_id(signed)
            if is_duplicate(self.state, submission_id):
                return Outcome(False, "duplicate", 0, 0, 0, 0, "stored already; nothing is credited twice")
            lease = check_lease(self.state, self.run_id, node.public_key, submission, self.now).terms
            check_room(len(self.state.waiting), self.state.waiting_bytes)
        except RefusedError as error:
            return Outcome(False, error.code, 0, 0, 0, 0, str(error))
        size = len(signed.payload)
        apply(
            self.state,
            Submitted(submission_id=submission_id, lease_id=lease.lease_id, size=size, at_ms=self.now),
        )
        (result,) = self.judge.judge(
            [VerifyJob(submission_id=submission_id, lease=lease, payload=signed.payload)]
        )
        verdict = result.verdict
        credit = credit_for(self.spec.model.parameters, result.tokens) if verdict.accepted else 0
        apply(
            self.state,
            SubmissionJudged(
                submission_id=submission_id,
                verdict=verdict,
                rewards=result.rewards,
                tokens=result.tokens,
                credit=credit,
                blameless=False,
                at_ms=self.now,
            ),
        )
        reward = sum(result.rewards) / max(len(result.rewards), 1)
        return Outcome(
            verdict.accepted, verdict.check, verdict.value, result.tokens, credit, reward, verdict.message
        )

    def honest(self, node: Identity, policy: Policy | None = None) -> tuple[RolloutLease, Signed]:
        """A lease of ``node`` and its honest answer, not handed in."""
        lease = self.lend(node)
        return lease, self.sign(node, lease, self.pack(lease, self.draw(lease, policy)))

    # --- version 1

    def _learn(self, trainer: Trainer) -> None:
        """One version by the real learner, from honest work."""
        node, parts, ids = self.join("honest"), [], []
        wanted = self.spec.rollout.groups_per_version
        usable = groups = 0
        while usable < wanted and groups < 4 * wanted:
            lease, signed = self.honest(node)
            outcome = self.submit(node, signed)
            if not outcome.accepted:
                raise AssertionError(f"honest work was refused: {outcome.message}")
            self._honest_tokens += outcome.tokens
            self._honest_count += 1
            item = self.state.submissions[content_id(signed)]
            usable += usable_groups(item.rewards, lease.group_size)
            groups += lease.prompts
            ids.append(item.submission_id)
            parts.append(BatchPart(lease=lease, payload=signed.payload, rewards=item.rewards))
        apply(
            self.state,
            BatchFormed(version=1, submissions=tuple(ids), groups=groups, usable=usable, at_ms=self.now),
        )
        self._published(trainer.train(TrainJob(version=1, parts=tuple(parts))).weights)

    def _published(self, weights: str) -> None:
        apply(
            self.state,
            VersionPublished(
                version=self.state.head + 1,
                manifest=bytes(32),
                weights=weights,
                size=1,
                stats=None,
                accuracy=0.0,
                at_ms=self.now,
            ),
        )


def _source(model: str, scratch: Path) -> Path:
    if model == "demo":
        from barnraise.kernels.demo_model import create_demo_model

        create_demo_model(scratch / "model", 0)
        return scratch / "model"
    from barnraise.kernels.smollm2 import prepare_smollm2

    return prepare_smollm2()

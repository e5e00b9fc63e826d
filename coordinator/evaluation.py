"""How good a policy is on tasks that no unit is ever made of."""

from __future__ import annotations

from pathlib import Path

from barnraise.coordinator.scoring import Scorer
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.kernels.generate import greedy
from barnraise.kernels.models import Policy
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import build_environment
from barnraise.protocol.seeds import held_out_seed
from barnraise.protocol.spec import RunSpec


class HeldOut:
    """The held-out tasks of one run, which follow from its id.

    Raises:
        ModelError, TaskError: the run's model folder or environment cannot be used here.
    """

    def __init__(self, spec: RunSpec, run_id: bytes, folder: Path) -> None:
        environment = spec.evaluation.environment or spec.environment
        self._run_id = run_id
        self._environment = build_environment(environment)
        self._codec = Codec(checkpoint_folder(folder, 0), environment)

    def accuracy(self, policy: Policy, spec: RunSpec) -> float:
        """Share of held-out tasks that the greedy policy solves (full reward). ``spec``: as amended."""
        tasks = [
            self._environment.task(held_out_seed(self._run_id, index), held_out=True)
            for index in range(spec.evaluation.tasks)
        ]
        prompts = [self._codec.encode_prompt(task.prompt) for task in tasks]
        limit = spec.sampling.max_new_tokens
        answers = greedy(policy, prompts, limit, spec.model.ends, max_batch=64)
        # a policy's answers are as untrusted as a stranger's
        scorer = Scorer(spec.evaluation.environment or spec.environment)
        try:
            texts = [self._codec.decode(answer) for answer in answers]
            scores = scorer.score(self._environment, tasks, texts).rewards
        finally:
            scorer.close()
        return sum(score > 1 - 1e-9 for score in scores) / len(scores)

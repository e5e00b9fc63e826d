"""What of a run's tasks will not do: environments that cannot be built here, lengths that no answer has."""

from __future__ import annotations

from collections.abc import Iterator

from barnraise.protocol.environments import Environment, TaskError, build_environment
from barnraise.protocol.spec import EnvironmentSpec
from barnraise.protocol.tasks_mixed import Mixture, WithLength


def task_troubles(
    environment: EnvironmentSpec, held_out: EnvironmentSpec | None, max_new_tokens: int
) -> list[str]:
    """Sentences about the environment to train on and that to evaluate on, None: the same. Loads both."""
    troubles = []
    for section, spec in (("environment", environment), ("held_out", held_out)):
        if spec is None:
            continue
        try:
            made = build_environment(spec)
        except TaskError as error:
            troubles.append(f"[{section}] {error}")
            continue
        longest = max(targets_of(made), default=0)
        if longest > max_new_tokens:
            troubles.append(
                f"[{section}] asks for answers of {longest} tokens, and sampling.max_new_tokens is "
                f"{max_new_tokens}: no answer can be that long; lower the targets or raise it"
            )
    return troubles


def targets_of(environment: Environment) -> Iterator[int]:
    """Every length, in tokens, that some task of an environment asks for."""
    if isinstance(environment, WithLength):
        yield from environment.targets
    elif isinstance(environment, Mixture):
        for part in environment.parts:
            yield from targets_of(part)

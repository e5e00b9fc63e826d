"""A run with any model: a node draws, the verifier judges, the learner trains, the node follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from learner_support import NODE, RUN_ID, SYMBOLS, make_model, make_run, run_spec
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from barnraise.coordinator.learner import Trainer
from barnraise.coordinator.model_folder import describe_model
from barnraise.coordinator.model_source import AdapterChoice, prepare_model
from barnraise.coordinator.verifier import Judge
from barnraise.coordinator.workers import (
    BatchPart,
    Judged,
    Trained,
    TrainJob,
    VerifyJob,
    WorkerSetup,
    checkpoint_folder,
)
from barnraise.kernels.models import save_weights
from barnraise.node.engine import Work
from barnraise.node.torch_engine import Generator
from barnraise.protocol.messages import RolloutLease, RolloutSubmission
from barnraise.protocol.wire import encode

PROMPTS, GROUP = 4, 6
SMALL: dict[str, Any] = {
    "vocab_size": len(SYMBOLS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}


def write_model(folder: Path, config: Any, dtype: str = "float32", seed: int = 0) -> torch.nn.Module:
    """Random weights, biases included, of ``config`` into an existing folder; the model that they are."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.config.save_pretrained(folder)
    save_weights(model, folder / "model.safetensors", dtype)
    return model


def run_of(folder: Path, config: Any, **changes: Any) -> WorkerSetup:
    """A run folder around a model of ``config`` whose completions may be longer than its windows."""
    long = {"sampling__max_new_tokens": 24, "grpo__learning_rate": 1e-3, "grpo__inner_epochs": 1}
    setup = make_run(folder, **(long | changes))
    write_model(checkpoint_folder(folder, 0), config, setup.spec.model.weights_dtype)
    return setup


def work(version: int, number: int = 1) -> Work:
    return Work(
        run_id=RUN_ID,
        lease_id=number.to_bytes(16, "big"),
        node=NODE,
        policy_version=version,
        prompts=PROMPTS,
        group_size=GROUP,
    )


def submitted(engine: Generator, version: int, number: int = 1) -> VerifyJob:
    """A unit drawn by ``engine``, as it reaches the verifier."""
    done = engine.generate(work(version, number), lambda progress: None, lambda: False)
    lease = RolloutLease(
        run_id=RUN_ID,
        lease_id=number.to_bytes(16, "big"),
        unit_id=number,
        node=NODE,
        policy_version=version,
        prompts=PROMPTS,
        group_size=GROUP,
        issued_at=0,
        timeout_at=1,
        deadline_at=2,
    )
    payload = encode(
        RolloutSubmission(
            run_id=RUN_ID,
            lease_id=lease.lease_id,
            policy_version=version,
            engine="test",
            generate_ms=1,
            rollouts=done.rollouts,
        )
    )
    return VerifyJob(submission_id=number.to_bytes(32, "big"), lease=lease, payload=payload)


def judged(judge: Judge, engine: Generator, version: int, number: int = 1) -> tuple[VerifyJob, Judged]:
    job = submitted(engine, version, number)
    return job, judge.judge([job])[0]


def trained(trainer: Trainer, version: int, *units: tuple[VerifyJob, Judged]) -> Trained:
    """The version that the learner makes of judged units."""
    parts = tuple(
        BatchPart(lease=job.lease, payload=job.payload, rewards=verdict.rewards) for job, verdict in units
    )
    return trainer.train(TrainJob(version=version, parts=parts))


def adapter_run(
    folder: Path, config: Any, choice: AdapterChoice, warm_up: int = 0, **changes: Any
) -> WorkerSetup:
    """A run that trains adapters on a model of ``config`` (None: ``learner_support``'s), as ``run init``."""
    long = {"sampling__max_new_tokens": 24, "grpo__learning_rate": 1e-2, "grpo__inner_epochs": 1}
    spec = run_spec(**(long | changes))
    source, target = folder / "source", checkpoint_folder(folder, 0)
    make_model(source, warm_up=warm_up)
    if config is not None:
        write_model(source, config)
    prepare_model(source, target, spec.model.weights_dtype, spec.environment, choice, seed=3)
    model = describe_model(target, "tiny", spec.model.weights_dtype, spec.model.compute_dtype)
    return WorkerSetup(spec=replace(spec, model=model), run_id=RUN_ID, folder=str(folder), threads=1)

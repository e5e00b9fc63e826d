"""A tiny run for the learner's tests: a model folder made here, rollouts drawn from its own policy."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from array import array
from pathlib import Path
from typing import Any

import spec_support
import torch
from msgspec import structs
from spec_support import GRPO

from barnraise.coordinator.workers import BatchPart, TrainJob, WorkerSetup, checkpoint_folder
from barnraise.kernels.generate import generate
from barnraise.kernels.models import Policy, load_policy, save_weights
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import build_environment, is_held_out, reverse_prompt
from barnraise.protocol.messages import Rollout, RolloutLease, RolloutSubmission
from barnraise.protocol.seeds import sample_seed, task_seed
from barnraise.protocol.spec import (
    EvalSpec,
    RolloutSpec,
    RunSpec,
)
from barnraise.protocol.wire import encode

torch.set_num_threads(1)  # models this small lose by threads, most of all on a busy machine

RUN_ID = bytes(range(32))
NODE = bytes(32)
LETTERS = "abcd"
SYMBOLS = ["<eos>", "r", "=", *LETTERS]


@functools.lru_cache(maxsize=4)
def _model(seed: int, warm_up: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    values: dict[str, Any] = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**values))
    strings = ["".join(word) for word in itertools.product(LETTERS, repeat=3)]
    text = [[*reverse_prompt(word), *word[::-1], "<eos>"] for word in strings if not is_held_out(word)]
    rows = torch.tensor([[SYMBOLS.index(symbol) for symbol in row] for row in text])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(warm_up):
        optimizer.zero_grad()
        logits = model(rows).logits[:, 4:-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 5:].flatten()).backward()
        optimizer.step()
    return model


def make_model(folder: Path, seed: int = 0, dtype: str = "float32", warm_up: int = 0) -> None:
    """A model folder with a one-character-per-token vocabulary.

    Random weights, then ``warm_up`` supervised steps on reversed 3-letter strings:
    enough to reward some rollouts, too few to solve the task.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    model = copy.deepcopy(_model(seed, warm_up))
    model.config.save_pretrained(folder)
    save_weights(model, folder / "model.safetensors", dtype)
    tokenizer = Tokenizer(
        models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<eos>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def run_spec(**changes: Any) -> RunSpec:
    """A small run on 3-letter reverse; ``section__field=value`` changes one field."""
    small: dict[str, Any] = {
        "model__vocabulary": len(SYMBOLS),
        "environment__settings": '{"letters": 3, "alphabet": 4}',
        "sampling__max_new_tokens": 4,
        "rollout": RolloutSpec(
            prompts_per_unit=4,
            group_size=8,
            groups_per_version=8,
            max_groups_per_version=16,
            max_lag=1,
            versions=100,
            timeout_s=10.0,
            deadline_s=20.0,
        ),
        "grpo": structs.replace(GRPO, warmup_steps=2, grad_clip=0.2, inner_epochs=2, normalise_std=False),
        "verify": spec_support.EXACT,
        "evaluation": EvalSpec(tasks=16, every=5),
    }
    return spec_support.run_spec(**(small | changes))


def make_run(folder: Path, seed: int = 0, warm_up: int = 0, **changes: Any) -> WorkerSetup:
    """A run folder with version 0 in it, as ``run init`` leaves it."""
    spec = run_spec(**changes)
    make_model(checkpoint_folder(folder, 0), seed, spec.model.weights_dtype, warm_up)
    return WorkerSetup(spec=spec, run_id=RUN_ID, folder=str(folder), threads=1)


def roll_out(
    setup: WorkerSetup, version: int, lease: int, prompts: int = 4, policy: Policy | None = None
) -> BatchPart:
    """What an honest node makes of one lease at ``version``, and the rewards that the verifier found."""
    spec, size = setup.spec, setup.spec.rollout.group_size
    folder = checkpoint_folder(Path(setup.folder), version)
    policy = policy or load_policy(folder)
    codec = Codec(folder, spec.environment)
    environment = build_environment(spec.environment)
    lease_id = lease.to_bytes(16, "big")
    tasks = [environment.task(task_seed(RUN_ID, lease_id, NODE, p), held_out=False) for p in range(prompts)]
    places = [(prompt, sample) for prompt in range(prompts) for sample in range(size)]
    completions = generate(
        policy,
        [codec.encode_prompt(tasks[prompt].prompt) for prompt, _ in places],
        [sample_seed(RUN_ID, lease_id, prompt, sample) for prompt, sample in places],
        spec.sampling,
        spec.model.eos_token,
    )
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            sample=sample,
            tokens=array("I", completion.tokens).tobytes(),
            logprobs=array("f", completion.logprobs).tobytes(),
            proofs=b"",
        )
        for (prompt, sample), completion in zip(places, completions, strict=True)
    )
    submission = RolloutSubmission(
        run_id=RUN_ID,
        lease_id=lease_id,
        policy_version=version,
        engine="test",
        generate_ms=0,
        rollouts=rollouts,
    )
    return BatchPart(
        lease=RolloutLease(
            run_id=RUN_ID,
            lease_id=lease_id,
            unit_id=lease,
            node=NODE,
            policy_version=version,
            prompts=prompts,
            group_size=size,
            issued_at=0,
            timeout_at=0,
            deadline_at=0,
        ),
        payload=encode(submission),
        rewards=tuple(
            environment.score(tasks[prompt], codec.decode(completion.tokens))
            for (prompt, _), completion in zip(places, completions, strict=True)
        ),
    )


def next_job(setup: WorkerSetup, version: int, units: int = 2, lag: int = 0) -> TrainJob:
    """The job that makes ``version`` from rollouts of ``version - 1 - lag``."""
    source = max(0, version - 1 - lag)
    policy = load_policy(checkpoint_folder(Path(setup.folder), source))
    parts = tuple(roll_out(setup, source, version * 100 + unit, policy=policy) for unit in range(units))
    return TrainJob(version=version, parts=parts)

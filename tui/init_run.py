"""``barnraise run init``: from options and a run file to what the run is made of."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from barnraise.protocol.wire import printable
from barnraise.tui import posttrain_run, pretrain_run
from barnraise.tui.console import emit_json, examples
from barnraise.tui.demo_key import MADE_MS, key_of_seed
from barnraise.tui.init_checks import (
    adapter_choice,
    check_folder,
    check_json,
    check_message,
    check_words,
    one_of,
)
from barnraise.tui.run_file import given, keep_file, preset

if TYPE_CHECKING:
    from barnraise.coordinator.folder import Settings
    from barnraise.coordinator.model_source import AdapterChoice
    from barnraise.coordinator.run_file import RunFile, RunSection

MOST_NAME, MOST_DESCRIPTION = 64, 500  # of the run spec
PRESET = "(default: the model's preset)"
EXAMPLES = examples(
    "run init ./my-run",
    "run init ./my-run --model ./Qwen3-0.6B --environment chain_sum",
    "run init ./my-run --model Qwen/Qwen2.5-7B-Instruct --lora-rank 16 --lora-alpha 32",
    "run init ./my-run --phase pretrain --model tiny --corpus ./corpus",
    "run init ./my-run --phase pretrain --model ./Qwen3-0.6B --corpus ./corpus --blocks 4 --rounds 20",
    "run init ./next --phase pretrain --model tiny --corpus ./corpus --scaffold ./my-run",
    "coordinator run ./my-run      (to serve it)",
)


def init(
    context: typer.Context,
    folder: Path = typer.Argument(
        ..., metavar="DIR", help="The run folder to make; must not exist, or be empty."
    ),
    model: str = typer.Option(
        "demo",
        "--model",
        metavar="NAME|DIR",
        help="'demo', 'smollm2', a folder with safetensors, or a Hugging Face id; to pretrain: 'demo', "
        "'tiny' (2 M parameters), 'small' (10 M), or a folder with a config.json.",
    ),
    environment: str | None = typer.Option(
        None,
        "--environment",
        metavar="NAME",
        help=f"'reverse' or a reasoning-gym generator such as chain_sum {PRESET}.",
    ),
    environment_settings: str | None = typer.Option(
        None, "--environment-settings", metavar="JSON", help="Its settings, such as '{\"max_terms\": 3}'."
    ),
    chat: bool | None = typer.Option(
        None, "--chat/--plain-prompts", help=f"Use the tokenizer's chat template or not {PRESET}."
    ),
    system_prompt: str | None = typer.Option(
        None, "--system-prompt", metavar="TEXT", help=f"Put before every task, chat only {PRESET}."
    ),
    name: str | None = typer.Option(
        None, "--name", metavar="TEXT", help="What volunteers see (default: the folder's name)."
    ),
    description: str = typer.Option(
        "", "--description", metavar="TEXT", help="One sentence for volunteers (default: none)."
    ),
    seed: int = typer.Option(
        0, "--seed", metavar="N", min=0, max=2**31, help="Seed of demo model, held-out tasks and learner."
    ),
    versions: int | None = typer.Option(
        None,
        "--versions",
        metavar="N",
        min=1,
        max=65_536,
        help=f"Policy versions until the run is complete {PRESET}.",
    ),
    prompts: int | None = typer.Option(
        None, "--prompts-per-unit", metavar="N", min=1, help=f"Prompts in one rollout unit {PRESET}."
    ),
    group_size: int | None = typer.Option(
        None, "--group-size", metavar="N", min=2, help=f"Samples per prompt {PRESET}."
    ),
    groups: int | None = typer.Option(
        None, "--groups-per-version", metavar="N", min=1, help=f"Usable groups per policy version {PRESET}."
    ),
    max_new_tokens: int | None = typer.Option(
        None, "--max-new-tokens", metavar="N", min=1, help=f"Longest completion, in tokens {PRESET}."
    ),
    temperature: float | None = typer.Option(
        None, "--temperature", metavar="X", min=0.01, max=10.0, help=f"Sampling temperature {PRESET}."
    ),
    learning_rate: float | None = typer.Option(
        None, "--learning-rate", metavar="X", min=1e-9, max=1.0, help=f"AdamW's peak rate {PRESET}."
    ),
    lora_rank: int | None = typer.Option(
        None,
        "--lora-rank",
        metavar="N",
        min=1,
        max=1024,
        help="Train low-rank adapters of this rank instead of the model (default: the model).",
    ),
    lora_alpha: float | None = typer.Option(
        None,
        "--lora-alpha",
        metavar="X",
        min=0.001,
        max=1e6,
        help="Their weight is alpha / rank (twice the rank).",
    ),
    lora_targets: str | None = typer.Option(
        None,
        "--lora-targets",
        metavar="NAMES",
        help="Layers that get one, such as q_proj,v_proj (all linear ones).",
    ),
    phase: str = typer.Option(
        "posttrain",
        "--phase",
        metavar="PHASE",
        help="'posttrain' improves a model by rewards; 'pretrain' makes one from text, block by block.",
    ),
    corpus: Path | None = typer.Option(
        None, "--corpus", metavar="DIR", help="Pretrain: the text, from `barnraise data prepare`."
    ),
    blocks: int | None = typer.Option(
        None, "--blocks", metavar="K", min=1, max=64, help="Pretrain: blocks to cut the model into (2)."
    ),
    scaffold_layers: int | None = typer.Option(
        None, "--scaffold-layers", metavar="N", min=1, help="Pretrain: the scaffold's depth (half)."
    ),
    scaffold_steps: int | None = typer.Option(
        None, "--scaffold-steps", metavar="N", min=1, help=f"Pretrain: its training steps {PRESET}."
    ),
    scaffold: Path | None = typer.Option(
        None,
        "--scaffold",
        metavar="FILE|RUN",
        help="Pretrain: use an earlier run's scaffold, by its hash.",
    ),
    rounds: int | None = typer.Option(
        None, "--rounds", metavar="R", min=1, max=65_536, help=f"Pretrain: outer steps {PRESET}."
    ),
    steps: int | None = typer.Option(
        None, "--steps", metavar="H", min=1, help=f"Pretrain: steps of one unit {PRESET}."
    ),
    contributors: int | None = typer.Option(
        None,
        "--contributors",
        metavar="C",
        min=1,
        max=1024,
        help="Pretrain: units per block and round (1).",
    ),
    quorum: int | None = typer.Option(
        None, "--quorum", metavar="C", min=1, help="Pretrain: as many do once time is up (half of them)."
    ),
    round_seconds: float | None = typer.Option(
        None,
        "--round-seconds",
        metavar="S",
        min=1.0,
        help="Pretrain: when that is (from the unit's size).",
    ),
    first: str = typer.Option(
        "grown",
        "--init",
        metavar="HOW",
        help="Pretrain: first weights 'grown' from the scaffold, or 'random'.",
    ),
    streams: str = typer.Option(
        "disjoint", "--data", metavar="HOW", help="Pretrain: 'disjoint' text for each block, or 'shared'."
    ),
    delta: str = typer.Option(
        "float32", "--delta", metavar="FORMAT", help="Pretrain: differences as float32, bfloat16 or int8."
    ),
    trim: float | None = typer.Option(
        None,
        "--trim",
        metavar="X",
        min=0.0,
        max=0.49,
        help="Pretrain: share of extremes left out of means (0.25 from 4 contributors on).",
    ),
    adapt_steps: int | None = typer.Option(
        None,
        "--adapt-steps",
        metavar="N",
        min=0,
        help="Pretrain: steps of the joint tune (3/8 of blocks').",
    ),
    sequence: int | None = typer.Option(
        None, "--sequence", metavar="N", min=2, help=f"Pretrain: tokens per sequence {PRESET}."
    ),
    batch: int | None = typer.Option(
        None, "--batch", metavar="N", min=1, max=65_536, help=f"Pretrain: sequences per step {PRESET}."
    ),
    pretrain_rate: float | None = typer.Option(
        None, "--pretrain-rate", metavar="X", min=1e-9, max=1.0, help=f"Pretrain: peak rate {PRESET}."
    ),
    then_posttrain: bool | None = typer.Option(
        None,
        "--then-posttrain/--no-posttrain",
        help="Pretrain: go on with rewards, --versions of them (default: with 'demo').",
    ),
    file: Path | None = typer.Option(
        None, "--file", metavar="FILE", help="A run file ('run template'); options come before what it says."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object as the last line."),
    throw_away: bool = typer.Option(
        False, "--throw-away", hidden=True, help="For the demo: a key that anybody can guess."
    ),
) -> None:
    """Make a run: choose the model and the task, sign the run spec, write policy version 0."""
    from msgspec.structs import replace as with_fields

    from barnraise.coordinator.run_file import RunFile, read_run_file, settings_of

    check_folder(folder)
    identity, now_ms = (key_of_seed(seed), MADE_MS) if throw_away else (None, time.time_ns() // 1_000_000)
    loaded = RunFile() if file is None else read_run_file(file)
    if file is not None:
        of = loaded.run
        model = model if given(context, "model") else of.model
        phase = phase if given(context, "phase") else of.phase
        seed = seed if given(context, "seed") else of.seed
        name, description = name or of.name or None, description or of.description
        lora_rank = lora_rank or of.lora_rank or None
        lora_alpha = lora_alpha or (of.lora_alpha or None if lora_rank else None)
        lora_targets = lora_targets or of.lora_targets or None
    check_words("--name", name or "", MOST_NAME)
    check_words("--description", description, MOST_DESCRIPTION)
    if environment_settings is not None:
        check_json(environment_settings)
    changed = {
        "name": environment,
        "settings": environment_settings or ("{}" if environment else None),
        "prompt_format": None if chat is None else ("chat" if chat else "plain"),
        "system_prompt": system_prompt,
    }
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}

    def change(settings: Settings) -> Settings:
        settings = replace(settings_of(loaded, settings), admission=loaded.run.admission)
        most = max(groups, settings.rollout.max_groups_per_version) if groups else None
        rollout = {
            "versions": versions,
            "prompts_per_unit": prompts,
            "group_size": group_size,
            "groups_per_version": groups,
            "max_groups_per_version": most,
        }
        settings = replace(
            settings,
            environment=with_fields(settings.environment, **_given(changed)),
            rollout=with_fields(settings.rollout, **_given(rollout)),
            sampling=with_fields(settings.sampling, **_given(sampling)),
            grpo=with_fields(settings.grpo, **_given({"learning_rate": learning_rate})),
        )
        check_message(settings)
        return settings

    adapter = adapter_choice(lora_rank, lora_alpha, lora_targets)
    pretraining: dict[str, object] = {
        "blocks": blocks,
        "scaffold_layers": scaffold_layers,
        "scaffold_steps": scaffold_steps,
        "rounds": rounds,
        "steps": steps,
        "contributors": contributors,
        "quorum": quorum,
        "round_s": round_seconds,
        "adapt_steps": adapt_steps,
        "sequence": sequence,
        "batch": batch,
        "rate": pretrain_rate,
    }
    asked = loaded.signed.get("pretrain", {})
    if phase == "pretrain":
        pretraining = {**{key: asked.get(key) for key in pretraining}, **_given(pretraining)}
        first = first if given(context, "first") else asked.get("init", first)
        streams = streams if given(context, "streams") else asked.get("data", streams)
        delta = delta if given(context, "delta") else asked.get("delta", delta)
        trim = asked.get("trim") if trim is None else trim
        then_posttrain = asked.get("then_posttrain") if then_posttrain is None else then_posttrain
        if adapter is not None:
            raise typer.BadParameter("pretraining changes all weights", param_hint="--lora-rank")
        from barnraise.coordinator.pretrain_presets import Choices

        chosen = Choices(
            init=one_of(first, "--init", "grown", "random"),  # type: ignore[arg-type]
            data=one_of(streams, "--data", "disjoint", "shared"),  # type: ignore[arg-type]
            delta=one_of(delta, "--delta", "float32", "bfloat16", "int8"),  # type: ignore[arg-type]
            trim=trim,
            **_given(pretraining),  # type: ignore[arg-type]
        )
        if corpus is not None and model == "demo":  # the demo's model knows no other text than its own
            model = "tiny"
        pretrain_run.make(
            folder,
            model,
            corpus,
            chosen,
            scaffold,
            then_posttrain,
            change,
            name=printable(name or folder.absolute().name, MOST_NAME),
            description=description,
            seed=seed,
            now_ms=now_ms,
            identity=identity,
            as_json=as_json,
        )
        keep_file(folder, loaded, _section(loaded, model, phase, name, description, seed, None), asked)
        return
    one_of(phase, "--phase", "posttrain", "pretrain")
    if corpus is not None or scaffold is not None or then_posttrain is not None or _given(pretraining):
        raise typer.BadParameter("corpus, blocks and schedule are for --phase pretrain", param_hint="--phase")
    settings = change(preset(model))
    run_id, lines = posttrain_run.make(
        folder,
        model,
        settings,
        adapter,
        name=printable(name or folder.absolute().name, MOST_NAME),
        description=description,
        seed=seed,
        now_ms=now_ms,
        identity=identity,
    )
    keep_file(folder, loaded, _section(loaded, model, phase, name, description, seed, adapter), {})
    for line in lines:
        typer.echo(line)
    typer.echo(f"run {run_id.hex()[:16]} made in {folder}; serve it with: barnraise coordinator run {folder}")
    if as_json:
        emit_json({"folder": str(folder), "run_id": run_id.hex()})


def _section(
    loaded: RunFile,
    model: str,
    phase: str,
    name: str | None,
    description: str,
    seed: int,
    adapter: AdapterChoice | None,
) -> RunSection:
    """What ``RUN/run.toml`` says of how the run was made."""
    from msgspec.structs import replace as with_fields

    lora = {}
    if adapter is not None:
        lora = {
            "lora_rank": adapter.rank,
            "lora_alpha": float(adapter.alpha),
            "lora_targets": ",".join(adapter.targets),
        }
    words = {"model": model, "phase": phase, "name": name or "", "description": description, "seed": seed}
    return with_fields(loaded.run, **words, **lora)


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}

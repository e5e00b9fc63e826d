"""``barnraise run init --phase pretrain``: a run that begins with text and no weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from barnraise.protocol.errors import RunFolderError
from barnraise.tui.console import Progress, emit_json

if TYPE_CHECKING:
    from barnraise.coordinator.folder import Settings
    from barnraise.coordinator.pretrain_presets import Choices, Counts
    from barnraise.protocol.corpus import Corpus
    from barnraise.protocol.identity import Identity
    from barnraise.protocol.pretrain import PretrainSpec


@dataclass(frozen=True)
class Plan:
    """Everything decided and checked, nothing made yet."""

    corpus: Corpus
    counts: Counts
    parameters: int
    spec: PretrainSpec
    settings: Settings
    scaffold: Path | None
    notes: list[str]


def make(
    folder: Path,
    model: str,
    corpus: Path | None,
    choices: Choices,
    scaffold: Path | None,
    then_posttrain: bool | None,
    change: Callable[[Settings], Settings],
    *,
    name: str,
    description: str,
    seed: int,
    now_ms: int,
    identity: Identity | None,
    as_json: bool,
) -> None:
    """Check everything, then make the run folder and say what will happen in it.

    ``change`` applies the options that concern post-training to a preset; ``identity``: the
    operator's key, None for a new one.

    Raises:
        RunFolderError: model, corpus, scaffold and schedule do not go together.
        typer.BadParameter: model or corpus cannot be used at all.
        TaskError: the environment of post-training is unknown.
    """
    from barnraise.coordinator.checks import default_verify_spec
    from barnraise.coordinator.folder import create_pretrain_run
    from barnraise.coordinator.pretrain_presets import DEMO
    from barnraise.kernels.models import ModelError
    from barnraise.kernels.token_shards import CorpusError

    progress = Progress()
    if corpus is None and model != DEMO:
        raise typer.BadParameter(
            "pretraining needs a text: make a corpus with `barnraise data prepare`", param_hint="--corpus"
        )
    with tempfile.TemporaryDirectory(prefix="barnraise-init-") as scratch:
        prepared = Path(scratch) / "model"
        try:
            if corpus is None:
                from barnraise.coordinator.demo_corpus import prepare_demo_corpus

                corpus = Path(scratch) / "corpus"
                prepare_demo_corpus(corpus, seed, progress)
            plan = _plan(prepared, model, corpus, choices, scaffold, then_posttrain, change, progress)
        except CorpusError as error:
            raise typer.BadParameter(str(error), param_hint="--corpus") from error
        except ModelError as error:
            raise typer.BadParameter(str(error), param_hint="--model") from error
        run_id = create_pretrain_run(
            folder,
            prepared,
            plan.parameters,
            corpus,
            plan.spec,
            plan.settings,
            default_verify_spec(plan.settings.compute_dtype),
            name=name,
            description=description,
            model_name=Path(model).name[:64],
            seed=seed,
            now_ms=now_ms,
            identity=identity,
            scaffold=plan.scaffold,
        )
    for line in (*_described(plan), *plan.notes):
        typer.echo(line)
    typer.echo(f"run {run_id.hex()[:16]} made in {folder}; serve it with: barnraise coordinator run {folder}")
    if as_json:
        emit_json(_fields(folder, run_id, plan))


def _plan(
    prepared: Path,
    model: str,
    corpus: Path,
    choices: Choices,
    scaffold: Path | None,
    then_posttrain: bool | None,
    change: Callable[[Settings], Settings],
    progress: Progress,
) -> Plan:
    """Decide what was left open; writes the model's folder to ``prepared``."""
    from msgspec.structs import replace as with_fields

    from barnraise.coordinator import corpus_files, pretrain_model
    from barnraise.coordinator import pretrain_presets as presets
    from barnraise.coordinator.folder import file_digest
    from barnraise.kernels.mot import make_cut
    from barnraise.protocol.corpus import corpus_digest
    from barnraise.protocol.pretrain import model_version

    progress("checking the corpus", 0.0)
    text = corpus_files.open_corpus(corpus)
    corpus_files.check_shards(corpus, text)
    progress("checking the model", 0.0)
    config = pretrain_model.write_model_folder(model, corpus, text, prepared)
    source = None if scaffold is None else pretrain_model.scaffold_file(scaffold)
    choices, settings = _settings(model, choices, then_posttrain)
    if source is not None and choices.scaffold_layers is None:
        choices = replace(choices, scaffold_layers=pretrain_model.scaffold_layers(source))
    layers = pretrain_model.layers_of(config)
    depth = presets.scaffold_depth(layers, choices.blocks, choices.scaffold_layers)
    if source is not None:
        pretrain_model.check_scaffold(source, config, choices.blocks, depth)
        choices = replace(choices, scaffold=file_digest(source))
    counts = pretrain_model.counts(config, make_cut(layers, choices.blocks, depth))
    size = presets.SIZES.get(model, presets.FOLDER_SIZE)
    spec = presets.schedule(size, counts, corpus_digest(text), choices, settings.compute_dtype)
    pretrain_model.check_sequence(config, spec.sequence, text)
    notes = presets.check_text(spec, text)
    settings = change(settings)
    last = model_version(spec) + (settings.rollout.versions if spec.then_posttrain else 0)
    settings = replace(settings, rollout=with_fields(settings.rollout, versions=last))
    if spec.then_posttrain:
        _check_environment(prepared, settings)
    parameters = pretrain_model.model_parameters(config)
    return Plan(text, counts, parameters, spec, settings, source, notes)


def _settings(model: str, choices: Choices, then_posttrain: bool | None) -> tuple[Choices, Settings]:
    """The preset's schedule, where one is asked for by name, and the settings of post-training."""
    from barnraise.coordinator import presets
    from barnraise.coordinator import pretrain_presets as pretraining

    if model == pretraining.DEMO:
        choices = pretraining.demo_choices(choices)
        return replace(choices, then_posttrain=then_posttrain is not False), pretraining.demo_settings()
    choices = replace(choices, then_posttrain=bool(then_posttrain))
    if model in pretraining.SIZES:
        return choices, pretraining.small_settings()
    return choices, pretraining.plain(presets.generic())


def _check_environment(model_folder: Path, settings: Settings) -> None:
    """What cannot work after weeks of pretraining is refused before anything is signed."""
    from barnraise.kernels.tokens import Codec
    from barnraise.protocol.environments import build_environment

    environment = build_environment(settings.environment)
    codec = Codec(model_folder, settings.environment)
    task = environment.task(0, held_out=True).prompt
    if (
        codec.decode(codec.encode_prompt(task)).strip() == ""
        and settings.environment.prompt_format == "plain"
    ):
        raise RunFolderError(
            f"the corpus's tokenizer can say nothing of the tasks of '{settings.environment.name}', "
            f"such as {task[:40]!r}: prepare the corpus with another tokenizer, or choose --environment"
        )


def _described(plan: Plan) -> list[str]:
    spec, counts = plan.spec, plan.counts
    last = plan.settings.rollout.versions
    tokens = spec.sequence * spec.recipe.batch
    units = spec.rounds * spec.blocks * spec.contributors
    scaffold = f"{spec.scaffold_layers} layers ({counts.scaffold:,} parameters), " + (
        f"{spec.scaffold_recipe.steps} steps by the coordinator"
        if spec.scaffold is None
        else f"taken from an earlier run ({spec.scaffold.hex()[:16]})"
    )
    return [
        f"model: {plan.parameters:,} parameters in {counts.layers} layers, {plan.corpus.vocabulary:,} tokens",
        f"scaffold: {scaffold}",
        f"blocks: {spec.blocks} of up to {counts.block:,} parameters, {spec.init} init; {spec.rounds} rounds "
        f"of {spec.steps} steps of {spec.recipe.batch} x {spec.sequence} tokens, {spec.contributors} "
        f"per block: {units} units, {units * spec.steps * tokens:,} tokens",
        f"adaptation: {spec.adapt.steps} steps by the coordinator; then "
        + (
            f"post-training on '{plan.settings.environment.name}' up to version {last}"
            if spec.then_posttrain
            else f"the run is complete with version {last}"
        ),
    ]


def _fields(folder: Path, run_id: bytes, plan: Plan) -> dict[str, Any]:
    spec, counts = plan.spec, plan.counts
    units = spec.rounds * spec.blocks * spec.contributors
    return {
        "folder": str(folder),
        "run_id": run_id.hex(),
        "phase": "pretrain",
        "parameters": plan.parameters,
        "block_parameters": counts.block,
        "scaffold_parameters": counts.scaffold,
        "blocks": spec.blocks,
        "scaffold_layers": spec.scaffold_layers,
        "scaffold": None if spec.scaffold is None else spec.scaffold.hex(),
        "corpus": spec.corpus.hex(),
        "rounds": spec.rounds,
        "steps": spec.steps,
        "contributors": spec.contributors,
        "quorum": spec.quorum,
        "adapt_steps": spec.adapt.steps,
        "units": units,
        "tokens": units * spec.steps * spec.sequence * spec.recipe.batch,
        "versions": plan.settings.rollout.versions,
        "then_posttrain": spec.then_posttrain,
        "notes": plan.notes,
    }

"""What the run folder of a simulated block stage is made of: corpus, plan, a model without weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.folder import Settings, create_pretrain_run
from barnraise.coordinator.pretrain_presets import tolerance
from barnraise.protocol.identity import Identity
from barnraise.protocol.pretrain import BlockRecipe, JointRecipe, PretrainSpec, model_version
from barnraise.simulation import block_standin, standin
from barnraise.simulation.scenario import Scenario

_JOINT = JointRecipe(
    steps=1, learning_rate=1e-3, warmup_fraction=0.1, floor=0.1, weight_decay=0.0, clip=1.0, batch=4
)
_STEPS = 4  # of a segment


def plan_of(scenario: Scenario, corpus: bytes) -> PretrainSpec:
    """The run's block stage; places and quorum follow from how many nodes there are."""
    work, asked = scenario.work, scenario.blocks
    contributors = max(1, min(1024, round(scenario.swarm.nodes * asked.places / asked.blocks)))
    return PretrainSpec(
        blocks=asked.blocks,
        scaffold_layers=asked.blocks,
        scaffold=None,
        scaffold_recipe=_JOINT,
        corpus=corpus,
        sequence=block_standin.SEQUENCE,
        init="grown",
        data="disjoint",
        rounds=asked.rounds,
        steps=_STEPS * asked.segments,
        commit_every=_STEPS,
        contributors=contributors,
        quorum=max(1, math.ceil(contributors * asked.quorum)),
        round_s=float(asked.round_s),
        recipe=BlockRecipe(
            learning_rate=1e-3,
            warmup_steps=0,
            settle_steps=0,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.0,
            clip=1.0,
            batch=block_standin.BATCH,
        ),
        delta="float32",
        outer_rate=1.0,
        outer_momentum=0.0,
        trim=0.25 if contributors >= 4 else 0.0,
        tolerance=tolerance("float32"),
        adapt=_JOINT,
        held_out=1,
        timeout_s=float(work.timeout_s),
        deadline_s=float(work.deadline_s),
        then_posttrain=asked.posttrain,
    )


def create_block_run(
    folder: Path, scenario: Scenario, settings: Settings, seed: int, now_ms: int, identity: Identity
) -> None:
    """Make the run folder; corpus and model lie beside it afterwards."""
    model, text = folder.with_name("model"), folder.with_name("corpus")
    block_standin.write_model(model, standin.VOCABULARY, standin.EOS)
    plan = plan_of(scenario, block_standin.write_corpus(text, model / "tokenizer.json", seed))
    first = model_version(plan)
    versions = first + scenario.work.versions if plan.then_posttrain else first
    create_pretrain_run(
        *(folder, model, scenario.swarm.model_bytes // 2, text, plan),
        replace(settings, rollout=structs.replace(settings.rollout, versions=versions)),
        default_verify_spec("float32"),
        name=scenario.name,
        description="",
        model_name="standin",
        seed=seed,
        now_ms=now_ms,
        identity=identity,
    )

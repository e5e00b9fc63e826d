"""Every key of a run file: what it means, its unit, default and range; the file and its page are made of it.

``python -m barnraise.coordinator.run_keys`` prints the reference page, ``docs/run-file.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import tomlkit
from msgspec import Meta
from tomlkit.items import Table

from barnraise.coordinator.folder import Settings
from barnraise.coordinator.pretrain_presets import Choices
from barnraise.coordinator.run_bounds import LEAST, OR_ZERO
from barnraise.coordinator.run_file import OWN, SIGNED, RunFile, RunSection, fields_of
from barnraise.protocol.amendments import AMENDABLE
from barnraise.protocol.spec import RunSpec

SECTIONS: dict[str, str] = {
    "run": "What the run is. Signed when it is made.",
    "environment": "Where tasks come from. Signed when the run is made.",
    "sampling": "How tokens are drawn. Signed when the run is made.",
    "rollout": "How work is cut, and when a version's batch is full. Signed when the run is made.",
    "grpo": "The loss and the optimiser. Signed when the run is made; all of it can be amended.",
    "evaluation": "Held-out tasks. Signed when the run is made.",
    "held_out": "Whose held-out tasks, where not the run's own. Signed when the run is made.",
    "pretrain": 'How blocks are trained, with phase = "pretrain" alone. Signed when the run is made.',
    "serve": "How this coordinator is started. Read with every start; the command line comes first.",
    "keep": "What stays on the disk: for a rollback, and of the rollouts. Read with every start.",
    "guards": "When an alarm is raised, and whether it pauses the run. Read with every start.",
}

TEXTS: dict[str, str] = {
    "run.phase": "posttrain improves a model by rewards; pretrain makes one from text, block by block",
    "run.model": "demo, smollm2, a folder with safetensors, or a Hugging Face id; tiny, small to pretrain",
    "run.name": "what volunteers see; empty: the folder's name",
    "run.description": "one sentence for volunteers",
    "run.seed": "of the demo model, held-out tasks and the learner",
    "run.admission": "who may join: everybody, the list and the invited, the list alone",
    "run.lora_rank": "train low-rank adapters of this rank; 0: the model itself",
    "run.lora_alpha": "their weight is alpha / rank; 0: twice the rank",
    "run.lora_targets": "layers that get one, comma-separated; empty: all linear ones",
    "environment.name": "reverse, mixture, length, a reasoning-gym generator, or an installed package's",
    "environment.settings": "its settings, a JSON object in quotes",
    "environment.prompt_format": "plain text, or the tokenizer's chat template",
    "environment.system_prompt": "put before every task, with chat alone",
    "sampling.temperature": "of the logits",
    "sampling.top_k": "most likely tokens to draw from; 0: all",
    "sampling.top_p": "probability mass to draw from; 1: all",
    "sampling.max_new_tokens": "tokens of the longest completion",
    "rollout.prompts_per_unit": "prompts in one unit of work",
    "rollout.group_size": "completions per prompt",
    "rollout.groups_per_version": "groups with an advantage that fill a version's batch",
    "rollout.max_groups_per_version": "groups at most, with or without an advantage",
    "rollout.max_lag": "versions: older rollouts are not trained on",
    "rollout.versions": "the run is complete when this version is published",
    "rollout.timeout_s": "seconds until a unit may go to somebody else, at most",
    "rollout.deadline_s": "seconds until a lease is honoured no more",
    "grpo.learning_rate": "AdamW's peak rate",
    "grpo.warmup_steps": "optimiser steps until it is reached",
    "grpo.beta1": "AdamW's decay of the mean gradient",
    "grpo.beta2": "AdamW's decay of the squared gradient",
    "grpo.weight_decay": "of matrices; norms and biases are not decayed",
    "grpo.grad_clip": "largest norm of a step's gradient",
    "grpo.inner_epochs": "passes over a version's batch",
    "grpo.minibatches": "optimiser steps per pass",
    "grpo.clip_low": "the ratio is clipped at 1 - clip_low",
    "grpo.clip_high": "the ratio is clipped at 1 + clip_high",
    "grpo.clip_delta": "largest ratio for negative advantages (two-sided clipping)",
    "grpo.normalise_std": "divide advantages by the group's standard deviation",
    "grpo.kl_coefficient": "weight of the KL divergence from the first policy; 0: none",
    "grpo.entropy_coefficient": "weight of the entropy that is added; 0: none",
    "grpo.loss_aggregation": "every token counts alike, or every sequence",
    "evaluation.tasks": "held-out tasks that the greedy policy is tried on",
    "evaluation.every": "versions from one evaluation to the next",
    "held_out.name": "as environment.name; what this section leaves out is as in [environment]",
    "held_out.settings": "as environment.settings",
    "held_out.prompt_format": "as environment.prompt_format",
    "held_out.system_prompt": "as environment.system_prompt",
    "pretrain.blocks": "blocks that the model is cut into",
    "pretrain.scaffold_layers": "layers of the scaffold (default: half of the model's)",
    "pretrain.scaffold_steps": "training steps of the scaffold",
    "pretrain.rounds": "outer steps",
    "pretrain.steps": "training steps of one unit",
    "pretrain.contributors": "units per block and round",
    "pretrain.quorum": "as many do once time is up (default: half of them)",
    "pretrain.round_s": "seconds until time is up (default: by the unit's size)",
    "pretrain.init": "first weights: grown from the scaffold, or random",
    "pretrain.data": "disjoint text for each block, or shared",
    "pretrain.delta": "in what differences travel",
    "pretrain.adapt_steps": "steps of the joint tune at the end",
    "pretrain.sequence": "tokens per sequence",
    "pretrain.batch": "sequences per step",
    "pretrain.rate": "peak learning rate of blocks",
    "pretrain.outer_rate": "of the outer Nesterov step",
    "pretrain.outer_momentum": "of the outer Nesterov step",
    "pretrain.trim": "share of extremes left out of means",
    "pretrain.then_posttrain": "go on with rewards afterwards",
    "serve.listen": "addresses to listen on, TCP",
    "serve.http": "HOST:PORT of the web page; empty: 127.0.0.1:8080 or another port",
    "serve.no_http": "serve no web page",
    "serve.admin": "admin API, with a token: for this machine, by its TLS proxy too, in clear for all, none",
    "serve.threads": "threads each for every verifier and the learner",
    "serve.verifiers": "verifier processes here, or auto: by GPUs or cores; empty: 1, or 0 with verifier_at",
    "serve.verifier_at": "for each verifier on another machine the command that starts it, as in a shell",
    "serve.learner_at": "the command that starts the learner on another machine",
    "serve.verify_all": "verify everything in full, however long the queue",
    "serve.verifier_devices": "GPUs for verifiers, in turn, comma-separated; empty: all",
    "serve.learner_processes": "processes that the learner is sharded over, or auto: one per GPU",
    "serve.learner_devices": "GPUs for the learner, comma-separated; empty: all",
    "serve.learner_recompute": "keep no activations inside of layers: less memory, more time",
    "serve.learner_torchrun": "options of torchrun, to spread the learner over machines",
    "serve.mirrors": "static file hosts that have the shards",
    "serve.upload_copies": "copies of each version to upload down the tree; 0: no limit",
    "serve.relay_mbit": "Mbit/s to carry shards between nodes that cannot reach each other; 0: none",
    "serve.floor_minor": "oldest minor of our protocol major that is served; -1: all of them",
    "serve.floor_from": "from when on, UTC, such as 2026-12-31; until then older nodes are told; empty: now",
    "serve.new_keys_per_day": "new keys that may join from one IPv4 address or IPv6 /64 within 24 hours; "
    "4 times as many from its /24 or /48; 0: no limit",
    "serve.limit_private": "count new keys from loopback and private addresses, too",
    "keep.every": "every so-manieth version stays whole, optimiser included; 0: none",
    "keep.most": "so many of them, the newest",
    "keep.disk_gb": "GB that all checkpoints may take; the oldest go first; 0: no limit",
    "keep.rollouts": "keep what was drawn, as Parquet: accepted work alone, or all (needs pyarrow)",
    "keep.rollouts_gb": "GB that it may take; the oldest versions go first; 0: no limit",
    "keep.rollout_proofs": "with its TOPLOC proofs, 8 bytes a token: then digests can be made again",
    "guards.pause": "whether guards of the grave kinds pause the run",
    "guards.recent": "versions (or evaluations) whose median is compared ...",
    "guards.past": "... with so many before them",
    "guards.reward_share": "reward-collapse: below this share of the past's best level",
    "guards.accuracy_share": "held-out-collapse: below this share of the past's best level",
    "guards.entropy_low": "entropy-collapse: below this share of the past's median",
    "guards.entropy_high": "entropy-explosion: above so many times the past's median",
    "guards.gradient_times": "gradient-norm: above so many times the past's median",
    "guards.clip_share": "clip-ratio: above this share of tokens",
    "guards.kl": "kl: above so many nats per token",
    "guards.usable_share": "zero-advantage: below this share of groups with an advantage",
    "guards.stale_share": "stale-work: lag above this share of max_lag",
    "guards.backlog_s": "verifier-backlog: seconds that a submission waits",
    "guards.volunteers_share": "volunteers-lost: below this share of the most nodes of the last hour",
    "guards.stall_s": "stall: seconds without a version",
    "guards.flood": "newcomer-flood: more new keys turned away within an hour",
}


def keys() -> Iterator[tuple[str, str, Any]]:
    """(section, key, annotated type) of every key, in the file's order."""
    kinds: dict[str, Any] = {"run": RunSection, **SIGNED, "pretrain": Choices, **OWN}
    for section, kind in kinds.items():
        for key, hint in fields_of(section, kind).items():
            yield section, key, hint


def allowed(hint: Any, name: str = "") -> str:
    """The values of a type, in words: ``1 to 65536``, ``true or false``, ``token or sequence``.

    ``name``: of the key that has it, which may have a bound of its own.
    """
    parts = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is None:
        word = {bool: "true or false", str: "text", int: "whole number", float: "number"}.get(hint, "")
        return f"{word} from {LEAST[name]:.12g}" if name in LEAST else word
    if type(None) in get_args(hint):
        return allowed(parts[0], name)
    if isinstance(parts[0], str):
        return " or ".join(map(str, parts))
    meta = next((part for part in parts if isinstance(part, Meta)), None)
    if meta is None:
        return "list of texts" if get_origin(hint) is tuple else allowed(parts[0])
    if meta.max_length is not None:
        return "list of texts" if get_origin(parts[0]) is tuple else "text"
    if name in LEAST:
        zero = "0, " if name in OR_ZERO else ""
        return f"{zero}{LEAST[name]:.12g} to {meta.le:.12g}"
    low = f"above {meta.gt:.12g}" if meta.gt is not None else f"{meta.ge:.12g}" if meta.ge is not None else ""
    high = "" if meta.le is None else f"{meta.le:.12g}"
    return f"{low} to {high}" if low and high else low or high or allowed(parts[0])


def own_default(section: str, key: str) -> Any:
    """The default of a key of ``run``, ``pretrain`` or the own sections; None: it depends."""
    if section in OWN or section == "run":
        kind = OWN.get(section, RunSection)
        return getattr(kind(), key)
    return getattr(Choices(), key) if section == "pretrain" else None


def changes(section: str, key: str) -> str:
    """How a key is changed once the run is made."""
    if section in OWN:
        return "at the next start"
    name = key if section == "run" else f"{section}.{key}"
    return "`run amend`" if name in AMENDABLE else "never"


def write_run_file(file: RunFile, settings: Settings | RunSpec) -> str:
    """A run file with every key and what it means; keys that say nothing new are commented out.

    ``settings``: what the run is made with, or of the chosen preset; the rest is as ``file`` says.
    """
    run, pretrain = file.run, file.signed.get("pretrain", {})
    document = tomlkit.document()
    document.add(
        tomlkit.comment("A Barnraise run. Every key: docs/run-file.md. Check it: barnraise run check")
    )
    document.add(tomlkit.comment("Keys after '# ' have the value that holds without them."))
    tables: dict[str, Table] = {}
    for section, key, hint in keys():
        if section == "pretrain" and run.phase != "pretrain":
            continue
        if section not in tables:
            tables[section] = tomlkit.table()
            tables[section].add(tomlkit.comment(SECTIONS[section]))
            document.add(tomlkit.nl())
            document.add(section, tables[section])
        default = own_default(section, key)
        if section == "run":
            value = getattr(run, key)
        elif section == "pretrain":
            value = pretrain.get(key, default)
        elif section in OWN:
            value = getattr(getattr(file, section), key)
        elif section == "held_out":
            value = getattr(settings.evaluation.environment, key, None)
        else:
            value = getattr(getattr(settings, section), key)
        name = f"{section}.{key}"
        _add(tables[section], key, f"{TEXTS[name]} ({allowed(hint, name)})", value, default)
    return tomlkit.dumps(document)


def _add(table: Table, key: str, text: str, value: Any, default: Any) -> None:
    table.add(tomlkit.nl())
    table.add(tomlkit.comment(text))
    if value is None:
        table.add(tomlkit.comment(f"{key} ="))
        return
    plain = list(value) if isinstance(value, tuple) else value
    if value == default:
        table.add(tomlkit.comment(f"{key} = {tomlkit.item(plain).as_string()}"))
    else:
        table.add(key, plain)


def reference() -> str:
    """The page ``docs/run-file.md``, in Markdown."""
    lines = [
        "# The run file",
        "",
        "`barnraise run init DIR` writes `DIR/run.toml`; with `--file run.toml` it makes a run from one;",
        "`barnraise run template` prints one; `barnraise run check` says what is wrong with one, and",
        "what the run will need. An unknown key is refused. A default of *preset* depends on the model.",
        "",
        "This page is made by `python -m barnraise.coordinator.run_keys`.",
    ]
    before = ""
    for section, key, hint in keys():
        if section != before:
            lines += ["", f"## [{section}]", "", SECTIONS[section], ""]
            lines += ["| key | meaning | values | default | changes |", "| --- | --- | --- | --- | --- |"]
            before = section
        default = own_default(section, key)
        shown = "*preset*" if default is None else f"`{_shown(default)}`"
        name = f"{section}.{key}"
        lines.append(
            f"| `{key}` | {TEXTS[name]} | {allowed(hint, name)} | {shown} | {changes(section, key)} |"
        )
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return str(tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string())


if __name__ == "__main__":
    print(reference(), end="")

"""A pretraining run of a tiny model, and units of it: honest ones, and every lie that has a name."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import torch
from block_support import CONFIG, make_corpus
from coordinator_support import VERIFY, settings
from spec_support import JOINT, pretrain_spec

from barnraise.coordinator.block_judge import recipe_of
from barnraise.coordinator.block_reading import BlockReader
from barnraise.coordinator.corpus_files import open_corpus
from barnraise.coordinator.folder import create_pretrain_run, read_spec
from barnraise.coordinator.workers import WorkerSetup
from barnraise.kernels.block_training import BlockState, BlockTrainer, start_state, state_bytes
from barnraise.kernels.deltas import difference, encode_delta
from barnraise.kernels.models import build_model
from barnraise.kernels.token_shards import batches
from barnraise.protocol.corpus import corpus_digest, sequences
from barnraise.protocol.identity import Identity
from barnraise.protocol.manifest import cut
from barnraise.protocol.messages import MAX_SHARD, FileEntry
from barnraise.protocol.pretrain import (
    BlockLease,
    BlockSubmission,
    PretrainSpec,
    segments,
    stream,
    unit_start,
)
from barnraise.protocol.spec import EnvironmentSpec

NODE = Identity.from_private_bytes(b"n" * 32)


@cache
def shared_corpus() -> Path:
    """One corpus for all tests of a process; a few seconds of tokeniser training."""
    return make_corpus(Path(mkdtemp()) / "corpus")


@cache
def config_json() -> str:
    """Once a process: building a model writes into its config, and another text is another run's id."""
    config = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"], "eos_token_id": 0}
    return msgspec.json.encode(config).decode()


def make_pretrain_run(
    tmp_path: Path, versions: int | None = None, name: str = "run", **pretrain: Any
) -> Path:
    """A run folder as ``run init`` makes it; learning rates high enough for steps to be seen."""
    corpus = shared_corpus()
    model = tmp_path / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(config_json())
    shutil.copy(corpus / "tokenizer.json", model / "tokenizer.json")
    spec = pretrain_spec(
        corpus=corpus_digest(open_corpus(corpus)), scaffold_recipe=JOINT, **({"adapt": JOINT} | pretrain)
    )
    last = spec.rounds + 1
    run = settings(versions=last if versions is None else versions)
    environment = EnvironmentSpec(
        name="reverse",
        settings="{}",
        prompt_format="plain",
        system_prompt="",
    )
    create_pretrain_run(
        tmp_path / "run",
        model,
        sum(p.numel() for p in build_model(CONFIG, torch.float32).parameters()),
        corpus,
        spec,
        dataclasses.replace(run, environment=environment, weights_dtype="float32"),
        VERIFY,
        name="test run",
        description="",
        model_name="tiny",
        seed=1,
        now_ms=1_000,
        identity=Identity.from_private_bytes(b"o" * 32),
    )
    return tmp_path / "run"


def setup_of(folder: Path) -> WorkerSetup:
    spec, _, identifier = read_spec(folder)
    return WorkerSetup(spec=spec, run_id=identifier, folder=str(folder), threads=1)


def lease_for(setup: WorkerSetup, version: int = 0, block: int = 1, slot: int = 0) -> BlockLease:
    return BlockLease(
        run_id=setup.run_id,
        lease_id=bytes([block, slot]) * 8,
        unit_id=0,
        node=NODE.public_key,
        policy_version=version,
        block=block,
        slot=slot,
        issued_at=0,
        timeout_at=1,
        deadline_at=2,
    )


@dataclasses.dataclass
class Unit:
    """What a node made of a lease: states, start first, and the difference as sent."""

    states: list[BlockState]
    delta: bytes
    losses: list[float]

    def files(self, folder: Path) -> dict[str, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        found = {}
        for number, state in enumerate(self.states[1:]):
            found[f"state-{number:04d}.safetensors"] = folder / f"state-{number:04d}.safetensors"
            found[f"state-{number:04d}.safetensors"].write_bytes(state_bytes(state))
        found["delta.safetensors"] = folder / "delta.safetensors"
        found["delta.safetensors"].write_bytes(self.delta)
        return found

    def submission(self, lease: BlockLease, folder: Path, **changes: Any) -> BlockSubmission:
        entries = {name: entry_of(path) for name, path in self.files(folder).items()}
        work = BlockSubmission(
            run_id=lease.run_id,
            lease_id=lease.lease_id,
            policy_version=lease.policy_version,
            engine="test",
            train_ms=5,
            losses=tuple(self.losses),
            states=tuple(entries[name] for name in sorted(entries) if name.startswith("state")),
            delta=entries["delta.safetensors"],
        )
        return msgspec.structs.replace(work, **changes)


def entry_of(path: Path) -> FileEntry:
    from hashlib import sha256

    data = path.read_bytes()
    shards = tuple(sha256(piece).digest() for piece in cut(path, MAX_SHARD))
    return FileEntry(path=path.name, size=len(data), sha256=sha256(data).digest(), shards=shards)


def text_of(reader: BlockReader, run_id: bytes, lease: BlockLease, slot: int | None = None) -> list[Any]:
    """All batches of a unit."""
    spec = reader.spec
    start = unit_start(spec, lease.policy_version, lease.slot if slot is None else slot)
    count = spec.steps * spec.recipe.batch
    places = sequences(reader.corpus, spec.sequence, run_id, *stream(spec, lease.block), start, count)
    return list(batches(reader.corpus, spec.sequence, places, spec.recipe.batch, reader.shard))


def train_unit(
    setup: WorkerSetup,
    lease: BlockLease,
    text: Callable[[list[Any]], list[Any]] = lambda text: text,
    trained: int | None = None,
    **recipe: Any,
) -> Unit:
    """Really train; ``text`` may change the batches, ``trained``: segments really done."""
    reader = BlockReader(setup)
    spec: PretrainSpec = reader.spec
    weights = reader.block(lease.policy_version, lease.block)
    rule = dataclasses.replace(recipe_of(spec), **recipe)
    worker = BlockTrainer(
        reader.config,
        reader.cut,
        reader.scaffold(0),
        lease.block,
        rule,
        start_state(weights),
        lease.policy_version * spec.steps,
    )
    data = text(text_of(reader, setup.run_id, lease))
    states, losses, at = [start_state(weights)], [], 0
    for number, length in enumerate(segments(spec)):
        if trained is None or number < trained:
            found = worker.train(data[at : at + length])
            losses.append(sum(found) / len(found))
        else:
            losses.append(losses[-1] if losses else 5.0)
        at += length
        states.append(dataclasses.replace(worker.state(), step=at))
    return Unit(states, encoded(states, spec), losses)


def encoded(states: list[BlockState], spec: PretrainSpec, change: Any = lambda delta: delta) -> bytes:
    return encode_delta(change(difference(states[-1].weights, states[0].weights)), spec.delta)[0]


def with_weights(state: BlockState, change: Callable[[str, Any], Any]) -> BlockState:
    return dataclasses.replace(
        state, weights={name: change(name, value) for name, value in state.weights.items()}
    )


WIDE = "0.mlp.up_proj.weight"


def _planted(name: str, value: Any, by: float) -> Any:
    return value + by if name == WIDE else value


def lies() -> Iterator[str]:
    yield from LIES


def lie_unit(setup: WorkerSetup, lease: BlockLease, lie: str) -> Unit:
    """A unit with a lie in it."""
    return LIES[lie](setup, lease)


def _states_changed(setup: WorkerSetup, lease: BlockLease, change: Any) -> Unit:
    good = train_unit(setup, lease)
    states = [good.states[0], *(change(state) for state in good.states[1:])]
    spec = setup.spec.pretrain
    assert spec is not None
    return Unit(states, encoded(states, spec), good.losses)


def _delta_changed(setup: WorkerSetup, lease: BlockLease, change: Any) -> Unit:
    good = train_unit(setup, lease)
    spec = setup.spec.pretrain
    assert spec is not None
    return Unit(good.states, encoded(good.states, spec, change), good.losses)


def _noisy(text: list[Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 300, batch.shape, generator=generator) for batch in text]


def _neighbour(setup: WorkerSetup, lease: BlockLease) -> Unit:
    """The neighbour's states under this block's name: its own start, another block's ends."""
    other = train_unit(setup, msgspec.structs.replace(lease, block=1 - lease.block))
    reader = BlockReader(setup)
    start = start_state(reader.block(lease.policy_version, lease.block))
    states = [start, *other.states[1:]]
    return Unit(states, encoded(states, reader.spec), other.losses)


def _not_a_number(setup: WorkerSetup, lease: BlockLease) -> Unit:
    good = train_unit(setup, lease)
    states = [good.states[0]]
    states += [with_weights(state, lambda name, value: value * float("nan")) for state in good.states[1:]]
    return Unit(states, good.delta, good.losses)


def _random_weights(state: BlockState) -> BlockState:
    generator = torch.Generator().manual_seed(3)
    return with_weights(state, lambda name, value: 0.02 * torch.randn(value.shape, generator=generator))


LIES: dict[str, Callable[[WorkerSetup, BlockLease], Unit]] = {
    "nothing done": lambda s, t: train_unit(s, t, trained=0),
    "fewer steps": lambda s, t: train_unit(s, t, trained=1),
    "random weights": lambda s, t: _states_changed(s, t, _random_weights),
    "other data": lambda s, t: train_unit(s, t, lambda text: text[::-1]),
    "half the rate": lambda s, t: train_unit(s, t, learning_rate=5e-4),
    "twice the rate": lambda s, t: train_unit(s, t, learning_rate=2e-3),
    "neighbour's block": _neighbour,
    "label noise": lambda s, t: train_unit(s, t, _noisy),
    "scaled difference": lambda s, t: _delta_changed(s, t, lambda d: {k: 3 * v for k, v in d.items()}),
    "backdoor on the difference": lambda s, t: _delta_changed(
        s, t, lambda d: {k: _planted(k, v, 1e-4) for k, v in d.items()}
    ),
    "backdoor in the states": lambda s, t: _states_changed(
        s, t, lambda state: with_weights(state, lambda k, v: _planted(k, v, 0.5))
    ),
    "forged moments": lambda s, t: _states_changed(
        s,
        t,
        lambda state: dataclasses.replace(
            state, second={k: torch.full_like(v, 1e-12) for k, v in state.second.items()}
        ),
    ),
    "not a number": _not_a_number,
}

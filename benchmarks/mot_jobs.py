"""The training jobs behind ``benchmarks.mot``: each runs in a process of its own with one thread.

A job takes plain values and paths and leaves a file of tensors, so that jobs can be dealt out
to processes; what it reports is measured in that process.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from barnraise.kernels.block_training import BlockTrainer, start_state
from barnraise.kernels.deltas import DeltaFormat, decode_delta, difference, encode_delta
from barnraise.kernels.joint_training import JointTrainer, evaluate
from barnraise.kernels.models import build_model
from barnraise.kernels.mot import (
    Cut,
    Init,
    Scaffold,
    Tensors,
    first_block,
    join_model,
    layer_count,
    make_cut,
    recombine,
    scaffold_config,
)
from barnraise.kernels.mot_diagnostics import seams
from barnraise.kernels.outer import outer_step, trimmed_mean
from benchmarks.mot_world import (
    Done,
    World,
    batches,
    corpus_of,
    held_out,
    joint_schedule,
    model_tensors,
    recipe,
    save,
    scaffold_config_of,
    scaffold_of,
    step_flops,
)


def kept(job: Callable[..., Done], world: World, name: str, seed: int, **arguments: Any) -> Done:
    """``job``, or what it reported when it was done before: a benchmark that was ended goes on."""
    note = world.folder / f"{name}.json"
    with suppress(FileNotFoundError):
        fields = json.loads(note.read_text())
        return Done(path=Path(fields.pop("path")), **fields)
    done = job(world, name, seed, **arguments)
    part = note.with_suffix(".part")
    part.write_text(json.dumps({**vars(done), "path": str(done.path)}))
    part.replace(note)
    return done


def monolithic(
    world: World, name: str, seed: int, layers: int, steps: int, grown_from: Path | None = None, skip: int = 0
) -> Done:
    """Train a model of ``layers`` layers end to end, from nothing or grown from a scaffold."""
    torch.set_num_threads(1)
    config = world.config()
    cut = make_cut(world.layers, 1, layers)
    if grown_from is not None:
        depth = layer_count(scaffold_config_of(world, grown_from))
        grow = make_cut(world.layers, 1, depth)
        source = scaffold_of(world, grow, grown_from)
        blocks = [first_block(config, grow, source, 0, "grown", seed)]
        model = recombine(config, grow, source.shared, list(blocks))
    else:
        model = build_model(scaffold_config(config, cut), torch.float32, seed=seed + 1000)
    started = time.process_time()
    trainer = JointTrainer(model, joint_schedule(world, steps, world.rate))
    losses = trainer.train(batches(world, seed, (0, 1), skip, steps))
    seconds = time.process_time() - started
    return Done(
        path=save(world, name, model_tensors(model)),
        loss=evaluate(model, held_out(world)),
        seconds=seconds,
        train_flops=steps * step_flops(world, trained=layers),
        tokens=steps * world.step_tokens,
        extra={"curve": losses[:: max(1, steps // 64)]},
    )


def block(
    world: World,
    name: str,
    seed: int,
    cut: Cut,
    scaffold: Path,
    number: int,
    init: Init,
    data: str,
    steps: int,
    peers: Sequence[Path | None] = (),
    start: Path | None = None,
    done: int = 0,
) -> Done:
    """Train one block in its scaffold, or among its trained ``peers`` (an exchange round).

    ``start``: weights to go on from; ``done``: steps that the block had before.
    """
    torch.set_num_threads(1)
    frame = scaffold_of(world, cut, scaffold)
    state = (
        load_file(start) if start else first_block(world.config(), cut, frame, number, init, seed + number)
    )
    around = frame
    inner = cut
    if peers:
        around = Scaffold(frame.shared, tuple(load_file(p) if p else {} for p in peers))
        inner = Cut(cut.block_layers, cut.block_layers)
    trainer = BlockTrainer(
        world.config(),
        inner,
        around,
        number,
        recipe(world, steps if not done else 0),
        start_state(state),
        done,
    )
    stream = (number, cut.blocks) if data == "disjoint" else (0, 1)
    work = batches(world, seed, stream, done, steps)
    started = time.process_time()
    losses = trainer.train(work)
    seconds = time.process_time() - started
    above = sum(inner.slice_layers[number + 1 :])
    below = sum(inner.slice_layers[:number])
    return Done(
        path=save(world, name, trainer.state().weights),
        loss=trainer.evaluate(held_out(world)),
        seconds=seconds,
        train_flops=steps
        * step_flops(world, trained=cut.block_layers[number], above=above, below=below, head_trained=False),
        tokens=steps * world.step_tokens,
        extra={"curve": losses[:: max(1, steps // 64)]},
    )


def volunteers(
    world: World,
    name: str,
    seed: int,
    cut: Cut,
    scaffold: Path,
    number: int,
    rounds: int,
    contributors: int,
    local_steps: int,
    leaving: float,
    kind: DeltaFormat = "float32",
    outer: tuple[float, float] = (0.7, 0.9),
    trim: float = 0.0,
    spares: int = 0,
) -> Done:
    """One block by several volunteers: local steps, encoded differences, outer Nesterov; some vanish.

    ``leaving``: chance that a contributor leaves before its difference arrives, at any moment of
    its unit with the same chance; ``spares``: how often a round lends such a place anew, with other
    text. What was trained in vain counts as tokens. ``seconds`` is the sum over rounds of the
    place that took longest: the critical path.
    """
    torch.set_num_threads(1)
    frame = scaffold_of(world, cut, scaffold)
    weights = first_block(world.config(), cut, frame, number, "grown", seed + number)
    momentum: Tensors | None = None
    residuals: list[Tensors | None] = [None] * contributors
    chance = random.Random(seed * 1009 + number)
    path, arrived, wasted, took = 0.0, 0, 0.0, 0.0
    fresh = rounds * contributors  # units of text from here on are for places lent anew
    rule = recipe(world, rounds * local_steps)
    for turn in range(rounds):
        received = []
        longest = 0.0  # units of work, one after the other, that a place needed
        for slot in range(contributors):
            unit, spent, arrives = turn * contributors + slot, 0.0, False
            for _ in range(1 + spares):
                arrives = chance.random() >= leaving
                if arrives:
                    break
                spent += chance.random() if spares else 1.0
                unit, fresh = fresh, fresh + 1
            longest = max(longest, spent + arrives)
            wasted += spent
            if not arrives:
                continue
            trainer = BlockTrainer(
                world.config(), cut, frame, number, rule, start_state(weights), turn * local_steps
            )
            work = batches(world, seed, (number, cut.blocks), unit * local_steps, local_steps)
            started = time.process_time()
            trainer.train(work)
            took = max(took, time.process_time() - started)
            data, residual = encode_delta(difference(trainer.state().weights, weights), kind, residuals[slot])
            residuals[slot] = residual
            received.append(decode_delta(data, kind, weights))
        path += longest * took
        if received:
            arrived += len(received)
            weights, momentum = outer_step(weights, trimmed_mean(received, trim), momentum, *outer)
    done = BlockTrainer(world.config(), cut, frame, number, rule, start_state(weights), 0)
    steps = round((arrived + wasted) * local_steps)
    above, below = sum(cut.slice_layers[number + 1 :]), sum(cut.slice_layers[:number])
    return Done(
        path=save(world, name, dict(weights)),
        loss=done.evaluate(held_out(world)),
        seconds=path,
        train_flops=steps
        * step_flops(world, trained=cut.block_layers[number], above=above, below=below, head_trained=False),
        tokens=steps * world.step_tokens,
        extra={"arrived": arrived, "places": rounds * contributors, "wasted": wasted},
    )


def adapt(
    world: World,
    name: str,
    seed: int,
    cut: Cut,
    scaffold: Path,
    blocks: Sequence[Path],
    steps: int,
    rate: float,
    diagnose: bool = False,
) -> Done:
    """Stack the blocks, measure cold, train end to end for ``steps`` steps, measure again."""
    torch.set_num_threads(1)
    config = world.config()
    frame = scaffold_of(world, cut, scaffold)
    model = recombine(config, cut, frame.shared, [load_file(path) for path in blocks])
    data = held_out(world)
    extra: dict[str, Any] = {"cold": evaluate(model, data)}
    reference = None
    if diagnose:
        reference = join_model(scaffold_config(config, cut), frame.shared, list(frame.slices))
        extra["seams_cold"] = [vars(seam) for seam in seams(model, reference, cut, data[:2])]
    # no text that a block has seen yet: the stream's end
    ahead = len(corpus_of(world.corpus).train) * (corpus_of(world.corpus).shard_tokens // world.sequence)
    work = batches(world, seed + 500, (0, 1), ahead // world.batch // 2, steps)
    started = time.process_time()
    trainer = JointTrainer(model, joint_schedule(world, steps, rate))
    losses = trainer.train(work)
    seconds = time.process_time() - started
    if reference is not None:
        extra["seams_adapted"] = [vars(seam) for seam in seams(model, reference, cut, data[:2])]
    extra["curve"] = losses[:: max(1, steps // 64)]
    return Done(
        path=save(world, name, model_tensors(model)),
        loss=evaluate(model, data),
        seconds=seconds,
        train_flops=steps * step_flops(world, trained=world.layers),
        tokens=steps * world.step_tokens,
        extra=extra,
    )


def untrained_scaffold(world: World, name: str, seed: int, layers: int) -> Done:
    """A scaffold as it is drawn: what all blocks share where nobody has trained one."""
    model = build_model(
        scaffold_config(world.config(), make_cut(world.layers, 1, layers)), torch.float32, seed
    )
    loss = evaluate(model, held_out(world))
    return Done(save(world, name, model_tensors(model)), loss, seconds=0.0, train_flops=0.0, tokens=0)


def no_scaffold(
    world: World, name: str, seed: int, cut: Cut, scaffold: Path, number: int, steps: int
) -> Done:
    """A block trained between the scaffold's embedding and head alone: what frozen slices are good for."""
    torch.set_num_threads(1)
    frame = scaffold_of(world, cut, scaffold)
    state = first_block(world.config(), cut, frame, number, "random", seed + number)
    inner = Cut((cut.block_layers[number],), (cut.block_layers[number],))
    config = scaffold_config(world.config(), Cut((world.layers,), (cut.block_layers[number],)))
    trainer = BlockTrainer(
        config, inner, Scaffold(frame.shared, ({},)), 0, recipe(world, steps), start_state(state), 0
    )
    work = batches(world, seed, (number, cut.blocks), 0, steps)
    started = time.process_time()
    trainer.train(work)
    seconds = time.process_time() - started
    return Done(
        path=save(world, name, trainer.state().weights),
        loss=trainer.evaluate(held_out(world)),
        seconds=seconds,
        train_flops=steps * step_flops(world, trained=cut.block_layers[number], head_trained=False),
        tokens=steps * world.step_tokens,
    )

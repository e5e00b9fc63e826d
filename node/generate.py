"""Carries out the core's ``Generate``: rollouts from the engine, and a signed submission of them."""

from __future__ import annotations

import logging

import trio

from barnraise.node.actions import PROGRESS_LINE_S, engine_failed
from barnraise.node.context import Context
from barnraise.node.decisions import Generate
from barnraise.node.engine import Generated, Progress, Work
from barnraise.node.events import EngineStopped, UnitDone, UnitUnusable
from barnraise.node.state import UnitProgress
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import BarnraiseError, MalformedError
from barnraise.protocol.messages import MAX_SUBMISSION, RolloutLease, RolloutSubmission


async def generate(ctx: Context, action: Generate, scope: trio.CancelScope) -> None:
    """Have the unit's rollouts drawn, sign them, and keep them on disk."""
    lease, unit = ctx.lease, action.unit
    assert isinstance(lease, RolloutLease)
    assert lease.lease_id == unit.lease_id
    assert ctx.versions is not None
    work = Work(
        run_id=lease.run_id,
        lease_id=lease.lease_id,
        node=lease.node,
        policy_version=lease.policy_version,
        prompts=lease.prompts,
        group_size=lease.group_size,
        shrink=action.shrink,
    )
    rows = unit.prompts * unit.group_size
    shown = ctx.facts.unit = UnitProgress(lease.unit_id, unit.version, rows, trio.current_time())
    spoken = trio.current_time()
    ctx.say(f"unit {lease.unit_id}: generating {rows} completions at version {unit.version}")

    def progress(made: Progress) -> None:
        nonlocal spoken
        shown.completions, shown.tokens = made.completions, made.tokens
        if made.sized is not None:
            ctx.facts.sized = made.sized
        ctx.changed.set()
        if trio.current_time() - spoken >= 2 * PROGRESS_LINE_S:
            spoken = trio.current_time()
            ctx.say(f"unit {lease.unit_id}: {made.completions} of {rows} completions, {made.tokens:,} tokens")

    generated: Generated | None = None
    with scope:
        try:
            with ctx.versions.hold(unit.version):
                generated = await ctx.engine.generate(work, progress)
        except Exception as error:
            engine_failed(ctx, error, f"generating unit {lease.unit_id}")
            return
        finally:
            ctx.engine_scope = ctx.facts.unit = None
    if generated is None or ctx.state.engine == "stopping":
        ctx.feed(EngineStopped(alive=True))
        return
    _finish(ctx, action, generated)


def _finish(ctx: Context, action: Generate, generated: Generated) -> None:
    lease, unit = ctx.lease, action.unit
    assert isinstance(lease, RolloutLease)
    assert ctx.pending is not None
    rows = unit.prompts * unit.group_size
    if len(generated.rollouts) != rows:
        text = f"the engine returned {len(generated.rollouts)} rollouts instead of {rows}"
        ctx.feed(UnitUnusable(text, ctx.jitter()))
        return
    submission = sign(
        RolloutSubmission(
            run_id=lease.run_id,
            lease_id=lease.lease_id,
            policy_version=lease.policy_version,
            engine=ctx.facts.engine or "engine",
            generate_ms=min(2**31, max(0, round(generated.seconds * 1000))),
            rollouts=generated.rollouts,
        ),
        ctx.identity,
    )
    try:
        if len(submission.payload) > MAX_SUBMISSION:
            raise MalformedError(
                f"the unit's submission has {len(submission.payload)} bytes, {MAX_SUBMISSION} are allowed: "
                "the operator has to cut smaller units"
            )
        submission_id = ctx.pending.add(submission, lease.lease_id)
        ctx.answered.append(lease.lease_id)
    except BarnraiseError as error:
        ctx.say(f"unit {lease.unit_id} cannot be submitted: {error}", logging.ERROR)
        ctx.feed(UnitUnusable(str(error), ctx.jitter()))
        return
    ctx.facts.units_done += 1
    if generated.seconds > 0:
        ctx.facts.tokens_per_s = generated.tokens / generated.seconds
    ctx.say(
        f"unit {lease.unit_id}: {rows} completions, {generated.tokens:,} tokens in {generated.seconds:.1f} s "
        f"({len(submission.payload) / 1e3:.0f} kB to send)"
    )
    ctx.feed(UnitDone(submission_id))

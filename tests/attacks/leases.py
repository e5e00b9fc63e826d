"""Work for something else than the lease: other prompts, other people's work, the same work twice."""

from __future__ import annotations

from random import Random

import msgspec
from msgspec import structs

from attacks.registry import attack
from attacks.stage import MINUTE, Outcome, Stage
from barnraise.protocol.envelope import domain, sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import Rollout, RolloutLease, RolloutSubmission, Signed
from barnraise.protocol.wire import decode

# --- prompts


@attack("draws from the prompts of another lease, proven as such", "toploc-", "sampling-")
def wrong_prompt(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease, other = stage.lend(me), stage.lend(me)
    return stage.submit(
        me, stage.sign(me, lease, stage.pack(lease, stage.draw(lease, prompts=stage.prompts(other))))
    )


@attack("the same, with proofs made for its own prompts", "sampling-")
def wrong_prompt_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease, other = stage.lend(me), stage.lend(me)
    drawn = stage.draw(lease, prompts=stage.prompts(other))
    rollouts = stage.forge(lease, [completion.tokens for completion in drawn])
    return stage.submit(me, stage.sign(me, lease, rollouts))


@attack("the shortest of the lease's prompts for all of them", "toploc-", "sampling-", "logprob-")
def easier_prompt(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    easiest = min(stage.prompts(lease), key=len)
    prompts = [easiest] * (lease.prompts * lease.group_size)
    return stage.submit(me, stage.sign(me, lease, stage.pack(lease, stage.draw(lease, prompts=prompts))))


@attack("a prompt that gives the answer away, proven for its own", "sampling-")
def leading_prompt(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    hints = [
        stage.codec.encode_prompt(task.key[::-1]) + prompt
        for task, prompt in zip(
            [task for task in stage.tasks(lease) for _ in range(lease.group_size)],
            stage.prompts(lease),
            strict=True,
        )
    ]
    drawn = stage.draw(lease, prompts=hints)
    rollouts = stage.forge(lease, [completion.tokens for completion in drawn])
    return stage.submit(me, stage.sign(me, lease, rollouts))


@attack("the prompts of the lease in another order", "toploc-", "sampling-", "proof-length")
def prompts_permuted(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    rollouts = stage.pack(lease, stage.draw(lease))
    shifted = [*rollouts[lease.group_size :], *rollouts[: lease.group_size]]
    return stage.submit(me, stage.sign(me, lease, _renumbered(lease, shifted)))


@attack("the samples of each prompt in another order", "sampling-")
def samples_permuted(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    rollouts = stage.pack(lease, stage.draw(lease))
    size = lease.group_size
    turned = [
        r for at in range(0, len(rollouts), size) for r in (*rollouts[at + 1 : at + size], rollouts[at])
    ]
    return stage.submit(me, stage.sign(me, lease, _renumbered(lease, turned)))


@attack("one rollout for a whole group", "sampling-")
def rollout_repeated(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    rollouts = stage.pack(lease, stage.draw(lease))
    size = lease.group_size
    return stage.submit(
        me,
        stage.sign(me, lease, _renumbered(lease, [rollouts[n // size * size] for n in range(len(rollouts))])),
    )


@attack("the same rollout in two places, the second left out", "rollout-order")
def rollout_named_twice(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    rollouts = stage.pack(lease, stage.draw(lease))
    return stage.submit(me, stage.sign(me, lease, [*rollouts[:-1], rollouts[0]]))


@attack("half of the rollouts", "rollout-count")
def half_a_unit(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    rollouts = stage.pack(lease, stage.draw(lease))
    return stage.submit(me, stage.sign(me, lease, rollouts[: len(rollouts) // 2]))


def _renumbered(lease: RolloutLease, rollouts: list[Rollout]) -> list[Rollout]:
    return [
        structs.replace(rollout, prompt=row // lease.group_size, sample=row % lease.group_size)
        for row, rollout in enumerate(rollouts)
    ]


# --- other people's work


def _victim(stage: Stage) -> tuple[RolloutLease, Signed, list[Rollout]]:
    victim = stage.join("victim")
    lease, signed = stage.honest(victim)
    return lease, signed, list(decode(signed.payload, RolloutSubmission).rollouts)


@attack("another node's signed submission, over the thief's own session", "wrong-signer")
def submission_stolen(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return stage.submit(me, _victim(stage)[1])


@attack("another node's submission, signed anew", "not-your-lease")
def submission_signed_anew(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _, signed, _ = _victim(stage)
    return stage.submit(me, sign(decode(signed.payload, RolloutSubmission), me))


@attack("another node's signature under one's own payload", "bad-signature")
def signature_borrowed(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _, signed, _ = _victim(stage)
    lease = stage.lend(me)
    own = stage.sign(me, lease, stage.pack(lease, stage.draw(lease)))
    return stage.submit(me, structs.replace(own, signature=signed.signature))


@attack("another node's rollouts under one's own lease", "toploc-", "sampling-", "proof-length")
def rollouts_copied(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _, _, rollouts = _victim(stage)
    return stage.submit(me, stage.sign(me, stage.lend(me), rollouts))


@attack("another node's tokens under one's own lease, proven for one's own prompts", "sampling-")
def tokens_copied_and_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    theirs, signed, rollouts = _victim(stage)
    lease = stage.lend(me)
    del theirs, signed
    chosen = [list(memoryview(rollout.tokens).cast("I")) for rollout in rollouts]
    return stage.submit(me, stage.sign(me, lease, stage.forge(lease, chosen)))


@attack("honest tokens with another node's proofs", "toploc-", "proof-length")
def proofs_of_another_node(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _, _, theirs = _victim(stage)
    lease = stage.lend(me)
    own = stage.pack(lease, stage.draw(lease))
    mixed = [structs.replace(a, proofs=b.proofs) for a, b in zip(own, theirs, strict=True)]
    return stage.submit(me, stage.sign(me, lease, mixed))


# --- the same work twice, or for no lease


@attack("the same submission again", "duplicate")
def replayed(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _, signed = stage.honest(me)
    assert stage.submit(me, signed).accepted
    return stage.submit(me, signed)


@attack("the same rollouts again, in other bytes, for the lease that was answered", "used-lease")
def replayed_in_other_bytes(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _, signed = stage.honest(me)
    assert stage.submit(me, signed).accepted
    again = structs.replace(decode(signed.payload, RolloutSubmission), generate_ms=7)
    return stage.submit(me, sign(again, me))


@attack("old rollouts under a new lease", "toploc-", "sampling-", "proof-length")
def replayed_under_a_new_lease(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _, signed = stage.honest(me)
    assert stage.submit(me, signed).accepted
    rollouts = decode(signed.payload, RolloutSubmission).rollouts
    return stage.submit(me, stage.sign(me, stage.lend(me), rollouts))


@attack("a lease that nobody issued, chosen for easy prompts", "unknown-lease")
def lease_invented(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = structs.replace(stage.lend(me), lease_id=rng.randbytes(16))
    return stage.submit(me, stage.sign(me, lease, stage.pack(lease, stage.draw(lease))))


@attack("an answer after the deadline", "expired-lease")
def too_late(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _, signed = stage.honest(me)
    stage.now += 3 * MINUTE
    return stage.submit(me, signed)


@attack("an old version's work, and the lease's version beside it changed to match", "wrong-version")
def version_rewritten(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    old = stage.policy(stage.head - 1)
    rollouts = stage.pack(lease, stage.draw(lease, old))
    return stage.submit(me, stage.sign(me, lease, rollouts, policy_version=stage.head - 1))


@attack("another run's work", "wrong-run")
def other_run(stage: Stage, me: Identity, rng: Random) -> Outcome:
    lease = stage.lend(me)
    rollouts = stage.pack(lease, stage.draw(lease))
    return stage.submit(me, stage.sign(me, lease, rollouts, run_id=bytes(32)))


# --- the message


def _rewritten(stage: Stage, me: Identity, rewrite: object) -> Outcome:
    """Sign bytes that no encoder of ours makes: ``rewrite`` turns the unpacked message into others."""
    _, signed = stage.honest(me)
    assert callable(rewrite)
    payload: bytes = rewrite(msgspec.msgpack.decode(signed.payload))
    return stage.submit(me, _sign_bytes(me, payload))


def _sign_bytes(me: Identity, payload: bytes) -> Signed:
    signature = me.sign(domain(RolloutSubmission) + payload)
    return Signed(payload=payload, signer=me.public_key, signature=signature)


@attack("a field of its own: the reward that it would like", "malformed")
def reward_claimed(stage: Stage, me: Identity, rng: Random) -> Outcome:
    def rewrite(fields: dict[str, object]) -> bytes:
        rollouts = fields["rollouts"]
        assert isinstance(rollouts, list)
        packed: bytes = msgspec.msgpack.encode(
            {**fields, "rollouts": [{**r, "reward": 1.0} for r in rollouts]}
        )
        return packed

    return _rewritten(stage, me, rewrite)


@attack("a coerced type: version 1.0 for 1", "malformed")
def version_as_a_float(stage: Stage, me: Identity, rng: Random) -> Outcome:
    def rewrite(fields: dict[str, object]) -> bytes:
        version = fields["policy_version"]
        assert isinstance(version, int)
        packed: bytes = msgspec.msgpack.encode({**fields, "policy_version": float(version)})
        return packed

    return _rewritten(stage, me, rewrite)


@attack("the same message in another encoding, to be paid twice", "malformed", "used-lease")
def other_encoding(stage: Stage, me: Identity, rng: Random) -> Outcome:
    _, signed = stage.honest(me)
    assert stage.submit(me, signed).accepted
    fields = msgspec.msgpack.decode(signed.payload)
    turned: bytes = msgspec.msgpack.encode(dict(reversed(fields.items())))
    return stage.submit(me, _sign_bytes(me, turned))

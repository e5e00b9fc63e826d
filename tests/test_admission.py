"""Who may join, and settings that change under way: over the wire, coordinator and node, in virtual time."""

from contextlib import asynccontextmanager

import daemon_support
import pytest
import trio
from coordinator_support import coordinating, make_run, node

from barnraise.coordinator.admission import admit_known, admitted, allow, disallow, make_invite, revoke_invite
from barnraise.coordinator.amending import amend
from barnraise.node.attend import EXIT_NOT_ADMITTED
from barnraise.protocol.amendments import Amendment
from barnraise.protocol.envelope import open_signed, sign
from barnraise.protocol.errors import MalformedError, RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.invites import PREFIX, Invite, invite_text, read_invite
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import PROTOCOL_MAJOR, Acknowledged, AmendmentsPush, Hello, InviteRequest


@asynccontextmanager
async def closed_run(tmp_path, admission="invite"):
    """A run that takes not everybody, with its core and the in-memory swarm."""
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, make_run(tmp_path)) as coordinator:
        core = coordinator.state.args[0]
        while core.state.head < 0:
            await trio.sleep(0.1)
        await amend(core, {"changes": {"admission": f'"{admission}"'}, "reason": "a closed group"})
        yield swarm, coordinator, core


async def present(scripted, text):
    signed = read_invite(text)[1]
    key = scripted.identity.public_key
    return await scripted.ask(lambda n: InviteRequest(id=n, public_key=key, invite=signed), Acknowledged)


async def test_a_stranger_is_told_how_to_get_in_and_gets_in_by_an_invite_once(tmp_path, autojump_clock):
    async with closed_run(tmp_path) as (swarm, coordinator, core):
        made = await make_invite(core, {"uses": 1, "seconds": 60, "note": "lab"})
        async with node(swarm, coordinator, b"a", join=False) as ann:
            with pytest.raises(RefusedError, match="--invite"):
                await ann.join()
            await present(ann, made["invite"])
            await ann.join()
            assert await ann.lease()
        async with node(swarm, coordinator, b"a", join=False) as again:  # needs no invite any more
            await again.join(instance=b"j" * 16)
        async with node(swarm, coordinator, b"b", join=False) as bob:
            with pytest.raises(RefusedError, match="used up"):
                await present(bob, made["invite"])


@pytest.mark.parametrize("how", ["over", "revoked", "forged", "another run's", "another key"])
async def test_an_invite_that_does_not_count_lets_nobody_in(tmp_path, autojump_clock, how):
    async with closed_run(tmp_path) as (swarm, coordinator, core):
        made = await make_invite(core, {"uses": 5, "seconds": 60})
        text = made["invite"]
        if how == "over":
            await trio.sleep(61)
        elif how == "revoked":
            assert (await revoke_invite(core, {"id": made["id"][:6]}))["revoked"] == [made["id"]]
            assert (await revoke_invite(core, {"id": made["id"][:6]}))["revoked"] == []
        elif how == "forged":
            text = invite_text(sign(read_invite(text)[0], Identity.from_private_bytes(b"f" * 32)))
        elif how == "another run's":
            other = Invite(run_id=b"x" * 32, invite=bytes.fromhex(made["id"]), uses=5, expires_at=2**50)
            text = invite_text(core.sign(other))
        async with node(swarm, coordinator, b"a", join=False) as ann:
            if how == "another key":
                signed = read_invite(text)[1]
                with pytest.raises(RefusedError, match="not the key"):
                    await ann.ask(
                        lambda n: InviteRequest(id=n, public_key=b"k" * 32, invite=signed), Acknowledged
                    )
            else:
                with pytest.raises(RefusedError):
                    await present(ann, text)
            with pytest.raises(RefusedError, match="--invite"):
                await ann.join()
        assert core.state.operations.allowed == {}


async def test_whoever_is_taken_off_the_list_comes_back_by_no_invite(tmp_path, autojump_clock):
    async with closed_run(tmp_path) as (swarm, coordinator, core):
        made, more = [await make_invite(core, {"uses": 9, "seconds": 60}) for _ in range(2)]
        async with node(swarm, coordinator, b"a", join=False) as ann:
            await present(ann, made["invite"])
            await disallow(core, {"nodes": [ann.identity.peer_id]})
            for invite in (made, more):
                with pytest.raises(RefusedError, match="took this key off"):
                    await present(ann, invite["invite"])
            await allow(core, {"nodes": [ann.identity.peer_id]})
            await ann.join()
        assert [invite["left"] for invite in (await admitted(core, {}))["invites"]] == [8, 9]


async def test_an_invite_is_taken_back_by_showing_it_and_one_that_is_over_is_called_so(
    tmp_path, autojump_clock
):
    async with closed_run(tmp_path) as (swarm, coordinator, core):
        made, over = [await make_invite(core, {"uses": 1, "seconds": seconds}) for seconds in (60, 5)]
        with pytest.raises(RefusedError, match="damaged"):
            await revoke_invite(core, {"id": made["invite"][:-1]})
        assert (await revoke_invite(core, {"id": made["invite"]}))["revoked"] == [made["id"]]
        await trio.sleep(6)
        await make_invite(core, {"uses": 1, "seconds": 60})  # forgets what is over
        async with node(swarm, coordinator, b"a", join=False) as ann:
            for invite, why in ((made, "revoked"), (over, "time is over")):
                with pytest.raises(RefusedError, match=why):
                    await present(ann, invite["invite"])


async def test_a_run_that_closes_its_doors_keeps_its_list_and_gives_others_no_work(tmp_path, autojump_clock):
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, make_run(tmp_path)) as coordinator:
        core = coordinator.state.args[0]
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            while core.state.head < 0:
                await trio.sleep(0.1)
            await ann.submit(ann.signed_work(await ann.lease()))
            lent = await bob.lease()
            while not core.state.accepted:
                await trio.sleep(0.1)
            assert (await admit_known(core, {}))["allowed"] == [ann.identity.peer_id]
            await amend(core, {"changes": {"admission": '"allow"'}, "reason": "closed"})
            assert "operator's list" in (await bob.lease_reply()).reason
            await bob.submit(bob.signed_work(lent))  # what was lent before counts
            assert await ann.lease()
            await allow(core, {"nodes": [bob.identity.peer_id], "note": "bob"})
            assert await bob.lease()
            await disallow(core, {"nodes": [bob.identity.public_key.hex()]})
            assert "operator's list" in (await bob.lease_reply()).reason
            shown = await admitted(core, {})
            assert (shown["admission"], len(shown["allowed"]), shown["not_on_the_list"]) == ("allow", 1, 1)


async def test_an_amendment_is_told_signed_to_who_is_there_and_to_who_comes_and_survives_a_restart(
    tmp_path, autojump_clock
):
    swarm, folder = MemorySwarm(latency_s=0.01), make_run(tmp_path)
    async with coordinating(swarm, folder) as coordinator:
        core = coordinator.state.args[0]
        async with node(swarm, coordinator, b"a") as ann:
            reply = await amend(core, {"changes": {"rollout.versions": "9"}, "reason": "shorter"})
            assert reply == {"number": 1, "changed": {"rollout.versions": "9"}}
            again = await amend(core, {"changes": {"rollout.versions": "9"}, "reason": "shorter"})
            assert again == {"number": 1, "changed": {}}
            await trio.sleep(1)
            told = ann.received(AmendmentsPush)[0].amendments[0]
            assert open_signed(told, Amendment, ann.operator).changes == {"rollout.versions": "9"}
    async with coordinating(swarm, folder) as coordinator:
        assert coordinator.state()["target_version"] == 9
        async with node(swarm, coordinator, b"b") as bob:
            await trio.sleep(1)
            assert bob.received(AmendmentsPush)[0].amendments == (told,)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model.name": '"x"'}, "cannot change"),
        ({"rollout.deadline_s": "30.0"}, "change both"),
        ({"rollout.timeout_s": "1e-300"}, "timeout_s is 1e-300.*1 or more"),
        ({"grpo.clip_delta": "0.5", "grpo.clip_low": "0.25"}, "clip_delta is 0.5.*1 or more"),
        ({"rollout.groups_per_version": "65536"}, "change both"),
        ({}, "needs changes"),
        ({"grpo.learning_rate": 1}, "texts"),
    ],
)
async def test_settings_that_make_no_sense_are_refused_with_the_reason(
    tmp_path, autojump_clock, changes, why
):
    async with coordinating(MemorySwarm(latency_s=0.01), make_run(tmp_path)) as coordinator:
        core = coordinator.state.args[0]
        with pytest.raises(RefusedError, match=why):
            await amend(core, {"changes": changes, "reason": "x"})
        assert core.settings == core.spec


@pytest.mark.parametrize("text", ["", "hello", PREFIX, PREFIX + "????", PREFIX + "aGVs", PREFIX + "a" * 5000])
def test_what_is_no_invite_is_named_before_anything_is_sent(text):
    with pytest.raises(MalformedError):
        read_invite(text)


async def test_a_node_without_an_invite_ends_with_the_cure(tmp_path, autojump_clock):
    swarm = MemorySwarm(latency_s=0.01)
    coordinator = daemon_support.Coordinator(tmp_path / "c")
    coordinator.join_error = RefusedError("not-admitted", "ask for an invite")
    async with coordinator.up(swarm) as address:
        async with daemon_support.node(swarm, tmp_path, address) as volunteer:
            assert await volunteer.until_ended() == EXIT_NOT_ADMITTED


async def test_a_node_shows_its_invite_and_follows_amendments(tmp_path, autojump_clock, caplog):
    caplog.set_level("INFO")
    async with closed_run(tmp_path) as (swarm, coordinator, core):
        made = await make_invite(core, {"uses": 1, "seconds": 60})
        address = coordinator.address
        async with daemon_support.node(swarm, tmp_path, address, invite=made["invite"]) as volunteer:
            with trio.fail_after(60):
                while volunteer.identity.public_key not in core.state.nodes:
                    await trio.sleep(0.1)
            await amend(core, {"changes": {"rollout.versions": "9"}, "reason": "shorter"})
            await trio.sleep(2)
            assert "rollout.versions = 9 (shorter)" in caplog.text


async def test_a_node_of_an_older_minor_works_on_and_is_told_nothing_that_it_would_choke_on(
    tmp_path, autojump_clock, caplog
):
    caplog.set_level("INFO")
    swarm = MemorySwarm(latency_s=0.01)
    older = Hello(major=PROTOCOL_MAJOR, minor=0, software="barnraise before")
    async with coordinating(swarm, make_run(tmp_path)) as coordinator:
        core, hub = coordinator.state.args[:2]
        async with (
            daemon_support.node(swarm, tmp_path / "old", coordinator.address, hello=older) as old,
            daemon_support.node(swarm, tmp_path / "new", coordinator.address) as new,
        ):
            keys = {old.identity.public_key, new.identity.public_key}
            with trio.fail_after(60):
                while hub.by_key.keys() != keys:
                    await trio.sleep(0.1)
            sessions = dict(hub.by_key)
            await amend(core, {"changes": {"rollout.versions": "9"}, "reason": "shorter"})
            await trio.sleep(5)
            assert caplog.text.count("the operator changed the run's settings") == 1  # the newer one's
            assert hub.by_key == sessions

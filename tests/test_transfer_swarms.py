"""Whole swarms in simulated time: how soon all hold everything, whatever happens on the way."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from treecast_sim import MB, SHARD, join, run_until_complete, swarm

from barnraise.protocol.bitmaps import pick

NO_SHRINK = [Phase.explicit, Phase.reuse, Phase.generate]  # a swarm takes seconds; its seed says enough


def test_a_swarm_completes_near_the_bound_and_every_shard_comes_once() -> None:
    sim = swarm(1, 12)
    sizes = [SHARD] * 64
    sim.publish("o", 1, sizes)
    took = run_until_complete(sim, 1, 60)
    assert took < 1.35 * 12 * 64 * SHARD / (100 * MB + 12 * 12 * MB)
    for name, host in sim.hosts.items():
        if name != "o":
            assert host.core.transfer.stats.received == 64
            assert not host.reports


def test_a_corrupt_sender_is_banned_by_all_it_serves_and_costs_one_shard_each() -> None:
    sim = swarm(2, 12)
    sim.intact = lambda source, target, version, index: source.name != "n3"
    sim.publish("o", 1, [SHARD] * 48)
    run_until_complete(sim, 1, 120, frozenset({"n3"}))
    for name, host in sim.hosts.items():
        assert host.core.transfer.stats.corrupt <= 1
        assert {report.peer for report in host.reports if report.code == "corrupt"} <= {"n3"}
        if host.core.transfer.stats.corrupt:
            assert "n3" in host.core.views.banned, name
    assert sum(host.core.transfer.stats.corrupt for host in sim.hosts.values()) >= 1


def test_peers_that_announce_everything_and_send_nothing_delay_nobody_for_long() -> None:
    sim = swarm(3, 14)
    liars = frozenset({"n2", "n5", "n8"})
    sim.obey = lambda host, effect: host.name not in liars
    sim.publish("o", 1, [SHARD] * 48)
    sim.run(sim.now + 0.5)
    for name in liars:
        for index in range(48):
            sim.do(sim.hosts[name], sim.hosts[name].core.verified(None, 1, index, sim.now))
    assert run_until_complete(sim, 1, 60, liars) < 20


def test_a_node_with_a_slow_upload_does_not_hold_the_others_up() -> None:
    sim = swarm(4, 10)
    for name in ("s0", "s1"):
        join(sim, name, up=0.1 * MB)
    sim.run(sim.now + 30)
    sim.publish("o", 1, [SHARD] * 48)
    assert run_until_complete(sim, 1, 120) < 15


def test_late_joiners_and_those_who_come_back_catch_up_after_the_origin_is_quiet() -> None:
    sim = swarm(5, 8)
    sim.publish("o", 1, [SHARD] * 16)
    run_until_complete(sim, 1, 60)
    sim.crash("n4")
    sim.publish("o", 2, [SHARD] * 16)
    run_until_complete(sim, 2, 60)
    join(sim, "late")
    join(sim, "n4")
    run_until_complete(sim, 2, 60)
    run_until_complete(sim, 1, 60)


def test_two_versions_in_flight_both_arrive_and_the_newer_is_not_held_up() -> None:
    sim = swarm(6, 10)
    sim.publish("o", 1, [SHARD] * 128)
    sim.run(sim.now + 1.0)
    sim.publish("o", 2, [SHARD] * 32)
    newer = run_until_complete(sim, 2, 60)
    assert not any(1 in host.done for name, host in sim.hosts.items() if name != "o")
    older = run_until_complete(sim, 1, 60)
    assert newer < 10
    assert older < 30


def test_an_origin_limited_to_one_and_a_half_copies_stays_there() -> None:
    sim = swarm(7, 16, copies=1.5)
    sim.publish("o", 1, [SHARD] * 64)
    run_until_complete(sim, 1, 60)
    assert sim.hosts["o"].bytes_out < 1.7 * 64 * SHARD


def test_the_same_seed_gives_the_same_run() -> None:
    def once() -> tuple[float, int]:
        sim = swarm(8, 8)
        sim.publish("o", 1, [SHARD] * 16)
        return run_until_complete(sim, 1, 60), sim.messages

    assert once() == once()


@settings(max_examples=20, deadline=None, phases=NO_SHRINK)
@given(
    st.integers(0, 2**16),
    st.lists(
        st.tuples(
            st.sampled_from(["join", "crash", "cut", "publish", "corrupt", "withhold", "lose"]),
            st.floats(0.0, 2.0),
        ),
        max_size=25,
    ),
)
def test_any_interleaving_ends_with_every_honest_live_node_holding_every_shard_verified_once(
    seed: int, steps: list[tuple[str, float]]
) -> None:
    sim = swarm(seed, 8)
    rng = random.Random(seed)
    bad: dict[str, str] = {}
    lost: Counter[str] = Counter()
    sim.intact = lambda source, target, version, index: bad.get(source.name) != "corrupt"
    sim.obey = lambda host, effect: bad.get(host.name) != "withhold" or rng.random() < 0.3
    version, count = 1, 8
    sim.publish("o", 1, [SHARD] * rng.randint(1, 40))
    for step, pause in steps:
        others = sorted(set(sim.hosts) - {"o"})
        match step:
            case "join":
                join(sim, f"n{count}")
                count += 1
            case "crash" if len(others) > 3:
                sim.crash(rng.choice(others))
            case "cut":
                host = sim.hosts[rng.choice(sorted(sim.hosts))]
                if host.links:
                    sim.cut(host.name, rng.choice(sorted(host.links)))
            case "publish" if version < 4:
                version += 1
                sim.publish("o", version, [SHARD] * rng.randint(1, 40))
            case "corrupt" | "withhold" if len(bad) < 2:
                bad[rng.choice(others)] = step
            case "lose":
                name = rng.choice(others)
                have = sim.hosts[name].core.transfer.bitmap(version)
                if have:
                    lost[name] += 1
                    index = pick(have, rng)
                    sim.do(sim.hosts[name], sim.hosts[name].core.lost(version, index, sim.now))
        sim.run(sim.now + pause)
    everybody = frozenset(bad)
    run_until_complete(sim, version, 600, everybody)
    sim.run(sim.now + 30)
    for name, host in sim.hosts.items():
        if name == "o" or name in bad:
            continue
        total = 0
        for number in host.core.transfer.versions():
            whole = (1 << len(sim.versions[number])) - 1
            assert host.core.transfer.bitmap(number) == whole
            total += whole.bit_count()
        assert host.core.transfer.stats.received == total + lost[name]
        assert not host.core.transfer.receiving()

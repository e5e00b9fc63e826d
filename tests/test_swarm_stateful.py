"""Whole swarms as a hypothesis state machine: whatever happens in whatever order, all of it arrives once.

Rules: nodes join, crash, and come back under their name; links are cut, versions
published; disks lose shards, peers turn corrupt or withhold, shards come twice, caps
come and go. At the end every honest node that is there holds every shard of the
newest versions, each verified once, and the eager links are a tree.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from treecast_sim import SHARD, join, run_until_complete, swarm

from barnraise.protocol.bitmaps import pick
from barnraise.protocol.tree_effects import StopReceive
from benchmarks.flowsim import Host

NODES, VERSIONS = 6, 3


class SwarmMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16), shards=st.integers(1, 24))
    def begin(self, seed: int, shards: int) -> None:
        self.sim = swarm(seed, NODES)
        self.rng = random.Random(seed)
        self.bad: dict[str, str] = {}
        self.lost: Counter[str] = Counter()
        self.gone: list[str] = []
        self.version, self.count = 1, NODES
        self.sim.intact = lambda source, target, version, index: self.bad.get(source.name) != "corrupt"
        self.sim.obey = lambda host, effect: self.bad.get(host.name) != "withhold" or self.rng.random() < 0.3
        self.sim.publish("o", 1, [SHARD] * shards)

    def some(self) -> Host:
        return self.sim.hosts[self.rng.choice(sorted(set(self.sim.hosts) - {"o"}))]

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.sim.run(self.sim.now + seconds)

    @rule()
    def a_node_joins(self) -> None:
        join(self.sim, f"n{self.count}")
        self.count += 1

    @precondition(lambda self: len(self.sim.hosts) > 4)
    @rule()
    def a_node_crashes(self) -> None:
        name = self.some().name
        self.sim.crash(name)
        self.gone.append(name)

    @precondition(lambda self: self.gone)
    @rule(pause=st.floats(1.0, 20.0))
    def one_comes_back(self, pause: float) -> None:
        self.sim.run(self.sim.now + pause)  # the others have noticed that it was gone
        name = self.gone.pop()
        self.lost[name] = 0
        join(self.sim, name)

    @rule()
    def a_link_is_cut(self) -> None:
        host = self.some()
        if host.links:
            self.sim.cut(host.name, self.rng.choice(sorted(host.links)))

    @precondition(lambda self: self.version < VERSIONS)
    @rule(shards=st.integers(1, 24))
    def a_version_is_published(self, shards: int) -> None:
        self.version += 1
        self.sim.publish("o", self.version, [SHARD] * shards)

    @precondition(lambda self: len(self.bad) < 2)
    @rule(how=st.sampled_from(["corrupt", "withhold"]))
    def a_node_turns_bad(self, how: str) -> None:
        self.bad[self.some().name] = how

    @rule()
    def a_disk_loses_a_shard(self) -> None:
        host = self.some()
        have = host.core.transfer.bitmap(self.version)
        if have:
            self.lost[host.name] += 1
            self.sim.do(host, host.core.lost(self.version, pick(have, self.rng), self.sim.now))

    @rule()
    def a_neighbour_sends_what_is_here_already(self) -> None:
        host = self.some()
        have, others = host.core.transfer.bitmap(self.version), sorted(host.core.views.active)
        idle = [peer for peer in others if peer not in host.core.transfer.receiving()]
        if have and idle:
            index = pick(have, self.rng)
            effects = host.core.incoming(self.rng.choice(idle), self.version, index, self.sim.now)
            assert any(isinstance(effect, StopReceive) for effect in effects)
            self.sim.do(host, effects)

    @rule(inbound=st.integers(0, 2))
    def a_cap_comes_or_goes(self, inbound: int) -> None:
        host = self.some()
        config = replace(host.core.transfer.config, inbound=inbound)
        self.sim.do(host, host.core.reconfigure(config, self.sim.now))

    @invariant()
    def nobody_sends_more_than_it_may(self) -> None:
        for host in self.sim.hosts.values() if hasattr(self, "sim") else ():
            transfer = host.core.transfer
            assert len(transfer.sending()) <= transfer.fan_out + 2
            assert len(host.core.views.active) <= host.core.views.state.config.active

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        run_until_complete(sim, self.version, 600, frozenset(self.bad))
        sim.run(sim.now + 60)
        for name, host in sim.hosts.items():
            if name == "o" or name in self.bad:
                continue
            total = 0
            for number in host.core.transfer.versions():
                whole = (1 << len(sim.versions[number])) - 1
                assert host.core.transfer.bitmap(number) == whole
                total += whole.bit_count()
            assert host.core.transfer.stats.received == total + self.lost[name]
            assert not host.core.transfer.receiving()
        self.eager_links_are_a_tree()

    def eager_links_are_a_tree(self) -> None:
        """Once quiet and two more versions on: n nodes that are linked, n - 1 mutual eager links.

        A banned node is never quiet: it knocks on one door after another, and a new link is
        eager until the next version comes. So those go first.
        """
        sim = self.sim
        for name in self.bad.keys() & sim.hosts.keys():
            sim.crash(name)
        sim.run(sim.now + 60)
        for _ in range(3):
            self.version += 1
            sim.publish("o", self.version, [SHARD])
            sim.run(sim.now + 30)
        reached, todo = {"o"}, ["o"]
        while todo:
            for peer in sim.hosts[todo.pop()].core.views.active:
                if peer in sim.hosts and peer not in reached:
                    reached.add(peer)
                    todo.append(peer)
        edges = {
            frozenset((name, peer))
            for name in reached
            for peer in sim.hosts[name].core.tree.eager
            if peer in reached and name in sim.hosts[peer].core.tree.eager
        }
        assert len(edges) == len(reached) - 1


TestSwarm = SwarmMachine.TestCase
TestSwarm.settings = settings(
    max_examples=12,
    stateful_step_count=14,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)

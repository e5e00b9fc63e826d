"""A scenario: how many come, what they are like, what happens when. Small TOML files.

``load_scenario("flash-crowd")`` takes one of the package's own (``scenario_names``),
``load_scenario("./mine.toml")`` a file. Every key has a default and bounds; an unknown key is
refused, because a typing error would otherwise be a scenario in which nothing happens.
"""

from __future__ import annotations

import ipaddress
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from barnraise.protocol.errors import BarnraiseError

Seconds = Annotated[float, Meta(ge=0, le=1e7)]
Share = Annotated[float, Meta(ge=0, le=1)]
RolloutCheat = Literal["stale", "other-model", "logprobs", "tokens", "truncate", "replay", "copy", "garbage"]
BlockCheat = Literal["stale", "replay", "copy", "noise", "untrained", "lazy", "scaled"]
CheatKind = RolloutCheat | BlockCheat
What = Literal[
    "flash-crowd",
    "mass-exit",
    "coordinator-crash",
    "partition",
    "network-down",
    "sleep",
    "skew",
    "disk-full",
    "upgrade",
    "coordinator-upgrade",
    "coordinator-disk-full",
]


class ScenarioError(BarnraiseError):
    """A scenario is not usable as written; says which key and what would do."""


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Swarm(_Part, frozen=True):
    """Who is there. ``arrive_s``: the first ``nodes`` come spread over so long.

    ``network``: each has an address drawn from it, as "203.0.113.0/24"; "": none of the internet's.
    """

    nodes: Annotated[int, Meta(ge=1, le=20_000)] = 30
    hours: Annotated[float, Meta(gt=0, le=24 * 14)] = 0.5
    arrive_s: Seconds = 60.0
    latency_ms: Annotated[float, Meta(ge=0, le=10_000)] = 30.0
    heartbeat_s: Annotated[float, Meta(ge=1, le=60)] = 5.0
    network: Annotated[str, Meta(max_length=64)] = ""
    tree: bool = True  # take part in the broadcast tree
    nat_share: Share = 0.0  # behind a router that lets nobody in
    corrupt_share: Share = 0.0  # send shards with a flipped bit
    skew_s: Seconds = 0.0  # clocks are off by up to so much, either way
    model_bytes: Annotated[int, Meta(ge=1024, le=64 * 2**20)] = 65_536
    shard_bytes: Annotated[int, Meta(ge=512, le=4 * 2**20)] = 65_536
    stands_for_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 0  # what the model weighs on a line; 0: itself


class Work(_Part, frozen=True):
    """How long things take, and how work is cut."""

    unit_s: Annotated[float, Meta(gt=0, le=1e5)] = 300.0  # median over the nodes
    unit_spread: Annotated[float, Meta(ge=0, le=2)] = 0.3  # sigma of its logarithm
    load_s: Seconds = 5.0
    learn_s: Seconds = 20.0
    verify_s: Seconds = 0.05
    verifiers: Annotated[int, Meta(ge=1, le=64)] = 1
    units_per_version: Annotated[float, Meta(gt=0, le=64)] = (
        2.0  # per node: about two of ``unit_s`` a version
    )
    prompts: Annotated[int, Meta(ge=1, le=64)] = 2
    group_size: Annotated[int, Meta(ge=2, le=64)] = 4
    tokens: Annotated[int, Meta(ge=1, le=256)] = 16
    max_lag: Annotated[int, Meta(ge=0, le=64)] = 2
    versions: Annotated[int, Meta(ge=1, le=65_536)] = 10_000
    timeout_s: Annotated[float, Meta(gt=0, le=1e6)] = 900.0
    deadline_s: Annotated[float, Meta(gt=0, le=1e6)] = 1800.0


class Blocks(_Part, frozen=True):
    """A run of phase "blocks": how the model is cut, and what a round asks for.

    ``places``: of a round, per node of the swarm, all blocks together; a node takes one of each block at
    most. ``quorum``: the share of a block's places that is enough once ``round_s`` is over. ``weights``: of
    each block; ``posttrain``: go on by rewards, with [work]'s settings, once the blocks were put together.
    """

    blocks: Annotated[int, Meta(ge=1, le=16)] = 2
    places: Annotated[float, Meta(gt=0, le=16)] = 0.8
    quorum: Annotated[float, Meta(gt=0, le=1)] = 0.5
    rounds: Annotated[int, Meta(ge=1, le=65_000)] = 1000
    round_s: Annotated[float, Meta(gt=0, le=1e6)] = 1800.0
    segments: Annotated[int, Meta(ge=1, le=64)] = 8  # of a unit
    weights: Annotated[int, Meta(ge=8, le=2**20)] = 256
    posttrain: bool = False


class Churn(_Part, frozen=True):
    """Who comes and goes. 0 for ``session_median_s``: everybody stays."""

    session_median_s: Seconds = 0.0
    session_spread: Annotated[float, Meta(ge=0, le=3)] = 1.0  # sigma of the logarithm
    away_s: Seconds = 1200.0  # mean, until the same node comes back with its key and folder
    crash_share: Share = 0.5  # of departures without a goodbye
    wave: Share = 0.0  # how much more come by day than by night: 0 no difference, 1 nobody by night
    day_s: Annotated[float, Meta(gt=0, le=1e6)] = 86_400.0


class Line(_Part, frozen=True):
    """A kind of home line. Megabits per second; 0: as fast as anybody asks."""

    share: Share
    down_mbit: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    up_mbit: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    latency_ms: Annotated[float, Meta(ge=0, le=10_000)] = 30.0
    loss: Annotated[float, Meta(ge=0, le=0.5)] = 0.0  # of packets


class Cheat(_Part, frozen=True):
    """A share of the nodes cheats in one way (``barnraise.simulation.cheats``)."""

    kind: CheatKind
    share: Share


class Happening(_Part, frozen=True):
    """Something happens at ``at_s`` to a share of the nodes, and ends after ``for_s`` (0: it stays).

    ``by_s``: what is meant by how much, for ``skew``. ``over_s``: spread over so long.
    For ``flash-crowd``, ``share`` is how many come, of ``swarm.nodes``, and ``network`` where from, as for
    ``Swarm`` ("203.0.113.7": all from one address). ``to``: the protocol version
    that whoever is upgraded speaks from then on, as "1.1"; "": the one it spoke. A coordinator that
    is upgraded goes on serving older minors for ``grace_s``, and no longer.
    """

    at_s: Seconds
    what: What
    share: Annotated[float, Meta(ge=0, le=100)] = 1.0
    for_s: Seconds = 0.0
    over_s: Seconds = 0.0
    by_s: Annotated[float, Meta(ge=-1e7, le=1e7)] = 0.0
    to: Annotated[str, Meta(pattern=r"^([0-9]{1,4}\.[0-9]{1,4})?$")] = ""
    grace_s: Seconds = 0.0
    network: Annotated[str, Meta(max_length=64)] = ""


class Scenario(_Part, frozen=True):
    """All of it. ``expects``: what the run is expected to show, in words, for the report."""

    name: Annotated[str, Meta(max_length=64)] = "unnamed"
    description: Annotated[str, Meta(max_length=2000)] = ""
    phase: Literal["rollouts", "blocks"] = "rollouts"
    swarm: Swarm = Swarm()
    work: Work = Work()
    blocks: Blocks = Blocks()
    churn: Churn = Churn()
    lines: tuple[Line, ...] = ()
    cheats: tuple[Cheat, ...] = ()
    happens: tuple[Happening, ...] = ()

    @property
    def end_s(self) -> float:
        """When it is over, in virtual seconds."""
        return self.swarm.hours * 3600

    @property
    def crowds(self) -> list[tuple[Happening, range]]:
        """The flash crowds, and which numbers each has: they go on behind those who are there first."""
        found, count = [], self.swarm.nodes
        for happening in self.happens:
            if happening.what == "flash-crowd":
                more = round(happening.share * self.swarm.nodes)
                found.append((happening, range(count, count + more)))
                count += more
        return found


def read_scenario(text: str, name: str) -> Scenario:
    """A scenario from TOML.

    Raises:
        ScenarioError: it is no TOML, a key is unknown, or a value is out of bounds.
    """
    try:
        values = tomllib.loads(text)
        scenario = msgspec.convert({"name": name, **values}, Scenario)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"scenario {name} is no valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ScenarioError(f"scenario {name}: {error}; {_cure(str(error))}") from None
    _check_network(name, scenario.swarm.network)
    for happening in scenario.happens:
        _check_network(name, happening.network)
    _check_phase(scenario, "blocks" in values)
    for what, shares in (("lines", scenario.lines), ("cheats", scenario.cheats)):
        total = sum(item.share for item in shares)
        if total > 1 + 1e-9:
            raise ScenarioError(
                f"scenario {name}: the shares of [[{what}]] add up to {total:g}: make it 1 at most"
            )
    return scenario


def _check_network(name: str, text: str) -> None:
    try:
        ipaddress.ip_network(text or "::")
    except ValueError as error:
        raise ScenarioError(
            f'scenario {name}: network: {error}; write "203.0.113.7", or "203.0.113.0/24"'
        ) from None


def _check_phase(scenario: Scenario, has_blocks: bool) -> None:
    """Refuse what another phase's scenario would mean."""
    if has_blocks and scenario.phase != "blocks":
        raise ScenarioError(f'scenario {scenario.name}: [blocks] is for phase = "blocks": add that line')
    kinds: tuple[str, ...] = get_args(BlockCheat if scenario.phase == "blocks" else RolloutCheat)
    for cheat in scenario.cheats:
        if cheat.kind not in kinds:
            raise ScenarioError(
                f"scenario {scenario.name}: nobody cheats by {cheat.kind!r} in phase {scenario.phase}: "
                f"choose one of {', '.join(kinds)}"
            )


def load_scenario(which: str) -> Scenario:
    """One of the package's own by name, or a file by its path.

    Raises:
        ScenarioError: there is none, or it is not usable.
    """
    if which.endswith(".toml"):
        path = Path(which)
        try:
            return read_scenario(path.read_text(), path.stem)
        except (OSError, UnicodeDecodeError) as error:
            raise ScenarioError(f"{which} cannot be read: {error}") from None
    if which not in scenario_names():
        raise ScenarioError(
            f"there is no scenario {which!r}: choose one of {', '.join(scenario_names())}, "
            "or give a path that ends in .toml"
        )
    return read_scenario((_folder() / f"{which}.toml").read_text(), which)


def scenario_names() -> list[str]:
    """The package's own, sorted."""
    return sorted(
        item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml")
    )


def _folder() -> resources.abc.Traversable:
    return resources.files("barnraise.simulation") / "scenarios"


def _cure(problem: str) -> str:
    """Which keys there are, where an unknown one stands."""
    parts: dict[str, type[Struct]] = {
        "$.swarm": Swarm,
        "$.work": Work,
        "$.blocks": Blocks,
        "$.churn": Churn,
        "$.lines[": Line,
        "$.cheats[": Cheat,
        "$.happens[": Happening,
    }
    if "unknown field" not in problem:
        return "see docs/simulation.md for what each key may be"
    part = next((kind for at, kind in parts.items() if at in problem), Scenario)
    return f"the keys there are {', '.join(part.__struct_fields__)}"

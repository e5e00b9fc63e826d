"""The node's decisions: no order of events starts two things at once or leaves a wait unexplained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.node import core, fold
from barnraise.node.decisions import (
    Action,
    Ask,
    Connect,
    Fetch,
    FreeEngine,
    Generate,
    GiveBack,
    Load,
    Stop,
    StopEngine,
    StopFetch,
    Train,
    Upload,
)
from barnraise.node.events import (
    AlreadyAnswered,
    AskFailed,
    Command,
    DeadlineMoved,
    EngineFailed,
    EngineLoaded,
    EngineStopped,
    Event,
    Fatal,
    FetchDone,
    FetchFailed,
    FetchStopped,
    Granted,
    HeadSeen,
    Held,
    Joined,
    Judged,
    LinkLost,
    Mode,
    NoLease,
    Restored,
    Returned,
    Unit,
    UnitDelayed,
    UnitDone,
    UnitUnusable,
    Uploaded,
    UploadFailed,
    VersionDamaged,
)
from barnraise.node.model import State

WAITING = {"connecting", "offline", "waiting", "fetching", "asking", "uploading", "finishing", "loading"}


@dataclass
class World:
    """Plays the shell: keeps what was started, and answers it one way or another."""

    state: State = field(default_factory=lambda: core.initial(False, 0.0))
    now: float = 0.0
    running: list[Action] = field(default_factory=list)
    stop: Stop | None = None
    leases: int = 0
    submissions: int = 0
    started: list[Action] = field(default_factory=list)

    def step(self) -> None:
        for _ in range(20):
            self.state, actions = core.step(self.state, self.now)
            for action in actions:
                self.begin(action)
            if not actions:
                break
        else:
            pytest.fail("step never comes to rest")
        self.check()

    def begin(self, action: Action) -> None:
        self.started.append(action)
        if isinstance(action, StopEngine):
            assert self.of(Generate, Train, Load), "stopped an engine that was not at work"
            return
        if isinstance(action, StopFetch):
            assert self.of(Fetch)
            return
        if isinstance(action, Stop):
            self.stop = action
            return
        assert not self.of(type(action)), f"two at once: {action}"
        if isinstance(action, Generate | Train | Load | FreeEngine):
            assert not self.of(Generate, Train, Load, FreeEngine), "the engine got two tasks"
            assert self.state.suspended is None or isinstance(action, FreeEngine)
        self.running.append(action)

    def of(self, *types: type[Action]) -> list[Action]:
        return [a for a in self.running if isinstance(a, types)]

    def feed(self, event: Event) -> None:
        self.state = core.apply(self.state, event, self.now)
        self.check()

    def check(self) -> None:
        state, activity = self.state, self.state.activity
        assert activity.name
        assert activity.reason
        assert activity.since <= self.now
        if self.stop is not None:
            return
        at_work = state.engine in ("generating", "training", "stopping", "loading")
        assert at_work == bool(self.of(Generate, Train, Load, FreeEngine))
        assert len(set(state.pending)) == len(state.pending)
        assert len(state.pending) <= core.MAX_PENDING + 1 + 2  # two may come from an earlier process
        assert (state.link == "trying") <= bool(self.of(Connect))

    def check_rest(self) -> None:
        """With nothing under way, something must be due, or a person must be told whom to wait for."""
        if self.stop is not None or self.of(
            Ask, Fetch, Generate, Train, Load, FreeEngine, Upload, GiveBack, Connect
        ):
            return
        due = core.next_wake(self.state, self.now)
        waits = self.state.complete or self.state.head < 0 or self.state.held is not None
        external = self.state.mode == "pause" or waits
        assert due is not None or external, self.state


def answers(world: World, action: Action) -> list[Event]:
    """Every way in which a task may end."""
    jitter, state = 0.5, world.state
    match action:
        case Connect():
            last = state.last_block
            return [
                Joined(max(0, state.head), 6, 2, last),
                Joined(state.head, 6, 2, last),
                LinkLost("gone", jitter),
            ]
        case Fetch(version):
            if state.fetch_stopping:
                return [FetchStopped(), FetchDone(version)]
            return [FetchDone(version), FetchFailed("no peers", jitter)]
        case Load(version):
            if state.engine == "stopping":
                return [EngineStopped(alive=False), EngineLoaded(version)]
            died = EngineFailed("died", False, False, jitter)
            return [EngineLoaded(version), died, VersionDamaged(version, jitter)]
        case Ask(version):
            world.leases += 1
            assert version <= state.last_block or version == state.loaded
            steps = 4 if version <= state.last_block else 0
            unit = Unit(world.leases.to_bytes(16, "big"), version, 2, 2, world.now + 30, steps=steps)
            return [
                Granted(unit),
                NoLease("enough", 3.0, jitter),
                AlreadyAnswered(),
                AskFailed("slow", jitter),
            ]
        case Generate():
            if state.engine == "stopping":
                return [EngineStopped(alive=True), EngineFailed("died", False, False, jitter)]
            world.submissions += 1
            return [
                UnitDone(world.submissions.to_bytes(32, "big")),
                EngineFailed("out of memory", True, True, jitter),
                EngineFailed("died", False, False, jitter),
                UnitUnusable("disk full", jitter),
            ]
        case Train(unit, shrink):
            assert unit.is_block
            assert shrink == state.shrink
            if state.engine == "stopping":
                return [EngineStopped(alive=True), UnitDelayed("slow", jitter)]
            world.submissions += 1
            return [
                UnitDone(world.submissions.to_bytes(32, "big")),
                EngineFailed("died", False, False, jitter, advanced=True),
                EngineFailed("out of memory", True, True, jitter),
                UnitDelayed("nobody has the corpus", jitter),
                UnitUnusable("disk full", jitter),
            ]
        case FreeEngine():
            return [EngineStopped(alive=False)]
        case Upload(submission_id):
            return [
                Uploaded(submission_id, True),
                Uploaded(submission_id, False),
                UploadFailed("slow", jitter),
            ]
        case GiveBack(lease_id):
            return [Returned(lease_id, True), Returned(lease_id, False)]
    raise AssertionError(action)


def held(world: World, choice: int) -> Held:
    """A hold of one kind or another, or its end."""
    if world.state.held is not None and choice % 3 == 0:
        return Held("")
    until = world.now + 50.0 if choice % 2 else None
    return Held("you are here", until, bool(choice & 2), bool(choice & 4), bool(choice & 8))


CHOICE = st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99))
MODES: tuple[Mode, ...] = ("run", "pause", "finish", "leave")


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99)), max_size=80),
    st.booleans(),
    st.sampled_from([-1, 3]),
)
def test_no_order_of_events_starts_two_things_or_leaves_a_wait_without_a_reason(
    choices: list[tuple[int, int, int]], exits: bool, last_block: int
) -> None:
    world = World(replace(core.initial(exits, 0.0), last_block=last_block))
    world.step()
    for kind, a, b in choices:
        if world.stop is not None:
            break
        if kind <= 5 and world.running:
            action = world.running.pop(a % len(world.running))
            options = answers(world, action)
            world.state = core.apply(world.state, options[b % len(options)], world.now)
        elif kind == 6 and b % 5 == 0:
            world.feed(held(world, a))
        elif kind == 6:
            world.now += (0.1, 1.0, 10.0, 100.0)[a % 4]
        elif kind == 7:
            until = world.now + 5.0 if b % 2 else None
            world.feed(Command(MODES[a % (4 if b > 70 else 3)], until))
        elif kind == 8:
            world.feed(HeadSeen(min(7, world.state.head + 1 + a % 3)) if a % 4 else Judged(b"x" * 32))
        elif world.state.link == "up":
            world.feed(LinkLost("reset", 0.3))
        elif world.state.unit is not None:
            world.feed(DeadlineMoved(world.state.unit.lease_id, world.now + a - 5))
        world.step()
        world.check_rest()


@settings(max_examples=200, deadline=None)
@given(st.lists(CHOICE, max_size=50), st.sampled_from([-1, 3]))
def test_after_any_trouble_a_healthy_world_gets_work_again(
    choices: list[tuple[int, int, int]], last_block: int
) -> None:
    world = World(replace(core.initial(False, 0.0), last_block=last_block))
    world.step()
    for kind, a, b in choices:
        if kind <= 6 and world.running:
            action = world.running.pop(a % len(world.running))
            options = answers(world, action)
            world.state = core.apply(world.state, options[b % len(options)], world.now)
        elif kind == 7:
            world.now += 1.0 + a
        elif kind == 8 and a % 3 == 0:
            world.feed(held(world, b))
        elif kind == 8:
            world.feed(Command("pause" if a % 2 else "run"))
        elif world.state.link == "up":
            world.feed(LinkLost("reset", 0.3))
        world.step()
    world.feed(Command("run"))
    world.feed(Held(""))
    world.feed(HeadSeen(max(0, world.state.head)))
    before = world.submissions
    for _ in range(300):
        world.step()
        if world.running:
            action = world.running.pop(0)
            world.state = core.apply(world.state, answers(world, action)[0], world.now)
        else:
            due = core.next_wake(world.state, world.now)
            assert due is not None, world.state
            world.now = due
        if world.submissions > before + 1 and not world.state.pending:
            return
    pytest.fail(f"no work got done: {world.state}")


def working() -> World:
    """A node that has joined, loaded version 0 and generates its first unit."""
    world = World()
    world.step()
    for event in (Joined(0, 10, 2), FetchDone(0), EngineLoaded(0), Granted(unit(1))):
        world.running.clear()
        world.state = core.apply(world.state, event, world.now)
        world.step()
    assert isinstance(world.running[-1], Generate)
    return world


def unit(number: int, version: int = 0) -> Unit:
    return Unit(number.to_bytes(16, "big"), version, 2, 4, deadline=100.0)


def last(world: World, event: Event, *ended: type[Action]) -> list[Action]:
    """Feed an event that ends the given tasks; return what was started for it."""
    before = len(world.started)
    world.running = [a for a in world.running if not isinstance(a, ended)]
    world.state = core.apply(world.state, event, world.now)
    world.step()
    return world.started[before:]


def test_uploading_overlaps_the_next_unit_but_never_two() -> None:
    world = working()
    assert last(world, UnitDone(b"1"), Generate) == [Upload(b"1"), Ask(0)]
    assert last(world, Granted(unit(2)), Ask) == [Generate(unit(2), 0)]
    assert last(world, UnitDone(b"2"), Generate) == []  # the first is still on its way
    assert world.state.activity.name == "uploading"
    assert last(world, Uploaded(b"1", True), Upload) == [Upload(b"2"), Ask(0)]


def test_a_new_head_is_fetched_while_generating_and_loaded_between_units() -> None:
    world = working()
    assert last(world, HeadSeen(1)) == [Fetch(1)]
    assert last(world, HeadSeen(2)) == []
    assert last(world, HeadSeen(3)) == []
    assert last(world, FetchDone(1), Fetch) == [Fetch(3)]  # 2 is skipped
    assert last(world, FetchDone(3), Fetch) == []
    assert world.state.engine == "generating"
    assert last(world, UnitDone(b"1"), Generate) == [Upload(b"1"), Load(3)]
    assert last(world, EngineLoaded(3), Load) == [Ask(3)]


def test_a_download_begins_again_when_the_coordinator_is_back() -> None:
    world = working()
    assert last(world, HeadSeen(1)) == [Fetch(1)]
    assert last(world, LinkLost("reset", 0.0)) == []
    world.now += 1.0
    world.step()
    assert last(world, Joined(2, 10, 2), Connect) == [StopFetch()]
    assert last(world, FetchStopped(), Fetch) == [Fetch(2)]


def test_r5_out_of_memory_is_retried_smaller_once_then_the_lease_goes_back() -> None:
    world = working()
    again = last(world, EngineFailed("out of memory", True, True, 0.0), Generate)
    assert again == [Generate(replace(unit(1), attempt=1), 1)]
    assert "second try" in world.state.activity.reason
    given_back = last(world, EngineFailed("out of memory", True, True, 0.0), Generate)
    assert given_back == [GiveBack(unit(1).lease_id, "out of memory")]
    assert world.state.shrink == 2
    assert last(world, Returned(unit(1).lease_id, True), GiveBack) == []
    assert "out of memory" in world.state.activity.reason
    assert world.state.activity.until is not None


def test_a_dead_engine_is_loaded_again_for_the_same_unit() -> None:
    world = working()
    assert last(world, EngineFailed("killed: out of memory", True, False, 0.0), Generate) == [Load(0)]
    assert last(world, EngineLoaded(0), Load) == [Generate(replace(unit(1), attempt=1), 1)]


def test_a_pause_stops_the_engine_and_gives_the_lease_back_and_ends_by_itself() -> None:
    world = working()
    actions = last(world, Command("pause", until=60.0))
    assert actions == [StopEngine("paused"), GiveBack(unit(1).lease_id, "paused")]
    last(world, EngineStopped(alive=True), Generate)
    last(world, Returned(unit(1).lease_id, True), GiveBack)
    assert world.state.activity.name == "paused"
    assert core.next_wake(world.state, world.now) == 60.0
    world.now = 60.0
    world.step()
    assert world.started[-1] == Ask(0)


def test_a_hold_lets_the_unit_finish_and_takes_no_more_until_it_ends() -> None:
    world = working()
    assert last(world, Held("the quota is spent", until=60.0)) == []
    assert last(world, UnitDone(b"1"), Generate) == [Upload(b"1")]
    assert last(world, Uploaded(b"1", True), Upload) == []
    assert last(world, HeadSeen(1)) == []
    assert (world.state.activity.name, world.state.activity.until) == ("paused", 60.0)
    assert set(last(world, Held(""))) == {Fetch(1), Ask(0)}


def test_r14_a_suspension_gives_a_unit_of_rollouts_back_at_once_and_tells_nobody_why() -> None:
    world = working()
    actions = last(world, Held("solitaire is running", until=60.0, stop=True))
    said = "suspended by the machine's rules"
    assert actions == [StopEngine(said), GiveBack(unit(1).lease_id, said)]
    last(world, EngineStopped(alive=True), Generate)
    last(world, Returned(unit(1).lease_id, True), GiveBack)
    activity = world.state.activity
    assert (activity.name, activity.reason, activity.until) == ("paused", "solitaire is running", 60.0)
    assert last(world, HeadSeen(1)) == []  # nothing is fetched either
    assert set(last(world, Held(""))) == {Fetch(1), Ask(0)}


def test_r14_a_suspension_of_the_engine_alone_lets_versions_pass() -> None:
    world = working()
    last(world, Held("the GPU is hot", stop=True, transfers=True))
    last(world, EngineStopped(alive=True), Generate)
    last(world, Returned(unit(1).lease_id, True), GiveBack)
    assert last(world, HeadSeen(1)) == [Fetch(1)]
    assert last(world, FetchDone(1), Fetch) == []  # but not into the engine
    assert last(world, Held("")) == [Load(1)]


def test_r14_memory_that_is_wanted_back_ends_the_engine_once_it_rests() -> None:
    world = working()
    last(world, Held("memory is short", stop=True, free=True))
    assert last(world, EngineStopped(alive=True), Generate) == [FreeEngine("memory is short")]
    last(world, Returned(unit(1).lease_id, True), GiveBack)
    assert last(world, EngineStopped(alive=False), FreeEngine) == []
    assert last(world, Held("")) == [Load(0)]


def test_finish_completes_the_unit_and_its_upload_then_stops() -> None:
    world = working()
    assert last(world, Command("finish")) == []
    assert last(world, UnitDone(b"1"), Generate) == [Upload(b"1")]
    assert last(world, Uploaded(b"1", True), Upload) == [Stop(0, "finished the last unit")]


def test_finish_without_a_coordinator_keeps_the_submission_and_stops_in_time() -> None:
    world = working()
    last(world, Command("finish"))
    last(world, LinkLost("gone", 0.0))
    last(world, UnitDone(b"1"), Generate)
    world.now += core.FINISH_GRACE_S
    world.step()
    assert world.stop is not None
    assert "kept for next time" in world.stop.reason


def test_leaving_never_takes_longer_than_two_seconds() -> None:
    world = working()
    last(world, Command("leave"))
    assert world.stop is None
    world.now += 2.0
    world.step()
    assert world.stop == Stop(0, "left the run")


def test_an_expired_lease_ends_its_unit_without_a_return() -> None:
    world = working()
    world.now = 100.0
    world.step()
    assert world.started[-1] == StopEngine("the lease expired")
    assert not world.state.returns


def test_refusals_are_obeyed_and_shown() -> None:
    world = working()
    last(world, UnitDone(b"1"), Generate)
    assert last(world, NoLease("no unit is free", 7.0, 0.0), Ask) == []
    assert "no unit is free" in world.state.activity.reason
    world.now = 6.9
    world.step()
    assert not world.of(Ask)
    world.now = 7.0
    world.step()
    assert world.of(Ask)


def test_a_new_round_of_blocks_is_asked_for_at_once_whatever_was_said_of_the_old() -> None:
    world = World()
    world.step()
    last(world, Joined(0, 10, 2, 2), Connect)
    assert Ask(0) in last(world, FetchDone(0), Fetch)
    assert last(world, NoLease("every place is taken", 15.0, 0.0), Ask) == []
    world.now += 3
    assert last(world, HeadSeen(1)) == [Fetch(1)]
    assert last(world, FetchDone(1), Fetch) == [Ask(1)]
    assert last(world, NoLease("every place is taken", 15.0, 0.0), Ask) == []
    assert last(world, FetchDone(1), Fetch) == []  # it is no other round


def test_a_lease_that_crossed_its_submission_is_asked_for_again_after_the_upload() -> None:
    world = working()
    assert last(world, UnitDone(b"1"), Generate) == [Upload(b"1"), Ask(0)]
    assert last(world, AlreadyAnswered(), Ask) == []
    assert "on its way" in world.state.activity.reason
    assert last(world, Uploaded(b"1", True), Upload) == [Ask(0)]


def test_a_complete_run_ends_work_and_the_process_if_so_wished() -> None:
    world = working()
    world.state = replace(world.state, exit_when_complete=True)
    actions = last(world, HeadSeen(10))
    assert actions == [StopEngine("the run is complete"), GiveBack(unit(1).lease_id, "the run is complete")]
    last(world, EngineStopped(alive=True), Generate)
    last(world, Returned(unit(1).lease_id, True), GiveBack)
    assert world.stop == Stop(0, "the run is complete")


def test_what_an_earlier_process_left_is_sent_and_given_back() -> None:
    world = World()
    world.step()
    world.feed(Restored((b"old",), (b"L" * 16,)))
    started = last(world, Joined(-1, 10, 2), Connect)
    assert started == [GiveBack(b"L" * 16, "the node was restarted"), Upload(b"old")]


def test_backoff_grows_is_jittered_and_starts_afresh_after_a_session() -> None:
    world = World()
    world.step()
    waits = []
    for _ in range(10):
        world.running.clear()
        world.feed(LinkLost("refused", 0.999))
        waits.append(world.state.link_retry.at - world.now)
        world.now = world.state.link_retry.at
        world.step()
    assert waits == sorted(waits)
    assert waits[0] <= 1.0
    assert 59 < waits[-1] <= 60
    last(world, Joined(-1, 10, 2), Connect)
    last(world, LinkLost("reset", 0.999))
    assert world.state.link_retry.at - world.now > 59  # it did not stand
    world.now = world.state.link_retry.at
    world.step()
    last(world, Joined(-1, 10, 2), Connect)
    world.now += fold.STOOD_S
    last(world, LinkLost("reset", 0.0))
    assert world.state.link_retry.at - world.now == 0.5


def test_a_fatal_refusal_ends_with_its_code() -> None:
    world = World()
    world.step()
    world.feed(Fatal("update first", 3))
    assert world.state.stopped == Stop(3, "update first")
    assert world.state.activity.name == "stopped"


def training() -> World:
    """A node that has joined, fetched version 0 and trains a block; versions up to 1 are made of blocks."""
    world = World()
    world.step()
    for event in (Joined(0, 10, 2, 1), FetchDone(0), Granted(block_unit(1))):
        world.running.clear()
        world.state = core.apply(world.state, event, world.now)
        world.step()
    assert isinstance(world.running[-1], Train)
    assert not any(isinstance(action, Load) for action in world.started)
    return world


def block_unit(number: int, version: int = 0) -> Unit:
    return Unit(number.to_bytes(16, "big"), version, 0, 0, deadline=100.0, block=1, steps=8)


def test_blocks_need_no_loading_and_a_pause_keeps_the_unit() -> None:
    world = training()
    assert world.state.activity.name == "training"
    assert last(world, Command("pause", 10.0)) == [StopEngine("paused")]
    assert last(world, EngineStopped(alive=True), Train) == []
    assert "kept" in world.state.activity.reason
    world.now = 10.0
    world.step()
    assert world.running == [Train(block_unit(1))]
    assert not any(isinstance(action, GiveBack) for action in world.started)


def test_r14_a_suspension_keeps_a_block_unit_and_frees_its_memory_and_finish_still_finishes_it() -> None:
    world = training()
    assert last(world, Held("memory is short", stop=True, free=True)) == [
        StopEngine("suspended by the machine's rules")
    ]
    assert last(world, EngineStopped(alive=True), Train) == [FreeEngine("memory is short")]
    assert last(world, EngineStopped(alive=False), FreeEngine) == []
    assert world.state.activity.reason == "memory is short; its unit is kept and goes on afterwards"
    assert last(world, Command("finish")) == []
    assert world.stop is None
    assert last(world, Held("")) == [Train(block_unit(1))]
    assert last(world, UnitDone(b"1"), Train) == [Upload(b"1")]
    assert last(world, Uploaded(b"1", True), Upload) == [Stop(0, "finished the last unit")]


def test_a_pause_beyond_the_lease_drops_the_unit() -> None:
    world = training()
    last(world, Command("pause"))
    last(world, EngineStopped(alive=True), Train)
    world.now = 101.0
    world.step()
    assert world.state.unit is None
    assert isinstance(last(world, Command("run"))[0], Ask)
    assert not any(isinstance(action, GiveBack) for action in world.started)


def test_an_engine_that_dies_is_started_again_while_the_unit_gets_on() -> None:
    world = training()
    for _ in range(5):
        (again,) = last(world, EngineFailed("killed", False, False, 0.5, advanced=True), Train)
        assert isinstance(again, Train)
    assert last(world, EngineFailed("killed", False, False, 0.5), Train) == [
        GiveBack(block_unit(1).lease_id, "killed")
    ]


def test_r5_a_block_unit_that_memory_did_not_suffice_for_goes_on_with_less_at_once() -> None:
    world = training()
    again = last(world, EngineFailed("out of memory", True, True, 0.0), Train)
    assert again == [Train(replace(block_unit(1), attempt=1), shrink=1)]
    given_back = last(world, EngineFailed("out of memory", True, False, 0.0), Train)
    assert given_back == [GiveBack(block_unit(1).lease_id, "out of memory")]
    assert world.state.stopped is None


def test_a_unit_waits_for_its_corpus_until_the_lease_ends() -> None:
    world = training()
    assert last(world, UnitDelayed("nobody offers it", 0.5), Train) == []
    assert "nobody offers it" in world.state.activity.reason
    world.now = core.next_wake(world.state, world.now) or 0.0
    world.step()
    assert world.running == [Train(replace(block_unit(1)))]


def test_a_node_goes_on_from_blocks_to_the_model_by_itself() -> None:
    world = training()
    last(world, HeadSeen(2))
    assert world.state.unit is None, "the blocks have been put together without it"
    last(world, EngineStopped(alive=True), Train)
    world.running = [action for action in world.running if not isinstance(action, GiveBack)]
    last(world, Returned(block_unit(1).lease_id, True))
    assert world.of(Fetch) == [Fetch(2)]
    assert not world.of(Ask), "version 0 is no policy"
    assert Load(2) in last(world, FetchDone(2), Fetch)
    assert Ask(2) in last(world, EngineLoaded(2), Load)
    (started,) = last(world, Granted(unit(7, version=2)), Ask)
    assert isinstance(started, Generate)


def test_blocks_are_only_trained_from_the_head() -> None:
    world = training()
    last(world, UnitDone(b"s" * 32), Train)
    world.running.clear()
    world.state = replace(world.state, asking=False, uploading=None, pending=())
    last(world, HeadSeen(1))
    assert not world.of(Ask)
    assert Ask(1) in last(world, FetchDone(1), Fetch)


def test_a_unit_of_an_earlier_process_goes_on_before_the_coordinator_is_back() -> None:
    world = World()
    world.state = core.apply(world.state, Restored((), (), block_unit(4), 1), world.now)
    world.state = core.apply(world.state, HeadSeen(1), world.now)
    world.step()
    assert world.of(Train) == [Train(block_unit(4))]

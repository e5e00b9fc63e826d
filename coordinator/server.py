"""The coordinator's trio shell: handlers on the network, three belts, a ticker, a control socket.

Runs unchanged over libp2p with child processes, and in memory under trio's autojump
clock with workers in this process: network, workers, clock, randomness and the way
to run blocking calls all come from outside.
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import trio

from barnraise.coordinator import publisher, scheduler, unit_lines
from barnraise.coordinator.act_lines import log_acts
from barnraise.coordinator.amending import tell_amendments
from barnraise.coordinator.appeals import AppealBelt
from barnraise.coordinator.audit import Pressure, epoch_events
from barnraise.coordinator.block_belt import BlockBelt
from barnraise.coordinator.block_files import serve_corpus
from barnraise.coordinator.clock_back import ClockBack
from barnraise.coordinator.commands import operator_commands
from barnraise.coordinator.core import Core, Offload, in_thread
from barnraise.coordinator.deadlines import Deadlines
from barnraise.coordinator.door import Door
from barnraise.coordinator.draining import Drain
from barnraise.coordinator.events import Event
from barnraise.coordinator.folder import Run
from barnraise.coordinator.greeter import Greeter
from barnraise.coordinator.guard_belt import GuardBelt
from barnraise.coordinator.guards import GuardLimits
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.learn_belt import LearnBelt
from barnraise.coordinator.log_belt import LogBelt
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.newcomer_book import NewcomerBook
from barnraise.coordinator.newcomers import NewcomerLimits
from barnraise.coordinator.origin import Origin
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.publish_belt import PublishBelt
from barnraise.coordinator.run_file import Keep
from barnraise.coordinator.sessions import Sessions
from barnraise.coordinator.snapshot import Snapshots
from barnraise.coordinator.snapshot_belt import SnapshotBelt, in_child
from barnraise.coordinator.standing import tell_of
from barnraise.coordinator.status import state_tree
from barnraise.coordinator.steering import tell_resumed
from barnraise.coordinator.verify_belt import VerifyBelt
from barnraise.coordinator.web.gate import Access
from barnraise.coordinator.web.service import WebService
from barnraise.coordinator.workers import Learner, Verifier
from barnraise.protocol.control import Changed, serve_control
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.hello import Floor
from barnraise.protocol.log_messages import LOG_PROTOCOL
from barnraise.protocol.messages import (
    HELLO_PROTOCOL,
    MAX_SHARD,
    SESSION_PROTOCOL,
    SHARD_PROTOCOL,
    Hello,
    Manifest,
)
from barnraise.protocol.network import Network
from barnraise.protocol.reach_messages import REACH_PROTOCOL
from barnraise.protocol.reachability import serve_reach
from barnraise.protocol.relay import Relay, bulk
from barnraise.protocol.relay_wire import HOP_PROTOCOL
from barnraise.protocol.shards import serve_shards
from barnraise.protocol.store import DiskStore
from barnraise.protocol.tlog_checkpoint import log_key

log = logging.getLogger(__name__)

TICK_S = 0.25
TREE_HEAD_EVERY_S = 60.0
TREE_HEAD_EVERY = 8_192  # ledger entries: what is not published is replayed at the next start
SHOW_EVERY_S = 1.0
REPLY_S = 0.2


def wall_clock_ms() -> int:
    """Milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


async def run_coordinator(
    run: Run,
    network: Network,
    verifier: Verifier,
    learner: Learner,
    *,
    now_ms: Callable[[], int] = wall_clock_ms,
    rng: random.Random | None = None,
    offload: Offload = in_thread,
    announce: Callable[[str], None] = log.info,
    control: bool = True,
    leases_per_node: int = scheduler.LEASES_PER_NODE,
    shard_size: int = MAX_SHARD,
    mirrors: tuple[str, ...] = (),
    upload_copies: float = 0.0,
    relay_bytes_s: float = 0.0,
    serial_publishing: bool = False,
    pressure: Pressure | None = None,
    replay: bool = False,
    http: Sequence[trio.SocketListener] | None = None,
    keep: Keep = Keep(),
    guards: GuardLimits = GuardLimits(),
    admin: Access = "local",
    end: Callable[[], None] | None = None,
    hello: Hello | None = None,
    floor: Floor | None = None,
    newcomers: NewcomerLimits = NewcomerLimits(),
    task_status: Any = trio.TASK_STATUS_IGNORED,  # trio.TaskStatus[Callable[[], dict[str, Any]]]
) -> None:
    """Serve a run until cancelled; goes on where its journal ends. Workers are closed at the end.

    Args:
        run: an opened (locked) run folder.
        now_ms: the clock, ms since the Unix epoch.
        rng: draws lease ids and samples of peers; the operating system's by default.
        offload: how blocking calls run; ``core.in_place`` under a virtual clock.
        announce: told short lines for a person: versions published, the end.
        control: whether to serve the run folder's control socket.
        mirrors: base URLs of static file hosts, named in the manifests of versions to come.
        upload_copies: about how many copies of a version to send down the broadcast tree; 0: no limit.
        relay_bytes_s: how fast to carry shards between nodes that nobody can dial, all of them
            together, bytes/s; 0: only help them to punch holes.
        serial_publishing: have the learner wait while a version is published (to measure the difference).
        pressure: the backlog from which proven nodes' work may be spared; None: never.
        replay: fold every event from the first on, and compare what the snapshots say.
        http: where to serve the page (``barnraise.coordinator.web``); None: nowhere.
        admin: from where the admin API there may be asked (``barnraise.coordinator.web.gate``).
        hello: the protocol version to speak; None: this installation's own.
        floor: the oldest version that is served, and from when on; None: all of our major.
        newcomers: how many keys that were never here may come from one address.
        task_status: ``nursery.start`` returns, once nodes may come, a function that gives the state tree.

    Raises:
        RunFolderError, StorageError: the journal cannot be opened, or the newest version's files are damaged.
        EventError: a defect; started again, the coordinator resumes from the journal.
    """
    journal = Journal(run.journal_path)
    try:
        out_there = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
        snapshots = Snapshots(run.snapshot_folder, run.run_id)
        core = Core(
            journal,
            run.spec,
            run.run_id,
            run.identity,
            now_ms,
            offload,
            snapshots=snapshots,
            published=out_there.size,
            replay=replay,
        )
        public_log = LogBelt(core, run.identity, out_there, run.signed_spec)
        take = in_child(run.path) if offload is in_thread else None
        keeper = SnapshotBelt(core, public_log, snapshots, take)
        hub, progress = Hub(), Progress()
        greeter = Greeter(hub, now_ms, hello, floor)
        store = DiskStore(run.store_path)
        door = Door(core, network.observed, newcomers, NewcomerBook(run.path, run.identity))
        sessions = Sessions(
            core,
            hub,
            run.signed_spec,
            rng or secrets.SystemRandom(),
            door,
            leases_per_node=leases_per_node,
            run_folder=run.path,
            minor_of=greeter.minor_of,
        )
        due = partial(due_events, core, sessions, Deadlines(core), ClockBack(core))
        tree_rng = random.Random(secrets.randbits(64) if rng is None else str(rng.getstate()))
        origin = Origin(run.spec, run.run_id, network, store, tree_rng, upload_copies)
        verify = VerifyBelt(core, verifier, progress, pressure)
        learn = LearnBelt(core, learner, run.path, progress, serial_publishing)
        publish = PublishBelt(
            core, hub, learner, store, run.path, progress, announce, shard_size, mirrors, origin, keep=keep
        )
        core.listeners.append(partial(push_receipts, hub))
        core.listeners.append(partial(tell_of, core, hub))
        core.listeners.append(partial(tell_amendments, hub))
        core.listeners.append(partial(tell_resumed, core, hub))
        core.listeners.append(partial(log_acts, core))
        guard = GuardBelt(core, hub, guards, door.turned_away)
        core.listeners.append(guard.hear)
        learner.on_progress = progress.note
        about = (origin, run.path, public_log, door)
        get_state = partial(state_tree, core, hub, progress, network, now_ms(), *about)
        web = None
        if http is not None:
            without_nodes = partial(get_state, with_nodes=False)
            web = WebService(
                core, hub, public_log.folder, run.path, without_nodes, admin=admin, guards=guards
            )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(core.run)
                await core.open()
                await offload(partial(_check_head, run, core))
                if run.spec.pretrain is not None:
                    await offload(partial(serve_corpus, run.path, run.spec.pretrain.corpus, store))
                await publish.serve_head()
                await _catch_up(core, due)
                end_soon = partial(nursery.start_soon, _end_soon, end or nursery.cancel_scope.cancel)
                drain = Drain(core, progress, end_soon, guards.pause)
                commands = operator_commands(core, run, drain, end_soon)
                if control:
                    changed = Changed()
                    await nursery.start(serve_control, run.control_path, get_state, commands, changed)
                    nursery.start_soon(_show, core, changed)
                network.set_handler(HELLO_PROTOCOL, greeter.answer)
                network.set_handler(SESSION_PROTOCOL, sessions.serve)
                network.set_handler(SHARD_PROTOCOL, serve_shards(store, sent=origin.gossiper.sent_beside))
                relay = Relay(network, None if relay_bytes_s <= 0 else bulk(relay_bytes_s))
                network.set_handler(HOP_PROTOCOL, relay.serve)
                network.set_handler(REACH_PROTOCOL, serve_reach(network, relays=True, on_reach=hub.reached))
                network.set_handler(LOG_PROTOCOL, public_log.handler())
                nursery.start_soon(public_log.run)
                nursery.start_soon(keeper.run)
                nursery.start_soon(origin.run)
                nursery.start_soon(sessions.run)
                nursery.start_soon(door.run)
                nursery.start_soon(verify.run)
                if run.spec.pretrain is not None:
                    blocks = BlockBelt(core, run.spec.pretrain, verifier, network, run.path, progress)
                    nursery.start_soon(blocks.run)
                nursery.start_soon(AppealBelt(core, verifier).run)
                nursery.start_soon(learn.run)
                nursery.start_soon(publish.run)
                nursery.start_soon(guard.run)
                nursery.start_soon(drain.run)
                nursery.start_soon(tick, core, sessions, greeter, due, pressure is not None)
                if web is not None:
                    web.admin.commands = commands
                    nursery.start_soon(web.run, http or ())
                task_status.started(get_state)
        finally:
            keeper.at_stop()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5.0):
                await learner.close()
                await verifier.close()
    finally:
        journal.close()


def _check_head(run: Run, core: Core) -> None:
    """Nobody could fetch a head whose files are damaged, and the run would stand still without a word."""
    head, signed = core.state.head, core.journal.manifest(core.state.head)
    if head < 0 or signed is None:
        return
    info = next(item for item in core.state.versions if item.version == head)
    files = publisher.version_files(run.path, run.spec, head, info.weights)
    for entry in open_signed(signed, Manifest, run.spec.operator).files:
        path = files.get(entry.path, run.path / entry.path)
        try:
            with path.open("rb") as file:
                sound = hashlib.file_digest(file, "sha256").digest() == entry.sha256
        except OSError as error:
            raise RunFolderError(
                f"{path} of the newest version cannot be read ({error.strerror or error}): "
                f"restore {path.parent} from a backup, or copy that version's files from any node"
            ) from error
        if not sound:
            raise RunFolderError(
                f"{path} of the newest version is damaged: restore it from a backup, "
                "or copy it from any node that has that version"
            )


def push_receipts(hub: Hub, write: Write) -> None:
    for receipt in write.receipts:
        hub.send_receipt(receipt.node, receipt.signed)


def due_events(core: Core, sessions: Sessions, deadlines: Deadlines, clock_back: ClockBack) -> list[Event]:
    """Timeouts and deadlines that have passed, and what a clock that went back moves: recorded at once."""
    now = core.now_ms()
    sessions.turned_away.forget_all_but(core.state.leases, core.state.blocks.leases)
    return deadlines.due(now, sessions.turned_away.waits) + clock_back.due(now)


async def _catch_up(core: Core, due: Callable[[], list[Event]]) -> None:
    """What ended while no coordinator ran has ended before anybody asks for work, or hands some in."""
    try:
        if events := due():
            await core.record(events)
            unit_lines.overdue(events)
    except StorageError as error:
        log.error("%s", error)


async def tick(
    core: Core, sessions: Sessions, greeter: Greeter, due_now: Callable[[], list[Event]], spares: bool
) -> None:
    """Timeouts, deadlines, silent sessions, and now and then a signed tree head."""
    head_at = trio.current_time() + TREE_HEAD_EVERY_S
    signed_size = 0
    while True:
        await trio.sleep(TICK_S)
        sessions.end_silent()
        greeter.end_old()
        try:
            now, complete = core.now_ms(), scheduler.is_complete(core.state, core.settings.rollout)
            due = due_now()
            if spares or core.state.epochs:
                due += epoch_events(core.state, complete or not spares, core.audit_seed, now)
            if due:
                await core.record(due)
                unit_lines.overdue(due)
            if trio.current_time() >= head_at or len(core.ledger) - core.head[0] >= TREE_HEAD_EVERY:
                head_at = trio.current_time() + TREE_HEAD_EVERY_S
                if len(core.ledger) != signed_size:
                    signed_size = len(core.ledger)
                    await core.sign_tree_head()
        except StorageError as error:
            log.error("%s", error)
            await trio.sleep(SHOW_EVERY_S)


async def _show(core: Core, changed: Changed) -> None:
    """Tell viewers of every commit, and once a second of what no event records (who is live, bytes)."""
    while True:
        event = core.changed
        with trio.move_on_after(SHOW_EVERY_S):
            await event.wait()
        changed.set()


async def _end_soon(end: Callable[[], None]) -> None:
    """End once whoever asked for it has the reply."""
    await trio.sleep(REPLY_S)
    end()

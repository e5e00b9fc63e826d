"""``barnraise coordinator run DIR``: wire everything together, run until a signal, end cleanly."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import trio

from barnraise.coordinator.audit import Pressure
from barnraise.coordinator.collector import calm_collector
from barnraise.coordinator.folder import Run, open_run
from barnraise.coordinator.guards import GuardLimits
from barnraise.coordinator.newcomers import NewcomerLimits
from barnraise.coordinator.run_file import Keep
from barnraise.coordinator.scale import Spread
from barnraise.coordinator.server import run_coordinator
from barnraise.coordinator.verifier_pool import VerifierPool, automatic_verifiers, visible_accelerators
from barnraise.coordinator.web.gate import Access
from barnraise.coordinator.web.listen import Bind, open_listeners, urls_of
from barnraise.coordinator.workers import WorkerSetup
from barnraise.protocol.errors import BarnraiseError, MalformedError, RunFolderError
from barnraise.protocol.hello import Floor
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.log_keeping import LogFile, Sparing, logging_to
from barnraise.protocol.log_lines import JsonLines, message_of, tell_run
from barnraise.protocol.unit_context import UNITS
from barnraise.protocol.wire import printable

log = logging.getLogger(__name__)

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/4001",)
END_WITHIN_S = 1.8
_LOG_BYTES = 16 * 1024 * 1024
_LOGS_KEPT, _UNIT_LOGS_KEPT = 1, 3  # older files
_LONGEST_LINE = 2000


def run_from_folder(
    folder: Path,
    *,
    listen: Sequence[str] = DEFAULT_LISTEN,
    threads: int = 1,
    verifiers: int | None = None,
    mirrors: Sequence[str] = (),
    upload_copies: float = 0.0,
    relay_bytes_s: float = 0.0,
    verify_all: bool = False,
    replay: bool = False,
    http: Bind | None = None,
    admin: Access = "local",
    spread: Spread = Spread(),
    keep: Keep = Keep(),
    guards: GuardLimits = GuardLimits(),
    floor: Floor | None = None,
    newcomers: NewcomerLimits = NewcomerLimits(),
    out: Callable[[str], None] = partial(print, flush=True),
) -> int:
    """Serve the run in ``folder`` until SIGINT or SIGTERM; return the exit code (0).

    ``out`` is told short lines for a person: the address to join, who comes and
    goes, each published version. ``RUN/coordinator.log`` gets everything but units' stories, which
    are in ``RUN/units.log``, both as ``barnraise.protocol.log_lines`` says. ``verifiers`` is the
    number of verifier children, each with ``threads`` threads; 0 means as many as the machine's
    accelerators, or cores, can feed; None: one, or none where ``spread`` has some on other machines.
    ``mirrors`` are named in manifests (``barnraise.protocol.mirrors``),
    ``upload_copies`` limits the upload (``barnraise.coordinator.origin``), ``relay_bytes_s``
    is what the relay may carry (``run_coordinator``). ``verify_all``: everything is verified in
    full, however long the queue; else the audit policy may spare proven nodes' work under a backlog.
    ``replay``: trust no snapshot, and say whether they agree with the journal. ``http``: where to
    serve the page, the API and the metrics; None: nowhere. ``admin``: from where the run may be steered
    over it (``barnraise.coordinator.web.gate``). ``spread``: the learner's processes, and devices.
    ``keep``, ``guards``: what stays on the disk for a rollback, and when alarms are raised. ``floor``,
    ``newcomers``: as ``run_coordinator``.

    Raises:
        RunFolderError, KeyFileError: the folder cannot be used; the text says why.
        PeerError: an address is malformed or its port is in use.
        StorageError: the disk refuses.
    """
    with open_run(folder) as run, _logging(run.path, out):
        tell_run(run.run_id)
        try:
            pressure = None if verify_all else Pressure()
            serve = partial(
                _serve,
                run,
                tuple(listen),
                threads,
                verifiers,
                spread,
                http,
                admin=admin,
                mirrors=tuple(mirrors),
                upload_copies=upload_copies,
                relay_bytes_s=relay_bytes_s,
                pressure=pressure,
                replay=replay,
                keep=keep,
                guards=guards,
                floor=floor,
                newcomers=newcomers,
            )
            trio.run(_main, serve)
        except BaseExceptionGroup as group:
            error = _innermost(group)
            if isinstance(error, MalformedError):  # strangers' messages never get this far: it is our own
                raise RunFolderError(
                    f"{folder} holds something that this barnraise cannot read ({error}): it is damaged, or "
                    "another release made it; use that release, or restore the folder from a backup"
                ) from group
            raise error from group
    return 0


async def _main(serve: Callable[[], Awaitable[None]]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            async for number in signals:
                log.info("ending on %s", signal.Signals(number).name)
                _end_in_any_case()
                nursery.cancel_scope.cancel()
                return


async def _serve(
    run: Run,
    listen: Sequence[str],
    threads: int,
    verifiers: int | None,
    spread: Spread,
    http: Bind | None,
    *,
    admin: Access,
    mirrors: tuple[str, ...],
    upload_copies: float,
    relay_bytes_s: float,
    pressure: Pressure | None,
    replay: bool,
    keep: Keep,
    guards: GuardLimits,
    floor: Floor | None,
    newcomers: NewcomerLimits,
) -> None:
    from barnraise.coordinator.learner_child import ChildLearner
    from barnraise.coordinator.remote import Elsewhere

    setup = WorkerSetup(spec=run.spec, run_id=run.run_id, folder=str(run.path.resolve()), threads=threads)
    learner_at = Elsewhere(spread.learner_at, "learner", setup) if spread.learner_at else None
    async with open_libp2p(run.identity, listen) as network:
        async with trio.open_nursery() as nursery:
            listeners = None if http is None else open_listeners(http)
            serve = partial(
                run_coordinator,
                run,
                network,
                verifiers_of(setup, run.path / "verifier.log", verifiers, spread),
                ChildLearner(setup, run.path / "learner.log", spread.learner, learner_at),
                http=listeners,
                admin=admin,
                mirrors=mirrors,
                upload_copies=upload_copies,
                relay_bytes_s=relay_bytes_s,
                pressure=pressure,
                replay=replay,
                keep=keep,
                guards=guards,
                floor=floor,
                newcomers=newcomers,
                end=partial(os.kill, os.getpid(), signal.SIGTERM),
            )
            await nursery.start(serve)
            calm_collector()
            log.info("run %s, id %s", run.spec.name, run.run_id.hex())
            for address in network.addresses:
                log.info("join with: barnraise join %s", address)
            for url in urls_of(listeners or ()):
                log.info("page: %s", url)


def verifiers_of(setup: WorkerSetup, log_path: Path, count: int | None, spread: Spread) -> VerifierPool:
    """A pool of children, over the chosen devices or all, and of those elsewhere. All share one log.

    ``count`` of them here; 0 for as many as this machine can feed; None: one, but if there are
    others elsewhere, none.
    """
    from barnraise.coordinator.remote import Elsewhere
    from barnraise.coordinator.verifier_child import ChildVerifier

    far = [
        ChildVerifier(setup, log_path, at=Elsewhere(command, "verifier", setup))
        for command in spread.verifiers_at
    ]
    if count is None:
        count = 0 if far else 1
    elif count == 0:
        chosen = spread.verifier_devices
        count = len(chosen) if chosen else automatic_verifiers(setup.threads)
    devices = spread.verifier_devices or visible_accelerators() or ("",)
    near = [ChildVerifier(setup, log_path, devices[number % len(devices)]) for number in range(count)]
    return VerifierPool([*far, *near])


def _end_in_any_case() -> None:
    """Leave even if a peer or a child does not let go.

    Safe at any moment: what was acknowledged is on the disk, and children end with us.
    """
    timer = threading.Timer(END_WITHIN_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


class _Lines(logging.Handler):
    """Lines for a terminal: a run's name and nodes' words are strangers'."""

    def __init__(self, out: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.startswith("barnraise.coordinator")
        if not ours and record.levelno < logging.WARNING:
            return
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        with suppress(OSError):  # whoever read our lines is gone; the log file goes on
            self._out(f"{moment} {printable(message_of(record), _LONGEST_LINE)}")


@contextmanager
def _logging(folder: Path, out: Callable[[str], None]) -> Iterator[None]:
    """All of it to ``RUN/coordinator.log``, units' stories to ``RUN/units.log``, short lines to ``out``."""
    try:
        everybody = LogFile(folder / "coordinator.log", _LOG_BYTES, _LOGS_KEPT)
        units = LogFile(folder / "units.log", _LOG_BYTES, _UNIT_LOGS_KEPT)
    except OSError as error:
        raise RunFolderError(f"cannot write the logs in {folder}: {error.strerror or error}") from error
    for file in (everybody, units):
        file.setFormatter(JsonLines("coordinator"))
    lines, sparing = _Lines(out), Sparing()
    for handler in (everybody, lines):
        handler.addFilter(sparing)
    # No number of units, or refusals, must push out of coordinator.log what concerns everybody.
    with logging_to(everybody, lines), logging_to(units, of=UNITS, propagate=False):
        yield


def _innermost(error: BaseException) -> BaseException:
    """The one error a person should read; our own before any other."""
    found: list[BaseException] = []
    queue: list[BaseException] = [error]
    while queue:
        item = queue.pop(0)
        if isinstance(item, BaseExceptionGroup):
            queue.extend(item.exceptions)
        else:
            found.append(item)
    return next((item for item in found if isinstance(item, BarnraiseError)), found[0])

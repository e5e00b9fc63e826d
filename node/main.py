"""``barnraise join``: the daemon as a process. Key, lock, log, libp2p, engine child, control socket, signals.

Plain lines go to stdout, warnings and errors as well, and all of it into
``node.log`` (R24). The first Ctrl-C or SIGTERM leaves the run in an orderly way
(the lease goes back, within 2 s); a second one ends the process at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TextIO

import trio

from barnraise.node.chosen import settled
from barnraise.node.config import NodeConfig
from barnraise.node.consent import Approve, ask_viewers, forget_typed_ahead
from barnraise.node.daemon import Starting, run_node
from barnraise.node.handle import NodeHandle
from barnraise.node.key_name import settled_name
from barnraise.node.needs import Field
from barnraise.node.supervise import AFTER_CRASH, tell_ready
from barnraise.protocol.addresses import parse_address
from barnraise.protocol.control import serve_control
from barnraise.protocol.errors import BarnraiseError, PeerError, StorageError
from barnraise.protocol.identity import Identity, fingerprint, load_or_create
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.log_keeping import LogFile, logging_to
from barnraise.protocol.log_lines import JsonLines
from barnraise.protocol.wire import printable

log = logging.getLogger("barnraise.node")

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
LOG_BYTES, LOGS_KEPT = 5_000_000, 2


def run_from_config(config: NodeConfig) -> int:
    """Run a node until it ends; return the exit code (see ``run_node``; 2 bad input, 130 interrupted twice).

    Raises:
        KeyFileError: the key cannot be used.
        BarnraiseError: the data folder is in use or unusable, a port is taken.
    """
    for address in config.addresses:
        problem = _unusable(address)
        if problem:
            print(f"barnraise: {problem}", file=sys.stderr)
            return EXIT_BAD_INPUT
    config = replace(settled(config), after_crash=printable(os.environ.pop(AFTER_CRASH, ""), 300))
    with _locked(config), _logging(config):
        try:
            identity, created = load_or_create(config.key)
            config = _named(config, identity)
            _introduce(config, identity, created)
            try:
                return trio.run(_run, config, identity)
            except BaseExceptionGroup as group:
                raise _only(group) from group
        except BarnraiseError as error:
            log.error("%s", error, extra={"file_only": True})  # the caller puts it on the screen
            raise
        except Exception:
            log.exception("the node failed", extra={"file_only": True})
            raise


def _unusable(address: str) -> str:
    """Why ``address`` cannot be a coordinator's, or ``""``."""
    try:
        parse_address(address)
    except PeerError as error:
        return str(error)
    return ""


def _named(config: NodeConfig, identity: Identity) -> NodeConfig:
    """``config`` with the name that the key had before, if none was given now."""
    try:
        return replace(config, name=settled_name(config.key, identity.peer_id, config.name))
    except StorageError as error:
        log.warning("the name holds for now, the next start needs it again: %s", error)
        return config


def _introduce(config: NodeConfig, identity: Identity, created: bool) -> None:
    made = "made a new key" if created else "key"
    log.info(
        "%s %s (%s); it is your credit: 'barnraise key export' makes a copy",
        made,
        config.key,
        fingerprint(identity.public_key),
    )
    log.info("this node is %s, its data lies in %s", identity.peer_id, config.data)


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error inside nested groups of one, else the group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _run(config: NodeConfig, identity: Identity) -> int:
    from barnraise.node.engine_child import NICE, ChildEngine
    from barnraise.node.machine import Machine
    from barnraise.node.presence_sources import open_sources
    from barnraise.node.sleep import sleep_clock

    code = EXIT_INTERRUPTED
    log_path = config.data / "engine.log"
    engine = ChildEngine(threads=config.threads, log=log_path, nice=NICE, engine=config.engine)
    async with open_libp2p(identity, config.listen, circuits=True) as network, trio.open_nursery() as nursery:

        async def live(task_status: Starting) -> None:
            nonlocal code
            code = await run_node(
                config,
                network,
                engine,
                identity,
                lambda: time.time_ns() // 1_000_000,
                random.SystemRandom(),
                approve=_asker(config),
                sensors=Machine(open_sources()),
                asleep=sleep_clock(),
                task_status=task_status,
            )
            nursery.cancel_scope.cancel()

        handle: NodeHandle = await nursery.start(live)
        await nursery.start(
            serve_control, config.control_path, handle.get_state, handle.commands, handle.changed
        )
        nursery.start_soon(_obey_signals, handle, nursery.cancel_scope)
        tell_ready()
    return code


async def _obey_signals(handle: NodeHandle, scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        asked = False
        async for number in signals:
            if asked:
                log.warning("ending at once; the lease at work goes back at the next start")
                scope.cancel()
                return
            asked = True
            log.info("%s: leaving (once more ends at once)", signal.Signals(number).name)
            if number == signal.SIGINT:
                await handle.commands["leave"]({})
            else:
                handle.end()


def _asker(config: NodeConfig) -> Approve | None:
    """Whom to ask before joining: the person at the terminal, else viewers; None: yes was said before."""
    if config.assume_yes:
        return None
    if config.background or config.json_lines or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return ask_viewers

    async def ask(fields: list[Field]) -> bool:
        width = max(len(label) for label, _ in fields)
        for label, text in fields:
            print(f"  {label:{width}}  {text}")
        question = "Join this run? [Y/n] "
        forget_typed_ahead()
        try:
            answer = await trio.to_thread.run_sync(input, question, abandon_on_cancel=True)  # type: ignore[call-arg]
        except EOFError:
            return False
        return answer.strip().lower() in ("", "y", "yes")

    return ask


@contextlib.contextmanager
def _locked(config: NodeConfig) -> Iterator[None]:
    """Hold the data folder: two daemons in one would spoil each other's files."""
    try:
        config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = config.lock_path.open("a+")
    except OSError as error:
        raise StorageError(f"cannot use the data folder {config.data}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            pid = file.read(20).strip()
            raise StorageError(
                f"another node{f' (process {pid})' if pid else ''} uses {config.data}: "
                "stop it, or choose another folder with --data (and another --key)"
            ) from None
        with contextlib.suppress(OSError):  # a full disk; whose lock it is then stays unsaid
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), f"{os.getpid()}\n".encode(), 0)
        yield


class _Lines(logging.Formatter):
    """``12:03:10 text`` for people, one JSON object per line for programs."""

    def __init__(self, json_lines: bool) -> None:
        super().__init__()
        self._json = json_lines

    def format(self, record: logging.LogRecord) -> str:
        text = printable(record.getMessage(), 2000)
        if self._json:
            level = record.levelname.lower()
            data = getattr(record, "data", {})
            return json.dumps({"at_ms": round(record.created * 1000), "level": level, "text": text, **data})
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {mark}{text}"


class _Screen(logging.StreamHandler[TextIO]):
    """stdout, as long as somebody reads it: a closed pipe never stops the node."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _on_screen(record: logging.LogRecord) -> bool:
    if getattr(record, "file_only", False):
        return False
    return record.name == "barnraise.node" or record.levelno >= logging.WARNING


@contextlib.contextmanager
def _logging(config: NodeConfig) -> Iterator[None]:
    screen = _Screen(sys.stdout)
    screen.setFormatter(_Lines(config.json_lines))
    screen.addFilter(_on_screen)
    try:
        file = LogFile(config.log_path, LOG_BYTES, LOGS_KEPT)
    except OSError as error:
        raise StorageError(f"cannot write the log {config.log_path}: {error.strerror or error}") from error
    file.setFormatter(JsonLines("node"))
    handlers = [file] if config.background else [screen, file]
    with logging_to(*handlers, propagate=False):  # libraries give the root logger handlers of their own
        yield

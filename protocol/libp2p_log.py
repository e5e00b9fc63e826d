"""libp2p's log: into the program's files, never onto its terminal."""

from __future__ import annotations

import logging
from typing import Any, cast

from libp2p.network.connection import swarm_connection
from multiaddr.resolvers import dns

from barnraise.protocol.log_keeping import LogFile


class _ToFiles(logging.Handler):
    """Passes records on to the log files of the program, never to its terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        # A filter below may have lowered its level, and a module may have given its own logger a level.
        least = logging.getLogger("barnraise").getEffectiveLevel()
        if record.levelno < (least if hasattr(record, "lowered") else max(least, logging.WARNING)):
            return
        for name in (None, "barnraise"):
            for handler in logging.getLogger(name).handlers:
                is_file = isinstance(handler, logging.FileHandler | LogFile)
                if is_file and record.levelno >= handler.level:
                    handler.handle(record)


def _peers_doing(record: logging.LogRecord) -> bool:
    """What the swarm calls an error is what some peer did, be it a scanner that hung up: nobody's alarm."""
    record.levelno, record.levelname, record.lowered = logging.DEBUG, "DEBUG", True
    return True


def quiet_libp2p() -> None:
    """Keep libp2p's records out of the terminal; the program's log files get them."""
    for name in ("libp2p", "async_service", "multiaddr"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        if not any(isinstance(handler, _ToFiles) for handler in logger.handlers):
            logger.addHandler(_ToFiles())
    swarm = logging.getLogger("libp2p.network.swarm")  # its failures are raised, too, and told by who dialled
    if _peers_doing not in swarm.filters:
        swarm.addFilter(_peers_doing)
    # These modules call logging.debug(), which gives the root logger a handler on stderr unasked.
    cast(Any, swarm_connection).logging = logging.getLogger("libp2p.network.connection")
    cast(Any, dns).logging = logging.getLogger("multiaddr.resolvers")

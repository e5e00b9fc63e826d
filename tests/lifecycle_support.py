"""A daemon on the in-memory network that has to be asked first, as one in the background is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from daemon_support import Node, node

from barnraise.node.consent import Approve, ask_viewers
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm


@asynccontextmanager
async def asked(
    swarm: MemorySwarm,
    folder: Path,
    address: str,
    identity: Identity,
    approve: Approve | None = ask_viewers,
    **settings: Any,
) -> AsyncIterator[Node]:
    """A daemon, cancelled (as by kill -9, as far as the disk is concerned) on leaving."""
    places = {"data": folder, "key": folder / "key"}
    async with node(
        swarm, folder, address, identity=identity, approve=approve, **places, **settings
    ) as started:
        yield started

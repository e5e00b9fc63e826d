"""A daemon on the in-memory network that has to be asked first, as one in the background is."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from test_node_daemon import EPOCH_MS, Node, ScriptedEngine

from barnraise.node.config import NodeConfig
from barnraise.node.consent import Approve, ask_viewers
from barnraise.node.daemon import run_node
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
    config = NodeConfig(address=address, data=folder, key=folder / "key", name="n", **settings)
    engine = ScriptedEngine()
    async with swarm.network(identity.peer_id) as network, trio.open_nursery() as nursery:
        started: list[Node] = []

        async def live(task_status: Any) -> None:
            code = await run_node(
                config,
                network,
                engine,
                identity,
                lambda: EPOCH_MS + round(trio.current_time() * 1000),
                random.Random(7),
                approve=approve,
                task_status=task_status,
            )
            started[0].exit_codes.append(code)
            started[0].ended_at.append(trio.current_time())

        started.append(Node(await nursery.start(live), engine, config, identity))
        yield started[0]
        nursery.cancel_scope.cancel()

"""A transfer core with peers that say what a test tells them."""

from __future__ import annotations

import random
from typing import Any

from treecast_sim import SHARD

from barnraise.protocol.bitmaps import to_bytes, to_mask
from barnraise.protocol.transfer import Transfer
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree_effects import (
    Effects,
    Send,
    StartSend,
)
from barnraise.protocol.tree_messages import (
    Bitmap,
    Want,
)

SIZES = [SHARD] * 8


def node(*peers: str, have: tuple[int, ...] = (), **options: Any) -> Transfer:
    core = Transfer(random.Random(1), TransferConfig(**options))
    for peer in peers:
        core.link_up(peer, 0.0)
    core.want(1, SIZES, 0.0)
    for index in have:
        core.arrivals.verified(None, 1, index, 0.0)
    return core


def says(core: Transfer, peer: str, indices: tuple[int, ...], now: float = 0.0) -> Effects:
    return core.on_message(peer, Bitmap(version=1, bits=to_bytes(to_mask(indices)), ask=False), now)


def wants(core: Transfer, peer: str, indices: tuple[int, ...], now: float = 0.0, **more: Any) -> Effects:
    message = Want(version=1, indices=indices, busy=more.get("busy", ()), starved=more.get("starved", False))
    return core.on_message(peer, message, now)


def orders(effects: Effects) -> dict[str, set[int]]:
    return {
        effect.peer: set(effect.message.indices)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Want)
    }


def starts(effects: Effects) -> list[StartSend]:
    return [effect for effect in effects if isinstance(effect, StartSend)]


def comes(core: Transfer, peer: str, index: int, begin: float, seconds: float) -> None:
    """A whole shard of ``SHARD`` bytes from ``peer``, in even pieces, ``seconds`` long; time is kept."""
    core.arrivals.incoming(peer, 1, index, begin)
    for step in range(1, 11):
        core.arrivals.progress(peer, SHARD // 10, begin + seconds * step / 10)
        assert not core.on_time(begin + seconds * step / 10)
    core.arrivals.received(peer, 1, index, begin + seconds)
    core.arrivals.verified(peer, 1, index, begin + seconds)

"""How many streams of one kind may be served at once, of everybody and of one peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

import trio

from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.network import Handler, Stream


def with_slots(
    serve: Callable[[Stream], Awaitable[None]],
    streams: int,
    per_peer: int,
    allow: Callable[[str], bool] = lambda peer_id: True,
) -> Handler:
    """A handler that serves at most ``streams`` at once, ``per_peer`` of one peer; others are reset.

    ``allow(peer_id)`` false resets the stream, too. So does a ``BarnraiseError`` or a timeout of ``serve``.
    """
    taken: Counter[str] = Counter()

    async def handle(stream: Stream) -> None:
        peer_id = stream.peer_id
        if taken.total() >= streams or taken[peer_id] >= per_peer or not allow(peer_id):
            await stream.reset()
            return
        taken[peer_id] += 1
        try:
            await serve(stream)
        except (BarnraiseError, trio.TooSlowError):
            await stream.reset()
        finally:
            taken[peer_id] -= 1
            if not taken[peer_id]:
                del taken[peer_id]

    return handle

"""What a viewer is shown of a node's part in the tree: plain values for the state tree."""

from __future__ import annotations

from typing import Any

from barnraise.protocol.gossip import Gossiper
from barnraise.protocol.tree_index import files_list, patches_list

SHOWN_BANS = 64


def tree_state(gossiper: Gossiper, now: float) -> dict[str, Any]:
    """Neighbours, parent, versions. Rates in bytes per second, sizes in bytes.

    ``sending`` and ``receiving`` name a version, ``version`` is the newest of ours that it
    says it has whole (None: none); ``parent`` is who brought the newest head
    (None: it is our own, or came another way). ``versions``: shards here, of how many, by
    what (``files``, ``patch``, ``opening``), and what moved of the version down the tree.
    """
    core = gossiper.core
    sending, receiving = core.transfer.sending(), core.transfer.receiving()
    neighbours = []
    for peer in core.views.active:
        link = gossiper.links.get(peer)
        neighbours.append(
            {
                "peer": peer,
                "way": gossiper.network.way(peer),
                "eager": peer in core.tree.eager,
                "version": _version_of(gossiper, peer),
                "sending": gossiper.lists.version(sending[peer][0]) if peer in sending else None,
                "receiving": gossiper.lists.version(receiving[peer][0]) if peer in receiving else None,
                "rate_out": 0 if link is None else round(link.sent.rate(now)),
                "rate_in": 0 if link is None else round(link.received.rate(now)),
                "bytes_out": 0 if link is None else link.sent.total,
                "bytes_in": 0 if link is None else link.received.total,
            }
        )
    newest = gossiper.heads.newest()
    return {
        "neighbours": neighbours,
        "parent": None if newest is None else core.tree.parent(newest),
        "eager": sum(1 for neighbour in neighbours if neighbour["eager"]),
        "lazy": sum(1 for neighbour in neighbours if not neighbour["eager"]),
        "known": len(core.views.passive),
        "upload": round(core.transfer.upload),
        "fan_out": core.transfer.fan_out,
        "banned": [
            {"peer": peer, "reason": reason} for peer, reason in list(gossiper.banned.items())[-SHOWN_BANS:]
        ],
        "versions": [
            {
                "version": gossiper.lists.version(number),
                "what": _what(gossiper, number),
                "have": core.transfer.bitmap(number).bit_count(),
                "of": len(shards),
                "bytes_out": gossiper.lists.sent[gossiper.lists.version(number)],
                "bytes_in": gossiper.lists.received[gossiper.lists.version(number)],
            }
            for number, shards in sorted(gossiper.lists.shards.items(), reverse=True)
        ],
    }


def _version_of(gossiper: Gossiper, peer: str) -> int | None:
    announced = gossiper.core.transfer.announced
    versions = (gossiper.lists.version(number) for number in gossiper.lists.shards)
    whole = (
        one for one in versions if announced(peer, files_list(one)) or announced(peer, patches_list(one))
    )
    return max(whole, default=None)


def _what(gossiper: Gossiper, number: int) -> str:
    if number in gossiper.lists.opened:
        return "opening"
    return "files" if number == files_list(gossiper.lists.version(number)) else "patch"

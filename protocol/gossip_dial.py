"""From a contact to a control stream, with a time limit on every step."""

from __future__ import annotations

import trio

from barnraise.protocol.errors import PeerError
from barnraise.protocol.network import Network, Stream
from barnraise.protocol.tree_messages import TREE_PROTOCOL, Contact

DIAL_S = 15.0  # for all addresses together
OPEN_S = 10.0


async def open_control(network: Network, contact: Contact) -> Stream:
    """Open a control stream to ``contact``, dialling it unless it is connected.

    Raises:
        PeerError: unreachable, too slow, somebody else, or it takes no part in the tree.
    """
    with trio.move_on_after(DIAL_S):
        await _reach(network, contact)
        with trio.move_on_after(OPEN_S):
            return await network.open_stream(contact.peer_id, TREE_PROTOCOL)
    raise PeerError(f"{contact.peer_id} did not answer in time")


async def _reach(network: Network, contact: Contact) -> None:
    if network.connected(contact.peer_id):
        return
    reasons = []
    for address in contact.addresses:
        try:
            if await network.connect(address) == contact.peer_id:
                return
            reasons.append(f"{address}: somebody else answered")
        except PeerError as error:
            reasons.append(f"{address}: {error}")
    if reasons:
        raise PeerError("; ".join(reasons))

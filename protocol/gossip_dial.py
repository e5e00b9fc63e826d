"""From a contact to a control stream, with limits on time and on whom strangers may have dialled.

Contacts are hearsay: a neighbour may name any host as that of a newcomer. So nobody's
host is tried often in vain, whatever number of nodes is said to be there. One success
at a host shows that nodes live there, and clears what was held against it.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from barnraise.protocol.addresses import household_of
from barnraise.protocol.errors import PeerError
from barnraise.protocol.network import Network, Stream
from barnraise.protocol.reachability import Quota
from barnraise.protocol.tree_messages import TREE_PROTOCOL, Contact

DIAL_S = 15.0  # for all addresses together
OPEN_S = 10.0
FAILED_PER_HOST = 16  # in 5 minutes, without a success
IN_ALL = 256  # dials in 5 minutes: a node needs a handful of neighbours


class Dialler:
    """Opens control streams over ``network``. The limits do not hold for ``trusted`` peer ids."""

    def __init__(self, network: Network, trusted: Iterable[str] = ()) -> None:
        self._network = network
        self._trusted = frozenset(trusted)
        self._hosts, self._everybody = Quota(FAILED_PER_HOST), Quota(IN_ALL)

    async def open(self, contact: Contact) -> Stream:
        """Open a control stream to ``contact``, dialling it unless it is connected.

        Raises:
            PeerError: unreachable, too slow, somebody else, at a host where too many
                dials failed, or it takes no part in the tree.
        """
        with trio.move_on_after(DIAL_S):
            await self._reach(contact)
            with trio.move_on_after(OPEN_S):
                return await self._network.open_stream(contact.peer_id, TREE_PROTOCOL)
        raise PeerError(f"{contact.peer_id} did not answer in time")

    async def _reach(self, contact: Contact) -> None:
        if self._network.connected(contact.peer_id):
            return
        reasons = []
        for address in dict.fromkeys(contact.addresses):
            host = household_of(address)
            if contact.peer_id not in self._trusted:
                now = trio.current_time()
                if max(self._hosts.wait(host, now), self._everybody.wait("", now)) > 0:
                    reasons.append(f"{address}: too many dials failed lately")
                    continue
                # Counted before, so that many at once are not too many; taken back if it works.
                self._hosts.spend(host, now)
                self._everybody.spend("", now)
            try:
                if await self._network.connect(address) == contact.peer_id:
                    self._hosts.forget(host)
                    return
                reasons.append(f"{address}: somebody else answered")
            except PeerError as error:
                reasons.append(f"{address}: {error}")
        if reasons:
            raise PeerError("; ".join(reasons))

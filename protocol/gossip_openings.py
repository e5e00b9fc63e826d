"""How openings spread: along eager links, each that is news to the next node once.

An opening that is lost costs nobody more than time: the next one, or the manifest,
says it all again. So there is neither an announcement by id nor a graft for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.opening import Opening, Openings, opening_list
from barnraise.protocol.shards import off_loop
from barnraise.protocol.tree_messages import Opened

if TYPE_CHECKING:
    from barnraise.protocol.gossip import Gossiper

_INLINE = 64 * 1024  # bytes of an opening that are checked on the event loop: under 1 ms

CheckOpening = Callable[[Signed], Opening]
"""Gives the opening inside a message, or raises SignatureError or MalformedError."""


class OpeningTraffic:
    """The openings of one ``Gossiper``, which heeds none without ``check``.

    Attributes:
        on_opening: told of each that is news, checked: fetch its shards or not.
        on_close: told when the manifest has come, what was opened, and whether the two
            agree. The list of the opening is left already.
    """

    def __init__(self, owner: Gossiper, check: CheckOpening | None) -> None:
        self.on_opening: Callable[[Opening], None] = lambda opening: None
        self.on_close: Callable[[Opening, Manifest, bool], None] = lambda opening, manifest, agrees: None
        self._owner = owner
        self._check = check
        self._openings = Openings()

    @property
    def open(self) -> Opening | None:
        """The opening in force."""
        return self._openings.opening

    def publish(self, signed: Signed, opening: Opening) -> None:
        """Send an opening of our own down the tree and serve what it names."""
        news, fault = self._openings.take(signed, opening)
        if fault:
            self._owner.report("opening", "", fault)
        if news:
            self._owner.lists.open(opening, None)
            self.offer()

    async def believe(self, peer: str, message: Opened) -> None:
        """Check an opening that ``peer`` sent, and pass it on if it is news.

        Raises:
            SignatureError, MalformedError: it is not to be believed.
        """
        if self._check is None or message.opening == self._openings.signed:
            return
        check, signed = self._check, message.opening
        size = len(signed.payload) if len(signed.payload) > _INLINE else 0
        opening = await off_loop(size, lambda: check(signed))
        before = self._openings.opening
        news, fault = self._openings.take(signed, opening, peer)
        if fault:
            self._owner.report("opening", "", fault)  # signed by the run's key: no neighbour's doing
        if not news:
            return
        if before is not None and opening_list(before) != opening_list(opening):
            self._owner.lists.close(opening_list(before))
        self.offer()
        self.on_opening(opening)

    def offer(self) -> None:
        """Pass the opening in force on to eager neighbours that were not told of it."""
        signed = self._openings.signed
        if signed is None:
            return
        for peer in self._openings.due(self._owner.core.tree.eager):
            link = self._owner.links.get(peer)
            if link is not None and not link.post(Opened(opening=signed)):
                self._owner.control.end(link, "it does not read what it is sent")

    def published(self, manifest: Manifest) -> None:
        """A checked manifest is known: what was opened up to it is over."""
        opening, fault = self._openings.published(manifest)
        if opening is None:
            return
        self._owner.lists.close(opening_list(opening))
        if fault:
            self._owner.report("opening", "", f"{fault}; the manifest counts")
        self.on_close(opening, manifest, not fault)

"""Signed heads that were checked: each is checked once, however many neighbours send it."""

from __future__ import annotations

from collections.abc import Callable

from barnraise.protocol.envelope import content_id
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.shards import off_loop
from barnraise.protocol.tree_messages import Gossip

_INLINE = 64 * 1024  # bytes of a manifest that are checked on the event loop: under 1 ms


class Heads:
    """The newest ``most`` heads believed so far. ``check`` is ``Gossiper``'s ``check_head``."""

    def __init__(self, check: Callable[[Signed], Manifest], most: int) -> None:
        self._check = check
        self._most = most
        self._known: dict[bytes, tuple[Signed, Manifest]] = {}  # by content id

    async def believe(self, message: Gossip) -> None:
        """Check the head inside a message; one that was checked before costs a comparison.

        Raises:
            SignatureError, MalformedError: it is not to be believed.
        """
        head = message.head
        if self.manifest_of(head) is None:
            size = len(head.payload) if len(head.payload) > _INLINE else 0
            manifest = await off_loop(size, lambda: self._check(head))
            self.remember(head, manifest)
        known = self.manifest_of(head)
        if known is not None and known.version != message.version:
            raise MalformedError(f"a head of version {known.version} came as {message.version}")

    def remember(self, signed: Signed, manifest: Manifest) -> None:
        """Note a head that was checked elsewhere."""
        self._known[content_id(signed)] = (signed, manifest)
        while len(self._known) > self._most:
            del self._known[min(self._known, key=lambda known: self._known[known][1].version)]

    def manifest_of(self, head: Signed) -> Manifest | None:
        """The manifest inside a head that was checked, signature and all; None for any other."""
        known = self._known.get(content_id(head))
        return known[1] if known is not None and known[0] == head else None

    def newest(self) -> bytes | None:
        """The content id of the newest version's head."""
        return max(self._known, key=lambda known: self._known[known][1].version, default=None)

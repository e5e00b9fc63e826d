"""What the treecast state machines want done: the outputs of ``views``, ``tree`` and ``transfer``.

Each method that takes an event returns a list of these, to be carried out in order.
Carrying them out never calls back into the machine; results come in as later events.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from barnraise.protocol.messages import Message, Signed
from barnraise.protocol.tree_messages import Contact


class Effect(Struct, frozen=True):
    """Base of every effect."""


class Send(Effect, frozen=True):
    """Send ``message`` on the control stream to ``peer``, which is connected; drop it if no longer."""

    peer: str
    message: Message


class Connect(Effect, frozen=True):
    """Dial ``contact``; answer with ``connected`` or ``connect_failed``. At once if already connected."""

    contact: Contact


class Disconnect(Effect, frozen=True):
    """The overlay needs the connection to ``peer`` no longer (others may). Flush what was sent first."""

    peer: str


class LinkUp(Effect, frozen=True):
    """``peer`` is now in the active view: tell ``tree`` and ``transfer``."""

    peer: str


class LinkDown(Effect, frozen=True):
    """``peer`` left the active view: tell ``tree`` and ``transfer``."""

    peer: str


class Deliver(Effect, frozen=True):
    """A head seen for the first time, from ``peer`` (already checked by the caller)."""

    peer: str
    version: int
    head: Signed


class LinkEager(Effect, frozen=True):
    """The link to ``peer`` became eager or lazy: tell ``transfer``."""

    peer: str
    eager: bool


class StartSend(Effect, frozen=True):
    """Stream this shard to ``peer``; answer with ``sent`` or ``send_failed``."""

    peer: str
    version: int
    index: int


class StopSend(Effect, frozen=True):
    """Stop streaming this shard to ``peer``; no answer is expected, a late one is harmless."""

    peer: str
    version: int
    index: int


class StopReceive(Effect, frozen=True):
    """Forget what arrived of this shard from ``peer`` and ignore the rest (a ``Cancel`` was sent)."""

    peer: str
    version: int
    index: int


class Demote(Effect, frozen=True):
    """``peer`` is too slow to be an eager child: call ``tree.demote``."""

    peer: str


class Drop(Effect, frozen=True):
    """``peer`` spent its strikes: call ``views.drop``; it may come back later."""

    peer: str
    reason: str


class Ban(Effect, frozen=True):
    """Refuse ``peer`` for the rest of the run: call ``views.ban``, close its connection."""

    peer: str
    reason: str


class Report(Effect, frozen=True):
    """For the log and the coordinator. ``code``: corrupt, timeout, starved, lied, unasked or flood."""

    code: str
    peer: str
    version: int
    index: int
    text: str


class Complete(Effect, frozen=True):
    """Every shard of ``version`` is here and verified."""

    version: int


Effects: TypeAlias = list[Effect]

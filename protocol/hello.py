"""Version exchange (R20): before anything else, each side learns whether the other can be understood.

Runs on its own protocol id, which carries no version. ``Hello`` and ``HelloReply``
never change, so that any two versions, however far apart, can tell a person which
side is old. The rule: equal majors work together; a minor only adds. A coordinator may ask for
more than that, after a time in which it says so (``Floor``).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import trio

from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError, VersionError
from barnraise.protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, HelloReply
from barnraise.protocol.network import Stream
from barnraise.protocol.wire import MessageReader, printable, send_message

TIMEOUT_S = 10.0
_LAST_MS = 250_000_000_000_000  # in the year 9892
UPDATE_COMMAND = "pip install --upgrade barnraise"


@dataclass(frozen=True)
class Compatibility:
    """Whether two sides can work together, told to each: ``for_us`` locally, ``for_them`` in the reply."""

    compatible: bool
    for_us: str
    for_them: str


@dataclass(frozen=True, slots=True)
class Floor:
    """The oldest minor of our own major that is served.

    ``from_ms``: milliseconds since the Unix epoch; before that older ones are served and told (the
    grace period).
    """

    minor: int
    from_ms: int = 0

    def judge(self, ours: Hello, theirs: Hello, now_ms: int) -> tuple[bool, str]:
        """Whether ``theirs``, of our major, is served now, and what to tell it; "": nothing."""
        if theirs.minor >= self.minor:
            return True, ""
        need = f"{ours.major}.{self.minor} or newer: {UPDATE_COMMAND}"
        if now_ms < self.from_ms:
            day = datetime.fromtimestamp(min(self.from_ms, _LAST_MS) / 1000, UTC)
            when = f"from {day:%Y-%m-%d %H:%M} UTC on this run needs"
            return True, f"your side will be too old: it speaks {_speaks(theirs)}; {when} {need}"
        kept = "credit and receipts stay as they are, and work that was not sent yet is sent after that"
        return False, f"your side is too old: it speaks {_speaks(theirs)}, this run needs {need}; {kept}"


@lru_cache(maxsize=1)
def our_hello() -> Hello:
    """What this installation speaks."""
    try:
        software = f"barnraise {version('barnraise')}"
    except PackageNotFoundError:  # run from a source tree that was never installed
        software = "barnraise (source)"
    return Hello(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, software=software[:64])


def compatible(ours: Hello, theirs: Hello | HelloReply) -> Compatibility:
    """Compare two versions; the texts say which side is old, what it needs, and how to update."""
    if ours.major == theirs.major:
        return Compatibility(True, "", "")
    older, newer = ("we", theirs) if ours.major < theirs.major else ("they", ours)
    need = f"it needs {newer.major}.x ({printable(newer.software, 64)}): {UPDATE_COMMAND}"
    us, them = _speaks(ours), _speaks(theirs)
    if older == "we":
        return Compatibility(
            False,
            f"this side is too old: it speaks {us}, the other side {them}; {need}",
            f"the other side is too old: it speaks {us}, you speak {them}; {need} must be run there",
        )
    return Compatibility(
        False,
        f"the other side is too old: it speaks {them}, we speak {us}; {need} must be run there",
        f"your side is too old: it speaks {them}, the other side {us}; {need}",
    )


async def say_hello(stream: Stream, ours: Hello | None = None, *, timeout_s: float = TIMEOUT_S) -> HelloReply:
    """Dialer's part: send our version, read theirs, close the stream.

    ``ours``: what we speak, instead of what this installation does. A reply that is compatible may
    carry a message, too: a time from which on we would be too old.

    Raises:
        VersionError: we cannot work together; the text says who must update and how.
        PeerError: no answer in time, or the stream broke.
        MalformedError: the answer is not a ``HelloReply``.
    """
    ours = ours or our_hello()
    try:
        with trio.fail_after(timeout_s):
            await send_message(stream, ours)
            reply = await MessageReader(stream, (HelloReply,)).receive()
            await stream.close()
    except trio.TooSlowError:
        await stream.reset()
        raise PeerError(
            f"no answer to our version within {timeout_s:.0f} s: is it a Barnraise peer?"
        ) from None
    except BarnraiseError:
        await stream.reset()
        raise
    if reply is None:
        raise PeerError("the other side closed the connection instead of telling its version")
    assert isinstance(reply, HelloReply)
    verdict = compatible(ours, reply)
    if not verdict.compatible:
        raise VersionError(verdict.for_us)
    if not reply.compatible:  # a newer minor may know that it cannot work with ours
        raise VersionError(f"the other side refuses our version: {printable(reply.message, 500)}")
    return reply


async def answer_hello(stream: Stream, *, timeout_s: float = TIMEOUT_S) -> None:
    """Listener's part, usable as a handler of ``HELLO_PROTOCOL``. Incompatibility is answered, not raised.

    Raises:
        PeerError: nothing came in time, or the stream broke.
        MalformedError: what came is not a ``Hello``.
    """
    await answer_as(stream, our_hello(), timeout_s=timeout_s)


async def answer_as(
    stream: Stream,
    ours: Hello,
    floor: Floor | None = None,
    now_ms: int = 0,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Hello:
    """``answer_hello`` of one that speaks ``ours`` and serves nobody below ``floor``; returns theirs.

    Raises:
        PeerError, MalformedError: as ``answer_hello``.
    """
    try:
        with trio.fail_after(timeout_s):
            theirs = await MessageReader(stream, (Hello,)).receive()
            if theirs is None:
                raise MalformedError("the stream was closed without a version")
            assert isinstance(theirs, Hello)
            verdict = compatible(ours, theirs)
            served, told = verdict.compatible, verdict.for_them
            if served and floor is not None:
                served, told = floor.judge(ours, theirs, now_ms)
            reply = HelloReply(
                major=ours.major,
                minor=ours.minor,
                software=ours.software,
                compatible=served,
                message=told[:500],
            )
            await send_message(stream, reply)
            return theirs
    except trio.TooSlowError:
        raise PeerError(f"no version came within {timeout_s:.0f} s") from None


def _speaks(hello: Hello | HelloReply) -> str:
    return f"protocol {hello.major}.{hello.minor} ({printable(hello.software, 64)})"

"""Can this machine reach a coordinator, can others reach it, and do the clocks agree? Joins nothing.

A key made for the occasion is used: a node that runs with the volunteer's own key is not
disturbed, and nothing is left in anybody's books.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from barnraise.node.clock import SKEW_WARNING_MS, duration
from barnraise.node.findings import Finding
from barnraise.node.link import dial, greet
from barnraise.protocol.errors import BarnraiseError, PeerError, RefusedError, VersionError
from barnraise.protocol.messages import HeartbeatReply, HeartbeatRequest
from barnraise.protocol.network import Network
from barnraise.protocol.reachability import ask_reach, judge, reason_of
from barnraise.protocol.session import Session

ANSWER_S = 15.0


async def check_network(
    network: Network, address: str, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
) -> list[Finding]:
    """Dial, compare versions, ask for the time, and to be dialled back; each step's outcome is a finding.

    Args:
        address: a coordinator's multiaddr with its ``/p2p/`` id.
        now_ms: this machine's wall clock, ms since the epoch.
    """
    began = trio.current_time()
    try:
        peer, _ = await dial(network, [address])
    except BarnraiseError as error:
        cure = "compare the address with the operator's; is TCP to that port allowed out of here?"
        return [Finding("network", "problem", f"cannot reach {error}", cure)]
    text = f"reached {address} in {(trio.current_time() - began) * 1000:.0f} ms"
    try:
        session = await greet(network, peer)
    except VersionError as error:
        return [Finding("network", "problem", f"{text}, but {error}")]
    except BarnraiseError as error:
        cure = "it answers, but not as a coordinator does: compare the address with the operator's"
        return [Finding("network", "problem", f"{text}, but {error}", cure)]
    findings = [Finding("network", "ok", f"{text}; its protocol and ours go together")]
    findings.append(await _compare_clocks(session, now_ms))
    findings.append(await _reach(network, peer))
    return findings


async def _compare_clocks(session: Session, now_ms: Callable[[], int]) -> Finding:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run)
        try:
            sent, started = now_ms(), trio.current_time()
            reply = await session.request(
                lambda number: HeartbeatRequest(id=number, have_version=-1, state="doctor"),
                HeartbeatReply,
                timeout_s=ANSWER_S,
            )
            trip = trio.current_time() - started
            return judge_skew(reply.now - sent - round(trip * 500), round(trip * 1000))
        except RefusedError:
            return Finding("skew", "note", "the coordinator is too old to tell its time before a node joins")
        except BarnraiseError as error:
            return Finding("skew", "warning", f"the coordinator did not tell its time: {error}")
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
                await session.close()
            nursery.cancel_scope.cancel()


def judge_skew(offset_ms: int, trip_ms: int) -> Finding:
    """``offset_ms``: the coordinator's clock minus ours, known to half of the round trip ``trip_ms``."""
    size, side = duration(abs(offset_ms)), "behind" if offset_ms > 0 else "ahead of"
    text = f"this clock is {size} {side} the coordinator's (measured to {max(1, trip_ms // 2)} ms)"
    if abs(offset_ms) <= max(1000, trip_ms):
        return Finding("skew", "ok", f"this clock and the coordinator's agree to {abs(offset_ms)} ms")
    if abs(offset_ms) > SKEW_WARNING_MS:
        return Finding("skew", "warning", text, "set the clock: timedatectl set-ntp true")
    return Finding("skew", "ok", f"{text}; deadlines are judged with the difference")


async def _reach(network: Network, peer: str) -> Finding:
    try:
        reach = judge(network.addresses, await ask_reach(network, peer))
    except PeerError as error:
        reach = reason_of(error)
    return Finding(
        "reach", "ok" if reach.kind == "direct" else "note", f"{reach.kind}: {reach.reason}", reach.cure
    )

"""What may be asked of the run over HTTP and what comes back: checked, and described, by these structs.

The words are those of the control socket (``barnraise.coordinator.commands``).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, to_builtins

from barnraise.coordinator import admission, bans, draining
from barnraise.coordinator.steering import MOST_REASON
from barnraise.protocol.amendments import json_value

Reason = Annotated[
    str, Meta(min_length=1, max_length=MOST_REASON, description="Why; volunteers and the ledger show it.")
]
MaybeReason = Annotated[str, Meta(max_length=MOST_REASON, description="Why; the ledger shows it.")]
Note = Annotated[
    str, Meta(max_length=admission.MOST_NOTE, description="For the operator's own eyes: who that is.")
]
NodeText = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=200,
        description="A peer id or its end, a key in hex or its start, or a name that only one has.",
    ),
]
Keys = Annotated[list[NodeText], Meta(min_length=1, max_length=1024, description="Peer ids, or keys in hex.")]
Moment = Annotated[int, Meta(description="ms since the Unix epoch")]


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's body: a JSON object with these fields and no other."""

    def args(self) -> dict[str, Any]:
        """As the command takes it."""
        found: dict[str, Any] = to_builtins(self)
        return found


class Nothing(Body, frozen=True, kw_only=True):
    """``{}``."""


class Pause(Body, frozen=True, kw_only=True):
    reason: Reason


class Drain(Body, frozen=True, kw_only=True):
    seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=draining.LONGEST_S,
            description="Wait at most so long; then the run goes on. 0: give it up.",
        ),
    ] = draining.USUAL_S


class Rollback(Body, frozen=True, kw_only=True):
    version: Annotated[int, Meta(ge=0, le=2**31, description="The version to take up again.")]
    reason: Reason


class Amend(Body, frozen=True, kw_only=True):
    changes: Annotated[
        dict[
            Annotated[str, Meta(min_length=1, max_length=100)],
            Annotated[str, Meta(max_length=4096)] | int | float | bool,
        ],
        Meta(min_length=1, max_length=64, description="Dotted key to its new value."),
    ]
    reason: Reason

    def args(self) -> dict[str, Any]:
        """As the command takes it: each value as its one JSON text."""
        texts = {key: json_value(value) for key, value in self.changes.items()}
        return {"changes": texts, "reason": self.reason}


class Mode(Body, frozen=True, kw_only=True):
    mode: Literal["open", "invite", "allow"]
    keep_proven: Annotated[
        bool, Meta(description="First put every node that has had work accepted on the list.")
    ] = False
    reason: MaybeReason = ""


class Invite(Body, frozen=True, kw_only=True):
    uses: Annotated[int, Meta(ge=1, le=admission.MOST_USES, description="Good for so many nodes.")] = 1
    seconds: Annotated[int, Meta(ge=1, le=admission.LONGEST_S, description="From now.")] = 7 * 86_400
    note: Note = ""


class Revoke(Body, frozen=True, kw_only=True):
    id: Annotated[str, Meta(pattern="^[0-9A-Fa-f]{1,32}$", description="An invite's id, or how it begins.")]


class Allow(Body, frozen=True, kw_only=True):
    nodes: Keys
    note: Note = ""


class Disallow(Body, frozen=True, kw_only=True):
    nodes: Keys


class Ban(Body, frozen=True, kw_only=True):
    node: NodeText
    reason: Annotated[
        str,
        Meta(min_length=1, max_length=bans.MOST_REASON, description="The node and the ledger show it."),
    ]
    seconds: Annotated[int, Meta(ge=1, le=bans.LONGEST_S, description="From now.")] = 86_400


class Unban(Body, frozen=True, kw_only=True):
    node: NodeText
    reason: Annotated[str, Meta(max_length=bans.MOST_REASON)] = ""


class Paused(Struct, frozen=True, kw_only=True):
    by: Literal["operator", "guard"]
    reason: str


class PauseState(Struct, frozen=True, kw_only=True):
    paused: Paused | None


class Draining(Struct, frozen=True, kw_only=True):
    at_hand: Annotated[int, Meta(description="Units lent, or waiting for their verdict.")]
    until: Annotated[int | None, Meta(description="ms since the Unix epoch; null: given up")]


class Stopping(Struct, frozen=True, kw_only=True):
    stopping: bool


class RolledBack(Struct, frozen=True, kw_only=True):
    to: int
    version: Annotated[int, Meta(description="The number under which it is published again.")]


class Amended(Struct, frozen=True, kw_only=True):
    number: Annotated[int, Meta(description="Of the last amendment in force; 0: none.")]
    changed: Annotated[dict[str, str], Meta(description="Empty: all of it was in force already.")]


class ModeSet(Struct, frozen=True, kw_only=True):
    admission: Literal["open", "invite", "allow"]
    amendment: int
    changed: bool
    allowed: Annotated[list[str], Meta(description="Peer ids that were put on the list.")]


class InviteMade(Struct, frozen=True, kw_only=True):
    invite: Annotated[str, Meta(description="The word to pass on: secret.")]
    id: str
    uses: int
    expires_at: Moment
    note: str
    admission: str


class Revoked(Struct, frozen=True, kw_only=True):
    revoked: list[str]


class Allowed(Struct, frozen=True, kw_only=True):
    allowed: list[str]
    admission: str = ""


class Disallowed(Struct, frozen=True, kw_only=True):
    disallowed: list[str]
    admission: str


class BanState(Struct, frozen=True, kw_only=True):
    node: str
    name: str
    until: Annotated[int, Meta(description="ms since the Unix epoch; 0: not banned")]


class OnTheList(Struct, frozen=True, kw_only=True):
    node: str
    name: str
    joined: bool
    note: str


class InviteInForce(Struct, frozen=True, kw_only=True):
    id: str
    left: int
    uses: int
    expires_at: Moment
    note: str


class Banned(Struct, frozen=True, kw_only=True):
    node: str
    name: str
    until: Moment
    reason: str


class Admitted(Struct, frozen=True, kw_only=True):
    admission: Literal["open", "invite", "allow"]
    allowed: list[OnTheList]
    invites: list[InviteInForce]
    banned: list[Banned]
    not_on_the_list: int


class PauseSince(Struct, frozen=True, kw_only=True):
    by: Literal["operator", "guard"]
    reason: str
    since_ms: Moment


class Queues(Struct, frozen=True, kw_only=True):
    leases_open: int
    queue: Annotated[int, Meta(description="Submissions that wait for their verdict.")]
    queue_bytes: int
    queue_tokens: int
    queue_oldest_s: float
    verifying: int
    verifiers: int
    verifiers_busy: int
    appeals_open: int
    groups_ready: int
    groups_usable: int
    groups_wanted: int


class Guard(Struct, frozen=True, kw_only=True):
    """``value`` and ``limit``: as the alarm in force saw them."""

    guard: str
    alarm: bool
    pauses: Annotated[bool, Meta(description="Whether its alarm pauses the run.")]
    thresholds: Annotated[dict[str, float], Meta(description="Its keys of [guards].")]
    value: float | None = None
    limit: float | None = None
    since_ms: Moment | None = None


class Alarm(Struct, frozen=True, kw_only=True):
    part: str
    what: Annotated[str, Meta(description="What was seen.")]
    cure: Annotated[str, Meta(description="What to do.")]
    guard: Annotated[str, Meta(description="The guard that saw it; empty: none did.")]
    since: str | None


class AmendmentInForce(Struct, frozen=True, kw_only=True):
    number: int
    at_ms: Moment
    changes: dict[str, str]
    reason: str


class Status(Struct, frozen=True, kw_only=True):
    """What an operator decides by."""

    now_ms: Moment
    run: str
    run_id: str
    stage: str
    state: str
    waiting_for: str
    complete: bool
    version: int
    target_version: int
    paused: PauseSince | None
    draining_until_ms: Moment | None
    rolling_back_to: int | None
    queues: Queues
    nodes_known: int
    nodes_live: int
    guards: list[Guard]
    alarms: list[Alarm]
    admission: Literal["open", "invite", "allow"]
    invites: int
    allowed: int
    amendments: Annotated[list[AmendmentInForce], Meta(description="The newest 64.")]
    versions_kept: Annotated[list[int], Meta(description="Versions that can be taken up again.")]
    disk_free_bytes: int


class Refusal(Struct, frozen=True, kw_only=True):
    error: str
    code: Annotated[str, Meta(description="For programs; empty where the status says it all.")] = ""


class Act(Struct, frozen=True):
    """A route below ``/admin``: the command that it is, what it takes and gives."""

    path: str
    command: str
    body: type[Body]
    reply: type[Struct]
    text: str


ACTS: Final = (
    Act("pause", "pause", Pause, PauseState, "Lend no work and train on none until resume"),
    Act("resume", "resume", Nothing, PauseState, "Go on after a pause"),
    Act("drain", "drain", Drain, Draining, "Lend no more, wait for the work at hand, then end"),
    Act("stop", "stop", Nothing, Stopping, "End the coordinator cleanly"),
    Act("rollback", "rollback", Rollback, RolledBack, "Publish an earlier version again, as the next one"),
    Act("amend", "amend", Amend, Amended, "Change settings by a signed amendment"),
    Act("admit/mode", "admission", Mode, ModeSet, "Say who may join"),
    Act("admit/invite", "invite", Invite, InviteMade, "Make an invite"),
    Act("admit/revoke", "revoke-invite", Revoke, Revoked, "Take an invite back"),
    Act("admit/allow", "allow", Allow, Allowed, "Put keys on the list"),
    Act("admit/allow-known", "allow-known", Nothing, Allowed, "Put all that had work accepted on the list"),
    Act("admit/disallow", "disallow", Disallow, Disallowed, "Take keys off the list"),
    Act("admit/ban", "ban", Ban, BanState, "Give a node no work for a while"),
    Act("admit/unban", "unban", Unban, BanState, "End a node's ban"),
)
"""Everything that changes something."""

LOOKS: Final[dict[str, tuple[type[Struct], str]]] = {
    "status": (Status, "Queues, guards with their thresholds, alarms with what to do"),
    "admit": (Admitted, "Who may join: the mode, the list, the invites in force"),
}
"""What only shows."""


def schemas() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """JSON Schemas: a reference for each act's body and reply, each look, and the refusal; the components."""
    from msgspec.json import schema_components

    kinds: list[Any] = [kind for act in ACTS for kind in (act.body, act.reply)]
    kinds += [kind for kind, _ in LOOKS.values()]
    found, components = schema_components([*kinds, Refusal], ref_template="#/components/schemas/Admin{name}")
    return list(found), {f"Admin{name}": value for name, value in components.items()}

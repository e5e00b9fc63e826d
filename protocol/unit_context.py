"""Which unit a line of a log is about: one id through all processes.

A unit is known by the lease under which it is lent. Whoever handles it does so inside of
``with about(lease)``: every line that is logged there, by whatever module, carries the id
(``barnraise.protocol.log_lines``). The context goes along into trio's tasks and threads. Into
a child process it goes with the request, which has the lease: the child says ``about`` again.

``unit_log`` gives the logger for lines that tell one unit's story and nothing else: what
becomes of it at INFO, how at DEBUG. They are many, so they have a name of their own
(``UNITS``), by which a program sends them elsewhere than what concerns everybody.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token
from types import TracebackType
from typing import NamedTuple, Protocol

UNITS = "barnraise.units"
SHORT = 16  # hex digits of an id in a line


class Unit(NamedTuple):
    """What is known of the unit at hand. ``id`` and ``submission`` are short (``short``), "" if not known.

    ``number`` is the unit's in the run, ``version`` the policy version it is lent for; -1: not known.
    """

    id: str
    number: int = -1
    submission: str = ""
    version: int = -1
    run: str = ""

    def as_json(self) -> str:
        """What lines say of it, as members of a JSON object: all of it is digits."""
        text = f'"unit": "{self.id}"'
        if self.number >= 0:
            text += f', "number": {self.number}'
        if self.submission:
            text += f', "submission": "{self.submission}"'
        if self.version >= 0:
            text += f', "version": {self.version}'
        return text


class Lent(Protocol):
    """A lease, or what was made of one for a worker."""

    @property
    def lease_id(self) -> bytes: ...


_unit: ContextVar[Unit | None] = ContextVar("barnraise.unit", default=None)


class about:
    """``with about(lease, submission_id)``: lines inside are about this unit.

    ``lease`` is anything with a ``lease_id``, whose ``unit_id``, ``policy_version`` and ``run_id`` are
    taken along where it has them, or the bare id. Inside of another ``about`` of the same unit what
    that one knew still holds. Start no task there that outlives the unit: it would keep the id.
    """

    __slots__ = ("_token", "_unit")

    def __init__(self, lease: Lent | bytes, submission_id: bytes = b"") -> None:
        if isinstance(lease, bytes):
            made = Unit(lease.hex()[:SHORT], submission=submission_id.hex()[:SHORT])
        else:
            made = Unit(
                lease.lease_id.hex()[:SHORT],
                getattr(lease, "unit_id", -1),
                submission_id.hex()[:SHORT],
                getattr(lease, "policy_version", -1),
                getattr(lease, "run_id", b"").hex()[:SHORT],
            )
        known = _unit.get()
        if known is not None and known.id == made.id:
            made = Unit(
                made.id,
                known.number if made.number < 0 else made.number,
                made.submission or known.submission,
                known.version if made.version < 0 else made.version,
                made.run or known.run,
            )
        self._unit = made
        self._token: Token[Unit | None] | None = None

    def __enter__(self) -> None:
        self._token = _unit.set(self._unit)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._token is not None:
            _unit.reset(self._token)
            self._token = None


def unit_at_hand() -> Unit | None:
    """The unit that is handled in this task, or thread."""
    return _unit.get()


def unit_log(name: str) -> logging.Logger:
    """The logger for units' stories of module ``name`` (``__name__``)."""
    return logging.getLogger(f"{UNITS}.{name.removeprefix('barnraise.')}")


def short(identifier: bytes) -> str:
    """An id as lines have it: the first 16 hex digits."""
    return identifier.hex()[:SHORT]

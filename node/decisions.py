"""What a node may decide to do: plain frozen values, a closed union. See ``barnraise.node.core``.

``barnraise.node.daemon`` does them; what comes of them are events.
"""

from __future__ import annotations

from dataclasses import dataclass

from barnraise.node.events import Unit


@dataclass(frozen=True, slots=True)
class Connect:
    attempt: int


@dataclass(frozen=True, slots=True)
class Fetch:
    version: int


@dataclass(frozen=True, slots=True)
class StopFetch:
    pass


@dataclass(frozen=True, slots=True)
class Load:
    version: int


@dataclass(frozen=True, slots=True)
class Ask:
    version: int


@dataclass(frozen=True, slots=True)
class Generate:
    unit: Unit
    shrink: int


@dataclass(frozen=True, slots=True)
class Train:
    unit: Unit
    shrink: int = 0


@dataclass(frozen=True, slots=True)
class StopEngine:
    reason: str


@dataclass(frozen=True, slots=True)
class FreeEngine:
    """End the engine's process, which is idle; answered like ``StopEngine``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Upload:
    submission_id: bytes


@dataclass(frozen=True, slots=True)
class GiveBack:
    lease_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    code: int
    reason: str


Action = (
    Connect
    | Fetch
    | StopFetch
    | Load
    | Ask
    | Generate
    | Train
    | StopEngine
    | FreeEngine
    | Upload
    | GiveBack
    | Stop
)

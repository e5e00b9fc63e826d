"""Published versions, newest first, as plain values."""

from __future__ import annotations

from typing import Any

import msgspec

from barnraise.coordinator.state import State, VersionInfo
from barnraise.protocol.moments import shown_moment


def version_page(state: State, page: int, size: int) -> dict[str, Any]:
    """Page ``page`` (from 1) of the versions. On the event loop; as much work as ``size``."""
    total = len(state.versions)
    end = max(0, total - (page - 1) * size)
    return {
        "page": page,
        "pages": max(1, -(-total // size)),
        "total": total,
        "versions": [version_fields(info) for info in reversed(state.versions[max(0, end - size) : end])],
    }


def version_fields(info: VersionInfo) -> dict[str, Any]:
    """One version. ``held_out``: None where it was not evaluated; ``training``: None for the first."""
    return {
        "version": info.version,
        "at": shown_moment(info.at_ms, "seconds"),
        "at_ms": info.at_ms,
        "size": info.size,
        "manifest": info.manifest.hex(),
        "held_out": info.accuracy if info.accuracy >= 0 else None,
        "training": None if info.stats is None else msgspec.to_builtins(info.stats),
    }

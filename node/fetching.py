"""A download in words, the same in the node's own lines, ``barnraise status`` and ``barnraise swarm``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def kind_of(source: str, coordinator: str) -> str:
    """What a source of shards is: ``peer``, ``mirror`` or ``origin``. ``source``: peer id or base URL."""
    if source == coordinator:
        return "origin"
    return "mirror" if source.startswith(("https://", "http://")) else "peer"


def in_words(fetch: Mapping[str, Any]) -> str:
    """The node state's ``fetch`` as text: finished bytes, their rate, from whom, time left at that rate.

    ``12.0 of 48.0 MB (25 %), 2.31 MB/s from 3 peers and the coordinator, 16 s left``
    """
    done, total = float(fetch.get("done") or 0), float(fetch.get("total") or 0)
    share = 100 * done / total if total else 0.0
    factor, unit = next(((f, u) for f, u in _UNITS if total >= f), _UNITS[-1])
    digits = 0 if unit == "B" else 1
    text = f"{done / factor:.{digits}f} of {total / factor:.{digits}f} {unit} ({share:.0f} %)"
    rate = float(fetch.get("rate") or 0)
    if rate:
        text += f", {rate / 1e6:.2f} MB/s" if rate >= 1e5 else f", {rate / 1e3:.1f} kB/s"
    sources = _sources(fetch)
    if sources:
        text += f" from {sources}"
    left = fetch.get("eta_s")
    if left is not None and done < total:
        text += f", {_duration(float(left))} left"
    return text


def _sources(fetch: Mapping[str, Any]) -> str:
    kinds = Counter(str(source.get("kind", "peer")) for source in fetch.get("sources") or ())
    parts = []
    for kind, one, many in (("peer", "1 peer", "peers"), ("mirror", "1 mirror", "mirrors")):
        if kinds[kind]:
            parts.append(one if kinds[kind] == 1 else f"{kinds[kind]} {many}")
    if kinds["origin"]:
        parts.append("the coordinator")
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

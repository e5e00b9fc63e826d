"""Curves and bars as inline SVG: no script, no fetched font, colours from the page's style sheet.

Each has a title and a description for those who do not see it; the page puts the numbers
in a table beside it. What a mark means is never said by its colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from markupsafe import Markup, escape

WIDTH: Final = 420
HEIGHT: Final = 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 14, 14, 30


def curve(name: str, points: Sequence[Sequence[float]], most: float | None = 1.0) -> Markup:
    """A line over policy versions; ``most``: the axis's end, None to fit the values."""
    known = [(float(x), float(y)) for x, y in points if math.isfinite(y)]
    if not known:
        return Markup("")
    low, high = min(0.0, min(y for _, y in known)), max([y for _, y in known] + ([most] if most else []))
    high = high if high > low else low + 1.0
    first, last = known[0][0], known[-1][0]
    width = last - first or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - first) / width * (WIDTH - _LEFT - _RIGHT)
        down = _TOP + (high - y) / (high - low) * (HEIGHT - _TOP - _BOTTOM)
        return round(across, 1), round(down, 1)

    parts = [*_grid(low, high), *_ends(first, last)]
    places = [place(x, y) for x, y in known]
    floor = HEIGHT - _BOTTOM
    line = " ".join(f"{x},{y}" for x, y in places)
    area = f"{places[0][0]},{floor} {line} {places[-1][0]},{floor}"
    parts.append(f'<polygon class="area" points="{area}"/><polyline class="line" points="{line}"/>')
    (x, y), value = places[-1], known[-1][1]
    above = y - 9 if y > _TOP + 16 else y + 18
    parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="4"/>')
    parts.append(f'<text class="value" x="{x - 2}" y="{above}" text-anchor="end">{value:.3f}</text>')
    text = (
        f"{name} from {known[0][1]:.3f} at version {first:g} to {value:.3f} at version {last:g}, "
        f"lowest {min(y for _, y in known):.3f}, highest {max(y for _, y in known):.3f}."
    )
    return _svg(name, text, parts)


def bars(name: str, steps: Sequence[tuple[int, int, int]], minutes: int) -> Markup:
    """(moment, accepted, rejected) as columns; rejected work stands on top, hatched."""
    high = max(1, *(accepted + rejected for _, accepted, rejected in steps))
    wide = (WIDTH - _LEFT - _RIGHT) / max(1, len(steps))
    tall = HEIGHT - _TOP - _BOTTOM
    parts = [
        '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="hatch" width="2.5" height="5"/></pattern></defs>',
        *_grid(0, high, whole=True),
        f'<text x="{_LEFT}" y="{HEIGHT - 10}">{minutes} min ago</text>',
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 10}" text-anchor="end">now</text>',
    ]
    for number, (_, accepted, rejected) in enumerate(steps):
        x = round(_LEFT + number * wide, 1)
        for kind, count, below in (("good", accepted, 0), ("bad", rejected, accepted)):
            if count:
                y = round(_TOP + tall * (1 - (below + count) / high), 1)
                size = f'width="{max(1.0, wide - 1.5):.1f}" height="{tall * count / high:.1f}"'
                parts.append(f'<rect class="{kind}" x="{x}" y="{y}" {size}/>')
    accepted, rejected = sum(step[1] for step in steps), sum(step[2] for step in steps)
    text = f"In the last {minutes} minutes {accepted} units were accepted and {rejected} rejected."
    return _svg(name, text, parts)


def _grid(low: float, high: float, whole: bool = False) -> list[str]:
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = round(_TOP + (1 - share) * (HEIGHT - _TOP - _BOTTOM), 1)
        value = low + share * (high - low)
        if whole and value != int(value):
            continue
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    return parts


def _ends(first: float, last: float) -> list[str]:
    ends = [f'<text x="{_LEFT}" y="{HEIGHT - 10}">version {first:g}</text>']
    if last > first:
        ends.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{last:g}</text>')
    return ends


def _svg(name: str, text: str, parts: Sequence[str]) -> Markup:
    label = escape(f"{name}. {text}")
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return Markup(f"{head}{''.join(parts)}</svg>")  # numbers, and a text that is escaped

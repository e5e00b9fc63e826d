"""How likely an honest proof is to be refused, where none of those that were measured was.

Two estimates of P(value > threshold) from a histogram of measured values, {value: how often}: a whole
distribution of the same mean and variance (negative binomial for counts, gamma for means), and an
exponential through the largest hundredth of the values (30 at least), which overstates where a tail falls
faster than exponentially, as those of sums do. Extrapolation both: they say how far away a threshold is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

Histogram = Mapping[float, int]
_LARGEST, _FEWEST = 0.01, 30
_NEGLIGIBLE = 1e-30


def histogram(values: Iterable[float], step: float) -> dict[float, int]:
    """Values rounded up to multiples of ``step``, counted."""
    found: dict[float, int] = {}
    for value in values:
        key = round(math.ceil(value / step - 1e-9) * step, 6)
        found[key] = found.get(key, 0) + 1
    return dict(sorted(found.items()))


def merged(first: Histogram, second: Histogram) -> dict[float, int]:
    """Both together."""
    keys = sorted({*first, *second})
    return {key: first.get(key, 0) + second.get(key, 0) for key in keys}


def chance_count(values: Histogram, threshold: int) -> float | None:
    """Negative binomial (Poisson where the variance is not above the mean); None if all are 0."""
    mean, variance = _moments(values)
    if mean == 0:
        return None
    total, count = 0.0, threshold + 1
    while True:
        if variance <= mean * 1.001:
            log = count * math.log(mean) - mean - math.lgamma(count + 1)
        else:
            size, share = mean * mean / (variance - mean), mean / variance
            log = math.lgamma(count + size) - math.lgamma(size) - math.lgamma(count + 1)
            log += size * math.log(share) + count * math.log1p(-share)
        total += math.exp(log)
        if count > mean and math.exp(log) < max(total * 1e-6, _NEGLIGIBLE):
            return total
        count += 1


def chance_mean(values: Histogram, threshold: float) -> float | None:
    """Gamma distribution; None if all values are one."""
    mean, variance = _moments(values)
    if variance == 0:
        return None
    shape, scale = mean * mean / variance, variance / mean
    kind = torch.float64
    return float(
        torch.special.gammaincc(torch.tensor(shape, dtype=kind), torch.tensor(threshold / scale, dtype=kind))
    )


def chance_exponential(values: Histogram, threshold: float, step: float) -> float | None:
    """The largest hundredth (all that reach its least value) as an exponential; None if all are one value."""
    if len(values) < 2:
        return None
    total = sum(values.values())
    seen, base = 0, max(values)
    for value in sorted(values, reverse=True):
        seen, base = seen + values[value], value
        if seen >= max(_LARGEST * total, _FEWEST):
            break
    # Half a step at least: values that are all in one bin have some spread within it.
    excess = max(sum((v - base) * n for v, n in values.items() if v >= base) / seen, step / 2)
    return min(1.0, seen / total * math.exp(-(threshold - base) / excess))


def _moments(values: Histogram) -> tuple[float, float]:
    total = sum(values.values())
    mean = sum(value * count for value, count in values.items()) / total
    return mean, sum((value - mean) ** 2 * n for value, n in values.items()) / max(1, total - 1)

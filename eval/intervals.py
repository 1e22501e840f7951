"""Intervals of shares and means, so that no score stands without what chance leaves open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist


def wilson(successes: int, trials: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927); (0, 1) without trials.

    Unlike the usual p plus or minus two standard errors it stays within [0, 1], and holds its promise near both ends.
    """
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    low = 0.0 if successes == 0 else middle - half  # exactly 0 and 1 at the ends, whatever rounding does
    high = 1.0 if successes == trials else middle + half
    return low, high


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; the error of fewer than two values is infinite, the mean of none not a number."""
    count = len(values)
    if count == 0:
        return math.nan, math.inf
    mean = math.fsum(values) / count
    if count == 1:
        return mean, math.inf
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def percent(successes: int, trials: int) -> str:
    """`95.0% [91.0, 97.3]`."""
    low, high = wilson(successes, trials)
    return f"{100 * successes / max(trials, 1):.1f}% [{100 * low:.1f}, {100 * high:.1f}]"

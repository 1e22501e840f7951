"""Tests and intervals for pairs: McNemar's exact test, Newcombe's interval, Student's t, Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mezzotint.eval.intervals import wilson


@dataclass(frozen=True)
class Difference:
    """A difference of a pair of subjects, its interval, and the probability of one as large without any."""

    value: float
    low: float
    high: float
    p: float


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p of the discordant pairs: binomial with one half (McNemar 1947); 1 where there is none."""
    n, less = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, i) for i in range(less + 1))
    return min(1.0, 2 * tail / 2**n)


def paired_shares(both: int, only_a: int, only_b: int, neither: int, *, confidence: float = 0.95) -> Difference:
    """Share of A minus share of B: interval by Newcombe (1998, Statistics in Medicine 17, 2635), method 10; McNemar's p.

    Wilson's intervals of both shares, joined by their correlation, with its continuity correction.
    """
    n = both + only_a + only_b + neither
    a, b = both + only_a, both + only_b
    share_a, share_b = a / n, b / n
    (low_a, high_a), (low_b, high_b) = (wilson(right, n, confidence=confidence) for right in (a, b))
    product = a * (n - a) * b * (n - b)
    excess = float(both * neither - only_a * only_b)
    if excess > 0:
        excess = max(excess - n / 2, 0.0)
    phi = excess / math.sqrt(product) if product else 0.0
    difference = share_a - share_b
    below = _joined(share_a - low_a, high_b - share_b, phi)
    above = _joined(high_a - share_a, share_b - low_b, phi)
    return Difference(difference, difference - below, difference + above, mcnemar(only_a, only_b))


def _joined(first: float, second: float, phi: float) -> float:
    return math.sqrt(max(0.0, first * first - 2 * phi * first * second + second * second))


def paired_means(a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95) -> Difference:
    """Mean of A minus mean of B over pairs, by Student's t on their differences."""
    return paired_ratios(a, b, [1.0] * len(a), confidence=confidence)


def paired_ratios(
    a: Sequence[float], b: Sequence[float], below: Sequence[float], *, confidence: float = 0.95
) -> Difference:
    """sum(a)/sum(below) minus sum(b)/sum(below) over pairs: error by linearization, Student's t with n - 1 degrees.

    With one pair nothing is known of the spread: the interval is infinite and p is 1. Where all pairs differ alike, p is 0
    (or 1, if they do not differ).
    """
    n, bottom = len(a), math.fsum(below)
    differences = [x - y for x, y in zip(a, b)]
    value = math.fsum(differences) / bottom
    if n < 2:
        return Difference(value, -math.inf, math.inf, 1.0)
    squares = math.fsum((d - value * tokens) ** 2 for d, tokens in zip(differences, below))
    error = math.sqrt(squares * n / (n - 1)) / bottom
    if error == 0:
        return Difference(value, value, value, 1.0 if value == 0 else 0.0)
    reach = student_quantile(confidence, n - 1) * error
    return Difference(value, value - reach, value + reach, 1 - student_within(abs(value) / error, n - 1))


def student_within(t: float, degrees: int) -> float:
    """Probability that |T| < t, for whole degrees of freedom: the finite series of Abramowitz and Stegun, 26.7.3 and 4."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term = total = 1.0 if degrees % 2 == 0 else (math.cos(angle) if degrees > 1 else 0.0)
    for k in range(2 if degrees % 2 else 1, degrees - 2, 2):
        term *= square * k / (k + 1)
        total += term
    return min(1.0, sine * total if degrees % 2 == 0 else 2 / math.pi * (angle + sine * total))


def student_quantile(confidence: float, degrees: int) -> float:
    """The t with P(|T| < t) = confidence, by bisection."""
    low, high = 0.0, 1.0
    while student_within(high, degrees) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


def holm(probabilities: Sequence[float]) -> list[float]:
    """p of each of several tests, corrected so that any one false alarm is as rare as stated (Holm 1979)."""
    order = sorted(range(len(probabilities)), key=lambda i: probabilities[i])
    out, least = [0.0] * len(probabilities), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(probabilities) - rank) * probabilities[i]))
        out[i] = least
    return out

"""Tests and intervals of pairs against scipy and against simulated pairs."""

import random

import pytest
from scipy import stats

from mezzotint.eval.compare_statistics import (
    holm,
    mcnemar,
    paired_means,
    paired_ratios,
    paired_shares,
    student_quantile,
    student_within,
)


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (5, 5), (3, 11), (20, 4), (400, 431)])
def test_mcnemar_is_the_exact_binomial(counts):
    wanted = stats.binomtest(counts[0], sum(counts), 0.5).pvalue if sum(counts) else 1.0
    assert mcnemar(*counts) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 31, 199, 1000])
def test_student_agrees_with_scipy(degrees):
    for t in (0.0, 0.3, 1.0, 2.5, 9.0):
        wanted = stats.t.cdf(t, degrees) - stats.t.cdf(-t, degrees)
        assert student_within(t, degrees) == pytest.approx(wanted, abs=1e-12)
    for confidence in (0.5, 0.95, 0.999):
        wanted = stats.t.ppf((1 + confidence) / 2, degrees)
        assert student_quantile(confidence, degrees) == pytest.approx(wanted, rel=1e-9)


def test_means_of_pairs_agree_with_scipy():
    rng = random.Random(0)
    a = [rng.gauss(1, 1) for _ in range(30)]
    b = [x - 0.3 + rng.gauss(0, 0.7) for x in a]
    found, wanted = paired_means(a, b), stats.ttest_rel(a, b)
    low, high = wanted.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((low, high, wanted.pvalue))


def test_what_one_pair_or_equal_pairs_tell():
    one = paired_means([1.0], [2.0])
    assert one.value == -1 and one.p == 1 and one.high == float("inf")
    assert paired_means([1.0, 2.0], [1.0, 2.0]).p == 1
    assert paired_means([1.0, 2.0], [0.0, 1.0]).p == 0


def test_ratios_weigh_rows_by_their_tokens():
    """Differences 2 and 2 over 10 and 20 tokens: residuals of 2/3, error sqrt(8/9 * 2) / 30, and t = 12.706."""
    found = paired_ratios([10.0, 40.0], [8.0, 38.0], [10.0, 20.0])
    assert found.value == pytest.approx(4 / 30)
    assert found.high - found.value == pytest.approx(12.706 * (16 / 9) ** 0.5 / 30, rel=1e-4)


@pytest.mark.parametrize(("base", "gain"), [(0.5, 0.0), (0.9, 0.08), (0.97, 0.0), (0.2, 0.3)])
def test_the_interval_of_paired_shares_covers_the_truth(base, gain):
    """Of 1500 simulated comparisons of 60 correlated pairs; 95% less three standard errors is 93.3%."""
    rng, covered = random.Random(1), 0
    for _ in range(1500):
        counts = {pair: 0 for pair in ((1, 1), (1, 0), (0, 1), (0, 0))}
        for _ in range(60):
            hard = rng.random()
            own = (base + gain, base)
            shared = rng.random() < 0.6
            counts[tuple(int((hard if shared else rng.random()) < share) for share in own)] += 1
        found = paired_shares(*counts.values())
        covered += found.low <= gain <= found.high
    assert covered / 1500 > 0.933


def test_an_interval_of_paired_shares_by_hand():
    """30 and 23 of 50: Wilson 0.4618 to 0.7239 and 0.3297 to 0.5960; phi = (310 - 25) / sqrt(30 20 23 27) = 0.4669.

    Below: sqrt(0.1382^2 - 2 phi 0.1382 0.1360 + 0.1360^2) = 0.1416; above: the same of 0.1239 and 0.1303, 0.1314.
    """
    found = paired_shares(20, 10, 3, 17)
    assert (found.value, found.low, found.high) == pytest.approx((0.14, -0.0016, 0.2714), abs=3e-4)


def test_shares_without_discordant_pairs_stay_open():
    found = paired_shares(50, 0, 0, 0)
    assert found.value == 0 and found.p == 1 and -0.1 < found.low < 0 < found.high < 0.1
    extreme = paired_shares(0, 20, 0, 0)
    assert extreme.value == 1 and extreme.high <= 1 + 1e-12 and extreme.p < 1e-5


def test_holm_corrects_in_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []

"""The weight of every schedule is -alpha'/(1 - alpha); reparametrising the level leaves the bound's integral alone."""

import numpy as np
import pytest
import torch

from mezzotint.models.errors import InputError
from mezzotint.models.schedule import Schedule

SCHEDULES = [Schedule(), Schedule(name="cosine"), Schedule(name="clipped", low=0.3, high=0.8)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_weight_is_minus_the_derivative_of_alpha_over_the_mask_rate(schedule):
    t = torch.linspace(0.001, 0.999, 57, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.weight(t), -slope / schedule.mask_rate(t), rtol=1e-12, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_integral_over_levels_is_the_integral_over_mask_rates(schedule):
    def share(m):  # any L(m) with L(0) = 0
        return m**2 * (2 - m)

    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(80))
    t = (nodes + 1) / 2
    over_levels = (weights / 2 * schedule.weight(t) * share(schedule.mask_rate(t))).sum()
    m = schedule.low + (schedule.high - schedule.low) * t
    over_rates = (schedule.high - schedule.low) * (weights / 2 * share(m) / m).sum()
    torch.testing.assert_close(over_levels, over_rates, rtol=1e-10, atol=0)


def test_ends_of_the_schedules():
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for schedule in SCHEDULES:
        expected = torch.tensor([1 - schedule.low, 1 - schedule.high], dtype=torch.float64)
        torch.testing.assert_close(schedule.alpha(ends), expected, atol=1e-15, rtol=0)
    assert Schedule(name="cosine").mask_rate(torch.tensor(1e-300, dtype=torch.float64)) > 0


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"name": "linaer"}, "'linear'"),
        ({"name": "clipped", "low": 0.8, "high": 0.3}, "low 0.8"),
        ({"name": "clipped", "low": -0.1}, "low -0.1"),
        ({"name": "cosine", "low": 0.1}, "'cosine'"),
    ],
)
def test_bad_schedules_are_named(values, word):
    with pytest.raises(InputError, match=word):
        Schedule(**values)

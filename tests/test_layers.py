"""Rotary scaling rules, initialisation, and a training pass under autocast."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from denoiser_oracle import rotate as rotate_by_loop
from support import assert_close, generator, random_case, tiny_config, training_logits
from torch import Tensor

from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.layers import rope_tables
from mezzotint.models.ops.rope import rotate

PLACES = torch.tensor([[0, 1, 5, 700, 4096]])


def angles(**overrides: object) -> Tensor:
    """Frequencies (P/2,) in radians a token, read off the tables at position 1e-3 (no turn is completed there)."""
    config = tiny_config("A", head_dim=32, d_model=128, **overrides)
    cos, sin = rope_tables(config, torch.tensor([[1e-3]], dtype=torch.float64), torch.float64)
    return torch.atan2(sin, cos)[0, 0, 0] / 1e-3


def test_rotation_is_the_loop():
    config = tiny_config("A", head_dim=6, rope_theta=500.0)
    x = torch.randn(1, 5, 2, 6, generator=generator(), dtype=torch.float64)
    turned = rotate(x, rope_tables(config, PLACES, torch.float64))
    for head in range(2):
        for i, place in enumerate(PLACES[0].tolist()):
            assert_close(turned[0, i, head], rotate_by_loop(x[0, i, head], place, 500.0))


def test_linear_scaling_divides_positions():
    assert_close(angles(rope_scaling="linear", rope_factor=8.0), angles() / 8, 1e-12)


def test_ntk_scaling_keeps_the_fastest_and_divides_the_slowest():
    plain, scaled = angles(), angles(rope_scaling="ntk", rope_factor=8.0)
    assert_close(scaled[0], plain[0], 1e-12)
    assert_close(scaled[-1], plain[-1] / 8, 1e-12)
    assert ((scaled <= plain + 1e-12) & (scaled >= plain / 8 - 1e-12)).all()


def test_yarn_scaling_goes_by_turns_within_the_trained_length():
    """More than 32 turns: as trained; less than one: divided; both tables are scaled by 0.1 ln s + 1."""
    named: dict = {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_trained_length": 1024}
    plain, scaled = angles(), angles(**named)
    turns = 1024 * plain / (2 * math.pi)
    assert (turns > 32).any() and (turns < 1).any() and ((turns > 1) & (turns < 32)).any()
    assert_close(scaled[turns > 32], plain[turns > 32], 1e-12)
    assert_close(scaled[turns < 1], plain[turns < 1] / 8, 1e-12)
    between = (turns > 1) & (turns < 32)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    cos, sin = rope_tables(tiny_config("A", **named), PLACES, torch.float64)
    assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, 0.1 * math.log(8) + 1), 1e-12)


@pytest.mark.parametrize("rule", ["linear", "ntk", "yarn"])
def test_a_factor_of_one_changes_nothing(rule: str):
    plain = rope_tables(tiny_config("A"), PLACES, torch.float64)
    for table, same in zip(rope_tables(tiny_config("A", rope_scaling=rule), PLACES, torch.float64), plain):
        assert_close(table, same, 1e-12)


def test_initialisation():
    config = preset("debug", "hybrid", tie_embeddings=False)
    model, twin = (Denoiser(config, generator=generator(3)) for _ in range(2))
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(parameter, other), name
        assert parameter.isfinite().all()
        if name.endswith("A_log"):
            assert parameter.exp().min() >= 1 and parameter.exp().max() <= 16
        elif name.endswith("dt_bias"):
            assert F.softplus(parameter).min() >= 1e-3 * 0.99 and F.softplus(parameter).max() <= 1e-1 * 1.01
        elif name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.1)
        elif name.endswith("proj.weight") or "embed" in name:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
    different = Denoiser(config, generator=generator(4))
    assert not torch.equal(different.embed.weight, model.embed.weight)


def test_training_under_autocast():
    """bf16 products beside fp32 parameters: finite gradients of the parameters' dtype, logits near float32's."""
    config = preset("debug", "hybrid")
    model = Denoiser(config, generator=generator(1))
    case = random_case(config, blocks=4)
    expected = training_logits(model, case)
    with torch.autocast("cpu", torch.bfloat16):
        logits = training_logits(model, case)
    known = expected.isfinite()
    assert (logits.float() - expected)[known].abs().max() < 0.05 * expected[known].abs().max()
    logits.float()[known].square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name

"""Which parameters decay, the learning rate as a function of the step alone, and the average of the weights."""

import math

import pytest
import torch
from support import tiny_config

from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.training.ema import Ema
from mezzotint.training.fragments import Fragment
from mezzotint.training.optim import OptimConfig, learning_rate, make_optimizer, parameter_groups


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_decay(tied):
    model = Denoiser(tiny_config("AM", tie_embeddings=tied, qk_norm=True, noise_level_input=True))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, free = ([names[id(p)] for p in group["params"]] for group in parameter_groups(model, 0.1))
    assert sorted(decayed + free) == sorted(names.values())
    assert all(name.endswith("_proj.weight") or name == "head.weight" for name in decayed)
    assert ("head.weight" in decayed) is not tied
    for part in (
        "A_log",
        "dt_bias",
        ".D",
        "conv1d.weight",
        "conv1d.bias",
        "norm.weight",
        "embed.weight",
        "q_norm.weight",
    ):
        assert any(name.endswith(part) for name in free), part


def test_decay_reaches_the_optimizer():
    model = Denoiser(tiny_config("M"))
    groups = make_optimizer(model, OptimConfig(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def rates(steps: int = 100, **options) -> list[float]:
    config = OptimConfig(**({"lr": 1.0} | options))
    return [learning_rate(config, step=step, steps=steps) for step in range(steps)]


def test_warm_up_is_linear_and_starts_above_zero():
    values = rates(warmup_steps=10)
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])


def test_wsd_holds_and_then_falls_to_nearly_nothing():
    values = rates(warmup_steps=10, decay_share=0.2)
    assert values[9:81] == [1.0] * 72
    assert values[80:] == pytest.approx([(100 - step) / 20 for step in range(80, 100)])
    assert rates(decay_share=0.2, final_share=0.1)[-1] == pytest.approx(0.1 + 0.9 / 20)


def test_cosine_falls_from_the_end_of_warm_up():
    values = rates(shape="cosine", warmup_steps=10, final_share=0.1)
    assert values[10] == pytest.approx(1.0)
    assert values[55] == pytest.approx(0.55)
    assert values[99] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 89 / 90)))
    assert rates(shape="constant") == [1.0] * 100


@pytest.mark.parametrize(
    "bad",
    [{"shape": "linear"}, {"lr": 0.0}, {"beta1": 1.0}, {"decay_share": 0.0}, {"final_share": 1.5}, {"clip": -1.0}],
)
def test_bad_values_are_named(bad):
    with pytest.raises(InputError, match=next(iter(bad)).removesuffix("_share")):
        OptimConfig(**bad)


def test_ema_follows_its_formula():
    weight = torch.zeros(6)
    ema, expected = Ema([Fragment("weight", 0, {"weights": weight})], 0.5), weight.clone()
    for update in range(12):
        weight.add_(torch.randn(6, generator=torch.Generator().manual_seed(update)))
        ema.update()
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * weight
    torch.testing.assert_close(ema.values[0], expected)
    assert ema.updates == 12

"""Every parameter gets its value from `initialise`, and nothing is drawn before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.initialise import Undrawn


@pytest.mark.parametrize(
    "overrides", [{}, {"tie_embeddings": False, "qk_norm": True, "noise_level_input": True}], ids=str
)
def test_every_parameter_is_filled(overrides, monkeypatch):
    config = preset("debug", "hybrid", **overrides)
    made, empty = [], torch.empty
    for leftover in (float("nan"), 1e9):
        monkeypatch.setattr(torch, "empty", lambda *size, value=leftover, **rest: empty(*size, **rest).fill_(value))
        made.append(Denoiser(config, generator=torch.Generator().manual_seed(3)))
    first, second = (dict(model.named_parameters()) for model in made)
    assert all(bool(value.isfinite().all()) for value in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_draws_from_its_own_generator_alone():
    before = torch.get_rng_state()
    Denoiser(preset("debug", "hybrid"), generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_modules_made_undrawn_keep_what_memory_held():
    with Undrawn():
        layer = torch.nn.Linear(4, 4)
        with torch.no_grad():
            layer.weight.fill_(2.0)
        layer.reset_parameters()
    assert layer.weight.eq(2.0).all()


def test_shapes_alone_do_not_import_the_compiler():
    code = (
        "import sys, torch; from mezzotint.models.config import preset; from mezzotint.models.denoiser import Denoiser\n"
        "with torch.device('meta'): Denoiser(preset('debug', 'hybrid'))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""Weight-only int8: the rounded weights' own model exactly, the original within the error of 8 bits, and fewer bytes."""

from __future__ import annotations

import pytest
import torch
from support import generator, random_case
from torch import nn

from mezzotint.models import int8
from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError


def model_of(backbone: str) -> Denoiser:
    config = preset("debug", backbone, d_model=128, head_dim=32, init_std=0.1)
    return Denoiser(config, generator=generator(0)).requires_grad_(False)


def logits_of(model: Denoiser) -> torch.Tensor:
    """Denoise, and advance with a commit of whole blocks before it, as decoding does."""
    case = random_case(model.config, blocks=4, documents=False)
    g = model.config.block_length
    state = model.commit(case.clean[:, : 2 * g], model.start(2, 4 * g))
    first = model.denoise(case.noisy[:, 2], state)
    second, _ = model.advance(case.clean[:, 2 * g : 3 * g], case.noisy[:, 3], state)
    return torch.stack([first, second]).nan_to_num(neginf=0.0)


@torch.no_grad()
def rounded(model: Denoiser) -> Denoiser:
    """The same by hand: every row of a linear layer in steps of its largest weight over 127.5, torchao's scale."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.abs().amax(1, keepdim=True) / 127.5
            module.weight.copy_((module.weight * (1 / scale)).round().clamp(-128, 127) * scale)
    return model


@torch.no_grad()
@pytest.mark.parametrize("backbone", ("attention_gqa", "mamba", "hybrid"))
def test_decoding_with_int8_weights(backbone):
    """The rounded model to 1e-4, in float32; the original to 3% of the spread of its logits, over four layers."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    plain = model_of(backbone)
    expected, before = logits_of(plain), int8.weight_bytes(plain)
    by_hand = logits_of(rounded(model_of(backbone)))
    model = int8.quantize(model_of(backbone))
    found = logits_of(model)
    spread = expected.std()
    assert (found - by_hand).abs().mean() < 1e-4 * spread
    assert 1e-4 * spread < (found - expected).abs().mean() < 0.03 * spread
    linear = sum(module.weight.numel() for module in plain.modules() if isinstance(module, nn.Linear))
    rows = sum(module.weight.shape[0] for module in plain.modules() if isinstance(module, nn.Linear))
    # a row has a float32 scale and, in releases that keep one, an 8-bit zero point
    assert int8.weight_bytes(model) - (before - 3 * linear + 4 * rows) in (0, rows)


def test_without_torchao_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(int8, "load", lambda: (None, "torchao cannot be imported (ImportError: none)"))
    with pytest.raises(InputError, match="need torchao: torchao cannot be imported"):
        int8.quantize(model_of("mamba"))

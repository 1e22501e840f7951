"""Memory at the peak: decoding beside weights and state, training beside weights, gradients, optimizer and activations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mezzotint.eval.fill import fill_random, random_tokens
from mezzotint.eval.memory import storage_peak
from mezzotint.eval.subjects import build, preset_subject
from mezzotint.models.config import parameter_count, preset
from mezzotint.models.denoiser import in_place, run_layer
from mezzotint.training.engine import EngineConfig
from mezzotint.training.objective import ObjectiveConfig
from mezzotint.training.plan_activations import pass_bytes
from mezzotint.training.plan_pass import Pass

BACKBONES = ("attention", "mamba", "hybrid")
CONTEXT = 1024


@torch.no_grad()
@pytest.mark.parametrize("backbone", BACKBONES)
def test_decoding_needs_little_beyond_weights_and_state(backbone):
    """5% at the width of 10m, where logits alone are 2%; every storage that a pass makes counts, its result too."""
    model = build(preset_subject("10m", backbone), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    state = fill_random(model.start(1, CONTEXT + 64), length=CONTEXT, generator=generator)
    clean, canvas = (random_tokens(model.config, 1, 32, generator=generator) for _ in range(2))
    held = sum(parameter.nbytes for parameter in model.parameters()) + state.nbytes
    passes: dict[str, Callable[[], object]] = {
        "denoise": lambda: model.denoise(canvas, state),
        "advance": lambda: model.advance(clean, canvas, state, run=in_place(run_layer)),
    }
    for name, call in passes.items():
        work = storage_peak(call)
        assert work >= canvas.numel() * model.config.vocab_size * 4, "the logits at least are new"
        assert work <= 0.05 * held, f"{name}: {work:,} bytes beside {held:,}"


@pytest.mark.parametrize("backbone", BACKBONES)
def test_training_needs_little_beyond_what_it_keeps(backbone):
    """At most 1.25 times weights, gradients, both moments and kept activations, in float32; test_plan holds the plan's
    bytes against real passes and against what autograd's hooks see."""
    config = preset("10m", backbone)
    p = Pass(
        model=config, objective=ObjectiveConfig(frontiers="all"), engine=EngineConfig(precision="float32"), rows=2,
        row_length=1024,
    )  # fmt: skip
    found = pass_bytes(p, device="cpu")
    held = 16 * parameter_count(config) + found.kept + found.casts
    assert found.kept > 0 and found.work > 0
    assert found.work <= 0.25 * held, f"{found.work:,.0f} bytes beside {held:,.0f}, in the {found.largest} pass"

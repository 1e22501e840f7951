"""Layers compiled for decoding: the same passes, to the last digits; a real compilation takes minutes and is marked slow."""

from __future__ import annotations

import pytest
import torch
from support import PATTERNS, assert_close, generator, ordinary, random_case, tiny_config, tiny_model

from mezzotint.eval.generate import GenerateConfig
from mezzotint.models import compiled
from mezzotint.models.compiled import CompiledLayers
from mezzotint.models.decode import generate
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Sampler, TopK


@pytest.fixture
def uncompiled(monkeypatch):
    """Functions as they are written: what is compiled, without the compilation."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@torch.no_grad()
def check_passes(model, tolerance: float) -> None:
    """Denoise and ragged advances against the layers as they are, over three blocks of two rows."""
    run, case = CompiledLayers(), random_case(model.config, blocks=4, documents=False)
    size, start = model.config.block_length, model.start(2, 4 * model.config.block_length)
    mine, plain = model.commit(case.clean[:, :size], start), None
    plain = mine.clone()
    for block, valid in ((1, None), (2, torch.tensor([1, 0]))):
        canvas, clean = case.noisy[:, block], case.clean[:, block * size : (block + 1) * size]
        assert_close(model.denoise(canvas, mine, run=run), model.denoise(canvas, plain), tolerance)
        logits, mine = model.advance(clean, canvas, mine, valid, run=run)
        expected, plain = model.advance(clean, canvas, plain, valid)
        assert_close(logits, expected, tolerance)
    for ours, theirs in zip(mine.layers, plain.layers):
        for one, other in zip(vars(ours).values(), vars(theirs).values()):
            assert_close(one, other, tolerance)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_layers_are_the_models_own(pattern, uncompiled):
    check_passes(tiny_model(tiny_config(pattern)), 1e-10)


def test_short_blocks_run_as_they_are(uncompiled):
    """Below the convolution's reach no step is taken."""
    check_passes(tiny_model(tiny_config("AM", block_length=2, chunk_length=2)), 1e-10)


@torch.no_grad()
def test_texts_are_the_same(uncompiled):
    """Greedy decoding of ragged prompts, through prefill, denoise and advance."""
    model = tiny_model(tiny_config("MMAM"))
    prompts = [ordinary(model.config, (n,), generator(n)).tolist() for n in (3, 17)]
    settings = {"max_new_tokens": 13, "sampler": Sampler(temperature=0.0)}
    plain = generate(model, prompts, generator=generator(), **settings)
    found = generate(model, prompts, generator=generator(), run=CompiledLayers(), **settings)
    assert found.tokens == plain.tokens and found.nfe == plain.nfe


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="need a C\\+\\+ compiler"):
        CompiledLayers()


def test_a_card_needs_no_compilation():
    with pytest.raises(InputError, match="--compile is for a CPU"):
        GenerateConfig(
            release="r", max_new_tokens=1, reveal=TopK(steps=1), sampler=Sampler(), device="cuda", compiled=True
        )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_compiled_functions_are_what_was_written(dtype, tolerance):
    model = tiny_model(tiny_config("AM")).to(dtype)
    check_passes(model, tolerance)

"""Graphs of denoise and advance: the pass that is captured, its buffers and buckets; captures need a CUDA device."""

from __future__ import annotations

import pytest
import torch
from support import PATTERNS, assert_close, generator, noisy_canvas, ordinary, random_case, tiny_config, tiny_model

from mezzotint.models import decode
from mezzotint.models.errors import InputError
from mezzotint.models.graphs import StepGraphs, bucket
from mezzotint.models.reveal import Sampler, TopK
from mezzotint.models.state import State

CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here")


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a card the captured passes themselves are compared")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_captured_pass_is_the_models_own(pattern):
    """Run in Triton's interpreter: buffers in, logits out; ragged commits, one row at the end of its room."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    model = tiny_model(tiny_config(pattern, block_length=3, chunk_length=3))
    case = random_case(model.config, blocks=4, documents=False)
    state = model.commit(case.clean[:, :9], model.start(2, 12), blocks=torch.tensor([3, 1]))
    state = model.commit(case.clean[:, 9:], state, blocks=torch.tensor([1, 0]))  # lengths 12 and 3
    canvas, clean = noisy_canvas(model.config, (2, 3), generator(1)), ordinary(model.config, (2, 3), generator(2))
    expected = model.denoise(canvas, state)
    valid = torch.tensor([0, 1])
    onward, after = model.advance(clean, canvas, state.clone(), blocks=valid)
    graphs = StepGraphs(model, state)
    buffers = graphs.buffers
    buffers.canvas.copy_(canvas)
    buffers.clean.copy_(clean)
    buffers.lengths.copy_(state.length)
    buffers.valid.copy_(valid)
    before = state.clone()
    assert_close(graphs.call("denoise", 1024), expected)
    for mine, theirs in zip(state.layers, before.layers):
        assert all(torch.equal(a, b) for a, b in zip(vars(mine).values(), vars(theirs).values()))
    assert_close(graphs.call("advance", 1024), onward)
    now = State(state.layers, after.length, 12, 3)
    assert_close(model.denoise(canvas, now), model.denoise(canvas, after))


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a card the captured passes themselves are compared")
def test_long_texts_are_decoded_by_graphs_where_they_capture(monkeypatch):
    """The passes that would be captured, run as they are: greedy texts of ragged prompts are the model's own."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    made = []

    class Uncaptured(StepGraphs):
        def __init__(self, model, state):
            super().__init__(model, state)
            self.captures, self.captured = True, {}
            made.append(self)

        def _capture(self, call):
            return call

    model = tiny_model(tiny_config("AM", block_length=3, chunk_length=3))
    prompts = [ordinary(model.config, (n,), generator(n)).tolist() for n in (2, 7)]
    settings = {"max_new_tokens": 7, "sampler": Sampler(temperature=0.0), "reveal": TopK(steps=2)}
    monkeypatch.setattr(decode, "StepGraphs", Uncaptured)
    plain = decode.generate(model, prompts, generator=generator(), **settings)
    assert made == [], "a short text is not worth a capture"
    monkeypatch.setattr(decode, "GRAPH_TOKENS", 7)
    found = decode.generate(model, prompts, generator=generator(), **settings)
    assert found.tokens == plain.tokens and found.nfe == plain.nfe
    assert {name for name, *_ in made[0].captured} == {"denoise", "advance"}


@torch.no_grad()
@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_a_card_the_models_own_passes_run(pattern):
    """The adopted state goes on being the state, with the same tensors; a clone is where it was."""
    model = tiny_model(tiny_config(pattern))
    case = random_case(model.config, blocks=3, documents=False)
    expected = model(case.clean, case.noisy, case.frontiers)
    state = model.start(2, 12)
    graphs = StepGraphs(model, state)
    graphs.captures = False
    assert_close(graphs.denoise(case.noisy[:, 0], state), expected[:, 0])
    for block in (1, 2):
        clean = case.clean[:, 4 * (block - 1) : 4 * block]
        logits, state = graphs.advance(clean, case.noisy[:, block], state)
        assert_close(logits, expected[:, block])
        assert state.layers is graphs.layers and state.length.tolist() == [4 * block] * 2
    assert_close(graphs.denoise(case.noisy[:, 2], state), expected[:, 2])
    logits, state = graphs.advance(case.clean[:, 8:], case.noisy[:, 2], state, blocks=torch.tensor([0, 1]))
    assert state.length.tolist() == [8, 12]
    assert graphs.captured == {}


def test_foreign_states_other_sizes_and_full_states_are_refused():
    model = tiny_model(tiny_config("M"))
    state = model.start(2, 4)
    graphs, canvas = StepGraphs(model, state), torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(InputError, match="not the one"):
        graphs.denoise(canvas, model.start(2, 4))
    with pytest.raises(InputError, match=r"tokens are \(1, 4\)"):
        graphs.denoise(canvas[:1], state)
    _, state = graphs.advance(canvas, canvas, state)
    with pytest.raises(InputError, match="room for 4 tokens"):
        graphs.advance(canvas, canvas, state)


def test_buckets():
    assert [bucket(n) for n in (1, 1024, 1025, 4096, 262_145)] == [1024, 1024, 2048, 4096, 524_288]


@pytest.mark.gpu
@CARD
@torch.no_grad()
@pytest.mark.parametrize("pattern", PATTERNS)
def test_captured_passes_on_a_card(pattern):
    """Over five blocks and a change of rows: float32, so that a wrong length or a stale buffer stands out."""
    model = tiny_model(tiny_config(pattern, block_length=16, chunk_length=16, head_dim=16, d_state=16, ssm_head_dim=8))
    model = model.float().cuda()
    case = random_case(model.config, blocks=6, documents=False)
    clean, noisy = case.clean.cuda(), case.noisy.cuda()
    state = model.start(2, 96)
    graphs, plain = StepGraphs(model, state), state.clone()
    assert graphs.captures, "a backend of this card was declined: see `mezzotint-eval doctor`"
    for block in range(5):
        for _ in range(2):
            mine, theirs = graphs.denoise(noisy[:, block], state), model.denoise(noisy[:, block], plain)
            torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
        valid = torch.tensor([1, block % 2])
        tokens = clean[:, 16 * block : 16 * (block + 1)]
        mine, state = graphs.advance(tokens, noisy[:, block + 1], state, blocks=valid)
        theirs, plain = model.advance(tokens, noisy[:, block + 1], plain, blocks=valid)
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
        assert state.length.tolist() == plain.length.tolist()

"""Whole models that go the way of a CUDA device, on the CPU: kernels in Triton's interpreter, FlexAttention uncompiled."""

from __future__ import annotations

import pytest
import torch
from support import PATTERNS, assert_close, generator, noisy_canvas, ordinary, random_case, tiny_config, tiny_model
from torch.nn.attention.flex_attention import flex_attention

from mezzotint.models.ops import cuda_attention, flex_backend, fused_step, triton_checks

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a card tests/test_gpu.py goes this way")


@pytest.fixture
def chosen(monkeypatch):
    """Every backend of our own is chosen, and counts its calls; float64 goes through them too."""
    calls: dict[str, int] = {}

    def counted(module, name):
        function = getattr(module, name)

        def call(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(cuda_attention, "serves", lambda device, dtype, cached: True)
    monkeypatch.setattr(flex_backend, "_compiled", lambda: flex_attention)
    monkeypatch.setattr(fused_step, "takes", lambda x, layout, state: state is not None and fused_step.fits(layout))
    monkeypatch.setattr(triton_checks, "reads", lambda x: True)
    monkeypatch.setattr(triton_checks, "scans", lambda state: True)
    counted(fused_step, "run")
    counted(cuda_attention, "_cached")
    counted(flex_backend, "attend")
    return calls


@torch.no_grad()
@pytest.mark.parametrize("pattern", PATTERNS)
def test_decoding_through_the_kernels_is_the_plain_training_pass(pattern, chosen, monkeypatch):
    """Denoise, advance and ragged commits over four blocks; chunks of two, which are read by the fused kernel."""
    model = tiny_model(tiny_config(pattern, block_length=3, chunk_length=6))
    config, g = model.config, generator(3)
    case = random_case(config, blocks=4, documents=False)
    with monkeypatch.context() as plain:
        plain.setattr(cuda_attention, "serves", lambda device, dtype, cached: False)
        for name in ("reads", "scans"):
            plain.setattr(triton_checks, name, lambda x: False)
        expected = model(case.clean, case.noisy, case.frontiers)
    state = model.commit(case.clean[:, :6], model.start(2, 12))
    assert_close(model.denoise(case.noisy[:, 2], state), expected[:, 2])
    last, after = model.advance(case.clean[:, 6:9], case.noisy[:, 3], state.clone())
    assert_close(last, expected[:, 3])
    ragged = torch.tensor([1, 0])
    offered = torch.cat([case.clean[:1, 6:9], ordinary(config, (1, 3), g)])
    both, forked = model.advance(offered, case.noisy[torch.arange(2), torch.tensor([3, 2])], state, blocks=ragged)
    assert_close(both, torch.stack([expected[0, 3], expected[1, 2]]))
    assert forked.length.tolist() == [9, 6] and after.length.tolist() == [9, 9]
    assert chosen.get("run", 0) == 3 * pattern.count("M") and ("_cached" in chosen) == ("A" in pattern)


@torch.no_grad()
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_training_pass_through_flex_attention(pattern, chosen, monkeypatch):
    """Documents, all frontiers; the last layer asks for noisy tokens alone."""
    model = tiny_model(tiny_config(pattern, chunk_length=8))
    case = random_case(model.config, blocks=5)
    found = model(case.clean, case.noisy, case.frontiers, documents=case.documents)
    assert chosen.get("attend", 0) == pattern.count("A")
    monkeypatch.setattr(cuda_attention, "serves", lambda device, dtype, cached: False)
    for name in ("reads", "scans"):
        monkeypatch.setattr(triton_checks, name, lambda x: False)
    assert_close(found, model(case.clean, case.noisy, case.frontiers, documents=case.documents))


@torch.no_grad()
def test_documents_inside_a_block_go_the_plain_way(chosen):
    model = tiny_model(tiny_config("A", block_length=8, chunk_length=8))
    canvas = noisy_canvas(model.config, (1, 1, 8), generator(4))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    model(canvas[:, 0, :0], canvas, torch.zeros(1, 1, dtype=torch.int64), documents=documents)
    assert chosen == {}


def test_layouts_that_are_no_single_step():
    from mezzotint.models.layout import make_layout

    def fits(clean: int, frontiers: list[int], documents=None, blocks=None) -> bool:
        return fused_step.fits(
            make_layout(
                block_length=4, clean_tokens=4 * clean, frontiers=torch.tensor([frontiers], dtype=torch.int64),
                documents=documents, blocks=blocks,
            )
        )  # fmt: skip

    assert fits(0, [0]) and fits(1, [1]) and fits(1, []) and fits(1, [0], blocks=torch.tensor([0]))
    assert not fits(2, [2]) and not fits(1, [0]) and not fits(0, [0, 0])
    assert not fits(1, [1], documents=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))

"""Adapters of other projects' kernels, each against its package's own plain-torch reference; none needs a GPU here."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from oracles import block_attention_oracle, block_conv_oracle
from references import pure_python, source_of
from support import assert_close, generator, gradients_of

from mezzotint.models.ops import causal_conv1d_backend, flash_attn_backend, flex_backend, mamba_ssm_backend

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here")
BACKENDS = (causal_conv1d_backend, flash_attn_backend, flex_backend, mamba_ssm_backend)


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__.split(".")[-1])
def test_declined_on_a_cpu_in_a_sentence(backend):
    assert "cpu" in backend.declined(CPU)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__.split(".")[-1])
def test_what_can_be_imported_passes_its_check(backend):
    reason = backend.declined(torch.device("cuda"))
    if reason and "cannot be imported" in reason:
        pytest.skip(reason)
    assert reason is None


# ---- causal-conv1d ----


@pytest.mark.parametrize("size, width", [(5, 4), (2, 4), (1, 3)])
def test_convolution_through_causal_conv1d(size, width, monkeypatch):
    with pure_python(
        "causal_conv1d",
        causal_conv1d__cpp_functions=dict.fromkeys(
            ("causal_conv1d_fwd_function", "causal_conv1d_bwd_function", "causal_conv1d_update_function")
        ),
    ):
        from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref
    monkeypatch.setattr(causal_conv1d_backend, "load", lambda: (causal_conv1d_ref, ""))
    leaves = {
        "u": normal(2, 3, size, 5), "left": normal(2, 3, width - 1, 5, seed=1), "weight": normal(5, width, seed=2),
        "bias": normal(5, seed=3),
    }  # fmt: skip
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    found, expected = causal_conv1d_backend.block_conv(**leaves), block_conv_oracle(**leaves)
    assert_close(found, expected)
    for mine, theirs in zip(gradients_of(leaves, [found]).values(), gradients_of(leaves, [expected]).values()):
        assert_close(mine, theirs)


def test_convolutions_that_causal_conv1d_does_not_take(monkeypatch):
    monkeypatch.setattr(causal_conv1d_backend, "declined", lambda device: None)
    narrow = torch.float32
    for dtype, channels, width, taken in (
        (narrow, 16, 4, True), (torch.float64, 16, 4, False), (narrow, 12, 4, False), (narrow, 16, 5, False)
    ):  # fmt: skip
        u = SimpleNamespace(is_cuda=True, dtype=dtype, device=CPU)
        assert causal_conv1d_backend.takes(u, torch.empty(channels, width)) is taken


# ---- flash-attn ----


def flash_reference():
    """flash_attn_with_kvcache as its documentation has it, on attention_ref of flash-attn's own tests."""
    text = source_of("flash_attn") / "tests" / "test_flash_attn.py"
    if not text.exists():
        pytest.skip("this flash-attn was installed without its tests, which hold its reference")
    body = text.read_text()
    start = body.index("def construct_local_mask(")
    end = body.index("\ndef ", body.index("def attention_ref("))
    space: dict = {}
    exec("import math, torch\nfrom einops import rearrange, repeat\n" + body[start:end], space)

    def kernel(q, k_cache, v_cache, *, cache_seqlens, cache_batch_idx, causal, return_softmax_lse):
        keys, values = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
        seen = torch.arange(keys.shape[1])[None] < cache_seqlens[:, None]
        out, _ = space["attention_ref"](q, keys, values, key_padding_mask=seen, causal=causal, upcast=False)
        rep = q.shape[2] // keys.shape[2]
        scores = torch.einsum("bthd,bshd->bhts", q, keys.repeat_interleave(rep, dim=2)) / math.sqrt(q.shape[-1])
        lse = scores.masked_fill(~seen[:, None, None], -torch.inf).logsumexp(-1)
        blind = cache_seqlens == 0  # the kernel leaves infinity there, and what it likes in the output
        return out.masked_fill(blind[:, None, None, None], torch.nan), lse.masked_fill(blind[:, None, None], torch.inf)

    return kernel


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_cached_attention_through_flash_attn(heads, monkeypatch):
    kernel = flash_reference()
    monkeypatch.setattr(flash_attn_backend, "load", lambda: (kernel, ""))
    q = normal(2, heads[0], 3, 5, 8)
    k, v = normal(2, heads[1], 19, 8, seed=1), normal(2, heads[1], 19, 8, seed=2)
    hi = torch.tensor([[4, 0, 19], [7, 19, 1]], dtype=torch.int32)
    out, lse = flash_attn_backend.attend_prefix(q, k, v, hi)
    some = (hi > 0)[:, None, :, None, None]
    expected = block_attention_oracle(q[:, :, [0, 2]], k, v, torch.zeros(2, 2), hi[:, [0, 2]])
    assert_close(out[:, :, [0, 2]], expected)
    assert torch.equal(out * ~some, torch.zeros_like(out)) and bool((lse[0, :, 1] == -torch.inf).all())
    # joined with a block's own keys it is one softmax
    own = normal(2, heads[1], 3, 5, 8, seed=3), normal(2, heads[1], 3, 5, 8, seed=4)
    rep = heads[0] // heads[1]
    scores = torch.matmul(q, own[0].repeat_interleave(rep, 1).transpose(-1, -2)) / math.sqrt(8)
    mine = torch.matmul(scores.softmax(-1), own[1].repeat_interleave(rep, 1))
    both = torch.logaddexp(lse, scores.logsumexp(-1))
    joined = out * (lse - both).exp()[..., None] + mine * (scores.logsumexp(-1) - both).exp()[..., None]
    assert_close(joined[:, :, [0, 2]], block_attention_oracle(
        q[:, :, [0, 2]], k, v, torch.zeros(2, 2), hi[:, [0, 2]], tuple(t[:, :, [0, 2]] for t in own)
    ))  # fmt: skip


# ---- FlexAttention ----


@pytest.mark.parametrize("size, heads", [(4, (2, 2)), (32, (4, 2)), (33, (2, 1))])
def test_both_streams_through_flex_attention(size, heads):
    """Uncompiled on the CPU: several tiles of 128, documents, a frontier at 0, lengths that are no multiple of a tile."""
    lo = torch.tensor([[0, 0, 2, 2, 0, 2, 2], [0, 0, 0, 3, 0, 0, 3]]) * size
    hi = torch.tensor([[1, 2, 3, 4, 0, 2, 3], [1, 2, 3, 4, 1, 2, 4]]) * size
    q, k, v = (
        normal(2, heads[0], 7 * size, 8),
        normal(2, heads[1], 7 * size, 8, seed=1),
        normal(2, heads[1], 7 * size, 8, seed=2),
    )
    plan = flex_backend.plan_flex(lo, hi, clean_blocks=4, block_length=size, device=CPU, compiled=False)
    found = flex_backend.attend(q, k, v, plan).unflatten(2, (7, size))
    blocks = [t.unflatten(2, (7, size)) for t in (q, k, v)]
    keys, values = k[:, :, : 4 * size], v[:, :, : 4 * size]
    clean = dense(blocks[0][:, :, :4], keys, values, lo[:, :4], hi[:, :4], None)
    noisy = dense(blocks[0][:, :, 4:], keys, values, lo[:, 4:], hi[:, 4:], (blocks[1][:, :, 4:], blocks[2][:, :, 4:]))
    assert_close(found, torch.cat([clean, noisy], dim=2))
    alone = flex_backend.attend(q[:, :, 4 * size :], k, v, plan).unflatten(2, (3, size))
    assert_close(alone, noisy)


def dense(q, k, v, lo, hi, own):
    """Softmax with a mask over all keys and own keys; held against the literal loop in the smallest case."""
    rep = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(rep, dim=1)[:, :, None] for t in (k, v))
    place = torch.arange(k.shape[3])
    seen = (place >= lo[..., None]) & (place < hi[..., None])
    scores = (torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])).masked_fill(
        ~seen[:, None, :, None], -torch.inf
    )
    values = v.expand(-1, -1, q.shape[2], -1, -1)
    if own is not None:
        mine, theirs = (t.repeat_interleave(rep, dim=1) for t in own)
        scores = torch.cat([scores, torch.matmul(q, mine.transpose(-1, -2)) / math.sqrt(q.shape[-1])], dim=-1)
        values = torch.cat([values, theirs], dim=3)
    return torch.matmul(scores.softmax(-1), values)


def test_the_dense_mask_is_the_literal_loop():
    q, k, v = normal(1, 2, 2, 3, 4), normal(1, 1, 9, 4, seed=1), normal(1, 1, 9, 4, seed=2)
    own = normal(1, 1, 2, 3, 4, seed=3), normal(1, 1, 2, 3, 4, seed=4)
    lo, hi = torch.tensor([[0, 2]]), torch.tensor([[4, 9]])
    for mine in (None, own):
        assert_close(dense(q, k, v, lo, hi, mine), block_attention_oracle(q, k, v, lo, hi, mine))


def test_flex_tiles_are_counted():
    """One document of 8 clean and 8 noisy blocks of 64: unseen tiles are left out, whole ones not masked."""
    hi = torch.cat([torch.arange(1, 9), torch.arange(8)])[None] * 64
    plan = flex_backend.plan_flex(torch.zeros_like(hi), hi, clean_blocks=8, block_length=64, device=CPU, compiled=False)
    assert plan.mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert plan.mask.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1, 2, 2, 2, 2]

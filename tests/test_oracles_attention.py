"""Block attention and block convolution against dense loops, outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from oracles import block_attention_oracle, block_conv_oracle
from support import assert_close, assert_same_gradients, generator, gradients_of
from torch import Tensor
from torch.nn import functional as F

from mezzotint.models.ops import flash_cpu, products, tiles
from mezzotint.models.ops.attention import block_attention, softmax_tiles
from mezzotint.models.ops.conv import block_conv
from mezzotint.models.ops.joined import attend

# ---- attention ----------------------------------------------------------------------------------------------------


def test_oracles_are_torchs_own_functions():
    """The loops, on the two cases that torch has: a dense mask with grouped queries, and a plain causal convolution."""
    g = generator(4)
    q, k, v = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((1, 4, 3, 2, 6), *[(1, 2, 8, 6)] * 2))
    lo, hi = torch.tensor([[0, 1, 3]]), torch.tensor([[2, 7, 4]])
    keys = torch.arange(8)
    mask = ((keys >= lo[0, :, None]) & (keys < hi[0, :, None])).repeat_interleave(2, dim=0)
    expected = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, enable_gqa=True)
    assert_close(block_attention_oracle(q, k, v, lo, hi).flatten(2, 3), expected, 1e-14)
    u, weight, bias = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((1, 1, 6, 5), (5, 4), (5,)))
    line = F.pad(u[0, 0].T, (3, 0))[None]
    expected = F.silu(F.conv1d(line, weight[:, None], bias, groups=5))[0].T
    assert_close(
        block_conv_oracle(u, torch.zeros(1, 1, 3, 5, dtype=torch.float64), weight, bias)[0, 0], expected, 1e-14
    )


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("noisy", [False, True], ids=["clean", "noisy"])
@pytest.mark.parametrize("tile_tokens", [128, 6])
def test_block_attention(heads: int, kv_heads: int, noisy: bool, tile_tokens: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "TILE_TOKENS", tile_tokens)
    g = generator(5)
    lo = torch.tensor([[0, 0, 6, 9], [0, 3, 3, 3]])
    hi = torch.tensor([[3, 6, 9, 12], [3, 6, 9, 10]])
    if noisy:  # the first block of a document sees no clean key at all
        hi = torch.tensor([[0, 6, 6, 12], [3, 3, 9, 10]])
    leaves = {
        name: torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
        for name, shape in {
            "q": (2, heads, 4, 3, 6),
            "k": (2, kv_heads, 12, 6),
            "v": (2, kv_heads, 12, 6),
            "own_k": (2, kv_heads, 4, 3, 6),
            "own_v": (2, kv_heads, 4, 3, 6),
        }.items()
    }
    check_attention(leaves, lo, hi, noisy)


def check_attention(leaves: dict[str, Tensor], lo: Tensor, hi: Tensor, noisy: bool) -> None:
    """The fused kernel, products in slabs of all, of some heads and of some keys, and the readable form."""
    own = (leaves["own_k"], leaves["own_v"]) if noisy else None
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    expected = block_attention_oracle(q, k, v, lo, hi, own)
    gradients = gradients_of(leaves, [expected])
    plan = tiles.plan_tiles(lo, hi, block_length=q.shape[3], device=q.device, dtype=q.dtype)
    assert_close(block_attention(q, k, v, lo, hi, own), expected)
    for way in ("fused", "readable", 1 << 20, 50, 5):
        out = by(way, q, k, v, plan, own)
        assert_close(out, expected)
        assert_same_gradients(gradients_of(leaves, [out]), gradients)


def by(way: str | int, q: Tensor, k: Tensor, v: Tensor, plan: list[tiles.Tile], own=None) -> Tensor:
    """Attention on the fused CPU kernel, in the readable form, or by products in slabs of so many scores."""
    if way == "readable":
        return softmax_tiles(q, k, v, own, plan)
    if way == "fused":
        return attend(q, k, v, plan, own, flash_cpu)
    return attend(q, k, v, plan, own, _Slabs(way))


class _Slabs:
    """`products` with a size of slab, in the backward pass too."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getattr__(self, name: str):
        def call(*arguments, **options):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(products, "SLAB_ELEMENTS", {"cpu": self.size})
                return getattr(products, name)(*arguments, **options)

        return call


@pytest.mark.parametrize("length", [40, 64, 200])
def test_products_of_bfloat16_are_as_good_as_the_fused_kernels(length: int):
    """Errors against float64 of outputs and gradients: scores are rounded once, as their factors are."""
    g = generator(9)
    q, k, v, grad = (torch.randn(2, 2, n, 64, generator=g) for n in (32, length, length, 32))
    exact = results(flash_cpu, *(t.double() for t in (q, k, v, grad)))
    halves = [t.bfloat16() for t in (q, k, v, grad)]
    errors = [
        [float((a.double() - b).norm() / b.norm()) for a, b in zip(results(kernel, *halves), exact)]
        for kernel in (products, flash_cpu)
    ]
    assert all(mine <= 1.5 * fused and mine < 0.01 for mine, fused in zip(*errors)), errors


def results(kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    out, lse = kernel.forward(q, k, v, None, blind=False)
    return [out, *kernel.backward(grad, q, k, v, out, lse, None)]


def test_a_block_that_sees_nothing_gets_zeros():
    """In its own tile and beside blocks that see something; no gradient goes anywhere from it, and none is NaN."""
    g = generator(6)
    q, k, v = (
        torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 2, 2, 3, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    )
    for lo, hi in (([0, 3], [0, 6]), ([0, 0], [0, 0])):
        lo, hi = torch.tensor([lo]), torch.tensor([hi])
        plan = tiles.plan_tiles(lo, hi, block_length=3, device=q.device, dtype=q.dtype)
        for way in ("fused", "readable", 1 << 20, 5):
            out = by(way, q, k, v, plan) if plan else block_attention(q, k, v, lo, hi)
            assert not out[:, :, 0].any()
            if not out.requires_grad:
                continue
            for gradient in torch.autograd.grad(out[:, :, 0].sum(), [q, k, v]):
                assert not gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_block_attention_grid(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "TILE_TOKENS", 1 + seed % 9)
    g = generator(seed)
    batch, blocks, length, keys = 2, 1 + seed % 7, 1 + seed % 4, 20
    lo = torch.randint(0, keys, (batch, blocks), generator=g)
    hi = lo + 1 + (torch.rand((batch, blocks), generator=g) * (keys - lo)).long()
    noisy = seed % 2 == 0
    if noisy:
        hi = torch.where(torch.rand(hi.shape, generator=g) < 0.3, lo, hi)
    shapes = {"q": (batch, 4, blocks, length, 4), "k": (batch, 2, keys, 4), "v": (batch, 2, keys, 4)}
    shapes |= {"own_k": (batch, 2, blocks, length, 4), "own_v": (batch, 2, blocks, length, 4)}
    leaves = {
        name: torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()
    }
    check_attention(leaves, lo, hi, noisy)


# ---- convolution --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, width", [(1, 4), (2, 4), (4, 4), (7, 3), (3, 2)])
def test_block_conv(length: int, width: int):
    g = generator(7)
    shapes = {"u": (2, 3, length, 5), "left": (2, 3, width - 1, 5), "weight": (5, width), "bias": (5,)}
    leaves = {
        name: torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()
    }
    out, expected = block_conv(*leaves.values()), block_conv_oracle(*leaves.values())
    assert_close(out, expected)
    assert_same_gradients(gradients_of(leaves, [out]), gradients_of(leaves, [expected]))

"""Row-wise operations in slabs against torch's own, outputs and gradients: norms, the MLP's gate, the cross-entropy."""

from __future__ import annotations

import pytest
import torch
from support import assert_close, assert_same_gradients, generator, gradients_of
from torch.nn import functional as F

from mezzotint.models.ops import linear, slabs, swiglu
from mezzotint.models.ops.nll import nll
from mezzotint.models.ops.norm import gated_rms_norm, rms_norm
from mezzotint.models.ops.swiglu import gated

WAYS = {
    "norm": (lambda x, y, w: rms_norm(x, w, 1e-5), lambda x, y, w: F.rms_norm(x, (7,), w, 1e-5)),
    "gated norm": (
        lambda x, y, w: gated_rms_norm(x, y, w, 1e-5),
        lambda x, y, w: F.rms_norm(x * F.silu(y), (7,), w, 1e-5),
    ),
    "gate": (lambda x, y, w: gated(x, y), lambda x, y, w: F.silu(x) * y),
}


@pytest.mark.parametrize("elements", [1 << 18, 20, 1], ids=["one slab", "two rows", "single rows"])
@pytest.mark.parametrize("name", WAYS)
def test_slabs_are_torchs_own(name: str, elements: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slabs, "ELEMENTS", elements)
    g = generator(1)
    leaves = {
        key: torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
        for key, shape in {"x": (3, 5, 14), "y": (3, 5, 7), "w": (7,)}.items()
    }
    ours, theirs = WAYS[name]
    half = leaves["x"][..., 7:]  # no tensor of its own
    out, expected = (way(half, leaves["y"], leaves["w"]) for way in (ours, theirs))
    assert_close(out, expected)
    used = {key: leaf for key, leaf in leaves.items() if name != "norm" or key != "y"}
    used = {key: leaf for key, leaf in used.items() if name != "gate" or key != "w"}
    assert_same_gradients(gradients_of(used, [out]), gradients_of(used, [expected]))


def test_the_gate_of_other_devices_is_torchs_own(monkeypatch: pytest.MonkeyPatch):
    """Without casts: as it runs on CUDA, and as its memory is planned."""
    monkeypatch.setattr(swiglu, "plain", lambda _: True)
    x, y = (torch.randn(3, 5, generator=generator(n), dtype=torch.float64, requires_grad=True) for n in (1, 2))
    leaves = {"x": x, "y": y}
    assert_close(gated(x, y), F.silu(x) * y)
    assert_same_gradients(gradients_of(leaves, [gated(x, y)]), gradients_of(leaves, [F.silu(x) * y]))
    narrow = gated(x.detach().bfloat16(), y.detach().bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert_close(narrow.double(), F.silu(x) * y, 2e-2)


@pytest.mark.parametrize("rows", [1, 6])
def test_a_product_in_runs_is_the_product(rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "WIDE", 70)
    monkeypatch.setattr(linear, "RUN", 4)
    monkeypatch.setattr(linear, "ROWS", 5)
    x, weight = (torch.randn(n, 7, generator=generator(n), dtype=torch.float64) for n in (rows, 10))
    with torch.no_grad():
        assert linear.in_runs(x, weight) == (rows <= 5)
        assert_close(linear.linear(x[None], weight), F.linear(x[None], weight))
        assert not linear.in_runs(x, weight[:9]) and not linear.in_runs(x.bfloat16(), weight.bfloat16())
    assert not linear.in_runs(x, weight)


@pytest.mark.parametrize("elements", [1 << 18, 20, 1])
def test_cross_entropy_is_torchs_own(elements: int, monkeypatch: pytest.MonkeyPatch):
    """With tokens that cannot be, whose gradient is zero and no NaN."""
    monkeypatch.setattr(slabs, "ELEMENTS", elements)
    logits = torch.randn(6, 9, generator=generator(2), dtype=torch.float64)
    logits[:, 4] = -torch.inf
    logits.requires_grad_()
    targets = torch.tensor([0, 1, 8, 3, 3, 5])
    weights = torch.rand(6, generator=generator(3), dtype=torch.float64)
    found = []
    for losses in (nll(logits, targets), F.cross_entropy(logits, targets, reduction="none")):
        found.append((losses.detach(), *torch.autograd.grad((losses * weights).sum(), [logits])))
    assert_close(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1])
    assert not found[0][1][:, 4].any()


def test_cross_entropy_of_bfloat16_logits_sums_in_float32():
    logits = torch.randn(4, 1000, generator=generator(4)).bfloat16()
    targets = torch.tensor([1, 2, 3, 4])
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    found = nll(logits, targets)
    assert found.dtype == torch.float32
    assert_close(found.double(), expected, 1e-5)

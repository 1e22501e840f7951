"""The checks that decline a backend on a card, run here on stand-ins for its kernels: they pass what is right, alone."""

from __future__ import annotations

import math

import pytest
import torch
from test_backends import flash_reference

from mezzotint.models.ops import causal_conv1d_backend, flash_attn_backend, flex_backend, fused_step, triton_checks
from mezzotint.models.ops.probe import failure

CPU, F32 = torch.device("cpu"), torch.float32
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a card the checks run themselves")


def test_a_failure_is_a_sentence():
    one = torch.ones(3)
    assert failure(lambda: [(one, one)], 1e-3) is None
    assert "off by 5.0e-01, more than 1.0e-03" in failure(lambda: [(one, one), (one, one * 0.5)], 1e-3)
    assert "off by nan" in failure(lambda: [(one * math.nan, one)], 1e-3)

    def broken():
        raise RuntimeError("no compiler was found\nand a trace")

    assert failure(broken, 1e-3) == "its check on this device ended in RuntimeError: no compiler was found"


@torch.no_grad()
def test_a_check_differentiates_wherever_it_is_asked():
    def run():
        x = torch.ones(2, requires_grad=True)
        return [(torch.autograd.grad(x.square().sum(), x)[0], torch.full((2,), 2.0))]

    assert failure(run, 1e-6) is None
    with torch.inference_mode():
        assert failure(run, 1e-6) is None


@pytest.mark.parametrize("check", [fused_step._probe, triton_checks._attend, triton_checks._read])
def test_our_kernels_pass_their_checks(check):
    """In float32: the interpreter's products are wrong in bfloat16."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    with torch.no_grad():
        assert failure(lambda: check(CPU, F32), 1e-4) is None
    off = [(found * 1.01, expected) for found, expected in check(CPU, F32)]
    assert "was off by" in failure(lambda: off, 1e-4)


def test_the_scan_passes_its_check():
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    assert failure(lambda: triton_checks._scan(CPU), 1e-4) is None


def test_flash_attn_passes_its_check(monkeypatch):
    kernel = flash_reference()
    monkeypatch.setattr(flash_attn_backend, "load", lambda: (kernel, ""))
    assert failure(lambda: flash_attn_backend._probe(CPU, F32), 1e-4) is None


def test_causal_conv1d_passes_its_check(monkeypatch):
    def kernel(x, weight, bias, *, initial_states, activation):
        assert activation == "silu" and x.stride(1) == 1 and initial_states.stride(1) == 1
        padded = torch.cat([initial_states, x], dim=2)
        return torch.nn.functional.silu(torch.conv1d(padded, weight[:, None], bias, groups=len(weight)))

    monkeypatch.setattr(causal_conv1d_backend, "load", lambda: (kernel, ""))
    assert failure(lambda: causal_conv1d_backend._probe(CPU), 1e-4) is None
    monkeypatch.setattr(causal_conv1d_backend, "load", lambda: (lambda *a, **k: kernel(*a, **k) * 1.01, ""))
    assert "was off by" in failure(lambda: causal_conv1d_backend._probe(CPU), 1e-4)


def test_flex_attention_passes_its_check(monkeypatch):
    """A dense mask, made of the plan's own rule, in the place of the kernel, which has no gradients on a CPU."""

    def kernel(q, k, v, *, block_mask, enable_gqa):
        rows, queries, keys = (torch.arange(n) for n in (q.shape[0], q.shape[2], k.shape[2]))
        seen = block_mask.mask_mod(rows[:, None, None], 0, queries[None, :, None], keys[None, None])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen[:, None], enable_gqa=enable_gqa)

    monkeypatch.setattr(flex_backend, "_compiled", lambda: kernel)
    assert failure(lambda: flex_backend._probe(CPU), 1e-4) is None

"""mamba-ssm's own Triton scan behind our adapter, in Triton's interpreter, against the token-by-token recurrence."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from oracles import ssd_oracle
from references import pure_python
from support import generator, starts_of

from mezzotint.models.ops import mamba_ssm_backend

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a card the adapter checks itself (test_backends.py)"
)
TOLERANCE = 2e-5  # its kernels sum in float32
G, H, P, N = 8, 2, 16, 16


@pytest.fixture(scope="module")
def scan():
    """mamba_chunk_scan_combined, its autotuners cut to one configuration and CUDA's calls made harmless."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=1, name="none"))

    def first_alone(configs, key, **options):
        return lambda kernel: triton.runtime.Autotuner(
            kernel, kernel.arg_names, configs[:1], key, **{"reset_to_zero": None, "restore_value": None} | options
        )

    patch.setattr(triton, "autotune", first_alone)
    with pure_python("mamba_ssm"):
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        patch.setattr(mamba_ssm_backend, "load", lambda: (mamba_chunk_scan_combined, ""))
        yield mamba_chunk_scan_combined
    patch.undo()


def case(batch: int, blocks: int):
    g = generator(3)
    shapes = ((batch, blocks, G, H, P), (batch, blocks, G, 2, H), (H,), (batch, blocks, G, N), (batch, blocks, G, N))
    x, dt, A, B, C = (torch.randn(shape, generator=g) for shape in shapes)
    return x, 0.4 * dt.sigmoid(), -A.exp(), B, C, torch.randn((batch, N, H, P), generator=g)


def close(found, expected):
    assert (found.double() - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max().item())


def test_scans_inside_blocks(scan):
    """Both directions and their gradients; j = i is heard once, by the forward scan."""
    x, dt, A, B, C, state = case(1, 2)
    leaves = [t.requires_grad_() for t in (x, dt, A, B, C)]
    found = mamba_ssm_backend.in_block(x[0], dt[0], A, B[0], C[0], None)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    alone = torch.zeros(1, 2, dtype=torch.int64)
    expected, _ = ssd_oracle(
        *wide, clean_blocks=0, frontiers=alone, starts=alone, state=torch.zeros_like(state).double()
    )
    close(found, expected[0])
    weight = torch.randn(found.shape, generator=generator(4))
    for mine, theirs in zip(
        torch.autograd.grad((found * weight).sum(), leaves), torch.autograd.grad((expected[0] * weight).sum(), wide)
    ):
        close(mine, theirs)


@torch.no_grad()
def test_clean_scan_goes_on_from_a_state(scan):
    """Three blocks, no multiple of a chunk; the second row's second document starts from nothing."""
    x, dt, A, B, C, state = case(2, 3)
    starts, skip = starts_of([[3], [1, 2]]), torch.randn(H, generator=generator(5))
    y, after = mamba_ssm_backend.clean_scan(x, dt, A, B, C, starts=starts, state=state, skip=skip)
    wide = [t.double() for t in (x, dt, A, B, C)]
    nobody = torch.zeros(2, 0, dtype=torch.int64)
    expected, last = ssd_oracle(*wide, clean_blocks=3, frontiers=nobody, starts=starts, state=state.double())
    close(y, expected + skip.double()[:, None] * wide[0])
    close(after, last)

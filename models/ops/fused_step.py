"""When a Mamba layer's pass is one step from cached state, and that step through our Triton kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..layout import Layout, make_layout
from ..state import SSMState
from . import triton_lang
from .probe import Pair, failure

if TYPE_CHECKING:
    from ..mamba2 import Mamba2

NARROW = (torch.float32, torch.bfloat16, torch.float16)  # float64 goes the general way
TOLERANCE = 3e-2  # of the check, in bfloat16


def declined(device: torch.device) -> str | None:
    """None if the fused step serves `device`, else the reason in a sentence."""
    return triton_lang.declined(device) or _checked(device)


@functools.cache
def _checked(device: torch.device) -> str | None:
    return failure(lambda: _probe(device), TOLERANCE)


def takes(x: Tensor, layout: Layout, state: SSMState | None) -> bool:
    """Whether a pass over x (B, L, D) is a denoise, an advance or the commit of one block that the kernels serve."""
    if not x.is_cuda or state is None or x.dtype not in NARROW or torch.is_grad_enabled():
        return False
    return fits(layout) and declined(x.device) is None


def fits(layout: Layout) -> bool:
    """At most one clean and one noisy block, the noisy one behind all clean ones that count; no document begins."""
    if layout.clean_blocks > 1 or layout.noisy_blocks > 1 or layout.inner is not None or bool(layout.starts.any()):
        return False
    return layout.noisy_blocks == 0 or torch.equal(layout.frontiers, layout.reached())


def run(mixer: Mamba2, x: Tensor, layout: Layout, state: SSMState) -> tuple[Tensor, SSMState]:
    """`Mamba2.forward` of such a pass: outputs of the tokens that the layout wants, and the next state."""
    from .triton_block_step import block_step

    y, ssm, tail = block_step(
        mixer.in_proj(x), state.ssm, state.conv, mixer.step_weights(), block_length=layout.block_length,
        clean_blocks=layout.clean_blocks, valid=layout.blocks,
    )  # fmt: skip
    return mixer.out_proj(layout.outputs(y)), SSMState(ssm, tail)


def _probe(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Pair]:
    """An advance of three rows, one of which commits nothing, at the head and state sizes of the large presets."""
    from ..config import ModelConfig
    from ..mamba2 import Mamba2

    config = ModelConfig(
        pattern="M", vocab_size=4, d_model=128, d_ff=1, block_length=32, chunk_length=32, d_state=128, ssm_head_dim=64
    )
    draws, mixer = torch.Generator().manual_seed(0), Mamba2(config).requires_grad_(False)
    for parameter in mixer.parameters():
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draws))
    mixer = mixer.to(device, dtype)
    x = torch.randn((3, 64, 128), generator=draws).to(device, dtype)
    empty = mixer.start(3, 0, dtype, device)
    state = SSMState(*(torch.randn(t.shape, generator=draws).to(t) for t in vars(empty).values()))
    valid = torch.tensor([1, 0, 1])
    layout = make_layout(
        block_length=32,
        clean_tokens=32,
        frontiers=valid[:, None],
        blocks=valid,
        lengths=torch.zeros(3, dtype=torch.long),
    )
    with torch.no_grad():
        y, after = run(mixer, x, layout, state)
        expected, general = mixer.general(x, layout, state)
    return [(y[:, 32:], expected[:, 32:]), (after.ssm, general.ssm), (after.conv, general.conv)]

"""The Mamba-2 mixer, bidirectional inside each block: one pass over clean and noisy blocks (Dao and Gu 2024)."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .errors import InputError
from .layers import RMSNorm, WideLinear
from .layout import Layout, pick
from .ops import fused_step, torch_step
from .ops.conv import block_conv
from .ops.linear import linear
from .ops.norm import gated_rms_norm
from .ops.ssd import ssd
from .state import SSMState


class Mamba2(nn.Module):
    """in_proj (z, x, B, C, dt forward, dt backward), conv1d, SSD, gated RMSNorm, out_proj."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        heads, channels = config.ssm_heads, config.conv_channels
        self.in_proj = WideLinear(config.d_model, config.d_inner + channels + 2 * heads)
        self.conv1d = nn.Conv1d(channels, channels, config.d_conv, groups=channels)
        self.dt_bias = nn.Parameter(torch.zeros(2, heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(config.d_inner, config.norm_eps)
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=False)

    def start(self, batch: int, max_length: int, dtype: torch.dtype, device: torch.device) -> SSMState:
        """The empty state, zeros; its size does not depend on `max_length`."""
        config = self.config
        wide = torch.promote_types(dtype, torch.float32)
        shape = (batch, config.d_state, config.ssm_heads, config.ssm_head_dim)
        ssm = torch.zeros(shape, dtype=wide, device=device)
        return SSMState(ssm, torch.zeros(batch, config.d_conv - 1, config.conv_channels, dtype=dtype, device=device))

    def forward(self, x: Tensor, layout: Layout, state: SSMState | None) -> tuple[Tensor, SSMState]:
        """One pass over x (B, T + K*G, D), clean tokens first -> (B, T + K*G, D) and the next state.

        Where the layout wants no clean outputs: -> (B, K*G, D).
        """
        if state is not None and fused_step.takes(x, layout, state):
            return fused_step.run(self, x, layout, state)
        if state is not None and self.steps(x, layout):
            return self.step(x, layout, state, torch_step.block_step)
        return self.general(x, layout, state)

    def step(
        self, x: Tensor, layout: Layout, state: SSMState, block_step: torch_step.BlockStep
    ) -> tuple[Tensor, SSMState]:
        """`forward` of a denoise, an advance or the commit of one block, through `block_step`."""
        z, u, dt = self._project(x, layout)
        u, dt = (t.unflatten(1, (-1, layout.block_length)) for t in (u, dt))
        valid = None if layout.blocks is None else layout.blocks.to(x.device)
        weights = self.step_weights()
        y, ssm, tail = block_step(
            z, u, dt.unflatten(-1, (2, -1)), state.ssm, state.conv, weights, valid, layout.clean_blocks
        )
        return self.out_proj(y), SSMState(ssm, tail)

    def step_weights(self) -> torch_step.StepWeights:
        assert self.conv1d.bias is not None
        return torch_step.StepWeights(
            self.conv1d.weight[:, 0],
            self.conv1d.bias,
            self.dt_bias,
            self.A_log,
            self.D,
            self.norm.weight,
            self.norm.eps,
        )

    def steps(self, x: Tensor, layout: Layout) -> bool:
        """Whether a pass over x (B, L, D) is one that `step` takes."""
        sizes = {"heads": self.config.ssm_heads, "size": layout.block_length, "width": self.config.d_conv}
        blocks = layout.clean_blocks + layout.noisy_blocks
        return torch_step.serves(x.device, batch=len(x), blocks=blocks, **sizes) and fused_step.fits(layout)

    def general(self, x: Tensor, layout: Layout, state: SSMState | None) -> tuple[Tensor, SSMState]:
        """`forward` for every device and every layout."""
        config = self.config
        if layout.inner is not None:
            raise InputError("a document ends inside a block: Mamba layers need documents filled up to whole blocks")
        z, u, dt = self._project(x, layout)
        state = self.start(len(x), 0, u.dtype, u.device) if state is None else state
        u, dt = (t.unflatten(1, (-1, layout.block_length)) for t in (u, dt))  # (B, M, G, .)
        dt = self._step(dt)
        valid = layout.valid(x.device)
        if valid is not None:
            u = u.masked_fill(~valid[:, :, None, None], 0)
            dt = dt.masked_fill(~valid[:, :, None, None, None], 0)
        left, tail = self._contexts(u, layout, state.conv)
        u = block_conv(u, left, self.conv1d.weight[:, 0], cast(Tensor, self.conv1d.bias))
        xs, B, C = u.split([config.d_inner, config.d_state, config.d_state], dim=-1)
        xs = xs.unflatten(-1, (config.ssm_heads, config.ssm_head_dim))
        y, ssm = ssd(
            xs,
            dt,
            -torch.exp(self.A_log.to(dt.dtype)),
            B,
            C,
            clean_blocks=layout.clean_blocks,
            frontiers=layout.frontiers,
            starts=layout.starts,
            state=state.ssm,
            chunk_blocks=config.chunk_length // config.block_length,
            skip=self.D,
            clean_output=layout.clean_output,
        )
        y = gated_rms_norm(y.flatten(3).flatten(1, 2), z, self.norm.weight, config.norm_eps)
        return self.out_proj(y), SSMState(ssm, tail)

    def _project(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Gate z of the tokens whose outputs are wanted, convolution inputs and step sizes of all."""
        sizes = [self.config.d_inner, self.config.conv_channels, 2 * self.config.ssm_heads]
        if layout.clean_output:
            z, u, dt = self.in_proj(x).split(sizes, dim=-1)
            return z, u, dt
        weight = self.in_proj.weight
        gate, rest = weight[: sizes[0]], weight[sizes[0] :]  # tensors of quantized weights can be sliced, but not split
        u, dt = linear(x, rest).split(sizes[1:], dim=-1)
        return linear(layout.outputs(x), gate), u, dt

    def _step(self, dt: Tensor) -> Tensor:
        """softplus of the projected step sizes, (B, M, G, 2, H), float32 or wider."""
        wide = torch.promote_types(dt.dtype, torch.float32)
        return F.softplus(dt.to(wide).unflatten(-1, (2, -1)) + self.dt_bias.to(wide))

    def _contexts(self, u: Tensor, layout: Layout, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Left convolution contexts of all blocks (B, M, W-1, Ch), each tap masked by document, and the next tail."""
        width, clean = self.config.d_conv - 1, layout.clean_blocks
        table = _left_of_frontiers(u[:, :clean], tail.to(u.dtype), width)  # (B, clean+1, W-1, Ch)
        next_tail = pick(table, layout.reached())[:, 0]
        if clean and not torch.is_grad_enabled():
            next_tail = next_tail.clone()  # who keeps the state would keep the whole table
        index = torch.cat([layout.clean_index(), layout.frontiers], dim=1)
        first = layout.start_of(index)
        if clean and bool((first > 0).any()):
            taps = index[..., None] * layout.block_length - width + torch.arange(width)  # token behind each tap
            seen = (first == 0)[..., None] | (taps >= first[..., None] * layout.block_length)
            return pick(table, index).masked_fill(~seen[..., None].to(u.device), 0), next_tail
        if layout.noisy_blocks == 0:
            return table[:, :clean], next_tail
        left = torch.cat([table[:, :clean], pick(table, layout.frontiers)], dim=1) if clean else table
        return left if clean else pick(left, layout.frontiers), next_tail


def _left_of_frontiers(clean: Tensor, tail: Tensor, width: int) -> Tensor:
    """(B, m+1, width, Ch): the last `width` clean inputs before each frontier 0..m; clean (B, m, G, Ch)."""
    size = clean.shape[2]
    if size >= width:
        return torch.cat([tail[:, None], clean[:, :, size - width :]], dim=1)
    history = torch.cat([tail, clean.flatten(1, 2)], dim=1)  # a context spans several blocks
    return history.unfold(1, width, size).transpose(-1, -2)

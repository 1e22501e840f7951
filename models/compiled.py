"""Decoding steps with what stands between the matrix products of a layer compiled by torch.compile.

On a CPU a step of 32 rows is some dozens of small operations a layer beside products of a millisecond; compiled they are a
few loops. Products stay calls of their own, so that every layer of a model runs the same few compiled functions: one
compilation for a shape and type, kept by torch on the disk for the next process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionPlan
from .denoiser import Layer, run_layer
from .errors import InputError
from .layout import Layout
from .mamba2 import Mamba2
from .ops.torch_step import StepWeights, block_step
from .state import LayerState, SSMState

COMPILERS = ("g++", "clang++", "c++")


class CompiledLayers:
    """A way to run the layers of a decoding pass (`LayerRun`): equal to `run_layer`, and quicker once it is compiled.

    Passes over several clean blocks (prefill) run as they are. The first denoise and the first advance of each batch size
    and type compile: minutes on a busy machine, less where torch's cache on the disk has it. Raises InputError where there
    is no C++ compiler.
    """

    def __init__(self) -> None:
        if not any(map(shutil.which, COMPILERS)):
            raise InputError(f"compiled steps need a C++ compiler, and none of {', '.join(COMPILERS)} is on the path")
        self._norm, self._add_norm = _compiled(_norm), _compiled(_add_norm)
        self._gate, self._step = _compiled(_gate), _compiled(_step)

    def __call__(
        self, layer: Layer, h: Tensor, layout: Layout, attention: AttentionPlan | None, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        if h.device.type != "cpu" or layout.clean_blocks > 1 or torch.is_grad_enabled():
            return run_layer(layer, h, layout, attention, state)
        x = self._norm(h, layer.mixer_norm.weight, layer.mixer_norm.eps)
        after: LayerState | None
        if isinstance(layer.mixer, Mamba2):
            assert isinstance(state, SSMState)
            step = self._block_step if layer.mixer.steps(x, layout) else None
            y, after = layer.mixer.step(x, layout, state, step) if step else layer.mixer(x, layout, state)
        else:
            y, after = layer.mixer(x, attention, state)
        h, x = self._add_norm(layout.outputs(h), y, layer.mlp_norm.weight, layer.mlp_norm.eps)
        mlp = layer.mlp
        return h + mlp.down_proj(self._gate(mlp.gate_proj(x), mlp.up_proj(x))), after

    def _block_step(
        self,
        z: Tensor,
        u: Tensor,
        dt: Tensor,
        state: Tensor,
        tail: Tensor,
        w: StepWeights,
        valid: Tensor | None,
        clean: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if clean and valid is None:  # one function for rows that all commit and for rows of which some do
            valid = torch.ones(len(u), dtype=torch.long)
        weights = (w.conv_weight, w.conv_bias, w.dt_bias, w.A_log, w.D, w.norm, w.eps)
        y, after, following = self._step(z, u, dt, state, tail, *weights, valid, clean)
        return (y, after, following) if clean else (y, state, tail)


def _compiled(function: Callable) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


def _norm(h: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(h.dtype)


def _add_norm(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = h + y
    return h, _norm(h, weight, eps)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.promote_types(up.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up).to(up.dtype)


def _step(z, u, dt, state, tail, conv_weight, conv_bias, dt_bias, A_log, D, norm, eps: float, valid, clean: int):
    weights = StepWeights(conv_weight, conv_bias, dt_bias, A_log, D, norm, eps)
    y, after, following = block_step(z, u, dt, state, tail, weights, valid, clean)
    return (y, after, following) if clean else (y, None, None)

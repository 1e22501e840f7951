"""Denoise and advance as CUDA graphs over one state whose tensors stay where they are; elsewhere they run as they are.

A pass reads three things that change from step to step: tokens, lengths, and which rows commit. Here they are static
tensors on the device, so that one capture serves every step whose context falls into the same bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attention import Attention, AttentionPlan
from .denoiser import Denoiser
from .errors import InputError
from .layers import rope_tables
from .layout import Layout
from .mamba2 import Mamba2
from .ops import fused_step
from .ops.cuda_attention import RangePlan, serves
from .state import KVState, SSMState, State

WARMUPS = 3  # ordinary runs before a capture, in which libraries set themselves up
LEAST_BUCKET = 1024  # tokens of context


@dataclass
class Buffers:
    """What a captured pass reads."""

    clean: Tensor  # (B, G)
    canvas: Tensor  # (B, G)
    lengths: Tensor  # (B,) int64
    valid: Tensor  # (B,) int64: 1 where the clean block counts


@dataclass
class StaticKV(KVState):
    """Keys and values written at lengths that only the device knows; rows that commit nothing keep what they hold."""

    def write(self, k: Tensor, v: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Put k, v (B, Hkv, G, P) behind `lengths` where `tokens` is not 0; both (B,) on the device."""
        last = self.k.shape[2] - k.shape[2]
        place = lengths.clamp(max=last)[:, None] + torch.arange(k.shape[2], device=k.device)
        place = place[:, None, :, None].expand_as(k)
        counts = (tokens > 0)[:, None, None, None]
        for cache, new in ((self.k, k), (self.v, v)):
            cache.scatter_(2, place, torch.where(counts, new.to(cache.dtype), cache.gather(2, place)))


class StepGraphs:
    """The passes of one decoding batch. `state` is adopted: its tensors are written in place, and stay the state.

    Logits of a call are overwritten by the next one. Without a CUDA device, or where one of its backends is declined there,
    `captures` is False and every call is the model's own.
    """

    def __init__(self, model: Denoiser, state: State) -> None:
        self.model, self.layers, self.device = model, state.layers, model.embed.weight.device
        size, batch = model.config.block_length, state.batch
        tokens = torch.full((2, batch, size), model.config.mask_token_id, device=self.device)
        counts = torch.zeros(2, batch, dtype=torch.long, device=self.device)
        self.buffers = Buffers(tokens[0], tokens[1], counts[0], counts[1])
        self.captures = self.device.type == "cuda" and _can_capture(model, self.device)
        self.captured: dict[tuple[str, int, int], Callable[[], Tensor]] = {}

    @torch.no_grad()
    def denoise(self, canvas: Tensor, state: State) -> Tensor:
        """`Denoiser.denoise` of canvas (B, G) on the adopted state."""
        self._check(state, canvas)
        if not self.captures:
            return self.model.denoise(canvas, state)
        return self._run("denoise", state, canvas)

    @torch.no_grad()
    def advance(
        self, clean: Tensor, canvas: Tensor, state: State, blocks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """`Denoiser.advance` by one block; clean, canvas (B, G), blocks (B,) of 0 and 1 on the CPU, None for all."""
        self._check(state, canvas, clean)
        size = self.model.config.block_length
        valid = torch.ones(state.batch, dtype=torch.long) if blocks is None else blocks.cpu()
        length = state.length + valid * size
        if int(length.max()) > state.max_length:
            raise InputError(f"the state has room for {state.max_length} tokens, {int(length.max())} are needed")
        if not self.captures:
            logits, after = self.model.advance(clean, canvas, state, blocks)
            _take(self.layers, after)
            return logits, State(self.layers, after.length, state.max_length, state.block_length)
        self.buffers.clean.copy_(clean, non_blocking=True)
        self.buffers.valid.copy_(valid, non_blocking=True)
        logits = self._run("advance", state, canvas)
        return logits, State(self.layers, length, state.max_length, state.block_length)

    def _check(self, state: State, *tokens: Tensor) -> None:
        if state.layers is not self.layers:
            raise InputError("this state is not the one that the graphs were made for; make them for each state")
        for given in tokens:
            if given.shape != self.buffers.canvas.shape:
                raise InputError(
                    f"tokens are {tuple(given.shape)}; the graphs were made for {tuple(self.buffers.canvas.shape)}"
                )

    def _run(self, name: str, state: State, canvas: Tensor) -> Tensor:
        self.buffers.canvas.copy_(canvas, non_blocking=True)
        self.buffers.lengths.copy_(state.length, non_blocking=True)
        longest = bucket(int(state.length.max()) + state.block_length) if self._attends() else 0
        key = (name, state.batch, longest)
        if key not in self.captured:
            self.captured[key] = self._capture(lambda: self.call(name, longest))
        return self.captured[key]()

    def _attends(self) -> bool:
        return "A" in self.model.config.pattern

    def call(self, name: str, longest: int) -> Tensor:
        """The pass itself, on the buffers alone: everything in it may be captured. Logits (B, G, V)."""
        clean = self.buffers.clean if name == "advance" else self.buffers.clean[:, :0]
        return static_pass(self.model, self.layers, clean, self.buffers, longest=longest)

    def _capture(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Warm-ups advance the state: it is put back. Keys and values behind the length are written again by the replay."""
        kept = [tensor.clone() for tensor in self._recurrent()]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        for tensor, old in zip(self._recurrent(), kept):
            tensor.copy_(old)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _recurrent(self) -> list[Tensor]:
        return [tensor for layer in self.layers if isinstance(layer, SSMState) for tensor in (layer.ssm, layer.conv)]


def bucket(length: int) -> int:
    """The context that a capture is made for: the next power of two. It sets how keys are shared out, not how many."""
    return max(LEAST_BUCKET, 1 << (length - 1).bit_length())


def _can_capture(model: Denoiser, device: torch.device) -> bool:
    """Whether every mixer of the model has a backend there that reads lengths from the device."""
    dtype = model.embed.weight.dtype
    with torch.no_grad():
        attention = "A" not in model.config.pattern or serves(device, dtype, cached=True)
    mamba = "M" not in model.config.pattern or (dtype in fused_step.NARROW and fused_step.declined(device) is None)
    return attention and mamba


def _take(layers: tuple, after: State) -> None:
    """Put what a pass returned into the adopted tensors; keys and values are there already."""
    for layer, new in zip(layers, after.layers):
        if isinstance(layer, SSMState) and isinstance(new, SSMState):
            layer.ssm.copy_(new.ssm)
            layer.conv.copy_(new.conv)


def static_pass(model: Denoiser, layers: tuple, clean: Tensor, buffers: Buffers, *, longest: int) -> Tensor:
    """Denoise `buffers.canvas` behind `clean` (B, G), or behind nothing where clean is (B, 0), which goes into `layers`.

    Equal to `Denoiser.advance` and `Denoiser.denoise`, without a value that the host would have to know.
    """
    layout, attention = _plans(model, clean, buffers, longest)
    h = model._embed(clean, buffers.canvas[:, None], None)
    for index, layer in enumerate(model._layers()):
        if index == len(layers) - 1:
            layout = replace(layout, clean_output=False)
            attention = None if attention is None else replace(attention, layout=layout)
        x, held = layer.mixer_norm(h), layers[index]
        if isinstance(layer.mixer, Attention):
            y, _ = layer.mixer(x, attention, StaticKV(held.k, held.v))
        else:
            assert isinstance(layer.mixer, Mamba2)
            y, after = fused_step.run(layer.mixer, x, layout, held)
            if clean.shape[1]:
                held.ssm.copy_(after.ssm)
                held.conv.copy_(after.conv)
        h = layout.outputs(h) + y
        h = h + layer.mlp(layer.mlp_norm(h))
    return model.logits(h)


def _plans(model: Denoiser, clean: Tensor, buffers: Buffers, longest: int) -> tuple[Layout, AttentionPlan | None]:
    config, size = model.config, model.config.block_length
    batch, blocks = len(clean), clean.shape[1] // size
    nothing = torch.zeros(batch, 1, dtype=torch.long)
    layout = Layout(size, blocks, nothing, nothing, buffers.valid if blocks else None, buffers.lengths)
    if "A" not in config.pattern:
        return layout, None
    behind = buffers.lengths + (buffers.valid * size if blocks else 0)  # what the noisy block sees
    first = torch.stack([buffers.lengths, behind] if blocks else [behind], dim=1)  # where the blocks begin
    rope = None
    if config.positions == "rope":
        positions = (first[:, :, None] + torch.arange(size, device=first.device)).flatten(1)
        rope = rope_tables(config, positions, model.embed.weight.dtype)
    seen = torch.stack([behind] * (blocks + 1), dim=1).to(torch.int32)
    ranges = RangePlan(torch.zeros_like(seen), seen, blocks, size, longest, True)
    return layout, AttentionPlan(layout, [], [], rope, ranges=ranges)

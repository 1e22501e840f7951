"""What stands before the canvas of a block-causal model, per layer: keys and values in parts, or the SSM state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..denoiser import Denoiser
from ..mamba2 import Mamba2
from ..state import KVState, SSMState, State
from .forward import is_attention, layers_of
from .memory import Segment


@dataclass(frozen=True)
class KVPast:
    """Keys and values of one attention layer: fixed parts, some perhaps shared, and a tail (B, room, Hkv, P) to fill.

    The tail is written in place at `used`; a copy that goes another way is made by `Past.fork`.
    """

    fixed: tuple[Segment, ...]
    k: Tensor
    v: Tensor
    used: int = 0

    def segments(self) -> tuple[Segment, ...]:
        if self.used == 0:
            return self.fixed
        return (*self.fixed, Segment(self.k[:, : self.used], self.v[:, : self.used]))

    def append(self, k: Tensor, v: Tensor) -> KVPast:
        """Behind what is there, k and v (B, T, Hkv, P), rotated; a tail without room is copied into a larger one."""
        end = self.used + k.shape[1]
        grown = self
        if end > self.k.shape[1]:
            roomy = [
                torch.cat([old[:, : self.used], torch.zeros_like(new)], dim=1)
                for old, new in ((self.k, k), (self.v, v))
            ]
            grown = dataclasses.replace(self, k=roomy[0], v=roomy[1])
        grown.k[:, self.used : end] = k
        grown.v[:, self.used : end] = v
        return dataclasses.replace(grown, used=end)

    def kept(self, parts: tuple[Segment, ...]) -> KVPast:
        """These parts instead of all that was there; the tail is empty again."""
        return dataclasses.replace(self, fixed=parts, used=0)

    @property
    def tokens(self) -> int:
        """Keys a head can see."""
        return sum(part.k.shape[1] for part in self.fixed) + self.used


@dataclass
class Past:
    """All layers' past; `length` tokens have been read, whatever of them is still held."""

    layers: list[KVPast | SSMState]
    length: int

    def fork(self) -> Past:
        """Another continuation: tails are copied, fixed parts are shared, SSM states are never written in place."""
        forked = [
            dataclasses.replace(layer, k=layer.k.clone(), v=layer.v.clone()) if isinstance(layer, KVPast) else layer
            for layer in self.layers
        ]
        return Past(forked, self.length)


def empty_past(model: Denoiser, batch: int, room: int) -> Past:
    """Nothing yet, and room for `room` tokens."""
    weight = model.embed.weight
    layers: list[KVPast | SSMState] = []
    for layer in layers_of(model):
        if is_attention(layer):
            shape = (batch, room, model.config.n_kv_heads, model.config.head_dim)
            k, v = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
            layers.append(KVPast((), k, v))
        else:
            assert isinstance(layer.mixer, Mamba2)
            layers.append(layer.mixer.start(batch, 0, weight.dtype, weight.device))
    return Past(layers, 0)


def past_of(model: Denoiser, state: State, *, batch: int, room: int) -> Past:
    """The past that a state of `batch` rows holds, or one row for all: then keys and values stay that row's, read by all.

    All rows of the state are equally long.
    """
    past = empty_past(model, batch, room)
    length = int(state.length[0])
    for index, layer in enumerate(state.layers):
        if isinstance(layer, KVState):
            part = Segment(layer.k[:, :, :length].transpose(1, 2), layer.v[:, :, :length].transpose(1, 2))
            own = past.layers[index]
            assert isinstance(own, KVPast)
            past.layers[index] = dataclasses.replace(own, fixed=(part,) if length else ())
        else:
            rows = torch.arange(batch, device=layer.ssm.device) % layer.ssm.shape[0]
            past.layers[index] = SSMState(layer.ssm[rows], layer.conv[rows])
    past.length = length
    return past

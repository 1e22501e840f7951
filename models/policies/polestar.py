"""Polestar: between refreshes, tokens of the clusters whose attention drifted most are recomputed (arXiv 2607.14107)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from .canvas import Canvas
from .interface import Carry, Plan, Policy, Sight, bidirectional_only, require
from .look import Delta, Look

ROUNDS = 5  # of k-means


@dataclass(frozen=True)
class Clusters:
    """Of one layer: the cluster (B, L) of every column, -1 outside the window, and each cluster's last attention.

    places (B, C) are the positions at which the clusters' centres ask, attention (B, H, C, L) what they saw last.
    """

    labels: Tensor
    places: Tensor
    attention: Tensor


@dataclass(frozen=True)
class Drift:
    """Clusters of all layers (None before the first step), tokens revealed in the last step and since an update (B,).

    full and due (B,): whether this step recomputes everything (or the window), or the drifted clusters.
    """

    layers: tuple[Clusters | None, ...]
    last: Tensor
    since: Tensor
    full: Tensor
    due: Tensor
    positions: Tensor


@dataclass(frozen=True, kw_only=True)
class Polestar(Policy):
    """At the start of a block everything is recomputed (every `window_every`-th block its window alone), then clustered.

    The window are `before` blocks before the block and `after` behind it; -1 for all there are. In every layer its
    tokens fall into `clusters` by spherical k-means of the layer's input. After a step that revealed more than
    `min_last` tokens, or more than `min_since` since the last update, the centres look again at all keys, the block's
    fresh ones among them; the divergence KL(now || before) of their attention, meant over heads, is a cluster's drift.
    The tokens of the `refreshed` clusters with the largest drift (`last_layer` in the last layer) are recomputed beside
    the block; after other steps the block alone is. The paper's early commit of uncertain tokens is a reveal rule and
    is not here. All clusters of a window of everything, after every step (min_last 0), is exact.
    """

    name: ClassVar[str] = "polestar"
    carry: ClassVar[Carry] = "hidden"
    layerwise: ClassVar[bool] = True
    clusters: int = 8
    refreshed: int = 4
    last_layer: int = 1
    before: int = 2
    after: int = 1
    min_last: int = 1
    min_since: int = 2
    window_every: int = 4

    def __post_init__(self) -> None:
        require(self.clusters >= 1, self.name, f"clusters is {self.clusters}; it must be at least 1")
        for name in ("refreshed", "last_layer"):
            value = getattr(self, name)
            require(0 <= value <= self.clusters, self.name, f"{name} is {value}; it must be from 0 to {self.clusters}")
        for name in ("before", "after"):
            require(
                getattr(self, name) >= -1, self.name, f"{name} is {getattr(self, name)}; it must be -1 (all) or more"
            )
        for name in ("min_last", "min_since", "window_every"):
            require(getattr(self, name) >= 0, self.name, f"{name} is {getattr(self, name)}; it must be 0 or more")

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        return bidirectional_only(self.name, bidirectional)

    def begin(self, canvas: Canvas, sight: Sight) -> Drift:
        none = torch.zeros_like(sight.step)
        return Drift((None,) * sight.layers, none, none, none > 0, none > 0, canvas.positions.to(none.device))

    def plan(self, sight: Sight, state: Drift) -> tuple[Plan, Drift]:
        full = sight.block_step == 0
        due = ~full & ((state.last > self.min_last) | (state.since > self.min_since))
        since = torch.where(full | due, 0, state.since)
        return Plan(sight.everything()), dataclasses.replace(state, full=full, due=due, since=since)

    def observe(self, delta: Delta, state: Drift) -> Drift:
        revealed = delta.revealed.sum(dim=1)
        last = torch.where(delta.sight.active, revealed, state.last)
        return dataclasses.replace(state, last=last, since=state.since + revealed)

    def at_layer(self, look: Look, state: Drift) -> tuple[Tensor, Drift]:
        sight = look.sight
        window = self._window(sight)
        block = sight.columns(sight.block.start, sight.block.stop)
        old = state.layers[look.layer]
        if bool(state.full.any()):
            chosen = window | block if old is not None and self._window_only(sight) else sight.everything()
            new = self._cluster(look, window, state.positions)
            return chosen, _with(state, look.layer, _where(state.full, new, old))
        if not bool(state.due.any()) or old is None:
            return block, state
        now = self._attention(look, old, slice(sight.block.start, sight.block.stop))
        drift = divergence(now, old.attention)
        count = self.last_layer if look.layer == sight.layers - 1 else self.refreshed
        drifted = in_clusters(old.labels, drift, count) & state.due[:, None]
        new = dataclasses.replace(old, attention=now)
        return block | drifted, _with(state, look.layer, _where(state.due, new, old))

    def _window_only(self, sight: Sight) -> bool:
        return self.window_every > 0 and sight.block_number % self.window_every == self.window_every - 1

    def _window(self, sight: Sight) -> Tensor:
        """(B, L): the columns around the block that are clustered."""
        size = sight.block.stop - sight.block.start
        low = 0 if self.before < 0 else sight.block.start - self.before * size
        high = sight.length if self.after < 0 else sight.block.stop + self.after * size
        return sight.columns(low, high) & ~sight.columns(sight.block.start, sight.block.stop)

    def _cluster(self, look: Look, window: Tensor, positions: Tensor) -> Clusters:
        """Clusters of the window by what the layer is given, and what their centres see of all keys now."""
        count = min(self.clusters, window.shape[1])  # more than there are columns would be empty
        labels = spherical_clusters(look.stream, window, count)
        look.count(ROUNDS * int(window.sum()) * count * look.stream.shape[2])
        places = middles(look.stream, labels, count, positions)
        empty = look.stream.new_zeros(0)
        found = Clusters(labels, places, empty)
        return dataclasses.replace(found, attention=self._attention(look, found, slice(0, look.sight.length)))

    def _attention(self, look: Look, clusters: Clusters, fresh: slice) -> Tensor:
        """(B, H, C, L): attention of the clusters' centres over all keys, those of columns `fresh` as they are now."""
        keys = look.stored_keys().clone()
        keys[:, fresh] = look.keys(fresh)
        centres = means(look.stream, clusters.labels, clusters.places.shape[1])
        return look.rows(centres, clusters.places, keys)


def _with(state: Drift, layer: int, clusters: Clusters) -> Drift:
    return dataclasses.replace(state, layers=(*state.layers[:layer], clusters, *state.layers[layer + 1 :]))


def _where(rows: Tensor, new: Clusters, old: Clusters | None) -> Clusters:
    """`new` in the rows (B,) that are True."""
    if old is None:
        return new
    return Clusters(
        torch.where(rows[:, None], new.labels, old.labels),
        torch.where(rows[:, None], new.places, old.places),
        torch.where(rows[:, None, None, None], new.attention, old.attention),
    )


def spherical_clusters(x: Tensor, window: Tensor, count: int) -> Tensor:
    """(B, L) labels 0 .. count-1 of the columns of x (B, L, D) in `window`, -1 elsewhere: k-means on the sphere.

    Starts from columns spread evenly over the window; a centre that loses all its columns stays where it is.
    """
    unit = F.normalize(x, dim=-1)
    order = (~window).int().argsort(dim=1, stable=True)
    inside = window.sum(dim=1, keepdim=True)
    spread = (torch.arange(count, device=x.device) * inside.clamp(min=1)) // count
    first = order.gather(1, spread)
    centres = unit.gather(1, first[..., None].expand(-1, -1, x.shape[2]))
    labels = torch.full(window.shape, -1, device=x.device)
    for _ in range(ROUNDS):
        labels = torch.where(window, (unit @ centres.transpose(1, 2)).argmax(dim=2), -1)
        member = F.one_hot(labels + 1, count + 1)[..., 1:].to(x)
        total = member.transpose(1, 2) @ unit
        held = member.sum(dim=1) > 0
        centres = torch.where(held[..., None], F.normalize(total, dim=-1), centres)
    return labels


def means(x: Tensor, labels: Tensor, count: int) -> Tensor:
    """(B, C, D): the mean of the columns of x (B, L, D) with each label, zeros where there is none."""
    member = F.one_hot(labels + 1, count + 1)[..., 1:].to(x)
    return (member.transpose(1, 2) @ x) / member.sum(dim=1).clamp(min=1)[..., None]


def middles(x: Tensor, labels: Tensor, count: int, positions: Tensor) -> Tensor:
    """(B, C): the position of the column of each cluster that is most like its mean; of an empty one, that of column 0."""
    likeness = F.normalize(means(x, labels, count), dim=-1) @ F.normalize(x, dim=-1).transpose(1, 2)  # (B, C, L)
    own = labels[:, None] == torch.arange(count, device=x.device)[:, None]
    return positions.gather(1, likeness.masked_fill(~own, -torch.inf).argmax(dim=2))


def divergence(now: Tensor, before: Tensor) -> Tensor:
    """(B, C): KL(now || before) in nats of attention weights (B, H, C, L), meant over heads."""
    tiny = torch.finfo(now.dtype).tiny
    ratio = now.clamp(min=tiny).log() - before.clamp(min=tiny).log()
    return (now * ratio).sum(dim=3).mean(dim=1)


def in_clusters(labels: Tensor, drift: Tensor, count: int) -> Tensor:
    """(B, L) bool: columns whose cluster is among the `count` of the largest drift (B, C)."""
    top = drift.argsort(dim=1, descending=True, stable=True)[:, :count]
    return (labels[:, :, None] == top[:, None, :]).any(dim=2)

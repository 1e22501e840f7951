"""What a policy is shown while a step runs and after it; everything that costs something is counted as it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..denoiser import Denoiser
from .cost import Cost
from .forward import Tables, attend, attention_of, layers_of, project, rotated, tables_of
from .interface import Sight
from .memory import Memory, Pick, Segment
from .past import KVPast


@dataclass(frozen=True)
class Look:
    """One layer, before it runs: the stream of hidden states (B, L, D) it is given, and what memory holds of it.

    Columns that no earlier layer of this step recomputed hold in the stream what the policy's `carry` says.
    """

    layer: int
    stream: Tensor
    sight: Sight
    model: Denoiser
    memory: Memory
    tables: Tables | None  # of all columns and one more
    outside: tuple[Segment, ...]
    first: int
    cost: Cost

    def values(self, columns: slice) -> Tensor:
        """Fresh values (B, n, Hkv, P) of some columns: the value projection alone."""
        layer = layers_of(self.model)[self.layer]
        x = self.stream[:, columns]
        projection = attention_of(layer).v_proj
        self.count(x.shape[0] * x.shape[1] * projection.weight.numel())
        return projection(layer.mixer_norm(x)).unflatten(-1, (-1, self.model.config.head_dim))

    def stored_values(self, columns: slice) -> Tensor:
        """What memory holds of the same columns."""
        return self.memory.v[self.layer][:, columns.start - self.first : columns.stop - self.first]

    def stored_keys(self) -> Tensor:
        """(B, L-first, Hkv, P), rotated."""
        return self.memory.k[self.layer][:, :-1]

    def keys(self, columns: slice) -> Tensor:
        """Fresh rotated keys (B, n, Hkv, P) of some columns."""
        layer = layers_of(self.model)[self.layer]
        x = self.stream[:, columns]
        mixer = attention_of(layer)
        self.count(x.shape[0] * x.shape[1] * mixer.k_proj.weight.numel())
        tables = None if self.tables is None else (self.tables[0][:, columns], self.tables[1][:, columns])
        return rotated(project(mixer, layer.mixer_norm(x)).k, tables)

    def rows(self, vectors: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """Attention weights (B, H, C, S) of any hidden states (B, C, D), put at positions (B, C), over rotated `keys`."""
        layer = layers_of(self.model)[self.layer]
        mixer = attention_of(layer)
        q = rotated(project(mixer, layer.mixer_norm(vectors)).q, tables_of(self.model, positions))
        batch, count = vectors.shape[:2]
        config = self.model.config
        pairs = batch * count * keys.shape[1] * config.n_heads * config.head_dim
        self.count(batch * count * mixer.q_proj.weight.numel() + pairs)
        found = attend(q, [Segment(keys, keys)], weights=True).weights
        assert found is not None
        return found

    def count(self, operations: int) -> None:
        """Add to what decisions cost; a policy that works on what it was shown counts that work with this."""
        self.cost.decision_operations += operations


@dataclass(frozen=True)
class Scene:
    """One attention layer at work: the rotated queries (B, Q, H, P) of `columns`, and all that they can look at.

    outside: segments beside the canvas; inside: the canvas's own columns, those just computed among them. past: what of
    `outside` a block-causal model has read so far, `length` tokens, whatever of them is still held; None without one.
    """

    layer: int
    q: Tensor
    columns: Pick
    outside: tuple[Segment, ...]
    inside: Segment
    past: KVPast | None
    length: int
    sight: Sight
    cost: Cost

    def count(self, operations: int) -> None:
        """As in Look."""
        self.cost.decision_operations += operations


@dataclass(frozen=True)
class Delta:
    """What a step revealed: columns (B, L) bool, and the logits (B, n, V) of the block's columns it was revealed from."""

    revealed: Tensor
    logits: Tensor
    sight: Sight
    cost: Cost

    def entropies(self) -> Tensor:
        """(B, n) entropy in nats of each token that was revealed now, -inf for the block's others; O(V) for each of them."""
        chosen = self.revealed[:, self.sight.block]
        rows = self.logits[chosen]
        self.cost.decision_operations += rows.numel()
        log_p = rows.to(torch.float64).log_softmax(dim=-1)
        entropy = -torch.where(log_p.isneginf(), 0.0, log_p.exp() * log_p).sum(dim=-1)
        out = torch.full(chosen.shape, -torch.inf, dtype=torch.float64, device=rows.device)
        out[chosen] = entropy
        return out

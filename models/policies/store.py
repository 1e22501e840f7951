"""What requests share: parts of prompts computed alone, and states of prefixes, each held once, by their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..denoiser import Denoiser
from ..errors import InputError
from ..state import State
from .adapters import Adapters
from .cost import Cost
from .forward import Tables, attend, attention_of, finish, is_attention, layers_of, project, rotated, tables_of
from .memory import Segment
from .past import Past, empty_past


@dataclass(frozen=True)
class Packet:
    """Keys before their rotation and values (B, n, Hkv, P) of every layer, of tokens that saw themselves alone.

    hidden: what one chosen layer was given (B, n, D), for a policy that goes on from there.
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    hidden: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.k[0].shape[1]

    def segment(self, layer: int, tables: Tables | None, seen: Tensor | None = None) -> Segment:
        """One layer's keys and values, at the positions of `tables`."""
        return Segment(self.k[layer], self.v[layer], tables, seen)


def alone(model: Denoiser, h: Tensor, *, block: int | None = None, hidden_at: int | None = None) -> Packet:
    """The packet of embedded tokens h (B, n, D) that see each other and nothing else.

    block None: every token sees all; else a token sees all blocks of so many tokens up to its own, as a block-causal
    model reads a prompt. hidden_at: the layer whose input is kept. Attention layers only.
    """
    count = h.shape[1]
    tables = tables_of(model, torch.arange(count)[None])
    size = count if block is None else block
    runs = [(start, min(start + size, count)) for start in range(0, count, size)]
    keys, values, hidden = [], [], None
    for index, layer in enumerate(layers_of(model)):
        assert is_attention(layer), "packets are keys and values: Mamba layers have none"
        hidden = h if index == hidden_at else hidden
        own = project(attention_of(layer), layer.mixer_norm(h))
        q, k = rotated(own.q, tables), rotated(own.k, tables)
        parts = [attend(q[:, low:high], [Segment(k[:, :high], own.v[:, :high])]).y for low, high in runs]
        keys.append(own.k)
        values.append(own.v)
        h = finish(layer, h, torch.cat(parts, dim=1))
    return Packet(tuple(keys), tuple(values), hidden)


@dataclass
class Store:
    """Shared parts of one model's prompts, by name and tokens. It grows with what is asked for; `clear` empties it."""

    packets: dict[tuple, Packet] = field(default_factory=dict)
    states: dict[tuple, State] = field(default_factory=dict)
    owner: Denoiser | None = None
    checked: set[str] = field(default_factory=set)  # fingerprints of adapters that are known to be the owner's

    def bind(self, model: Denoiser) -> None:
        """InputError for a store that holds what another model computed."""
        if self.owner is not None and self.owner is not model:
            raise InputError("this store holds keys and values of another model; make a Store for each model")
        self.owner = model

    def check(self, adapters: Adapters, model: Denoiser) -> None:
        """InputError for adapters of another model; the weights are hashed only once."""
        if adapters.fingerprint not in self.checked:
            adapters.check(model)
            self.checked.add(adapters.fingerprint)

    def clear(self) -> None:
        self.packets.clear()
        self.states.clear()


@dataclass(frozen=True)
class Hooks:
    """What a policy may run or look up before the first step; the harness counts it."""

    model: Denoiser
    store: Store
    cost: Cost
    spans: tuple[tuple[int, int], ...]
    room: int = 0  # tokens that a block-causal past must have room for

    def empty_past(self, batch: int) -> Past:
        return empty_past(self.model, batch, self.room)

    def packet(self, tokens: Tensor, *, hidden_at: int | None = None) -> Packet:
        """The packet of shared tokens (n,), from the store or computed now."""
        return self.packet_of(("tokens", hidden_at), tokens, self.model.embed(tokens[None]), hidden_at=hidden_at)

    def packet_of(
        self, name: tuple, tokens: Tensor, h: Tensor, *, block: int | None = None, hidden_at: int | None = None
    ) -> Packet:
        """The packet of embedded tokens h (1, m, D), kept under `name` and the tokens (n,) they were made of."""
        key = (*name, tuple(tokens.tolist()))
        if key not in self.store.packets:
            self.store.packets[key] = alone(self.model, h, block=block, hidden_at=hidden_at)
            self.cost.shared_token_layers += h.shape[1] * self.cost.layers
        return self.store.packets[key]

    def note(self, **values: object) -> None:
        """Echo what the policy came to use: numbers that follow from the model or the prompt."""
        self.cost.effective |= values

    def stacked(self, packets: list[Packet]) -> Packet:
        """One packet for the batch: the rows' own ones, or the one that all of them share."""
        if all(packet is packets[0] for packet in packets):
            return packets[0]
        k, v = zip(*((packet.k, packet.v) for packet in packets))
        return Packet(
            tuple(torch.cat(layer) for layer in zip(*k)),
            tuple(torch.cat(layer) for layer in zip(*v)),
            None if packets[0].hidden is None else torch.cat([p.hidden for p in packets if p.hidden is not None]),
        )

"""KV Packet: documents computed alone between trained soft tokens, put together without recomputation (arXiv 2604.13226)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..config import ModelConfig
from ..denoiser import Denoiser
from .adapters import Adapters
from .canvas import Canvas
from .forward import tables_of
from .interface import Plan, Policy, Sight
from .memory import Segment
from .past import KVPast, Past
from .store import Hooks, Packet


@dataclass(frozen=True, kw_only=True)
class KVPacket(Policy):
    """Each shared part of the prompt is a document: soft header, document and soft trailer read alone, once for all.

    Their keys are rotated to where the packet stands, nothing of a document is ever recomputed, and the request's own
    tokens look at all packets. adapters None: documents without soft tokens, plain concatenation. On a bidirectional
    model packets stand where the documents stood; on a block-causal one they come first, in their order, and all other
    tokens of the prompt are committed behind them.
    """

    name: ClassVar[str] = "packet"
    stores: ClassVar[bool] = False
    spans: ClassVar[bool] = True
    adapters: Adapters | None = None

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        if "M" not in config.pattern:
            return None
        return (
            f"policy packet has no object on the pattern {config.pattern}: an SSM state of one document cannot be put "
            "behind that of another; use fork for a shared prefix"
        )

    def effective(self) -> dict[str, object]:
        adapters = self.adapters
        return super().effective() | {
            "adapters": None if adapters is None else adapters.fingerprint,
            "soft_tokens": 0 if adapters is None else len(adapters.header) + len(adapters.trailer),
        }

    def arrange(self, canvas: Canvas, hooks: Hooks) -> Canvas:
        return self.placed(canvas, self.packets(canvas.tokens, canvas.spans, hooks, block=None), hooks)

    def open(self, prompts: Tensor, hooks: Hooks) -> tuple[Past, Tensor]:
        return self.opened(prompts, self.packets(prompts, hooks.spans, hooks, block=block_of(hooks.model)), hooks)

    def placed(self, canvas: Canvas, packets: list[Packet], hooks: Hooks) -> Canvas:
        """A bidirectional canvas without its documents, the packets in their places."""
        own = torch.ones(canvas.length, dtype=torch.bool)
        starts, moved, gained = [], canvas.positions.clone(), 0
        for (start, stop), packet in zip(canvas.spans, packets):
            own[start:stop] = False
            starts.append(start + gained)
            gained += packet.tokens - (stop - start)
            moved[:, stop:] += packet.tokens - (stop - start)
        columns = own.nonzero()[:, 0]
        gone = canvas.length - len(columns)
        return dataclasses.replace(
            canvas,
            tokens=canvas.tokens[:, columns.to(canvas.tokens.device)],
            positions=moved[:, columns],
            response=canvas.response - gone,
            start=canvas.start - gone,
            outside=self._segments(packets, starts, hooks),
        )

    def opened(self, prompts: Tensor, packets: list[Packet], hooks: Hooks) -> tuple[Past, Tensor]:
        """The past that starts with the packets, and the tokens of block-causal prompts that are no document's."""
        starts = [sum(packet.tokens for packet in packets[:number]) for number in range(len(packets))]
        past = hooks.empty_past(len(prompts))
        for index, parts in enumerate(self._segments(packets, starts, hooks)):
            layer = past.layers[index]
            assert isinstance(layer, KVPast)
            past.layers[index] = layer.kept(parts)
        past.length = sum(packet.tokens for packet in packets)
        own = torch.ones(prompts.shape[1], dtype=torch.bool)
        for start, stop in hooks.spans:
            own[start:stop] = False
        return past, prompts[:, own.to(prompts.device)]

    def packets(
        self, tokens: Tensor, spans: tuple[tuple[int, int], ...], hooks: Hooks, *, block: int | None
    ) -> list[Packet]:
        """The packet of every part, of all rows where they agree, else of each row."""
        if self.adapters is not None:
            hooks.store.check(self.adapters, hooks.model)
        name = ("packet", None if self.adapters is None else self.adapters.fingerprint)
        return [
            hooks.stacked(
                [hooks.packet_of(name, row, self.wrapped(row, hooks), block=block) for row in tokens[:, start:stop]]
            )
            for start, stop in spans
        ]

    def wrapped(self, document: Tensor, hooks: Hooks) -> Tensor:
        """(1, m, D): the embedded document (n,) between header and trailer."""
        return wrap(hooks.model.embed(document[None]), self.adapters)

    def _segments(self, packets: list[Packet], starts: list[int], hooks: Hooks) -> tuple[tuple[Segment, ...], ...]:
        tables = [
            tables_of(hooks.model, torch.arange(start, start + packet.tokens)[None])
            for packet, start in zip(packets, starts)
        ]
        return tuple(
            tuple(packet.segment(layer, table) for packet, table in zip(packets, tables))
            for layer in range(hooks.cost.layers)
        )

    def plan(self, sight: Sight, state: Any) -> tuple[Plan, Any]:
        return Plan(sight.everything()), state


def wrap(h: Tensor, adapters: Adapters | None) -> Tensor:
    """Embedded documents h (B, n, D) between header and trailer."""
    if adapters is None:
        return h
    header, trailer = (part.to(h).expand(len(h), -1, -1) for part in (adapters.header, adapters.trailer))
    return torch.cat([header, h, trailer], dim=1)


def block_of(model: Denoiser) -> int:
    """Tokens of a block in which a block-causal model reads a document."""
    return model.config.block_length

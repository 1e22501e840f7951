"""Which elements of every parameter, and of its optimizer state, this rank holds: views into the engine's own memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS, FIRST, SECOND = "weights", "exp_avg", "exp_avg_sq"
MOMENTS = (FIRST, SECOND)
KINDS = (WEIGHTS, *MOMENTS)


@dataclass(frozen=True)
class Fragment:
    """Elements start .. start + n of a parameter in flat order: float32 views (n,), written by every optimizer step.

    The fragments of all ranks together are every element once, whatever their number and the ZeRO stage; so what is
    saved as fragments can be read back into any other cut.
    """

    name: str
    start: int
    views: dict[str, Tensor]  # by kind: float32 weights and AdamW's two moments

    @property
    def size(self) -> int:
        return self.views[WEIGHTS].numel()


def whole_fragments(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> list[Fragment]:
    """Without ZeRO every rank holds everything: a rank's fragments are its equal share of each parameter."""
    found = []
    for name, p in model.named_parameters():
        begin, end = p.numel() * rank // world, p.numel() * (rank + 1) // world
        whole = {WEIGHTS: p.detach()} | {kind: optimizer.state[p][kind] for kind in MOMENTS}
        found.append(Fragment(name, begin, {kind: value.view(-1)[begin:end] for kind, value in whole.items()}))
    return [fragment for fragment in found if fragment.size]


def flat_fragments(model: nn.Module) -> Iterator[Fragment]:
    """Stages 1 and 2, and DeepSpeed's bf16 mode: a run of one flat buffer, linked to each parameter that lies in it."""
    for name, p in model.named_parameters():
        link: Any = p._hp_mapping  # type: ignore[attr-defined]
        if link is not None:
            views = {WEIGHTS: link.get_hp_fragment()} | {kind: link.get_hp_fragment(kind) for kind in MOMENTS}
            yield Fragment(name, link.lp_fragment_address.start, {kind: v.detach() for kind, v in views.items()})


def split_fragments(model: nn.Module, optimizer: Any, rank: int) -> Iterator[Fragment]:
    """Stage 3: each parameter is cut into equal parts, the last ones padded."""
    for name, p in model.named_parameters():
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(p)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        start = size * rank
        real = min(size, p.ds_numel - start)  # type: ignore[attr-defined]
        if real > 0:
            whole = {WEIGHTS: flat.detach()} | {kind: optimizer.optimizer.state[flat][kind] for kind in MOMENTS}
            yield Fragment(name, start, {kind: value.narrow(0, offset, real) for kind, value in whole.items()})


def start_moments(optimizer: torch.optim.Optimizer, parameters: list[Tensor], updates: int) -> None:
    """AdamW's state as it is after `updates` steps, with moments of zero where it has none yet (torch makes it late)."""
    for p in parameters:
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)  # float32 on the CPU, as torch's AdamW keeps it
            state.update({kind: torch.zeros_like(p, memory_format=torch.preserve_format) for kind in MOMENTS})
        state["step"].fill_(updates)

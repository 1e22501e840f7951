"""The objective of KV Packet's soft tokens: KL from a denoiser that sees all to itself reading documents alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mezzotint.models.denoiser import Denoiser
from mezzotint.models.policies.adapters import Adapters
from mezzotint.models.policies.bidirectional import make_canvas
from mezzotint.models.policies.canvas import Canvas
from mezzotint.models.policies.causal import commit, make_block
from mezzotint.models.policies.cost import Cost
from mezzotint.models.policies.interface import Plan, Sight
from mezzotint.models.policies.kv_packet import KVPacket, wrap
from mezzotint.models.policies.step import make_frame, run_step
from mezzotint.models.policies.store import Hooks, Store, alone
from mezzotint.training.noise import Noise
from mezzotint.training.objective import BlockSums


class SoftTokens(nn.Module):
    """The trained parameters: header (n, D) and trailer (m, D)."""

    def __init__(self, start: Adapters) -> None:
        super().__init__()
        self.header = nn.Parameter(start.header.clone())
        self.trailer = nn.Parameter(start.trailer.clone())

    def adapters(self, fingerprint: str) -> Adapters:
        return Adapters(self.header, self.trailer, fingerprint)


class AdapterObjective(nn.Module):
    """KL(teacher || student) in nats, summed over masked tokens of each row's own part.

    Teacher: the frozen denoiser reading the row as it is. Student: the same denoiser whose documents (`spans`) were read
    alone between the soft tokens. Masks at a random rate in the own part (bidirectional), or in one of its blocks, the
    blocks before it clean (block-causal). The frozen denoiser is no part of this module: nothing of it is trained,
    moved or saved.
    """

    def __init__(
        self, frozen: Denoiser, soft: SoftTokens, *, spans: tuple[tuple[int, int], ...], bidirectional: bool
    ) -> None:
        super().__init__()
        self.model = soft.to(frozen.embed.weight.device)
        self._frozen = (frozen,)  # in a tuple, which torch does not look into
        self.spans, self.bidirectional = spans, bidirectional

    def forward(self, tokens: Tensor, documents: Tensor, noise: Noise) -> tuple[Tensor, BlockSums]:
        """tokens (B, T); noise of one slot: frontiers counted from the own part's first block."""
        frozen, first = self._frozen[0], self.spans[-1][1]
        masked = (noise.uniforms[:, 0] < noise.levels[:, :1]).to(tokens.device)  # (B, G) or (B, own part)
        total = tokens.new_zeros((), dtype=frozen.embed.weight.dtype)
        per_row = torch.zeros(len(tokens), 1, dtype=total.dtype, device=tokens.device)
        frontiers = noise.frontiers[:, 0]
        for frontier in sorted(set(frontiers.tolist())):
            rows = (frontiers == frontier).nonzero()[:, 0].to(tokens.device)
            start = first if self.bidirectional else first + frontier * frozen.config.block_length
            stop = start + masked.shape[1]
            row, here = tokens[rows, :stop].clone(), masked[rows]
            row[:, start:] = row[:, start:].masked_fill(here, frozen.config.mask_token_id)
            with torch.no_grad():
                teacher = self._teacher(row, start)
            found = divergence(teacher[here], self._student(row, start)[here])
            where = torch.arange(len(rows), device=tokens.device)[:, None].expand_as(here)[here]
            per_row[rows, 0] = torch.zeros_like(per_row[rows, 0]).index_add(0, where, found.detach())
            total = total + found.sum()
        return total, BlockSums(per_row, masked.sum(dim=1, keepdim=True))

    def _teacher(self, row: Tensor, start: int) -> Tensor:
        """Logits (B, n, V) of the columns from `start`, all of the row seen as the model sees it."""
        frozen = self._frozen[0]
        if not self.bidirectional:
            size = frozen.config.block_length
            frontier = torch.full((len(row), 1), start // size)
            return frozen(row[:, :start], row[:, None, start:], frontier)[:, 0]
        canvas = make_canvas(frozen, row[:, :start], row[:, start:], block=row.shape[1] - start)
        return self._logits(canvas)

    def _student(self, row: Tensor, start: int) -> Tensor:
        """The same, the documents read alone between the soft tokens."""
        frozen = self._frozen[0]
        soft = self.model.adapters("")
        size = None if self.bidirectional else frozen.config.block_length
        packets = [alone(frozen, wrap(frozen.embed(row[:, a:b]), soft), block=size) for a, b in self.spans]
        hooks = Hooks(frozen, Store(), Cost(layers=len(frozen.config.pattern)), self.spans)  # room 0: tails are copied
        policy = KVPacket()
        if self.bidirectional:
            plain = make_canvas(frozen, row[:, :start], row[:, start:], block=row.shape[1] - start, spans=self.spans)
            return self._logits(policy.placed(plain, packets, hooks))
        past, own = policy.opened(row[:, :start], packets, hooks)
        assert size is not None
        for low in range(0, own.shape[1], size):
            commit(frozen, own[:, low : low + size], past)
        return self._logits(make_block(frozen, row[:, start:], past, size, response=0))

    def _logits(self, canvas: Canvas) -> Tensor:
        """One step that recomputes all of a canvas and keeps nothing: logits of its block."""
        frozen = self._frozen[0]
        masked = canvas.tokens == frozen.config.mask_token_id
        steps = torch.zeros(len(masked), dtype=torch.long, device=masked.device)
        block = slice(canvas.start, canvas.length)
        sight = Sight(masked, steps == 0, block, canvas.response, steps, steps, 0, len(frozen.config.pattern))
        policy = KVPacket()
        frame = make_frame(frozen, canvas, policy, Cost(layers=sight.layers))
        hidden, _ = run_step(frame, canvas.tokens, sight, Plan(sight.everything()), None)
        return frozen.logits(hidden)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """(M,): KL(teacher || student) of logits (M, V), in float32 or wider; -inf stands at the same tokens in both."""
    wide = torch.promote_types(teacher.dtype, torch.float32)
    log_p, log_q = (x.to(wide).log_softmax(dim=-1) for x in (teacher, student))
    never = log_p.isneginf()
    return (log_p.exp() * (log_p.masked_fill(never, 0) - log_q.masked_fill(never, 0))).sum(dim=-1)

"""The block-causal masked diffusion objective: rows and noise in, a sum of weighted cross-entropies out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzotint.models.denoiser import Denoiser, LayerRun, run_layer
from mezzotint.models.errors import InputError
from mezzotint.models.ops.nll import nll
from mezzotint.models.schedule import Schedule
from mezzotint.training.noise import Noise


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is trained. frontiers: 'one', 'all' or a number of blocks of each row to denoise."""

    frontiers: int | str = "all"
    schedule: str = "linear"
    schedule_low: float = 0.0  # clipped schedule only: smallest and largest mask rate
    schedule_high: float = 1.0
    loss_chunk: int = 2048  # masked tokens whose logits exist at one time

    def __post_init__(self) -> None:
        if isinstance(self.frontiers, str) and self.frontiers not in ("one", "all"):
            raise InputError(f"objective.frontiers is {self.frontiers!r}; use 'one', 'all' or a number of blocks")
        if isinstance(self.frontiers, int) and self.frontiers < 1:
            raise InputError(f"objective.frontiers is {self.frontiers}; it must be at least 1")
        if self.loss_chunk < 1:
            raise InputError(f"objective.loss_chunk is {self.loss_chunk}; it must be at least 1")
        self.noise_schedule()

    def noise_schedule(self) -> Schedule:
        return Schedule(name=self.schedule, low=self.schedule_low, high=self.schedule_high)

    def slots(self, row_blocks: int) -> int:
        """Frontiers drawn for a row of `row_blocks` blocks."""
        return {"one": 1, "all": row_blocks}[self.frontiers] if isinstance(self.frontiers, str) else self.frontiers


@dataclass(frozen=True)
class Canvas:
    """The noisy blocks of a micro-batch, cut to the frontiers it uses."""

    frontiers: Tensor  # (B, K) int64 on the CPU
    targets: Tensor  # (B, K, G) int64, the clean tokens of each frontier's block
    masked: Tensor  # (B, K, G) bool, tokens to predict; never a pad token, never in an invalid slot
    clean_tokens: int  # tokens of the clean stream that some frontier can see


@dataclass(frozen=True)
class BlockSums:
    """Detached sums of each frontier's block, for metrics; zero in invalid slots."""

    nll: Tensor  # (B, K) float, unweighted cross-entropy of masked tokens, nats
    masked: Tensor  # (B, K) int64, masked tokens


def paint(tokens: Tensor, documents: Tensor, noise: Noise, schedule: Schedule, block_length: int) -> Canvas:
    """Cut each frontier's block out of `tokens` (B, T) and choose masked tokens; `documents` (B, T) is -1 at pad."""
    batch, length = tokens.shape
    used = max(1, int(noise.valid.sum(dim=1).max()))  # later slots are invalid in every row
    frontiers = noise.frontiers[:, :used]
    places = frontiers.to(tokens.device)[..., None].expand(-1, -1, block_length)
    blocks = (batch, length // block_length, block_length)
    targets = tokens.reshape(blocks).gather(1, places)
    present = documents.reshape(blocks).gather(1, places) >= 0
    rate = schedule.mask_rate(noise.levels[:, :used])
    drawn = (noise.uniforms[:, :used] < rate[..., None]) & noise.valid[:, :used, None]
    return Canvas(frontiers, targets, drawn.to(tokens.device) & present, int(frontiers.max()) * block_length)


class Objective(nn.Module):
    """Loss of a denoiser on rows of tokens.

    One function serves every number of frontiers, and `block: row` as well: there a row is one block, its only frontier
    is 0, and the clean stream is empty.
    """

    def __init__(
        self,
        model: Denoiser,
        schedule: Schedule,
        *,
        loss_chunk: int = 2048,
        same_pieces: bool = False,
        run: LayerRun = run_layer,
    ) -> None:
        """same_pieces: as many pieces of the loss in every micro-batch of a shape, however many tokens are masked.

        ZeRO 3 gathers the norm and the head for each piece, and all ranks must gather equally often.
        """
        super().__init__()
        self.model = model
        self.schedule = schedule
        self.loss_chunk = loss_chunk
        self.same_pieces = same_pieces
        self.run = run

    def forward(self, tokens: Tensor, documents: Tensor, noise: Noise) -> tuple[Tensor, BlockSums]:
        """Sum over supervised tokens of (n/k) * weight(t) * cross-entropy, and the sums of each block.

        tokens and documents (B, T) on the model's device; noise on the CPU. The sum is an unbiased estimate of the
        bound of all valid blocks of these rows; divide it by their tokens (`supervised_tokens`), once, globally.
        """
        config = self.model.config
        canvas = paint(tokens, documents, noise, self.schedule, config.block_length)
        noisy = canvas.targets.masked_fill(canvas.masked, config.mask_token_id)
        clean = tokens[:, : canvas.clean_tokens]
        hidden = self.model.hidden(clean, noisy, canvas.frontiers, documents, run=self.run)  # (B, K, G, D)
        pieces = -(-noise.uniforms.numel() // self.loss_chunk) if self.same_pieces else None
        nll = self.cross_entropy(hidden[canvas.masked], canvas.targets[canvas.masked], pieces)  # (M,)

        used = canvas.frontiers.shape[1]
        weights = self.schedule.weight(noise.levels[:, :used]) * noise.share[:, None]
        cells = torch.arange(weights.numel(), device=nll.device).reshape(weights.shape)
        cell = cells[..., None].expand(canvas.masked.shape)[canvas.masked]  # (M,) row and slot of each masked token
        loss = (nll * weights.to(nll).flatten()[cell]).sum()

        sums = torch.zeros(noise.valid.shape, dtype=nll.dtype, device=nll.device)
        sums[:, :used] = (
            torch.zeros_like(weights.flatten().to(nll)).index_add(0, cell, nll.detach()).view(weights.shape)
        )
        counts = torch.zeros(noise.valid.shape, dtype=torch.int64, device=nll.device)
        counts[:, :used] = canvas.masked.sum(dim=-1)
        return loss, BlockSums(sums, counts)

    def cross_entropy(self, hidden: Tensor, targets: Tensor, pieces: int | None = None) -> Tensor:
        """(M, D), (M,) -> (M,) nats in float32 or wider; the logits of more than one chunk never exist at once.

        pieces: so many of equal length, in place of as many as the chunk asks for; some may be empty.
        """
        if pieces == 1 or (pieces is None and len(hidden) <= self.loss_chunk):
            return self._chunk(hidden, targets)
        pairs = (
            zip(hidden.split(self.loss_chunk), targets.split(self.loss_chunk))
            if pieces is None
            else zip(hidden.tensor_split(pieces), targets.tensor_split(pieces))
        )
        return torch.cat([checkpoint(self._chunk, part, target, use_reentrant=False) for part, target in pairs])

    def _chunk(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nll(self.model.logits(hidden), targets)


def supervised_tokens(documents: Tensor) -> int:
    """Tokens that the loss of these rows speaks for, masked or not, whatever frontiers were drawn: all but pad."""
    return int((documents >= 0).sum())

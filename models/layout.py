"""What one pass sees: how many clean blocks, which frontiers, where documents start, and where every token stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InputError


@dataclass(frozen=True)
class Layout:
    """The geometry of a pass over `clean_blocks` clean blocks and K noisy blocks; all index tensors live on the CPU.

    Clean block `b` and noisy block `k` are numbered from the start of this pass; the state holds what came before.
    """

    block_length: int
    clean_blocks: int
    frontiers: Tensor  # (B, K): noisy block k sees the clean blocks [starts[frontier], frontier) and the state
    starts: Tensor  # (B, M'): first block of the document that a block belongs to; 0 where it goes on from the state
    blocks: Tensor | None  # (B,): clean blocks that are valid, None if all are
    lengths: Tensor  # (B,): tokens in the state
    inner: Tensor | None = None  # (B, K, G): document ids where they change inside noisy blocks, else None
    clean_output: bool = True  # False in a last layer: clean tokens feed the state there, and nobody reads their output

    @property
    def batch(self) -> int:
        return self.frontiers.shape[0]

    @property
    def noisy_blocks(self) -> int:
        return self.frontiers.shape[1]

    @property
    def clean_tokens(self) -> int:
        return self.clean_blocks * self.block_length

    def outputs(self, x: Tensor) -> Tensor:
        """The tokens of x (B, T + K*G, ...) whose outputs are wanted."""
        return x if self.clean_output else x[:, self.clean_tokens :]

    def valid(self, device: torch.device) -> Tensor | None:
        """(B, M) for all M blocks of the pass: False for clean blocks that must not advance anything; None if all are."""
        if self.blocks is None:
            return None
        clean = torch.arange(self.clean_blocks) < self.blocks[:, None]
        noisy = torch.ones(self.batch, self.noisy_blocks, dtype=torch.bool)
        return torch.cat([clean, noisy], dim=1).to(device)

    def reached(self) -> Tensor:
        """(B, 1): the frontier behind the last valid clean block."""
        full = torch.full((self.batch,), self.clean_blocks)
        return (full if self.blocks is None else self.blocks)[:, None]

    def start_of(self, blocks: Tensor) -> Tensor:
        """(B, X) document starts of `blocks` (B, X)."""
        return self.starts.gather(1, blocks)

    def clean_index(self) -> Tensor:
        return torch.arange(self.clean_blocks).expand(self.batch, -1)

    def positions(self) -> Tensor:
        """(B, L) position of every token of the pass within its document."""
        if self.inner is not None:
            inside = torch.arange(self.block_length)
            return (inside - document_starts(self.inner.flatten(0, 1), 1).view_as(self.inner)).flatten(1)
        index = torch.cat([self.clean_index(), self.frontiers], dim=1)
        start = self.start_of(index)
        # a document that goes on from the state started before this pass
        first = torch.where(start == 0, self.lengths[:, None], 0) + (index - start) * self.block_length
        return (first[:, :, None] + torch.arange(self.block_length)).flatten(1)


def make_layout(
    *,
    block_length: int,
    clean_tokens: int,
    frontiers: Tensor,
    documents: Tensor | None = None,
    blocks: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Layout:
    """A checked Layout. Raises InputError for lengths that are no multiple of the block and frontiers out of reach."""
    if clean_tokens % block_length:
        raise InputError(f"{clean_tokens} clean tokens are no multiple of the block length {block_length}; pad them")
    batch, clean_blocks = frontiers.shape[0], clean_tokens // block_length
    if frontiers.numel() and not 0 <= int(frontiers.min()) <= int(frontiers.max()) <= clean_blocks:
        raise InputError(
            f"frontiers {int(frontiers.min())}..{int(frontiers.max())} reach beyond the {clean_blocks} clean blocks given"
        )
    needed = max(clean_blocks, 1 + int(frontiers.max()) if frontiers.numel() else 0)
    if documents is None:
        starts = torch.zeros(batch, needed, dtype=torch.long)
    elif documents.shape[1] < needed * block_length:
        raise InputError(f"documents name {documents.shape[1]} tokens, but the pass needs {needed * block_length}")
    else:
        starts = document_starts(documents, block_length)
    inner = _documents_inside(documents, frontiers, block_length)
    if inner is not None and clean_blocks:
        raise InputError(
            f"a document ends inside a block of {block_length} tokens: fill documents up to whole blocks, or make the block "
            "as long as the row"
        )
    lengths = torch.zeros(batch, dtype=torch.long) if lengths is None else lengths
    if blocks is not None and bool((blocks == clean_blocks).all()):
        blocks = None
    return Layout(block_length, clean_blocks, frontiers, starts, blocks, lengths, inner)


def _documents_inside(documents: Tensor | None, frontiers: Tensor, block_length: int) -> Tensor | None:
    """Document ids (B, K, G) of the noisy blocks, None unless some document ends inside one of the pass's blocks."""
    if documents is None or frontiers.numel() == 0:
        return None
    blocks = documents.cpu()[:, : (1 + int(frontiers.max())) * block_length].unflatten(1, (-1, block_length))
    if bool((blocks == blocks[..., :1]).all()):
        return None
    return pick(blocks, frontiers)


def document_starts(documents: Tensor, block_length: int) -> Tensor:
    """(B, T/G) first block of each block's document, from `documents` (B, T): runs of equal ids, constant in a block."""
    ids = documents[:, ::block_length].cpu()
    index = torch.arange(ids.shape[1]).expand_as(ids)
    changed = torch.ones_like(ids, dtype=torch.bool)
    changed[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.where(changed, index, 0).cummax(dim=1).values


def pick(table: Tensor, index: Tensor) -> Tensor:
    """table[b, index[b, k]] for `table` (B, F, ...) and `index` (B, K) on the CPU; a view where the index is a run."""
    first, count = int(index[0, 0]), index.shape[1]
    if torch.equal(index, torch.arange(first, first + count).expand_as(index)):
        return table[:, first : first + count]
    rows = torch.arange(index.shape[0], device=table.device)[:, None]
    return table[rows, index.to(table.device)]

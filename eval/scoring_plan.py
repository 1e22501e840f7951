"""What scoring text would take, before it is done: bytes held at one time, least seconds, and the lines of a dry run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mezzotint.eval.memory import HEADROOM, available_bytes, both_units
from mezzotint.eval.retrieval_plan import product_rate
from mezzotint.models.config import ModelConfig, parameter_count, pass_flops, state_bytes, visible_pairs

HEAD = "| subject | what | texts | longest | needs | at least |\n|---|---|---:|---:|---|---:|"


@dataclass(frozen=True, kw_only=True)
class Work:
    """One cell of a dry run: texts that are scored or written behind their contexts."""

    subject: str
    what: str
    texts: int
    longest: int  # tokens of the longest text, context included
    bytes: int
    flops: float

    def line(self, *, dtype: torch.dtype, device: str) -> str:
        """The cell as a row of the table."""
        fits = self.bytes <= HEADROOM * available_bytes(device)
        needs = both_units(self.bytes) + ("" if fits else ", does not fit")
        return (
            f"| {self.subject} | {self.what} | {self.texts} | {self.longest} | {needs} | "
            f"{duration(self.flops / product_rate(dtype, device))} |"
        )


def dry_run(cells: list[Work], *, dtype: torch.dtype, device: str) -> str:
    """Markdown: every cell, then the sum of the least times."""
    seconds = sum(cell.flops for cell in cells) / product_rate(dtype, device)
    lines = [HEAD, *(cell.line(dtype=dtype, device=device) for cell in cells)]
    return "\n".join([*lines, f"\nin all at least {duration(seconds)}, at the rate of bare products; overheads on top"])


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def scoring_flops(config: ModelConfig, *, context: int, scored: int, draws: int) -> int:
    """Least FLOPs of a bound of `scored` tokens: every block before the last committed once, each draw a block's pass."""
    size = config.block_length
    first, blocks = context // size, max(1, -(-(context + scored) // size))
    frontiers = list(range(first, blocks))
    attends = "A" in config.pattern
    clean = visible_pairs(config, clean_blocks=blocks - 1, frontiers=[]) if attends else 0
    noisy = visible_pairs(config, clean_blocks=0, frontiers=frontiers) if attends else 0
    return pass_flops(
        config,
        clean_tokens=(blocks - 1) * size,
        noisy_tokens=draws * len(frontiers) * size,
        pairs=clean + draws * noisy,
        logits=draws * scored // 2,  # half of a block is masked on average
    )


def scoring_bytes(config: ModelConfig, *, rows: int, length: int, canvases: int, itemsize: int) -> int:
    """About what is held at one time: weights, states of `rows` texts of `length` tokens, and a pass of `canvases`."""
    size = config.block_length
    room = max(0, -(-length // size) - 1) * size  # the last block is never committed
    held = parameter_count(config) * itemsize + state_bytes(config, batch=rows, length=room, itemsize=itemsize)
    widest = 3 * config.d_ff + 4 * config.d_model + 3 * config.expand * config.d_model
    return held + canvases * size * (widest * itemsize + config.vocab_size * 4)

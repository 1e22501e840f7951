"""What torch counts for a row of either objective, beside the project's counter, on a model of the run's sizes."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mezzotint.models.config import ModelConfig, pass_flops, visible_pairs
from mezzotint.models.denoiser import Denoiser

SECTION = ("preset", "backbone", "block")  # keys of a recipe's model section that are not the model's own


def sizes(run: Path) -> tuple[ModelConfig, int]:
    """The model of a run folder, and the blocks of its rows."""
    recipe = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    fields = {key: value for key, value in recipe["model"].items() if key not in SECTION}
    config = ModelConfig.from_dict(fields | {"block_length": recipe["model"]["block"]})
    return config, recipe["data"]["row_length"] // config.block_length


def counted(config: ModelConfig, frontiers: list[int]) -> tuple[int, int]:
    """(by torch, by the project) FLOPs of the forward and backward pass of one cut row; every second token is masked.

    Torch counts the products that are run. The project counts every layer in full, though the last one's clean stream only
    feeds the state; torch counts no fused attention on a CPU whose formula it does not know.
    """
    size, blocks = config.block_length, max(frontiers)
    model = Denoiser(config, generator=torch.Generator().manual_seed(0))
    clean = torch.full((1, blocks * size), config.vocab_size - 1)
    noisy = torch.full((1, len(frontiers), size), config.mask_token_id)
    noisy[..., ::2] = config.vocab_size - 1
    documents = torch.zeros(1, (blocks + 1) * size, dtype=torch.int64)
    masked = noisy == config.mask_token_id
    with FlopCounterMode(display=False) as counter:
        hidden = model.hidden(clean, noisy, torch.tensor([frontiers]), documents)[masked]
        F.cross_entropy(model.logits(hidden), torch.full((len(hidden),), config.vocab_size - 1)).backward()
    pairs = visible_pairs(config, clean_blocks=blocks, frontiers=frontiers)
    tokens = {"clean_tokens": clean.numel(), "noisy_tokens": noisy.numel(), "logits": int(masked.sum())}
    return counter.get_total_flops(), 3 * pass_flops(config, pairs=pairs, **tokens)


def shares(config: ModelConfig, row_blocks: int) -> tuple[float, float]:
    """Torch's count over the project's, of `one` (the mean row: every frontier once) and of `all`."""
    rows = [counted(config, [frontier]) for frontier in range(row_blocks)]
    torch_one, ours_one = (sum(column) for column in zip(*rows))
    torch_all, ours_all = counted(config, list(range(row_blocks)))
    return torch_one / ours_one, torch_all / ours_all

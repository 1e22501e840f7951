"""Eviction on a denoiser that was taught to find one token among many: what is kept decides whether it still does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import generator

from mezzotint.models.config import ModelConfig
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.policies.causal import decode_blocks
from mezzotint.models.policies.drop_kv import DropKV
from mezzotint.models.policies.none import NoCache
from mezzotint.models.reveal import TopK

pytestmark = pytest.mark.slow  # half a minute of training

LENGTH, BLOCK, ROWS, STEPS = 72, 8, 32, 300
FILLER, VALUES, MARK = (3, 30), (30, 54), 54


def texts(count: int, g: torch.Generator) -> torch.Tensor:
    """Rows of filler with one value somewhere; behind a mark in the last block the value stands again, three times."""
    rows = torch.randint(*FILLER, (count, LENGTH), generator=g)
    value = torch.randint(*VALUES, (count,), generator=g)
    place = torch.randint(0, LENGTH - BLOCK, (count,), generator=g)
    rows[torch.arange(count), place] = value
    rows[:, -BLOCK] = MARK
    rows[:, -BLOCK + 1 : -BLOCK + 4] = value[:, None]
    return rows


@pytest.fixture(scope="module")
def model() -> Denoiser:
    config = ModelConfig(
        pattern="AA", vocab_size=56, d_model=48, d_ff=96, block_length=BLOCK, chunk_length=BLOCK, n_heads=4,
        n_kv_heads=4, head_dim=12, qk_norm=True, init_std=0.14, ssm_head_dim=16,
    )  # fmt: skip
    found = Denoiser(config, generator=generator(1))
    optimizer, g = torch.optim.AdamW(found.parameters(), lr=4e-3), generator(2)
    last = torch.full((ROWS, 1), LENGTH // BLOCK - 1)
    for _ in range(STEPS):
        rows = texts(ROWS, g)
        noisy = rows[:, -BLOCK:].clone()
        noisy[:, 1:] = config.mask_token_id
        logits = found(rows[:, :-BLOCK], noisy[:, None], last)[:, 0, 1:4]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, -BLOCK + 1 : -BLOCK + 4].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found.eval()


def accuracy(model: Denoiser, policy) -> tuple[float, int]:
    """The share of 200 values found, and the bytes held in the end."""
    rows = texts(200, generator(9))
    prompt = LENGTH - BLOCK + 1
    got = decode_blocks(model, rows[:, :prompt].tolist(), policy=policy, new_tokens=3, reveal=TopK(steps=2))
    right = sum(new[0] == int(row[prompt]) for new, row in zip(got.tokens, rows))
    return right / len(rows), got.cost.held_bytes


@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_what_the_output_depends_on_is_kept_where_random_and_recent_tokens_are_not(model, keep):
    whole, everything = accuracy(model, NoCache())
    assert whole > 0.9, "the denoiser has learned the task"
    shares, held = {}, set()
    for rule in ("leave-one-out", "random", "recency"):
        shares[rule], count = accuracy(model, DropKV(keep=keep, rule=rule, kernel=3, exact_first=False))
        held.add(count)
    assert len(held) == 1 and held.pop() < everything
    assert shares["leave-one-out"] > whole - 0.05
    assert shares["leave-one-out"] > shares["random"] + 0.1 and shares["leave-one-out"] > shares["recency"] + 0.1

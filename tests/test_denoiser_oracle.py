"""The denoiser against the token-by-token oracle, logits and gradients; blocks of one token against the chain rule."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from denoiser_oracle import autoregressive_log_likelihood, denoiser_oracle
from support import (
    PATTERNS,
    VARIANTS,
    assert_close,
    assert_same_gradients,
    generator,
    ordinary,
    parameters_of,
    random_case,
    tiny_config,
    tiny_model,
    training_logits,
    variant,
)

every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


def check_against_oracle(config, case) -> None:
    """Logits and the gradient of every parameter."""
    model = tiny_model(config)
    logits = training_logits(model, case)
    parameters = parameters_of(model)
    expected = denoiser_oracle(config, parameters, case.clean, case.noisy, case.frontiers, case.documents)
    assert_close(logits, expected)
    weights = torch.randn(logits.shape, generator=generator(9), dtype=torch.float64) / logits.numel() ** 0.5
    gradients = []
    for out in (logits, expected):
        total = (out.masked_fill(out == -math.inf, 0.0) * weights).sum()
        found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        gradients.append(dict(zip(parameters, found)))
    assert_same_gradients(*gradients)


@every_pattern
@pytest.mark.parametrize("block_length, positions, chunk_blocks", [(1, "rope", 3), (3, "none", 2), (4, "rope", 1)])
def test_training_pass_is_the_oracle(pattern: str, block_length: int, positions: str, chunk_blocks: int):
    config = variant(pattern, block_length, positions, chunk_blocks)
    check_against_oracle(config, random_case(config, blocks=5 if block_length < 4 else 3))


def test_options_are_the_oracle():
    """Tied embeddings, QK-norm and multi-head attention."""
    config = tiny_config("MA", 4, tie_embeddings=True, qk_norm=True, n_kv_heads=4)
    check_against_oracle(config, random_case(config, batch=1, blocks=3, frontiers=[[1, 2]]))


@pytest.mark.slow
@every_pattern
@pytest.mark.parametrize("block_length, positions, chunk_blocks", VARIANTS)
def test_training_pass_is_the_oracle_grid(pattern: str, block_length: int, positions: str, chunk_blocks: int):
    config = variant(pattern, block_length, positions, chunk_blocks)
    blocks = {1: 12, 4: 7, 16: 3, 32: 2}[block_length]
    for seed in range(2):
        check_against_oracle(config, random_case(config, blocks=blocks, seed=seed))
    # frontiers one beyond the clean tokens
    g = generator(3)
    places = [sorted(torch.randint(0, blocks + 1, (3,), generator=g).tolist()) for _ in range(2)]
    check_against_oracle(config, random_case(config, blocks=blocks, documents=False, frontiers=places))


# ---- blocks of one token: an exact autoregressive model ----


@every_pattern
@torch.no_grad()
def test_blocks_of_one_token_are_an_autoregressive_likelihood(pattern: str):
    config = tiny_config(pattern, 1, chunk_length=3)
    model = tiny_model(config)
    tokens = ordinary(config, (2, 7), generator(6))
    masks = torch.full((2, 7, 1), config.mask_token_id)
    logits = model(tokens, masks, torch.arange(7).expand(2, -1))
    mine = torch.log_softmax(logits[:, :, 0], dim=-1).gather(-1, tokens[:, :, None]).sum(dim=(1, 2))
    parameters = parameters_of(model)
    assert_close(mine, torch.stack([autoregressive_log_likelihood(config, parameters, row) for row in tokens]))


@every_pattern
@torch.no_grad()
def test_blocks_of_one_token_sum_to_one(pattern: str):
    """Over all texts of four tokens the likelihoods sum to 1: nothing of the token itself or of later ones leaks in."""
    config = tiny_config(pattern, 1, vocab_size=5)
    model = tiny_model(config)
    letters = [t for t in range(5) if t not in (config.mask_token_id, config.pad_token_id)]
    tokens = torch.tensor(list(itertools.product(letters, repeat=4)))
    masks = torch.full((len(tokens), 4, 1), config.mask_token_id)
    logits = model(tokens, masks, torch.arange(4).expand(len(tokens), -1))
    likelihood = torch.log_softmax(logits[:, :, 0], dim=-1).gather(-1, tokens[:, :, None]).sum(dim=(1, 2)).exp()
    assert likelihood.max() < 0.9
    assert_close(likelihood.sum(), torch.ones((), dtype=torch.float64))

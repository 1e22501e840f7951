"""What a token must not see: other documents, the future, padding and invalid tokens, to the bit or to exactly zero."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support import (
    PATTERNS,
    Case,
    assert_close,
    documents_of,
    generator,
    noisy_canvas,
    ordinary,
    parameters_of,
    random_case,
    state_bytes_of,
    tiny_config,
    tiny_model,
    training_logits,
)
from torch import Tensor

every_pattern = pytest.mark.parametrize("pattern", PATTERNS)
BLOCK = 3


def finite_sum(logits: Tensor) -> Tensor:
    """A fixed random weighting of the logits that are not -inf."""
    weights = torch.randn(logits.shape, generator=generator(8), dtype=logits.dtype)
    return (logits.masked_fill(logits == -math.inf, 0.0) * weights).sum()


# ---- documents: to the bit ------------------------------------------------------------------------------------------


def outputs_and_gradients(model, case: Case, kept: slice) -> tuple[Tensor, list[Tensor]]:
    """Logits of the frontiers `kept` of row 0, and every parameter's gradient from these alone."""
    logits = training_logits(model, case)[0, kept]
    found = torch.autograd.grad(finite_sum(logits), list(parameters_of(model).values()), allow_unused=True)
    return logits.detach(), [torch.zeros(()) if gradient is None else gradient for gradient in found]


@every_pattern
@pytest.mark.parametrize("chunk_blocks", [1, 2, 5])
@pytest.mark.parametrize("changed, kept", [((0, 2), slice(2, 5)), ((2, 5), slice(0, 2))], ids=["earlier", "later"])
def test_another_document_changes_nothing(pattern: str, chunk_blocks: int, changed: tuple[int, int], kept: slice):
    """Row of documents of 2 and 3 blocks, inside one chunk or across several: outputs and gradients keep their bits."""
    config = tiny_config(pattern, BLOCK, chunk_length=BLOCK * chunk_blocks)
    model = tiny_model(config)
    case = random_case(config, batch=1, blocks=5)
    documents = documents_of([[2, 3]], BLOCK)
    results = []
    for seed in (1, 2):
        g = generator(seed)
        clean, noisy = case.clean.clone(), case.noisy.clone()
        first, last = changed
        clean[0, first * BLOCK : last * BLOCK] = ordinary(config, ((last - first) * BLOCK,), g)
        noisy[0, first:last] = noisy_canvas(config, (last - first, BLOCK), g)
        results.append(outputs_and_gradients(model, Case(clean, noisy, case.frontiers, documents), kept))
    (logits, gradients), (logits_2, gradients_2) = results
    assert torch.equal(logits, logits_2)
    for name, one, two in zip(parameters_of(model), gradients, gradients_2):
        assert torch.equal(one, two), name


# ---- gradients: exactly zero ----------------------------------------------------------------------------------------


def tokens_with_gradient(model, case: Case, block: int) -> set[int]:
    """Token ids whose embedding feels the logits of frontier slot `block`; needs ids used once, and an untied head."""
    logits = training_logits(model, case)[0, block]
    (gradient,) = torch.autograd.grad(finite_sum(logits), [model.embed.weight])
    return set(gradient.abs().sum(dim=-1).nonzero().flatten().tolist())


@every_pattern
@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
def test_gradients_reach_exactly_the_visible_tokens(pattern: str, chunk_blocks: int):
    """A frontier feels every clean token before it in its document and its own canvas, and nothing else whatever."""
    lengths = [1, 3, 2]
    blocks = sum(lengths)
    config = tiny_config(pattern, BLOCK, vocab_size=3 + 2 * blocks * BLOCK, chunk_length=BLOCK * chunk_blocks)
    model = tiny_model(config)
    clean = torch.arange(3, 3 + blocks * BLOCK)
    noisy = (clean + blocks * BLOCK).reshape(blocks, BLOCK)
    case = Case(clean[None], noisy[None], torch.arange(blocks)[None], documents_of([lengths], BLOCK))
    starts = [0, 1, 1, 1, 4, 4]
    for f, start in enumerate(starts):
        visible = set(clean[start * BLOCK : f * BLOCK].tolist()) | set(noisy[f].tolist())
        assert tokens_with_gradient(model, case, f) == visible


# ---- padding and invalid tokens -------------------------------------------------------------------------------------


@every_pattern
def test_padding_changes_nothing(pattern: str):
    """Blocks of padding after a row's text: the text's logits and all gradients stay."""
    config = tiny_config(pattern, BLOCK, chunk_length=2 * BLOCK)
    model = tiny_model(config)
    case = random_case(config, batch=2, blocks=3)
    assert case.documents is not None
    pad = torch.full((2, 2 * BLOCK), config.pad_token_id)
    padded = Case(
        torch.cat([case.clean, pad], dim=1), case.noisy, case.frontiers, torch.cat([case.documents, pad * 0 - 1], dim=1)
    )
    totals = []
    for each in (case, padded):
        logits = training_logits(model, each)
        gradients = torch.autograd.grad(finite_sum(logits), list(parameters_of(model).values()))
        totals.append((logits.detach(), *gradients))
    for bare, with_padding in zip(*totals):
        assert_close(with_padding, bare, 1e-12)


@every_pattern
def test_frontiers_on_padding_do_no_harm(pattern: str):
    """Rows hold different numbers of blocks: slots on padding yield finite values and leave the others alone."""
    config = tiny_config(pattern, BLOCK)
    model = tiny_model(config)
    case = random_case(config, batch=2, blocks=4)
    assert case.documents is not None
    documents = case.documents.clone()
    clean, noisy = case.clean.clone(), case.noisy.clone()
    documents[1, 2 * BLOCK :] = -1
    clean[1, 2 * BLOCK :] = config.pad_token_id
    noisy[1, 2:] = config.pad_token_id
    logits = model(clean, noisy, case.frontiers, documents=documents)
    assert not logits.isnan().any()
    short = Case(clean[1:, : 2 * BLOCK], noisy[1:, :2], case.frontiers[1:, :2], documents[1:, : 2 * BLOCK])
    assert_close(logits[1:, :2], training_logits(model, short))
    for gradient in torch.autograd.grad(finite_sum(logits[1:, :2]), list(model.parameters())):
        assert gradient.isfinite().all()


@every_pattern
@torch.no_grad()
def test_invalid_tokens_never_alter_the_state(pattern: str, tmp_path: Path):
    """Whatever stands where a row has no valid block: what the state saves and what is read from it keep their bits."""
    config = tiny_config(pattern, BLOCK, chunk_length=2 * BLOCK)
    model = tiny_model(config)
    g = generator(2)
    text, canvas = ordinary(config, (3, 3 * BLOCK), g), noisy_canvas(config, (3, BLOCK), g)
    blocks = torch.tensor([0, 1, 3])
    first = ordinary(config, (3, BLOCK), g)
    seen = []
    for filler in (config.pad_token_id, config.mask_token_id, 7):
        offered = text.clone()
        for r in range(3):
            offered[r, blocks[r] * BLOCK :] = filler
        state = model.commit(first, model.start(3, 6 * BLOCK))
        advanced, _ = model.advance(offered, canvas, state.clone(), blocks=blocks)
        state = model.commit(offered, state, blocks=blocks)
        assert state.length.tolist() == [BLOCK, 2 * BLOCK, 4 * BLOCK]
        # rows reach a common length before the states are compared: room beyond `length` may hold anything
        after = model.commit(text, state.clone(), blocks=3 - blocks)
        seen.append((advanced, model.denoise(canvas, state), state_bytes_of(after, tmp_path)))
    for advanced, logits, saved in seen[1:]:
        assert torch.equal(advanced, seen[0][0])
        assert torch.equal(logits, seen[0][1])
        assert saved == seen[0][2]


@every_pattern
@torch.no_grad()
def test_a_row_without_valid_blocks_keeps_its_state(pattern: str):
    """blocks = 0: the row reads on exactly as before the commit."""
    config = tiny_config(pattern, BLOCK)
    model = tiny_model(config)
    g = generator(3)
    canvas = noisy_canvas(config, (2, BLOCK), g)
    state = model.commit(ordinary(config, (2, 2 * BLOCK), g), model.start(2, 6 * BLOCK))
    before = model.denoise(canvas, state)
    state = model.commit(ordinary(config, (2, 2 * BLOCK), g), state, blocks=torch.tensor([0, 2]))
    after = model.denoise(canvas, state)
    assert_close(after[0], before[0], 1e-14)
    assert not torch.allclose(after[1], before[1])


@every_pattern
@torch.no_grad()
def test_other_rows_change_nothing(pattern: str):
    """Row 1 of a batch, decoded beside another row 0, keeps its values."""
    config = tiny_config(pattern, BLOCK)
    model = tiny_model(config)
    case = random_case(config, batch=2, blocks=3)
    other = Case(case.clean.clone(), case.noisy.clone(), case.frontiers, case.documents)
    other.clean[0] = ordinary(config, (3 * BLOCK,), generator(5))
    other.noisy[0] = config.mask_token_id
    assert torch.equal(training_logits(model, case)[1], training_logits(model, other)[1])

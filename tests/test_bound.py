"""The estimator's mean is the bound: exact enumeration on three tokens and two blocks of three, for every schedule."""

import itertools

import numpy as np
import pytest
import torch
from support import tiny_config, tiny_model

from mezzotint.models.schedule import Schedule
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import Objective, supervised_tokens

G = 3
COPIES, STEPS = 150, 50  # rows of each kind in a step, and steps
SCHEDULES = [Schedule(), Schedule(name="cosine"), Schedule(name="clipped", low=0.25, high=0.9)]


def three_token_model():
    """Tokens 2, 3, 4 (2 ends a document) beside mask and pad; large weights, so that blocks differ in their loss."""
    config = tiny_config("AM", G, vocab_size=5, mask_token_id=0, eos_token_id=2, pad_token_id=1)
    return tiny_model(config)


# kinds of row: two blocks of one document; one block and padding; two blocks of two documents
TOKENS = torch.tensor([[2, 3, 4, 4, 3, 3], [3, 3, 2, 1, 1, 1], [4, 2, 2, 3, 4, 2]])
DOCUMENTS = torch.tensor([[0] * 6, [0] * 3 + [-1] * 3, [0] * 3 + [1] * 3])
BLOCKS = torch.tensor([2, 1, 2])
PATTERNS = torch.tensor(list(itertools.product([False, True], repeat=G)))  # (8, G)


@torch.no_grad()
def pattern_losses(model, row: int, block: int) -> torch.Tensor:
    """(8,) cross-entropy summed over the masked tokens, for every mask pattern of one block: one plain pass each."""
    losses = []
    target = TOKENS[row, block * G : (block + 1) * G]
    for pattern in PATTERNS:
        canvas = target.masked_fill(pattern, model.config.mask_token_id)
        clean, documents = TOKENS[row : row + 1, : block * G], DOCUMENTS[row : row + 1, : (block + 1) * G]
        logits = model(clean, canvas[None, None], torch.tensor([[block]]), documents)[0, 0]
        allowed = logits[:, 2:]  # the three tokens; mask and pad have no probability
        nll = -(allowed - allowed.logsumexp(-1, keepdim=True)).gather(-1, target[:, None] - 2)[:, 0]
        losses.append(nll[pattern].sum())
    return torch.stack(losses)


def exact_bound(model, schedule: Schedule, row: int) -> float:
    """Sum over patterns in closed form, over levels by Gauss-Legendre quadrature."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(60))
    t = (nodes + 1) / 2
    rate = schedule.mask_rate(t)[:, None]
    masked = PATTERNS.sum(-1)
    probability = rate**masked * (1 - rate) ** (G - masked)  # (nodes, 8)
    losses = sum(pattern_losses(model, row, block) for block in range(int(BLOCKS[row])))
    return float((weights / 2 * schedule.weight(t) * (probability @ losses)).sum())


@pytest.mark.parametrize("frontiers", [1, 2], ids=["one", "all"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_mean_of_the_estimator_is_the_exact_bound(schedule, frontiers):
    model = three_token_model()
    objective = Objective(model, schedule)
    rows = torch.arange(3).repeat(COPIES)  # kinds interleaved: every kind meets every place in the batch
    source = NoiseSource(seed=11, rows_per_step=3 * COPIES, row_blocks=2, slots=frontiers, block_length=G)
    means = []
    with torch.no_grad():
        for step in range(STEPS):
            noise = source.draw(step=step, first_row=0, blocks=BLOCKS[rows])
            losses = [
                objective(TOKENS[rows[rows == kind]], DOCUMENTS[rows[rows == kind]], noise.select(rows == kind))[0]
                for kind in range(3)
            ]
            means.append(torch.stack(losses) / COPIES)
    mean = torch.stack(means)  # (steps, kinds)
    error = mean.std(0) / STEPS**0.5
    exact = torch.tensor([exact_bound(model, schedule, row) for row in range(3)], dtype=torch.float64)
    assert (error < 0.05 * exact).all(), "the test has no power"
    assert ((mean.mean(0) - exact).abs() < 4 * error).all(), (mean.mean(0), exact, error)


def test_frontiers_two_of_three_with_rows_of_one_two_and_three_blocks():
    """n/k with k between one and all: rows with n below, at and above k."""
    model = three_token_model()
    tokens = torch.cat([TOKENS, TOKENS[:, :G].flip(0)], dim=1)
    documents = torch.tensor([[0] * 9, [0] * 3 + [-1] * 6, [0] * 3 + [1] * 3 + [-1] * 3])
    blocks = torch.tensor([3, 1, 2])
    objective = Objective(model, Schedule())

    def mean_and_error(slots: int, seed: int, steps: int):
        rows = torch.arange(3).repeat(COPIES)
        source = NoiseSource(seed=seed, rows_per_step=len(rows), row_blocks=3, slots=slots, block_length=G)
        means = []
        for step in range(steps):
            noise = source.draw(step=step, first_row=0, blocks=blocks[rows])
            losses = [
                objective(tokens[rows[rows == k]], documents[rows[rows == k]], noise.select(rows == k))[0]
                for k in range(3)
            ]
            means.append(torch.stack(losses) / COPIES)
        means = torch.stack(means)
        return means.mean(0), means.std(0) / steps**0.5

    with torch.no_grad():
        (some, some_error), (every, every_error) = mean_and_error(2, 1, 40), mean_and_error(3, 2, 40)
    error = (some_error**2 + every_error**2).sqrt()
    assert (error < 0.05 * every).all()
    assert ((some - every).abs() < 4 * error).all()


def test_linear_and_cosine_estimate_the_same_bound_and_clipped_a_part_of_it():
    model = three_token_model()
    for row in range(3):
        linear, cosine, clipped = (exact_bound(model, schedule, row) for schedule in SCHEDULES)
        assert cosine == pytest.approx(linear, rel=1e-9)
        assert 0 < clipped < linear


def test_one_token_a_block_is_the_exact_autoregressive_likelihood():
    """Every block masked at t = 1: the training pass sums what cached decoding gives token by token."""
    config = tiny_config("AM", 1, vocab_size=5, mask_token_id=0, eos_token_id=2, pad_token_id=1)
    objective = Objective(tiny_model(config), Schedule())
    row = TOKENS[:1]
    source = NoiseSource(seed=5, rows_per_step=1, row_blocks=6, slots=6, block_length=1)
    noise = source.draw(step=0, first_row=0, blocks=torch.tensor([6]))
    noise.levels.fill_(1.0)  # everything masked, weight 1
    loss, _ = objective(row, torch.zeros_like(row), noise)
    state, nll = objective.model.start(1, 6), 0.0
    for place in range(6):
        logits = objective.model.denoise(torch.tensor([[config.mask_token_id]]), state)[0, 0]
        nll -= float(logits.log_softmax(-1)[row[0, place]])
        state = objective.model.commit(row[:, place : place + 1], state)
    assert loss.item() == pytest.approx(nll, rel=1e-10)
    assert supervised_tokens(DOCUMENTS) == 15

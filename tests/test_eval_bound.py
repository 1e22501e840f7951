"""The block-wise bound: equal to its definition by enumeration, exact where it can be, whatever the batching."""

import itertools
import math

import numpy as np
import pytest
import torch
from support import PATTERNS, generator, ordinary, tiny_config, tiny_model

from mezzotint.data.rows import Row
from mezzotint.eval.bound import Draws, document_bound, shared, summarize
from mezzotint.eval.draws import block_draws
from mezzotint.eval.score import row_bound, spread
from mezzotint.models.errors import InputError


def log_probability(model, tokens: torch.Tensor, block: int, masked: tuple[int, ...]) -> torch.Tensor:
    """log p of each masked token of `block`, by a training pass; places behind the text are masks."""
    g = model.config.block_length
    noisy = torch.full((g,), model.config.mask_token_id)
    own = tokens[block * g : (block + 1) * g]
    noisy[: len(own)] = own
    noisy[list(masked)] = model.config.mask_token_id
    logits = model(tokens[None, : block * g], noisy[None, None], torch.tensor([[block]]))[0, 0]
    return logits.log_softmax(-1)[list(masked), own[list(masked)]]


def bound_by_integral(model, tokens: torch.Tensor) -> float:
    """The definition: E over t of 1/t times the cross-entropy, each set of masks with its probability given t.

    The polynomial in t is integrated exactly by Gauss-Legendre nodes.
    """
    g = model.config.block_length
    nodes, weights = np.polynomial.legendre.leggauss(g + 2)
    nodes, weights = (nodes + 1) / 2, weights / 2
    total = 0.0
    for b in range(math.ceil(len(tokens) / g)):
        n = len(tokens[b * g : (b + 1) * g])
        for k in range(1, n + 1):
            for masked in itertools.combinations(range(n), k):
                loss = -float(log_probability(model, tokens, b, masked).sum())
                total += loss * float((weights * nodes ** (k - 1) * (1 - nodes) ** (n - k)).sum())
    return total


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("length", [6, 5, 4, 3, 1])
@torch.no_grad()
def test_blocks_of_three_are_exact(pattern, length):
    """Also where the text does not end with a block: what follows stays mask and is not scored."""
    config = tiny_config(pattern, block_length=3)
    model = tiny_model(config)
    tokens = ordinary(config, (length,), generator(2))
    found = document_bound(model, tokens, draws=Draws(per_block=1, batch=4), key="x")
    assert found == pytest.approx(bound_by_integral(model, tokens), abs=1e-10)


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_blocks_of_one_give_the_autoregressive_likelihood(pattern):
    config = tiny_config(pattern, block_length=1)
    model = tiny_model(config)
    tokens = ordinary(config, (9,), generator(3))
    noisy = torch.full((1, 9, 1), config.mask_token_id)
    logits = model(tokens[None, :-1], noisy, torch.arange(9)[None])[0, :, 0]
    exact = -float(logits.log_softmax(-1).gather(1, tokens[:, None]).sum())
    assert document_bound(model, tokens, draws=Draws(per_block=1), key="x") == pytest.approx(exact, abs=1e-10)


@torch.no_grad()
def test_the_bound_is_no_less_than_the_loss_of_any_mixture():
    """bound = mean over orders of -log p in that order, by enumeration of all orders of a block of three."""
    config = tiny_config("AM", block_length=3)
    model = tiny_model(config)
    tokens = ordinary(config, (3,), generator(4))
    orders = []
    for order in itertools.permutations(range(3)):
        masked, loss = [0, 1, 2], 0.0
        for place in order:
            loss -= float(log_probability(model, tokens, 0, tuple(masked))[masked.index(place)])
            masked.remove(place)
        orders.append(loss)
    mixture = -math.log(sum(math.exp(-loss) for loss in orders) / len(orders))
    found = document_bound(model, tokens, draws=Draws(), key="x")
    assert found == pytest.approx(sum(orders) / len(orders), abs=1e-10)
    assert found >= mixture


@pytest.mark.parametrize("draws", [2, 3, 5, 7, 10, 20])
@torch.no_grad()
def test_random_draws_agree_with_enumeration_within_their_error(draws):
    """Blocks of five, fewer and more draws than tokens: the mean over many seeds is the exact bound."""
    config = tiny_config("AM", block_length=5)
    model = tiny_model(config)
    tokens = ordinary(config, (5,), generator(5))
    losses = {
        masked: -float(log_probability(model, tokens, 0, masked).sum())
        for k in range(1, 6)
        for masked in itertools.combinations(range(5), k)
    }
    exact = bound_by_integral(model, tokens)
    found = np.array(
        [
            sum(draw.weight * losses[draw.masked] for draw in block_draws(5, draws=draws, key=str(seed)))
            for seed in range(3000)
        ]
    )
    assert abs(found.mean() - exact) < 4 * found.std(ddof=1) / math.sqrt(len(found))


def test_every_number_of_masks_keeps_its_weight_in_expectation():
    """The estimate of `1 for sets of k tokens` has mean 1/k, for draws that divide the block and that do not."""
    for draws in (1, 3, 4, 8, 12):
        seen = np.zeros(9)
        for seed in range(4000):
            for draw in block_draws(8, draws=draws, key=str(seed)):
                seen[len(draw.masked)] += draw.weight / 4000
        np.testing.assert_allclose(seen[1:] * np.arange(1, 9), 1.0, atol=0.15)


def test_strata_are_enumerated_when_draws_are_as_many_as_tokens():
    draws = block_draws(32, draws=32, key="x")
    assert sorted(len(draw.masked) for draw in draws) == list(range(1, 33))
    doubled = block_draws(32, draws=64, key="x")
    assert len(doubled) == 63, "the one set of all tokens is taken once"
    assert sum(draw.weight for draw in doubled) == pytest.approx(sum(1 / k for k in range(1, 33)))


def test_the_same_key_gives_the_same_masks_and_another_key_others():
    assert block_draws(16, draws=16, key="0/1/2") == block_draws(16, draws=16, key="0/1/2")
    assert block_draws(16, draws=16, key="0/1/2") != block_draws(16, draws=16, key="0/1/3")


@pytest.mark.parametrize("pattern", ("A", "M", "MMAM"))
def test_batching_of_draws_changes_nothing(pattern):
    config = tiny_config(pattern, block_length=4)
    model = tiny_model(config)
    tokens = ordinary(config, (14,), generator(6))
    whole = document_bound(model, tokens, draws=Draws(per_block=8, batch=64), key="x")
    for batch in (1, 3, 5):
        assert document_bound(model, tokens, draws=Draws(per_block=8, batch=batch), key="x") == pytest.approx(
            whole, abs=1e-9
        )


@pytest.mark.parametrize("pattern", ("A", "M", "AM"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_reading_a_shared_prefix_equals_reading_copies(pattern, dtype):
    config = tiny_config(pattern)
    model = tiny_model(config).to(dtype)
    state = model.commit(ordinary(config, (1, 8), generator(7)), model.start(1, 12))
    canvas = ordinary(config, (3, 4), generator(8))
    copies = state.select(torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(
        model.denoise(canvas, shared(state, 3)), model.denoise(canvas, copies), rtol=1e-5, atol=1e-6
    )


def test_a_row_sums_its_documents_and_counts_fill_as_tokens_but_not_as_bytes():
    config = tiny_config("AM", block_length=4)
    model = tiny_model(config)
    tokens = ordinary(config, (12,), generator(9))
    tokens[7] = config.eos_token_id
    row = Row(
        tokens=np.append(tokens.numpy(), [config.pad_token_id] * 4),
        documents=np.array([0] * 8 + [1] * 4 + [-1] * 4),
        fill=np.array([False] * 7 + [True] + [False] * 8),
        blocks=3,
    )
    draws = Draws(per_block=4)
    token_bytes = np.full(config.vocab_size, 2, dtype=np.int32)
    found = row_bound(model, row, draws=draws, token_bytes=token_bytes, number=5)
    parts = [document_bound(model, part, draws=draws, key=f"5/{d}") for d, part in enumerate((tokens[:8], tokens[8:]))]
    assert found == {"nats": pytest.approx(sum(parts)), "tokens": 12, "bytes": 22, "documents": 2}


def test_the_summary_is_a_ratio_with_an_error_over_rows():
    rows = [{"nats": 10.0, "tokens": 5, "bytes": 20}, {"nats": 14.0, "tokens": 5, "bytes": 20}]
    found = summarize(rows)
    assert found.nats_per_token == pytest.approx(2.4)
    assert found.bits_per_byte == pytest.approx(24 / 40 / math.log(2))
    assert found.nats_per_token_error == pytest.approx(np.std([2.0, 2.8], ddof=1) / math.sqrt(2))
    assert summarize(rows[:1]).nats_per_token_error == math.inf


def test_rows_are_spread_over_the_text_without_repeats():
    assert spread(10, 3) == [1, 5, 8]
    assert spread(4, 9) == [0, 1, 2, 3]
    assert len(set(spread(1000, 37))) == 37


def test_what_no_text_can_be_is_refused():
    config = tiny_config("A")
    model = tiny_model(config)
    for tokens, sentence in (
        (torch.tensor([], dtype=torch.int64), "is empty"),
        (torch.tensor([5, config.mask_token_id]), "mask id"),
        (torch.tensor([config.vocab_size]), "beyond the model's vocabulary"),
    ):
        with pytest.raises(InputError, match=sentence):
            document_bound(model, tokens, draws=Draws(), key="x")

"""The block-wise bound: equal to its definition by enumeration, exact where it can be, whatever the batching."""

import collections
import itertools
import math

import numpy as np
import pytest
import torch
from support import PATTERNS, generator, ordinary, tiny_config, tiny_model

from mezzotint.data.rows import Row
from mezzotint.eval.bound import TWIN_EVERY, Draws, document_bound, stream_bound
from mezzotint.eval.canvases import shared
from mezzotint.eval.draws import COMMON, Draw, allocate, block_draws
from mezzotint.eval.memory import StoragePeak
from mezzotint.eval.score import row_bound, spread
from mezzotint.eval.tally import Tally, by_bin, position_edge, summarize
from mezzotint.models.errors import InputError
from mezzotint.models.schedule import Schedule


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


def set_losses(model, tokens: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Cross-entropy of every set of masked tokens of the first block."""
    n = len(tokens)
    sets = [masked for k in range(1, n + 1) for masked in itertools.combinations(range(n), k)]
    return {masked: -float(log_probability(model, tokens, 0, masked).sum()) for masked in sets}


@pytest.mark.parametrize("replicates", [1, 2])
@pytest.mark.parametrize("draws", [1, 2, 3, 5, 7, 10, 20])
@torch.no_grad()
def test_random_draws_agree_with_enumeration_within_their_error(draws, replicates):
    """Blocks of five, fewer and more draws than tokens: the mean over many seeds is the exact bound."""
    config = tiny_config("AM", block_length=5)
    model = tiny_model(config)
    tokens = ordinary(config, (5,), generator(5))
    losses = set_losses(model, tokens)
    exact = bound_by_integral(model, tokens)
    chosen = [block_draws(5, draws=draws, key=str(seed), replicates=replicates) for seed in range(3000)]
    found = np.array([sum(draw.weight * losses[draw.masked] for draw in each) for each in chosen])
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert error < 0.02 * exact, "the test has no power"
    assert abs(found.mean() - exact) < 4 * error


@torch.no_grad()
def test_all_sets_are_taken_where_there_are_no_more_than_draws():
    config = tiny_config("AM", block_length=5)
    model = tiny_model(config)
    tokens = ordinary(config, (5,), generator(5))
    tally = Tally()
    assert list(stream_bound(model, [tokens], length=5, draws=Draws(per_block=31), key="x", tally=tally)) == [5]
    assert tally.nats == pytest.approx(bound_by_integral(model, tokens), abs=1e-10)
    assert tally.error == 0.0


def test_every_number_of_masks_keeps_its_weight_in_expectation():
    """The estimate of `1 for sets of k tokens` has mean 1/k, for draws that divide the block and that do not."""
    for draws in (1, 3, 4, 8, 12):
        seen = np.zeros(9)
        for seed in range(4000):
            for draw in block_draws(8, draws=draws, key=str(seed)):
                assert draw.stratum == len(draw.masked)
                seen[draw.stratum] += draw.weight / 4000
        np.testing.assert_allclose(seen[1:] * np.arange(1, 9), 1.0, atol=0.15)


@pytest.mark.parametrize("draws", [4, 6, 12])
def test_every_set_of_a_size_is_equally_likely_however_the_draws_balance_each_other(draws):
    """Chi-square over all sets of 5 tokens, for each draw by its place, which balancing must not favour."""
    tries = 6000
    counts = collections.Counter(
        (place, draw.masked)
        for seed in range(tries)
        for place, draw in enumerate(block_draws(5, draws=draws, key=str(seed)))
    )
    for place in range(1, draws):  # place 0 is the set of all tokens
        for k in range(1, 5):
            seen = np.array([counts[place, masked] for masked in itertools.combinations(range(5), k)])
            if seen.sum() < 200:
                continue
            expected = seen.sum() / len(seen)
            freedom = len(seen) - 1
            chi = ((seen - expected) ** 2 / expected).sum()
            assert chi < freedom + 5 * math.sqrt(2 * freedom), (place, k, seen)


def test_draws_give_all_tokens_nearly_the_same_weight():
    """The mean over seeds of the variance of token weights, against sets drawn independently."""
    rng = np.random.default_rng(0)

    def unevenness(sets) -> float:
        carried = np.zeros(32)
        for masked, weight in sets:
            carried[list(masked)] += weight
        assert carried.sum() == pytest.approx(32.0)
        return float(carried.var())

    chosen = [block_draws(32, draws=32, key=str(seed), replicates=2) for seed in range(50)]
    balanced = [unevenness((draw.masked, draw.weight) for draw in each) for each in chosen]
    independent = [unevenness((rng.permutation(32)[: draw.stratum], draw.weight) for draw in each) for each in chosen]
    assert np.mean(balanced) < np.mean(independent) / 50


def test_few_masks_get_most_draws_and_the_set_of_all_tokens_one():
    for count, draws in ((32, 15), (32, 31), (16, 7), (8, 40), (5, 1), (1024, 15)):
        strata = allocate(count, draws)
        assert sum(stratum.draws for stratum in strata) == draws
        ends = [(stratum.low, stratum.high) for stratum in strata]
        assert [number for low, high in ends for number in range(low, high + 1)] == list(range(1, count))
        few = sum(stratum.draws for stratum in strata if stratum.low <= count / 2)
        assert few >= draws - few
        assert strata[0].draws / strata[0].width == max(s.draws / s.width for s in strata)
    for draws in (8, 32, 64):
        chosen = block_draws(32, draws=draws, key="x", replicates=2)
        assert sum(len(draw.masked) == 32 for draw in chosen) == 1
        assert draws - 1 <= len(chosen) <= draws


@pytest.mark.parametrize("draws", [6, 12])
def test_the_monte_carlo_error_of_one_document_is_the_spread_over_seeds(draws):
    """Fewer draws than tokens (one block in eight shows the error of all) and more (each block shows its own)."""
    blocks, rng = 24, np.random.default_rng(0)
    losses = [
        {
            masked: sum(hard[list(masked)]) + 0.3 * len(masked) * rng.standard_normal()
            for k in range(1, 9)
            for masked in itertools.combinations(range(8), k)
        }
        for hard in rng.exponential(3.0, (blocks, 8))
    ]
    found, variances = [], []
    for seed in range(200):
        tally = Tally()
        for b in range(blocks):
            twin = draws < 8 and b % TWIN_EVERY == 0
            chosen = Draws(per_block=draws, seed=seed).of(8, key=str(b), twin=twin)
            nats = torch.tensor([losses[b][draw.masked] for draw in chosen], dtype=torch.float64)
            tally.add(chosen, nats, count=8, position=8 * b, twin=twin)
        found.append(tally.nats)
        variances.append(tally.error**2)
    assert 0.75 < np.mean(variances) / np.var(found, ddof=1) < 1.33  # the variance of 200 is known to a tenth


@pytest.mark.parametrize("draws", [2, 4, 8])
def test_a_document_always_has_an_error(draws):
    model = tiny_model(tiny_config("M", block_length=8))
    for length in (8, 8 * 9 + 4):
        tally = Tally()
        tokens = ordinary(model.config, (length,), generator(5))
        for _ in stream_bound(model, [tokens], length=length, draws=Draws(per_block=draws), key="x", tally=tally):
            pass
        assert 0 < tally.error < 0.5 * tally.nats


def test_replicates_share_nothing_but_the_set_of_all_tokens():
    chosen = block_draws(16, draws=16, key="x", replicates=2)
    assert [draw.stratum for draw in chosen if draw.replicate == COMMON] == [16]
    sizes = [sum(draw.replicate == replicate for draw in chosen) for replicate in (0, 1)]
    assert sizes == [7, 7]
    for replicate in (0, 1):
        weight = sum(draw.weight * draw.stratum for draw in chosen if draw.replicate == replicate)
        assert weight == pytest.approx(15 / 2), "each stands for half of the 15 smaller numbers of masks"


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
    assert {name: found[name] for name in ("nats", "tokens", "bytes", "documents")} == {
        "nats": pytest.approx(sum(parts)),
        "tokens": 12,
        "bytes": 22,
        "documents": 2,
    }


@pytest.mark.parametrize("draws", [3, 8, 20])
@torch.no_grad()
def test_positions_and_levels_sum_to_the_whole(draws):
    config = tiny_config("M", block_length=8)
    model = tiny_model(config)
    tokens = ordinary(config, (8 * 20 + 5,), generator(4))
    tally = Tally()
    for _ in stream_bound(model, [tokens], length=165, draws=Draws(per_block=draws), key="x", tally=tally):
        pass
    values = tally.values()
    for name in ("by_position", "by_level"):
        assert sum(nats for _, nats, _ in values[name]) == pytest.approx(tally.nats)
        assert sum(count for _, _, count in values[name]) == pytest.approx(165)
    assert [(edge, count) for edge, _, count in values["by_position"]] == [(0, 64), (64, 64), (128, 37)]
    binned = by_bin([values, values], "by_position")
    assert binned[1] == (64, pytest.approx(values["by_position"][1][1] / 64), 128)
    first = document_bound(model, tokens[:64], draws=Draws(per_block=draws), key="x")
    assert values["by_position"][0][1] == pytest.approx(first)


@torch.no_grad()
def test_levels_are_what_they_say():
    """With every set taken, the value of a level is the mean cross-entropy of its numbers of masked tokens."""
    config = tiny_config("AM", block_length=5)
    model = tiny_model(config)
    tokens = ordinary(config, (5,), generator(5))
    losses = set_losses(model, tokens)
    tally = Tally()
    for _ in stream_bound(model, [tokens], length=5, draws=Draws(per_block=31), key="x", tally=tally):
        pass
    found = {edge: nats for edge, nats, _ in by_bin([tally.values()], "by_level")}
    for k, edge in ((1, 0.1), (2, 0.3), (3, 0.5), (4, 0.7), (5, 0.9)):
        mean = np.mean([loss / k for masked, loss in losses.items() if len(masked) == k])
        assert found[edge] == pytest.approx(mean)


@pytest.mark.parametrize("count", [1, 3, 7, 8, 10, 32])
def test_a_share_of_masks_falls_into_its_tenth(count):
    for k in range(1, count + 1):
        tally = Tally()
        draw = Draw(tuple(range(k)), 1 / k, k, COMMON)
        tally.add([draw], torch.tensor([1.0], dtype=torch.float64), count=count, position=0, twin=False)
        (level,) = (i for i, (_, tokens) in enumerate(tally.by_level) if tokens)
        assert level * count < 10 * k <= (level + 1) * count


def test_bins_of_positions_double():
    assert [position_edge(p) for p in (0, 63, 64, 127, 128, 255, 256, 2**20)] == [0, 0, 64, 64, 128, 128, 256, 2**20]


@pytest.mark.parametrize("pattern", ("M", "AM"))
@torch.no_grad()
def test_a_document_in_pieces_is_the_document(pattern):
    config = tiny_config(pattern, block_length=4)
    model = tiny_model(config)
    tokens = ordinary(config, (30,), generator(6))
    whole = document_bound(model, tokens, draws=Draws(per_block=4), key="x")
    for sizes in ([1] * 30, [3, 0, 20, 7], [30], [4, 4, 22]):
        tally = Tally()
        done = list(stream_bound(model, tokens.split(sizes), length=30, draws=Draws(per_block=4), key="x", tally=tally))
        assert done == [4, 8, 12, 16, 20, 24, 28, 30]
        assert tally.nats == whole


class _LogitsSeen(torch.utils._python_dispatch.TorchDispatchMode):
    """The most rows that any one tensor of vocabulary width had."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return made


def test_a_long_row_never_has_all_its_logits():
    config = tiny_config("AM", block_length=8, vocab_size=97)
    model = tiny_model(config)
    tokens = ordinary(config, (8 * 30,), generator(6))
    with _LogitsSeen(97) as seen:
        document_bound(model, tokens, draws=Draws(per_block=8, batch=4), key="x")
    assert 0 < seen.rows <= 4 * 8, "no more than one pass of canvases"


def test_a_mamba_document_needs_the_same_memory_at_any_length():
    config = tiny_config("M", block_length=8)
    model = tiny_model(config)

    def peak(length: int) -> int:
        pieces = (ordinary(config, (8,), generator(n)) for n in range(length // 8))
        tally = Tally()
        with StoragePeak() as memory:
            for _ in stream_bound(model, pieces, length=length, draws=Draws(per_block=4), key="x", tally=tally):
                pass
        assert tally.tokens == length
        return memory.peak

    peak(64)
    assert peak(128) == peak(512)


@torch.no_grad()
def test_the_bound_of_training_on_the_same_rows_is_the_same_within_its_error():
    from mezzotint.training.distributed import Ranks
    from mezzotint.training.objective import Objective
    from mezzotint.training.validate import HeldOut, ValidationConfig, bound

    config = tiny_config("AM", block_length=8)
    model = tiny_model(config).float()
    documents = np.array([[0] * 32, [0] * 8 + [1] * 24, [0] * 16 + [1] * 8 + [-1] * 8, [0] * 24 + [1] * 8])
    tokens = ordinary(config, (4, 32), generator(7)).numpy()
    tokens[documents < 0] = config.pad_token_id
    rows = [Row(t, d, np.zeros(32, dtype=bool), int((d >= 0).sum()) // 8) for t, d in zip(tokens, documents)]
    token_bytes = np.full(config.vocab_size, 2, dtype=np.int32)
    ours = summarize(
        [
            row_bound(model, row, draws=Draws(per_block=256), token_bytes=token_bytes, number=i)
            for i, row in enumerate(rows)
        ]
    )
    held_out = HeldOut(
        torch.from_numpy(tokens),
        torch.from_numpy(documents),
        torch.tensor([row.blocks for row in rows]),
        torch.tensor([2.0 * (row.documents >= 0).sum() for row in rows], dtype=torch.float64),
    )
    estimates = [
        bound(
            Objective(model, Schedule()),
            held_out,
            config=ValidationConfig(folder="x", draws=8, seed=seed),
            micro_rows=4,
            ranks=Ranks(0, 1, torch.device("cpu")),
            stopped=lambda: False,
        )
        for seed in range(30)
    ]
    theirs = np.array([found.nats_per_token for found in estimates])
    error = math.hypot(theirs.std(ddof=1) / math.sqrt(30), ours.monte_carlo_error)
    assert error < 0.02 * ours.nats_per_token, "the test has no power"
    assert abs(theirs.mean() - ours.nats_per_token) < 4 * error
    bytes_per_token = ours.bytes / ours.tokens
    assert ours.bits_per_byte == pytest.approx(ours.nats_per_token / math.log(2) / bytes_per_token)


def test_the_summary_is_a_ratio_with_an_error_over_rows():
    rows = [
        {"nats": 10.0, "tokens": 5, "bytes": 20, "monte_carlo_error": 0.3},
        {"nats": 14.0, "tokens": 5, "bytes": 20, "monte_carlo_error": 0.4},
    ]
    found = summarize(rows)
    assert found.nats_per_token == pytest.approx(2.4)
    assert found.bits_per_byte == pytest.approx(24 / 40 / math.log(2))
    assert found.nats_per_token_error == pytest.approx(np.std([2.0, 2.8], ddof=1) / math.sqrt(2))
    assert found.monte_carlo_error == pytest.approx(0.05)
    assert summarize(rows[:1]).nats_per_token_error == math.inf
    assert summarize([*rows, rows[0] | {"monte_carlo_error": None}]).monte_carlo_error is None


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

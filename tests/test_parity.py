"""One function, many callers: training pass, block by block, advance and prefill agree, and equal the oracle."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from support import (
    PATTERNS,
    VARIANTS,
    assert_close,
    assert_same_gradients,
    documents_of,
    generator,
    noisy_canvas,
    ordinary,
    parameters_of,
    random_case,
    random_lengths,
    state_bytes_of,
    tiny_config,
    tiny_model,
    training_logits,
    variant,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

BLOCKS = 4
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)
every_variant = pytest.mark.parametrize("block_length, positions, chunk_blocks", VARIANTS)


def plain_case(config, **options):
    return random_case(config, blocks=BLOCKS, documents=False, **options)


# ---- training == denoise/commit == advance == prefill ---------------------------------------------------------------


@torch.no_grad()
def block_by_block(model, case) -> Tensor:
    """Logits of every frontier by denoise, then commit."""
    g = model.config.block_length
    state = model.start(case.clean.shape[0], case.clean.shape[1] + g)
    logits = []
    for b in range(case.noisy.shape[1]):
        logits.append(model.denoise(case.noisy[:, b], state))
        state = model.commit(case.clean[:, b * g : (b + 1) * g], state)
        assert state.length.tolist() == [(b + 1) * g] * case.clean.shape[0]
    return torch.stack(logits, dim=1)


@torch.no_grad()
def by_advance(model, case) -> Tensor:
    """Logits of every frontier but the first by advance, which commits the block before it."""
    g = model.config.block_length
    state = model.start(case.clean.shape[0], case.clean.shape[1])
    logits = [model.denoise(case.noisy[:, 0], state)]
    for b in range(1, case.noisy.shape[1]):
        out, state = model.advance(case.clean[:, (b - 1) * g : b * g], case.noisy[:, b], state)
        logits.append(out)
    return torch.stack(logits, dim=1)


@every_pattern
@every_variant
@torch.no_grad()
def test_training_is_block_by_block_is_advance(pattern: str, block_length: int, positions: str, chunk_blocks: int):
    model = tiny_model(variant(pattern, block_length, positions, chunk_blocks))
    case = plain_case(model.config)
    logits = training_logits(model, case)
    assert_close(block_by_block(model, case), logits)
    assert_close(by_advance(model, case), logits)


@every_pattern
@every_variant
@torch.no_grad()
def test_prefill_at_any_aligned_split(pattern: str, block_length: int, positions: str, chunk_blocks: int):
    model = tiny_model(variant(pattern, block_length, positions, chunk_blocks))
    case = plain_case(model.config, frontiers=[[BLOCKS], [BLOCKS]])
    expected = training_logits(model, case)[:, 0]
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, BLOCKS), n) for n in range(BLOCKS)):
        state = model.start(2, BLOCKS * block_length)
        pieces = case.clean.tensor_split([cut * block_length for cut in cuts], dim=1)
        for piece in pieces[:-1]:
            state = model.commit(piece, state)
        advanced, _ = model.advance(pieces[-1], case.noisy[:, 0], state.clone())
        assert_close(advanced, expected)
        assert_close(model.denoise(case.noisy[:, 0], model.commit(pieces[-1], state)), expected)


@every_pattern
@every_variant
@torch.no_grad()
def test_ragged_rows(pattern: str, block_length: int, positions: str, chunk_blocks: int):
    """Rows commit different numbers of blocks, none at all included, and each stays at its own frontier."""
    config = variant(pattern, block_length, positions, chunk_blocks)
    model = tiny_model(config)
    g, random = block_length, generator(4)
    text = ordinary(config, (3, 5 * g), random)
    state = model.start(3, 5 * g)
    done = torch.zeros(3, dtype=torch.int64)
    for step in ([2, 0, 1], [1, 2, 0], [0, 0, 2], [0, 1, 1]):
        blocks = torch.tensor(step)
        offered = ordinary(config, (3, 2 * g), random)  # what is not valid is garbage
        for r, n in enumerate(step):
            offered[r, : n * g] = text[r, done[r] * g : (done[r] + n) * g]
        canvas = noisy_canvas(config, (3, g), random)
        advanced, _ = model.advance(offered, canvas, state.clone(), blocks=blocks)
        state = model.commit(offered, state, blocks=blocks)
        done = done + blocks
        assert state.length.tolist() == (done * g).tolist()
        logits = model.denoise(canvas, state)
        assert_close(advanced, logits)
        for r in range(3):
            alone = model(text[r : r + 1], canvas[r][None, None], done[r].reshape(1, 1))
            assert_close(logits[r : r + 1], alone[:, 0])


@every_pattern
@every_variant
@torch.no_grad()
def test_documents_inside_a_row(pattern: str, block_length: int, positions: str, chunk_blocks: int):
    """Every document of a row trains exactly as it is decoded alone."""
    model = tiny_model(variant(pattern, block_length, positions, chunk_blocks))
    g, lengths = block_length, [[1, 3], [3, 1]]
    case = plain_case(model.config)
    logits = model(case.clean, case.noisy, case.frontiers, documents=documents_of(lengths, g))
    for r, row in enumerate(lengths):
        first = 0
        for n in row:
            state = model.start(1, n * g)
            for b in range(first, first + n):
                assert_close(logits[r, b], model.denoise(case.noisy[r : r + 1, b], state)[0])
                state = model.commit(case.clean[r : r + 1, b * g : (b + 1) * g], state)
            first += n


@every_pattern
@torch.no_grad()
def test_rows_longer_than_a_tile(pattern: str):
    """352 tokens in blocks of 32: attention takes several tiles, documents begin and end inside them."""
    model = tiny_model(variant(pattern, 32, "rope", 3))
    lengths = [[5, 6], [9, 2]]
    case = random_case(model.config, blocks=11, documents=False)
    assert_close(by_advance(model, case), training_logits(model, case))
    logits = model(case.clean, case.noisy, case.frontiers, documents=documents_of(lengths, 32))
    for r, (n, _) in enumerate(lengths):
        first = model(case.clean[r : r + 1, : n * 32], case.noisy[r : r + 1, :n], torch.arange(n)[None])
        rest = model(case.clean[r : r + 1, n * 32 :], case.noisy[r : r + 1, n:], torch.arange(11 - n)[None])
        assert_close(logits[r : r + 1], torch.cat([first, rest], dim=1))


@every_pattern
@torch.no_grad()
def test_denoise_leaves_the_state_bit_identical(pattern: str, tmp_path: Path):
    model = tiny_model(tiny_config(pattern))
    case = plain_case(model.config)
    state = model.commit(case.clean[:, :12], model.start(2, 32), blocks=torch.tensor([3, 1]))
    before, kept = state_bytes_of(state, tmp_path), state.clone()
    first = model.denoise(case.noisy[:, 0], state)
    for f in (1, 2, 3):
        model.denoise(case.noisy[:, f], state)
    assert state_bytes_of(state, tmp_path) == before
    assert torch.equal(model.denoise(case.noisy[:, 0], state), first)
    assert torch.equal(model.denoise(case.noisy[:, 0], kept), first)


@every_pattern
@torch.no_grad()
def test_fork_select_and_reload(pattern: str, tmp_path: Path):
    """A forked state is not moved by its twin; selected and reloaded rows continue as before."""
    from mezzotint.models.state import State

    model = tiny_model(tiny_config(pattern))
    case = plain_case(model.config)
    state = model.commit(case.clean[:, :8], model.start(2, 32), blocks=torch.tensor([2, 1]))
    expected = model.denoise(case.noisy[:, 0], state)
    twin = state.clone()
    model.commit(case.clean[:, 8:], twin)
    assert torch.equal(model.denoise(case.noisy[:, 0], state), expected)
    picked = torch.tensor([1, 0, 1])
    assert_close(model.denoise(case.noisy[picked, 0], state.select(picked)), expected[picked])
    state.save(tmp_path / "state.safetensors")
    again = State.load(tmp_path / "state.safetensors")
    assert torch.equal(model.denoise(case.noisy[:, 0], again), expected)
    onward, _ = model.advance(case.clean[:, 8:12], case.noisy[:, 1], again)
    assert_close(onward, model.advance(case.clean[:, 8:12], case.noisy[:, 1], state)[0])


# ---- which frontiers, how much of the row ----


@every_pattern
@torch.no_grad()
def test_frontiers_one_k_and_all_agree(pattern: str):
    model = tiny_model(tiny_config(pattern, chunk_length=8))
    case = random_case(model.config, blocks=5)
    everything = training_logits(model, case)
    for chosen in ([[0], [4]], [[3], [2]], [[1, 4], [0, 2]], [[0, 2, 3], [1, 2, 4]]):
        places = torch.tensor(chosen)
        rows = torch.arange(2)[:, None]
        some = model(case.clean, case.noisy[rows, places], places, documents=case.documents)
        assert_close(some, everything[rows, places])


@every_pattern
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@torch.no_grad()
def test_cut_rows_equal_uncut_ones(pattern: str, documents: bool):
    model = tiny_model(tiny_config(pattern, chunk_length=12))
    for places in ([[2], [3]], [[0], [0]], [[0, 1], [1, 2]]):
        case = random_case(model.config, blocks=6, frontiers=places, documents=documents)
        whole = training_logits(model, case)
        cut = case.clean[:, : int(case.frontiers.max()) * model.config.block_length]
        assert_close(model(cut, case.noisy, case.frontiers, documents=case.documents), whole, 1e-12)


@every_pattern
def test_chosen_rows_of_the_logits(pattern: str):
    """`rows` picks positions, values and gradients alike."""
    model = tiny_model(tiny_config(pattern))
    case = random_case(model.config, blocks=3)
    rows = case.noisy == model.config.mask_token_id
    gradients = []
    parameters = parameters_of(model)
    picked = model(case.clean, case.noisy, case.frontiers, documents=case.documents, rows=rows)
    expected = training_logits(model, case)[rows]
    assert_close(picked, expected)
    for out in (picked, expected):
        found = torch.autograd.grad(torch.log_softmax(out, dim=-1)[:, 5].sum(), list(parameters.values()))
        gradients.append(dict(zip(parameters, found)))
    assert_same_gradients(*gradients)


@torch.no_grad()
def test_mask_and_pad_are_never_predicted():
    model = tiny_model(tiny_config("AM"))
    logits = training_logits(model, plain_case(model.config))
    never = [model.config.mask_token_id, model.config.pad_token_id]
    assert (logits[..., never] == -math.inf).all()
    assert logits.isfinite().sum() == logits.numel() * (model.config.vocab_size - 2) // model.config.vocab_size


@pytest.mark.slow
@every_pattern
@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_parity_grid(pattern: str, seed: int):
    """Random block lengths, chunks, widths and prompts: training, ragged decoding and documents on longer rows."""
    g = generator(100 + seed)
    block_length = (1, 2, 4, 16)[seed % 4]
    blocks = 9 if block_length < 16 else 5
    chunk = int(torch.randint(1, blocks + 1, (), generator=g))
    config = variant(pattern, block_length, ("rope", "none")[seed // 4], chunk)
    model = tiny_model(config, seed)
    case = random_case(config, batch=3, blocks=blocks, documents=False, seed=seed)
    logits = training_logits(model, case)
    assert_close(block_by_block(model, case), logits)
    assert_close(by_advance(model, case), logits)
    lengths = [random_lengths(blocks, g) for _ in range(3)]
    logits = model(case.clean, case.noisy, case.frontiers, documents=documents_of(lengths, block_length))
    for r, row in enumerate(lengths):
        for first, n in zip(itertools.accumulate([0, *row]), row):
            clean = case.clean[r : r + 1, first * block_length : (first + n) * block_length]
            noisy = case.noisy[r : r + 1, first : first + n]
            assert_close(logits[r : r + 1, first : first + n], model(clean, noisy, torch.arange(n)[None]))


@pytest.mark.parametrize("letter", ["A", "M"])
def test_the_last_layers_clean_stream_only_feeds_the_state(letter: str):
    """A commit through one layer costs its keys and values, or its convolution inputs, and no output and no MLP."""
    config = tiny_config(letter, tie_embeddings=True)
    model, tokens = tiny_model(config), torch.full((1, 8), 5)
    with FlopCounterMode(display=False) as counted:
        model.commit(tokens, model.start(1, 8))
    wanted = {"A": 2 * config.n_kv_heads * config.head_dim, "M": config.conv_channels + 2 * config.ssm_heads}[letter]
    products = counted.get_flop_counts()["Global"].get(torch.ops.aten.mm, 0)
    assert products == 2 * 8 * config.d_model * wanted


@pytest.mark.parametrize("blocks", [1, 5])
def test_a_state_holds_no_more_than_its_bytes(blocks: int):
    """Prefill makes a state a chunk; what comes back is not a view of all of them."""
    model = tiny_model(tiny_config("AM"))
    state = model.commit(torch.full((2, 4 * blocks), 5), model.start(2, 4 * blocks))
    tensors = [tensor for layer in state.layers for tensor in vars(layer).values()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == state.nbytes

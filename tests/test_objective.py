"""The loss is a sum over blocks; how rows, frontiers and logits are cut up, and what is unseen, does not matter."""

import pytest
import torch
from support import assert_close, assert_same_gradients, documents_of, generator, ordinary, tiny_config, tiny_model

from mezzotint.models.schedule import Schedule
from mezzotint.training.noise import Noise, NoiseSource
from mezzotint.training.objective import Objective, ObjectiveConfig, paint, supervised_tokens

G, BLOCKS, ROWS = 4, 5, 6


def setup(pattern: str = "AM", **options):
    """An objective, rows of two documents with fewer valid blocks in some, and a source of noise."""
    config = tiny_config(pattern, G)
    objective = Objective(tiny_model(config), Schedule(), **options)
    tokens = ordinary(config, (ROWS, BLOCKS * G), generator(5))
    documents = documents_of([[2, 3], [1, 4], [5], [3, 2], [2, 2, 1], [4, 1]], G)
    blocks = torch.tensor([5, 5, 3, 5, 4, 1])
    pad = torch.arange(BLOCKS * G) >= blocks[:, None] * G
    return objective, tokens.masked_fill(pad, config.pad_token_id), documents.masked_fill(pad, -1), blocks


def draw(blocks, slots, step: int = 0) -> Noise:
    source = NoiseSource(seed=1, rows_per_step=ROWS, row_blocks=BLOCKS, slots=slots, block_length=G)
    return source.draw(step=step, first_row=0, blocks=blocks)


def gradients(objective):
    return {name: p.grad for name, p in objective.named_parameters()}


@pytest.mark.parametrize("slots", [1, 2, BLOCKS])
def test_sum_and_gradients_do_not_depend_on_micro_batches(slots):
    objective, tokens, documents, blocks = setup()
    noise = draw(blocks, slots)
    loss, sums = objective(tokens, documents, noise)
    loss.backward()
    whole = {name: g.clone() for name, g in gradients(objective).items()}
    for rows in (
        [[0], [1], [2], [3], [4], [5]],
        [[5, 0], [3, 1, 4], [2]],
    ):  # any order: each is cut at its own frontier
        objective.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in map(torch.tensor, rows):
            part_loss, part_sums = objective(tokens[part], documents[part], noise.select(part))
            part_loss.backward()
            total += part_loss.detach()
            assert_close(part_sums.nll, sums.nll[part])
            assert torch.equal(part_sums.masked, sums.masked[part])
        assert_close(total, loss.detach())
        assert_same_gradients(gradients(objective), whole)


def test_one_k_and_all_frontiers_give_the_same_loss_of_a_block():
    objective, tokens, documents, _ = setup()
    everything = draw(torch.full((ROWS,), BLOCKS), BLOCKS)
    tokens = tokens.masked_fill(tokens == objective.model.config.pad_token_id, 5)
    documents = documents.clamp(min=0)
    _, sums = objective(tokens, documents, everything)
    for chosen in ([2], [0], [4], [1, 3], [0, 2, 4]):
        part = Noise(
            everything.frontiers[:, chosen],
            everything.valid[:, chosen],
            everything.levels[:, chosen],
            everything.uniforms[:, chosen],
            torch.full((ROWS,), BLOCKS / len(chosen), dtype=torch.float64),
        )
        loss, part_sums = objective(tokens, documents, part)
        assert_close(part_sums.nll, sums.nll[:, chosen])
        assert_close(loss, (sums.nll / everything.levels)[:, chosen].sum() * BLOCKS / len(chosen))


def test_loss_weighs_each_block_by_its_level_and_each_row_by_its_share():
    objective, tokens, documents, blocks = setup()
    noise = draw(blocks, 2)
    loss, sums = objective(tokens, documents, noise)
    by_hand = sum(
        float(sums.nll[r, s]) / float(noise.levels[r, s]) * int(blocks[r]) / min(2, int(blocks[r]))
        for r in range(ROWS)
        for s in range(min(2, int(blocks[r])))
    )
    assert loss.item() == pytest.approx(by_hand, rel=1e-10)
    assert int(sums.masked[5, 1]) == 0 and float(sums.nll[5, 1]) == 0  # a slot without a valid block


def test_chunks_of_the_cross_entropy_change_neither_loss_nor_gradients_and_bound_the_logits():
    plain, tokens, documents, blocks = setup(loss_chunk=10_000)
    noise = draw(blocks, BLOCKS)
    loss, _ = plain(tokens, documents, noise)
    loss.backward()
    chunked, *_ = setup(loss_chunk=7)
    sizes = []
    head = chunked.model.logits
    chunked.model.logits = lambda hidden: (sizes.append(len(hidden)), head(hidden))[1]
    chunked_loss, _ = chunked(tokens, documents, noise)
    chunked_loss.backward()
    assert_close(chunked_loss, loss)
    assert_same_gradients(gradients(chunked), gradients(plain))
    assert max(sizes) == 7 and len(sizes) > 10


def test_padding_blocks_and_padding_rows_change_nothing():
    objective, tokens, documents, blocks = setup()
    noise = draw(blocks, BLOCKS)
    part = torch.tensor([5])  # one valid block: the row without its padding is G tokens long
    short = Noise(*(x[part][:, :1] if x.dim() > 1 else x[part] for x in vars(noise).values()))
    alone, _ = objective(tokens[part, :G], documents[part, :G], short)
    in_row, _ = objective(tokens[part], documents[part], noise.select(part))
    assert_close(alone, in_row)
    empty = torch.full((2, BLOCKS * G), objective.model.config.pad_token_id)
    source = NoiseSource(seed=1, rows_per_step=ROWS, row_blocks=BLOCKS, slots=BLOCKS, block_length=G)
    nothing, sums = objective(
        empty, torch.full_like(empty, -1), source.draw(step=0, first_row=0, blocks=torch.zeros(2).long())
    )
    nothing.backward()
    assert nothing.item() == 0 and int(sums.masked.sum()) == 0
    assert supervised_tokens(documents) == int(blocks.sum()) * G


@pytest.mark.parametrize("pattern", ["A", "M", "MMAM"])
def test_later_tokens_and_other_documents_leave_a_block_bit_identical(pattern):
    """Exactly: not by a small number but not at all, in the loss and in the gradient."""
    objective, tokens, documents, _ = setup(pattern)
    tokens, documents = tokens[:1], documents_of([[2, 3]], G)
    noise = draw(torch.tensor([5]), BLOCKS)
    _, before = objective(tokens, documents, noise)
    moved = tokens.clone()
    moved[:, : 2 * G] = (tokens[:, : 2 * G] + 7) % 30 + 4  # the first document
    _, after = objective(moved, documents, noise)
    assert torch.equal(before.nll[:, 2:], after.nll[:, 2:])
    assert not torch.equal(before.nll[:, :2], after.nll[:, :2])
    moved = tokens.clone()
    moved[:, 4 * G :] = (tokens[:, 4 * G :] + 7) % 30 + 4  # the last block
    _, after = objective(moved, documents, noise)
    assert torch.equal(before.nll[:, :4], after.nll[:, :4])


def test_a_block_as_long_as_the_row_is_plain_masked_diffusion():
    config = tiny_config("A", 12)
    objective = Objective(tiny_model(config), Schedule())
    tokens = ordinary(config, (3, 12), generator(2))
    documents = torch.zeros(3, 12, dtype=torch.long)
    source = NoiseSource(seed=1, rows_per_step=3, row_blocks=1, slots=1, block_length=12)
    noise = source.draw(step=0, first_row=0, blocks=torch.ones(3).long())
    loss, _ = objective(tokens, documents, noise)
    masked = noise.uniforms[:, 0] < noise.levels
    canvas = tokens.masked_fill(masked, config.mask_token_id)
    logits = objective.model.denoise(canvas, objective.model.start(3, 12))
    nll = -logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert_close(loss, (nll.masked_fill(~masked, 0) / noise.levels).sum())


def test_documents_inside_a_row_long_block_do_not_see_each_other():
    config = tiny_config("A", 12)
    objective = Objective(tiny_model(config), Schedule())
    tokens = ordinary(config, (1, 12), generator(2))
    documents = torch.tensor([[0] * 5 + [1] * 7])  # not aligned to anything
    source = NoiseSource(seed=1, rows_per_step=1, row_blocks=1, slots=1, block_length=12)
    noise = source.draw(step=1, first_row=0, blocks=torch.ones(1).long())
    noise.levels.fill_(0.6)
    canvas = paint(tokens, documents, noise, Schedule(), 12)
    seconds = canvas.masked[0, 0] & (documents[0] == 1)
    assert seconds.any() and not canvas.masked[0, 0, :5].all()

    def second_document_loss(row):
        noisy = canvas.targets.masked_fill(canvas.masked, config.mask_token_id).clone()
        noisy[0, 0, :5] = torch.where(canvas.masked[0, 0, :5], noisy[0, 0, :5], row)
        hidden = objective.model.hidden(tokens[:, :0], noisy, canvas.frontiers, documents)
        return objective.cross_entropy(hidden[0, 0, seconds], tokens[0, seconds])

    assert torch.equal(second_document_loss(7), second_document_loss(9))


def test_loss_of_autocast_is_float32():
    config = tiny_config("AM", G)
    objective = Objective(tiny_model(config).float(), Schedule())
    _, tokens, documents, blocks = setup()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, sums = objective(tokens, documents, draw(blocks, BLOCKS))
    assert loss.dtype == sums.nll.dtype == torch.float32


@pytest.mark.parametrize(("frontiers", "slots"), [("one", 1), ("all", 5), (3, 3)])
def test_number_of_frontiers(frontiers, slots):
    assert ObjectiveConfig(frontiers=frontiers).slots(5) == slots

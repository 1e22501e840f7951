"""Draws depend on (seed, step, row, purpose) alone; levels are stratified over a step and blind to row and position."""

import dataclasses

import numpy as np
import pytest
import torch

from mezzotint.models.errors import InputError
from mezzotint.training.noise import Noise, NoiseSource, Purpose, choose_frontiers, generator


def source(**changes) -> NoiseSource:
    return NoiseSource(**({"seed": 3, "rows_per_step": 12, "row_blocks": 8, "slots": 8, "block_length": 4} | changes))


def same(a: Noise, b: Noise) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Noise))


def full(rows: int, blocks: int = 8) -> torch.Tensor:
    return torch.full((rows,), blocks)


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_row_has_the_same_noise_however_the_batch_is_cut(slots):
    noise = source(slots=slots)
    blocks = torch.tensor([8, 8, 3, 8, 1, 8, 0, 8, 8, 5, 8, 8])
    whole = noise.draw(step=7, first_row=0, blocks=blocks)
    for size in (1, 2, 3, 6):  # micro-batches, or the shares of ranks
        for first in range(0, 12, size):
            part = source(slots=slots).draw(step=7, first_row=first, blocks=blocks[first : first + size])
            assert same(part, whole.select(torch.arange(first, first + size)))


def test_every_part_of_the_key_changes_the_draws():
    base = source().draw(step=7, first_row=0, blocks=full(12))
    for other in (
        source(seed=4).draw(step=7, first_row=0, blocks=full(12)),
        source().draw(step=8, first_row=0, blocks=full(12)),
    ):
        assert not (base.levels == other.levels).any()
        assert not (base.uniforms == other.uniforms).any()
    first = [generator(seed=3, step=7, row=0, purpose=purpose).random() for purpose in Purpose]
    assert len(set(first)) == len(Purpose)
    assert not (base.uniforms[0] == base.uniforms[1]).any()


def test_draws_are_pinned():
    """These numbers are part of the format of a run: a change makes every old run impossible to resume."""
    noise = source(slots=2).draw(step=5, first_row=3, blocks=full(1))
    assert noise.frontiers.tolist() == PINNED["frontiers"]
    np.testing.assert_allclose(noise.levels[0].numpy(), PINNED["levels"], rtol=0, atol=1e-15)
    np.testing.assert_allclose(noise.uniforms[0, 0].numpy(), PINNED["uniforms"], rtol=0, atol=1e-15)


PINNED = {
    "frontiers": [[1, 7]],
    "levels": [0.6701797665280078, 0.45887016957228405],
    "uniforms": [0.03442467842902508, 0.7914502896811578, 0.03914916018902059, 0.23171252133942333],
}


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_levels_of_a_step_fill_every_stratum_once(slots):
    levels = source(slots=slots).draw(step=2, first_row=0, blocks=full(12)).levels
    assert sorted((levels * 12 * slots).long().flatten().tolist()) == list(range(12 * slots))
    assert float(levels.min()) > 0


def test_levels_are_uncorrelated_with_row_slot_and_each_other_row_by_row():
    """Drawn one row at a time (micro-batch 1): the mean level of every row, slot and place is 1/2 within its error."""
    noise, steps = source(slots=4), 600
    levels = torch.stack(
        [
            torch.cat([noise.draw(step=step, first_row=row, blocks=full(1)).levels for row in range(12)])
            for step in range(steps)
        ]
    )  # (steps, rows, slots)
    error = (1 / 12) ** 0.5 / steps**0.5
    assert (levels.mean(0) - 0.5).abs().max() < 4.5 * error
    rows = torch.arange(12.0, dtype=torch.float64)[None, :, None].expand_as(levels)
    slots = torch.arange(4.0, dtype=torch.float64)[None, None].expand_as(levels)
    order = torch.arange(steps, dtype=torch.float64)[:, None, None].expand_as(levels)
    for place in (rows, slots, order):
        correlation = torch.corrcoef(torch.stack([levels.flatten(), place.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4.5 / levels.numel() ** 0.5


def test_level_is_uncorrelated_with_the_position_of_its_block():
    noise = source(slots=1)
    draws = [noise.draw(step=step, first_row=0, blocks=full(12)) for step in range(600)]
    levels = torch.cat([d.levels.flatten() for d in draws])
    frontiers = torch.cat([d.frontiers.flatten() for d in draws]).double()
    correlation = torch.corrcoef(torch.stack([levels, frontiers]))[0, 1]
    assert abs(float(correlation)) < 4.5 / len(levels) ** 0.5


def test_mask_uniforms_are_uncorrelated_with_place_and_level():
    noise = source(slots=4)
    draws = [noise.draw(step=step, first_row=0, blocks=full(12)) for step in range(300)]
    uniforms = torch.stack([d.uniforms for d in draws])  # (steps, rows, slots, G)
    error = (1 / 12) ** 0.5 / len(draws) ** 0.5
    assert (uniforms.mean(0) - 0.5).abs().max() < 4.8 * error  # 192 places
    levels = torch.stack([d.levels for d in draws])[..., None].expand_as(uniforms)
    correlation = torch.corrcoef(torch.stack([levels.flatten(), uniforms.flatten()]))[0, 1]
    assert abs(float(correlation)) < 4.5 / uniforms.numel() ** 0.5


def test_frontiers_are_distinct_ascending_and_every_subset_equally_likely():
    counts: dict[tuple[int, ...], int] = {}
    for row in range(3000):
        chosen = tuple(choose_frontiers(generator(seed=1, step=0, row=row, purpose=Purpose.FRONTIER), 5, 2))
        assert list(chosen) == sorted(set(chosen))
        counts[chosen] = counts.get(chosen, 0) + 1
    assert len(counts) == 10
    statistic = sum((n - 300) ** 2 / 300 for n in counts.values())
    assert statistic < 27.9  # chi-square, 9 degrees of freedom, 0.1 %


def test_rows_with_few_blocks_use_only_those_and_weigh_them():
    noise = source(slots=4).draw(step=0, first_row=0, blocks=torch.tensor([8, 4, 3, 1, 0]))
    assert noise.valid.sum(1).tolist() == [4, 4, 3, 1, 0]
    assert noise.share.tolist() == [2, 1, 1, 1, 0]
    for row, blocks in enumerate([8, 4, 3, 1, 1]):
        assert int(noise.frontiers[row].max()) < blocks
    assert noise.frontiers[2].tolist() == [0, 1, 2, 2]


def test_more_frontiers_than_blocks_is_bad_input():
    with pytest.raises(InputError, match="9 frontiers"):
        source(slots=9)

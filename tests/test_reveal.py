"""Each reveal rule and the sampler on distributions written by hand; every rule progresses and ends without masks."""

from __future__ import annotations

import math

import pytest
import torch

from mezzotint.models.errors import InputError
from mezzotint.models.reveal import (
    Ancestral,
    EntropyBound,
    FirstHitting,
    Proposal,
    Sampler,
    Threshold,
    TopK,
    _invert,
    _largest,
    parse_reveal,
    uniform,
)

RULES = [
    TopK(steps=3),
    TopK(steps=100),
    Threshold(confidence=0.5),
    Threshold(confidence=2.0),
    EntropyBound(bound=0.0),
    EntropyBound(bound=0.7),
    Ancestral(steps=3),
    Ancestral(steps=50),
    FirstHitting(),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def proposal(confidence: list[list[float]], entropy: list[list[float]] | None = None) -> Proposal:
    sure = torch.tensor(confidence, dtype=torch.float64)
    entropies = torch.tensor(entropy or confidence, dtype=torch.float64)
    return Proposal(torch.ones_like(sure).long(), sure, lambda: entropies)


def choose(rule, given: Proposal, masked: list[list[int]], step: list[int] | None = None) -> list[list[int]]:
    step = torch.tensor(step or [0] * len(masked))
    chosen, _ = rule(given, masked=torch.tensor(masked, dtype=torch.bool), step=step, generator=seeded())
    return chosen.long().tolist()


def test_topk_reveals_an_equal_share_of_the_surest_and_the_rest_in_the_last_step():
    given = proposal([[0.1, 0.9, 0.8, 0.2], [0.9, 0.9, 0.1, 0.2], [0.5, 0.4, 0.3, 0.2]])
    masked = [[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    assert choose(TopK(steps=2), given, masked) == [[0, 1, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]
    assert choose(TopK(steps=3), given, masked, [1, 2, 0]) == [[0, 1, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0]]


def test_threshold_reveals_all_that_are_sure_and_always_one():
    given = proposal([[0.6, 0.5, 0.49, 0.99], [0.1, 0.3, 0.2, 0.99]])
    assert choose(Threshold(confidence=0.5), given, [[1, 1, 1, 0], [1, 1, 1, 0]]) == [[1, 1, 0, 0], [0, 1, 0, 0]]


def test_entropy_bound_sums_all_entropies_but_the_largest():
    entropy = [[0.3, 0.1, 0.2, 5.0], [3.0, 2.0, 4.0, 0.0]]
    given = proposal(entropy, entropy)
    masked = [[1, 1, 1, 1], [1, 1, 1, 0]]
    # row 0 in order .1 .2 .3 5: sums before each are 0 .1 .3 .6
    assert choose(EntropyBound(bound=0.35), given, masked) == [[1, 1, 1, 0], [0, 1, 0, 0]]
    assert choose(EntropyBound(bound=0.65), given, masked) == [[1, 1, 1, 1], [0, 1, 0, 0]]
    assert choose(EntropyBound(bound=2.5), given, masked) == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_ancestral_reveals_each_mask_at_a_uniform_step_and_jumps_over_idle_steps():
    rows, steps = 20_000, 4
    masked = torch.ones(rows, 2, dtype=torch.bool)
    given = Proposal(masked.long(), masked.double(), masked.double)
    chosen, step = Ancestral(steps=steps)(
        given, masked=masked, step=torch.zeros(rows, dtype=torch.long), generator=seeded()
    )
    first = torch.bincount(step - 1, minlength=steps) / rows
    expected = [((steps - i) / steps) ** 2 - ((steps - i - 1) / steps) ** 2 for i in range(steps)]
    assert torch.allclose(first, torch.tensor(expected), atol=0.015)
    both = chosen.all(dim=1).float().mean().item()
    assert abs(both - 1 / steps) < 0.015  # two uniform steps coincide


def test_first_hitting_takes_every_mask_equally_often():
    masked = torch.tensor([[True, False, True, True]]).expand(30_000, 4)
    given = Proposal(masked.long(), masked.double(), masked.double)
    chosen, _ = FirstHitting()(given, masked=masked, step=torch.zeros(30_000, dtype=torch.long), generator=seeded())
    assert torch.allclose(chosen.double().mean(dim=0), torch.tensor([1, 0, 1, 1]).double() / 3, atol=0.01)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_progresses_in_every_row_and_ends_without_masks(rule):
    generator = seeded(1)
    masked = torch.rand(16, 8, generator=generator) < torch.linspace(0, 1, 16)[:, None]
    step = torch.zeros(16, dtype=torch.long)
    for _ in range(8):
        given = Sampler()(torch.randn(16, 8, 11, generator=generator) * 2, generator)
        chosen, step = rule(given, masked=masked, step=step, generator=generator)
        assert not bool((chosen & ~masked).any())
        assert torch.equal(chosen.any(dim=1), masked.any(dim=1))
        masked = masked & ~chosen
    assert not bool(masked.any())


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("kind", [TopK, Ancestral])
def test_rules_with_steps_keep_to_them(kind, steps):
    masked = torch.ones(64, 8, dtype=torch.bool)
    step = torch.zeros(64, dtype=torch.long)
    generator = seeded(2)
    for _ in range(steps):
        given = Sampler()(torch.randn(64, 8, 5, generator=generator), generator)
        chosen, step = kind(steps=steps)(given, masked=masked, step=step, generator=generator)
        masked = masked & ~chosen
    assert not bool(masked.any())


def test_sampler_follows_temperature_and_top_p():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0], dtype=torch.float64)
    logits = probabilities.log().expand(200, 200, 5)

    def frequencies(sampler: Sampler) -> torch.Tensor:
        return torch.bincount(sampler(logits, seeded()).tokens.flatten(), minlength=5) / 40_000

    assert torch.allclose(frequencies(Sampler()), probabilities.float(), atol=0.01)
    hot = probabilities.sqrt() / probabilities.sqrt().sum()
    assert torch.allclose(frequencies(Sampler(temperature=2.0)), hot.float(), atol=0.01)
    assert torch.allclose(frequencies(Sampler(top_p=0.6)), torch.tensor([2 / 3, 1 / 3, 0, 0, 0]), atol=0.01)
    assert frequencies(Sampler(temperature=0.0)).tolist() == [1, 0, 0, 0, 0]
    assert frequencies(Sampler(top_p=1e-9)).tolist() == [1, 0, 0, 0, 0]


def test_confidence_and_entropy_are_the_models_own_at_any_temperature():
    logits = torch.tensor([[[0.7, 0.2, 0.1]]], dtype=torch.float64).log()
    for sampler in (Sampler(), Sampler(temperature=0.0), Sampler(temperature=3.0, top_p=0.8)):
        given = sampler(logits, seeded())
        assert given.confidence.item() == pytest.approx([0.7, 0.2, 0.1][given.tokens.item()])
        assert given.entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (0.7, 0.2, 0.1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_proposals_of_narrow_logits_are_those_of_float64_within_float32(dtype):
    logits = (torch.randn(2, 4, 5000, generator=seeded()) * 4).to(dtype)
    logits[..., :7] = -torch.inf
    own = logits.double().softmax(dim=-1)
    for sampler in (Sampler(temperature=0.0), Sampler(), Sampler(temperature=0.5, top_p=0.9)):
        given = sampler(logits, seeded(1))
        exact = own.gather(-1, given.tokens[..., None])[..., 0]
        assert torch.allclose(given.confidence.double(), exact, rtol=1e-5, atol=0)
        assert torch.allclose(given.entropy.double(), torch.special.entr(own).sum(dim=-1), rtol=1e-5)
        assert torch.equal(given.tokens, sampler(logits.double(), seeded(1)).tokens)


@pytest.mark.parametrize("size", [1, 5, 256, 700])
def test_a_draw_is_the_first_token_whose_running_sum_exceeds_the_noise(size):
    """Tile by tile as in one running sum; tokens without mass never come, whatever noise and rounding."""
    logits = torch.randn(3, 40, size, generator=seeded(), dtype=torch.float64) * 3
    logits[..., : size // 2] = -torch.inf
    logits[..., size - size // 3 :] = -torch.inf
    mass = logits.softmax(dim=-1)
    noise = torch.rand(3, 40, generator=seeded(1), dtype=torch.float64)
    noise[:, 0], noise[:, 1] = 0.0, 1 - 2.0**-53
    drawn = _invert(mass, noise)
    assert bool((mass.gather(-1, drawn[..., None]) > 0).all())
    for row in range(3):
        for column in range(2, 40):
            running = mass[row, column].cumsum(dim=0)
            at = int(torch.searchsorted(running, noise[row, column] * running[-1], right=True))
            assert drawn[row, column] == at
    assert torch.equal(_largest(logits), logits.argmax(dim=-1))
    level = torch.zeros(1, 2, size)
    assert torch.equal(_largest(level), level.argmax(dim=-1))  # the first of equals


def test_sampling_noise_has_the_resolution_of_float64():
    noise = uniform((100_000,), generator=seeded(), device=torch.device("cpu"))
    assert noise.dtype == torch.float64
    assert not torch.equal(noise, noise.float().double())
    # a token of mass 1e-12 behind the rest: noise above 1 - 1e-12 must reach it, and impossible tokens stay so
    logits = torch.tensor([[[1 - 1e-12, 1e-12, 0.0]]], dtype=torch.float64).log()
    mass = logits.softmax(-1)
    assert _invert(mass, torch.tensor([[1 - 2e-12]], dtype=torch.float64)).item() == 0
    assert _invert(mass, torch.tensor([[1 - 2**-53]], dtype=torch.float64)).item() == 1
    impossible_first = torch.tensor([[[0.0, 0.5, 0.5]]], dtype=torch.float64)
    assert _invert(impossible_first, torch.zeros(1, 1, dtype=torch.float64)).item() == 1


def test_rules_are_read_from_text():
    assert parse_reveal("topk=8") == TopK(steps=8)
    assert parse_reveal("threshold=0.9") == Threshold(confidence=0.9)
    assert parse_reveal("entropy=0.5") == EntropyBound(bound=0.5)
    assert parse_reveal("ancestral=16") == Ancestral(steps=16)
    assert parse_reveal("first-hitting") == FirstHitting()
    for text, words in (
        ("topk=many", "is no number"),
        ("topk=0", "at least 1"),
        ("best", "unknown reveal rule 'best'"),
    ):
        with pytest.raises(InputError, match=words):
            parse_reveal(text)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Sampler(temperature=-1.0),
        lambda: Sampler(top_p=0.0),
        lambda: TopK(steps=0),
        lambda: Threshold(confidence=0.0),
        lambda: EntropyBound(bound=-0.1),
        lambda: Ancestral(steps=0),
    ],
)
def test_impossible_options_are_refused(build):
    with pytest.raises(InputError):
        build()

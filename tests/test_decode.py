"""Decoding: cached == recomputed, exact ancestral distributions, ends of text, forks, pass counts, refused input."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from scipy.stats import chisquare
from support import PATTERNS, generator, tiny_config, tiny_model
from torch import Tensor, nn

import mezzotint.models.request as request_checks
from mezzotint.models.config import ModelConfig
from mezzotint.models.decode import generate
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Ancestral, EntropyBound, FirstHitting, Proposal, Sampler, Threshold, TopK

GREEDY = Sampler(temperature=0.0)
RULES = [TopK(steps=2), Threshold(confidence=0.2), EntropyBound(bound=2.0)]


def prompts_of(lengths: list[int], config: ModelConfig, seed: int = 3) -> list[list[int]]:
    g = generator(seed)
    return [torch.randint(3, config.vocab_size, (length,), generator=g).tolist() for length in lengths]


def never_ending(model):
    """The same model, but it never predicts <eos>."""
    logits = model.logits
    end = torch.tensor([model.config.eos_token_id])
    model.logits = lambda hidden: logits(hidden).index_fill(-1, end, -torch.inf)
    return model


def recomputed(model, prompt: list[int], *, new: int, reveal) -> list[int]:
    """Greedy text without any cache: every step is a training pass over all that is there."""
    config, text, limit = model.config, list(prompt), len(prompt) + new
    size = config.block_length
    while len(text) < limit:
        whole = len(text) // size * size
        canvas = torch.tensor([text[whole:] + [config.mask_token_id] * (size - len(text) + whole)])
        step = torch.zeros(1, dtype=torch.long)
        while bool((masked := canvas == config.mask_token_id).any()):
            clean = torch.tensor([text[:whole]], dtype=torch.long)
            logits = model(clean, canvas[:, None], torch.tensor([[whole // size]]))[:, 0]
            proposal = GREEDY(logits, generator())
            chosen, step = reveal(proposal, masked=masked, step=step, generator=generator())
            canvas = torch.where(chosen, proposal.tokens, canvas)
        new_tokens = canvas[0, len(text) - whole :].tolist()
        if config.eos_token_id in new_tokens:
            return (text + new_tokens[: new_tokens.index(config.eos_token_id)])[len(prompt) : limit]
        text += new_tokens
    return text[len(prompt) : limit]


@pytest.mark.parametrize("reveal", RULES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_cached_text_equals_greedy_recomputed_text(pattern, reveal):
    model = tiny_model(tiny_config(pattern, 4, tie_embeddings=pattern == "AM"))
    prompts = prompts_of([0, 1, 3, 4, 5, 8, 11, 12, 16], model.config)
    got = generate(
        model, prompts, max_new_tokens=18, reveal=reveal, sampler=GREEDY, generator=generator(), prefill_chunk=8
    )
    with torch.no_grad():
        assert got.tokens == [recomputed(model, prompt, new=18, reveal=reveal) for prompt in prompts]
    assert got.prefill_passes == 2


@pytest.mark.parametrize("block_length", [1, 8])
def test_greedy_cached_text_equals_recomputed_text_at_other_block_lengths(block_length):
    model = tiny_model(tiny_config("MA", block_length), seed=5)
    prompts = prompts_of([0, 2, 8, 17], model.config)
    got = generate(model, prompts, max_new_tokens=12, reveal=TopK(steps=3), sampler=GREEDY, generator=generator())
    with torch.no_grad():
        assert got.tokens == [recomputed(model, prompt, new=12, reveal=TopK(steps=3)) for prompt in prompts]


def test_rows_that_end_do_not_touch_the_others_and_stop_at_their_own_eos():
    # so small a vocabulary that many texts end within a few blocks
    model = tiny_model(tiny_config("MA", 4, vocab_size=8), seed=9)
    prompts = prompts_of([0, 1, 2, 3, 4, 5, 6, 7, 9, 13], model.config)
    reveal = Threshold(confidence=0.5)
    got = generate(model, prompts, max_new_tokens=40, reveal=reveal, sampler=GREEDY, generator=generator())
    with torch.no_grad():
        assert got.tokens == [recomputed(model, prompt, new=40, reveal=reveal) for prompt in prompts]
    assert 0 < sum(got.ended) < len(prompts), "the case must hold rows that end and rows that do not"
    for text, ended in zip(got.tokens, got.ended):
        assert model.config.eos_token_id not in text
        assert len(text) == 40 or ended


# -- a model whose conditionals are a table ----------------------------------------------------------------------


@dataclass
class TableState:
    last: Tensor  # (B,): what the last committed block says of the next

    def select(self, rows: Tensor) -> TableState:
        return TableState(self.last[rows])


class TableModel(nn.Module):
    """Blocks of two letters a, b, c: p(block | last letter before it) is a table; canvas conditionals are exact."""

    LETTERS = (3, 4, 5)

    def __init__(self) -> None:
        super().__init__()
        self.config = ModelConfig(pattern="M", vocab_size=6, d_model=64, d_ff=1, block_length=2, chunk_length=2)
        self.embed = nn.Embedding(1, 1)
        joint = torch.rand(4, 3, 3, generator=generator(8), dtype=torch.float64) ** 3
        self.joint = joint / joint.sum(dim=(1, 2), keepdim=True)

    def start(self, batch: int, length: int) -> TableState:
        return TableState(torch.full((batch,), 3))

    def denoise(self, canvas: Tensor, state: TableState) -> Tensor:
        joint = self.joint[state.last]  # (B, 3, 3)
        logits = torch.full((*canvas.shape, 6), -torch.inf, dtype=torch.float64)
        for here, there in ((0, 1), (1, 0)):
            table = joint if here == 0 else joint.transpose(1, 2)  # (B, here, there)
            known = torch.nn.functional.one_hot((canvas[:, there] - 3).clamp(min=0), 3).double()
            known[canvas[:, there] == 0] = 1.0
            logits[:, here, 3:] = torch.einsum("bht,bt->bh", table, known).log()
        return logits

    def advance(self, clean: Tensor, canvas: Tensor, state: TableState, blocks: Tensor) -> tuple[Tensor, TableState]:
        state = TableState(torch.where(blocks == 1, clean[:, -1] - 3, state.last))
        return self.denoise(canvas, state), state

    def block_law(self, last: int, *, together: float) -> Tensor:
        """(3, 3) law of a block whose two masks are revealed in the same step with probability `together`."""
        joint = self.joint[last]
        return (1 - together) * joint + together * joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)


@pytest.mark.parametrize(
    ("reveal", "together"), [(FirstHitting(), 0.0), (Ancestral(steps=1), 1.0), (Ancestral(steps=3), 1 / 3)]
)
def test_ancestral_sampling_has_the_brute_force_distribution(reveal, together):
    model, count = TableModel(), 20_000
    got = generate(
        model,
        [[]],
        max_new_tokens=4,
        reveal=reveal,
        generator=generator(4),
        samples_per_prompt=count,  # type: ignore[arg-type]
    )
    seen = Counter(tuple(text) for text in got.tokens)
    expected = {}
    for a, b, c, d in product(range(3), repeat=4):
        law = model.block_law(3, together=together)[a, b] * model.block_law(b, together=together)[c, d]
        expected[a + 3, b + 3, c + 3, d + 3] = law.item() * count
    rare = [text for text in expected if expected[text] < 5]  # chi-square wants five expected in a cell
    cells = [text for text in expected if text not in rare]
    observed, wanted = [seen[text] for text in cells], [expected[text] for text in cells]
    if rare:
        observed.append(sum(seen[text] for text in rare))
        wanted.append(sum(expected[text] for text in rare))
    assert chisquare(observed, wanted).pvalue > 1e-3
    if together < 1:  # the test can tell: the law of independent letters is refused
        apart = {
            (a + 3, b + 3): model.block_law(3, together=1.0)[a, b].item() * count
            for a, b in product(range(3), repeat=2)
        }
        pairs = Counter(tuple(text[:2]) for text in got.tokens)
        assert chisquare([pairs[pair] for pair in apart], list(apart.values())).pvalue < 1e-6


# -- costs, forks, seeds -----------------------------------------------------------------------------------------


@dataclass
class Calls:
    denoise: int = 0
    advance: int = 0
    commit: int = 0


def count_calls(model, monkeypatch) -> Calls:
    calls = Calls()
    for name in ("denoise", "advance", "commit"):
        real = getattr(model, name)

        def counted(*args, name=name, real=real, **kwargs):
            setattr(calls, name, getattr(calls, name) + 1)
            return real(*args, **kwargs)

        monkeypatch.setattr(model, name, counted)
    return calls


def test_a_block_of_s_steps_costs_s_passes(monkeypatch):
    model = never_ending(tiny_model(tiny_config("AM", 8)))
    calls = count_calls(model, monkeypatch)
    got = generate(model, [[]], max_new_tokens=40, reveal=TopK(steps=4), sampler=GREEDY, generator=generator())
    assert got.tokens[0] and not got.ended[0]
    assert (got.nfe, got.row_nfe, got.prefill_passes) == (20, [20], 0)
    assert (calls.denoise, calls.advance, calls.commit) == (16, 4, 0)
    assert got.tokens_per_nfe == 2.0
    assert got.tokens_per_second > 0


def test_rows_commit_when_they_are_full_and_wait_for_nobody():
    model = never_ending(tiny_model(tiny_config("M", 4)))
    prompts = prompts_of([0, 3], model.config)  # the second row's first canvas has a single mask
    got = generate(model, prompts, max_new_tokens=9, reveal=FirstHitting(), generator=generator(1))
    assert [len(text) for text in got.tokens] == [9, 9]
    assert got.row_nfe == [12, 9] and got.nfe == 12


def test_same_seed_same_text_and_forks_equal_prompts_given_twice():
    model = tiny_model(tiny_config("AM", 4))
    prompts = prompts_of([6, 9], model.config)

    def sample(prompts: list[list[int]], seed: int, samples: int) -> list[list[int]]:
        return generate(
            model,
            prompts,
            max_new_tokens=10,
            reveal=Ancestral(steps=3),
            generator=generator(seed),
            samples_per_prompt=samples,
        ).tokens

    twice = [prompt for prompt in prompts for _ in range(3)]
    assert sample(prompts, 1, 3) == sample(prompts, 1, 3) == sample(twice, 1, 1)
    assert sample(prompts, 1, 3) != sample(prompts, 2, 3)
    assert len({tuple(text) for text in sample(prompts, 1, 3)}) == 6


def test_max_length_bounds_prompt_and_text_together():
    model = never_ending(tiny_model(tiny_config("A", 4)))
    prompts = prompts_of([2, 9], model.config)
    got = generate(model, prompts, max_new_tokens=8, max_length=11, sampler=GREEDY, generator=generator())
    assert [len(text) for text in got.tokens] == [8, 2]


# -- refused input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[5, 0]], {}, "prompt 0 holds the <mask> id 0 at token 1"),
        ([[5], [7, 2]], {}, "prompt 1 holds the <pad> id 2"),
        ([[5, 40]], {}, "token id 40"),
        ([[-1]], {}, "token id -1"),
        ([], {}, "no prompts"),
        ([[5]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[5, 6, 7]], {"max_length": 3}, "max_length 3"),
        ([[5]], {"samples_per_prompt": 0}, "samples_per_prompt"),
    ],
)
def test_bad_input_is_one_sentence(prompts, options, words):
    model = tiny_model(tiny_config("A", 4))
    with pytest.raises(InputError, match=words):
        generate(model, prompts, **({"max_new_tokens": 4, "generator": generator()} | options))


def test_a_rule_that_reveals_nothing_is_an_error_and_no_endless_loop():
    class Lazy(Threshold):
        def __call__(self, proposal, *, masked, step, generator):
            return masked & False, step

    rule = Lazy(confidence=0.5)
    with pytest.raises(InputError, match="chose no mask"):
        generate(tiny_model(tiny_config("A", 4)), [[5]], max_new_tokens=3, reveal=rule, generator=generator())


@pytest.mark.parametrize(
    ("rule", "passes", "waits"),
    [(TopK(steps=4), 12, 8), (FirstHitting(), 23, 8), (Threshold(confidence=2.0), 23, 28)],
    ids=str,
)
def test_only_a_blocks_last_step_waits_where_counts_are_known(rule, passes, waits, monkeypatch):
    """Blocks of 7, 8 and 8 masks, counted at each one's start and end (6) or at every step; two advances move their rows."""
    copied, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copied.append(tensor.ndim) or cpu(tensor))
    model = never_ending(tiny_model(tiny_config("A", 8)))
    found = generate(model, [[5]], max_new_tokens=17, reveal=rule, sampler=GREEDY, generator=generator())
    assert found.nfe == passes and copied.count(1) == waits


@pytest.mark.parametrize("rule", [TopK(steps=3), TopK(steps=8), TopK(steps=20), FirstHitting()], ids=str)
def test_the_masks_a_rule_says_are_left_are_those_that_it_leaves(rule):
    masked = torch.rand(40, 8, generator=generator()) < torch.linspace(0, 1, 40)[:, None]
    step = torch.arange(40) % 5
    noise = torch.rand(40, 8, generator=generator(1))
    proposal = Proposal(torch.ones(40, 8, dtype=torch.long), noise, lambda: noise)
    chosen, _ = rule(proposal, masked=masked, step=step, generator=generator(2))
    assert torch.equal(rule.left(masked.sum(dim=1), step), (masked & ~chosen).sum(dim=1))


def test_a_model_of_nan_is_an_error_and_no_endless_loop():
    """Its likeliest token is the mask, so that what is revealed stays masked."""
    model = tiny_model(tiny_config("A", 4))
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="not numbers"):
        generate(model, [[5]], max_new_tokens=3, sampler=Sampler(temperature=0), generator=generator())


def test_a_state_beyond_memory_is_refused_before_anything_is_allocated(monkeypatch):
    model = never_ending(tiny_model(tiny_config("A", 4)))
    started = count_calls(model, monkeypatch)
    with pytest.raises(InputError, match="GiB are free"):
        generate(model, [[5]], max_new_tokens=10**13, generator=generator())
    # a bound that falls just short, to see that the sum is the state's own
    free = model.start(2, 12).nbytes
    monkeypatch.setattr(request_checks, "available_bytes", lambda device: free)
    fits = generate(model, [[5], [6]], max_new_tokens=15, reveal=TopK(steps=4), sampler=GREEDY, generator=generator())
    assert fits.nfe == 3 + 3 * 4
    monkeypatch.setattr(request_checks, "available_bytes", lambda device: free - 1)
    with pytest.raises(InputError, match="a state of 12 tokens for 2 rows"):
        generate(model, [[5], [6]], max_new_tokens=15, generator=generator())
    assert started.commit == 0

"""Scores of real models: the bound by enumeration, the argmax by a training pass, the writing as `generate` writes."""

import itertools
import math

import pytest
import torch
from support import PATTERNS, generator, tiny_config, tiny_model

from mezzotint.data.tasks.catalog import make_sample, parse_task
from mezzotint.data.tasks.sample import Sample
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.eval.bound import Draws
from mezzotint.eval.retrieval_model import Answering, forked, score_batch
from mezzotint.models.decode import generate
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Sampler, Threshold, TopK

GREEDY = Sampler(temperature=0.0)
SYMBOLS = Vocabulary(None, size=40, control=(0, 1, 2))


def samples_of(task: str, *, length: int, count: int = 3) -> list[Sample]:
    return [
        make_sample(parse_task(task), length=length, seed=2, index=n, depth=n / 3, vocabulary=SYMBOLS)
        for n in range(count)
    ]


def score(model, samples, *, reveal=None, draws=8, chunk=8):
    answering = Answering(reveal=reveal or TopK(steps=2), sampler=GREEDY, draws=Draws(per_block=draws), chunk=chunk)
    return score_batch(model, samples, answering=answering, keys=[f"k{n}" for n in range(len(samples))])


def truth(model, sample: Sample) -> tuple[float, list[bool]]:
    """Bound and argmax of one sample by plain training passes, each set of masks with its weight by itself."""
    config = model.config
    g = config.block_length
    text = torch.tensor(sample.tokens + sample.target)
    start = len(sample.tokens)
    scored = [start + n for n, given in enumerate(sample.given[:-1]) if not given]
    asked = {start + place for low, high in sample.spans for place in range(low, high)}
    last = start + len(sample.target) - 1  # <eos>, which is not scored, and all behind it stay masked
    total, right = 0.0, []
    for block in sorted({place // g for place in scored}):
        clean = text[None, : block * g]
        places = [place for place in scored if place // g == block]

        def log_probabilities(masked, block=block, clean=clean):
            noisy = torch.full((g,), config.mask_token_id)
            own = [p for p in range(block * g, min((block + 1) * g, last)) if p not in masked]
            noisy[[p - block * g for p in own]] = text[own]
            logits = model(clean, noisy[None, None], torch.tensor([[block]]))[0, 0]
            return logits.log_softmax(-1)

        for count in range(1, len(places) + 1):
            sets = list(itertools.combinations(places, count))
            for masked in sets:
                table = log_probabilities(masked)
                loss = -sum(float(table[p - block * g, text[p]]) for p in masked)
                total += loss / count / len(sets)
        table = log_probabilities(tuple(places))
        right += [int(table[p - block * g].argmax()) == int(text[p]) for p in places if p in asked]
    return total, right


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("task", ["mqar:pairs=3:queries=3", "copy:count=5"])
@pytest.mark.parametrize("length", [31, 32, 33, 35])
@torch.no_grad()
def test_bound_and_argmax_are_those_of_training_passes(pattern, task, length):
    """Blocks of three: every set of masks is taken. The answer starts anywhere in a block."""
    model = tiny_model(tiny_config(pattern, block_length=3))
    samples = samples_of(task, length=length)
    for sample, found in zip(samples, score(model, samples)):
        nats, right = truth(model, sample)
        assert found.nats == pytest.approx(nats, abs=1e-10)
        assert found.argmax == pytest.approx(sum(right) / len(right))
        assert found.answer_tokens == sum(not given for given in sample.given) - 1


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("reveal", [TopK(steps=2), Threshold(confidence=0.3)])
@torch.no_grad()
def test_what_is_written_is_what_generate_writes(pattern, reveal):
    model = tiny_model(tiny_config(pattern, block_length=4))
    eos = model.config.eos_token_id
    for length in (40, 41, 43):
        samples = samples_of("copy:count=6", length=length, count=4)
        want = generate(
            model,
            [sample.tokens for sample in samples],
            max_new_tokens=samples[0].room,
            generator=generator(),
            reveal=reveal,
            sampler=GREEDY,
        ).tokens
        for found, tokens in zip(score(model, samples, reveal=reveal), want):
            got = found.written[: found.written.index(eos)] if found.ended else found.written
            assert got == tokens


@pytest.mark.parametrize("pattern", PATTERNS)
def test_given_tokens_stand_and_every_other_is_written(pattern):
    model = tiny_model(tiny_config(pattern, block_length=4))
    samples = samples_of("mqar:pairs=3:queries=5", length=61)
    for sample, found in zip(samples, score(model, samples)):
        for token, target, given in zip(found.written, sample.target, sample.given):
            assert token not in (model.config.mask_token_id, model.config.pad_token_id)
            assert token == target or not given
        assert len(found.written) == sample.room


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_batches_and_prefill_chunks_change_nothing(pattern):
    model = tiny_model(tiny_config(pattern, block_length=4))
    for task in ("mqar:pairs=3:queries=4", "copy:count=5"):
        samples = samples_of(task, length=70, count=4)
        together = score(model, samples, chunk=1000, draws=2)
        answering = Answering(reveal=TopK(steps=2), sampler=GREEDY, draws=Draws(per_block=2, batch=3), chunk=4)
        for n, (sample, found) in enumerate(zip(samples, together)):
            alone = score_batch(model, [sample], answering=answering, keys=[f"k{n}"])[0]
            assert alone.written == found.written and alone.argmax == found.argmax
            assert alone.nats == pytest.approx(found.nats, abs=1e-10)


@torch.no_grad()
def test_a_fork_leaves_the_state_as_it_is():
    config = tiny_config("MA", block_length=4)
    model = tiny_model(config)
    tokens = torch.randint(3, 40, (2, 12), generator=generator())
    canvas = torch.full((2, 4), config.mask_token_id)
    state = model.commit(tokens[:, :8], model.start(2, 12))
    before = model.denoise(canvas, state)
    other = model.commit(tokens[:, 8:], forked(state))
    assert not torch.equal(model.denoise(canvas, other), before)
    assert torch.equal(model.denoise(canvas, state), before)
    again = model.commit(tokens[:, 8:], state)
    assert torch.equal(model.denoise(canvas, again), model.denoise(canvas, other))


def test_a_token_that_cannot_be_gives_an_infinite_bound_and_no_error(monkeypatch):
    model = tiny_model(tiny_config("M", block_length=4))
    sample = samples_of("copy:count=3", length=20, count=1)[0]
    real = model.denoise

    def never(canvas, state):
        logits = real(canvas, state)
        logits[..., sample.target[0]] = -math.inf
        return logits

    monkeypatch.setattr(model, "denoise", never)
    assert score(model, [sample])[0].nats == math.inf


def test_a_model_of_nan_is_told_in_a_sentence():
    model = tiny_model(tiny_config("A", block_length=4))
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(InputError, match="not numbers"):
        score(model, samples_of("copy:count=3", length=20))

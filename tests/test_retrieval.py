"""Retrieval by hand-built models: the rule is always right, the blind guess is at chance, both are without a needle."""

import pytest
from rule_model import RuleModel
from tasks_support import byte_tokenizer

from mezzotint.data.tasks.catalog import TASKS, make_sample, parse_task
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.eval.bound import Draws
from mezzotint.eval.intervals import wilson
from mezzotint.eval.retrieval_model import Answering, score_batch
from mezzotint.eval.scoring import mark_symbols, mark_text
from mezzotint.models.reveal import FirstHitting, Sampler, Threshold, TopK

GREEDY = Sampler(temperature=0.0)
ANSWERING = Answering(reveal=Threshold(confidence=0.9), sampler=GREEDY, draws=Draws(per_block=8), chunk=256)
VARIED = [
    *TASKS,
    "niah_single:haystack=text",
    "niah_multikey:haystack=needle:keys=uuids:values=uuids",
    "niah_multiquery:haystack=needle",
    "mqar:pairs=20:queries=30:noise=true",
    "variables:chains=2",
]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Vocabulary:
    return Vocabulary.load(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def symbols() -> Vocabulary:
    return Vocabulary(None, size=40, control=(0, 1, 2))


def run(model, task, vocabulary, *, length, depths, needle=True, answering=ANSWERING, index=0):
    """Samples at each depth, what the model made of them, and their marks."""
    samples = [
        make_sample(task, length=length, seed=1, index=index + n, depth=depth, vocabulary=vocabulary, needle=needle)
        for n, depth in enumerate(depths)
    ]
    keys = [f"{task.name}/{n}" for n in range(len(samples))]
    scored = score_batch(model, samples, answering=answering, keys=keys)
    return samples, scored, [mark(vocabulary, *pair) for pair in zip(samples, scored)]


def mark(vocabulary, sample, found):
    if sample.kind == "symbols":
        return mark_symbols(sample, found.written)
    end = found.written.index(vocabulary.eos_id) if found.ended else None
    return mark_text(sample, vocabulary.decode(found.written[:end]))


DEPTHS = [round(n / 9, 3) for n in range(10)]


@pytest.mark.parametrize("task", VARIED)
@pytest.mark.parametrize("more", [0, 3, 517])
def test_the_rule_scores_one_at_every_depth(task, more, words):
    made = parse_task(task)
    model = RuleModel(words)
    samples, scored, marks = run(model, made, words, length=made.minimum(words) + more, depths=DEPTHS)
    for sample, found, found_marks in zip(samples, scored, marks):
        assert found_marks.correct and found_marks.part == found_marks.substring == 1.0, (sample.texts, found.written)
        assert found.argmax == 1.0
        assert 0 <= found.nats < 1e-6
        assert found.ended
    assert scored[0].answer_tokens >= len(samples[0].spans)


@pytest.mark.parametrize("task", ["mqar", "copy", "mqar:pairs=4:queries=20:noise=true"])
def test_the_rule_scores_one_on_plain_symbols(task, symbols):
    made = parse_task(task)
    for length in (made.minimum(symbols), 200, 1001):
        _, scored, marks = run(RuleModel(symbols), made, symbols, length=length, depths=DEPTHS)
        assert all(found.correct for found in marks) and all(found.argmax == 1.0 for found in scored)


@pytest.mark.parametrize("block_length", [1, 3, 8, 64])
def test_blocks_of_any_length(block_length, words):
    for task in ("mqar", "niah_multiquery", "passkey"):
        made = parse_task(task)
        model = RuleModel(words, block_length=block_length)
        _, scored, marks = run(model, made, words, length=made.minimum(words) + 5, depths=[0.2, 0.9])
        assert all(found.correct for found in marks) and all(found.argmax == 1.0 for found in scored)


@pytest.mark.parametrize("reveal", [TopK(steps=4), FirstHitting(), Threshold(confidence=2.0)])
def test_any_reveal_rule_decodes(reveal, words):
    answering = Answering(reveal=reveal, sampler=GREEDY, draws=Draws(per_block=2), chunk=64)
    for task in ("mqar", "niah_multivalue"):
        made = parse_task(task)
        _, _, marks = run(
            RuleModel(words), made, words, length=made.minimum(words), depths=[0.0, 1.0], answering=answering
        )
        assert all(found.correct for found in marks)


def successes(model, task, vocabulary, *, count: int, needle: bool) -> tuple[int, float]:
    """How often the sample is right, and the chance of a blind guess."""
    made = parse_task(task)
    length = made.minimum(vocabulary) + 40
    right, choices = 0, 1
    for first in range(0, count, 20):
        samples, _, marks = run(model, made, vocabulary, length=length, depths=DEPTHS * 2, needle=needle, index=first)
        right += sum(found.correct for found in marks)
        choices = samples[0].choices
    return right, 1 / choices


@pytest.mark.parametrize("blind", [True, False])
@pytest.mark.parametrize("task", ["mqar:pairs=6", "mqar:pairs=2:queries=12:noise=true"])
def test_a_blind_guess_and_a_missing_needle_are_at_chance(task, blind, symbols):
    """With 11 values: enough right guesses for the interval to exclude nothing and everything."""
    model = RuleModel(symbols, blind=blind)
    right, chance = successes(model, task, symbols, count=400, needle=blind)
    low, high = wilson(right, 400, confidence=0.999)
    assert chance > 0.05 and low <= chance <= high
    assert low > 0 and high < 0.25


@pytest.mark.parametrize("blind", [True, False])
@pytest.mark.parametrize("task", [task for task in VARIED if not task.startswith("mqar")])
def test_text_tasks_are_at_chance_too(task, blind, words):
    """A chance of one in thousands: none of twenty."""
    right, chance = successes(RuleModel(words, blind=blind), task, words, count=20, needle=blind)
    assert wilson(right, 20)[0] <= chance <= wilson(right, 20)[1]
    assert right == 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["passkey", "niah_multikey:haystack=needle", "mqar", "phonebook", "common_words"])
@pytest.mark.parametrize("length", [16384, 262144])
def test_the_rule_scores_one_at_long_lengths(task, length, words):
    model = RuleModel(words, block_length=32)
    _, scored, marks = run(model, parse_task(task), words, length=length, depths=[0.0, 0.5, 1.0])
    assert all(found.correct for found in marks) and all(found.argmax == 1.0 for found in scored)

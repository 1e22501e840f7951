"""Retrieval tasks: exact length, one sample for a key whoever asks, needles where they should be, nothing drifts."""

import functools
import multiprocessing
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data_support import small_tokenizer, write_prepared
from tasks_support import byte_tokenizer, hashes, sample

from mezzotint.data.errors import InputError
from mezzotint.data.tasks import niah, passkey
from mezzotint.data.tasks.catalog import TASKS, named, options, parse_task, spelled
from mezzotint.data.tasks.haystack import REPEATED
from mezzotint.data.tasks.keyed import Keyed
from mezzotint.data.tasks.vocabulary import Vocabulary

PLAIN = list(TASKS)
VARIED = [
    *PLAIN,
    "niah_single:haystack=text",
    "niah_single:haystack=needle:values=uuids",
    "niah_multikey:haystack=needle:keys=uuids:values=uuids",
    "niah_multivalue:haystack=text:values=words",
    "niah_multiquery:haystack=needle",
    "mqar:pairs=20:queries=30:noise=true",
    "mqar:pairs=3:queries=0",
    "variables:chains=3:hops=2",
    "common_words:common=3",
    "copy:count=5:noise=true",
    "phonebook:shots=5",
]
DEPTHS = [0.0, 0.25, 0.5, 1.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def words(folder) -> Vocabulary:
    return Vocabulary.load(folder)


# -- length ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", VARIED)
def test_prompt_and_room_are_exactly_the_length(task, words):
    made = parse_task(task)
    least = made.minimum(words)
    for length in (least, least + 1, least + 7, least + 100, 5000):
        for index in range(4):
            for needle in (True, False):
                depth = DEPTHS[index]
                found = sample(task, words, length=length, index=index, depth=depth, needle=needle)
                assert found.length == len(found.tokens) + found.room == length
                assert len(found.target) <= found.room
                assert len(found.given) == len(found.target) and found.target[-1] == words.eos_id
                exact = sample(task, words, length=length, index=index, depth=depth, needle=needle, exact=True)
                assert len(exact.tokens) + len(exact.target) == exact.length == length
                assert exact.target == found.target
    with pytest.raises(InputError, match=f"cannot be made of {least - 1} tokens"):
        sample(task, words, length=least - 1)


def test_a_trained_tokenizer_fills_as_exactly(tmp_path):
    own = Vocabulary.load(small_tokenizer(tmp_path))
    for task in VARIED:
        for length in (parse_task(task).minimum(own), 3001):
            assert sample(task, own, length=max(length, parse_task(task).minimum(own))).length >= length


@pytest.mark.parametrize("task", VARIED)
def test_no_control_id_stands_in_a_prompt(task, words):
    found = sample(task, words)
    assert not {words.mask_id, words.eos_id, words.pad_id} & set(found.tokens)
    assert 0 <= min(found.tokens) <= max(found.tokens) < words.size


@pytest.mark.parametrize("task", VARIED)
def test_a_long_sample_is_made_in_no_time(task, words):
    sample(task, words)  # what is made once: real text, pieces
    began = time.process_time()
    found = sample(task, words, length=262144)
    assert found.length == 262144
    assert time.process_time() - began < 3  # 0.2 s on an idle core


@pytest.mark.parametrize("task", ["mqar", "copy"])
def test_symbols_need_no_tokenizer_and_words_do(task):
    symbols = Vocabulary(None, size=32, control=(0, 1, 2))
    found = sample(task, symbols, length=256)
    assert found.length == 256 and not {0, 1, 2} & set(found.tokens)
    with pytest.raises(InputError, match="needs a tokenizer"):
        sample("passkey", symbols, length=4096)


# -- one sample for a key ----------------------------------------------------------------------------------------


def test_a_sample_is_the_same_in_any_order_subset_and_process(folder):
    jobs = [(task, index) for task in PLAIN for index in range(3)]
    forward = hashes(folder, jobs)
    assert hashes(folder, jobs[::-1]) == forward
    assert hashes(folder, jobs[7:9]) == {job: forward[job] for job in jobs[7:9]}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        shares = pool.map(functools.partial(hashes, folder), [jobs[0::2], jobs[1::2]])
    assert shares[0] | shares[1] == forward
    assert len(set(forward.values())) == len(jobs)


def test_the_seed_of_python_changes_nothing(folder):
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from tasks_support import hashes\nfrom pathlib import Path\n"
        "print(hashes(Path(sys.argv[1]), [('common_words', 0), ('niah_multikey', 1)]))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script, str(folder), str(Path(__file__).parent)],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


@pytest.mark.parametrize("task", VARIED)
def test_every_part_of_the_key_counts(task, words):
    base = sample(task, words)
    for change in ({"seed": 4}, {"index": 6}, {"length": 5000}, {"purpose": "train"}):
        other = sample(task, words, **change)
        assert other.answer != base.answer and other.sha256 != base.sha256
    moved = sample(task, words, depth=0.1)
    assert moved.answer == base.answer
    assert (moved.tokens != base.tokens) == parse_task(task).placed
    assert sample(task, words, needle=False).target == base.target


def test_purposes_never_share_a_key():
    streams = {
        tuple(Keyed(purpose, seed, "passkey", 512, index).raw(2).tolist())
        for purpose in ("test", "train", "heldout")
        for seed in range(4)
        for index in range(50)
    }
    assert len(streams) == 3 * 4 * 50


# what generators make, written down: a change of any of them is a change of what is measured, to be made on purpose
GOLDEN: dict[str, str] = {
    "passkey": "eccb52ef8d6c47e1",
    "niah_single": "f4356045eff931c7",
    "niah_multikey": "16623b2d2cac1e16",
    "niah_multivalue": "e7dcd94b6a05e5cd",
    "niah_multiquery": "bd64b25e7b88e8de",
    "mqar": "dffba6cf8c898c48",
    "phonebook": "15c894435c30871b",
    "phonebook_reversed": "e59a765949775474",
    "variables": "22394fddc57a5a7b",
    "common_words": "6fca56c95b1b1ab3",
    "frequent_words": "c8708abaa99af4f8",
    "copy": "123fed05a3a37832",
    "niah_single:haystack=needle:values=uuids": "7580f7ccde153d22",
    "niah_multikey:haystack=needle:keys=uuids:values=uuids": "9580d0fd6685e226",
    "niah_multiquery:haystack=needle": "95416c0743f24098",
    "mqar:pairs=20:queries=30:noise=true": "028d71879a4667ee",
    "mqar:pairs=3:queries=0": "2384700f82b06755",
    "variables:chains=3:hops=2": "f6427d9dd045db41",
    "common_words:common=3": "5cf285ce4f222127",
    "copy:count=5:noise=true": "9a4acac064057716",
    "phonebook:shots=5": "a1edf54440c36fe1",
}


def test_generators_have_not_drifted(words):
    assert {task: sample(task, words, length=3000).sha256 for task in VARIED if "=text" not in task} == GOLDEN


# -- what stands where -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["passkey", "niah_single", "niah_single:haystack=text", "phonebook", "niah_multikey"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.7, 1.0])
def test_a_needle_stands_at_its_depth(task, depth, words):
    found = sample(task, words, length=20_000, depth=depth)
    place = words.decode(found.tokens).index(found.texts[0]) / len(words.decode(found.tokens))
    assert place == pytest.approx(depth, abs=0.05)


def test_symbols_stand_at_their_depth():
    plain = Vocabulary(None, size=512, control=(0, 1, 2))
    for depth in (0.0, 0.3, 1.0):
        found = sample("mqar", plain, length=4000, depth=depth)
        place = found.tokens.index(found.target[0])
        assert found.tokens[place + 1] == found.answer[0][0]
        assert place / 4000 == pytest.approx(depth, abs=0.01)
        found = sample("copy", plain, length=4000, depth=depth)
        assert found.tokens.index(found.tokens[-1]) / 4000 == pytest.approx(depth, abs=0.01)


@pytest.mark.parametrize("task", VARIED)
def test_without_the_needle_the_answers_are_not_in_the_prompt(task, words):
    """Except those of symbols, which are few, and come up elsewhere: their pairs are gone."""
    with_it, without = sample(task, words), sample(task, words, needle=False)
    if with_it.kind == "symbols":
        assert sum(a != b for a, b in zip(with_it.tokens, without.tokens)) >= min(len(with_it.spans), 4)
        return
    text = words.decode(without.tokens)
    for answer in with_it.texts:
        assert answer in words.decode(with_it.tokens)
        assert answer not in text


def test_keys_and_values_of_a_prompt_are_all_different(words):
    for task in ("niah_multikey:haystack=needle", "phonebook"):
        text = words.decode(sample(task, words, length=60_000).tokens)
        found = re.findall(r"for ([a-z-]+) is: (\d+)\.", text) or re.findall(r"^(\w+ \w+): ([\d-]+)$", text, re.M)
        assert len(found) > 400
        assert len({key for key, _ in found}) == len(found)


def test_no_filler_is_a_key_or_a_value():
    plain = Vocabulary(None, size=64, control=(0, 1, 2))
    found = sample("mqar:noise=true:pairs=4:queries=6", plain, length=2000)
    asked = {found.target[start - 1] for start, _ in found.spans}
    for key in asked:
        assert found.tokens.count(key) == 1
    values = [token for start, end in found.spans for token in found.target[start:end]]
    assert all(found.tokens.count(value) == 1 for value in set(values))
    assert len(asked) == 4 and len(found.spans) == 6


def test_common_and_frequent_words_are_what_they_are_said_to_be(words):
    from collections import Counter

    found = sample("common_words", words, length=30_000)
    text = words.decode(found.tokens)
    numbered = re.findall(r"^(\d+)\. (\w+)$", text, re.M)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    counts = Counter(word for _, word in numbered)
    assert {word for word, count in counts.items() if count == 30} == set(found.texts)
    assert set(counts.values()) == {3, 30}
    for length in (named("frequent_words").minimum(words), 8000):
        found = sample("frequent_words", words, length=length)
        coded = words.decode(found.tokens).split("\n", 1)[1]
        counts = Counter(re.findall(r" ([a-z]{6})\b", coded.rpartition("\n")[0]))
        ranked = counts.most_common(4)
        assert [word for word, _ in ranked[:3]] == found.texts
        assert ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]


def test_chains_of_variables_stand_in_order(words):
    for depth in (0.0, 1.0, None):
        found = sample("variables:chains=2", words, length=8000, depth=depth)
        text = words.decode(found.tokens)
        places = [text.index(f"VAR {name} =") for name in found.texts]
        assert places == sorted(places)
        assert text.count("VAR") == 2 * (1 + 2 * 4)


# -- wording -----------------------------------------------------------------------------------------------------

# as RULER has it; the expected prompts below are made from these alone
RULER_NEEDLE = "One of the special magic {type_v} for {key} is: {value}."
RULER_PROMPT = (
    "Some special magic {type_v} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {type_v} afterwards.\n{context}\nWhat are all the special magic {type_v} for {query} mentioned in the provided "
    "text? The special magic {type_v} for {query} mentioned in the provided text are"
)
RULER_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def ruler_prompt(*, context: str, query: str, type_v: str, one: bool) -> str:
    """RULER's rewriting of its template for one query of one value."""
    template = RULER_PROMPT
    if one:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        type_v = type_v[:-1]
    return template.format(type_v=type_v, context=context, query=query)


@pytest.mark.parametrize("task", ["niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery"])
@pytest.mark.parametrize("haystack", ["repeat", "needle", "text"])
@pytest.mark.parametrize("values", ["numbers", "uuids"])
def test_the_text_of_a_needle_task_is_that_of_ruler(task, haystack, values, words):
    found = sample(f"{task}:haystack={haystack}:values={values}", words)
    text = words.decode(found.tokens)
    one = len(found.texts) == 1
    context = text.split("\n", 1)[1].rpartition("\n")[0]
    keys = re.findall(r" for (.+?) mentioned", text.rpartition("\n")[2])
    assert len(keys) == 2 and keys[0] == keys[1]
    assert text == ruler_prompt(context=context, query=keys[0], type_v=values, one=one)
    needles = re.findall(r"^One of .*$", context, re.M)
    asked = re.split(r", (?:and )?", keys[0])
    wanted = [
        RULER_NEEDLE.format(type_v=values, key=asked[0] if len(asked) == 1 else key, value=value)
        for key, value in zip(asked * len(found.texts), found.texts)
    ]
    assert set(wanted) <= set(needles)
    if haystack == "repeat":
        others = [line for line in context.split("\n") if line not in needles]
        assert all(RULER_NOISE.endswith(line) for line in others)
        assert [line for line in others if line != RULER_NOISE] == others[:1] or others[0] == RULER_NOISE
    assert words.decode(found.target) == f" {', '.join(found.texts)}."


def test_wordings_are_kept():
    assert niah.NEEDLE == RULER_NEEDLE and REPEATED == RULER_NOISE + "\n"
    assert passkey.NEEDLE == "The pass key is {key}. Remember it. {key} is the pass key.\n"


# -- real text ---------------------------------------------------------------------------------------------------


def test_real_text_comes_from_a_prepared_folder(folder, words, tmp_path):
    from mezzotint.data.prepare import PrepareConfig, prepare
    from mezzotint.data.sources import SourceConfig

    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text that goes on.\n" for n in range(400)))
    source = SourceConfig(input=str(tmp_path / "text.txt"))
    prepare(PrepareConfig(tokenizer=str(folder), out=str(tmp_path / "prepared"), source=source, workers=1))
    own = Vocabulary.load(folder, text=tmp_path / "prepared")
    found = sample("niah_single:haystack=text", own, length=30_000)
    lines = own.decode(found.tokens).split("\n")[2:-1]
    assert sum(bool(re.fullmatch(r"line \d+ of a text that goes on\.", line)) for line in lines) == len(lines) - 1
    assert found.length == 30_000  # more than the text has: it begins again
    assert own.real_text.fingerprint != words.real_text.fingerprint
    with pytest.raises(InputError, match="did not make the shards"):
        foreign = write_prepared(tmp_path / "foreign", [[[5, 6, 1]]])
        _ = Vocabulary.load(folder, text=foreign).real_text


# -- names and options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", VARIED)
def test_a_task_is_spelled_as_it_is_read(task):
    assert parse_task(spelled(parse_task(task))) == parse_task(task)
    assert spelled(named(task.split(":")[0])) == task.split(":")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("passkei", "the nearest of .* is 'passkey'"),
        ("mqar:pears=3", "no option 'pears': its options are pairs, queries"),
        ("passkey:pairs=3", "no option 'pairs': it has none"),
        ("mqar:pairs=few", "write a whole number"),
        ("mqar:noise=1", "write true or false"),
        ("mqar:pairs=0", "give 1 or more"),
        ("niah_single:haystack=hay", "one of repeat, needle, text"),
        ("niah_single:queries=2", "no more than there are"),
        ("niah_single:values=letters", "one of words, numbers, uuids"),
        ("phonebook:reversed=true", "no option 'reversed'"),
    ],
)
def test_a_wrong_task_is_told_in_a_sentence(text, words):
    with pytest.raises(InputError, match=words):
        parse_task(text)


def test_too_few_symbols_are_told_in_a_sentence():
    small = Vocabulary(None, size=16, control=(0, 1, 2))
    with pytest.raises(InputError, match="take fewer pairs"):
        sample("mqar:pairs=9", small, length=300)
    with pytest.raises(InputError, match="take fewer"):
        sample("mqar:symbols=99", small, length=300)


def test_options_are_the_difficulty_alone():
    assert options(named("mqar")) == {"pairs": 8, "queries": 8, "symbols": 0, "noise": False}


# -- draws -------------------------------------------------------------------------------------------------------


def test_draws_are_uniform_and_distinct():
    draws = Keyed("test")
    counts = [0] * 5
    for number in draws.many_below(5, 5000).tolist():
        counts[number] += 1
    assert all(850 < count < 1150 for count in counts)
    assert sorted(draws.distinct(100)) == list(range(100))
    assert sorted(draws.order(50).tolist()) == list(range(50))
    assert all(0 <= draws.uniform() < 1 and 0 <= draws.below(3) < 3 for _ in range(200))
    assert {Keyed("a", 1).part("x").below(10**9), Keyed("a", 1, "x").below(10**9)} == {Keyed("a", 1, "x").below(10**9)}
    assert Keyed("a", 11).below(10**9) != Keyed("a1", 1).below(10**9)

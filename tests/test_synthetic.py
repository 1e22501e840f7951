"""Training text of tasks: the same bytes for any workers and interruptions, rows that fit, answers that are right."""

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rule_model import RuleModel

from mezzotint.data import synthetic, synthetic_rows
from mezzotint.data.__main__ import main
from mezzotint.data.errors import InputError
from mezzotint.data.rows import RowSource
from mezzotint.data.synthetic import SyntheticConfig, mixture_of, synthesize
from mezzotint.data.tasks import mixture as mixture_module
from mezzotint.data.tasks.catalog import HELDOUT, TEST, TRAIN, make_sample, named, parse_task
from mezzotint.data.tasks.mixture import STAGE_STEP, Mixture, parse_item
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.data.tasks.wording import wording, write_tokenizer
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.data.verify import verify

TASKS = ("passkey", "mqar:pairs=1/2/4:queries=12:symbols=96:length=64/128/256:weight=2")


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Vocabulary:
    return Vocabulary.load(write_tokenizer(tmp_path_factory.mktemp("words")))


def config(out: Path, **changes) -> SyntheticConfig:
    values: dict = {"tokenizer": "tasks", "out": str(out), "tasks": TASKS, "tokens": 40_000, "workers": 1}
    return SyntheticConfig(**(values | changes))


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(synthetic, "PART_TOKENS", 8192)
    monkeypatch.setattr(synthetic, "JOB_TOKENS", 2048)


# -- bytes -------------------------------------------------------------------------------------------------------


def test_workers_change_nothing(tmp_path, small_parts):
    for workers in (1, 2):
        synthesize(config(tmp_path / str(workers), heldout=0.2, workers=workers))
    one, two = content(tmp_path / "1"), content(tmp_path / "2")
    assert one == two and len([name for name in one if name.endswith(".bin")]) > 4
    assert not verify(tmp_path / "1" / "train").problems and not verify(tmp_path / "1" / "heldout").problems


@pytest.mark.parametrize("jobs", [1, 5, 17])
def test_an_interrupted_run_goes_on_where_it_was(tmp_path, small_parts, monkeypatch, jobs):
    synthesize(config(tmp_path / "whole", heldout=0.2))
    real, made = synthetic_rows._make, Counter()

    def dying(mixture, job):
        made["jobs"] += 1
        if made["jobs"] > jobs:
            raise KeyboardInterrupt
        return real(mixture, job)

    monkeypatch.setattr(synthetic_rows, "_make", dying)
    with pytest.raises(KeyboardInterrupt):
        synthesize(config(tmp_path / "cut", heldout=0.2))
    assert not (tmp_path / "cut" / "train" / "manifest.json").exists()
    made.clear()
    monkeypatch.setattr(synthetic_rows, "_make", lambda *job: (made.update(jobs=1), real(*job))[1])
    synthesize(config(tmp_path / "cut", heldout=0.2))
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert made["jobs"] == 20 - jobs // 4 * 4  # of four a part; whole parts are not made again
    made.clear()
    synthesize(config(tmp_path / "cut", heldout=0.2))
    assert not made


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    command = [sys.executable, "-m", "mezzotint.data", "synthetic", "--tokenizer", "tasks", "--task", "mqar"]
    command += ["--tokens", "6m", "--workers", "2", "--out"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    child = subprocess.Popen([*command, str(tmp_path / "cut")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not list(tmp_path.glob("cut/progress/*")):
        time.sleep(0.01)
    child.kill()
    child.wait()
    subprocess.run([*command, str(tmp_path / "cut")], check=True, capture_output=True)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_another_seed_is_another_text(tmp_path):
    for seed in (0, 1):
        synthesize(config(tmp_path / str(seed), seed=seed))
    assert content(tmp_path / "0")["part-00000.bin"] != content(tmp_path / "1")["part-00000.bin"]


def test_other_settings_are_refused_in_the_same_folder(tmp_path, capsys):
    command = ["synthetic", "--tokenizer", "tasks", "--task", "mqar", "--tokens", "20k", "--out", str(tmp_path / "a")]
    assert main(command) == 0
    assert "tokens in " in capsys.readouterr().out
    before = content(tmp_path / "a")
    assert main([*command, "--seed", "1"]) == 2
    assert "seed = 0, not 1" in capsys.readouterr().err
    assert content(tmp_path / "a") == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    assert main([*command[:-1], str(tmp_path / "b")]) == 2
    assert "was not made by synthetic" in capsys.readouterr().err


# -- what is in it -----------------------------------------------------------------------------------------------


def test_rows_and_documents_begin_together(tmp_path):
    synthesize(config(tmp_path / "d"))
    rows = RowSource(tmp_path / "d", 256, 16)
    assert len(rows) == 40_000 // 256
    lengths, fills = Counter(), Counter()
    for number in range(len(rows)):
        row = rows[number]
        starts = np.flatnonzero(np.diff(row.documents, prepend=-1))
        length = 256 // len(starts)
        assert starts.tolist() == list(range(0, 256, length)) and row.blocks == 16
        assert (row.tokens[starts[1:] - 1] == rows.manifest.eos_id).all() and row.tokens[-1] == rows.manifest.eos_id
        lengths[length] += 1
        fills.update(np.add.reduceat(row.fill, starts).tolist())
    assert set(lengths) == {64, 128, 256}
    assert set(fills) == set(range(16))  # answers end anywhere in a block


@pytest.mark.parametrize("task", ["passkey", "mqar:pairs=3", "niah_multivalue", "phonebook", "variables", "copy"])
def test_every_document_answers_its_own_questions(task, words):
    """The rule, which reads the prompt, writes the very answer that the document teaches."""
    model = RuleModel(words)
    mixture = mixture_of(config(Path("unused"), tasks=(task,), row_length=768))
    for number in range(5):
        (document,) = mixture.row(TRAIN, number, words)
        sample = make_sample(
            parse_task(task), length=len(document), seed=0, index=0, depth=0.5, vocabulary=words, exact=True
        )
        start = len(document) - len(sample.target) if sample.kind == "symbols" else _answer_start(document, words)
        masked = [
            token if place < start or (sample.kind == "symbols" and sample.given[place - start]) else words.mask_id
            for place, token in enumerate(document)
        ]
        assert model.complete(masked) == document
        assert document.count(words.eos_id) == 1 and document[-1] == words.eos_id


def _answer_start(document: list[int], words: Vocabulary) -> int:
    ends = [words.encode(word)[0] for word in (" is", " are")]
    return max(place for place, token in enumerate(document) if token in ends) + 1


def test_training_held_out_and_test_samples_have_no_key_in_common(words):
    """By construction: the purpose is part of every key. Where all else is equal, questions and answers differ."""
    mixture = mixture_of(config(Path("unused"), tasks=("mqar:pairs=4",), row_length=128))
    asked = 2 * 8 + 1  # tokens of questions, answers and <eos>: they do not depend on the depth
    rows = range(200)
    seen = {
        split: {tuple(document[-asked:]) for n in rows for document in mixture.row(split, n, words)}
        for split in (TRAIN, HELDOUT)
    }
    test = {
        tuple(
            make_sample(
                parse_task("mqar:pairs=4"),
                length=length,
                seed=0,
                index=STAGE_STEP + number * 128,
                depth=0.5,
                vocabulary=words,
                exact=True,
                purpose=TEST,
            ).target
        )
        for number in rows
        for length in range(113, 129)
    }
    assert len(seen[TRAIN]) == len(seen[HELDOUT]) == 200 and len(test) == 200 * 16
    assert not seen[TRAIN] & seen[HELDOUT] and not (seen[TRAIN] | seen[HELDOUT]) & test
    assert len({TRAIN, HELDOUT, TEST}) == 3
    with pytest.raises(AssertionError):
        next(mixture.row(TEST, 0, words))


def test_weights_are_shares_of_rows_and_choices_are_even(words):
    mixture = mixture_of(config(Path("unused")))
    kinds, pairs = Counter(), Counter()
    passkey = words.encode("There is")[0]
    for number in range(600):
        documents = list(mixture.row(TRAIN, number, words))
        is_passkey = documents[0][0] == passkey
        kinds[is_passkey] += 1
        if not is_passkey:
            for document in documents:
                pairs[len({*document[-25:-1:2]})] += 1
    assert 160 < kinds[True] < 240
    assert set(pairs) == {1, 2, 4} and max(pairs.values()) < 1.3 * min(pairs.values())


def test_needles_of_training_text_stand_everywhere_and_often_at_both_ends(words, monkeypatch):
    """Tests ask at depths 0 and 1 as often as at any other; even draws would hardly ever teach them."""
    depths, real = [], mixture_module.make_sample

    def seen(task, **asked):
        depths.append(asked["depth"])
        return real(task, **asked)

    monkeypatch.setattr(mixture_module, "make_sample", seen)
    mixture = Mixture((parse_item("mqar:pairs=2:length=64", row_length=256),), 256, 16, seed=1)
    for number in range(200):
        list(mixture.row(TRAIN, number, words))
    shares = np.histogram(depths, bins=[0.0, 1e-9, 0.25, 0.5, 0.75, 1 - 1e-9, 1.1])[0] / len(depths)
    assert len(depths) == 800 and np.abs(shares - [0.1, 0.2, 0.2, 0.2, 0.2, 0.1]).max() < 0.05


def test_a_stage_takes_the_first_part_of_every_list(words):
    item = "mqar:pairs=1/2/4:queries=12:symbols=96:length=64/128/256"
    for now, lengths, pairs in ((1, {64}, {1}), (2, {64, 128}, {1, 2}), (3, {64, 128, 256}, {1, 2, 4})):
        mixture = mixture_of(config(Path("unused"), tasks=(item,), stage=(now, 3)))
        seen_lengths, seen_pairs = set(), set()
        for number in range(60):
            documents = list(mixture.row(TRAIN, number, words))
            seen_lengths.add(256 // len(documents))
            seen_pairs |= {len({*document[-25:-1:2]}) for document in documents}
        assert seen_lengths == lengths and seen_pairs == pairs


def test_stages_share_no_sample(words):
    rows = set()
    for now in (1, 2):
        mixture = mixture_of(config(Path("unused"), tasks=("copy",), row_length=64, stage=(now, 2)))
        rows |= {tuple(document) for n in range(50) for document in mixture.row(TRAIN, n, words)}
    assert len(rows) == 100


# -- the tokenizer of the tasks ----------------------------------------------------------------------------------


def test_the_tasks_have_a_small_tokenizer_of_their_own(tmp_path, words):
    assert words.size == 256 + len(wording()) + 3 < 400
    text = "The grass is green. There and back again. naïve ▁ 漢字\n"
    assert words.decode(words.encode(text)) == text
    assert len(words.encode("The grass is green. The sky is blue.")) < 12
    first = write_tokenizer(tmp_path / "a").read_bytes()
    assert first == write_tokenizer(tmp_path / "b").read_bytes()
    assert named("passkey").minimum(words) < 150


def test_its_release_gives_the_same_ids(tmp_path):
    from mezzotint.launch.release_tokenizer import write_tokenizer as write_release_tokenizer

    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "own"))
    (tmp_path / "release").mkdir()
    assert write_release_tokenizer(tokenizer, tmp_path / "release") is None
    again = load_tokenizer(tmp_path / "release")
    assert again.sha256 == tokenizer.sha256 and again.encode("The pass key is 7.") == tokenizer.encode(
        "The pass key is 7."
    )


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words_of_error"),
    [
        (["--task", "passkei"], "is 'passkey'"),
        (["--task", "mqar:pairs=2/few"], "write a whole number"),
        (["--task", "mqar:weight=0"], "give a positive number"),
        (["--task", "mqar:weight=much"], "'much' is no number"),
        (["--task", "mqar:length=100"], "does not divide the rows of 256"),
        (["--task", "mqar:length=1x"], "no whole number"),
        (["--task", "mqar:pairs=120"], "are too short"),
        (["--task", "passkey:length=64"], "are too short"),
        (["--task", "mqar", "--block", "24"], "whole blocks of 24"),
        (["--task", "mqar", "--block", "0"], "block is 0"),
        (["--task", "mqar", "--tokens", "many"], "--tokens is 'many'"),
        (["--task", "mqar", "--tokens", "300", "--heldout", "0.1"], "too few to hold out"),
        (["--task", "mqar", "--heldout", "1"], "heldout is 1.0"),
        (["--task", "mqar", "--stage", "3/2"], "stage 3/2"),
        (["--task", "mqar", "--stage", "last"], "--stage is 'last'"),
        (["--task", "mqar", "--tokenizer", "/nowhere"], "no tokenizer at /nowhere"),
        (["--task", "mqar", "--workers", "-1"], "workers is -1"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, arguments, words_of_error):
    out = tmp_path / "out"
    assert main(["synthetic", "--tokenizer", "tasks", "--out", str(out), *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ") and words_of_error in said
    assert not out.exists()


def test_an_item_is_read_as_it_is_written():
    item = parse_item("mqar:pairs=2/4:length=64/256:weight=2.5", row_length=256)
    assert (item.weight, item.lengths, item.choices) == (2.5, (64, 256), (("pairs", ("2", "4")),))
    with pytest.raises(InputError, match="no option 'pears'"):
        parse_item("mqar:pears=2", row_length=256)

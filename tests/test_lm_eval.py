"""lm-eval on releases: scores equal to enumeration, independent of batches, three tasks end to end, offline; refusals."""

import dataclasses
import itertools
import json
import math
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_support import small_tokenizer
from support import PATTERNS, generator, ordinary, tiny_config, tiny_model
from test_export import train_sentencepiece

from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.eval import lm_eval_command, lm_eval_generate, lm_eval_score
from mezzotint.eval.__main__ import main
from mezzotint.eval.bound import Draws
from mezzotint.eval.lm_eval_generate import Writing, parse_writing, write
from mezzotint.eval.lm_eval_release import open_release
from mezzotint.eval.lm_eval_score import Request, continuation_bounds
from mezzotint.eval.subjects import release_subject
from mezzotint.launch.export import write_release
from mezzotint.launch.model_card import Facts
from mezzotint.models.decode import generate
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Sampler, TopK

DATA = Path(__file__).resolve().parent / "lm_eval_data"
TASKS = "mezzotint_choices,mezzotint_documents,mezzotint_continue"
ARMS = {"attention": "A", "mamba": "M", "hybrid": "AM"}
needs_lm_eval = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("lm_eval"), reason="needs lm-eval: pip install -e .[eval]"
)


# -- scores of token ids ---------------------------------------------------------------------------------------------


def scored(model, requests, *, draws=None, contexts=4):
    """Answers in the order of the requests."""
    found = dict(continuation_bounds(model, requests, draws=draws or Draws(per_block=8), contexts=contexts))
    return [found[number] for number in range(len(requests))]


def direct(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The bound and greediness by training passes: every set of masked continuation tokens of every block."""
    g, mask = model.config.block_length, model.config.mask_token_id
    text, total, greedy = torch.tensor(context + continuation), 0.0, True
    for b in range(len(context) // g, math.ceil(len(text) / g)):
        places = [i for i in range(b * g, min(len(text), (b + 1) * g)) if i >= len(context)]
        n = len(places)
        for k in range(1, n + 1):
            for masked in itertools.combinations(places, k):
                noisy = torch.full((g,), mask)
                own = text[b * g : (b + 1) * g]
                noisy[: len(own)] = own
                at = torch.tensor(masked) - b * g
                noisy[at] = mask
                logits = model(text[None, : b * g], noisy[None, None], torch.tensor([[b]]))[0, 0][at]
                target = text[torch.tensor(masked)]
                loss = -float(logits.log_softmax(-1).gather(1, target[:, None]).sum())
                total += loss / k / math.comb(n, k)
                if k == n:
                    greedy = greedy and bool((logits.argmax(-1) == target).all())
    return total, greedy


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_scores_equal_enumeration(pattern):
    """Blocks of three: contexts of every remainder and none, continuations that end within a block, and likely ones."""
    model = tiny_model(tiny_config(pattern, block_length=3))
    g, requests = generator(2), []
    for before, after in itertools.product((0, 1, 2, 3, 5, 9), (1, 2, 3, 7)):
        tokens = ordinary(model.config, (before + after,), g).tolist()
        requests.append(Request(tuple(tokens[:before]), tuple(tokens[before:]), key="x"))
    for before in (0, 4):  # the likeliest token behind a context, so that some answers are greedy
        context = ordinary(model.config, (before,), g)
        canvas = torch.full((3,), model.config.mask_token_id)
        canvas[: before % 3] = context[before // 3 * 3 :]
        logits = model(context[None, : before // 3 * 3], canvas[None, None], torch.tensor([[before // 3]]))
        requests.append(Request(tuple(context.tolist()), (int(logits[0, 0, before % 3].argmax()),), key="x"))
    shared = tuple(ordinary(model.config, (4,), g).tolist())  # choices of one question, which share canvases
    for length in (1, 1, 2, 2, 2, 5):
        requests.append(Request(shared, tuple(ordinary(model.config, (length,), g).tolist()), key="x"))
    answers = scored(model, [*requests, requests[-1]])
    assert answers[-1] == answers[-2]
    for request, answer in zip(requests, answers):
        nats, greedy = direct(model, list(request.context), list(request.continuation))
        assert answer.nats == pytest.approx(nats, abs=1e-10)
        assert answer.greedy == greedy
    assert {answer.greedy for answer in answers} == {False, True}


@torch.no_grad()
def test_a_continuation_of_one_block_by_one_token_is_its_probability():
    model = tiny_model(tiny_config("M", block_length=1))
    tokens = ordinary(model.config, (9,), generator(3))
    noisy = torch.full((1, 9, 1), model.config.mask_token_id)
    logits = model(tokens[None, :-1], noisy, torch.arange(9)[None])[0, :, 0].log_softmax(-1)
    exact = -logits.gather(1, tokens[:, None])[4:].sum()
    answer = scored(model, [Request(tuple(tokens[:4].tolist()), tuple(tokens[4:].tolist()), key="x")])[0]
    assert answer.nats == pytest.approx(float(exact), abs=1e-10)


@torch.no_grad()
def test_greedy_is_read_off_the_canvas_with_all_masked_whatever_the_draws():
    model = tiny_model(tiny_config("M", block_length=8))
    context = ordinary(model.config, (8,), generator(3))
    canvas = torch.full((1, 8), model.config.mask_token_id)
    likeliest = model.denoise(canvas, model.commit(context[None], model.start(1, 8)))[0].argmax(-1).tolist()
    other = [*likeliest[:5], likeliest[5] % 30 + 4, *likeliest[6:]]
    for draws in (2, 4, 8, 300):
        requests = [Request(tuple(context.tolist()), tuple(tokens), key="x") for tokens in (likeliest, other)]
        assert [a.greedy for a in scored(model, requests, draws=Draws(per_block=draws))] == [True, False]


def mixed_requests(model, count: int = 14) -> list[Request]:
    """Several choices of few contexts of different lengths."""
    g, rng, requests = generator(5), np.random.default_rng(0), []
    for question in range(count // 2):
        context = tuple(ordinary(model.config, (int(rng.integers(0, 40)),), g).tolist())
        for _ in range(int(rng.integers(1, 4))):
            continuation = tuple(ordinary(model.config, (int(rng.integers(1, 20)),), g).tolist())
            requests.append(Request(context, continuation, key=str(question)))
    return requests


@pytest.mark.parametrize("pattern", ("A", "M", "AM"))
def test_batches_change_scores_by_at_most_1e_4_and_no_argmax(pattern):
    model = tiny_model(tiny_config(pattern, block_length=8)).float()
    requests = mixed_requests(model)
    base = scored(model, requests, contexts=1, draws=Draws(per_block=8, batch=1))
    for contexts, batch in ((2, 7), (3, 64), (100, 1000)):
        found = scored(model, requests, contexts=contexts, draws=Draws(per_block=8, batch=batch))
        for one, other in zip(base, found):
            assert other.nats == pytest.approx(one.nats, abs=1e-4)
            assert other.greedy == one.greedy
    order = list(np.random.default_rng(1).permutation(len(requests)))
    found = scored(model, [requests[i] for i in order], contexts=3, draws=Draws(per_block=8, batch=16))
    for place, i in enumerate(order):
        assert found[place].nats == pytest.approx(base[i].nats, abs=1e-4)


def test_a_prefix_is_read_once_for_all_its_continuations(monkeypatch):
    model = tiny_model(tiny_config("M", block_length=4))
    context = tuple(ordinary(model.config, (41,), generator(1)).tolist())
    choices = [tuple(ordinary(model.config, (3,), generator(seed)).tolist()) for seed in range(5)]
    committed, canvases = [], []
    commit, denoise = model.commit, model.denoise
    monkeypatch.setattr(
        model, "commit", lambda clean, *rest, **more: (committed.append(clean.numel()), commit(clean, *rest, **more))[1]
    )
    monkeypatch.setattr(
        model, "denoise", lambda canvas, *rest: (canvases.append(len(canvas)), denoise(canvas, *rest))[1]
    )
    scored(model, [Request(context, choice, key="x") for choice in choices], draws=Draws(per_block=7))
    assert committed == [40], "the whole blocks of the context, once; no choice reaches a second block"
    assert sum(canvases) <= 5 * 6 + 1, "the canvas without any choice's tokens is denoised once for all"


def test_equal_lengths_have_equal_masks_and_other_questions_others():
    chosen = [Draws(per_block=8).of(6, key=key, twin=False) for key in ("a/0", "a/0", "b/0")]
    assert chosen[0] == chosen[1] != chosen[2]


def test_what_memory_cannot_hold_together_is_scored_in_parts_or_refused(monkeypatch):
    model = tiny_model(tiny_config("A", block_length=4))
    requests = mixed_requests(model)
    base = scored(model, requests)
    free = 30_000
    monkeypatch.setattr(lm_eval_score, "available_bytes", lambda device: free)
    monkeypatch.setattr("mezzotint.eval.bound.available_bytes", lambda device: free)
    starts = []
    start = model.start
    monkeypatch.setattr(model, "start", lambda rows, *rest: (starts.append(rows), start(rows, *rest))[1])
    found = scored(model, requests)
    assert len(starts) > 3 and [a.nats for a in found] == pytest.approx([a.nats for a in base], abs=1e-9)
    free = 500
    with pytest.raises(InputError, match=r"the state of a text of \d+ tokens needs"):
        scored(model, requests)


# -- texts -------------------------------------------------------------------------------------------------------


class Letters:
    """Token i is the i-th of a string of letters; control ids are those of `tiny_config`."""

    vocab_size, mask_id, eos_id, pad_id, sha256 = 40, 0, 1, 2, "letters"
    letters = "\0\1\2abcdefghijklmnopqrstuvwxyz .\nABCDEFGH"

    def encode(self, text: str) -> list[int]:
        return [self.letters.index(letter) for letter in text]

    def decode(self, ids) -> str:
        return "".join(self.letters[i] for i in ids if i > 2)


@pytest.mark.parametrize("pattern", ("A", "M", "AM"))
@pytest.mark.parametrize("until", [(), ("e",), ("a", "b", "c"), ("zzz",)])
def test_staged_writing_is_what_one_run_writes(pattern, until, monkeypatch):
    model, letters = tiny_model(tiny_config(pattern, block_length=4)), Letters()
    monkeypatch.setattr(lm_eval_generate, "FIRST_STAGE", 4)
    prompts = [letters.encode(text) for text in ("", "a", "abcd", "the cat sat", "one. two. three")]
    writing = Writing(until, 30, Sampler(temperature=0.0))
    runs = []
    for batch in (1, 2, 5):
        found = dict(write(model, letters, prompts, writing, reveal=TopK(steps=4), batch=batch, seed=0))
        runs.append([found[i] for i in range(len(prompts))])
    assert runs[0] == runs[1] == runs[2]
    whole = generate(
        model,
        prompts,
        max_new_tokens=30,
        generator=generator(),
        reveal=TopK(steps=4),
        sampler=Sampler(temperature=0.0),
    )
    for text, tokens in zip(runs[0], whole.tokens):
        expected = letters.decode(tokens)
        for stop in until:
            expected = expected.split(stop)[0]
        assert text == expected


def test_a_stopped_text_is_not_written_on(monkeypatch):
    model, letters = tiny_model(tiny_config("M", block_length=4)), Letters()
    monkeypatch.setattr(lm_eval_generate, "FIRST_STAGE", 4)
    asked = []
    whole = lm_eval_generate.generate
    monkeypatch.setattr(
        lm_eval_generate,
        "generate",
        lambda *rest, **more: (asked.append(more["max_new_tokens"]), whole(*rest, **more))[1],
    )
    every = tuple(letters.letters[3:])
    found = dict(
        write(
            model, letters, [[5]], Writing(every, 200, Sampler(temperature=0.0)), reveal=TopK(steps=4), batch=1, seed=0
        )
    )
    assert found == {0: ""} and asked == [4]


def test_sampled_texts_do_not_depend_on_the_batch():
    model, letters = tiny_model(tiny_config("M", block_length=4)), Letters()
    prompts = [letters.encode(text) for text in ("a", "the cat sat", "b")]
    writing = Writing((), 12, Sampler(temperature=1.0))
    runs = [
        dict(write(model, letters, prompts, writing, reveal=TopK(steps=4), batch=batch, seed=seed))
        for batch, seed in ((1, 0), (3, 0), (3, 1))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_text_is_cut_at_its_first_stop_string():
    assert lm_eval_generate._stop("one two three", ("three", "two")) == 4
    assert lm_eval_generate._stop("one two three", ("two three", "two")) == 4
    assert lm_eval_generate._stop("one two", ("four",)) is None


def test_generation_arguments():
    assert parse_writing({}) == Writing((), 256, Sampler(temperature=0.0))
    assert parse_writing({"until": "x", "max_gen_toks": 5, "do_sample": False, "temperature": 0.7}) == Writing(
        ("x",), 5, Sampler(temperature=0.0)
    )
    assert parse_writing({"until": ["x", ""], "do_sample": True, "top_p": 0.9, "num_beams": 1}) == Writing(
        ("x",), 256, Sampler(temperature=1.0, top_p=0.9)
    )
    for arguments, sentence in (
        ({"num_beams": 4}, "num_beams = 4 is not known"),
        ({"until": [1]}, "must be a text or a list"),
        ({"max_gen_toks": 0}, "at least 1"),
    ):
        with pytest.raises(InputError, match=sentence):
            parse_writing(arguments)


# -- releases ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> Path:
    """A folder with a release of each backbone and `other`, of another tokenizer's ids."""
    folder = tmp_path_factory.mktemp("lm-eval")
    tokenizer = load_tokenizer(small_tokenizer(folder / "tokenizer"))
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    facts = Facts(trained={"optimizer steps": 3}, dtype="float32")
    for name, pattern in ARMS.items():
        config = tiny_config(pattern, 4, vocab_size=tokenizer.vocab_size, tie_embeddings=True, **ids)
        recipe = "model: {preset: debug, backbone: hybrid, block: 4}\n"
        write_release(folder / name, tiny_model(config).float(), tokenizer, recipe=recipe, facts=facts)
    return folder


@pytest.fixture
def offline(monkeypatch):
    """Neither a network nor permission to ask for one: the variables as users set them, and what was read from them."""
    import datasets
    import huggingface_hub

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def refuse(*address):
        raise AssertionError(f"a connection to {address[1:]} was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def command(release: Path, out: Path, *more: str) -> list[str]:
    base = ["lm-eval", str(release), "--include-path", str(DATA), "--out", str(out)]
    return [*base, *(() if "--tasks" in more else ("--tasks", TASKS)), *more]


def rows_of(path: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return {row["identity"]["task"]: row for row in lines}


def jsonl(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


@needs_lm_eval
@pytest.mark.parametrize("arm", list(ARMS))
def test_three_tasks_end_to_end_offline(releases, tmp_path, capsys, offline, arm):
    import lm_eval

    out = tmp_path / "out.jsonl"
    assert main(command(releases / arm, out, "--draws", "15", "--reveal", "topk=4")) == 0
    printed = capsys.readouterr().out
    rows = rows_of(out)
    assert len(rows) == 3 and all(row["status"] == "ok" for row in rows.values())
    assert all(row["identity"]["lm_eval"] == lm_eval.__version__ for row in rows.values())
    subject = release_subject(releases / arm)
    tokenizer = open_release(subject)
    from mezzotint.models.weights import load_model

    model = load_model(releases / arm)

    # multiple choice: blocks of 4 and 15 draws take every set, so the direct bound is the score
    choices = rows["lm-eval/mezzotint_choices"]["values"]
    right = []
    for question in jsonl("choices.jsonl"):
        nats = []
        for option in question["options"]:
            whole = tokenizer.encode(question["question"] + " " + option)
            before = tokenizer.encode(question["question"])
            with torch.no_grad():
                nats.append(direct(model, before, whole[len(before) :])[0])
        right.append(float(int(np.argmin(nats)) == question["answer"]))
    assert choices["samples"]["acc"] == right
    assert choices["n"] == 8 and choices["value"] == pytest.approx(np.mean(right))
    assert choices["stderr"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(8))

    # documents
    documents = rows["lm-eval/mezzotint_documents"]["values"]
    texts = [document["text"] for document in jsonl("documents.jsonl")]
    with torch.no_grad():
        nats = [direct(model, [], tokenizer.encode(text))[0] for text in texts]
    size, count = sum(len(text.encode()) for text in texts), sum(len(tokenizer.encode(text)) for text in texts)
    metrics = documents["metrics"]
    assert metrics["bits_per_byte"]["value"] == pytest.approx(sum(nats) / math.log(2) / size, rel=1e-5)
    assert metrics["nats_per_token"]["value"] == pytest.approx(sum(nats) / count, rel=1e-5)
    assert metrics["bits_per_byte"]["stderr"] > 0 and metrics["byte_perplexity"]["stderr"] > 0
    assert documents["samples"]["nats"] == pytest.approx(nats, rel=1e-5)
    assert f"| mezzotint_documents | bits_per_byte | <= | {metrics['bits_per_byte']['value']:.4f} |" in printed
    assert "| mezzotint_choices | acc |  |" in printed

    # generation
    written = rows["lm-eval/mezzotint_continue"]["values"]
    expected = []
    for prompt in jsonl("prompts.jsonl"):
        found = generate(
            model,
            [tokenizer.encode(prompt["prompt"])],
            max_new_tokens=20,
            generator=generator(),
            reveal=TopK(steps=4),
            sampler=Sampler(temperature=0.0),
        )
        text = tokenizer.decode(found.tokens[0]).split("\n")[0].split(".")[0]
        expected.append(float(text == prompt["answer"]))
    assert written["samples"]["exact_match"] == expected

    # once more: nothing is run, nothing written, the same table
    before = out.read_text()
    assert main(command(releases / arm, out, "--draws", "15", "--reveal", "topk=4", "--batch-size", "3")) == 0
    assert out.read_text() == before and capsys.readouterr().out == printed


@needs_lm_eval
def test_a_run_that_was_cut_anywhere_ends_with_the_same_table(releases, tmp_path, capsys):
    """As kill -9 leaves the file: whole rows, then a part of one."""
    out, more = tmp_path / "out.jsonl", ("--limit", "2", "--draws", "2")
    assert main(command(releases / "mamba", out, *more)) == 0
    table, lines = capsys.readouterr().out, out.read_bytes().splitlines(keepends=True)
    whole = rows_of(out)
    for kept in range(1, len(lines)):
        out.write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        assert main(command(releases / "mamba", out, *more)) == 0
        assert capsys.readouterr().out == table
        again = rows_of(out)
        assert len(out.read_text().splitlines()) == len(lines) and list(again) == list(whole)
        for task, row in again.items():
            assert row | {"time": 0} == whole[task] | {"time": 0}


@needs_lm_eval
def test_a_dry_run_counts_requests_and_tokens_and_writes_nothing(releases, tmp_path, capsys, offline, monkeypatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(lm_eval_command.Runner, "_build", None)  # no model is built
    assert main(command(releases / "hybrid", out, "--limit", "3", "--dry-run")) == 0
    printed = capsys.readouterr().out
    assert not out.exists()
    lines = {line.split(" | ")[1]: line.split(" | ")[2:] for line in printed.splitlines() if "mezzotint_" in line}
    tokenizer = load_tokenizer(releases / "hybrid")
    documents = [len(tokenizer.encode(one["text"])) for one in jsonl("documents.jsonl")[:3]]
    assert lines["mezzotint_documents"][:2] == ["3", str(max(documents))]
    assert int(lines["mezzotint_choices"][0]) == sum(len(one["options"]) for one in jsonl("choices.jsonl")[:3])
    assert lines["mezzotint_continue"][0] == "3" and all(" GiB)" in cells[2] for cells in lines.values())


@needs_lm_eval
def test_batch_sizes_change_no_result(releases, tmp_path, capsys):
    found = []
    for batch in (1, 5, 100):
        out = tmp_path / f"{batch}.jsonl"
        assert main(command(releases / "hybrid", out, "--batch-size", str(batch), "--draw-batch", str(batch))) == 0
        found.append({task: row["values"] for task, row in rows_of(out).items()})
    for values in found[1:]:
        for task, base in found[0].items():
            for metric, scores in base["metrics"].items():
                assert values[task]["metrics"][metric]["value"] == pytest.approx(scores["value"], rel=1e-4)
            for metric, samples in base["samples"].items():
                assert values[task]["samples"][metric] == pytest.approx(samples, abs=1e-4)


@needs_lm_eval
def test_limit_fewshot_and_seed_make_rows_of_their_own(releases, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    for more in (("--limit", "3"), ("--limit", "4"), ("--limit", "4", "--seed", "1")):
        assert main(command(releases / "mamba", out, "--tasks", "mezzotint_choices", *more)) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert [(row["identity"]["limit"], row["values"]["n"]) for row in rows] == [(3, 3), (4, 4), (4, 4)]


@needs_lm_eval
def test_answers_kept_in_the_cache_are_not_asked_again(releases, tmp_path, capsys, monkeypatch):
    cache = ("--use-cache", str(tmp_path / "cache"))
    assert main(command(releases / "mamba", tmp_path / "a.jsonl", *cache)) == 0
    first = capsys.readouterr().out

    def never(*rest, **more):
        raise AssertionError("a cached answer was computed again")

    module = lm_eval_command.import_harness()
    monkeypatch.setattr(module, "continuation_bounds", never)
    monkeypatch.setattr(module, "write", never)
    assert main(command(releases / "mamba", tmp_path / "b.jsonl", *cache)) == 0
    assert capsys.readouterr().out.replace("b.jsonl", "a.jsonl") == first
    assert main(command(releases / "hybrid", tmp_path / "c.jsonl", *cache)) == 2, "another release has its own answers"


@needs_lm_eval
@torch.no_grad()
def test_greedy_by_decoding_is_what_decoding_writes(releases):
    module = lm_eval_command.import_harness()
    subject = release_subject(releases / "mamba")
    from mezzotint.models.weights import load_model

    model, tokenizer = load_model(releases / "mamba"), open_release(subject)
    lm = module.MezzotintLM(
        model, tokenizer, draws=Draws(per_block=4), batch_size=2, reveal=TopK(steps=4), decode_greedy=True
    )
    context = tokenizer.encode("The quick brown")
    written = generate(
        model,
        [context],
        max_new_tokens=6,
        generator=generator(),
        reveal=TopK(steps=4),
        sampler=Sampler(temperature=0.0),
    ).tokens[0]
    other = [*written[:-1], (written[-1] + 1) % 200 + 50]
    pairs = [(("", ""), context, tokens) for tokens in (written, other)]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(pairs, disable_tqdm=True)] == [True, False]


@needs_lm_eval
def test_a_task_that_fails_is_recorded_and_the_others_go_on(releases, tmp_path, capsys):
    shutil.copytree(DATA, tmp_path / "tasks")
    yaml = (DATA / "choices.yaml").read_text().replace("mezzotint_choices", "broken")
    (tmp_path / "tasks" / "broken.yaml").write_text(yaml + "process_results: !function local_data.fail\n")
    with (tmp_path / "tasks" / "local_data.py").open("a") as file:
        file.write("\n\ndef fail(doc, results):\n    raise ZeroDivisionError('no such luck')\n")
    out = tmp_path / "out.jsonl"
    arguments = ["lm-eval", str(releases / "mamba"), "--include-path", str(tmp_path / "tasks"), "--out", str(out)]
    assert main([*arguments, "--tasks", "broken,mezzotint_choices", "--limit", "2"]) == 2
    printed = capsys.readouterr()
    assert (
        "mamba, lm-eval/broken: error, ZeroDivisionError: no such luck" in printed.out
        and "Traceback" not in printed.err
    )
    rows = rows_of(out)
    assert main([*arguments, "--tasks", "broken", "--limit", "2"]) == 2, "what failed is told again, not tried again"
    assert len(rows_of(out)) == 2 and rows_of(out) == rows
    assert rows["lm-eval/broken"]["status"] == "error" and rows["lm-eval/mezzotint_choices"]["status"] == "ok"


@needs_lm_eval
def test_what_cannot_be_run_is_refused_in_a_sentence(releases, tmp_path, capsys, offline):
    mamba, out = releases / "mamba", tmp_path / "out.jsonl"
    (tmp_path / "notes").write_text("mine\n")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "far.yaml").write_text(
        "task: far\ndataset_path: nobody/nothing\noutput_type: multiple_choice\ntest_split: test\n"
        "doc_to_text: q\ndoc_to_choice: c\ndoc_to_target: a\n"
    )
    for arguments, sentence in (
        (command(mamba, out, "--tasks", "mezzotint_choicez"), "the nearest is 'mezzotint_choices'"),
        (command(mamba, out, "--tasks", ""), "no tasks: name some"),
        (command(mamba, out, "--draws", "1"), "--draws is 1"),
        (command(mamba, out, "--limit", "0"), "--limit is 0"),
        (command(mamba, out, "--greedy", "yes"), "--greedy is 'yes'"),
        (command(mamba, out, "--reveal", "fast"), "unknown reveal rule"),
        (command(mamba, out, "--dtype", "int3"), "unknown dtype"),
        (command(mamba, tmp_path / "notes"), "no results file"),
        (command(mamba, tmp_path / "notes" / "x.jsonl"), "cannot write results"),
        (command(releases / "nowhere", out), "is no release folder"),
        (
            ["lm-eval", str(mamba), "--tasks", "far", "--include-path", str(tasks), "--out", str(out)],
            "cannot be loaded",
        ),
        (["lm-eval", str(mamba), "--tasks", "x", "--include-path", str(tmp_path / "absent")], "is no folder"),
    ):
        assert main(arguments) == 2, sentence
        captured = capsys.readouterr()
        last = captured.err.strip().splitlines()[-1]
        assert last.startswith("error: ") and sentence in last, captured.err
        assert captured.out == "" and "Traceback" not in captured.err
    assert (tmp_path / "notes").read_text() == "mine\n"


@needs_lm_eval
def test_results_of_another_release_are_left_alone(releases, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(command(releases / "mamba", out, "--tasks", "mezzotint_choices", "--limit", "1")) == 0
    before = out.read_text()
    assert main(command(releases / "hybrid", out, "--tasks", "mezzotint_choices", "--limit", "1")) == 2
    assert "another release (mamba)" in capsys.readouterr().err and out.read_text() == before


@needs_lm_eval
def test_a_prompt_beyond_memory_is_refused_in_a_sentence(releases, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lm_eval_score, "available_bytes", lambda device: 100)
    monkeypatch.setattr("mezzotint.eval.bound.available_bytes", lambda device: 100)
    assert main(command(releases / "attention", tmp_path / "out.jsonl")) == 2
    assert "tokens needs" in capsys.readouterr().err.splitlines()[-1]


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["denoiser"] |= changes
    path.write_text(json.dumps(content))


def take_lm_eval_away(monkeypatch) -> None:
    for name in {"lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "mezzotint.eval.lm_eval_model", raising=False)


def test_a_release_of_another_tokenizer_or_block_is_refused_in_a_sentence(releases, tmp_path, capsys, monkeypatch):
    """Before lm-eval is even imported."""
    take_lm_eval_away(monkeypatch)

    def refusal(change) -> str:
        shutil.rmtree(tmp_path / "release", ignore_errors=True)
        shutil.copytree(releases / "mamba", tmp_path / "release")
        change(tmp_path / "release")
        assert main(command(tmp_path / "release", tmp_path / "out.jsonl")) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err
        return captured.err.strip().splitlines()[-1]

    assert "trained with blocks of 4 tokens" in refusal(lambda r: edit_config(r, block_length=8, chunk_length=8))
    assert "they do not belong together" in refusal(lambda r: edit_config(r, eos_token_id=7))
    smaller = {"<unk>": 0, "a": 1, "b": 2, "\n": 3}

    def exchange(release: Path) -> None:
        import tokenizers

        tokenizers.Tokenizer(tokenizers.models.WordLevel(smaller, unk_token="<unk>")).save(
            str(release / "tokenizer.json")
        )

    assert "is another tokenizer than tokenizer.model" in refusal(exchange)
    assert not (tmp_path / "out.jsonl").exists()


@needs_lm_eval
def test_releases_of_one_kind_stand_in_one_table_and_others_are_refused(releases, tmp_path, capsys):
    arms = [str(releases / arm) for arm in ARMS]
    more = ["--include-path", str(DATA), "--tasks", "mezzotint_choices", "--limit", "2"]
    out = tmp_path / "out.jsonl"
    assert main(["lm-eval", *arms, *more, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {arm} | mezzotint_choices | acc |" in printed for arm in ARMS)
    before = out.read_text()

    blocks = tmp_path / "blocks"
    shutil.copytree(releases / "mamba", blocks)
    edit_config(blocks, block_length=8, chunk_length=8)
    (blocks / "training.yaml").unlink()
    (tmp_path / "words").mkdir()
    train_sentencepiece(
        tmp_path / "words" / "tokenizer.model",
        ["A few words that are other ones.\n" * 50],
        model_type="bpe",
        vocab_size=280,
    )
    tokenizer = load_tokenizer(tmp_path / "words")
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    model = tiny_model(tiny_config("M", 4, vocab_size=tokenizer.vocab_size, tie_embeddings=True, **ids)).float()
    write_release(
        tmp_path / "words-mamba", model, tokenizer, recipe="seed: 1\n", facts=Facts(trained={}, dtype="float32")
    )
    for other, sentence in (
        (blocks, "blocks has another block length (8, not 4) than"),
        (tmp_path / "words-mamba", "words-mamba has another tokenizer than"),
    ):
        assert main(["lm-eval", arms[0], str(other), *more, "--out", str(tmp_path / "new.jsonl")]) == 2
        assert sentence in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "new.jsonl").exists()
    # and where the file has rows of both, the new ones not yet
    rows = before.replace('"block": 4', '"block": 16')
    (tmp_path / "old.jsonl").write_text(rows)
    assert main(["lm-eval", *arms, *more, "--out", str(tmp_path / "old.jsonl")]) == 2
    assert "another block length (4, not 16) than attention, whose results" in capsys.readouterr().err
    assert (tmp_path / "old.jsonl").read_text() == rows


def test_the_absence_of_lm_eval_is_a_sentence_that_names_the_extra(releases, tmp_path, capsys, monkeypatch):
    take_lm_eval_away(monkeypatch)
    assert main(command(releases / "mamba", tmp_path / "out.jsonl")) == 2
    assert "pip install 'mezzotint[eval]'" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()


def test_the_preset_has_eight_tasks_and_the_three_of_the_reference():
    from mezzotint.eval.lm_eval_config import COMMON_SENSE

    assert len(set(COMMON_SENSE)) == 8 and {"piqa", "arc_challenge", "boolq"} <= set(COMMON_SENSE)


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lm_eval_knows_the_tasks_of_the_preset_and_of_ruler():
    from mezzotint.eval.lm_eval_config import COMMON_SENSE

    harness = lm_eval_command.import_harness().Harness(COMMON_SENSE, include_path=None, tokenizer=None, lengths=())
    ruler = {"ruler_vt", "ruler_cwe", "ruler_fwe", "niah_single_1", "niah_multikey_2", "niah_multikey_3"}
    assert set(COMMON_SENSE) | ruler <= set(harness.names)
    assert all(harness.is_task(name) for name in COMMON_SENSE)


RULER_TEXT = """The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
Memorize and track the chain(s) of variable assignment hidden in the following text.
VAR QXZVK = 12345 VAR WJYPB = VAR QXZVK
Question: Find all variables that are assigned the value 67890 in the text above. Answer: According to the chain(s) of
variable assignment in the text above, 5 variables are assgined the value 12345, they are: ABCDE
Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about it.
"""


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rulers_six_offline_tasks_run_under_their_names(tmp_path, capsys, monkeypatch):
    """Prompts of 2048 tokens, sized by the release's tokenizer.json, and none of the code that lies beside it is run."""
    pytest.importorskip("wonderwords", reason="RULER's tasks need wonderwords: pip install -e .[eval]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "tokenizer").mkdir()
    train_sentencepiece(tmp_path / "tokenizer" / "tokenizer.model", [RULER_TEXT] * 30, model_type="bpe", vocab_size=500)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    model = tiny_model(tiny_config("M", 16, vocab_size=tokenizer.vocab_size, tie_embeddings=True, **ids)).float()
    release = tmp_path / "release"
    write_release(release, model, tokenizer, recipe="seed: 1\n", facts=Facts(trained={}, dtype="float32"))
    (release / "hf.py").write_text("raise RuntimeError('code of the release was run')\n")
    out = tmp_path / "out.jsonl"
    names = "ruler_vt,ruler_cwe,ruler_fwe,niah_single_1,niah_multikey_2,niah_multikey_3"
    arguments = ["lm-eval", str(release), "--tasks", names, "--lengths", "2048", "--limit", "2", "--out", str(out)]
    assert main(arguments) == 0
    rows = rows_of(out)
    assert set(rows) == {f"lm-eval/{name}" for name in names.split(",")}
    prompts = {}
    for task, row in rows.items():
        assert row["status"] == "ok" and row["values"]["metric"] == "2048" and row["values"]["n"] == 2
        prompts[task] = row["values"]["prompts"]
    capsys.readouterr()

    # a task's prompts do not depend on which others were loaded before it
    assert main([*arguments[:3], "niah_multikey_2", *arguments[4:-1], str(tmp_path / "alone.jsonl")]) == 0
    alone = rows_of(tmp_path / "alone.jsonl")["lm-eval/niah_multikey_2"]["values"]["prompts"]
    assert alone == prompts["lm-eval/niah_multikey_2"]
    capsys.readouterr()
    for name in ("ruler_vt", "ruler_cwe", "ruler_fwe"):  # which would look for a shorter prompt for ever
        assert main([*arguments[:3], name, "--lengths", "150", "--out", str(out)]) == 2
        assert "needs at least" in capsys.readouterr().err


def test_settings_make_the_identity(releases):
    """Everything that may change a score is in it; the batch sizes are not."""
    from mezzotint.eval.lm_eval_config import LMEvalConfig

    subject = release_subject(releases / "mamba")
    tokenizer = open_release(subject)

    def identity_of(config: LMEvalConfig) -> dict:
        return config.identity(subject, "x", version="1", tokenizer=tokenizer)

    base = LMEvalConfig(tasks=("x",), reveal=TopK(steps=4))
    identity = identity_of(base)
    same = dataclasses.replace(base, batch_size=3, draw_batch=5, use_cache="y")
    assert identity_of(same) == identity
    for change in (
        {"limit": 2},
        {"num_fewshot": 1},
        {"draws": 9},
        {"seed": 1},
        {"greedy": "decode"},
        {"lengths": (5,)},
        {"reveal": TopK(steps=5)},
        {"dtype": torch.bfloat16},
        {"include_path": str(DATA)},
    ):
        assert identity_of(dataclasses.replace(base, **change)) != identity, change

"""`mezzotint-eval caches`: rows as they come, resumed to the same table, sweeps, both kinds of models, bad input."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import generator, ordinary
from tasks_support import byte_tokenizer

from mezzotint.data.prepare import PrepareConfig, prepare
from mezzotint.data.sources import SourceConfig
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.eval.__main__ import main
from mezzotint.eval.bound import Draws
from mezzotint.eval.caches import _agreement
from mezzotint.eval.caches_bound import written_bound
from mezzotint.eval.caches_plan import CachesConfig, Cell, Shared, parse_policies, parse_shared
from mezzotint.eval.caches_prompts import Prompt
from mezzotint.eval.caches_table import lines_of, table
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.subjects import Subject
from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.policies.adapters import fresh_adapters, load_adapters
from mezzotint.models.policies.fast_dllm import FastDLLM
from mezzotint.models.policies.none import NoCache
from mezzotint.models.policies.table import POLICIES, parse_policy, spelled
from mezzotint.models.weights import load_model, save_weights

ROW = 64
MQAR = ("--task", "mqar:pairs=2:queries=3", "--lengths", "48", "--samples", "4", "--draws", "2", "--block", "4")


def release(folder: Path, pattern: str, *, block: int, seed: int = 0) -> Path:
    byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    sizes = {"block_length": block, "chunk_length": block, "vocab_size": tokenizer.vocab_size}
    config = preset("debug", "hybrid", pattern=pattern, **ids, **sizes)
    save_weights(Denoiser(config, generator=torch.Generator().manual_seed(seed)), folder)
    (folder / "training.yaml").write_text(f"data:\n  row_length: {ROW}\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    release(folder / "row", "AA", block=ROW)
    release(folder / "causal", "AA", block=8)
    release(folder / "mamba", "MM", block=8)
    (folder / "text.txt").write_text("def area(width, height):\n    return width * height\n" * 40)
    source = SourceConfig(input=str(folder / "text.txt"))
    prepare(PrepareConfig(tokenizer=str(folder / "row"), out=str(folder / "prepared"), source=source, workers=1))
    return folder


def run(capsys, *arguments: str) -> str:
    """Run the command, which must succeed; the table it printed."""
    assert main(["caches", *arguments]) == 0
    printed = capsys.readouterr().out
    return printed[: printed.index("written:")]


def rows_of(path: Path) -> list[dict]:
    return [record for line in path.read_text().splitlines() if "key" in (record := json.loads(line))]


def test_policies_of_both_kinds_of_models_become_one_table_and_one_figure(made, tmp_path, capsys):
    out = tmp_path / "c.jsonl"
    policies = ("fast:mode=prefix/dual", "entropy:threshold=-1/9:recent=2", "dllm", "drop:keep=1/0.5")
    names = [str(made / name) for name in ("row", "causal", "mamba")]
    command = (*names, "--policies", *policies, *MQAR, "--batch", "2", "--out", str(out))
    text = run(capsys, *command)
    rows = rows_of(out)
    for row in rows:
        identity, values = row["identity"], row["values"]
        exact = identity["policy"] in ("none", "entropy:threshold=-1.0:recent=2", "drop:keep=1.0")
        # in float32 a tie may fall otherwise where sums are made in another order; tests in float64 ask for equality
        assert row["status"] == "ok" and (values["agreement"] > 0.75 or not exact)
        assert values["nfe"] > 0 and values["peak_bytes"] >= 0 and values["nats"] > 0
        assert values["correct"] in (True, False) and 0 <= values["part"] <= 1
        assert values["effective"]["reveal"].startswith("Threshold")
        assert (values["tokens_recomputed"] < values["tokens_uncached"]) == (identity["subject"] == "row" and not exact)
    found = {(row["identity"]["subject"], row["identity"]["policy"]) for row in rows}
    assert ("row", "fast") in found and ("causal", "fast") in found and ("causal", "drop") in found
    assert len(rows) == 4 * (1 + 2 + 2 + 1 + 1 + 1 + 2 + 1)  # what has an object: on row, causal, mamba
    assert (
        "mamba: policy drop has no object on the pattern MM" in text
        and "causal, mamba: policy dllm has no object" in text
    )
    for suffix in (".md", ".csv", "-quality.png"):
        assert out.with_name(f"c{suffix}").stat().st_size > 100
    lines = out.read_text()
    assert run(capsys, *command) == text and out.read_text() == lines


def test_a_killed_run_goes_on_to_the_same_rows(made, tmp_path, capsys):
    out = tmp_path / "c.jsonl"
    command = (str(made / "row"), "--policies", "fast", *MQAR, "--batch", "2", "--out", str(out))
    run(capsys, *command)
    whole = rows_of(out)
    kept = out.read_text().splitlines(keepends=True)
    out.write_text("".join(kept[:6]) + kept[6][:20])  # the heading, five rows and a torn one
    run(capsys, *command)
    timed = ("seconds", "prepare_seconds", "decision_seconds", "tokens_per_s")
    for row in (*whole, *(again := rows_of(out))):
        for name in timed:
            del row["values"][name]
        del row["time"]
    assert sorted(again, key=lambda row: row["key"]) == sorted(whole, key=lambda row: row["key"])


def test_text_is_continued_and_a_shared_part_is_the_same_in_all_prompts(made, tmp_path, capsys):
    adapters = tmp_path / "adapters.safetensors"
    fresh_adapters(load_model(made / "row"), header=2, trailer=2).save(adapters)
    out = tmp_path / "c.jsonl"
    policies = ("acache:ratio=0/0.5", "packet", f"packet:adapters={adapters}", "polestar")
    text = run(
        capsys, str(made / "row"), "--policies", *policies, "--data", str(made / "prepared"), "--lengths", "40",
        "--new-tokens", "12", "--samples", "4", "--batch", "4", "--block", "6", "--draws", "2",
        "--shared", "infix=0.5", "--out", str(out),
    )  # fmt: skip
    rows = rows_of(out)
    shared = {row["identity"]["policy"]: row["values"]["shared_tokens"] for row in rows}
    assert shared["none"] == shared["polestar"] == 0 and shared["acache:ratio=0.0"] == 14  # once for four requests
    packets = [count for name, count in shared.items() if name.startswith("packet")]
    assert sorted(packets) == [14, 18]
    assert all(row["values"]["correct"] is None and len(row["values"]["written"]) == 12 for row in rows)
    assert "| row | acache:ratio=0.5 | 40 | 4 | 4 |" in text


def test_rows_longer_than_a_model_was_trained_on_are_told_below_the_table(made, tmp_path, capsys):
    asked = ("--data", str(made / "prepared"), "--lengths", f"{ROW},{ROW + 8}", "--new-tokens", "8", "--samples", "1")
    how = ("--block", "4", "--draws", "1", "--out", str(tmp_path / "c.jsonl"))
    text = run(capsys, str(made / "row"), "--policies", "none", *asked, *how)
    assert f"row was trained on rows of {ROW} tokens and is asked at {ROW + 8}:" in text
    nats = {row["identity"]["length"]: row["values"]["nats"] for row in rows_of(tmp_path / "c.jsonl")}
    assert nats[ROW] > 0 and nats[ROW + 8] is None


def prompt_file(folder: Path, **changed) -> Path:
    """Four prompts of 12 tokens with two answers, the middle of every prompt shared."""
    lines = [
        {"prompt": [30 + i, *range(40, 51)], "answer": [60, 61, 62, 63], "given": [True, False, True, False]}
        | {"shared": [[4, 8], [8, 10]]}
        | changed
        for i in range(4)
    ]
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_prompts_of_ones_own_are_asked_and_reported(made, tmp_path, capsys):
    """The release's tokenizer knows nothing of them; what is shared comes from the file, once for all requests."""
    own, out = prompt_file(tmp_path), tmp_path / "c.jsonl"
    how = ("--samples", "4", "--batch", "2", "--draws", "2", "--block", "4", "--out", str(out))
    text = run(capsys, str(made / "row"), "--policies", "acache:ratio=0/1", "--prompts", str(own), *how)
    assert "| row | acache:ratio=0.0 | 16 | 2 | 4 |" in text
    for row in rows_of(out):
        identity, values = row["identity"], row["values"]
        assert identity["shared"] == "4-8,8-10" and identity["prompts"].startswith("own ")
        assert values["written"][::2] == [60, 62] and values["written_tokens"] == 2
        assert values["part"] == sum(values["written"][i] == 60 + i for i in (1, 3)) / 2
        assert values["correct"] == (values["written"][1] == 61)
        assert identity["policy"] == "none" or values["effective"]["affix_tokens"] == 6
    assert main(["report", str(out), "--out", str(tmp_path / "report")]) == 0
    capsys.readouterr()
    page = (tmp_path / "report" / "report.md").read_text()
    assert "## caches own shared 4-8,8-10" in page and "| row | acache:ratio=0.0 | 16 | 2 | 4 |" in page
    lines = (tmp_path / "report" / "caches_own_shared_4-8_8-10-cells.csv").read_text().splitlines()
    assert len(lines) == 4 and lines[0].startswith("subject,policy,length,batch,n,rate,rate_error")
    assert (tmp_path / "report" / "caches_own_shared_4-8_8-10-quality.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("changed", "more", "sentence"),
    [
        ({"answer": [1, 2]}, (), "line 1 has no prompt, nothing to write"),
        ({"shared": [[4, 99]]}, (), "are no parts of 12 tokens"),
        ({"prompt": [5000] * 12}, (), "has the id 5000"),
        ({"prompt": "text"}, (), "line 1 cannot be read"),
        ({"gven": [True, False, True, False]}, (), "line 1 cannot be read"),
        ({"given": ["true", "false", "", ""]}, (), "line 1 cannot be read"),
        ({"shared": [[0.9, 4.9]]}, (), "line 1 cannot be read"),
        ({"prompt": [256] * 12}, (), "has the mask 256 in a prompt"),
        ({"answer": [256, 61, 62, 63]}, (), "has the mask 256 in a prompt or as a given answer"),
        ({}, ("--samples", "8"), "holds 4 prompts, 8 are asked for"),
        ({}, ("--shared", "prefix=0.5"), "says itself what is shared"),
        ({}, ("--lengths", "20"), "leave --lengths out"),
    ],
)
def test_prompts_that_cannot_be_asked_are_told_in_a_sentence(made, tmp_path, capsys, changed, more, sentence):
    own = prompt_file(tmp_path, **changed)
    command = ("--policies", "acache", "--prompts", str(own), "--samples", "4", *more)
    assert main(["caches", str(made / "row"), *command, "--out", str(tmp_path / "c.jsonl")]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("error: ") and sentence in told and not (tmp_path / "c.jsonl").exists()


def test_brackets_in_brackets_are_told_in_a_sentence(made, tmp_path, capsys):
    own = tmp_path / "nested.jsonl"
    own.write_text("[" * 100_000 + "\n")
    command = ("--policies", "acache", "--prompts", str(own), "--samples", "1", "--out", str(tmp_path / "c.jsonl"))
    assert main(["caches", str(made / "row"), *command]) == 2
    assert "line 1 cannot be read" in capsys.readouterr().err


def test_a_prefix_of_text_is_forked_by_all_backbones(made, tmp_path, capsys):
    out = tmp_path / "c.jsonl"
    names = [str(made / name) for name in ("causal", "mamba")]
    run(
        capsys, *names, "--policies", "fork", "--data", str(made / "prepared"), "--lengths", "40", "--new-tokens", "12",
        "--samples", "4", "--batch", "4", "--draws", "0", "--shared", "prefix=0.9", "--out", str(out),
    )  # fmt: skip
    for row in rows_of(out):
        forked = row["identity"]["policy"] == "fork"
        assert row["values"]["agreement"] > 0.75 and row["values"]["nats"] is None  # float32, as above
        assert row["values"]["shared_tokens"] == (24 if forked else 0)
        assert row["values"]["prefill_tokens"] == (0 if forked else 24)


def test_the_bound_of_what_was_written_is_that_of_the_model():
    """One place that was written: its exact -log p from one pass; several: they are bounded block after block."""
    for pattern, block in (("AA", 16), ("MA", 4)):
        config = preset("debug", "hybrid", pattern=pattern, block_length=block, chunk_length=block, vocab_size=40)
        model = Denoiser(config, generator=generator(1)).double()
        tokens = ordinary(config, (11,), generator(2))
        canvas = torch.zeros(1, block, dtype=torch.long)
        first = 10 // block * block
        canvas[0, : 10 - first] = tokens[first:10]
        with torch.no_grad():
            clean = tokens[None, :first]
            logits = model(clean, canvas[:, None], torch.tensor([[first // block]]))[0, 0, 10 - first]
            want = -float(logits.log_softmax(-1)[tokens[10]])
        got = written_bound(model, tokens[:10].tolist(), tokens[10:].tolist(), draws=Draws(per_block=8), key="a")
        assert math.isclose(got, want, rel_tol=1e-9)
        if block == 4:  # two blocks: the sum of either, the first given to the second
            texts = [(tokens[:4], tokens[4:11]), (tokens[:4], tokens[4:8]), (tokens[:8], tokens[8:11])]
            whole, first, second = (
                written_bound(model, a.tolist(), b.tolist(), draws=Draws(per_block=8), key="a") for a, b in texts
            )
            assert math.isclose(whole, first + second, rel_tol=1e-12)
        prompt, written = tokens[:3].tolist(), tokens[3:].tolist()
        assert written_bound(model, prompt, written, draws=Draws(per_block=8), key="a") > got


def cell_of(policy, **changed) -> Cell:
    asked = {
        "policies": (NoCache(), FastDLLM()),
        "lengths": (8,),
        "data": "text",
        "new_tokens": 4,
        "samples": 4,
        "block": 4,
    }
    subject = Subject("some", "0", preset("debug", "attention"), None)
    return Cell(subject, "bidirectional", policy, 8, 2, "text", CachesConfig(**asked | changed))


def row_of(group: int, policy: str = "none", **changed) -> dict:
    values = {"group": group, "tokens_per_s": 10.0, "nfe": 4, "tokens_recomputed": 30.0, "tokens_uncached": 40.0}
    values |= {"peak_bytes": 5, "held_bytes": 4, "decision_seconds": 0.1, "seconds": 1.0, "agreement": 1.0}
    values |= {"nats": 8.0, "written_tokens": 4, "correct": None}
    identity = {"subject": "some", "policy": policy, "length": 8, "batch": 2, "block": 4}
    return {"status": "ok", "identity": identity, "values": values | changed}


def test_the_figures_of_a_cell_are_those_of_its_rows():
    none, fast = cell_of(NoCache()), cell_of(FastDLLM())
    rows = {none: [row_of(0), row_of(0), row_of(1, tokens_per_s=20.0), row_of(1, tokens_per_s=20.0)]}
    rows[fast] = [
        row_of(0, "fast", tokens_per_s=30.0, agreement=0.5, correct=True, tokens_recomputed=10.0, peak_bytes=9),
        row_of(0, "fast", tokens_per_s=30.0, agreement=0.7, correct=False, nats=4.0),
        row_of(1, "fast", tokens_per_s=20.0, agreement=0.9, correct=True, decision_seconds=0.3),
        {"status": "oom", "values": {}},
    ]
    base, line = lines_of([none, fast], rows)
    assert base.speed_up == (1.0, 0.0) and base.rate == (15.0, 5.0) and base.correct is None and base.n == 4
    assert line.n == 3 and line.rate == (25.0, 5.0) and line.speed_up == (2.0, 1.0)  # 3 and 1 times as fast
    assert math.isclose(line.share, 70 / 120) and math.isclose(line.recomputed, 70 / 3)
    assert math.isclose(line.agreement[0], 0.7) and math.isclose(line.nats[0], (2 + 1 + 2) / 3)
    assert line.correct == (2, 3) and line.peak_bytes == 9 and math.isclose(line.decisions, 0.2)
    text = table([base, line], {"policy x has no object": ["some", "other"]})
    assert "| some | fast | 8 | 2 | 3 | 25.0 ± 5.0 | 2.00 ± 1.00 |" in text and "- some, other: policy x" in text


def test_tokens_that_stood_there_count_for_no_agreement(tmp_path):
    none, fast = cell_of(NoCache()), cell_of(FastDLLM())
    with ResultsFile(tmp_path / "c.jsonl", subjects={"some": "0"}) as results:
        results.append(none.identity(0), status="ok", values={"written": [5, 6, 7, 8]})
        prompt = Prompt([3], [5, 0, 7, 0], None)
        assert _agreement(fast, 0, prompt, [5, 6, 7, 9], results) == 0.5
        assert _agreement(fast, 1, prompt, [5, 6, 7, 9], results) is None
        assert _agreement(none, 0, prompt, [5, 6, 7, 9], results) == 1.0


def test_sweeps_and_shared_parts_are_read_from_their_options():
    names = [spelled(policy) for policy in parse_policies(["entropy:threshold=0.1/2:recent=4/8", "none", "fast"])]
    assert names[0] == "none" and names[-1] == "fast" and len(names) == 6
    assert "entropy:threshold=2.0:recent=4" in names
    assert parse_shared("prefix=0.5").span(9) == (0, 4)
    assert parse_shared("suffix=0.5").span(9) == (5, 9)
    assert parse_shared("infix=0.4") == Shared("infix", 0.4) and Shared("infix", 0.4).span(10) == (3, 7)
    assert Shared("infix", 1.0).span(10) == (0, 10)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--policies", "fats"), "no cache policy 'fats'"),
        (("--policies", "entropy:recent=-1"), "recent is -1"),
        (("--policies", "acache"), "say which with --shared"),
        (("--policies", "acache", "--shared", "middle=0.5"), "--shared is 'middle=0.5'"),
        (("--policies", "acache", "--shared", "prefix=0"), "a share above 0"),
        (("--policies", "bicache", "--shared", "infix=0.5"), "one part that starts at token 0"),
        (("--policies", "bicache:layers=9", "--shared", "prefix=0.5"), "the model has 2"),
        (("--policies", "fork", "--shared", "prefix=0.5"), "no object on a bidirectional model"),
        (("--policies", "fork", "--shared", "prefix=0.5", "--kind", "block-causal", "--batch", "2"), "or --batch 1"),
        (("--policies", "fast", "--batch", "3"), "no multiple of the batch 3"),
        (("--policies", "fast", "--reveal", "first-hitting"), "draws at random"),
        (("--policies", "fast", "--block", "0"), "--block is 0"),
        (("--policies", "fast", "--sub-block", "3"), "no such model is compared"),
        (("--policies", "entropy:threshold=1:threshold=9"), "threshold is given twice"),
        (("--policies", "bicache:table=101-1", "--shared", "prefix=0.5"), "are percents"),
        (("--policies", "drop:rule=random:seed=-1"), "seed is -1"),
        (("--policies", "fork", "--shared", "prefix=0.5", "--kind", "block-causal"), "shorter than a block of 64"),
        (("--policies", "fast", "--block", "9"), "--block 9 is longer than the 7 tokens of an answer"),
        (("--policies", ""), "no cache policy is named in ''"),
        (("--policies", "fast", "--data", "prepared"), "either --data"),
        (
            ("--policies", "packet:adapters=OTHER", "--shared", "prefix=0.5"),
            "these adapters were trained for the model",
        ),
        (("--policies", "fast", "--lengths", "4"), "mqar cannot be made of 4 tokens"),
    ],
)
def test_bad_input_is_told_in_a_sentence_with_exit_code_2(made, tmp_path, capsys, arguments, sentence):
    other = tmp_path / "other.safetensors"
    fresh_adapters(load_model(made / "causal")).save(other)
    given = [argument.replace("OTHER", str(other)) for argument in arguments]
    out = tmp_path / "c.jsonl"
    assert main(["caches", str(made / "row"), *MQAR, *given, "--out", str(out)]) == 2
    captured = capsys.readouterr()
    told = captured.err.strip().splitlines()[-1]
    assert told.startswith("error: ") and sentence in told and "Traceback" not in captured.err
    assert not out.exists()


@pytest.mark.parametrize("suffix", [".md", ".csv", ".PNG"])
def test_a_results_file_is_not_named_as_its_own_table(made, tmp_path, capsys, suffix):
    out = tmp_path / f"c{suffix}"
    assert main(["caches", str(made / "row"), *MQAR, "--policies", "fast", "--out", str(out)]) == 2
    assert "would be overwritten by its own table" in capsys.readouterr().err and not out.exists()


def test_more_samples_than_rows_and_models_of_another_kind_leave_nothing(made, tmp_path, capsys):
    out = tmp_path / "c.jsonl"
    text = ("--data", str(made / "prepared"), "--lengths", "40", "--new-tokens", "8", "--policies", "fast")
    assert main(["caches", str(made / "causal"), *text, "--samples", "1000000", "--out", str(out)]) == 2
    assert "1000000 are asked for: take fewer" in capsys.readouterr().err and not out.exists()
    assert main(["caches", str(made / "mamba"), *text, "--kind", "bidirectional", "--out", str(out)]) == 2
    assert "is for attention alone, and mamba has the pattern MM" in capsys.readouterr().err and not out.exists()


def test_a_policys_name_is_read_back_and_files_may_hold_colons(tmp_path):
    for text in ("bicache:layers=0:table=0-1,20-0", "entropy:threshold=0.5:masks=block", "drop:keep=0.25:rule=random"):
        assert spelled(parse_policy(spelled(parse_policy(text)))) == spelled(parse_policy(text))
    with pytest.raises(InputError, match=r"/nowhere/a:b\.safetensors cannot be read as adapters"):
        parse_policy("packet:adapters=/nowhere/a:b.safetensors")
    assert parse_policy(f"drop:rule=random:seed={2**31 - 1}").seed == 2**31 - 1


def test_evicting_at_random_takes_every_seed(made, tmp_path, capsys):
    policies = ("--policies", f"drop:rule=random:seed={2**31 - 1}:protect=0")
    text = ("--data", str(made / "prepared"), "--lengths", "40", "--new-tokens", "8", "--samples", "1", "--draws", "0")
    assert "drop:" in run(capsys, str(made / "causal"), *policies, *text, "--out", str(tmp_path / "c.jsonl"))


@pytest.mark.parametrize("about", ["{", "[1]", '{"format": 1}', '{"format": "1", "model": "m"}', "3"])
def test_damaged_adapters_are_told_in_a_sentence(tmp_path, about):
    path, part = tmp_path / "a.safetensors", torch.zeros(2, 4)
    save_file({"header": part, "trailer": part + 1}, path, metadata={"mezzotint_adapters": about})
    with pytest.raises(InputError, match="holds no adapters"):
        load_adapters(path)
    good = {"mezzotint_adapters": '{"format": 1, "model": "m"}'}
    for header in (part[0].clone(), part + math.nan, part - math.inf):
        save_file({"header": header, "trailer": part}, path, metadata=good)
        with pytest.raises(InputError, match="no rows of numbers"):
            load_adapters(path)


def test_adapters_of_another_width_are_told_in_a_sentence(made):
    model = load_model(made / "row")
    good = fresh_adapters(model)
    good.check(model)
    with pytest.raises(InputError, match="the file was changed"):
        dataclasses.replace(good, header=good.header[:, 1:]).check(model)


def test_requests_on_one_prefix_of_ones_own_are_forked_together(made, tmp_path, capsys):
    own, out = prompt_file(tmp_path, prompt=list(range(40, 52)), shared=[[0, 8]]), tmp_path / "c.jsonl"
    how = ("--samples", "4", "--batch", "4", "--draws", "0", "--out", str(out))
    run(capsys, str(made / "causal"), "--policies", "fork", "--prompts", str(own), *how)
    forked = [row for row in rows_of(out) if row["identity"]["policy"] == "fork"]
    assert len(forked) == 4 and all(row["values"]["shared_tokens"] == 8 for row in forked)
    assert all(row["values"]["agreement"] == 1 for row in forked)
    lines = own.read_text().splitlines()
    own.write_text("\n".join([*lines[:3], lines[3].replace("[40,", "[41,")]) + "\n")
    again = ("--policies", "fork", "--prompts", str(own), "--samples", "4", "--batch", "4")
    assert main(["caches", str(made / "causal"), *again, "--out", str(tmp_path / "d.jsonl")]) == 2
    assert "differ in the part that they name as shared" in capsys.readouterr().err


def test_more_clusters_than_columns_end_in_time(made, tmp_path, capsys):
    policies = ("--policies", "polestar:clusters=1000000:refreshed=1")
    assert "polestar" in run(capsys, str(made / "row"), *MQAR, *policies, "--out", str(tmp_path / "c.jsonl"))


def test_the_help_names_every_parameter_of_every_policy(capsys):
    with pytest.raises(SystemExit):
        main(["caches", "--help"])
    told = re.sub(r"\n {12}", " ", capsys.readouterr().out)  # a policy on one line
    for name, kind in POLICIES.items():
        line = re.search(rf"^  {name} .*$", told, re.MULTILINE)
        assert line is not None
        assert {field.name for field in dataclasses.fields(kind)} == set(
            re.findall(r"(\w+)=", line[0].split("needs --shared")[0])
        )


def test_models_that_do_not_say_their_kind_and_sub_blocks_are_refused(made, tmp_path, capsys):
    shutil.copytree(made / "row", tmp_path / "row")
    (tmp_path / "row" / "training.yaml").unlink()
    out = ("--out", str(tmp_path / "c.jsonl"))
    assert main(["caches", str(tmp_path / "row"), "--policies", "fast", *MQAR, *out]) == 2
    assert "give --kind bidirectional or --kind block-causal" in capsys.readouterr().err
    text = ("--data", str(made / "prepared"), "--lengths", "40", "--new-tokens", "8")
    assert main(["caches", str(made / "row"), "--policies", "fast", *text, *out]) == 2
    assert "--new-tokens 8 are fewer than a block of 32" in capsys.readouterr().err
    assert main(["caches", str(made / "causal"), "--policies", "fast", *MQAR, "--sub-block", "3", *out]) == 2
    assert "--sub-block 3 does not divide the block of 8 tokens of causal" in capsys.readouterr().err

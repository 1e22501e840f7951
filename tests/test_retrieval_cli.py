"""`mezzotint-eval retrieval`: rows as they come, resumed to the same table, variants, what does not fit, bad input."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rule_model import RuleModel
from tasks_support import byte_tokenizer

from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.eval import retrieval, retrieval_plan
from mezzotint.eval.__main__ import main
from mezzotint.eval.intervals import mean_and_error, percent, wilson
from mezzotint.eval.retrieval_subjects import build_variant, scaled, training_length, vocabulary_of
from mezzotint.eval.subjects import release_subject
from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.weights import save_weights

QUICK = ("--tasks", "mqar:pairs=2:queries=2,copy:count=3", "--samples", "6", "--depths", "3", "--batch", "4")


def release(folder: Path, pattern: str, *, seed: int = 0) -> Path:
    byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    config = preset("debug", "hybrid", pattern=pattern, vocab_size=tokenizer.vocab_size, **ids)
    save_weights(Denoiser(config, generator=torch.Generator().manual_seed(seed)), folder)
    (folder / "training.yaml").write_text("data:\n  row_length: 48\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("retrieval")
    release(folder / "hybrid", "MA")
    release(folder / "mamba", "M", seed=1)
    return folder


def run(capsys, out: Path, *arguments: str) -> str:
    """Run the command, which must succeed; the table it printed."""
    assert main(["retrieval", *arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    return printed[: printed.index("written:")]


def refused(capsys, *arguments: str) -> str:
    assert main(["retrieval", *arguments]) == 2
    captured = capsys.readouterr()
    sentence = captured.err.strip().splitlines()[-1]
    assert sentence.startswith("error: ") and "Traceback" not in captured.err and captured.out == ""
    return sentence


def rows(out: Path) -> list[dict]:
    return [row for row in map(json.loads, out.read_text().splitlines()) if "key" in row]


def lasting(found: list[dict]) -> dict[str, dict]:
    """Values by key, without what a clock says."""
    return {row["key"]: {k: v for k, v in row["values"].items() if k != "seconds"} for row in found}


# -- rows and resuming -------------------------------------------------------------------------------------------


def test_one_row_a_sample_and_the_same_again(made, tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    command = (str(made / "hybrid"), str(made / "mamba"), *QUICK, "--multiples", "1,2")
    table = run(capsys, out, *command)
    found = rows(out)
    assert len(found) == len({row["key"] for row in found}) == 2 * 2 * 2 * 6
    assert {row["identity"]["length"] for row in found} == {48, 96}
    assert {row["identity"]["depth"] for row in found} == {0.0, 0.5, 1.0}
    for row in found:
        values = row["values"]
        assert values["fill"] == 1.0 and values["trained"] == 48 and values["nats"] > 0
        assert values["positions"] == ("rope" if row["identity"]["subject"] == "hybrid" else "none")
    assert "| hybrid | mqar:pairs=2:queries=2 | 96 | 2x | 6 |" in table
    before = out.read_text()
    assert run(capsys, out, *command) == table
    assert out.read_text() == before
    more = run(capsys, out, *command, "--samples", "8")
    assert len(rows(out)) == 2 * 2 * 2 * 8 and "| 8 |" in more


def test_a_run_that_was_cut_anywhere_ends_with_the_same_table(made, tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    command = (str(made / "hybrid"), *QUICK, "--lengths", "64")
    table = run(capsys, out, *command)
    whole = lasting(rows(out))
    lines = out.read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        out.write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        assert run(capsys, out, *command) == table
        assert lasting(rows(out)) == whole and len(rows(out)) == len(whole)


def test_batches_change_nothing_of_note(made, tmp_path, capsys):
    found = []
    for batch in ("1", "5"):
        out = tmp_path / f"{batch}.jsonl"
        run(capsys, out, str(made / "hybrid"), *QUICK, "--lengths", "64", "--batch", batch)
        found.append(lasting(rows(out)))
    assert found[0].keys() == found[1].keys()
    for key, values in found[0].items():
        other = found[1][key]
        assert values.pop("nats") == pytest.approx(other.pop("nats"), abs=1e-4)
        assert values == other


def test_random_decoding_does_not_depend_on_the_batch(made, tmp_path, capsys):
    found = []
    for batch in ("1", "6"):
        out = tmp_path / f"{batch}.jsonl"
        rule = ("--reveal", "first-hitting", "--temperature", "1")
        run(capsys, out, str(made / "mamba"), *QUICK, "--lengths", "64", "--batch", batch, *rule)
        found.append({row["key"]: row["values"]["written"] for row in rows(out)})
    assert found[0] == found[1] and len({str(written) for written in found[0].values()}) > 6


@pytest.mark.slow
def test_kill_at_any_moment_and_run_again(made, tmp_path, capsys):
    out, samples = tmp_path / "r.jsonl", ("--samples", "40")
    command = (str(made / "hybrid"), *QUICK, *samples, "--lengths", "64,256")
    table = run(capsys, tmp_path / "whole.jsonl", *command)
    process = [sys.executable, "-m", "mezzotint.eval", "retrieval", *command, "--out", str(out)]
    for wanted in (3, 20, 60):
        child = subprocess.Popen(process, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while child.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < wanted):
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert out.read_bytes().count(b"\n") < 4 * 40
    assert run(capsys, out, *command) == table
    assert lasting(rows(out)) == lasting(rows(tmp_path / "whole.jsonl"))
    assert len(rows(out)) == 4 * 40


# -- scores ------------------------------------------------------------------------------------------------------


def test_the_rule_model_through_the_whole_command(made, tmp_path, capsys, monkeypatch):
    def rule(subject, *, dtype, device):
        return RuleModel(vocabulary_of(subject, text="stdlib"))

    monkeypatch.setattr(retrieval, "build_variant", rule)
    out = tmp_path / "r.jsonl"
    tasks = "passkey,mqar,phonebook,niah_multivalue"
    command = (str(made / "hybrid"), "--tasks", tasks, "--lengths", "1k", "--samples", "10", "--floor")
    table = run(capsys, out, *command).splitlines()[2:]
    assert len(table) == 8
    for line in table:
        if "no needle" in line:
            assert "| 0.000 [0.000, 0.278] |" in line
        else:
            assert "| 1.000 [0.722, 1.000] | 1.000 | 1.000 | 1.000 | 0.000 |" in line
    assert {row["identity"]["needle"] for row in rows(out)} == {True, False}
    assert all(row["values"]["written"] == f" {row['values']['wanted'][0]}." for row in rows(out)[:10])


def test_intervals():
    assert wilson(190, 200) == pytest.approx((0.9104, 0.9726), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(10, 10)[1] == 1.0 and wilson(0, 0) == (0.0, 1.0)
    assert wilson(5, 10, confidence=0.99)[0] < wilson(5, 10)[0]
    assert mean_and_error([1.0, 3.0]) == (2.0, 1.0)
    assert percent(190, 200) == "95.0% [91.0, 97.3]"


# -- subjects ----------------------------------------------------------------------------------------------------


def test_scaled_positions_are_subjects_of_their_own(made, tmp_path, capsys):
    out = tmp_path / "r.jsonl"
    command = (str(made / "hybrid"), str(made / "mamba"), *QUICK, "--multiples", "2")
    table = run(capsys, out, *command, "--rope-scaling", "yarn=4,linear=2")
    assert {row["identity"]["subject"] for row in rows(out)} == {"hybrid", "hybrid+yarn4", "hybrid+linear2", "mamba"}
    scheme = {row["identity"]["subject"]: row["values"]["positions"] for row in rows(out)}
    assert scheme["hybrid+yarn4"] == "rope yarn x4" and scheme["mamba"] == "none"
    assert "| hybrid+linear2 |" in table
    nats = {name: sum(r["values"]["nats"] for r in rows(out) if r["identity"]["subject"] == name) for name in scheme}
    assert nats["hybrid"] != nats["hybrid+linear2"] != nats["hybrid+yarn4"]


def test_a_variant_is_the_same_model_with_other_positions(made):
    subject = release_subject(made / "hybrid")
    variant = scaled(subject, "linear=2", trained=48)
    assert variant.config.rope_trained_length == 48 and variant.fingerprint != subject.fingerprint
    model = build_variant(variant, dtype=torch.float64, device="cpu")
    assert {layer.mixer.config.rope_scaling for layer in model.layers} == {"linear"}
    plain = build_variant(subject, dtype=torch.float64, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values()))
    twice = Denoiser(dataclasses.replace(subject.config, rope_scaling="linear", rope_factor=2.0)).double()
    twice.load_state_dict(plain.state_dict())
    canvas, tokens = torch.full((1, 8), subject.config.mask_token_id), torch.arange(16)[None]
    logits = [m.denoise(canvas, m.commit(tokens, m.start(1, 16))) for m in (model, twice, plain)]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


def test_the_training_length_is_read_from_the_recipe(made, tmp_path, capsys):
    assert training_length(release_subject(made / "hybrid")) == 48
    bare = tmp_path / "bare"
    shutil.copytree(made / "mamba", bare)
    (bare / "training.yaml").unlink()
    assert training_length(release_subject(bare)) is None
    out = ("--out", str(tmp_path / "r.jsonl"))
    assert "give --training-length" in refused(capsys, str(bare), *QUICK, "--multiples", "1", *out)
    table = run(capsys, tmp_path / "r.jsonl", str(bare), *QUICK, "--multiples", "1", "--training-length", "64")
    assert "| 64 | 1x |" in table


def test_a_release_without_tokenizer_answers_in_symbols(made, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(made / "mamba", bare)
    (bare / "tokenizer.json").unlink()
    assert "| bare | copy:count=3 |" in run(capsys, tmp_path / "r.jsonl", str(bare), *QUICK, "--lengths", "64")
    assert "needs a tokenizer" in refused(capsys, str(bare), "--tasks", "passkey", "--lengths", "1k")


# -- memory ------------------------------------------------------------------------------------------------------


def test_what_will_not_fit_is_recorded_and_the_sweep_goes_on(made, tmp_path, capsys, monkeypatch):
    subject = release_subject(made / "hybrid")
    monkeypatch.setattr(retrieval_plan, "available_bytes", lambda device: 3 * 10**6)
    out = tmp_path / "r.jsonl"
    command = (str(made / "hybrid"), *QUICK, "--lengths", "64,64k")
    table = run(capsys, out, *command)
    skipped = [row for row in rows(out) if row["status"] == "skipped_predicted_oom"]
    assert len(skipped) == 2 and all(row["identity"]["index"] is None for row in skipped)
    assert skipped[0]["values"]["needed_bytes"] > 65536 * subject.config.n_kv_heads * subject.config.head_dim * 8
    assert len([row for row in rows(out) if row["status"] == "ok"]) == 12
    assert table.count("| skipped_predicted_oom |") == 2
    assert run(capsys, out, *command) == table
    assert len(rows(out)) == 14


def test_running_out_of_memory_is_recorded_and_the_sweep_goes_on(made, tmp_path, capsys, monkeypatch):
    real = retrieval.score_batch

    def greedy(model, samples, **options):
        if samples[0].length > 100:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return real(model, samples, **options)

    monkeypatch.setattr(retrieval, "score_batch", greedy)
    out = tmp_path / "r.jsonl"
    command = (str(made / "hybrid"), *QUICK, "--lengths", "64,128")
    table = run(capsys, out, *command)
    assert [row["status"] for row in rows(out)].count("oom") == 2 and table.count("| oom |") == 2
    assert len([row for row in rows(out) if row["status"] == "ok"]) == 12
    monkeypatch.setattr(retrieval, "score_batch", real)
    assert run(capsys, out, *command) == table
    again = run(capsys, out, *command, "--retry-failed")
    assert "oom" not in again and len([row for row in rows(out) if row["status"] == "ok"]) == 24
    assert run(capsys, out, *command) == again


def test_a_single_cell_that_does_not_fit_is_refused(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(retrieval_plan, "available_bytes", lambda device: 10**6)
    out = tmp_path / "r.jsonl"
    said = refused(capsys, str(made / "hybrid"), "--tasks", "mqar", "--lengths", "1m", "--out", str(out))
    assert "hybrid at 1048576 tokens needs" in said and not out.exists()


def test_a_dry_run_says_bytes_and_time_and_writes_nothing(made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["retrieval", str(made / "hybrid"), *QUICK, "--lengths", "1k,64k", "--dry-run"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.count("| hybrid |") == 4 and "GiB)" in printed and "in all at least" in printed
    assert list(tmp_path.iterdir()) == []


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "passkei", "--lengths", "1k"], "is 'passkey'"),
        (["--tasks", "mqar:pears=3", "--lengths", "1k"], "no option 'pears'"),
        (["--tasks", "mqar,mqar", "--lengths", "1k"], "named twice"),
        (["--lengths", "1k,many"], "no number of tokens"),
        (["--lengths", "64"], "passkey needs at least"),
        ([], "give --lengths"),
        (["--lengths", "1k", "--multiples", "2"], "not both"),
        (["--lengths", "1k", "--samples", "0"], "--samples is 0"),
        (["--lengths", "1k", "--seed", "-1"], "--seed is -1"),
        (["--lengths", "1k", "--reveal", "luck"], "unknown reveal rule 'luck'"),
        (["--lengths", "1k", "--temperature", "-1"], "temperature is -1"),
        (["--lengths", "1k", "--dtype", "int3"], "unknown dtype"),
        (["--lengths", "1k", "--device", "abacus"], "unknown device"),
        (["--lengths", "1k", "--threads", "0"], "--threads is 0"),
        (["--lengths", "1k", "--rope-scaling", "jarn=2"], "unknown rope scaling 'jarn'"),
        (["--lengths", "1k", "--rope-scaling", "yarn"], "is no factor"),
        (["--lengths", "1k", "--rope-scaling", "yarn=0.5"], "must be at least 1"),
        (["--tasks", "niah_single:haystack=text", "--lengths", "1k", "--text", "/nowhere"], "is no prepared folder"),
        (["--tasks", "mqar:pairs=9999", "--lengths", "64k"], "take fewer pairs"),
    ],
)
def test_bad_input_is_one_sentence(made, tmp_path, capsys, arguments, words):
    out = tmp_path / "r.jsonl"
    assert words in refused(capsys, str(made / "hybrid"), *arguments, "--out", str(out))
    assert not out.exists()


def test_foreign_folders_and_files(made, tmp_path, capsys):
    lengths = (*QUICK, "--lengths", "64")
    assert "no release folder" in refused(capsys, str(tmp_path / "nowhere"), *lengths)
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(capsys, str(made / "mamba"), *lengths, "--out", str(tmp_path / "file" / "out"))
    out = tmp_path / "r.jsonl"
    run(capsys, out, str(made / "mamba"), *lengths)
    before = out.read_text()
    assert "another release" in refused(capsys, str(made / "hybrid"), *lengths, "--out", str(out))
    other = tmp_path / "elsewhere" / "mamba"
    shutil.copytree(made / "hybrid", other)
    assert "other weights named 'mamba'" in refused(capsys, str(other), *lengths, "--out", str(out))
    assert "same name" in refused(capsys, str(other), str(made / "mamba"), *lengths)
    assert out.read_text() == before
    with (other / "training.yaml").open("w") as file:
        file.write("a: [")
    assert "cannot be read" in refused(capsys, str(other), *QUICK, "--multiples", "1")
    os.remove(other / "training.yaml")


def test_a_tokenizer_of_another_vocabulary_is_refused(made, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(made / "mamba", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["zz"] = 256
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "does not belong to its model" in refused(capsys, str(other), "--tasks", "mqar", "--lengths", "64")

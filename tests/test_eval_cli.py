"""The command line: help at once, one sentence and exit code 2 for bad input, real output on a small release."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data_support import small_tokenizer, write_text

from mezzotint.data.prepare import PrepareConfig, prepare
from mezzotint.data.sources import SourceConfig
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.eval.__main__ import main
from mezzotint.eval.scoring_plan import scoring_flops
from mezzotint.models.config import (
    attention_flops_per_pair,
    head_flops_per_token,
    linear_flops_per_token,
    preset,
)
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.weights import load_config, save_weights


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with `release` (two-layer hybrid, random weights), `other` (another seed) and `prepared` text."""
    folder = tmp_path_factory.mktemp("eval")
    tokenizer = load_tokenizer(small_tokenizer(folder / "tokenizer"))
    text = write_text(folder / "text")
    prepare(
        PrepareConfig(
            tokenizer=str(folder / "tokenizer"),
            out=str(folder / "prepared"),
            source=SourceConfig(input=str(text)),
            workers=1,
        )
    )
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    config = preset("debug", "hybrid", pattern="MA", vocab_size=tokenizer.vocab_size, **ids)
    for name, seed in (("release", 0), ("other", 1)):
        model = Denoiser(config, generator=torch.Generator().manual_seed(seed))
        save_weights(model, folder / name)
        for file in tokenizer.files:
            shutil.copy(file, folder / name)
    return folder


def refused(capsys, *arguments: str) -> str:
    """Run a command that must end with code 2 and one sentence, which is returned."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    sentence = captured.err.strip().splitlines()[-1]
    assert sentence.startswith("error: ") and "Traceback" not in captured.err
    assert captured.out == ""
    return sentence


def test_help_is_instant_and_lists_the_commands():
    script = (
        "import sys\n"
        "from mezzotint.eval.__main__ import build_parser\n"
        "print(build_parser().format_help())\n"
        "print('LOADED', sorted({'torch', 'numpy', 'matplotlib', 'datasets'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "LOADED []" in done.stdout
    for command in ("speed", "bound", "retrieval", "report", "compare", "generate", "doctor"):
        assert f"    {command}" in done.stdout


def test_bound_is_scored_resumed_and_the_same_again(made, tmp_path, capsys):
    out = tmp_path / "bound.jsonl"
    command = [
        "bound",
        str(made / "release"),
        "--data",
        str(made / "prepared"),
        "--row-length",
        "64",
        "--out",
        str(out),
    ]
    assert main([*command, "--rows", "4"]) == 0
    first = capsys.readouterr().out
    assert "bits/byte,  standard error 0." in first and "release: 4 rows, 256 tokens" in first
    lines = out.read_text()
    assert main([*command, "--rows", "4"]) == 0
    assert capsys.readouterr().out == first and out.read_text() == lines
    rows = [json.loads(line) for line in lines.splitlines()[1:]]
    assert len({row["key"] for row in rows}) == 4 and all(row["values"]["bytes"] > 0 for row in rows)


def test_a_bound_that_was_cut_anywhere_ends_with_the_same_table(made, tmp_path, capsys):
    """As kill -9 leaves the file: whole rows, then a part of one."""
    out = tmp_path / "bound.jsonl"
    command = ["bound", str(made / "release"), "--data", str(made / "prepared"), "--row-length", "64", "--rows", "3"]
    assert main([*command, "--out", str(out)]) == 0
    table, lines = capsys.readouterr().out, out.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        out.write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        assert main([*command, "--out", str(out)]) == 0
        assert capsys.readouterr().out == table
        rows = [json.loads(line) for line in out.read_text().splitlines()[1:]]
        whole = [json.loads(line) for line in lines[1:]]
        assert [row | {"time": 0} for row in rows] == [row | {"time": 0} for row in whole]


def test_a_dry_run_of_bound_says_bytes_and_time_and_writes_nothing(made, tmp_path, capsys, monkeypatch):
    """One line for all rows, one for each document; what does not fit is said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words " * 20)
    command = ["bound", str(made / "release"), "--dry-run"]
    assert main([*command, "--data", str(made / "prepared"), "--row-length", "64", "--rows", "4"]) == 0
    printed = capsys.readouterr().out
    assert "| release | rows | 4 | 64 | 0.00 GB" in printed and "in all at least" in printed
    monkeypatch.setattr("mezzotint.eval.scoring_plan.available_bytes", lambda device: 1000)
    assert main([*command, "--document", "a.txt"]) == 0
    printed = capsys.readouterr().out
    assert "| release | a.txt | 1 | " in printed and "does not fit" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_work_of_a_bound_is_counted_by_hand():
    """Blocks of 4: two whole ones before the third, which two draws read; and a context that is only committed."""
    config = preset("debug", "attention", pattern="A", vocab_size=32, block_length=4, chunk_length=4)
    token, pair = linear_flops_per_token(config), attention_flops_per_pair(config)
    head = head_flops_per_token(config)
    clean = 8 * token + (4 + 8) * 4 * pair
    alone = scoring_flops(config, context=8, scored=3, draws=2)
    assert alone == clean + 2 * (4 * token + 12 * 4 * pair) + 3 * head
    whole = scoring_flops(config, context=0, scored=11, draws=2)
    assert whole == clean + 2 * (12 * token + (4 + 8 + 12) * 4 * pair) + 11 * head


def test_a_results_file_of_another_release_is_refused(made, tmp_path, capsys):
    out = tmp_path / "bound.jsonl"
    arguments = ("--data", str(made / "prepared"), "--row-length", "64", "--rows", "2", "--out", str(out))
    assert main(["bound", str(made / "release"), *arguments]) == 0
    capsys.readouterr()
    before = out.read_text()
    assert "another release (release)" in refused(capsys, "bound", str(made / "other"), *arguments)
    renamed = tmp_path / "elsewhere" / "release"
    shutil.copytree(made / "other", renamed)
    assert "other weights named 'release'" in refused(capsys, "bound", str(renamed), *arguments)
    assert out.read_text() == before


def test_generate_prints_texts_and_costs(made, capsys):
    command = ["generate", str(made / "release"), "--prompt", "def area", "--max-new-tokens", "12", "--steps", "4"]
    assert main([*command, "--samples", "2"]) == 0
    printed = capsys.readouterr().out
    assert "--- sample 2 of 2" in printed and "NFE" in printed and "tokens/s" in printed
    assert main([*command, "--json", "--temperature", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["texts"]) == 1 and 0 <= found["new_tokens"][0] <= 12 and found["nfe"] >= 1
    assert main([*command, "--json", "--temperature", "0", "--seed", "9"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == found["texts"]


@pytest.mark.parametrize(
    "rule", [["--threshold", "0.5"], ["--entropy-bound", "0.2"], ["--ancestral", "4"], ["--first-hitting"]]
)
def test_every_reveal_rule_can_be_asked_for(made, capsys, rule):
    assert main(["generate", str(made / "release"), "--max-new-tokens", "4", "--json", *rule]) == 0
    assert json.loads(capsys.readouterr().out)["nfe"] >= 1


def test_speed_of_a_release_writes_all_its_files(made, tmp_path, capsys):
    out = tmp_path / "speed.jsonl"
    command = ["speed", str(made / "release"), str(made / "other"), "--contexts", "32", "--quick", "--out", str(out)]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "| release |" in table and "| other |" in table
    for name in ("speed.md", "speed.csv", "speed-latency.png", "speed-memory.png"):
        assert (tmp_path / name).stat().st_size > 100
    lines = out.read_text()
    assert main(command) == 0
    assert out.read_text() == lines and capsys.readouterr().out == table


def test_a_table_of_someone_else_is_not_overwritten(made, tmp_path, capsys):
    (tmp_path / "notes.md").write_text("# Notes\n")
    command = ("speed", str(made / "release"), "--contexts", "32", "--out", str(tmp_path / "notes.jsonl"))
    assert "notes.md was not written by mezzotint-eval" in refused(capsys, *command)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]


def test_what_the_commands_write_can_be_reported_and_compared(made, tmp_path, capsys):
    """Real rows of retrieval, bound and speed: the report and the comparison find the fields that they read."""
    files = [str(tmp_path / f"{name}.jsonl") for name in ("release", "other")]
    for name, out in zip(("release", "other"), files):
        release = str(made / name)
        bound = ["--data", str(made / "prepared"), "--row-length", "64", "--rows", "4"]
        assert main(["bound", release, *bound, "--out", out]) == 0
        asked = ["--tasks", "copy:symbols=16", "--lengths", "64", "--samples", "4", "--draws", "4", "--floor"]
        assert main(["retrieval", release, *asked, "--training-length", "32", "--out", out]) == 0
        assert main(["speed", release, "--contexts", "32,64", "--quick", "--in-process", "--out", out]) == 0
    capsys.readouterr()
    assert main(["report", *files, "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.md").read_text()
    for part in (
        "## retrieval/copy",
        "| 2x | yes | 4 |",
        "| 2x | removed | 4 |",
        "## bound",
        "<= ",
        "## speed: ",
        "## Environment",
    ):
        assert part in page, part
    assert "rows of an older version" not in page and "Every cell has its figures." in page
    assert {"bound-position.png", "bound-masks.png", "speed-latency.png"} <= {
        p.name for p in (tmp_path / "report").iterdir()
    }
    capsys.readouterr()
    assert main(["compare", *files]) == 0
    printed = capsys.readouterr().out
    assert "A is release, B is other; rows without a partner: 0 of A, 0 of B" in printed
    assert "| bound, rows of 64 | nats/token (<=) | 4 |" in printed
    assert "| retrieval/copy, 64 tokens | correct | 4 |" in printed and "needle removed" in printed


def test_a_dry_run_measures_nothing_and_says_what_will_not_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["speed", "--presets", "3b", "--backbones", "attention,mamba", "--contexts", "1k,64m", "--dry-run"]) == 0
    )
    printed = capsys.readouterr().out
    assert printed.count("does not fit") >= 1 and "3b-mamba" in printed and " GiB)" in printed
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_versions_and_backends(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and " of memory available" in printed
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in found["backends"]} >= {"attention", "ssd", "conv"}
    for op in {row["op"] for row in found["backends"]}:
        assert sum(row["used"] for row in found["backends"] if row["op"] == op) == 1
    assert all(row["used"] or row["reason"] for row in found["backends"])


def test_bad_input_of_speed(capsys, tmp_path):
    assert "nearest of debug, 10m, 125m, 1b, 3b is '3b'" in refused(capsys, "speed", "--presets", "3bb")
    assert "is 'mamba'" in refused(capsys, "speed", "--presets", "debug", "--backbones", "mambo")
    assert "nothing to measure" in refused(capsys, "speed")
    assert "no number of tokens" in refused(capsys, "speed", "--presets", "debug", "--contexts", "1k,many")
    assert "shorter than a block" in refused(capsys, "speed", "--presets", "debug", "--contexts", "3")
    assert "from 1 to 1024" in refused(capsys, "speed", "--presets", "debug", "--threads", "100000")
    assert "unknown dtype 'int3'" in refused(capsys, "speed", "--presets", "debug", "--dtype", "int3")
    assert "unknown device" in refused(capsys, "speed", "--presets", "debug", "--device", "abacus")
    debug = ("speed", "--presets", "debug")
    assert "is no number of bytes" in refused(capsys, *debug, "--memory-limit", "lots")
    assert "above 0 seconds" in refused(capsys, *debug, "--timeout", "0")
    assert "leave --in-process out" in refused(capsys, *debug, "--in-process", "--memory-limit", "8G")
    assert "captured on a CUDA device" in refused(capsys, *debug, "--modes", "eager,cudagraph")
    assert "unknown mode 'lazy'" in refused(capsys, *debug, "--modes", "lazy")
    assert "several numbers of tokens" in refused(capsys, *debug, "--real-prefill", "1k,2k")
    assert "less than a block" in refused(capsys, *debug, "--check-fill", "4")
    assert "--most-rows is 0" in refused(capsys, *debug, "--batches", "max", "--most-rows", "0")
    assert "at least 1" in refused(capsys, *debug, "--batches", "0")
    with pytest.raises(SystemExit) as ended:
        main([*debug, "--fast"])
    assert ended.value.code == 2 and "unrecognized arguments: --fast" in capsys.readouterr().err
    only = ("speed", "--presets", "3b", "--backbones", "attention", "--contexts", "1024m")
    assert "GiB) are available" in refused(capsys, *only, "--out", str(tmp_path / "r.jsonl"))
    assert not (tmp_path / "r.jsonl").exists()


def test_bad_input_of_a_release(made, tmp_path, capsys):
    assert "is no release folder" in refused(capsys, "generate", str(tmp_path / "nowhere"))
    bare = tmp_path / "bare"
    shutil.copytree(made / "release", bare)
    (bare / "model.safetensors").unlink()
    assert "no weights" in refused(capsys, "generate", str(bare))
    assert "no weights" in refused(capsys, "speed", str(bare))
    newer = tmp_path / "newer"
    shutil.copytree(made / "release", newer)
    config = json.loads((newer / "config.json").read_text())
    (newer / "config.json").write_text(json.dumps(config | {"format": 99}))
    assert "has format 99" in refused(capsys, "bound", str(newer), "--data", str(made / "prepared"))


def test_bad_input_of_generate(made, tmp_path, capsys):
    release = str(made / "release")
    mask = str(load_tokenizer(release).mask_id)
    assert "<mask> id" in refused(capsys, "generate", release, "--prompt-ids", f"9,{mask}")
    assert "outside the vocabulary" in refused(capsys, "generate", release, "--prompt-ids", "999999")
    assert "give one of" in refused(capsys, "generate", release, "--steps", "4", "--threshold", "0.5")
    assert "at least 1" in refused(capsys, "generate", release, "--max-new-tokens", "0")
    assert "fit into 64 bits" in refused(capsys, "generate", release, "--seed", str(2**64))
    assert "cannot read the prompt file" in refused(capsys, "generate", release, "--prompt-file", str(tmp_path / "x"))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "no UTF-8" in refused(capsys, "generate", release, "--prompt-file", str(tmp_path / "latin"))


def test_a_vocabulary_larger_than_the_tokenizer_decodes(made, tmp_path, capsys):
    tokenizer = load_tokenizer(made / "release")
    config = load_config(made / "release")
    model = Denoiser(dataclasses.replace(config, vocab_size=4 * config.vocab_size), generator=torch.Generator())
    save_weights(model, tmp_path)
    shutil.copy(tokenizer.files[0], tmp_path)
    assert main(["generate", str(tmp_path), "--max-new-tokens", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] == [32]


def test_bad_input_of_bound(made, tmp_path, capsys):
    release, prepared = str(made / "release"), str(made / "prepared")
    assert "no prepared folder" in refused(capsys, "bound", release, "--data", str(tmp_path))
    assert "set row_length to 64" in refused(capsys, "bound", release, "--data", prepared, "--row-length", "65")
    assert "--threads is 0" in refused(capsys, "bound", release, "--data", prepared, "--threads", "0")
    long = ("--data", prepared, "--row-length", str(2**40), "--out", str(tmp_path / "long.jsonl"))
    assert "take a shorter --row-length" in refused(capsys, "bound", release, *long)
    assert not (tmp_path / "long.jsonl").exists()
    assert "--rows is 0" in refused(capsys, "bound", release, "--data", prepared, "--rows", "0")
    (tmp_path / "file").write_text("")
    unwritable = str(tmp_path / "file" / "out.jsonl")
    assert "cannot write results" in refused(capsys, "bound", release, "--data", prepared, "--out", unwritable)
    foreign = tmp_path / "foreign"
    tokenizer = small_tokenizer_of_another_text(tmp_path / "tokenizer")
    prepare(
        PrepareConfig(
            tokenizer=str(tokenizer), out=str(foreign), source=SourceConfig(input=str(tmp_path / "words")), workers=1
        )
    )
    out = tmp_path / "out.jsonl"
    assert "did not make the shards" in refused(capsys, "bound", release, "--data", str(foreign), "--out", str(out))
    assert not out.exists()


def small_tokenizer_of_another_text(folder: Path) -> Path:
    from mezzotint.data.train_tokenizer import TrainTokenizerConfig, train_tokenizer

    text = folder.parent / "words"
    text.mkdir()
    (text / "a.txt").write_text("entirely other words stand here, " * 60)
    train_tokenizer(TrainTokenizerConfig(out=str(folder), source=SourceConfig(input=str(text)), vocab_size=300))
    return folder

"""Reports and comparisons of results files: what they show, what they leave unaveraged, and what they refuse."""

import csv
import json

import pytest
from report_support import (
    bound_rows,
    harness_rows,
    retrieval_row,
    retrieval_rows,
    speed_rows,
    write_results,
)

from mezzotint.eval.__main__ import main
from mezzotint.eval.intervals import wilson
from mezzotint.eval.report_files import MARK
from mezzotint.eval.report_retrieval_plots import family

LENGTHS = {256: 1.0, 512: 0.9, 1024: 0.3, 4096: 0.0}


@pytest.fixture
def everything(tmp_path):
    """A results file of all commands, two subjects."""
    rows = retrieval_rows("mamba", LENGTHS | {4096: 0.9}) + retrieval_rows("attention", LENGTHS)
    rows += retrieval_rows("mamba", dict.fromkeys(LENGTHS, 0.1), needle=False)
    rows += bound_rows("mamba") + bound_rows("attention", worse=0.1)
    rows += harness_rows("mamba", right=40) + harness_rows("attention", right=30)
    rows += speed_rows("mamba", growth=0.0, fits=10**6, batches=(1, 2, 4)) + speed_rows("attention", growth=0.5)
    return write_results(tmp_path / "all.jsonl", rows)


def refused(capsys, *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err.strip()


def test_a_report_of_all_commands(everything, tmp_path, capsys):
    folder = tmp_path / "report"
    assert main(["report", str(everything), "--out", str(folder)]) == 0
    assert "subject(s)" in capsys.readouterr().out
    page = (folder / "report.md").read_text()
    assert page.startswith(MARK) and page.count("## ") == 6
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("report.md", "retrieval_passkey_haystack=noise-length.csv", "retrieval_passkey_haystack=noise-length.png"),
        *("retrieval_passkey_haystack=noise-depth.csv", "retrieval_passkey_haystack=noise-depth.png"),
        *("bound-all.csv", "bound-position.csv", "bound-position.png", "bound-masks.csv", "bound-masks.png"),
        *("lm-eval.csv", "speed.csv", "speed-latency.png", "speed-memory.png", "speed-batches.png"),
    }
    for name in names - {"report.md"}:
        assert f"({name})" in page
        if name.endswith(".png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert "Wilson" in page and "torch" in page and "## Cells without figures" in page
    assert "<= 2." in page and "<= 1.5000" in page
    first = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["report", str(everything), "--out", str(folder)]) == 0
    assert {path: path.read_bytes() for path in folder.iterdir()} == first


def test_lengths_are_never_averaged_and_intervals_are_wilsons(everything, tmp_path):
    assert main(["report", str(everything), "--out", str(tmp_path / "r")]) == 0
    with (tmp_path / "r" / "retrieval_passkey_haystack=noise-length.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4 + 4 + 4
    for line in lines:
        low, high = wilson(int(line["correct"]), 40)
        assert (float(line["low"]), float(line["high"])) == (low, high) and line["n"] == "40"
        assert float(line["multiple"]) == int(line["length"]) / 256
        assert line["truncated"] == "0" and float(line["fill_min"]) == 0.99
        assert int(line["empty"]) == int(line["no_end"]) == 40 - int(line["correct"])
    with (tmp_path / "r" / "retrieval_passkey_haystack=noise-depth.csv").open() as file:
        depths = [line for line in csv.DictReader(file) if line["subject"] == "mamba"]
    assert len(depths) == 40 and {line["n"] for line in depths} == {"4"}


def test_runs_of_several_seeds_share_a_colour():
    assert family("mamba-seed1") == family("mamba-seed12") == "mamba" != family("mamba2-seed1")
    assert family("attention-1e-3-seed1-stage3+yarn16") == "attention-1e-3-stage3+yarn16"
    assert family("hybrid_s3") == "hybrid" and family("models3") == "models3"


def test_what_was_not_learned_is_called_so(tmp_path):
    rows = retrieval_rows("good", {256: 1.0, 512: 0.0}) + retrieval_rows("poor", {256: 0.5, 512: 0.0})
    assert main(["report", str(write_results(tmp_path / "r.jsonl", rows)), "--out", str(tmp_path / "r")]) == 0
    assert "so longer ones say nothing): poor." in (tmp_path / "r" / "report.md").read_text()


def test_bounds_by_position_have_errors_over_rows(everything, tmp_path):
    assert main(["report", str(everything), "--out", str(tmp_path / "r")]) == 0
    with (tmp_path / "r" / "bound-position.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["from"] for line in lines] == ["0", "64", "128"] * 2
    for line in lines:
        assert 2.0 < float(line["nats_per_token"]) < 2.4 and 0 < float(line["error"]) < 0.1 and line["n"] == "12"
    with (tmp_path / "r" / "bound-masks.csv").open() as file:
        assert [line["from"] for line in csv.DictReader(file)] == [f"{i / 10}" for i in range(1, 10)] * 2


def test_a_cell_that_failed_as_a_whole_is_told(tmp_path):
    rows = retrieval_rows("mamba", {256: 1.0})
    whole = retrieval_row("mamba", 4096, 0, correct=False)
    whole["identity"] |= {"index": None, "depth": None}
    rows.append(whole | {"status": "oom", "values": {"needed_bytes": 7, "message": "a | b\nc"}})
    assert main(["report", str(write_results(tmp_path / "r.jsonl", rows)), "--out", str(tmp_path / "r")]) == 0
    page = (tmp_path / "r" / "report.md").read_text()
    assert "| mamba | - | 4096 | - | yes | 0 | - |" in page and "| oom | a \\| b c |" in page


def test_several_files_and_machines(tmp_path):
    here = write_results(tmp_path / "a.jsonl", speed_rows("mamba", growth=0.0))
    rows = speed_rows("mamba", growth=0.0)
    for row in rows:
        row["identity"] |= {"machine": "Another", "device": "cuda"}
    there = write_results(tmp_path / "b.jsonl", rows)
    assert main(["report", str(here), str(there), "--out", str(tmp_path / "r")]) == 0
    page = (tmp_path / "r" / "report.md").read_text()
    assert "## speed-1: A processor" in page and "## speed-2: Another" in page
    assert (tmp_path / "r" / "speed-2-latency.png").exists()


def test_files_that_contradict_each_other_are_refused(tmp_path, capsys):
    one = str(write_results(tmp_path / "one.jsonl", bound_rows("mamba")))
    same = str(write_results(tmp_path / "same.jsonl", bound_rows("mamba")))
    other = str(write_results(tmp_path / "other.jsonl", bound_rows("mamba", text="t2"), fingerprint="f2"))
    out = ("--out", str(tmp_path / "r"))
    assert "both hold bound of mamba, row 0" in refused(capsys, "report", one, same, *out)
    assert "different weights named 'mamba'" in refused(capsys, "report", one, other, *out)
    assert "cannot be read" in refused(capsys, "report", str(tmp_path / "no.jsonl"), *out)
    (tmp_path / "notes").write_text("my notes\n")
    assert "is not JSON" in refused(capsys, "report", str(tmp_path / "notes"), *out)
    empty = str(write_results(tmp_path / "empty.jsonl", []))
    (tmp_path / "empty.jsonl").write_text('{"format": 1, "subjects": {"mamba": "f1"}}\n')
    assert "no results yet" in refused(capsys, "report", empty, *out)
    (tmp_path / "newer.jsonl").write_text('{"format": 2, "subjects": {"mamba": "f1"}}\n')
    assert "is of format 2" in refused(capsys, "report", str(tmp_path / "newer.jsonl"), *out)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("change", ({"fill": 1.01}, {"truncated": 1}))
def test_scores_of_truncated_prompts_are_refused(tmp_path, capsys, change):
    rows = [*retrieval_rows("mamba", {256: 1.0}), retrieval_row("mamba", 512, 3, correct=True, **change)]
    path = str(write_results(tmp_path / "r.jsonl", rows))
    sentence = refused(capsys, "report", path, "--out", str(tmp_path / "r"))
    assert "1 prompts were truncated" in sentence and "length 512, index 3" in sentence


def test_files_of_others_are_not_overwritten(everything, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "report.md").write_text("# My report\n")
    assert "would be overwritten" in refused(capsys, "report", str(everything), "--out", str(folder))
    assert [path.name for path in folder.iterdir()] == ["report.md"]
    (folder / "report.md").rename(folder / "lm-eval.csv")
    assert "lm-eval.csv would be overwritten" in refused(capsys, "report", str(everything), "--out", str(folder))
    assert "cannot be written" in refused(capsys, "report", str(everything), "--out", str(everything / "x"))


def compared(capsys, *arguments: str) -> list[list[str]]:
    """The lines of the table that `compare` prints, as cells."""
    assert main(["compare", *arguments]) == 0
    printed = capsys.readouterr().out
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return lines[1:]


def test_compare_pairs_every_cell(everything, tmp_path, capsys):
    lines = compared(capsys, str(everything), "--subjects", "mamba", "attention", "--out", str(tmp_path / "c.md"))
    by_name = {(line[0], line[1]): line for line in lines}
    far = by_name["retrieval/passkey, 4096 tokens, haystack noise", "correct"]
    gained = int(far[7].split(" / ")[0])
    assert far[2] == "40" and far[7] == f"{gained} / 0" and gained > 30
    assert float(far[8]) == pytest.approx(2 * 0.5**gained, rel=1e-2) and far[6].startswith("+0.")
    near = by_name["retrieval/passkey, 256 tokens, haystack noise", "correct"]
    assert near[5] == "+0.0000" and near[8] == "1"
    bound = by_name["bound, rows of 256", "nats/token (<=)"]
    assert float(bound[5]) == pytest.approx(-0.1, abs=1e-4) and float(bound[8].strip("<")) < 1e-6
    piqa = by_name["lm-eval/piqa", "acc"]
    assert piqa[7] == "10 / 0" and float(piqa[8]) == pytest.approx(2 * 0.5**10, rel=1e-2)
    per_token = by_name["lm-eval/piqa", "nats/token (<=)"]
    assert per_token[2] == "50" and per_token[5] == "-0.2000" and ("lm-eval/piqa", "tokens") not in by_name
    assert all(float(line[9].strip("<")) >= float(line[8].strip("<")) for line in lines)
    assert (tmp_path / "c.md").read_text().startswith(MARK)
    backwards = {
        (line[0], line[1]): line for line in compared(capsys, str(everything), "--subjects", "attention", "mamba")
    }
    assert backwards["lm-eval/piqa", "acc"][7] == "0 / 10"


def test_compare_of_two_files_tells_what_has_no_partner(tmp_path, capsys):
    a = write_results(tmp_path / "a.jsonl", retrieval_rows("mamba", {256: 1.0, 512: 1.0}))
    b = write_results(tmp_path / "b.jsonl", retrieval_rows("other", {256: 0.5}), fingerprint="f2")
    assert main(["compare", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "A is mamba, B is other; rows without a partner: 40 of A, 0 of B" in printed
    assert main(["compare", str(a), str(a), "--subjects", "mamba", "mamba"]) == 0
    assert "| +0.0000 |" in capsys.readouterr().out


def test_compare_refuses_prompts_that_differ(tmp_path, capsys):
    rows = retrieval_rows("mamba", {256: 1.0})
    changed = [json.loads(json.dumps(row)) for row in retrieval_rows("other", {256: 1.0})]
    changed[7]["values"]["prompt"] = "something else"
    a, b = (str(write_results(tmp_path / name, r)) for name, r in (("a.jsonl", rows), ("b.jsonl", changed)))
    sentence = refused(capsys, "compare", a, b)
    assert "the prompts of retrieval/passkey, length 256, index 7 differ between mamba and other" in sentence
    for row in changed:
        row["identity"]["vocabulary"] = "another tokenizer"
    c = str(write_results(tmp_path / "c.jsonl", changed))
    assert "the prompts of retrieval/passkey differ" in refused(capsys, "compare", a, c)
    bounds = [str(write_results(tmp_path / f"{text}.jsonl", bound_rows(text, text=text))) for text in ("t1", "t2")]
    assert "the prompts of bound differ" in refused(capsys, "compare", *bounds)
    asked = harness_rows("other", right=3)
    asked[0]["values"]["prompts"] = "h2"
    tasks = [str(write_results(tmp_path / f"{i}.jsonl", r)) for i, r in enumerate((harness_rows("a", right=3), asked))]
    assert "the prompts of lm-eval/piqa differ" in refused(capsys, "compare", *tasks)


def test_bad_input_of_compare(everything, tmp_path, capsys):
    one, two = str(everything), str(write_results(tmp_path / "two.jsonl", bound_rows("third")))
    assert "Give --subjects A B out of: attention, mamba" in refused(capsys, "compare", one)
    assert "holds no subject 'mamma'; it holds attention, mamba" in refused(
        capsys, "compare", one, "--subjects", "mamma", "mamba"
    )
    assert "with itself" in refused(capsys, "compare", one, "--subjects", "mamba", "mamba")
    assert "3 results files" in refused(capsys, "compare", one, one, two)
    assert "between 0 and 1" in refused(
        capsys, "compare", one, "--subjects", "mamba", "attention", "--confidence", "95"
    )
    speed = [str(write_results(tmp_path / f"{name}.jsonl", speed_rows(name, growth=0))) for name in ("x", "y")]
    assert "no cell in common" in refused(capsys, "compare", *speed)

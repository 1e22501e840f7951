"""The study of cache policies: its task, its commands, and its tables from rows made by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from mezzotint.data.rows import RowSource
from mezzotint.eval.caches_file import read_prompts
from mezzotint.eval.results import ResultsFile
from mezzotint.models.weights import load_model

STUDIES = Path(__file__).resolve().parents[1] / "eval" / "studies"
NAMES = ("teaching", "caches_task", "caches_teach", "caches_report", "caches")


@pytest.fixture(scope="module")
def studies():
    """The modules by name; as scripts they find each other because they lie in one folder."""
    sys.path.insert(0, str(STUDIES))
    yield {name: importlib.import_module(name) for name in NAMES}
    sys.path.remove(str(STUDIES))


def test_every_question_has_its_answer_in_an_entry_and_files_hold_the_same_rows(studies, tmp_path):
    task = studies["caches_task"].Recall(keys=6, values=3, asked=4)
    rows = task.rows(50, torch.Generator().manual_seed(1))
    assert rows.shape == (50, 14) and int(rows.min()) >= 3 and int(rows.max()) < task.vocabulary
    for row in rows.tolist():
        entries = dict(divmod(token - 3, 3) for token in row[:6])
        assert sorted(entries) == list(range(6))
        asked = [token - 3 - 18 for token in row[6::2]]
        assert len(set(asked)) == 4 and [entries[key] for key in asked] == [token - 3 - 18 - 6 for token in row[7::2]]
    own = read_prompts(task.write_prompts(tmp_path / "p.jsonl", 5, seed=1, shared=((0, 2), (3, 5))))
    assert own.length == 14 and own.spans == ((0, 2), (3, 5)) and len(own.samples) == 5
    assert [place for start, end in own.samples[0].spans for place in range(start, end)] == (task.answers - 6).tolist()
    source = RowSource(task.write_text(tmp_path / "text", 5, seed=1), 14, 14, align=False)
    want = [sample.tokens + sample.target for sample in own.samples]
    assert [source[i].tokens.tolist() for i in range(5)] == want


def test_a_step_of_teaching_changes_all_kinds_and_leaves_a_release_once(studies, tmp_path):
    teach = studies["caches_teach"]
    lesson = teach.Lesson(task=studies["caches_task"].Recall(asked=4), steps=2, rows=4, look=2)
    for kind in ("row", "attention", "hybrid"):
        out = teach.teach_recall(kind, lesson, tmp_path / kind)
        assert json.loads((out / "training.json").read_text())["steps"] == 2
        model = load_model(out)
        fresh = teach.Denoiser(model.config, generator=torch.Generator().manual_seed(lesson.seed))
        assert not torch.equal(model.embed.weight, fresh.embed.weight)
        assert model.config.block_length == (16 if kind == "row" else 8)
    written = (tmp_path / "row" / "training.json").stat().st_mtime_ns
    teach.teach_recall("row", lesson, tmp_path / "row")
    assert (tmp_path / "row" / "training.json").stat().st_mtime_ns == written


def row(policy: str, index: int, part: float, *, recomputed: float = 12.0) -> dict:
    identity = {"policy": policy, "index": index, "length": 20, "shared": "0-4,4-8"}
    return {"identity": identity, "values": {"part": part, "tokens_recomputed": recomputed, "tokens_uncached": 20.0}}


def test_what_soft_tokens_recover_and_what_is_recomputed(studies):
    """None 1, plain 0.5, trained 0.75 in the mean: half is recovered; a document token recomputed is seen."""
    report = studies["caches_report"]
    full, plain, trained = [1.0] * 4, [0.0, 1.0, 0.5, 0.5], [1.0, 0.5, 0.5, 1.0]
    assert report.recovered(full, plain, trained)[0] == 0.5
    names = {"none": full, "packet": plain, "packet:adapters=0f": trained}
    rows = [row(name, i, part) for name, parts in names.items() for i, part in enumerate(parts)]
    text = report.packet_table(rows)
    assert "| packet, trained soft tokens | 4 | 0.750 |" in text and "loses: 0.50, 95%" in text
    assert text.count("| 0 |") == 2
    rows[5] = row("packet", 1, 1.0, recomputed=15.0)
    assert "| 3 |" in report.packet_table(rows)


def test_anchors_are_ordered_by_their_ratio_beside_full_recomputation(studies):
    report = studies["caches_report"]
    names = {"acache:ratio=1.0": 1.0, "none": 1.0, "acache": 0.75, "acache:ratio=0.0": 0.5}
    rows = [row(name, i, share - 0.1 * (i % 2)) for name, share in names.items() for i in range(4)]
    lines = report.affix_table({"infix": rows}).splitlines()[2:]
    assert [line.split("|")[2].strip() for line in lines] == ["0", "0.2", "1", "full recomputation"]
    assert "| -0.500 ± 0.000 |" in lines[0] and "| 0.700 |" in lines[1]


def test_a_report_never_writes_over_tables_whose_answers_are_elsewhere(studies, tmp_path, capsys):
    made = tmp_path / "made"
    made.mkdir()
    (made / "caches.md").write_text("# Cache policies\n\n## KV Packet: documents read alone\n\n| a |\n\n## Reading\n")
    command = ["--report", "--out", str(tmp_path / "out"), "--folder", str(made)]
    assert studies["caches"].main(command) == 2
    assert "holds no answers yet" in capsys.readouterr().err
    rows = [row(name, i, 0.5) for name in ("none", "acache") for i in range(4)]
    (tmp_path / "out" / "answers").mkdir(parents=True)
    with ResultsFile(tmp_path / "out" / "answers" / "affix-infix.jsonl", subjects={"row": "0"}) as results:
        for one in rows:
            results.append(one["identity"] | {"subject": "row"}, status="ok", values=one["values"])
    assert studies["caches"].main(command) == 2
    assert "(KV Packet: documents read alone): run those parts too" in capsys.readouterr().err
    assert "| a |" in (made / "caches.md").read_text()
    (made / "caches.md").write_text("# Cache policies\n\n## ACache: a shared part at three places\n\n## Reading\n")
    assert studies["caches"].main(command) == 0
    assert "| infix |" in (made / "caches.md").read_text()


def test_the_commands_are_told_and_none_is_run(studies, tmp_path, capsys):
    assert studies["caches"].main(["--dry-run", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert told.count("mezzotint.eval caches") == 3 + 1 + 4 + 4 + 1 and "adapters" in told  # the last: inside a block
    assert not (tmp_path / "out").exists()
    assert studies["caches"].main(["--parts", "afix"]) == 2
    assert "no part 'afix'" in capsys.readouterr().err

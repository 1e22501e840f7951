"""The results file resumes, repairs a torn last line, and refuses what is not its own, changing nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mezzotint.data.errors import InputError
from mezzotint.eval.results import ResultsFile, cell_key

SUBJECTS = {"demo": "a1"}


def write_two(path: Path) -> None:
    with ResultsFile(path, subjects=SUBJECTS) as file:
        file.append({"context": 1024}, status="ok", values={"seconds": 0.5})
        file.append({"context": 4096}, status="oom", values={})


def test_key_ignores_the_order_of_fields_but_no_value():
    assert cell_key({"a": 1, "b": [2]}) == cell_key({"b": [2], "a": 1})
    assert cell_key({"a": 1}) != cell_key({"a": 2}) != cell_key({"a": "2"})


def test_rows_come_back_and_done_cells_are_not_written_twice(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    write_two(path)
    with ResultsFile(path, subjects=SUBJECTS) as file:
        assert file.done({"context": 1024}) and file.done({"context": 4096}) and not file.done({"context": 2})
        assert file.get({"context": 1024})["values"] == {"seconds": 0.5}
        with pytest.raises(AssertionError, match="already in"):
            file.append({"context": 1024}, status="ok", values={})
        assert [row["status"] for row in file.rows()] == ["ok", "oom"]


def test_failed_cells_are_tried_again_and_the_latest_row_counts(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, subjects=SUBJECTS) as file:
        file.append({"context": 1}, status="error", values={"message": "x"})
        assert not file.done({"context": 1})
        file.append({"context": 1}, status="ok", values={})
    with ResultsFile(path, subjects=SUBJECTS) as file:
        assert [row["status"] for row in file.rows()] == ["ok"]


def test_every_cut_of_the_file_gives_the_same_final_table(tmp_path):
    path = tmp_path / "results.jsonl"
    write_two(path)
    whole = path.read_bytes()
    heading = whole.index(b"\n") + 1
    for cut in range(heading, len(whole), 7):
        path.write_bytes(whole[:cut])
        with ResultsFile(path, subjects=SUBJECTS) as file:
            for context, status in ((1024, "ok"), (4096, "oom")):
                if not file.done({"context": context}):
                    file.append({"context": context}, status=status, values={})
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["identity"]["context"] for line in lines[1:]] == [1024, 4096]


def test_a_torn_heading_starts_anew(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"format": 1, "subj')
    write_two(path)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"format": 1, "subjects": {"other": "a1"}}\n', "another release .other."),
        ('{"format": 1, "subjects": {"demo": "b2"}}\n', "other weights named 'demo'"),
        ('{"format": 9, "subjects": {"demo": "a1"}}\n', "format 9"),
        ("some notes of mine\n", "line 1 is not JSON"),
        ("notes without an end of line", "is no results file"),
        ('{"key": "x"}\n', "no row of a results file"),
        ("[1, 2]\n", "no row of a results file"),
        ('{"format": 1, "subjects": {"other": "a1"}}\n{"torn', "another release"),
    ],
)
def test_foreign_files_are_refused_and_left_as_they_are(tmp_path, content, sentence):
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=sentence):
        ResultsFile(path, subjects=SUBJECTS)
    assert path.read_text() == content


def test_a_new_subject_may_join(tmp_path):
    path = tmp_path / "results.jsonl"
    write_two(path)
    with ResultsFile(path, subjects={"demo": "a1", "second": "c3"}) as file:
        assert len(file.rows()) == 2
    with ResultsFile(path, subjects={"second": "c3"}) as file:
        assert file.subjects == {"demo": "a1", "second": "c3"}


def test_two_writers_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, subjects=SUBJECTS), pytest.raises(InputError, match="another process"):
        ResultsFile(path, subjects=SUBJECTS)


def test_unwritable_output_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write results"):
        ResultsFile(tmp_path / "file" / "results.jsonl", subjects=SUBJECTS)


def test_rows_are_on_disk_when_the_process_is_killed(tmp_path):
    path = tmp_path / "results.jsonl"
    script = (
        "import os, signal, sys\n"
        "from mezzotint.eval.results import ResultsFile\n"
        "file = ResultsFile(sys.argv[1], subjects={'demo': 'a1'})\n"
        "file.append({'context': 1}, status='ok', values={})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], env=os.environ, check=False)
    assert done.returncode == -9
    with ResultsFile(path, subjects=SUBJECTS) as file:
        assert file.done({"context": 1})

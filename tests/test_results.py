"""The results file resumes, repairs a torn last line, and refuses what is not its own, changing nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mezzotint.data.errors import InputError
from mezzotint.eval import results
from mezzotint.eval.environment import describe, environment
from mezzotint.eval.results import ResultsFile, cell_key, read_results

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


@pytest.mark.parametrize("status", ("error", "timeout", "oom", "skipped_predicted_oom"))
def test_failed_cells_are_tried_again_once_and_only_when_asked(tmp_path, status):
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, subjects=SUBJECTS) as file:
        file.append({"context": 1}, status=status, values={"message": "x"})
        file.append({"context": 2}, status="noisy", values={})
        assert file.done({"context": 1})
    with ResultsFile(path, subjects=SUBJECTS) as file:
        assert file.done({"context": 1})
    with ResultsFile(path, subjects=SUBJECTS, retry_failed=True) as file:
        assert not file.done({"context": 1}) and file.done({"context": 2})
        file.append({"context": 1}, status=status, values={"message": "again"})
        assert file.done({"context": 1}), "one further try a run"
    assert [row["values"] for row in read_results(path).rows.values()] == [{"message": "again"}, {}]


def test_rows_know_what_they_were_made_with(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    for cpu, contexts in (("one", (1, 2)), ("one", (3,)), ("other", (4,)), ("other", ())):
        monkeypatch.setattr(results, "environment", lambda cpu=cpu: {"cpu": cpu})
        with ResultsFile(path, subjects=SUBJECTS) as file:
            for context in contexts:
                file.append({"context": context}, status="ok", values={})
    found = read_results(path)
    assert found.environments == [{"cpu": "one"}, {"cpu": "other"}] and found.subjects == SUBJECTS
    places = {row["identity"]["context"]: found.made_with[key] for key, row in found.rows.items()}
    assert places == {1: 0, 2: 0, 3: 0, 4: 1}
    assert len(path.read_text().splitlines()) == 6, "a heading only where something changed and a row follows"


def test_the_environment_names_versions_and_machine():
    found = environment()
    assert found["packages"]["torch"] and found["cpu"] and len(found["code"]) == 12
    assert (found["cpu"] in describe(found) and "no CUDA device" in describe(found)) or found["cards"]
    json.dumps(found)


def test_a_file_that_is_being_written_can_be_read(tmp_path):
    path = tmp_path / "results.jsonl"
    write_two(path)
    with path.open("ab") as file:
        file.write(b'{"key": "torn')
    content = path.read_bytes()
    assert len(read_results(path).rows) == 2 and path.read_bytes() == content
    with pytest.raises(InputError, match="cannot be read"):
        read_results(tmp_path / "nowhere.jsonl")


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
        ('{"format": 1, "subjects": {"demo": "a1"}}\n{"key": "x"}\n', "line 2 is no row of a results file"),
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


def run_fake(path: Path) -> None:
    """What every command does, fast: forty cells of some milliseconds each, their outcome a function of the cell."""
    with ResultsFile(path, subjects=SUBJECTS) as file:
        for cell in range(40):
            identity = {"task": "fake", "subject": "demo", "cell": cell}
            if not file.done(identity):
                time.sleep(0.002)
                status = "oom" if cell % 7 == 3 else "error" if cell % 11 == 5 else "ok"
                file.append(identity, status=status, values={"square": cell * cell, "text": "x" * 300})


def table(path: Path) -> list[tuple]:
    return [(row["identity"], row["status"], row["values"]) for row in read_results(path).rows.values()]


@pytest.mark.parametrize("seed", range(4))
def test_kill_9_at_any_moment_and_run_again_gives_the_same_table(tmp_path, seed):
    run_fake(tmp_path / "whole.jsonl")
    path, rng, kills = tmp_path / "killed.jsonl", random.Random(seed), 0
    while True:
        child = os.fork()
        if child == 0:
            try:
                run_fake(path)
                os._exit(0)
            except BaseException:
                os._exit(1)
        time.sleep(rng.uniform(0, 0.04))
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        assert code == -signal.SIGKILL, "a run that was not killed failed"
        kills += 1
        assert kills < 500
    assert kills >= 2
    assert table(path) == table(tmp_path / "whole.jsonl")
    keys = [json.loads(line).get("key") for line in path.read_text().splitlines()]
    assert len(keys) == 41 and len(set(keys)) == 41, "no row twice"

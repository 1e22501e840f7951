"""A cell in a process of its own: answers, time limits, memory limits, crashes, and the death of the parent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mezzotint.eval import isolated
from mezzotint.eval.isolated import run_isolated

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])]))


def gone(process: int) -> bool:
    """Whether a process has ended, waiting a moment for it."""
    for _ in range(100):
        status = Path(f"/proc/{process}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_the_answer_comes_from_another_process_whatever_it_prints():
    outcome = run_isolated("isolated_support:add", {"a": 2, "b": 3})
    assert outcome.status == "ok" and outcome.values["sum"] == 5 and outcome.values["process"] != os.getpid()


def test_a_time_limit_ends_the_process(tmp_path):
    mark = tmp_path / "pid"
    outcome = run_isolated("isolated_support:sleep", {"seconds": 60, "mark": str(mark)}, timeout=3)
    assert outcome.status == "timeout" and outcome.values["timeout_s"] == 3
    assert not mark.exists() or gone(int(mark.read_text()))


def test_a_crash_is_an_error_with_its_last_line():
    outcome = run_isolated("isolated_support:crash", {"message": "the third wheel fell off"})
    assert outcome.status == "error" and outcome.values["message"] == "ValueError: the third wheel fell off"
    outcome = run_isolated("isolated_support:die", {"number": int(signal.SIGSEGV)})
    assert outcome.status == "error" and outcome.values["message"] == "ended by SIGSEGV: about to die"


def test_memory_that_runs_out_is_oom_however_it_shows():
    limit = 400 * 2**20
    assert run_isolated("isolated_support:take", {"count": 2**20}, memory_limit=limit).values["bytes"] == 2**20
    outcome = run_isolated("isolated_support:take", {"count": 2**30}, memory_limit=limit)
    assert outcome.status == "oom" and "MemoryError" in outcome.values["message"]
    assert run_isolated("isolated_support:abort_for_memory", {}).status == "oom"
    too_low = run_isolated("isolated_support:take", {"count": 1}, memory_limit=2**20)
    assert too_low.status == "oom", "not even the interpreter fits"


def test_a_kill_is_put_down_to_memory_only_where_the_kernel_counted_one(monkeypatch):
    assert run_isolated("isolated_support:die", {"number": int(signal.SIGKILL)}).status == "error"
    counts = iter((3, 4))
    monkeypatch.setattr(isolated, "_oom_kills", lambda: next(counts))
    assert run_isolated("isolated_support:die", {"number": int(signal.SIGKILL)}).status == "oom"


def test_a_child_whose_parent_is_gone_does_nothing(tmp_path):
    request = {"function": "isolated_support:sleep", "arguments": {"seconds": 0, "mark": str(tmp_path / "mark")}}
    request |= {"memory_limit": None, "parent": 2**22 + 1}
    command = [sys.executable, "-m", "mezzotint.eval.isolated"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "mark").exists()


def test_the_child_dies_with_its_parent(tmp_path):
    mark = tmp_path / "pid"
    script = (
        "from mezzotint.eval.isolated import run_isolated\n"
        f"run_isolated('isolated_support:sleep', {{'seconds': 60, 'mark': {str(mark)!r}}})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    while not (mark.exists() and mark.read_text()):
        time.sleep(0.05)
        assert parent.poll() is None
    parent.kill()
    parent.wait()
    assert gone(int(mark.read_text()))

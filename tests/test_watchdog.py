"""A rank that hangs, however it hangs, ends with its stacks on the disk, and takes the ranks beside it along."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mezzotint.training import outcome
from mezzotint.training.watchdog import Watchdog, remove_left

LIMIT = 1.5
PROGRAM = """
import ctypes, sys, time
from pathlib import Path
from mezzotint.training.watchdog import Watchdog

def beating():
    print("ready", flush=True)
    while True:
        dog.beat("step", 3)
        time.sleep(0.05)

def hanging():
    dog.beat("data", 5)
    print("ready", flush=True)
    time.sleep(60)

def holding():  # the interpreter lock: a call that PyDLL makes does not let go of it
    dog.beat("data", 5)
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(128)  # zeros: a pthread mutex that is free
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

folder, rank, world, limit, what = sys.argv[1:]
with Watchdog(Path(folder), rank=int(rank), world=int(world), limit=float(limit)) as dog:
    {"beating": beating, "hanging": hanging, "holding": holding}[what]()
"""


def rank(
    folder: Path, number: int, what: str, *, world: int = 1, limit: float = LIMIT, before: str = ""
) -> subprocess.Popen:
    arguments = [
        sys.executable,
        "-c",
        f"from mezzotint.training import watchdog; {before}\n" + PROGRAM,
        str(folder),
        str(number),
        str(world),
        str(limit),
        what,
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def stacks(folder: Path, number: int) -> str:
    return (folder / "stacks" / f"rank-{number}.txt").read_text()


@pytest.fixture
def started():
    """Processes of a test, which end with it even when it fails."""
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_hang_ends_with_stacks_a_sentence_and_an_outcome(tmp_path, started):
    began = time.monotonic()
    process = rank(tmp_path, 0, "hanging")
    started.append(process)
    assert process.wait(timeout=30) == outcome.HUNG
    assert time.monotonic() - began < LIMIT + 10
    said = process.stderr.read()
    assert "no sign of life from rank 0 for 1.5 s in phase 'data' (after step 5" in said and "Traceback" not in said
    assert "in hanging" in stacks(tmp_path, 0) and "most recent call first" in stacks(tmp_path, 0)
    ended = outcome.read(tmp_path)
    assert ended is not None and (ended.code, ended.step) == (outcome.HUNG, 5) and "phase 'data'" in ended.reason


def test_a_held_interpreter_lock_ends_with_stacks(tmp_path, started):
    process = rank(tmp_path, 0, "holding")
    started.append(process)
    assert process.wait(timeout=30) == outcome.CRASHED
    assert "Timeout" in stacks(tmp_path, 0) and "in holding" in stacks(tmp_path, 0)


@pytest.mark.parametrize("how", ["stopped", "holding"])
def test_stacks_of_every_rank_and_no_process_left(tmp_path, started, how):
    """Rank 0 waits for rank 1, which is stopped from outside or holds its interpreter lock."""
    other = rank(tmp_path, 1, "beating" if how == "stopped" else "holding", world=2, limit=60)
    started.append(other)
    assert json.loads((tmp_path / "ranks" / "rank-1.json").read_text())["pid"] == other.pid
    if how == "stopped":
        os.kill(other.pid, signal.SIGSTOP)
        while psutil.Process(other.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
    waiting = rank(tmp_path, 0, "hanging", world=2)
    started.append(waiting)
    assert waiting.wait(timeout=30) == outcome.HUNG
    assert other.wait(timeout=5) == -signal.SIGKILL
    ended = outcome.read(tmp_path)
    blamed = f", while rank 1 (process {other.pid}) on this host is stopped"  # not the rank that waits for it
    assert ended is not None and (blamed in ended.reason) == (how == "stopped")
    assert "in hanging" in stacks(tmp_path, 0)
    assert "asked by rank 0" in stacks(tmp_path, 1)
    assert ("in beating" if how == "stopped" else "in holding") in stacks(tmp_path, 1)


def test_a_process_that_only_has_the_id_of_a_rank_is_left_alone(tmp_path, started):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started.append(bystander)
    process = rank(tmp_path, 0, "hanging", world=2)
    started.append(process)
    place = json.loads((tmp_path / "ranks" / "rank-0.json").read_text())
    old = place | {"rank": 1, "pid": bystander.pid, "started": place["started"] - 100}
    (tmp_path / "ranks" / "rank-1.json").write_text(json.dumps(old))
    assert process.wait(timeout=30) == outcome.HUNG
    time.sleep(0.2)
    assert bystander.poll() is None


def test_beats_keep_it_quiet_and_it_leaves_nothing(tmp_path):
    with Watchdog(tmp_path, rank=0, world=1, limit=1.0) as dog:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            dog.beat("step")
            time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []
    assert faulthandler.unregister(signal.SIGQUIT) is False  # it was already


def test_time_in_which_the_process_was_suspended_does_not_count(tmp_path, started):
    """Its clock runs on, but nothing hung: 1.6 of the 2 seconds pass while the watchdog is stopped as well."""
    process = rank(tmp_path, 0, "hanging", limit=2, before="watchdog.SLOW_TICK = 0")
    started.append(process)
    time.sleep(0.5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.6)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.7)
    assert process.poll() is None
    assert process.wait(timeout=30) == outcome.HUNG


def test_files_of_ranks_that_are_no_more_are_removed(tmp_path):
    for folder, suffix in (("stacks", "txt"), ("ranks", "json")):
        (tmp_path / folder).mkdir()
        for number in range(4):
            (tmp_path / folder / f"rank-{number}.{suffix}").touch()
    remove_left(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "stacks").iterdir()) == ["rank-0.txt", "rank-1.txt"]
    assert not (tmp_path / "ranks").exists()


def test_limit_zero_turns_it_off(tmp_path):
    with Watchdog(tmp_path, rank=0, world=1, limit=0) as dog:
        dog.beat("step")
    assert list(tmp_path.iterdir()) == []

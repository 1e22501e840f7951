"""Who asks a run to stop, what it leaves as its outcome, and that one trainer at a time holds a run folder."""

import builtins
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from mezzotint.data.cli import run_command
from mezzotint.models.errors import InputError
from mezzotint.training import lock, outcome
from mezzotint.training.distributed import Ranks
from mezzotint.training.ending import ending
from mezzotint.training.stop import RUNNER, StopSignal, launchers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_ask_however_often_they_come(number):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested and stop.reason == ""
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.requested and number.name in stop.reason
    assert signal.getsignal(number) == before


def test_two_interrupts_within_a_second_are_one_and_a_later_one_interrupts(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with StopSignal() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        now = 100.9
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested and "SIGINT" in stop.reason
        now = 101.1
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stop_file_is_seen_when_polled_and_removed_when_cleared(tmp_path):
    with StopSignal(tmp_path) as stop:
        assert stop.clear() is False
        (tmp_path / "STOP").touch()
        assert not stop.requested
        stop.poll()
        assert stop.requested and str(tmp_path / "STOP") in stop.reason
        assert stop.clear() is True
        assert stop.requested and not (tmp_path / "STOP").exists()


# a stand-in for a launcher: starts one process that says when it is asked to stop, and waits for it
CHILD = """
import sys, time
from mezzotint.training.stop import StopSignal
with StopSignal() as stop:
    print("ready", stop.requested, flush=True)
    until = time.monotonic() + 20
    while not stop.requested and time.monotonic() < until:
        time.sleep(0.02)
    open(sys.argv[1], "w").write(stop.reason)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "CROSS_SIZE"])
def test_a_launcher_that_is_gone_asks(tmp_path, variable):
    said = tmp_path / "said"
    arguments = [sys.executable, "-c", LAUNCHER, CHILD, str(said)]
    launcher = subprocess.Popen(arguments, env=os.environ | {variable: "1"}, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready False\n"
    launcher.kill()
    launcher.wait()
    launcher.stdout.read()  # until the child has ended
    assert said.read_text() == "the launcher is gone"


def test_a_runner_that_was_gone_before_the_rank_began_asks_too(monkeypatch):
    monkeypatch.setenv("CROSS_SIZE", "1")
    assert not StopSignal().requested
    grandparent = psutil.Process(os.getppid()).ppid()
    monkeypatch.setenv(RUNNER, str(grandparent))
    assert launchers() == [os.getppid(), grandparent] and not StopSignal().requested
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setenv(RUNNER, str(gone.pid))
    stop = StopSignal()
    assert stop.requested and stop.reason == "the launcher is gone"


def test_without_a_launcher_nobody_is_missed(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launchers() == []


def test_outcome_is_read_back_and_absent_when_removed_or_damaged(tmp_path):
    assert outcome.read(tmp_path) is None
    outcome.write(tmp_path / "run", code=outcome.STOPPED, step=7, reason="SIGTERM came")
    read = outcome.read(tmp_path / "run")
    assert read is not None and (read.code, read.step, read.reason) == (85, 7, "SIGTERM came")
    assert abs(read.time - time.time()) < 60 and read.word == "stopped and saved"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["outcome.json"]
    (tmp_path / "run" / "outcome.json").write_text('{"format": 1, "code"')
    assert outcome.read(tmp_path / "run") is None
    outcome.remove(tmp_path / "run")
    outcome.remove(tmp_path / "run")
    assert not (tmp_path / "run" / "outcome.json").exists()


@pytest.mark.parametrize(
    "error, code",
    [
        (InputError("this is no recipe"), 2),
        (OSError(28, "No space left on device"), 2),
        (PermissionError(13, "Permission denied", "/somewhere"), 2),
        (MemoryError(), 2),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
        (RuntimeError("a bug"), 1),
        (OSError(5, "Input/output error"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_outcome_has_the_exit_code(tmp_path, error, code):
    def command():
        with ending(tmp_path, Ranks(0, 1, torch.device("cpu"))) as end:
            end.step = 3
            raise error

    if code == 1:
        with pytest.raises(type(error)):  # Python ends with 1 and a traceback
            run_command(command, InputError)
    else:
        assert run_command(command, InputError) == code
    found = outcome.read(tmp_path)
    assert found is not None and (found.code, found.step) == (code, 3) and str(error) in found.reason


def test_a_full_disk_still_takes_the_outcome(tmp_path, monkeypatch):
    """It goes where the one before was, or where room was kept."""
    opened = builtins.open

    def full(path, mode="r", **options):
        if str(path).endswith(".tmp"):
            raise OSError(28, "No space left on device")
        return opened(path, mode, **options)

    outcome.write(tmp_path, code=outcome.STOPPED, step=7, reason="SIGTERM came")
    for _ in range(2):
        outcome.remove(tmp_path)
        assert outcome.read(tmp_path) is None
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", full)
            outcome.write(tmp_path, code=2, step=8, reason="\u00fc" * 9000)
        found = outcome.read(tmp_path)
        assert found is not None and (found.code, found.step) == (2, 8)
        assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
        assert (tmp_path / "outcome.json").stat().st_size == outcome.ROOM


def test_an_outcome_of_a_later_version_is_refused(tmp_path):
    (tmp_path / "outcome.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(InputError, match=r"format 99; this version reads format 1"):
        outcome.read(tmp_path)


HOLDER = """
import sys, time
from pathlib import Path
from mezzotint.training import lock
with lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_trainer_is_refused_and_the_lock_dies_with_its_holder(tmp_path):
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    refusal = pytest.raises(InputError, match=rf"process {holder.pid} on \S+: stop that run first")
    with refusal, lock.hold(tmp_path, patience=0.2):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with lock.hold(tmp_path, patience=0):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def _fork_and_die(folder: Path, ready) -> None:
    with lock.hold(folder):
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        ready.send(child)
        os._exit(1)


def test_a_forked_worker_that_outlives_its_trainer_does_not_keep_the_lock(tmp_path):
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_fork_and_die, args=(tmp_path, theirs))
    process.start()
    worker = mine.recv()
    process.join()
    try:
        with lock.hold(tmp_path, patience=0.5):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_said_and_passed(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with lock.hold(tmp_path):
        pass
    said = capsys.readouterr().out
    assert said.count("cannot be locked (Operation not supported)") == 1


def test_only_a_stop_file_from_before_the_process_is_old(tmp_path):
    stop = StopSignal(tmp_path)
    assert not stop.clear_old()
    (tmp_path / "STOP").touch()
    assert not stop.clear_old() and (tmp_path / "STOP").exists()
    os.utime(tmp_path / "STOP", (1, 1))
    assert stop.clear_old() and not (tmp_path / "STOP").exists()

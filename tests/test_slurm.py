"""The project's own batch file under a real Slurm of two nodes: preempted, requeued, crashing, stopped by hand."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from slurm_support import Slurm, Unavailable, cluster, wait_until
from training_support import curve, recipe_file, records

from mezzotint.launch import commands
from mezzotint.training import outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # six starts in a row, on whatever cores are free
STEPS = 200


@pytest.fixture(scope="module")
def slurm():
    try:
        with cluster() as running:
            yield running
    except Unavailable as reason:
        pytest.skip(str(reason))


def recipe(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    return recipe_file(folder, **({"steps": STEPS, "ema_decay": 0.9, "checkpoint": {"every": 100}} | changes))


def submit(slurm: Slurm, path: Path) -> str:
    """The number of a job of two tasks on two nodes."""
    options = ["--parsable", "--nodes=2", f"--export=ALL,PYTHON={sys.executable},OMP_NUM_THREADS=1"]
    return slurm.command("sbatch", *options, str(commands.SBATCH), str(path), cwd=path.parent).strip()


def steps(run: Path) -> int:
    """The last step that stands in the run's records."""
    return max((record["step"] for record in records(run)), default=0) if (run / "metrics.jsonl").exists() else 0


def log(path: Path) -> str:
    return "".join(file.read_text() for file in path.parent.glob("*.log"))


def left_behind(path: Path) -> list[str]:
    """Command lines of processes that still work on the recipe."""
    lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(path) in line]


def ranks(path: Path) -> list[int]:
    """Process ids of the recipe's ranks."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:4] == ["-u", "-m", "mezzotint.launch.rank"] and str(path) in words:
            found.append(process.pid)
    return sorted(found)


@pytest.fixture(scope="module")
def whole(slurm, tmp_path_factory):
    """The run folder of a job that nothing interrupts."""
    path = recipe(tmp_path_factory.mktemp("whole"))
    job = submit(slurm, path)
    ended = slurm.wait(job, "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), log(path)
    assert (ended["NodeList"], ended["NumTasks"]) == ("one,two", "2")
    assert "2 rank(s)" in log(path) and f"done after step {STEPS}" in log(path) and "Traceback" not in log(path)
    assert not left_behind(path)
    return path.parent / "run"


def test_a_preempted_and_a_requeued_job_go_on_to_the_same_curve(slurm, whole, tmp_path):
    path = recipe(tmp_path)
    run = tmp_path / "run"
    job = submit(slurm, path)
    wait_until(lambda: steps(run) >= 30, "30 steps")
    slurm.command("scancel", "--signal=USR1", "--batch", job)  # as Slurm does 300 s before the time limit
    wait_until(lambda: f"job {job} is requeued" in log(path), "the job to requeue itself")
    stopped = outcome.read(run)
    assert stopped is not None and stopped.code == outcome.STOPPED and 30 <= stopped.step < STEPS
    assert (run / "latest").read_text() == f"step-{stopped.step}\n" and steps(run) == stopped.step
    assert not (run / "STOP").exists()
    slurm.start_again(job, restarts=1)
    wait_until(lambda: steps(run) >= stopped.step + 30, "30 more steps")
    slurm.command("scontrol", "requeue", job)
    slurm.start_again(job, restarts=2)
    ended = slurm.wait(job, "COMPLETED", "FAILED")
    assert ended["ExitCode"] == "0:0", log(path)
    assert log(path).count(f"resuming {run} at step") == 2
    assert f"resuming {run} at step {stopped.step} from step-{stopped.step}" in log(path)
    assert curve(run) == curve(whole)
    assert not (run / "restarts.json").exists()  # nothing crashed
    assert not left_behind(path)


def test_a_failing_job_stops_after_its_bounded_restarts(slurm, tmp_path):
    """Rank 1 is killed at every start, before a later checkpoint: once more, then the job has failed."""
    path = recipe(tmp_path, steps=4000, checkpoint={"every": 4000})
    run = tmp_path / "run"
    options = ["slurm", str(path), "--nodes", "2", "--with=--parsable", f"--with=--chdir={tmp_path}", "--submit"]
    job = slurm.command(sys.executable, "-m", "mezzotint.launch.cluster", *options).strip()
    for sentence in ("crash 1 of at most", "as at the crash before: not started again"):
        wait_until(lambda: len(ranks(path)) == 2 and steps(run) >= 10, "10 steps")
        os.kill(ranks(path)[1], signal.SIGKILL)
        wait_until(lambda sentence=sentence: sentence in log(path), sentence)
        if "1 of" in sentence:
            slurm.start_again(job, restarts=1)
    ended = slurm.wait(job, "FAILED", "COMPLETED")
    assert ended["JobState"] == "FAILED" and ended["ExitCode"] == "1:0" and ended["Restarts"] == "1", log(path)
    assert not left_behind(path)


def test_a_stop_file_ends_the_job_for_good(slurm, tmp_path):
    path = recipe(tmp_path, steps=4000, checkpoint={"every": 4000})
    run = tmp_path / "run"
    job = submit(slurm, path)
    wait_until(lambda: steps(run) >= 10, "10 steps")
    (run / "STOP").touch()
    ended = slurm.wait(job, "FAILED", "COMPLETED")
    assert (ended["ExitCode"], ended["Restarts"]) == (f"{outcome.STOPPED}:0", "0"), log(path)
    assert (run / "latest").read_text() == f"step-{steps(run)}\n"
    assert not left_behind(path)

"""What starts a recipe on a cluster: the printed commands, what follows a crash or a preemption, the scripts themselves."""

import configparser
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from slurm_support import wait_until
from training_support import curve, environment, recipe_file, records

from mezzotint.launch import agent, cluster, commands, requeue
from mezzotint.launch.requeue import Bounds, Crashes, Next, conclude, decide, read_crashes
from mezzotint.models.errors import InputError
from mezzotint.training import lock, outcome
from mezzotint.training.distributed import Ranks
from mezzotint.training.ending import ending
from mezzotint.training.outcome import BAD_INPUT, CRASHED, DIVERGED, DONE, HUNG, STOPPED, Outcome

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [commands.SBATCH, commands.TORCHRUN, commands.DEEPSPEED]


def launch(capsys, monkeypatch, *arguments: object) -> tuple[int, str, str]:
    """Code, standard output and standard error of `mezzotint-launch`."""
    monkeypatch.setattr(sys, "argv", ["mezzotint-launch", *map(str, arguments)])
    code = cluster.main()
    said = capsys.readouterr()
    return code, said.out, said.err


def test_slurm_command_is_one_line_that_says_everything(capsys, monkeypatch, tmp_path):
    path = recipe_file(tmp_path, rows_per_step=64)
    more = ["--nodes", 4, "--gpus-per-node", 8, "--time", "24:00:00", "--partition", "p", "optim.lr=1e-4"]
    code, out, err = launch(capsys, monkeypatch, "slurm", path, "seed=2", *more, "--with=--account=a b")
    assert code == 0 and out.count("\n") == 1
    words = shlex.split(out)
    assert words[0] == "sbatch" and words[-4:] == [str(commands.SBATCH), str(path), "seed=2", "optim.lr=1e-4"]
    assert {"--nodes=4", "--gpus-per-node=8", "--time=24:00:00", "--partition=p", "--account=a b"} <= set(words)
    assert f"--export=ALL,PYTHON={sys.executable},PROCESSES_PER_NODE=8" in words and "--job-name=run" in words
    assert "# 32 processes, 64 rows a step, 2 at once, accumulation 1" in err


def test_rows_that_cannot_be_shared_out_are_refused_before_they_queue(capsys, monkeypatch, tmp_path):
    code, out, err = launch(capsys, monkeypatch, "slurm", recipe_file(tmp_path), "--nodes", 3, "--submit")
    assert code == 2 and out == "" and "rows_per_step 4 is no multiple of 3 ranks" in err


def test_an_option_that_nobody_knows_is_refused(capsys, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        launch(capsys, monkeypatch, "slurm", recipe_file(tmp_path), "--node", 3, "--gpu", 4, "--walltime", 3)
    assert "--walltime" in capsys.readouterr().err


def test_torchrun_on_several_nodes_needs_a_head_and_agrees_on_a_port(capsys, monkeypatch, tmp_path):
    arguments = ["torchrun", recipe_file(tmp_path), "--nnodes", 2, "--nproc-per-node", 1]
    code, out, err = launch(capsys, monkeypatch, *arguments)
    assert code == 2 and "give --head HOST" in err
    code, out, err = launch(capsys, monkeypatch, *arguments, "--head", "node1")
    assert code == 0 and "the same command on each of the 2 nodes" in err
    port = commands.port_of(str(tmp_path / "run"))
    assert f"NODES=2 HEAD=node1 PORT={port} bash {commands.TORCHRUN} " in out
    assert commands.port_of("runs/a") != commands.port_of("runs/b")
    _, out, _ = launch(capsys, monkeypatch, "torchrun", recipe_file(tmp_path), "--nproc-per-node", 2)
    assert "PORT" not in out and "NODES" not in out and "PROCESSES_PER_NODE=2" in out


def test_a_hostfile_is_read_and_its_faults_are_named_by_line(capsys, monkeypatch, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# two machines\nnode1 slots=1\nnode2 slots=1  # the other\n\n")
    assert commands.slots(hosts) == {"node1": 1, "node2": 1}
    code, out, err = launch(capsys, monkeypatch, "deepspeed", recipe_file(tmp_path), "--hostfile", hosts)
    assert code == 0 and f"HOSTFILE={hosts}" in out and "# 2 processes" in err
    for text, fault in (
        ("node1\n", "line 1: 'node1' is not"),
        ("a slots=1\nb slots=x", "line 2"),
        ("a slots=1\na slots=2", "line 2: a is there twice"),
        ("# nobody", "names no host"),
    ):
        hosts.write_text(text)
        with pytest.raises(InputError, match=fault):
            commands.slots(hosts)
    with pytest.raises(InputError, match="No such file"):
        commands.slots(tmp_path / "absent")


def test_a_free_port_is_not_one_that_is_taken(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        used = taken.getsockname()[1]
        monkeypatch.setattr(commands, "PORTS", range(used, used + 1))
        monkeypatch.setattr(commands.random, "sample", lambda ports, count: list(ports))
        with pytest.raises(InputError, match="no free port"):
            commands.free_port()
    assert commands.free_port() == used


def test_a_command_that_is_not_installed_is_one_sentence():
    with pytest.raises(InputError, match="no-such-launcher is not on this machine"):
        commands.Command(arguments=("no-such-launcher",)).run()


NO_CRASH, ONCE = Crashes(), Bounds()


def what_follows(
    code: int | None,
    *,
    crashes: Crashes = NO_CRASH,
    step: int = -1,
    asked: bool = False,
    reason: str = "why",
    bounds: Bounds = ONCE,
) -> Next:
    ended = None if code is None else Outcome(code=code, step=7, reason=reason, time=0.0)
    return decide(ended, crashes, step=step, asked=asked, bounds=bounds)


def test_what_is_done_diverged_or_refused_does_not_start_again():
    for code in (DONE, DIVERGED, BAD_INPUT):
        for asked in (False, True):
            follows = what_follows(code, asked=asked)
            assert not follows.again and follows.code == code and "why" in follows.sentence


def test_a_preempted_run_starts_again_and_one_that_a_person_stopped_does_not():
    by_file = "asked to stop (runs/a/STOP was there)"
    assert what_follows(STOPPED, reason="asked to stop (SIGTERM came)").again
    assert what_follows(STOPPED, reason=by_file, asked=True).again  # the batch shell put the file there
    follows = what_follows(STOPPED, reason=by_file)
    assert not follows.again and follows.code == STOPPED and "the same command goes on" in follows.sentence


def test_a_stop_that_came_too_early_or_took_too_long_is_no_crash():
    follows = what_follows(None, asked=True, crashes=Crashes(total=1, in_a_row=1, step=-1))
    assert follows.again and follows.crashes == Crashes(total=1, in_a_row=1, step=-1)
    assert not what_follows(CRASHED, asked=True, crashes=Crashes(total=1, in_a_row=1, step=-1)).again


@pytest.mark.parametrize("code", [None, CRASHED, HUNG])
def test_a_crash_starts_again_only_while_it_gets_further(code):
    crashes = Crashes()
    for count, step in enumerate((-1, 5, 6, 20), start=1):  # -1: it crashed before its first checkpoint
        follows = what_follows(code, crashes=crashes, step=step)
        assert follows.again and follows.crashes == Crashes(total=count, in_a_row=1, step=step)
        crashes = follows.crashes
    follows = what_follows(code, crashes=crashes, step=20)
    assert not follows.again and follows.code == (CRASHED if code is None else code)
    assert "the newest checkpoint is of step 20, as at the crash before" in follows.sentence
    assert not what_follows(code, crashes=crashes, step=15).again  # it fell back to an older one


def test_bounds_are_kept():
    crashes = Crashes()
    for _ in range(3):
        follows = what_follows(None, crashes=crashes, bounds=Bounds(in_a_row=3))
        assert follows.again
        crashes = follows.crashes
    assert not what_follows(None, crashes=crashes, bounds=Bounds(in_a_row=3)).again
    crashes = Crashes(total=2, in_a_row=1, step=5)
    assert what_follows(None, crashes=crashes, step=9, bounds=Bounds(total=3)).again
    assert not what_follows(None, crashes=crashes, step=9, bounds=Bounds(total=2)).again


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A stand-in for scontrol: says that job 7 is in the state of the file `state`, and notes what it is asked."""
    programs = tmp_path / "programs"
    programs.mkdir()
    script = programs / "scontrol"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$1" = requeue ] && exit 0\n'
        f"echo JobId=7 JobName=x JobState=$(cat {tmp_path}/state) Reason=None\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "state").write_text("RUNNING")
    return tmp_path


def test_conclude_counts_and_requeues_a_running_job(scontrol, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "STOP").touch()
    assert conclude(run, asked=False, job="7") == (STOPPED, f"{run}: job 7 is requeued")
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 7"
    assert read_crashes(run) == Crashes(total=1, in_a_row=1, step=-1) and not (run / "STOP").exists()
    (run / "latest").write_text("step-12\n")
    assert conclude(run, asked=False, job="7")[0] == STOPPED
    code, sentence = conclude(run, asked=False, job="7")
    assert code == CRASHED and "as at the crash before" in sentence
    assert (tmp_path / "asked").read_text().count("requeue") == 2


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "PENDING"])
def test_a_job_that_slurm_ends_or_requeues_itself_is_left_alone(scontrol, tmp_path, state):
    run = tmp_path / "run"
    outcome.write(run, code=STOPPED, step=3, reason="asked to stop (SIGTERM came)")
    (tmp_path / "state").write_text(state)
    assert conclude(run, asked=True, job="7") == (STOPPED, f"{run}: job 7 is {state}: not started again from here")
    outcome.remove(run)
    assert conclude(run, asked=True, job="7")[0] == CRASHED
    assert "requeue" not in (tmp_path / "asked").read_text() and read_crashes(run) == Crashes()


def test_without_a_job_the_code_is_the_runs_own(tmp_path):
    outcome.write(tmp_path, code=DIVERGED, step=3, reason="NaN")
    assert conclude(tmp_path, asked=False, job=None) == (DIVERGED, f"{tmp_path}: diverged after step 3 (NaN)")
    requeue.begin(tmp_path)
    assert conclude(tmp_path, asked=False, job=None)[0] == CRASHED


def test_a_first_start_that_is_refused_did_not_die(tmp_path):
    run, ranks = tmp_path / "run", Ranks(0, 1, torch.device("cpu"))
    requeue.begin(run)
    with pytest.raises(InputError), ending(run, ranks):
        raise InputError("no such data")
    assert conclude(run, asked=False, job=None) == (BAD_INPUT, f"{run}: refused (no such data)")
    outcome.write(run, code=BAD_INPUT, step=3, reason="no checkpoint of the last step")
    assert "refused after step 3 (no checkpoint" in conclude(run, asked=False, job=None)[1]


def test_begin_prints_the_run_folder_of_the_overrides(capsys, monkeypatch, tmp_path):
    outcome.write(tmp_path / "other", code=STOPPED, step=3, reason="of the last start")
    code, out, _ = launch(capsys, monkeypatch, "begin", recipe_file(tmp_path), f"run={tmp_path / 'other'}")
    assert (code, out) == (0, f"{tmp_path / 'other'}\n") and outcome.read(tmp_path / "other") is None


def test_begin_refuses_a_folder_in_which_another_trainer_works(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(lock.hold.__wrapped__, "__kwdefaults__", {"patience": 0.1})
    outcome.write(tmp_path / "run", code=STOPPED, step=3, reason="of that trainer")
    with lock.hold(tmp_path / "run"):
        code, out, err = launch(capsys, monkeypatch, "begin", recipe_file(tmp_path))
    assert code == BAD_INPUT and out == "" and f"is in use by process {os.getpid()}" in err
    assert outcome.read(tmp_path / "run") is not None


def test_scripts_are_sound_and_packaged():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]["mezzotint.launch"].split(", ")
    packaged = {path for pattern in patterns for path in (ROOT / "launch").glob(pattern)}
    for script in SCRIPTS:
        assert script in packaged
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    text = commands.SBATCH.read_text()
    for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@300"):
        assert f"#SBATCH {option}\n" in text
    assert "--kill-on-bad-exit=1" in text


def test_torchrun_knows_the_signals_that_the_agent_passes_by_environment(monkeypatch):
    """Its parser reads PET_* only for options that it has: a renamed one would be dropped in silence."""
    from torch.distributed import run

    parsed = []
    monkeypatch.setattr(run, "main", lambda arguments: parsed.append(run.parse_args(arguments)))
    for name in ("PET_SIGNALS_TO_HANDLE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "")  # set back after the test
        monkeypatch.delenv(name)
    assert agent.main(["script.py"]) == 0
    assert parsed[0].signals_to_handle == agent.SIGNALS
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == agent.SAVE_SECONDS


CHILD = """
import os, signal, sys, time
from mezzotint.launch.parent import stop_with_parent
def asked(*_):
    open(sys.argv[1] + ".asked", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, asked)
stop_with_parent(int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
open(sys.argv[1], "w").close()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_process_is_asked_to_stop_when_its_parent_is_killed(tmp_path):
    ready, asked = tmp_path / "ready", tmp_path / "ready.asked"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}, {str(ready)!r}])"
    parent = subprocess.Popen([sys.executable, "-c", start], cwd=ROOT)
    wait_until(ready.exists, "the child to start", 30)
    assert not asked.exists()
    parent.kill()
    parent.wait()
    wait_until(asked.exists, "the child to be asked", 30)
    asked.unlink()
    assert subprocess.run([sys.executable, "-c", CHILD, str(ready), "1"], cwd=ROOT, timeout=60).returncode == 0
    assert asked.exists()  # its parent was another before it could say so


def test_torchrun_script_without_a_head_says_so():
    done = subprocess.run(
        ["bash", str(commands.TORCHRUN), "debug"], env=os.environ | {"NODES": "2"}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "HEAD is not set" in done.stderr


TRAIN = "mezzotint.launch.train"
RANK = "another rank was asked"
TWO = {"PYTHON": sys.executable, "PROCESSES_PER_NODE": "2"}
TORCHRUN_SCRIPT, DEEPSPEED_SCRIPT = ["bash", str(commands.TORCHRUN)], ["bash", str(commands.DEEPSPEED)]


class Launched:
    """A launcher of two ranks with all its processes, which are found by the path of their recipe."""

    def __init__(self, folder: Path, arguments: list[str], recipe: Path, **variables: str) -> None:
        self.run, self.recipe, self.out = folder / "run", recipe, folder / "out.txt"
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [*arguments, str(recipe)], cwd=folder, env=environment(folder) | variables, stdout=out, stderr=out
            )

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those in whose command lines `words` follow the interpreter's options, in the order they were started."""
        found = []
        for process in psutil.process_iter(["cmdline", "create_time", "status"]):
            line = process.info["cmdline"] or []
            after = [word for word in line[1:5] if word != "-u"][: len(words)]
            if str(self.recipe) in line and (not words or after == list(words)):
                found.append(process)
        return sorted(found, key=lambda process: process.info["create_time"])

    def ranks(self) -> list[psutil.Process]:
        return [p for module in ("train", "rank") for p in self.processes("-m", f"mezzotint.launch.{module}")]

    def steps(self) -> int:
        return max((r["step"] for r in records(self.run)), default=0) if (self.run / "metrics.jsonl").exists() else 0

    def wait_for(self, step: int) -> None:
        wait_until(lambda: self.steps() >= step or self.process.poll() is not None, f"step {step}", 240)
        assert self.process.poll() is None, self.out.read_text()

    def wait(self, timeout: float = 300) -> int:
        """The launcher's code, once none of its processes is left."""
        code = self.process.wait(timeout=timeout)
        wait_until(lambda: not self.processes(), "its processes to end", 60)
        return code

    def end(self) -> None:
        for process in (*self.processes(), self.process):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        self.process.wait()


@pytest.fixture
def launched(tmp_path):
    """Starts a long run; whatever a test leaves of it ends with the test."""
    started: list[Launched] = []

    def start(arguments: list[str], folder: Path = tmp_path, changes: dict | None = None, **variables: str) -> Launched:
        folder.mkdir(exist_ok=True)
        path = recipe_file(
            folder, **({"steps": 4000, "micro_rows": 1, "checkpoint": {"every": 4000}} | (changes or {}))
        )
        started.append(Launched(folder, arguments, path, **variables))
        return started[-1]

    yield start
    for one in started:
        one.end()


def torchrun() -> list[str]:
    """torchrun as a user types it."""
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2"
    port = f"--master-port={commands.free_port()}"
    return [str(Path(sys.executable).parent / "torchrun"), signals, port, "--nproc-per-node=2", "-m", TRAIN]


def deepspeed() -> list[str]:
    options = ["--hostfile=/dev/null", "--num_gpus=2", f"--master_port={commands.free_port()}", "--module"]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *options, TRAIN]


def assert_stopped(one: Launched, *reasons: str) -> None:
    """Saved at the interrupted step, with its outcome."""
    ended = outcome.read(one.run)
    assert ended is not None and ended.code == STOPPED, one.out.read_text()
    assert any(reason in ended.reason for reason in reasons), ended.reason
    assert ended.step == one.steps() and 5 <= ended.step < 4000
    assert (one.run / "latest").read_text() == f"step-{ended.step}\n"
    assert not (one.run / "STOP").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_to_one_rank_under_torchrun(launched, name):
    one = launched(torchrun())
    one.wait_for(5)
    one.ranks()[-1].send_signal(signal.Signals[name])
    assert one.wait() == 1  # torchrun's own code for anything but 0
    assert_stopped(one, f"{name} came", RANK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGKILL"])
def test_a_signal_to_torchrun(launched, name):
    one = launched(torchrun())
    one.wait_for(5)
    one.process.send_signal(signal.Signals[name])
    assert one.wait() != 0
    assert_stopped(one, "the launcher is gone" if name == "SIGKILL" else f"{name} came", RANK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_the_deepspeed_command(launched, name):
    """On one machine it dies without handing the signal on; the ranks miss it."""
    one = launched(deepspeed())
    one.wait_for(5)
    one.process.send_signal(signal.Signals[name])
    assert one.wait() != 0
    assert_stopped(one, "the launcher is gone", RANK)


@pytest.mark.slow
def test_a_signal_to_deepspeeds_launcher_of_one_machine(launched):
    one = launched(deepspeed())
    one.wait_for(5)
    one.processes("-m", "deepspeed.launcher.launch")[0].send_signal(signal.SIGTERM)
    assert one.wait() != 0
    assert_stopped(one, "SIGTERM came", RANK)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "how"),
    [
        (TORCHRUN_SCRIPT, "SIGUSR1"),
        (TORCHRUN_SCRIPT, "SIGINT"),
        (TORCHRUN_SCRIPT, "STOP"),
        (DEEPSPEED_SCRIPT, "SIGTERM"),
        (DEEPSPEED_SCRIPT, "STOP"),
    ],
    ids=lambda value: Path(value[-1]).stem if isinstance(value, list) else value,
)
def test_a_stop_of_a_launch_script_has_the_runs_own_code_and_no_traceback(launched, script, how):
    one = launched(script, **TWO)
    one.wait_for(5)
    if how == "STOP":
        (one.run / "STOP").touch()
    else:
        one.process.send_signal(signal.Signals[how])
    assert one.wait() == STOPPED
    assert_stopped(one, "STOP was there")
    said = one.out.read_text()
    assert f"{one.run}: stopped and saved after step" in said and "Traceback" not in said
    assert "ended with" not in said and "exits with return code" not in said  # to the launcher it is no failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "why"),
    [(TORCHRUN_SCRIPT, "SIGTERM came"), (DEEPSPEED_SCRIPT, "the launcher is gone")],
    ids=["torchrun", "deepspeed"],
)
def test_a_launch_script_that_is_killed_leaves_nobody_training(launched, script, why):
    one = launched(script, **TWO)
    one.wait_for(5)
    one.process.kill()
    assert one.wait() == -signal.SIGKILL
    assert_stopped(one, why, RANK, "launcher")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "first"),
    [
        (TORCHRUN_SCRIPT, "mezzotint.launch.agent"),
        (DEEPSPEED_SCRIPT, "mezzotint.launch.runner"),
        (DEEPSPEED_SCRIPT, "deepspeed.launcher.launch"),
    ],
    ids=["torchrun", "deepspeed", "deepspeed-launch"],
)
def test_a_launch_script_that_is_killed_while_its_launcher_starts_leaves_nobody(launched, script, first):
    one = launched(script, **TWO)
    wait_until(lambda: one.processes("-m", first), "the launcher to be started", 240)
    one.process.kill()
    one.process.wait()
    wait_until(lambda: not one.processes(), "its processes to end", 300)
    assert not one.ranks()


@pytest.mark.slow
@pytest.mark.parametrize("script", [TORCHRUN_SCRIPT, DEEPSPEED_SCRIPT], ids=["torchrun", "deepspeed"])
def test_a_rank_that_is_stopped_from_outside_ends_all_with_stacks_of_every_rank(launched, script):
    one = launched(script, changes={"guard": {"hang_seconds": 8}}, **TWO)
    one.wait_for(5)
    one.ranks()[1].suspend()
    began = time.monotonic()
    assert one.wait() == HUNG
    assert time.monotonic() - began < 8 + 40
    ended = outcome.read(one.run)
    assert ended is not None and ended.code == HUNG and "no sign of life" in ended.reason
    for rank in range(2):
        assert "most recent call first" in (one.run / "stacks" / f"rank-{rank}.txt").read_text()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_and_the_next_start_goes_on(launched, tmp_path):
    one = launched(TORCHRUN_SCRIPT, changes={"steps": 60, "checkpoint": {"every": 10}}, **TWO)
    one.wait_for(12)
    one.ranks()[1].kill()
    assert one.wait() == CRASHED
    assert (one.run / "latest").read_text() in ("step-10\n", "step-20\n")
    again = launched(TORCHRUN_SCRIPT, changes={"steps": 60, "checkpoint": {"every": 10}}, **TWO)
    assert again.wait() == DONE
    assert "resuming" in again.out.read_text() and again.steps() == 60


@pytest.mark.slow
def test_two_agents_train_one_run_and_stop_together(launched, tmp_path):
    """As on two nodes: each has its own torchrun and one rank; the first stop is asked of the second node's script."""
    port = str(commands.free_port())
    place = {"PYTHON": sys.executable, "NODES": "2", "HEAD": "localhost", "PORT": port}
    changes = {"steps": 300, "run": str(tmp_path / "run"), "checkpoint": {"every": 300}}
    for code in (STOPPED, DONE):
        nodes = [launched(TORCHRUN_SCRIPT, tmp_path / name, changes, **place) for name in ("one", "two")]
        nodes[0].run = nodes[1].run = tmp_path / "run"
        if code == STOPPED:
            nodes[0].wait_for(20)
            nodes[1].process.send_signal(signal.SIGUSR1)
        assert [node.wait() for node in nodes] == [code, code]
        ended = outcome.read(tmp_path / "run")
        assert ended is not None and ended.code == code
    whole = launched(TORCHRUN_SCRIPT, tmp_path / "whole", {"steps": 300, "checkpoint": {"every": 300}}, **TWO)
    assert whole.wait() == DONE
    assert curve(tmp_path / "run") == curve(whole.run)


@pytest.mark.slow
def test_two_runs_at_the_same_time_do_not_meet(launched, tmp_path):
    """On ports: both end. On a folder: the second is refused in a sentence and leaves the first alone."""
    small = {"steps": 30}
    runs = [launched(TORCHRUN_SCRIPT, tmp_path / name, small, **TWO) for name in ("one", "two")]
    assert [one.wait(240) for one in runs] == [DONE, DONE]
    first = launched(TORCHRUN_SCRIPT, tmp_path / "three", **TWO)
    first.wait_for(5)
    second = launched(TORCHRUN_SCRIPT, tmp_path / "four", {"run": str(first.run)}, **TWO)
    second.run = first.run
    assert second.wait(240) == BAD_INPUT
    assert "is in use by process" in second.out.read_text() and "Traceback" not in second.out.read_text()
    assert first.process.poll() is None
    (first.run / "STOP").touch()
    assert first.wait() == STOPPED


@pytest.mark.slow
@pytest.mark.parametrize("script", [TORCHRUN_SCRIPT, DEEPSPEED_SCRIPT], ids=["torchrun", "deepspeed"])
def test_a_run_folder_relative_to_where_the_script_is_started(launched, tmp_path, script):
    """With a slash inside: the scripts make a name of it for the launcher."""
    one = launched(script, changes={"run": "runs/deep/run", "steps": 6}, **TWO)
    one.run = tmp_path / "runs" / "deep" / "run"
    assert one.wait(240) == DONE, one.out.read_text()
    ended = outcome.read(one.run)
    assert ended is not None and (ended.code, ended.step) == (DONE, 6)
    assert "runs/deep/run: done after step 6" in one.out.read_text()

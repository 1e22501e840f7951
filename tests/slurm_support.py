"""A real Slurm on this machine for the tests: munge, a controller and two nodes on loopback, in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

PATIENCE = 900.0  # seconds a wait may take on a loaded machine; it ends as soon as what it waits for is there
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
NODES = ("one", "two")
# the limits are far above Slurm's own: on loaded cores a batch script may take a minute to start, a credential to be used
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=30
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=20
MessageTimeout=100
BatchStartTimeout=600
UnkillableStepTimeout=600
MinJobAge=3600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=500
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=500
PartitionName=main Nodes=one,two Default=YES MaxTime=INFINITE State=UP
"""


class Unavailable(Exception):
    """Why there is no Slurm here."""


@dataclass(frozen=True)
class Slurm:
    """A running cluster of two nodes."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def command(self, *arguments: str, cwd: Path | None = None) -> str:
        """Standard output of one of Slurm's commands."""
        done = subprocess.run(
            arguments, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr}{done.stdout}\n{self.last_words()}"
        return done.stdout

    def last_words(self) -> str:
        """Of the controller's log."""
        log = self.folder / "slurmctld.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-10:]) if log.exists() else ""

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, by its names: JobState, ExitCode, NodeList, Restarts."""
        text = self.command("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, number: str, *states: str, timeout: float = PATIENCE) -> dict[str, str]:
        """The job once it is in one of the states."""
        try:
            wait_until(lambda: self.job(number)["JobState"] in states, f"job {number} to be {states}", timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.job(number)}\n{self.last_words()}") from None
        return self.job(number)

    def start_again(self, number: str, *, restarts: int) -> None:
        """Wait until the job is queued for its n-th time, and start it soon: Slurm would let it wait for two minutes.

        Not at once: nodes take no credential made in the second in which the last start's was revoked, or before it, and
        the controller would hold the job.
        """
        self.wait(number, "PENDING", "RUNNING")
        if self.job(number)["JobState"] == "PENDING":
            self.command("scontrol", "update", f"JobId={number}", "StartTime=now+5seconds")
        self.wait(number, "RUNNING")
        assert self.job(number)["Restarts"] == str(restarts)


def wait_until(there: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
    until = time.monotonic() + timeout
    while not there():
        assert time.monotonic() < until, f"waited {timeout} s for {what}"
        time.sleep(0.1)


@contextlib.contextmanager
def cluster() -> Iterator[Slurm]:
    """Start it, and stop it by its process ids. Raises Unavailable with a reason where it cannot be installed."""
    _install()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket has at most 107 characters
    slurm = Slurm(folder)
    for name in ("munge", "state"):
        (folder / name).mkdir(mode=0o700)
    host, ports = socket.gethostname().split(".")[0], _free_ports(3)
    user = psutil.Process().username()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, ports=ports, user=user))
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    munge = [f"--{name}={folder}/munge/{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "log-file")]
    daemons = [["munged", "--foreground", "--force", *munge, f"--seed-file={folder}/munge/seed"]]
    daemons += [["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    running: list[subprocess.Popen] = []
    try:
        for arguments in daemons:
            with open(folder / f"{arguments[0]}.out", "a") as out:
                running.append(subprocess.Popen(arguments, env=slurm.environment, stdout=out, stderr=out))
            time.sleep(0.5)
        _wait_for_nodes(slurm)
        yield slurm
    finally:
        with contextlib.suppress(Exception):
            slurm.command("scancel", "--full", "--signal=KILL", f"--user={user}")
            slurm.command("scancel", f"--user={user}")
            wait_until(lambda: not slurm.command("squeue", "-h"), "an empty queue", 120)
        for daemon in reversed(running):
            daemon.terminate()
            try:
                daemon.wait(timeout=60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_nodes(slurm: Slurm) -> None:
    """Raises Unavailable with the last lines of the daemons' logs."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with contextlib.suppress(AssertionError):
            if slurm.command("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"]:
                return
        time.sleep(0.2)
    lines = [line for path in sorted(slurm.folder.glob("*.out")) for line in path.read_text().splitlines()[-3:]]
    raise Unavailable("Slurm does not start here: " + "; ".join(lines))


def _install() -> None:
    """Debian's packages, where nothing but the rights of root is needed for them."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if not missing:
        return
    if not sys.platform.startswith("linux") or shutil.which("apt-get") is None or os.geteuid():
        raise Unavailable(f"no Slurm here ({', '.join(missing)}), and only root may install Debian's")
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", "slurm-wlm", "munge"]):
        done = subprocess.run(
            ["apt-get", "-q", *arguments], env=quiet, capture_output=True, text=True, timeout=PATIENCE
        )
        if done.returncode:
            raise Unavailable(f"apt-get {arguments[0]} failed: {done.stderr.strip().splitlines()[-1:]}")


def _path() -> str:
    """Daemons live where only root's path looks."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    listeners = [socket.socket() for _ in range(count)]
    try:
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()

"""A server that imports everything once and forks gloo ranks on demand, so that a start costs a second and not ten."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

PATIENCE, GRACE = 0.3, 5.0  # seconds after which, one rank having died, the others get SIGTERM, and SIGKILL
PR_SET_PDEATHSIG = 1
# what a start, or a test module with a harm, would import only then: three seconds, mostly of torch's compiler
IMPORTED_LATE = (
    "pytest",
    "safetensors",
    "grain",
    "mezzotint.training.loop",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.moe.ep_repack",
    "deepspeed.module_inject.auto_ep_layer",
)


@dataclass(frozen=True)
class Harm:
    """A function `harm(rank, **arguments)` of a test module that each rank calls before it trains."""

    module: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks of one start ended."""

    codes: list[int]  # of each rank; minus the signal that ended it
    output: list[str]  # of each rank, standard error too
    hung: bool  # some had to be killed: they did not end by themselves nor on SIGTERM

    @property
    def killed(self) -> bool:
        return -signal.SIGKILL in self.codes and not self.hung

    def __str__(self) -> str:
        parts = [f"rank {rank}: code {code}\n{text}" for rank, (code, text) in enumerate(zip(self.codes, self.output))]
        return "\n".join([f"hung: {self.hung}", *parts])


def start(
    recipe: Path,
    *overrides: str,
    world: int = 1,
    harms: Sequence[Harm] = (),
    kill: tuple[int, float] | None = None,
    limit: float = 120.0,
    patience: float = PATIENCE,
) -> Ended:
    """Train `recipe` on `world` forked ranks and wait for their end.

    kill: (rank, seconds after the fork) of a SIGKILL from outside; limit: seconds after which ranks that still run hang.
    patience: seconds that the others may still take once one has failed; long where all are to end by themselves.
    """
    order = {"recipe": str(recipe), "overrides": list(overrides), "world": world, "kill": kill, "limit": limit}
    order["patience"] = patience
    pipes = _server()
    assert pipes.stdin is not None and pipes.stdout is not None
    pipes.stdin.write(json.dumps(order | {"harms": [asdict(harm) for harm in harms]}) + "\n")
    pipes.stdin.flush()
    answer = pipes.stdout.readline()
    assert answer, "the server died"
    return Ended(**json.loads(answer))


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("outlived SIGKILL")


def at_call(
    owner: Any, name: str, act: Callable[[], object], *, count: int = 1, after: bool = False, when: Any = None
) -> None:
    """Wrap `owner.name` so that its `count`-th call, of those whose arguments `when` accepts, also calls `act`."""
    plain, seen = vars(owner)[name], [0]

    @functools.wraps(plain)
    def wrapped(*arguments, **options):
        seen[0] += when is None or bool(when(*arguments))
        hit = seen[0] == count and (when is None or when(*arguments))
        if hit and not after:
            act()
        result = plain(*arguments, **options)
        if hit and after:
            act()
        return result

    setattr(owner, name, wrapped)


def cut_small_parameters() -> None:
    """Under stage 3 DeepSpeed leaves parameters below 100,000 elements whole on every rank: tests have no others."""
    from mezzotint.training import engine

    plain = engine._settings

    def wrapped(*arguments, **options):
        settings = plain(*arguments, **options)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings

    engine._settings = wrapped


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@functools.cache
def _server() -> subprocess.Popen:
    """One for each test process; it ends with it, and its ranks with it."""
    from mezzotint.training.distributed import VARIABLES

    compiled = tempfile.mkdtemp(prefix="mezzotint-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    kept |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(
        [sys.executable, __file__],
        env=kept | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": compiled},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)  # called first
    return process


# -- in the server ---------------------------------------------------------------------------------------------------


def _serve() -> None:
    """Orders in, answers out, a line each, until the test process closes the pipe. Has one thread, so that it may fork."""
    from mezzotint.training.engine import _import_deepspeed

    with os.fdopen(os.dup(1), "w") as answers:  # what DeepSpeed prints is no answer
        os.dup2(2, 1)
        _import_deepspeed()
        for name in IMPORTED_LATE:
            importlib.import_module(name)
        for line in sys.stdin:
            with tempfile.TemporaryDirectory(prefix="mezzotint-ranks-") as folder:
                ended = _run(json.loads(line), Path(folder))
            answers.write(json.dumps(asdict(ended)) + "\n")
            answers.flush()


def _run(order: dict, folder: Path) -> Ended:
    world, kill, port = order["world"], order["kill"], free_port()
    began = time.monotonic()
    ranks = {_fork(order, rank, port, folder): rank for rank in range(world)}
    codes: dict[int, int] = {}
    end, ask, hung = began + order["limit"], float("inf"), False
    while len(codes) < world:
        now = time.monotonic()
        alive = [pid for pid, rank in ranks.items() if rank not in codes]
        if kill is not None and now > began + kill[1]:
            victims, kill = [pid for pid in alive if ranks[pid] == kill[0]], None
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        if now > min(end, ask):
            number, ask, hung = (signal.SIGKILL, ask, True) if now > end else (signal.SIGTERM, float("inf"), hung)
            for pid in alive:
                os.kill(pid, number)
        for pid in alive:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                codes[ranks[pid]] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if codes[ranks[pid]] != 0 and ask == float("inf"):
                    ask = now + order["patience"]
                    end = min(end, ask + GRACE)
        time.sleep(0.002)
    output = [(folder / f"rank-{rank}.txt").read_text(errors="replace") for rank in range(world)]
    return Ended(codes=[codes[rank] for rank in range(world)], output=output, hung=hung)


def _fork(order: dict, rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # the server's own end is the ranks' end
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["world"], "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
        code = _train(order, rank)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(order: dict, rank: int) -> int:
    from mezzotint.data.cli import run_command
    from mezzotint.models.errors import InputError
    from mezzotint.training.config import load_recipe
    from mezzotint.training.loop import train

    cut_small_parameters()
    for harm in order["harms"]:
        function = vars(importlib.import_module(harm["module"]))[harm["function"]]
        function(rank, **harm["arguments"])
    return run_command(lambda: train(load_recipe(order["recipe"], order["overrides"])), InputError)


if __name__ == "__main__":
    _serve()

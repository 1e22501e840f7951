"""A polite stop: a signal, a STOP file or a launcher that is gone asks; the loop answers at the end of its step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
# Slurm and the launchers send these two or three times over: they never do more than ask
ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SAME_PRESS = 1.0  # seconds in which SIGINTs are one Ctrl-C: the terminal's, and the one a launcher hands on
STOP_FILE = "STOP"
# set by torchrun, and by DeepSpeed's launcher, for the processes that they start
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")
RUNNER = "MEZZOTINT_RUNNER"  # its process id, set by launch/runner.py for what it starts on its own machine
DEEPSPEED_LAUNCH = "deepspeed.launcher.launch"
DEEPSPEED_COMMANDS = ("deepspeed", "ds", "deepspeed.launcher.runner")


class StopSignal:
    """Inside the `with`, SIGTERM, SIGUSR1, SIGUSR2 and SIGINT only set `requested`, however often they come.

    A SIGINT that follows another by more than a second acts as it did before: who presses Ctrl-C again means it.
    folder: the run folder, whose file STOP asks as well, once `poll` has seen it; None for a run without one.
    Under a launcher a launcher's death asks too: nobody else would end the ranks that it leaves behind.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = None if folder is None else folder / STOP_FILE
        self._reason = ""
        self._interrupted: float | None = None  # time of the first SIGINT
        self._before: dict[signal.Signals, Handler] = {}
        self._launchers = launchers()

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._ask) for number in ASKING}
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._before:
            self._restore(number)

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop; it stays so. Costs a few microseconds."""
        if not self._reason and self._launchers and _parents(len(self._launchers)) != self._launchers:
            self._reason = "the launcher is gone"
        return bool(self._reason)

    @property
    def reason(self) -> str:
        """What asked first, for a sentence; empty if nothing did."""
        return self._reason

    def poll(self) -> None:
        """Look for the STOP file; the main rank does, once a step, so that a shared file system is asked once."""
        if not self._reason and self._file is not None and self._file.exists():
            self._reason = f"{self._file} was there"

    def clear_old(self) -> bool:
        """`clear`, but only of a STOP file from before this process: one that came during the start is meant for it."""
        try:
            old = self._file is not None and self._file.stat().st_mtime < psutil.Process().create_time()
        except FileNotFoundError:
            return False
        return old and self.clear()

    def clear(self) -> bool:
        """Remove the STOP file, at the start and after a stop; returns whether there was one."""
        if self._file is None:
            return False
        try:
            self._file.unlink()
        except FileNotFoundError:
            return False
        return True

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._reason = self._reason or f"{signal.Signals(number).name} came"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
        if now - self._interrupted <= SAME_PRESS:
            self._ask(number, frame)
            return
        self._restore(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    def _restore(self, number: signal.Signals) -> None:
        handler = self._before[number]
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed from Python


def launchers() -> list[int]:
    """Process ids of the launchers above this process, nearest first; empty when none started it.

    The nearest is the parent. On one machine DeepSpeed's is itself the child of the command `deepspeed`, which dies of
    a SIGTERM without handing it on.
    """
    if not any(name in os.environ for name in LAUNCHER_VARIABLES):
        return []
    parent = os.getppid()
    if RUNNER in os.environ:  # it may be gone already
        return [parent, int(os.environ[RUNNER])]
    try:
        nearest = psutil.Process(parent)
        above = nearest.parent()
        local = above is not None and any(Path(word).name in DEEPSPEED_COMMANDS for word in above.cmdline()[:3])
        if above is not None and local and DEEPSPEED_LAUNCH in nearest.cmdline():
            return [parent, above.pid]
    except psutil.Error:  # just gone, or not ours to look at
        pass
    return [parent]


def _parents(count: int) -> list[int]:
    """The next `count` process ids above this one, as they are now."""
    above = [os.getppid()]
    try:
        while len(above) < count:
            above.append(psutil.Process(above[-1]).ppid())
    except psutil.Error:
        pass
    return above

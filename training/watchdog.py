"""A watchdog over every rank: when the loop gives no sign of life, stacks are written, and no process is left hanging."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

from mezzotint.training import outcome

ASK = signal.SIGQUIT  # writes stacks from C, whatever the interpreter does; SIGUSR1 and SIGUSR2 ask for a stop
TICKS, LONGEST_TICK = 10, 10.0  # looks at the loop within `limit`, and seconds between two of them at most
SLOW_TICK = 5.0  # seconds (a quarter of `limit` at most) a look may come late and still count in full: a suspended
# process did not hang, and one that another rank wakes for its stacks must not end that one first
PEERS = 5.0  # seconds other ranks get to write their stacks
LAST = 60.0  # seconds after which a rank that hung ends, even if its disk hangs too


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs, so that the ranks beside it can wake it."""

    rank: int
    host: str
    pid: int
    started: float  # seconds since 1970: a later process may have the same id

    def process(self) -> psutil.Process | None:
        """The process if it still runs on this host."""
        if self.host != _host():
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) < 2:
                return process
        return None

    def stopped(self) -> bool:
        """Whether a signal has stopped it (SIGSTOP), so that others wait for it in vain."""
        process = self.process()
        try:
            return process is not None and process.status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False


class Watchdog:
    """Inside the `with`, ends this rank with exit code 87 when no `beat` comes for `limit` seconds; 0 turns it off.

    First it writes the stacks of all its threads to `folder/stacks/rank-N.txt`; wakes the ranks on its host (SIGCONT)
    and asks them for theirs; waits a few seconds for those of other hosts, whose own watchdogs fire; writes the
    outcome; and kills the ranks on its host. A rank whose interpreter lock is held for `limit` seconds ends by
    faulthandler's timer, with its stacks and code 1. That timer cannot tell a hang from a job that its scheduler
    suspends for longer than `limit`: such a job dies when it is resumed, and goes on from its newest checkpoint.
    """

    def __init__(self, folder: Path, *, rank: int, world: int, limit: float) -> None:
        self._folder = folder
        self._rank, self._world = rank, world
        self._limit = limit
        self._tick = min(limit / TICKS, LONGEST_TICK)
        self._late = min(SLOW_TICK, limit / 4)
        self._phase, self._step, self._beats = "start", 0, 0
        self._end, self._fired = threading.Event(), False
        self._stacks: IO[str] | None = None  # open from the start: a full disk or table of files comes too late then
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if not self._limit:
            return self
        for folder in (self._folder / "stacks", self._folder / "ranks"):
            folder.mkdir(parents=True, exist_ok=True)
        self._stacks = open(_stacks(self._folder, self._rank), "a", encoding="utf-8")
        faulthandler.register(ASK, self._stacks)
        started = psutil.Process().create_time()
        place = Place(rank=self._rank, host=_host(), pid=os.getpid(), started=started)
        beside = self._place.with_suffix(".tmp")
        beside.write_text(json.dumps(asdict(place)), encoding="utf-8")
        os.replace(beside, self._place)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stacks is None:
            return
        if self._fired:
            _wait_for_the_end()
        self._end.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(ASK)
        self._stacks.close()
        self._place.unlink(missing_ok=True)
        if not _stacks(self._folder, self._rank).stat().st_size:
            _stacks(self._folder, self._rank).unlink()
        with contextlib.suppress(OSError):  # another rank is still there
            self._place.parent.rmdir()
            (self._folder / "stacks").rmdir()

    def beat(self, phase: str, step: int | None = None) -> None:
        """A sign of life: the loop enters `phase`, of the step after `step` where it is given. Costs nothing."""
        if self._fired:
            _wait_for_the_end()
        self._phase = phase
        self._step = self._step if step is None else step
        self._beats += 1

    @property
    def _place(self) -> Path:
        return self._folder / "ranks" / f"rank-{self._rank}.json"

    def _watch(self) -> None:
        """The thread: counts the time since the last beat, and keeps putting off faulthandler's timer."""
        silent, seen, before = 0.0, self._beats, time.monotonic()
        assert self._stacks is not None
        while silent < self._limit:
            # the timer runs out when this thread cannot: the interpreter lock is held
            faulthandler.dump_traceback_later(self._limit + self._tick, file=self._stacks, exit=True)
            if self._end.wait(self._tick):
                return
            now = time.monotonic()
            silent += min(now - before, self._tick + self._late)
            before = now
            if self._beats != seen:
                silent, seen = 0.0, self._beats
        self._fired = True  # the loop gets no further, should the hang resolve now
        faulthandler.dump_traceback_later(LAST, file=self._stacks, exit=True)
        try:
            self._fire()
        finally:
            os._exit(outcome.HUNG)

    def _fire(self) -> None:
        """Stacks, outcome, and the end of the other ranks; a disk that is full or gone leaves out only the first two."""
        silence = f"no sign of life from rank {self._rank} for {self._limit:g} s in phase {self._phase!r}"
        peers = self._peers()
        stopped = ", ".join(f"rank {place.rank} (process {place.pid})" for place in peers if place.stopped())
        silence += f", while {stopped} on this host is stopped" if stopped else ""
        where = f"after step {self._step}, on {socket.gethostname()}"
        self._say(f"error: {silence} ({where}); the stacks of all ranks are in {self._folder / 'stacks'}")
        with contextlib.suppress(OSError):
            self._write_stacks(f"{silence} ({where})")
        with contextlib.suppress(OSError):
            asked = [self._ask(place) for place in peers]
            until = time.monotonic() + PEERS
            while time.monotonic() < until and not all(_size(path) > size for path, size in asked):
                time.sleep(0.05)
            self._wait_for_other_hosts(until)
            if outcome.read(self._folder) is None:  # the first rank to notice says it
                outcome.write(self._folder, code=outcome.HUNG, step=self._step, reason=silence)
        for place in peers:
            process = place.process()
            if process is not None:
                self._say(f"rank {self._rank} ends rank {place.rank} (process {place.pid})")
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def _write_stacks(self, why: str) -> None:
        assert self._stacks is not None
        self._stacks.write(f"--- {_now()} {why}\n")
        self._stacks.flush()
        faulthandler.dump_traceback(self._stacks)

    def _peers(self) -> list[Place]:
        """The other ranks that still run on this host."""
        found = []
        for path in (self._folder / "ranks").glob("rank-*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                place = Place(**json.loads(path.read_text(encoding="utf-8")))
                if place.rank != self._rank and place.process() is not None:
                    found.append(place)
        return found

    def _ask(self, place: Place) -> tuple[Path, int]:
        """Ask a rank for its stacks and wake it, should it be stopped; its file, and the size that shows them written."""
        path = _stacks(self._folder, place.rank)
        if _written(path, since=time.time() - PEERS):  # it noticed as well, or was asked by another
            return path, -1
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"--- {_now()} asked by rank {self._rank}\n")
        size = _size(path)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(place.pid, ASK)  # before it wakes: the stacks say where it was stopped
            os.kill(place.pid, signal.SIGCONT)
        return path, size

    def _wait_for_other_hosts(self, until: float) -> None:
        """Their ranks hang in the same step and write their own stacks; ending this one would cut that short."""
        recent = time.time() - self._limit - PEERS
        others = [path for path in (_stacks(self._folder, rank) for rank in range(self._world)) if path.exists()]
        while time.monotonic() < until and not all(_written(path, since=recent) for path in others):
            time.sleep(0.05)
        time.sleep(0.2)  # the last stacks are being written

    def _say(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)


def remove_left(folder: Path, world: int) -> None:
    """Files of ranks that the run had when there were more of them; for the main rank, before any watchdog."""
    present = {_stacks(folder, rank).name for rank in range(world)}
    left = [path for path in (folder / "stacks").glob("rank-*.txt") if path.name not in present]
    for path in [*left, *(folder / "ranks").glob("rank-*")]:
        path.unlink(missing_ok=True)
    for place in (folder / "stacks", folder / "ranks"):
        with contextlib.suppress(OSError):  # not empty, or not there
            place.rmdir()


def _stacks(folder: Path, rank: int) -> Path:
    return folder / "stacks" / f"rank-{rank}.txt"


def _host() -> str:
    """This machine and its process ids: containers on one machine may share its name but not those."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()} {space}".strip()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _written(path: Path, *, since: float) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size > 0 and status.st_mtime > since


def _wait_for_the_end() -> None:
    """The thread is ending this process, in seconds."""
    while True:
        time.sleep(LAST)

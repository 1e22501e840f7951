"""The end of a start, however it comes: the lock is let go, and outcome.json says how the run ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mezzotint.data.cli import verdict
from mezzotint.data.errors import InputError as DataError
from mezzotint.models.errors import InputError
from mezzotint.training import lock, outcome
from mezzotint.training.append import warn
from mezzotint.training.distributed import Ranks
from mezzotint.training.watchdog import remove_left

ROOM = 1 << 16  # bytes that a start without its checkpoints may write
OURS = {lock.NAME, outcome.SPARE}  # files of a start that has written nothing of a run yet


@dataclass
class Ending:
    """What is known of the end so far."""

    step: int = 0  # steps done
    code: int = outcome.CRASHED
    reason: str = ""

    def at(self, step: int, code: int, reason: str) -> int:
        """This is the end; returns its code."""
        self.step, self.code, self.reason = step, code, reason
        return code


@contextmanager
def ending(folder: Path, ranks: Ranks) -> Iterator[Ending]:
    """Hold the run folder inside the `with` and write its outcome behind it; the main rank does, for all.

    A start that is refused before anything was written leaves no folder behind. A process that dies leaves no outcome.
    Ranks that come to an end together leave together, when the outcome is written: a launcher kills the others as soon
    as one has left with a code that is not 0.
    """
    end = Ending()
    if not ranks.main:
        ranks.alone(lambda: None)
        ranks.alone(lambda: None)
        yield end
        ranks.barrier()
        return
    fresh = not folder.exists()
    with ExitStack() as stack:
        ranks.alone(lambda: _take_over(folder, ranks.world, stack))
        try:
            ranks.alone(lambda: _require_room(folder))
            yield end
        except BaseException as error:
            code = code_of(error)
            if code == outcome.BAD_INPUT and fresh and {path.name for path in folder.iterdir()} <= OURS:
                shutil.rmtree(folder)
            else:
                plain = isinstance(error, (InputError, DataError))
                end.at(end.step, code, str(error) if plain else f"{type(error).__name__}: {error}")
                _write(folder, end)
            raise
        _write(folder, end)
        ranks.barrier()


def code_of(error: BaseException) -> int:
    """The exit code of a command that ends with `error`; outcome.json has the same."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else outcome.CRASHED
    return verdict(error, InputError)[0]


def _write(folder: Path, end: Ending) -> None:
    """The outcome, or a warning: neither an error that came before nor the other ranks may be lost over a disk."""
    try:
        outcome.write(folder, code=end.code, step=end.step, reason=end.reason)
    except OSError as error:
        warn(f"{folder / outcome.NAME} cannot be written ({error.strerror}); the code is {end.code}")


def _require_room(folder: Path) -> None:
    """OSError where the disk takes no files, before each rank finds out by itself; checkpoints are looked at later."""
    probe = folder / f"room.{os.getpid()}.tmp"
    try:
        probe.write_bytes(bytes(ROOM))
    finally:
        probe.unlink(missing_ok=True)


def _take_over(folder: Path, world: int, stack: ExitStack) -> None:
    """The lock; then what an earlier start has left: its outcome, half-written files, ranks that are no more."""
    stack.enter_context(lock.hold(folder))
    outcome.remove(folder)
    for half in folder.glob("*.tmp"):
        half.unlink(missing_ok=True)
    remove_left(folder, world)

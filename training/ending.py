"""The end of a start, however it comes: the lock is let go, and outcome.json says how the run ended."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mezzotint.data.errors import InputError as DataError
from mezzotint.models.errors import InputError
from mezzotint.training import lock, outcome
from mezzotint.training.distributed import Ranks


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
        yield end
        ranks.barrier()
        return
    fresh = not folder.exists()
    with ExitStack() as stack:
        ranks.alone(lambda: _take_over(folder, stack))
        try:
            yield end
        except (InputError, DataError) as error:
            if fresh and {path.name for path in folder.iterdir()} <= {lock.NAME}:
                shutil.rmtree(folder)
            else:
                outcome.write(folder, code=outcome.BAD_INPUT, step=end.step, reason=str(error))
            raise
        except BaseException as error:
            outcome.write(folder, code=outcome.CRASHED, step=end.step, reason=f"{type(error).__name__}: {error}")
            raise
        outcome.write(folder, code=end.code, step=end.step, reason=end.reason)
        ranks.barrier()


def _take_over(folder: Path, stack: ExitStack) -> None:
    stack.enter_context(lock.hold(folder))
    outcome.remove(folder)

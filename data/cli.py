"""How every command ends on bad input: one sentence on standard error and exit code 2, never a traceback."""

import errno
import sys
from collections.abc import Callable

from mezzotint.data.errors import InputError

TORCH_MEMORY = ("can't allocate memory", "out of memory")  # of a processor, of a card: torch raises RuntimeErrors
CRASHED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141  # Python's own code for a traceback; 128 and the signal
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_command(command: Callable[[], int | None], *also: type[Exception]) -> int:
    """Run `command` and return its exit code; InputError and the classes in `also` become one sentence and code 2."""
    try:
        return command() or 0
    except (Exception, KeyboardInterrupt) as error:
        code, sentence = verdict(error, *also)
        if code == CRASHED:
            raise
        if sentence:
            print(sentence, file=sys.stderr)
        return code


def verdict(error: BaseException, *also: type[Exception]) -> tuple[int, str]:
    """The code that a command ends with for `error`, and its sentence; CRASHED for what is not the user's to mend."""
    if isinstance(error, (InputError, *also)):
        return 2, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted: run the same command again to go on"
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE, ""
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in TORCH_MEMORY)
    ):
        reason = (str(error).splitlines() or ["nothing left"])[0]
        return 2, f"error: not enough memory ({reason}): take less at once, fewer or shorter rows"
    if isinstance(error, OSError) and error.filename is not None:
        return 2, f"error: {error.filename} cannot be read or written ({error.strerror}): check the path"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return (
            2,
            f"error: a file cannot be written ({error.strerror}): free some space, then run the same command again",
        )
    return CRASHED, ""

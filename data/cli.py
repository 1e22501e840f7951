"""How every command ends on bad input: one sentence on standard error and exit code 2, never a traceback."""

import errno
import sys
from collections.abc import Callable

from mezzotint.data.errors import InputError

TORCH_MEMORY = ("can't allocate memory", "out of memory")  # of a processor, of a card: torch raises RuntimeErrors
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_command(command: Callable[[], int | None], *also: type[Exception]) -> int:
    """Run `command` and return its exit code; InputError and the classes in `also` become one sentence and code 2."""
    expected: tuple[type[Exception], ...] = (InputError, *also)
    try:
        return command() or 0
    except expected as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in TORCH_MEMORY):
            raise
        reason = (str(error).splitlines() or ["nothing left"])[0]
        print(f"error: not enough memory ({reason}): take less at once, fewer or shorter rows", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except OSError as error:
        if error.filename is not None:
            place = f"{error.filename} cannot be read or written ({error.strerror}): check the path"
        elif error.errno in NO_ROOM:
            place = f"a file cannot be written ({error.strerror}): free some space, then run the same command again"
        else:  # not the user's to mend
            raise
        print(f"error: {place}", file=sys.stderr)
        return 2

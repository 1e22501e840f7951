"""A file that only grows, by whole pieces: nothing is ever half there, and a full disk costs no piece."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


class Appended:
    """Pieces appended to `path`, each on the disk when `add` returns. What finds no room waits, and is said once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._waiting: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """Append what waits, then `piece`: all of it or nothing, since half a piece would swallow the next one."""
        self._waiting.append(piece)
        whole, content = os.fstat(self._file).st_size, b"".join(self._waiting)
        try:
            if os.write(self._file, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, whole)
            if len(self._waiting) == 1:
                warn(f"{self.path} cannot be written ({error.strerror}); it waits in memory")
            return
        self._waiting = []

    def close(self) -> None:
        os.close(self._file)


def warn(sentence: str) -> None:
    """Print a warning, unless the output itself goes to the full disk."""
    with contextlib.suppress(OSError):
        print(f"warning: {sentence}", flush=True)

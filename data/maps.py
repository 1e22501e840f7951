"""Owns which files are mapped into memory: few at a time, since each holds one of the files a process may have open."""

import mmap
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError

OPEN_FILES = 128  # of the 1024 a process may usually have; the least recently used one is closed


@dataclass(frozen=True)
class FileView:
    """A file as it was when `view_file` saw it; it is mapped when it is read, and closed when others need the place."""

    path: str
    size: int
    stamp: tuple[int, int]  # inode and time of change

    def array(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        """(count,) values of `dtype` from byte `offset` on, without a copy; InputError when the file was replaced."""
        return _mapped(self)[offset : offset + count * dtype.itemsize].view(dtype)

    def bytes(self, offset: int, count: int) -> memoryview:
        """`count` bytes from byte `offset` on, fewer at the end of the file."""
        return _mapped(self)[offset : offset + count].data


def view_file(path: Path) -> FileView:
    """A view of `path` as it is now; InputError when it is missing."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: copy it again, or prepare or adopt the folder again") from error
    return FileView(str(path), found.st_size, (found.st_ino, found.st_mtime_ns))


@lru_cache(maxsize=OPEN_FILES)
def _mapped(view: FileView) -> np.ndarray:
    """(bytes,) uint8. The cache is the process's, as the limit of open files is."""
    try:
        with open(view.path, "rb") as file:
            found = os.fstat(file.fileno())
            if (found.st_size, (found.st_ino, found.st_mtime_ns)) != (view.size, view.stamp):
                raise InputError(f"{view.path} has changed since it was opened: start again, and leave it as it is")
            if view.size == 0:
                return np.zeros(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError as error:
        raise InputError(f"{view.path} is gone since it was opened: put it back and start again") from error

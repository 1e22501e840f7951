"""One trainer on a run folder at a time: a lock that dies with the process that holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from mezzotint.models.errors import InputError

NAME = "lock"
PATIENCE = 5.0  # seconds: a killed trainer of many gigabytes is not gone at once
HELD = (errno.EWOULDBLOCK, errno.EACCES)
_held: set[int] = set()  # descriptors of this process, for `_let_go`


@contextlib.contextmanager
def hold(folder: Path, *, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the run folder's lock inside the `with`; for the main rank. Waits up to `patience` seconds for another.

    Raises InputError naming the host and process that holds it. A file system without locks is said once, and passed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(descriptor)
    try:
        if _take(descriptor, path, time.monotonic() + patience):
            with contextlib.suppress(OSError):  # a full disk: the lock is held all the same, and nobody named
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)  # lets go; the file stays: removing it would let two hold one each


def _take(descriptor: int, path: Path, until: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in HELD:
                print(f"warning: {path} cannot be locked ({error.strerror}): start no second run there", flush=True)
                return False
        if time.monotonic() >= until:
            raise InputError(
                f"{path.parent} is in use by {_holder(path)}: stop that run first (touch {path.parent}/STOP), "
                "or give this one another folder with run=..."
            )
        time.sleep(0.1)


def _holder(path: Path) -> str:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return f"process {values['pid']} on {values['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _let_go() -> None:
    """In a forked child: a lock is the open file's, and a worker that outlives a killed trainer would keep it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)

"""Functions that the tests run in processes of their own."""

from __future__ import annotations

import os
import sys
import time


def add(a: int, b: int) -> tuple[str, dict]:
    print("noise on standard output")
    return "ok", {"sum": a + b, "process": os.getpid()}


def sleep(seconds: float, mark: str) -> tuple[str, dict]:
    with open(mark, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(seconds)
    return "ok", {}


def crash(message: str) -> tuple[str, dict]:
    raise ValueError(message)


def die(number: int) -> tuple[str, dict]:
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), number)
    return "ok", {}


def take(count: int) -> tuple[str, dict]:
    """Allocate `count` bytes and say how many there were."""
    return "ok", {"bytes": len(bytearray(count))}


def abort_for_memory() -> tuple[str, dict]:
    """What an allocation that fails deep in C++ looks like."""
    print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr)
    print("  what():  std::bad_alloc", file=sys.stderr, flush=True)
    os.abort()

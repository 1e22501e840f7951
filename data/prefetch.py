"""Owns the thread that makes the next values of an iterator while the caller uses the present one."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(values: Iterator[T], depth: int) -> Iterator[T]:
    """The same values in the same order, up to `depth` of them made ahead; an error is raised where it would have been.

    The thread ends when the iterator is exhausted, fails or is closed.
    """
    made: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(value: T | None, error: BaseException | None = None, *, last: bool = False) -> None:
        while not closed.is_set():
            try:
                made.put((value, error, last), timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for value in values:
                put(value)
                if closed.is_set():
                    return
        except BaseException as error:  # carried to the caller's thread, which raises it
            put(None, error, last=True)
            return
        put(None, last=True)

    thread = threading.Thread(target=work, name="mezzotint-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            value, error, last = made.get()
            if error is not None:
                raise error
            if last:
                return
            yield value  # type: ignore[misc]
    finally:
        closed.set()
        thread.join()

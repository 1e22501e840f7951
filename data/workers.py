"""Owns spawned worker processes: results in the order of the jobs, a bounded backlog, and an end with their parent."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from mezzotint.data.errors import InputError

Job = TypeVar("Job")
Result = TypeVar("Result")


def in_order(
    function: Callable[..., Result],
    jobs: Iterable[tuple[Job, tuple[Any, ...]]],
    *,
    workers: int,
    start: Callable[..., None],
    settings: tuple[Any, ...],
) -> Iterator[tuple[Job, Result]]:
    """Each job with `function(*arguments)`, in the order of `jobs`, which are (job, arguments).

    Every process begins with `start(*settings)`. No more than `2 * workers` jobs are taken ahead. Raises InputError when
    a process dies.
    """
    context = multiprocessing.get_context("spawn")  # fork would copy the threads of whoever calls
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(start, settings))
    pending: deque[tuple[Job, Future[Result]]] = deque()
    try:
        for job, arguments in jobs:
            pending.append((job, pool.submit(function, *arguments)))
            if len(pending) > 2 * workers:
                yield _first_done(pending)
        while pending:
            yield _first_done(pending)
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process died, perhaps for lack of memory: run the same command again, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _first_done(pending: deque[tuple[Job, Future[Result]]]) -> tuple[Job, Result]:
    """The oldest job, waited for."""
    job, future = pending.popleft()
    return job, future.result()


def _begin(start: Callable[..., None], settings: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is answered by the parent, once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    start(*settings)


def _end_with_parent() -> None:
    """End this worker when its parent is gone: a killed parent cannot say so, and the queue would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

"""A process that must not outlive the one that started it: nobody would know of it, and it would hold the run's lock."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def stop_with_script() -> None:
    """`stop_with_parent` for what a launch script starts, which says its id in LAUNCHED_BY.

    A script that was killed while Python started is nobody's parent any more. Without the variable: the parent there is.
    """
    stop_with_parent(int(os.environ.pop("LAUNCHED_BY", os.getppid())))


def stop_with_parent(parent: int) -> None:
    """Have SIGTERM sent to this process when the one with the id `parent`, which started it, ends, killed with -9 too.

    On Linux alone; elsewhere nothing happens. To a trainer SIGTERM means: finish the step, save, leave.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before this was set
        os.kill(os.getpid(), signal.SIGTERM)

"""How the C library gives memory back: a training step on a CPU frees and takes the same gigabyte again and again."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # options of mallopt(3)
_PAD = 1 << 28  # bytes that the heap grows by at a time


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, so that the next step finds its pages there; False where that cannot be asked.

    glibc gives large blocks back to the kernel at once, which then clears every page anew: 6 to 8% of a training step of
    the small presets. The process never shrinks below its peak after this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(option, value) == 1 for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD))
    )

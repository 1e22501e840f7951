"""Where the time of a step goes: seconds of data, forward, backward and the rest, without stopping a device to ask."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

PARTS = ("data", "forward", "backward", "step", "save", "validate")


@dataclass(frozen=True)
class Span:
    """Two marks in a device's queue; the time between them is known once the device has passed both."""

    part: str
    start: torch.cuda.Event
    end: torch.cuda.Event


class Stopwatch:
    """Adds up seconds by part of a step. Parts may nest: time inside both counts for both.

    On CUDA the marks are events in the current stream, so a part is the time that the *device* spent between them:
    a batch that is ready before the device asks costs nothing, one that it waits for costs the wait. Only `take`
    waits for the device. On a CPU it is the clock. Under a profiler the parts carry their names in the trace.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._waiting: deque[Span] = deque()
        self._free: list[torch.cuda.Event] = []  # events are used again: making one costs more than recording it

    @contextmanager
    def split(self, part: str) -> Iterator[None]:
        """Time inside the `with` belongs to `part`, one of PARTS, also when it ends in an exception."""
        if part not in self._seconds:
            raise ValueError(f"{part!r} is no part of a step: one of {', '.join(PARTS)}")
        with torch.profiler.record_function(part):
            if self._cuda:
                start = self._mark()
                try:
                    yield
                finally:
                    self._waiting.append(Span(part, start, self._mark()))
                    self._collect()
            else:
                began = time.perf_counter()
                try:
                    yield
                finally:
                    self._seconds[part] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Seconds of every part since the last call, 0 where it did not occur; waits for the device."""
        if self._waiting:
            torch.cuda.synchronize()
            self._collect()
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken

    def _mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _collect(self) -> None:
        """Add up the spans that the device has passed; asking does not wait."""
        while self._waiting and self._waiting[0].end.query():
            span = self._waiting.popleft()
            self._seconds[span.part] += span.start.elapsed_time(span.end) / 1000
            self._free += [span.start, span.end]

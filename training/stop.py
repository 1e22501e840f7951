"""A polite stop: a signal asks, the loop answers at the end of its step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Inside the `with`, the first SIGTERM or SIGINT only sets `requested`; the next one acts as it always did."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

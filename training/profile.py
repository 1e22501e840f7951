"""A trace of a few steps for chrome://tracing or Perfetto, and a table of the costliest operations beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARMUP, TRACED = 2, 3  # steps; the first ones of a start compile, allocate and tune
ROWS = 40  # of the table


class Steps:
    """What the loop tells that a step has ended; without a profiler it does nothing."""

    def __init__(self, profiler: profile | None = None) -> None:
        self._profiler = profiler

    def step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()


@contextmanager
def profiling(folder: Path, enabled: bool, rank: int) -> Iterator[Steps]:
    """Trace TRACED steps after WARMUP ones into `folder/profile/rank-N.json.gz`; training goes on after them.

    Every rank writes its own trace: a rank that the others wait for shows only beside them.
    """
    if not enabled:
        yield Steps()
        return
    place = folder / "profile"
    place.mkdir(parents=True, exist_ok=True)
    trace, written = place / f"rank-{rank}.json.gz", []

    def write(profiler: profile) -> None:
        beside = trace.with_name(f"rank-{rank}.partial.json.gz")
        profiler.export_chrome_trace(str(beside))
        os.replace(beside, trace)
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=ROWS)
        trace.with_name(f"rank-{rank}.txt").write_text(table + "\n", encoding="utf-8")
        written.append(trace)
        if rank == 0:
            print(f"profile of {TRACED} steps in {trace}, the costliest operations in rank-{rank}.txt", flush=True)

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    plan = schedule(wait=0, warmup=WARMUP, active=TRACED, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as profiler:
        yield Steps(profiler)
    if not written and rank == 0:
        print(f"no profile: the run ended before its step {WARMUP + 1} of this start", flush=True)

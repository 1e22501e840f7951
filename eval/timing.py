"""How a step is timed: warm-up until stable, quantiles, load average, interleaved order.

On a CPU a sample is one call on the wall clock. On CUDA it is the time between two events around so many calls, back to
back, that they take SAMPLE_SECONDS, over their number: no call waits for the one before to be read.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

NOISY_SPREAD = 1.5  # p90 over p10 above which a cell is marked noisy
SAMPLE_SECONDS = 0.02  # of the calls of one sample on CUDA


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """When warm-up and timing end. Timing stops at `steps` samples or after `seconds`, never before `least`.

    Warm-up goes in rounds of `warmups` samples and ends when the medians of two rounds agree within `warmup_tolerance`,
    or after `warmup_rounds`. A call that takes more than `warmup_seconds` is warmed up by one sample.
    """

    steps: int = 30
    seconds: float = 2.0
    least: int = 5
    warmups: int = 3
    warmup_rounds: int = 5
    warmup_tolerance: float = 0.02
    warmup_seconds: float = 2.0


FULL = Protocol()
QUICK = Protocol(steps=10, seconds=0.4, least=3, warmups=1, warmup_rounds=3, warmup_seconds=0.3)


@dataclass(frozen=True)
class Sample:
    """Seconds of one call."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: quantiles of wall time over `n` samples, median processor time, load average at their end.

    Processor time (of all threads) leaves out the time in which other processes had the core.
    """

    p10: float
    p50: float
    p90: float
    n: int
    load: float
    cpu: float
    warmups: int = 0  # samples that came before

    @property
    def noisy(self) -> bool:
        return self.p90 > NOISY_SPREAD * self.p10

    def to_dict(self, name: str) -> dict[str, float | int]:
        wall = {f"{name}_p10_s": self.p10, f"{name}_s": self.p50, f"{name}_p90_s": self.p90}
        return wall | {f"{name}_cpu_s": self.cpu, f"{name}_n": self.n, f"{name}_warmups": self.warmups}


def measure(call: Callable[[], object], *, protocol: Protocol = FULL, device: str | torch.device = "cpu") -> Timing:
    """Time `call` alone."""
    return interleave({"call": call}, protocol=protocol, device=device)["call"]


def interleave(
    calls: Mapping[str, Callable[[], object]],
    *,
    protocol: Protocol = FULL,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> dict[str, Timing]:
    """Time several calls in alternation, in an order drawn anew each round, so that load falls on all of them alike.

    `protocol.seconds` is for each call. Every call is warmed up first, until two successive medians agree.
    """
    warm = {name: _warm_up(call, protocol=protocol, device=device) for name, call in calls.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    order, rng = list(calls), random.Random(seed)
    started = time.perf_counter()
    while not _enough(len(samples[order[0]]), time.perf_counter() - started, len(calls), protocol):
        rng.shuffle(order)
        for name in order:
            samples[name].append(_sample(calls[name], device, repeats=warm[name].repeats))
    return {name: summarize(values, warmups=warm[name].samples) for name, values in samples.items()}


def summarize(samples: list[Sample], *, warmups: int = 0) -> Timing:
    """Quantiles by linear interpolation."""
    wall = torch.tensor([sample.wall for sample in samples], dtype=torch.float64)
    p10, p50, p90 = wall.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    cpu = statistics.median(sample.cpu for sample in samples)
    return Timing(p10=p10, p50=p50, p90=p90, n=len(samples), load=load_average(), cpu=cpu, warmups=warmups)


def load_average() -> float:
    """Runnable processes of the machine over the last minute."""
    return os.getloadavg()[0]


def _enough(count: int, elapsed: float, calls: int, protocol: Protocol) -> bool:
    return count >= protocol.least and (count >= protocol.steps or elapsed >= protocol.seconds * calls)


@dataclass(frozen=True)
class _Warm:
    """A call that is warm: samples taken, and calls of one sample from now on."""

    samples: int
    repeats: int


def _warm_up(call: Callable[[], object], *, protocol: Protocol, device: str | torch.device) -> _Warm:
    walls: list[float] = []
    previous = math.inf
    for _ in range(protocol.warmup_rounds):
        for _ in range(protocol.warmups):
            walls.append(_sample(call, device, repeats=1).wall)
            if walls[-1] > protocol.warmup_seconds:
                return _Warm(len(walls), 1)
        median = statistics.median(walls[-protocol.warmups :])
        if abs(median - previous) <= protocol.warmup_tolerance * median:
            break
        previous = median
    on_card = torch.device(device).type == "cuda"
    return _Warm(len(walls), max(1, math.ceil(SAMPLE_SECONDS / min(walls))) if on_card else 1)


def _sample(call: Callable[[], object], device: str | torch.device, *, repeats: int) -> Sample:
    if torch.device(device).type == "cuda":
        return _card_sample(call, torch.device(device), repeats=repeats)
    started, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    return Sample((time.perf_counter() - started) / repeats, (time.process_time() - cpu) / repeats)


def _card_sample(call: Callable[[], object], device: torch.device, *, repeats: int) -> Sample:
    cpu = time.process_time()
    with torch.cuda.device(device):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(repeats):
            call()
        last.record()
        last.synchronize()
    return Sample(first.elapsed_time(last) / 1e3 / repeats, (time.process_time() - cpu) / repeats)


def synchronize(device: str | torch.device) -> None:
    """Wait for the device's queue; nothing to wait for on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)

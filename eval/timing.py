"""How a step is timed: warm-up until stable, quantiles, load average, interleaved order."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

NOISY_SPREAD = 1.5  # p90 over p10 above which a cell is marked noisy


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """When warm-up and timing end. Timing stops at `steps` samples or after `seconds`, never before `least`.

    A call longer than `warmup_seconds` is warmed up by `warmups` samples alone.
    """

    steps: int = 30
    seconds: float = 2.0
    least: int = 5
    warmups: int = 5  # samples in each of the two medians that must agree
    warmup_tolerance: float = 0.02
    warmup_seconds: float = 2.0


FULL = Protocol()
QUICK = Protocol(steps=10, seconds=0.4, least=3, warmups=1, warmup_seconds=0.3)


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

    @property
    def noisy(self) -> bool:
        return self.p90 > NOISY_SPREAD * self.p10

    def to_dict(self, name: str) -> dict[str, float | int]:
        wall = {f"{name}_p10_s": self.p10, f"{name}_s": self.p50, f"{name}_p90_s": self.p90}
        return wall | {f"{name}_cpu_s": self.cpu, f"{name}_n": self.n}


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
    for call in calls.values():
        _warm_up(call, protocol=protocol, device=device)
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    order, rng = list(calls), random.Random(seed)
    started = time.perf_counter()
    while not _enough(len(samples[order[0]]), time.perf_counter() - started, len(calls), protocol):
        rng.shuffle(order)
        for name in order:
            samples[name].append(_once(calls[name], device))
    return {name: summarize(values) for name, values in samples.items()}


def summarize(samples: list[Sample]) -> Timing:
    """Quantiles by linear interpolation."""
    wall = torch.tensor([sample.wall for sample in samples], dtype=torch.float64)
    p10, p50, p90 = wall.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    cpu = statistics.median(sample.cpu for sample in samples)
    return Timing(p10=p10, p50=p50, p90=p90, n=len(samples), load=load_average(), cpu=cpu)


def load_average() -> float:
    """Runnable processes of the machine over the last minute."""
    return os.getloadavg()[0]


def _enough(count: int, elapsed: float, calls: int, protocol: Protocol) -> bool:
    return count >= protocol.least and (count >= protocol.steps or elapsed >= protocol.seconds * calls)


def _warm_up(call: Callable[[], object], *, protocol: Protocol, device: str | torch.device) -> None:
    started, previous = time.perf_counter(), float("inf")
    while True:
        median = statistics.median(_once(call, device).wall for _ in range(protocol.warmups))
        stable = abs(median - previous) <= protocol.warmup_tolerance * median
        if stable or time.perf_counter() - started > protocol.warmup_seconds:
            return
        previous = median


def _once(call: Callable[[], object], device: str | torch.device) -> Sample:
    started, cpu = time.perf_counter(), time.process_time()
    call()
    synchronize(device)
    return Sample(time.perf_counter() - started, time.process_time() - cpu)


def synchronize(device: str | torch.device) -> None:
    """Wait for the device's queue; nothing to wait for on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)

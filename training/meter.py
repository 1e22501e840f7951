"""Adds up the work of steps, and writes training and validation records and the lines a user watches."""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path

import torch

from mezzotint.training import strict
from mezzotint.training.board import import_wandb
from mezzotint.training.breakdown import BINS, Breakdown, means, named
from mezzotint.training.engine import precision
from mezzotint.training.evaluating import evaluating
from mezzotint.training.metrics import Log, Work, progress_line
from mezzotint.training.pace import Costly, Pace
from mezzotint.training.peak import device_peak
from mezzotint.training.run import Run, Step
from mezzotint.training.stopwatch import PARTS, Stopwatch
from mezzotint.training.validate import Bound, HeldOut, bound


class Meter:
    """Adds up steps between records, and writes records on the main rank. Making one, `log`, `validate` are collective."""

    def __init__(self, run: Run, first: int) -> None:
        self.run, self.first, self.step = run, first, first
        self.watch = Stopwatch(run.ranks.device)
        self.peak = _peak(run)
        self._log = _open(run, first)
        kept = self._log.kept if self._log is not None else []
        self._before = self._log.seconds_before if self._log is not None else 0.0
        self._counts = {name: sum(record.get("event") == name for record in kept) for name in ("skipped", "spike")}
        self._breakdown = Breakdown(run.plan.noise.row_blocks, run.ranks.device)
        self._pace = _pace(run, kept)
        self.begun = self.since = time.perf_counter()
        self._paced, self._pace_since = first, self.begun
        self.logged, self.work = first, Work()
        if self._log is not None:
            start = {"world": run.ranks.world, "host": socket.gethostname(), "pid": os.getpid()}
            self._log.write("start", first, start | {"seconds": self._seconds()})

    def add(self, step: Step) -> None:
        """A step is done. One that was skipped, or was a spike, is written down at once: a record may never come."""
        self.step += 1
        self.work += step.work
        if not step.skipped:  # its sums may be NaN
            self._breakdown.add(step.details)
        if step.skipped:
            self._event("skipped", step, {"rows": list(step.bad_rows)})
        if step.spike:
            self._event("spike", step, {"reason": step.spike})
        if self.step == self.first + 1:  # the first step of a start compiles and allocates: it says nothing of the rest
            self._paced, self._pace_since = self.step, time.perf_counter()

    def log(self, step: int, result: Step) -> None:
        """One training record and the progress line: this step's loss, rates and times since the last record."""
        bins, seconds, memory = self._gather()
        now = time.perf_counter()
        steps, taken = step - self.logged, now - self.since
        if self._log is not None:
            unique, supervised, flops = (value / taken for value in self.work.values())
            values = {
                "loss": result.loss,
                "lr": result.lr,
                "gradient_norm": result.gradient_norm,
                "tokens": step * self.run.plan.config.rows_per_step * self.run.plan.config.data.row_length,
                "unique_tokens_per_second": unique,
                "supervised_tokens_per_second": supervised,
                "flops_per_second": flops,
                "utilization": flops / (self.peak * self.run.ranks.world),
                "rows_hash": result.rows_hash,
                "seconds": self._seconds(),
                "seconds_per_step": taken / steps,
                **_per_step(seconds / steps, taken / steps),
                "memory_bytes": memory,
                "skipped_steps": self._counts["skipped"],
                "spikes": self._counts["spike"],
                **named(*means(bins), row_blocks=self._breakdown.row_blocks),
            }
            left = self._seconds_left(step, now, saving=float(seconds[:, PARTS.index("save")].mean()))
            self._log.write("train", step, values | {"seconds_left": left})
            self.run.ranks.say(progress_line(step, self._pace.steps, values, left))
        self.since = self._pace_since = time.perf_counter()
        self.logged = self._paced = step
        self.work = Work()

    def validate(self, step: int, held_out: HeldOut) -> bool:
        """The bound of the averaged weights if the run keeps any, else of the trained ones.

        False, and nothing is written down, when somebody asked to stop in the middle.
        """
        began = time.perf_counter()
        with self.watch.split("validate"):
            result = self._bound(held_out)
        taken = time.perf_counter() - began
        self.since += taken  # rates are of training alone
        self._pace_since += taken
        if result is None:
            return False
        self._pace.bounds.add(taken)
        if self._log is not None:
            self._log.write("validation", step, result.record() | {"bound_seconds": taken, "seconds": self._seconds()})
            self.run.ranks.say(
                f"step {step}: bound {result.nats_per_token:.4f} +- {result.nats_per_token_error:.4f} nats/token, "
                f"{result.bits_per_byte:.4f} +- {result.bits_per_byte_error:.4f} bits/byte"
            )
        return True

    def close(self) -> None:
        """Write down how far this start came, and close the files."""
        if self._log is not None:
            self._log.write("end", self.step, {"seconds": self._seconds()})
            self._log.close()

    def _seconds_left(self, step: int, now: float, *, saving: float) -> float | None:
        """After `step`, with what the steps since the last record and the saves among them took."""
        pace = self._pace
        # a save follows the record of its step; that of the first step belongs to the start before
        before = self.logged - (self.logged > self.first)
        pace.saves.add(saving, pace.saves.due(before, step - 1, last=pace.steps))
        pace.add(step - self._paced, now - self._pace_since - saving)
        return pace.seconds_left(step)

    def _event(self, name: str, step: Step, about: dict) -> None:
        self._counts[name] += 1
        if self._log is not None:
            values = {"event": name, "loss": step.loss, "gradient_norm": step.gradient_norm, **about}
            self._log.write("event", self.step, values | {"seconds": self._seconds()})

    def _bound(self, held_out: HeldOut) -> Bound | None:
        run = self.run
        config = run.plan.config
        with evaluating(run) as objective, precision(config.engine, run.ranks.device):
            return bound(
                objective,
                held_out,
                config=config.validation,
                micro_rows=config.micro_rows,
                ranks=run.ranks,
                stopped=self._stopped,
            )

    def _stopped(self) -> bool:
        self.run.dog.beat("validate")
        if self.run.ranks.main:
            self.run.stop.poll()
        return self.run.stop.requested

    def _gather(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Since the last record: sums by bin; seconds (ranks, PARTS); the most memory of a rank so far. One reduction."""
        ranks = self.run.ranks
        mine = torch.zeros(ranks.world, len(PARTS) + 1, dtype=torch.float64)  # every rank fills its own line
        mine[ranks.rank] = torch.tensor([*self.watch.take().values(), peak_memory(ranks.device)])
        total = ranks.sum(torch.cat([self._breakdown.take(), mine.flatten()]))
        lines = total[2 * BINS :].view(mine.shape)
        return total[: 2 * BINS], lines[:, :-1], int(lines[:, -1].max())

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self.begun


def _per_step(seconds: torch.Tensor, whole: float) -> dict[str, float]:
    """Keys of a record from seconds a step (ranks, PARTS): means over ranks, and the longest wait for data of a rank."""
    mean = dict(zip(PARTS, seconds.mean(dim=0).tolist()))
    rest = whole - sum(mean[part] for part in PARTS if part != "validate")
    shown = {part: value for part, value in mean.items() if value or part not in ("save", "validate")}
    named_parts = {f"seconds_{part}": value for part, value in shown.items()}
    slowest = float(seconds[:, PARTS.index("data")].max())
    return named_parts | {"seconds_other": max(0.0, rest), "seconds_data_slowest": slowest}


def _pace(run: Run, kept: list[dict]) -> Pace:
    """Bounds and pace of earlier starts are first guesses; a pace on another number of ranks says nothing."""
    config = run.plan.config
    worlds = [record["world"] for record in kept if record["kind"] == "start" and "world" in record]
    paces = [record["seconds_per_step"] for record in kept if "seconds_per_step" in record]
    bounds = Costly(config.validation.every if run.plan.held_out is not None else 0)
    for record in kept:
        if "bound_seconds" in record:
            bounds.add(record["bound_seconds"])
    guess = paces[-1] if paces and worlds and worlds[-1] == run.ranks.world else None
    return Pace(steps=config.steps, bounds=bounds, saves=Costly(config.checkpoint.every), guess=guess)


def _peak(run: Run) -> float:
    """FLOP/s of one device, as the recipe has it or as the device says."""
    given = run.plan.config.log.peak_tflops
    if given is not None:
        return given * 1e12
    narrow = run.plan.config.engine.precision != "float32"
    return device_peak(run.ranks.device, torch.bfloat16 if narrow else torch.float32)


def _open(run: Run, first: int) -> Log | None:
    """The log, on the main rank. What it cannot open ends all ranks: one alone would leave the others waiting."""
    config, ranks = run.plan.config, run.ranks
    if config.log.wandb is not None:
        import_wandb()
    return ranks.alone(lambda: Log(run.folder, first_step=first, config=config.log, recipe=strict.unstructure(config)))


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: of tensors on a CUDA device, else of this process in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage starts with the peak of the process that started this one
        peaks = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return 1024 * int(peaks[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

"""Adds up the work of steps, and writes training and validation records and the lines a user watches."""

from __future__ import annotations

import time
from contextlib import nullcontext

from mezzotint.training.engine import precision
from mezzotint.training.metrics import Log, Work, device_peak, progress_line
from mezzotint.training.run import Run, Step
from mezzotint.training.validate import HeldOut, bound


class Meter:
    """Adds up steps between records, and writes records on the main rank."""

    def __init__(self, run: Run, first: int) -> None:
        self.run, self.first = run, first
        config = run.plan.config
        self.peak = device_peak(config.log, run.ranks.device, autocast=config.engine.precision == "autocast")
        self._log = Log(run.folder, first_step=first, tensorboard=config.log.tensorboard) if run.ranks.main else None
        self._before = self._log.seconds_before if self._log is not None else 0.0
        self.begun = self.since = time.perf_counter()
        self.work = Work()

    def add(self, step: Step) -> None:
        self.work += step.work

    def log(self, step: int, result: Step) -> None:
        """One training record and the progress line: this step's loss, rates since the last record."""
        if self._log is None:
            return
        now = time.perf_counter()
        unique, supervised, flops = (value / (now - self.since) for value in self.work.values())
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
        }
        self._log.write("train", step, values)
        steps = self.run.plan.config.steps
        left = (now - self.begun) / (step - self.first) * (steps - step)
        print(progress_line(step, steps, values, left), flush=True)
        self.since, self.work = time.perf_counter(), Work()

    def validate(self, step: int, held_out: HeldOut) -> None:
        """The bound of the averaged weights if the run keeps any, else of the trained ones; collective."""
        run, began = self.run, time.perf_counter()
        config, model = run.plan.config, run.engine.objective.model
        averaged = run.ema.swapped_in(model) if run.ema is not None else nullcontext()
        with averaged, precision(config.engine, run.ranks.device):
            result = bound(
                run.engine.objective,
                held_out,
                config=config.validation,
                micro_rows=config.micro_rows,
                ranks=run.ranks,
            )
        if self._log is not None:
            self._log.write("validation", step, result.record() | {"seconds": self._seconds()})
            print(
                f"step {step}: bound {result.nats_per_token:.4f} +- {result.nats_per_token_error:.4f} nats/token, "
                f"{result.bits_per_byte:.4f} +- {result.bits_per_byte_error:.4f} bits/byte",
                flush=True,
            )
        self.since += time.perf_counter() - began  # rates are of training alone

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self.begun

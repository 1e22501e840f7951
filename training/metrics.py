"""What a run writes down as it goes: JSONL without gaps or repeats, the boards beside it, and a line with the time left."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from mezzotint.models.config import ModelConfig, pass_flops, visible_pairs
from mezzotint.models.errors import InputError
from mezzotint.training.append import Appended
from mezzotint.training.board import Board, Record, TensorBoard, Wandb
from mezzotint.training.noise import Noise

DRAWN = ("train", "validation", "event")  # kinds of records that the boards get too


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """every: steps between records; wandb: name of a project, null for none."""

    every: int = 10
    tensorboard: bool = True
    wandb: str | None = None
    peak_tflops: float | None = None  # of one device, for utilization; null: known GPUs by name, else measured at start

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"log.every is {self.every}; it must be at least 1")
        if self.wandb == "":
            raise InputError("log.wandb is empty; give the name of a project, or null")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise InputError(f"log.peak_tflops is {self.peak_tflops}; it must be above 0, or null")


@dataclass(frozen=True)
class Work:
    """What a step, or several, has done."""

    unique_tokens: float = 0.0  # tokens of the rows, each once
    supervised_tokens: float = 0.0  # tokens of the blocks that were denoised
    flops: float = 0.0  # forward and backward of cut rows; recomputation and invisible tiles do not count

    def __add__(self, other: Work) -> Work:
        return Work(*(mine + theirs for mine, theirs in zip(self.values(), other.values())))

    def values(self) -> list[float]:
        return [self.unique_tokens, self.supervised_tokens, self.flops]


def count_work(config: ModelConfig, noise: Noise, *, row_length: int, masked: int) -> Work:
    """Work of a forward and backward pass over a micro-batch cut at its largest frontier; ignores document borders."""
    rows, size = len(noise.frontiers), config.block_length
    clean_blocks = int(noise.frontiers.max())
    used = noise.valid.sum(dim=1).tolist()
    pairs = sum(
        visible_pairs(config, clean_blocks=clean_blocks, frontiers=places[:n])
        for places, n in zip(noise.frontiers.tolist(), used)
    )
    noisy = sum(used) * size
    forward = pass_flops(
        config, clean_tokens=rows * clean_blocks * size, noisy_tokens=noisy, pairs=pairs, logits=masked
    )
    return Work(rows * row_length, noisy, 3 * forward)


class Log:
    """The records of a run, on its main rank. Opening at step N drops what an interrupted start wrote for later steps.

    kept: the records of earlier starts, up to step N. What a full disk does not take waits in memory: training goes on.
    """

    def __init__(self, folder: Path, *, first_step: int, config: LogConfig, recipe: Record) -> None:
        path = folder / "metrics.jsonl"
        self.kept = _truncate(path, first_step) if path.exists() else []
        seconds = [r["seconds"] for r in self.kept if isinstance(r.get("seconds"), float | int)]
        self.seconds_before = seconds[-1] if seconds else 0.0  # training time of earlier starts
        self._file = Appended(path)
        self._boards: list[Board] = [TensorBoard(folder, first_step=first_step)] if config.tensorboard else []
        if config.wandb is not None:
            drawn = [record for record in self.kept if record["kind"] in DRAWN]
            self._boards.append(Wandb(folder, config.wandb, recipe=recipe, before=drawn))

    def write(self, kind: str, step: int, values: dict) -> None:
        """One record, on the disk when this returns; step: optimizer steps done. What is not finite becomes null."""
        record = {"kind": kind, "step": step, "time": time.time(), **values}
        record = {name: value if _finite(value) else None for name, value in record.items()}
        self._file.add((json.dumps(record) + "\n").encode())
        if kind in DRAWN:
            for board in self._boards:
                board.write(record)

    def close(self) -> None:
        self._file.close()
        for board in self._boards:
            board.close()


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def read_records(path: Path) -> list[dict]:
    """The records of a metrics file, in order, without lines that a crash or a full disk has cut off."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith("\n") else None
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _truncate(path: Path, first_step: int) -> list[dict]:
    """Keep whole records of steps up to `first_step` and return them; the file is replaced in one move."""
    kept = [record for record in read_records(path) if record["step"] <= first_step]
    beside = path.with_suffix(".tmp")
    with open(beside, "w", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in kept))
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    return kept


def progress_line(step: int, steps: int, values: dict, seconds_left: float | None) -> str:
    """The line a user watches."""
    return (
        f"step {step}/{steps}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  grad {values['gradient_norm']:.2f}  "
        f"{values['unique_tokens_per_second']:,.0f} tok/s  {values['supervised_tokens_per_second']:,.0f} supervised/s  "
        f"{values['utilization']:.0%} of peak  {duration(seconds_left)} left"
    )


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds below a day, else days; a dash for what is not known."""
    if seconds is None:
        return "-"
    if seconds >= 86_400:
        return f"{seconds / 86_400:.1f} days"
    return time.strftime("%H:%M:%S", time.gmtime(seconds))

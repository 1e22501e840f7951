"""Cells of a speed sweep: which there are, what each needs in memory, and how a number of tokens is written."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mezzotint.eval.doctor import device_name
from mezzotint.eval.memory import HEADROOM, available_bytes
from mezzotint.eval.subjects import Subject
from mezzotint.models.config import ModelConfig, parameter_count, state_bytes
from mezzotint.models.errors import InputError

MOST_THREADS = 1024
CONTEXTS = (1024, 4096, 16384, 65536, 262144)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("eager", "cudagraph")


def require_threads(count: int) -> None:
    """InputError for a number of threads that no machine has; the OpenMP library would end the process."""
    if not 1 <= count <= MOST_THREADS:
        raise InputError(f"--threads is {count}; it must be from 1 to {MOST_THREADS}, best the number of cores")


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Which contexts (tokens) and batches are measured, how, and on what."""

    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = (1,)
    most_rows: int = 0  # above 0: also batches of 1, 2, 4, ... rows up to this many or to the first that does not fit
    modes: tuple[str, ...] = ("eager",)
    dtype: str | None = None  # None: bfloat16 on CUDA and for the presets 1b and 3b, else float32
    device: str = "cpu"
    threads: int = 1
    prefill_chunk: int | None = None  # tokens committed at once; None: 512, or 128 when quick
    quick: bool = False  # fewer and shorter samples
    isolated: bool = False  # a process of its own for every cell
    timeout: float | None = None  # seconds a cell may take, where it has its own process
    memory_limit: int | None = None  # bytes of address space of that process
    try_all: bool = False  # also what is predicted not to fit
    seed: int = 0  # of the order of cells and of the random state

    def __post_init__(self) -> None:
        for name, values in (("contexts", self.contexts), ("batches", self.batches)):
            if not values or min(values) < 1:
                raise InputError(f"--{name} must list numbers of at least 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; one of {', '.join(DTYPES)}")
        for mode in self.modes:
            if mode not in MODES:
                raise InputError(f"unknown mode {mode!r}; one of {', '.join(MODES)}")
        if "cudagraph" in self.modes and not self.device.startswith("cuda"):
            raise InputError("graphs are captured on a CUDA device: leave --modes out, or give --device cuda")
        require_threads(self.threads)
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise InputError(f"--prefill-chunk is {self.prefill_chunk}; it must be at least 1")
        if self.timeout is not None and self.timeout <= 0:
            raise InputError(f"--timeout is {self.timeout:g}; it must be above 0 seconds")
        if not self.isolated and (self.timeout or self.memory_limit):
            raise InputError("--timeout and --memory-limit need a process for each cell: leave --in-process out")


@dataclass(frozen=True)
class Cell:
    """One subject at one context and batch, run in one mode; `again`: the sweep's first cell, measured last once more."""

    subject: Subject
    context: int
    batch: int
    speed: SpeedConfig
    mode: str = "eager"
    again: bool = False

    @property
    def dtype(self) -> str:
        if self.speed.dtype is not None:
            return self.speed.dtype
        large = self.subject.folder is None and self.subject.name.startswith(("1b-", "3b-"))
        return "bfloat16" if large or self.speed.device.startswith("cuda") else "float32"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def weight_bytes(self) -> int:
        return parameter_count(self.subject.config) * self.itemsize

    @property
    def max_length(self) -> int:
        """Tokens the state has room for: the context and one block more."""
        return self.context + self.subject.config.block_length

    @property
    def state_bytes(self) -> int:
        return state_bytes(self.subject.config, batch=self.batch, length=self.max_length, itemsize=self.itemsize)

    @property
    def needed_bytes(self) -> int:
        """Weights and state."""
        return self.weight_bytes + self.state_bytes

    @property
    def work_bytes(self) -> int:
        """About what a pass holds beside them: activations, new SSM states, logits and their float64 softmax."""
        config, on_card = self.subject.config, self.speed.device.startswith("cuda")
        g, tokens = config.block_length, max(2 * config.block_length, prefill_tokens(self))
        activations = tokens * (3 * config.d_ff + 4 * config.d_model + 3 * config.d_inner) * self.itemsize
        states = (tokens // config.chunk_length + 2) * config.d_inner * config.d_state * 8 * ("M" in config.pattern)
        logits = g * config.vocab_size * (self.itemsize + 24)
        scores = 12 * config.n_heads * 2 * g * self.max_length * ("A" in config.pattern and on_card)
        return self.batch * (activations + states + logits + scores)

    @property
    def identity(self) -> dict[str, object]:
        """What makes a measurement the same one."""
        return {
            "task": "speed/drift" if self.again else "speed",
            "subject": self.subject.name,
            "context": self.context,
            "batch": self.batch,
            "mode": self.mode,
            "dtype": self.dtype,
            "device": self.speed.device,
            "machine": device_name(self.speed.device),
            "threads": self.speed.threads,
            "prefill_chunk": prefill_tokens(self),
            "protocol": "quick" if self.speed.quick else "full",
        }

    def fits(self, *, loaded: bool) -> bool:
        """Whether the cell is predicted to fit into what is available now; `loaded`: the weights are there already."""
        need = self.work_bytes + (self.state_bytes if loaded else self.needed_bytes)
        return need <= HEADROOM * available_bytes(self.speed.device, limit=self.speed.memory_limit)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can say it, for another process."""
        subject, folder = self.subject, self.subject.folder
        return {
            "subject": {
                "name": subject.name,
                "fingerprint": subject.fingerprint,
                "config": subject.config.to_dict(),
                "folder": None if folder is None else str(folder),
            },
            "speed": dataclasses.asdict(self.speed),
            "context": self.context,
            "batch": self.batch,
            "mode": self.mode,
            "again": self.again,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cell:
        """The inverse of to_dict."""
        own, speed = values["subject"], dict(values["speed"])
        folder = None if own["folder"] is None else Path(own["folder"])
        subject = Subject(own["name"], own["fingerprint"], ModelConfig.from_dict(own["config"]), folder)
        for name in ("contexts", "batches", "modes"):
            speed[name] = tuple(speed[name])
        rest = {name: values[name] for name in ("context", "batch", "mode", "again")}
        return cls(subject, speed=SpeedConfig(**speed), **rest)


def prefill_tokens(cell: Cell) -> int:
    """Tokens of the timed prefill chunk: whole blocks, no more than the context holds."""
    g = cell.subject.config.block_length
    wanted = cell.speed.prefill_chunk or (128 if cell.speed.quick else 512)
    return max(g, min(wanted, cell.context) // g * g)


def list_cells(subjects: list[Subject], speed: SpeedConfig) -> list[Cell]:
    """All cells in drawn order; batches of one subject, mode and context follow each other, the smallest first.

    In one process for all, one subject comes after the other, since only one model is held at a time. Contexts are
    rounded down to whole blocks; a context shorter than a block is refused.
    """
    rows = set(speed.batches) | {2**i for i in range(speed.most_rows.bit_length())}
    runs: list[list[Cell]] = []
    for subject in subjects:
        g = subject.config.block_length
        if min(speed.contexts) < g:
            raise InputError(f"context {min(speed.contexts)} is shorter than a block of {g} tokens of {subject.name}")
        contexts = sorted({context // g * g for context in speed.contexts})
        own = [
            [Cell(subject, context, batch, speed, mode) for batch in sorted(rows)]
            for mode in speed.modes
            for context in contexts
        ]
        random.Random(f"{speed.seed}/{subject.name}").shuffle(own)
        runs += own
    if speed.isolated:
        random.Random(f"{speed.seed}").shuffle(runs)
    return [cell for run in runs for cell in run]


def parse_counts(text: str) -> tuple[int, ...]:
    """`1k,4k,262144` -> (1024, 4096, 262144); k is 1024. Raises InputError naming the part that is no number."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([kKmM]?)", part.strip())
        if match is None:
            raise InputError(f"{part.strip()!r} is no number of tokens; write for example 1k,4k,16k or 2048")
        counts.append(int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()])
    return tuple(counts)


def parse_bytes(text: str) -> int:
    """`8G` -> 8 * 10^9, `8Gi` -> 8 * 2^30; also M, Mi and plain bytes. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(|M|G|T|Mi|Gi|Ti)B?", text.strip())
    if match is None:
        raise InputError(f"{text!r} is no number of bytes; write for example 8G (10^9) or 8Gi (2^30)")
    units = {"": 1, "M": 10**6, "G": 10**9, "T": 10**12, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    return int(float(match[1]) * units[match[2]])

"""Cells of a speed sweep: which there are, what each needs in memory, and how a number of tokens is written."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import torch

from mezzotint.eval.memory import HEADROOM, available_bytes
from mezzotint.eval.subjects import Subject
from mezzotint.models.config import parameter_count, state_bytes
from mezzotint.models.errors import InputError

MOST_THREADS = 1024
CONTEXTS = (1024, 4096, 16384, 65536, 262144)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def require_threads(count: int) -> None:
    """InputError for a number of threads that no machine has; the OpenMP library would end the process."""
    if not 1 <= count <= MOST_THREADS:
        raise InputError(f"--threads is {count}; it must be from 1 to {MOST_THREADS}, best the number of cores")


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Which contexts (tokens) and batches are measured, how, and on what."""

    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = (1,)
    dtype: str | None = None  # None: bfloat16 on CUDA and for the presets 1b and 3b, else float32
    device: str = "cpu"
    threads: int = 1
    prefill_chunk: int | None = None  # tokens committed at once; None: 512, or 128 when quick
    quick: bool = False  # fewer and shorter samples
    seed: int = 0  # of the order of cells and of the random state

    def __post_init__(self) -> None:
        for name, values in (("contexts", self.contexts), ("batches", self.batches)):
            if not values or min(values) < 1:
                raise InputError(f"--{name} must list numbers of at least 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; one of {', '.join(DTYPES)}")
        require_threads(self.threads)
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise InputError(f"--prefill-chunk is {self.prefill_chunk}; it must be at least 1")


@dataclass(frozen=True)
class Cell:
    """One subject at one context and batch."""

    subject: Subject
    context: int
    batch: int
    speed: SpeedConfig

    @property
    def dtype(self) -> str:
        if self.speed.dtype is not None:
            return self.speed.dtype
        large = self.subject.folder is None and self.subject.name.startswith(("1b-", "3b-"))
        return "bfloat16" if large or self.speed.device.startswith("cuda") else "float32"

    @property
    def weight_bytes(self) -> int:
        return parameter_count(self.subject.config) * DTYPES[self.dtype].itemsize

    @property
    def max_length(self) -> int:
        """Tokens the state has room for: the context and one block more."""
        return self.context + self.subject.config.block_length

    @property
    def state_bytes(self) -> int:
        itemsize = DTYPES[self.dtype].itemsize
        return state_bytes(self.subject.config, batch=self.batch, length=self.max_length, itemsize=itemsize)

    @property
    def needed_bytes(self) -> int:
        """Weights and state; activations are left to the headroom."""
        return self.weight_bytes + self.state_bytes

    @property
    def identity(self) -> dict[str, object]:
        """What makes a measurement the same one."""
        return {
            "task": "speed",
            "subject": self.subject.name,
            "context": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "device": self.speed.device,
            "threads": self.speed.threads,
            "prefill_chunk": prefill_tokens(self),
            "protocol": "quick" if self.speed.quick else "full",
        }

    def fits(self, *, loaded: bool) -> bool:
        """Whether the cell is predicted to fit into what is available now; `loaded`: the weights are there already."""
        need = self.state_bytes if loaded else self.needed_bytes
        return need <= HEADROOM * available_bytes(self.speed.device)


def prefill_tokens(cell: Cell) -> int:
    """Tokens of the timed prefill chunk: whole blocks, no more than the context holds."""
    g = cell.subject.config.block_length
    wanted = cell.speed.prefill_chunk or (128 if cell.speed.quick else 512)
    return max(g, min(wanted, cell.context) // g * g)


def list_cells(subjects: list[Subject], speed: SpeedConfig) -> list[Cell]:
    """All cells, one subject after the other (only one model is held at a time), in drawn order within a subject.

    Contexts are rounded down to whole blocks; a context shorter than a block is refused.
    """
    cells: list[Cell] = []
    for subject in subjects:
        g = subject.config.block_length
        if min(speed.contexts) < g:
            raise InputError(f"context {min(speed.contexts)} is shorter than a block of {g} tokens of {subject.name}")
        contexts = sorted({context // g * g for context in speed.contexts})
        own = [Cell(subject, context, batch, speed) for context in contexts for batch in sorted(set(speed.batches))]
        random.Random(f"{speed.seed}/{subject.name}").shuffle(own)
        cells += own
    return cells


def parse_counts(text: str) -> tuple[int, ...]:
    """`1k,4k,262144` -> (1024, 4096, 262144); k is 1024. Raises InputError naming the part that is no number."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([kKmM]?)", part.strip())
        if match is None:
            raise InputError(f"{part.strip()!r} is no number of tokens; write for example 1k,4k,16k or 2048")
        counts.append(int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()])
    return tuple(counts)

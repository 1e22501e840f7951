"""Which retrieval cells there are: subjects, tasks, lengths; what each needs, and how a row of results is named."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch

from mezzotint.data.tasks.catalog import make_sample, options
from mezzotint.data.tasks.sample import Task
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.eval.cells import DTYPES
from mezzotint.eval.draws import DESIGN
from mezzotint.eval.memory import HEADROOM, available_bytes
from mezzotint.eval.retrieval_subjects import require_trained, training_length, vocabulary_of
from mezzotint.eval.subjects import Subject
from mezzotint.models.config import parameter_count, pass_flops, state_bytes, visible_pairs
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Ancestral, FirstHitting, Reveal, Sampler, parse_reveal


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """What is asked of every subject. Lengths are tokens of prompt and answer room together."""

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...] = ()
    multiples: tuple[int, ...] = ()  # of the training length, where no lengths are given
    training_length: int | None = None  # None: as the release says
    samples: int = 200
    depths: int = 10
    seed: int = 0
    floor: bool = False  # also without the needle
    reveal: str = "threshold=0.9"
    temperature: float = 0.0
    draws: int = 32
    batch: int = 8
    chunk: int = 1024
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("samples", "depths", "draws", "batch", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} is {getattr(self, name)}; it must be at least 1")
        if not self.lengths and not self.multiples:
            raise InputError("give --lengths 1k,4k or --multiples 1,2,4 of the training length")
        if self.lengths and self.multiples:
            raise InputError("give --lengths or --multiples, not both")
        if min(self.lengths + self.multiples) < 1:
            raise InputError("--lengths and --multiples must list numbers of at least 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed is {self.seed}; it must be from 0 to 2^63 - 1")
        if len(set(self.tasks)) < len(self.tasks):
            raise InputError("a task is named twice with the same options: name it once")
        if self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; one of {', '.join(DTYPES)}")
        self.rule()
        self.sampler()

    def rule(self) -> Reveal:
        return parse_reveal(self.reveal)

    def sampler(self) -> Sampler:
        return Sampler(temperature=self.temperature)

    @property
    def random(self) -> bool:
        """Whether decoding draws random numbers: rows are then decoded one by one, so that no batch changes them."""
        return self.temperature > 0 or isinstance(self.rule(), (Ancestral, FirstHitting))

    @property
    def decoding(self) -> str:
        return f"{self.reveal} temperature={self.temperature:g}"


@dataclass(frozen=True)
class Cell:
    """One subject, task and length, with the needle or without: `samples` rows of results."""

    subject: Subject
    vocabulary: Vocabulary
    task: Task
    length: int
    needle: bool
    trained: int | None  # training length of the subject, where it is known
    config: RetrievalConfig

    def depth(self, index: int) -> float | None:
        """Where the needle of sample `index` stands: depths come in turn, so every prefix of the samples has them all."""
        if not self.task.placed:
            return None
        count = self.config.depths
        return 0.5 if count == 1 else round((index % count) / (count - 1), 6)

    def identity(self, index: int | None) -> dict[str, object]:
        """What makes a sample the same one; index None names the cell as a whole."""
        named: dict[str, object] = {
            "task": f"retrieval/{self.task.name}",
            "subject": self.subject.name,
            "length": self.length,
            "depth": None if index is None else self.depth(index),
            "index": index,
            "seed": self.config.seed,
            "needle": self.needle,
            "options": options(self.task),
            "vocabulary": self.vocabulary.fingerprint,
            "decoding": self.config.decoding,
            "draws": f"{DESIGN}/{self.config.draws}",
            "dtype": self.config.dtype,
            "device": self.config.device,
        }
        if options(self.task).get("haystack") == "text":
            named["text"] = self.vocabulary.real_text.fingerprint
        return named

    def state_bytes(self, batch: int) -> int:
        itemsize = DTYPES[self.config.dtype].itemsize
        return state_bytes(self.subject.config, batch=batch, length=self.length, itemsize=itemsize)

    @property
    def weight_bytes(self) -> int:
        return parameter_count(self.subject.config) * DTYPES[self.config.dtype].itemsize

    def needed_bytes(self, batch: int) -> int:
        """Weights, state, and what a prefill pass and the logits of a block hold at one time (about)."""
        config, itemsize = self.subject.config, DTYPES[self.config.dtype].itemsize
        tokens = batch * min(self.length, self.config.chunk)
        widest = 3 * config.d_ff + 4 * config.d_model + 3 * config.expand * config.d_model
        logits = batch * config.block_length * config.vocab_size * 4 * 8  # the sampler works in float64
        return self.weight_bytes + self.state_bytes(batch) + tokens * widest * itemsize + logits

    def largest_batch(self, *, loaded: bool) -> int:
        """Rows that are predicted to fit into what is available now, 0 where one does not; loaded: the weights are."""
        free = HEADROOM * available_bytes(self.config.device) + loaded * self.weight_bytes
        most = 1 if self.config.random else self.config.batch
        return next((batch for batch in range(most, 0, -1) if self.needed_bytes(batch) <= free), 0)

    @property
    def flops(self) -> int:
        """Of the prefill of one sample."""
        config = self.subject.config
        blocks = self.length // config.block_length
        pairs = visible_pairs(config, clean_blocks=blocks, frontiers=[]) if "A" in config.pattern else 0
        return pass_flops(config, clean_tokens=self.length, noisy_tokens=0, pairs=pairs, logits=0)


def list_cells(subjects: list[Subject], config: RetrievalConfig, *, text: str) -> list[Cell]:
    """All cells, subject after subject, short ones first. Raises InputError for a length below a task's minimum."""
    cells = []
    for subject in subjects:
        vocabulary = vocabulary_of(subject, text=text)
        trained = config.training_length or training_length(subject)
        lengths = config.lengths or tuple(m * require_trained(subject, trained) for m in config.multiples)
        for task in config.tasks:
            least = task.minimum(vocabulary)
            if min(lengths) < least:
                raise InputError(
                    f"{task.name} needs at least {least} tokens with the tokenizer of {subject.name}, and "
                    f"{min(lengths)} were asked for: take longer ones, or fewer pairs"
                )
            # what else may be wrong with a task shows in its first sample, before anything is written
            make_sample(task, length=min(lengths), seed=0, index=0, depth=0.5, vocabulary=vocabulary)
        kinds = (True, False) if config.floor else (True,)
        cells += [
            Cell(subject, vocabulary, task, length, needle, trained, config)
            for length in sorted(set(lengths))
            for task in config.tasks
            for needle in kinds
        ]
    return cells


@functools.cache
def product_rate(dtype: torch.dtype, device: str) -> float:
    """FLOPs a second of square matrix products, the best of a few."""
    side, best = 1024, 0.0
    left = torch.ones(side, side, dtype=dtype, device=device)
    for _ in range(5):
        began = time.perf_counter()
        (left @ left).sum().item()
        best = max(best, 2 * side**3 / (time.perf_counter() - began))
    return best

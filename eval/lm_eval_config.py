"""What `mezzotint-eval lm-eval` is asked for, and what makes its rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from mezzotint.data.tokenizer import Tokenizer
from mezzotint.eval.bound import Draws
from mezzotint.eval.draws import DESIGN
from mezzotint.eval.subjects import Subject
from mezzotint.models.config import ModelConfig
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Reveal

# PIQA, ARC-challenge and BoolQ are named by the reference's published table; the other five are our choice
COMMON_SENSE = (
    "piqa",
    "arc_challenge",
    "boolq",
    "arc_easy",
    "hellaswag",
    "openbookqa",
    "social_iqa",
    "winogrande",
)
PRESET_TASKS = {"common-sense": COMMON_SENSE}
GREEDY = ("argmax", "decode")


@dataclass(frozen=True, kw_only=True)
class LMEvalConfig:
    """Which of lm-eval's tasks, and how a model answers them. limit, num_fewshot: None leaves lm-eval's own.

    draws None: as many as a block has tokens. batch_size: questions, documents or prompts together. greedy: how
    `is_greedy` is found, by the likeliest tokens with all of a block's continuation masked, or by decoding. lengths: of the
    tasks that make prompts of a given length (RULER). include_path: a folder with further tasks.
    """

    tasks: tuple[str, ...]
    reveal: Reveal
    limit: int | None = None
    num_fewshot: int | None = None
    draws: int | None = None
    seed: int = 0
    batch_size: int = 8
    draw_batch: int = 64
    greedy: str = "argmax"
    lengths: tuple[int, ...] = ()
    include_path: str | None = None
    use_cache: str | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InputError("no tasks: name some with --tasks, or give --preset common-sense")
        for name in ("batch_size", "draw_batch"):
            _at_least(name, getattr(self, name), 1)
        _at_least("limit", self.limit, 1)
        _at_least("num_fewshot", self.num_fewshot, 0)
        _at_least("draws", self.draws, 2)
        if self.greedy not in GREEDY:
            raise InputError(f"--greedy is {self.greedy!r}; one of {', '.join(GREEDY)}")
        if any(length < 1 for length in self.lengths):
            raise InputError(f"--lengths holds {min(self.lengths)}; a length is at least 1")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise InputError(f"--include-path {self.include_path} is no folder; give one with lm-eval task files")

    def draws_of(self, config: ModelConfig) -> Draws:
        return Draws(per_block=self.draws or config.block_length, seed=self.seed, batch=self.draw_batch)

    def identity(self, subject: Subject, task: str, *, version: str, tokenizer: Tokenizer) -> dict[str, object]:
        """What makes a task's row one row; the batch size does not, since it changes no score beyond rounding."""
        return {
            "task": f"lm-eval/{task}",
            "subject": subject.name,
            "lm_eval": version,
            "tokenizer": tokenizer.sha256[:16],
            "block": subject.config.block_length,
            "limit": self.limit,
            "num_fewshot": self.num_fewshot,
            "length": list(self.lengths) or None,
            "task_files": _digest(self.include_path),
            "draws": self.draws_of(subject.config).per_block,
            "design": DESIGN,
            "seed": self.seed,
            "decoding": repr(self.reveal),
            "greedy": self.greedy,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device,
        }


def _digest(include_path: str | None) -> str | None:
    """Hash of the task files and their functions in a folder of the user's, whose tasks have no version to go by."""
    if include_path is None:
        return None
    files = sorted(path for kind in ("*.yaml", "*.yml", "*.py") for path in Path(include_path).rglob(kind))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(include_path)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InputError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")

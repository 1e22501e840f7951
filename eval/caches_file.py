"""Prompts of one's own for a comparison of cache policies: a file of JSON lines, with answers and shared parts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzotint.data.tasks.sample import Sample
from mezzotint.models.config import ModelConfig
from mezzotint.models.errors import InputError

FORM = 'a line is {"prompt": [ids], "answer": [ids], "given": [booleans, optional], "shared": [[start, end], optional]}'


@dataclass(frozen=True, eq=False)  # a file is read once: cells that hold it are told apart by the rest
class PromptFile:
    """Prompts and answers of equal lengths; `spans` are the shared parts, the same in all."""

    path: str
    samples: tuple[Sample, ...]
    spans: tuple[tuple[int, int], ...]
    fingerprint: str

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return self.samples[0].length

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def shared(self) -> str | None:
        """The shared parts in a word."""
        return ",".join(f"{start}-{end}" for start, end in self.spans) or None

    def share_prefix(self) -> bool:
        """Whether all prompts begin with the same tokens, as far as their first shared part goes."""
        end = self.spans[0][1] if self.spans else 0
        return len({tuple(sample.tokens[:end]) for sample in self.samples}) == 1

    def check(self, config: ModelConfig) -> None:
        """InputError for ids that the model has not, and for masks where something should stand."""
        standing = [token for sample in self.samples for token, given in zip(sample.target, sample.given) if given]
        if any(config.mask_token_id in tokens for tokens in (standing, *(sample.tokens for sample in self.samples))):
            raise InputError(
                f"{self.path} has the mask {config.mask_token_id} in a prompt or as a given answer: masks stand for what "
                "is asked, so leave it out of `given`"
            )
        most = max(max(sample.tokens + sample.target) for sample in self.samples)
        if most >= config.vocab_size:
            raise InputError(
                f"{self.path} has the id {most}, the vocabulary {config.vocab_size}: make it for this model"
            )


def read_prompts(path: str | Path) -> PromptFile:
    """Read and check a file. Raises InputError naming the line."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"the prompts {path} cannot be read: {error.strerror}") from error
    found = [
        _line(text, f"{path}, line {number}") for number, text in enumerate(content.splitlines(), 1) if text.strip()
    ]
    if not found:
        raise InputError(f"{path} holds no prompts; {FORM}")
    shapes = {(len(sample.tokens), len(sample.target), spans) for sample, spans in found}
    if len(shapes) > 1:
        raise InputError(
            f"{path}: prompts, answers and shared parts must be the same in length and place on every line"
        )
    return PromptFile(
        str(path), tuple(sample for sample, _ in found), found[0][1], hashlib.sha256(content).hexdigest()[:16]
    )


def _line(text: bytes, where: str) -> tuple[Sample, tuple[tuple[int, int], ...]]:
    try:
        line = json.loads(text)
        if not set(line) <= {"prompt", "answer", "given", "shared"}:
            raise ValueError(line)
        tokens, target = (_ids(line[name]) for name in ("prompt", "answer"))
        given = [_of(bool, value) for value in line.get("given", [False] * len(target))]
        spans = tuple((_of(int, start), _of(int, end)) for start, end in line.get("shared", []))
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # the last: brackets in brackets
        raise InputError(f"{where} cannot be read; {FORM}") from error
    asked = [(place, place + 1) for place, stands in enumerate(given) if not stands]
    if not tokens or not asked or len(given) != len(target):
        raise InputError(f"{where} has no prompt, nothing to write, or as many given as answers it has not; {FORM}")
    ends = [0, *(end for span in spans for end in span)]
    if ends != sorted(ends) or ends[-1] > len(tokens) or any(start == end for start, end in spans):
        raise InputError(f"{where}: the shared parts {list(spans)} are no parts of {len(tokens)} tokens in their order")
    return (
        Sample(
            task="prompts",
            tokens=tokens,
            target=target,
            given=given,
            spans=asked,
            room=len(target),
            depth=None,
            kind="symbols",
            texts=[],
            ordered=True,
            choices=0,
        ),
        spans,
    )


def _of(kind: type, value: Any) -> Any:
    """The value; a number written as text, or with a fraction, is none."""
    if type(value) is not kind:
        raise ValueError(value)
    return value


def _ids(values: list) -> list[int]:
    """InputError's material where a value is no id."""
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(values)
    return values

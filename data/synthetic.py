"""Owns training text of retrieval tasks as a prepared folder: made by parts, resumed by parts, the same bytes always."""

from __future__ import annotations

import itertools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes
from mezzotint.data.manifest import Manifest, read_manifest
from mezzotint.data.prepare import Prepared, tokenizer_name
from mezzotint.data.shards import ShardWriter, token_dtype
from mezzotint.data.sources import Position
from mezzotint.data.synthetic_rows import Job, make_all
from mezzotint.data.tasks.catalog import HELDOUT, TRAIN
from mezzotint.data.tasks.keyed import FORMAT
from mezzotint.data.tasks.mixture import FORMAT as ROW_FORMAT
from mezzotint.data.tasks.mixture import Mixture, parse_item
from mezzotint.data.tasks.vocabulary import STDLIB, Vocabulary
from mezzotint.data.tasks.wording import NAME, write_tokenizer
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer
from mezzotint.data.workspace import Part, Workspace

PART_TOKENS = 2**21  # of one part, that is one shard; what is made is resumed by parts
JOB_TOKENS = 2**16  # made by a process at once; does not change what is written
SMALL = 2**19  # tokens below which starting processes costs more than it saves


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """What to make, how much of it, and into which folder."""

    tokenizer: str  # file or folder, or `tasks`: the tasks' own small one
    out: str
    tasks: tuple[str, ...]  # as parse_item reads them
    tokens: int
    row_length: int = 256
    block: int = 16
    seed: int = 0
    heldout: float = 0.0  # share of rows held out, of seeds of their own; then `out` gets train/ and heldout/
    stage: tuple[int, int] = (1, 1)
    text: str = STDLIB  # where haystack=text comes from
    workers: int = 0  # processes; 0: one a core. Does not change what is written


def synthesize(config: SyntheticConfig) -> Prepared:
    """Write the documents of a mixture as shards; a run that was killed goes on where it was, a finished one returns.

    What is written depends on everything but `workers`, to the byte. No sample of training, held-out text and tests is
    the same: their keys differ in a word. Raises InputError.
    """
    _check(config)
    mixture = mixture_of(config)
    tokenizer, content = _tokenizer(config)
    vocabulary = Vocabulary.of(tokenizer, text=config.text)
    mixture.check(vocabulary)
    rows = max(1, config.tokens // config.row_length)
    held = round(rows * config.heldout)
    counts = {TRAIN: rows - held, HELDOUT: held} if config.heldout else {TRAIN: rows}
    if not all(counts.values()):
        raise InputError(f"{config.tokens} tokens are {rows} rows, too few to hold out {config.heldout}: make more")
    space = Workspace(Path(config.out), tuple(counts), _settings(config, vocabulary), maker="synthetic")
    parts = space.open()
    if not space.finished():
        try:
            for folder in space.folders.values():
                write_bytes(folder / tokenizer_name(tokenizer), content)
            _write_parts(config, mixture, tokenizer, counts, space, parts)
            for split in reversed(list(counts)):
                _manifest(config, tokenizer, space.folders[split], split, parts).write()
        except OSError as error:
            space.discard_if_useless()
            raise InputError(
                f"{config.out} cannot be written ({error.strerror}): free some space, then run again"
            ) from error
    space.close()
    manifests = {split: read_manifest(folder) for split, folder in space.folders.items()}
    return Prepared(manifests[TRAIN], manifests.get(HELDOUT))


def mixture_of(config: SyntheticConfig) -> Mixture:
    items = tuple(parse_item(text, row_length=config.row_length) for text in config.tasks)
    return Mixture(items, config.row_length, config.block, config.seed, config.stage)


def _check(config: SyntheticConfig) -> None:
    """InputError for values nothing can be made with."""
    for name in ("tokens", "row_length", "block"):
        if getattr(config, name) < 1:
            raise InputError(f"{name} is {getattr(config, name)}: give a number of tokens from 1 on")
    if not config.tasks:
        raise InputError("no task was named: give --task passkey, for example")
    if not 0 <= config.heldout < 1:
        raise InputError(f"heldout is {config.heldout}: give a share of the rows from 0 up to, not including, 1")
    if config.workers < 0:
        raise InputError(f"workers is {config.workers}: give a number of processes, or 0 for one a core")
    now, stages = config.stage
    if not 1 <= now <= stages:
        raise InputError(f"stage {now}/{stages} is none: write 1/3, 2/3 and 3/3 for three stages")


def _tokenizer(config: SyntheticConfig) -> tuple[Tokenizer, bytes]:
    """The tokenizer that was named, and its file's content."""
    if config.tokenizer == NAME:
        with tempfile.TemporaryDirectory() as folder:
            path = write_tokenizer(Path(folder))
            return load_tokenizer(path), path.read_bytes()
    tokenizer = load_tokenizer(config.tokenizer)
    return tokenizer, tokenizer.files[0].read_bytes()


def _settings(config: SyntheticConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Everything that decides what is written."""
    uses_text = any("=text" in task or "/text" in task for task in config.tasks)
    return {
        "generators": FORMAT,
        "rows": ROW_FORMAT,
        "tasks": list(config.tasks),
        "tokens": config.tokens,
        "row_length": config.row_length,
        "block": config.block,
        "seed": config.seed,
        "heldout": config.heldout,
        "stage": list(config.stage),
        "tokenizer": vocabulary.fingerprint,
        "text": vocabulary.real_text.fingerprint if uses_text else "",
    }


def _plan(counts: dict[str, int], row_length: int) -> list[tuple[str, int, int]]:
    """(split, first row, one past the last) of every part, split after split."""
    step = max(1, PART_TOKENS // row_length)
    return [
        (split, first, min(first + step, count)) for split, count in counts.items() for first in range(0, count, step)
    ]


def _write_parts(
    config: SyntheticConfig,
    mixture: Mixture,
    tokenizer: Tokenizer,
    counts: dict[str, int],
    space: Workspace,
    parts: list[Part],
) -> None:
    """Write the shard of every part that is not in `parts` yet, and append it."""
    from tqdm import tqdm

    plan = _plan(counts, config.row_length)
    step = max(1, JOB_TOKENS // config.row_length)
    jobs: list[Job] = [
        (number, split, first, min(first + step, end))
        for number, (split, start, end) in enumerate(plan)
        if number >= len(parts)
        for first in range(start, end, step)
    ]
    dtype = token_dtype(tokenizer.vocab_size)
    total = sum(counts.values()) * config.row_length
    done = sum((end - start) * config.row_length for _, start, end in plan[: len(parts)])
    copy = space.folders[TRAIN] / tokenizer_name(tokenizer)
    made = make_all(jobs, mixture, str(copy), config.text, _workers(config))
    with tqdm(total=total, initial=done, unit="tok", unit_scale=True, desc="making", disable=None) as bar:
        for number, of_part in itertools.groupby(made, key=lambda job: job[0]):
            split, _, end = plan[number]
            writer = ShardWriter(space.folders[split], f"part-{number:05d}", dtype)
            try:
                for _, tokens, sizes in of_part:
                    writer.add(tokens, sizes, int(tokenizer.token_bytes[tokens].sum()))
                    bar.update(len(tokens))
                info = writer.close()
            except BaseException:
                writer.abandon()
                raise
            parts.append(Part(info.documents, Position(0, end), {split: info}))
            space.add(number, parts[-1])


def _manifest(config: SyntheticConfig, tokenizer: Tokenizer, folder: Path, split: str, parts: list[Part]) -> Manifest:
    return Manifest(
        folder=folder,
        source=f"synthetic: {', '.join(config.tasks)}; stage {config.stage[0]}/{config.stage[1]}, seed {config.seed}",
        dtype=token_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        tokenizer=tokenizer_name(tokenizer),
        tokenizer_sha256=tokenizer.sha256,
        shards=tuple(part.shards[split] for part in parts if split in part.shards),
    )


def _workers(config: SyntheticConfig) -> int:
    if config.workers:
        return config.workers
    if config.tokens < SMALL:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

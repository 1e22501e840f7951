"""A tokenizer written by hand and the samples that processes are compared by; imports neither torch nor pytest."""

from __future__ import annotations

import json
from pathlib import Path

from mezzotint.data.json_tokenizer import BYTE_OF
from mezzotint.data.tasks.catalog import make_sample, parse_task
from mezzotint.data.tasks.sample import Sample
from mezzotint.data.tasks.vocabulary import Vocabulary


def byte_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer.json of the 256 bytes, written by hand: the same with every version of everything."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {character: byte for character, byte in sorted(BYTE_OF.items(), key=lambda item: item[1])}
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def sample(task: str, words: Vocabulary, **changes) -> Sample:
    """A sample of a task somewhat above its minimum, with single arguments changed."""
    made = parse_task(task)
    values = {"length": made.minimum(words) + 700, "seed": 3, "index": 5, "depth": 0.5, "vocabulary": words}
    return make_sample(made, **(values | changes))


def hashes(folder: Path, jobs: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Of each (task, index), in the order of `jobs`."""
    words = Vocabulary.load(folder)
    return {(task, index): sample(task, words, index=index).sha256 for task, index in jobs}

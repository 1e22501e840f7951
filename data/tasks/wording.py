"""A small tokenizer for the tasks alone: the 256 bytes, and one id for each word of the tasks' own wording."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mezzotint.data.files import write_bytes
from mezzotint.data.json_tokenizer import BYTE_OF
from mezzotint.data.tasks import counting, haystack, niah, passkey, phonebook, variables

NAME = "tasks"  # what stands for this tokenizer on a command line
TEXTS = (
    haystack.REPEATED,
    *(passkey.HEAD, passkey.NEEDLE, passkey.TAIL),
    *(niah.HEAD, niah.HEAD_OF_ONE, niah.NEEDLE, niah.QUESTION, niah.QUESTION_OF_ONE, niah.PREFIX, niah.PREFIX_OF_ONE),
    *(phonebook.HEAD, phonebook.HEAD_REVERSED, phonebook.SHOT, phonebook.TAIL),
    *(variables.HEAD, variables.FIRST, variables.NEXT, variables.TAIL),
    *(counting.LIST_HEAD, counting.LIST_TAIL, counting.CODED_HEAD, counting.CODED_TAIL),
    *(" numbers words uuids", "number word uuid", ", and"),
)
FIELD = re.compile(r"\{\w+\}")
WORD = re.compile(r" ?[A-Za-z]+")


def wording() -> list[str]:
    """Words of two letters and more that the tasks' texts are made of, each with the space before it, sorted."""
    found = {word for text in TEXTS for word in WORD.findall(FIELD.sub("", text))}
    return sorted(word for word in found if len(word.strip()) > 1)


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json into `folder`, the same bytes everywhere; returns the file."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {character: byte for character, byte in sorted(BYTE_OF.items(), key=lambda item: item[1])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    words = [{"id": 256 + number, "content": word, **plain} for number, word in enumerate(wording())]
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": words,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    path = folder / "tokenizer.json"
    write_bytes(path, (json.dumps(spec, indent=1) + "\n").encode())
    return path

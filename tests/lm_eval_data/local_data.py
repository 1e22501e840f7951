"""The data of the tasks in this folder, read from the JSON lines beside it: no cache, no network."""

import json
from pathlib import Path

import datasets


def _read(name: str) -> dict[str, datasets.Dataset]:
    lines = (Path(__file__).resolve().parent / name).read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}


def choices(**metadata):
    return _read("choices.jsonl")


def documents(**metadata):
    return _read("documents.jsonl")


def prompts(**metadata):
    return _read("prompts.jsonl")

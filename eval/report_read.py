"""Results files read together for a report or a comparison: one cell once, one name one release, no truncated prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mezzotint.eval.results import FAILED, read_results
from mezzotint.models.errors import InputError


@dataclass(frozen=True)
class Collected:
    """All rows of some results files, the environments they were made in with their numbers of rows, and the subjects."""

    files: list[Path]
    rows: list[dict]
    environments: list[tuple[dict, int]]
    subjects: dict[str, str]

    def of_task(self, start: str) -> list[dict]:
        """Rows whose task is `start` or begins with `start/`."""
        return [row for row in self.rows if (row["identity"]["task"] + "/").startswith(start + "/")]


def collect(paths: Sequence[str]) -> Collected:
    """Raises InputError for files that cannot be read, contradict each other, or hold scores of truncated prompts."""
    subjects: dict[str, str] = {}
    places: dict[str, Path] = {}
    rows: list[dict] = []
    made: list[dict] = []
    counts: list[int] = []
    for path in paths:
        found = read_results(path)
        for name, fingerprint in found.subjects.items():
            if subjects.setdefault(name, fingerprint) != fingerprint:
                raise InputError(f"{path} and an earlier file hold different weights named {name!r}; report them apart")
        for key, row in found.rows.items():
            if key in places:
                raise InputError(f"{places[key]} and {path} both hold {describe(row['identity'])}; give one of them")
            places[key] = Path(path)
            rows.append(row)
            if key in found.made_with:
                environment = found.environments[found.made_with[key]]
                if environment not in made:
                    made.append(environment)
                    counts.append(0)
                counts[made.index(environment)] += 1
    if not rows:
        raise InputError(f"{', '.join(paths)}: no results yet; run the command that writes them first")
    _refuse_truncated(rows)
    return Collected([Path(path) for path in paths], rows, list(zip(made, counts)), subjects)


def _refuse_truncated(rows: list[dict]) -> None:
    """A prompt that is longer than was asked for, or was cut, was not answered under the length that it stands for."""
    cut = [row for row in rows if row["values"].get("fill", 0) > 1 or row["values"].get("truncated", 0)]
    if cut:
        raise InputError(
            f"{len(cut)} prompts were truncated, the first of {describe(cut[0]['identity'])}: these scores are not of "
            "the lengths they stand under; make them again"
        )


def describe(identity: dict) -> str:
    """A cell in a few words."""
    told = [
        f"{name} {identity[name]}" for name in ("length", "context", "row", "index") if identity.get(name) is not None
    ]
    return ", ".join([f"{identity['task']} of {identity['subject']}", *told])


def failures(rows: Iterable[dict]) -> list[dict]:
    return [row for row in rows if row["status"] in FAILED]


def grouped(rows: Iterable[dict], key: Callable[[dict], object]) -> dict[str, list[dict]]:
    """Rows by the JSON of what `key` says, in the order of their first row."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(json.dumps(key(row), sort_keys=True), []).append(row)
    return groups


def without(identity: dict, *names: str) -> dict:
    return {name: value for name, value in identity.items() if name not in names}


def setting_words(identity: dict, *known: str) -> str:
    """What is left of an identity beside `known`, as `name value`, for a heading; options are spelled out."""
    words = []
    for name, value in without(identity, "task", "subject", *known).items():
        if name == "options" and isinstance(value, dict):
            words += [f"{key} {json.dumps(v)}" for key, v in value.items()]
        elif value is not None:
            words.append(f"{name} {value}")
    return ", ".join(words)

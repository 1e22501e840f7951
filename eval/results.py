"""The results file: append-only JSON lines, one row a cell, written through to disk, resumed by key."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from mezzotint.data.errors import InputError
from mezzotint.eval.environment import environment

FORMAT = 1
HEADING = b'{"format": '  # how every file begins
STATUSES = ("ok", "oom", "timeout", "error", "skipped_predicted_oom", "noisy")
TABLES = (".md", ".csv", ".png")  # what commands write beside a results file, under its name
FAILED = ("oom", "timeout", "error", "skipped_predicted_oom")  # what --retry-failed tries again; else all are final


def cell_key(identity: Mapping[str, object]) -> str:
    """16 hex digits that name a cell: the hash of its identity, whatever the order of its fields."""
    text = json.dumps(identity, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Content:
    """What stands in a results file: the latest row of every key, and what each was made with."""

    path: Path
    subjects: dict[str, str] = field(default_factory=dict)  # name -> fingerprint
    rows: dict[str, dict] = field(default_factory=dict)
    environments: list[dict] = field(default_factory=list)  # in the order of the file
    made_with: dict[str, int] = field(default_factory=dict)  # key -> place in environments; absent in older files
    size: int = 0  # bytes of all whole lines


def read_results(path: str | Path) -> Content:
    """Read a results file that may be being written; a last line that is cut short is left out. Raises InputError."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"the results file {path} cannot be read: {error.strerror}") from error
    return _parse(Path(path), content)


class ResultsFile:
    """Rows {key, status, time, identity, values} of the subjects named in the file's headings.

    `subjects` maps each name to the fingerprint of its weights. A row is final, whatever its status, unless
    `retry_failed` is set: then cells that failed before this run are not done. Headings also say what the rows behind
    them were made with (eval/environment.py). Raises InputError for a file that is no results file, is newer, speaks of
    other subjects, of the same names with other weights, or is being written by another process. A last line that was
    cut short (kill -9) is removed; its cell is then measured again.
    """

    def __init__(self, path: str | Path, *, subjects: Mapping[str, str], retry_failed: bool = False) -> None:
        self.path = Path(path)
        self._file = _open_locked(self.path)
        try:
            self._content = _parse(self.path, self._file.read())
            self._refuse_foreign(subjects)
            self._file.truncate(self._content.size)  # a torn last line goes only once the rest proved to be ours
            self._again = {key for key, row in self._content.rows.items() if retry_failed and row["status"] in FAILED}
            new = {name: value for name, value in subjects.items() if name not in self.subjects}
            if new:
                self._add_heading(new)
        except BaseException:
            self._file.close()
            raise

    @property
    def subjects(self) -> dict[str, str]:
        return self._content.subjects

    def _refuse_foreign(self, subjects: Mapping[str, str]) -> None:
        for name, fingerprint in subjects.items():
            if self.subjects.get(name, fingerprint) != fingerprint:
                raise InputError(f"{self.path} holds results of other weights named {name!r}; give another --out")
        if self.subjects and not set(subjects) & set(self.subjects):
            held = ", ".join(sorted(self.subjects))
            raise InputError(f"{self.path} holds results of another release ({held}); give another --out")

    def _add_heading(self, subjects: dict[str, str]) -> None:
        self._write({"format": FORMAT, "subjects": subjects, "environment": environment()})
        self._content.subjects |= subjects
        self._content.environments.append(environment())

    def done(self, identity: Mapping[str, object]) -> bool:
        """Whether the cell needs no further run."""
        key = cell_key(identity)
        return key in self._content.rows and key not in self._again

    def get(self, identity: Mapping[str, object]) -> dict | None:
        """The cell's latest row, or None."""
        return self._content.rows.get(cell_key(identity))

    def append(self, identity: Mapping[str, object], *, status: str, values: Mapping[str, object]) -> dict:
        """Write one row, synced to disk before it returns. A done cell is refused: no row comes twice."""
        assert status in STATUSES, f"unknown status {status!r}"
        assert not self.done(identity), f"the cell {dict(identity)} is already in {self.path}"
        key = cell_key(identity)
        row = {"key": key, "status": status, "time": round(time.time(), 3)}
        row |= {"identity": dict(identity), "values": dict(values)}
        if self._content.environments[-1:] != [environment()]:  # a file taken up on another machine, or by other code
            self._add_heading({})
        self._write(row)
        self._content.rows[key] = row
        self._again.discard(key)
        return row

    def rows(self) -> list[dict]:
        """The latest row of every cell, in the order of the file."""
        return list(self._content.rows.values())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, record: Mapping[str, object]) -> None:
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _open_locked(path: Path):
    """The file opened for reading and appending, held alone until it is closed."""
    if path.suffix.lower() in TABLES:
        raise InputError(f"the results file {path} would be overwritten by its own table: end its name in .jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")  # noqa: SIM115 - lives as long as the ResultsFile
    except OSError as error:
        raise InputError(f"cannot write results to {path}: {error.strerror}; give another --out") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise InputError(f"{path} is being written by another process; wait for it or give another --out") from error
    file.seek(0)
    return file


def _parse(path: Path, content: bytes) -> Content:
    """All whole lines. Raises InputError for what is no results file or a newer one."""
    found = Content(path)
    whole = content[: content.rfind(b"\n") + 1]
    found.size = len(whole)
    if not whole and not content.startswith(HEADING[: len(content)]):
        raise InputError(f"{path} is no results file; give another file")
    for number, line in enumerate(whole.splitlines(), start=1):
        record = _record(line, f"{path} line {number}")
        if record.get("format", FORMAT) != FORMAT:
            raise InputError(f"{path} is of format {record['format']}; this version reads format {FORMAT}")
        if "subjects" in record:
            found.subjects |= record["subjects"]
            if "environment" in record:
                found.environments.append(record["environment"])
        elif not found.subjects or not {"key", "status", "identity", "values"} <= set(record):
            raise InputError(f"{path} line {number} is no row of a results file; give another file")
        else:
            found.rows[record["key"]] = record
            if found.environments:
                found.made_with[record["key"]] = len(found.environments) - 1
    return found


def _record(line: bytes, place: str) -> dict:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place} is not JSON; the file is damaged or no results file: give another file") from error
    if not isinstance(record, dict):
        raise InputError(f"{place} is no row of a results file; give another file")
    return record

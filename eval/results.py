"""The results file: append-only JSON lines, one row a cell, written through to disk, resumed by key."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from mezzotint.data.errors import InputError

FORMAT = 1
HEADING = b'{"format": '  # how every file begins
STATUSES = ("ok", "oom", "timeout", "error", "skipped_predicted_oom", "noisy")
UNFINISHED = ("timeout", "error")  # tried again by the next run; every other status is final


def cell_key(identity: Mapping[str, object]) -> str:
    """16 hex digits that name a cell: the hash of its identity, whatever the order of its fields."""
    text = json.dumps(identity, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ResultsFile:
    """Rows {key, status, time, identity, values} of the subjects named in the file's heading.

    `subjects` maps each name to the fingerprint of its weights. Raises InputError for a file that is no results
    file, is newer, speaks of other subjects, of the same names with other weights, or is being written by another
    process. A last line that was cut short (kill -9) is removed; its cell is then measured again.
    """

    def __init__(self, path: str | Path, *, subjects: Mapping[str, str]) -> None:
        self.path = Path(path)
        self.subjects: dict[str, str] = {}
        self._rows: dict[str, dict] = {}
        self._file = _open_locked(self.path)
        try:
            whole = self._read()
            self._refuse_foreign(subjects)
            self._file.truncate(whole)  # a torn last line goes only once the rest proved to be ours
            self._add_heading(subjects)
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> int:
        """Fill the tables; returns the length of all whole lines."""
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and not content.startswith(HEADING[: len(content)]):
            raise InputError(f"{self.path} is no results file; give another --out")
        for number, line in enumerate(whole.splitlines(), start=1):
            record = _parse(line, f"{self.path} line {number}")
            if record.get("format", FORMAT) != FORMAT:
                raise InputError(f"{self.path} is of format {record['format']}; this version reads format {FORMAT}")
            if "subjects" in record:
                self.subjects |= record["subjects"]
            elif not self.subjects or "key" not in record:
                raise InputError(f"{self.path} line {number} is no row of a results file; give another --out")
            else:
                self._rows[record["key"]] = record
        return len(whole)

    def _refuse_foreign(self, subjects: Mapping[str, str]) -> None:
        for name, fingerprint in subjects.items():
            if self.subjects.get(name, fingerprint) != fingerprint:
                raise InputError(f"{self.path} holds results of other weights named {name!r}; give another --out")
        if self.subjects and not set(subjects) & set(self.subjects):
            held = ", ".join(sorted(self.subjects))
            raise InputError(f"{self.path} holds results of another release ({held}); give another --out")

    def _add_heading(self, subjects: Mapping[str, str]) -> None:
        new = {name: value for name, value in subjects.items() if name not in self.subjects}
        if new:
            self._write({"format": FORMAT, "subjects": new})
            self.subjects |= new

    def done(self, identity: Mapping[str, object]) -> bool:
        """Whether the cell needs no further run."""
        row = self._rows.get(cell_key(identity))
        return row is not None and row["status"] not in UNFINISHED

    def get(self, identity: Mapping[str, object]) -> dict | None:
        """The cell's latest row, or None."""
        return self._rows.get(cell_key(identity))

    def append(self, identity: Mapping[str, object], *, status: str, values: Mapping[str, object]) -> dict:
        """Write one row, synced to disk before it returns. A done cell is refused: no row comes twice."""
        assert status in STATUSES, f"unknown status {status!r}"
        assert not self.done(identity), f"the cell {dict(identity)} is already in {self.path}"
        key = cell_key(identity)
        row = {"key": key, "status": status, "time": round(time.time(), 3)}
        row |= {"identity": dict(identity), "values": dict(values)}
        self._write(row)
        self._rows[key] = row
        return row

    def rows(self) -> list[dict]:
        """The latest row of every cell, in the order of the file."""
        return list(self._rows.values())

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


def _parse(line: bytes, place: str) -> dict:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place} is not JSON; the file is damaged or no results file: give another --out") from error
    if not isinstance(record, dict):
        raise InputError(f"{place} is no row of a results file; give another --out")
    return record

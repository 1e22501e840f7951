"""How a run ended: exit codes, and `outcome.json` in the run folder, since launchers swallow the codes of their ranks."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mezzotint.data.cli import NO_ROOM
from mezzotint.models.errors import InputError

DONE, CRASHED, STOPPED, DIVERGED, HUNG = 0, 1, 85, 86, 87
INTERRUPTED = 130  # by a second Ctrl-C, before the step was saved
BAD_INPUT = 2  # every command's code for what the user can mend
WORDS = {
    DONE: "done",
    CRASHED: "crashed",
    BAD_INPUT: "refused",
    STOPPED: "stopped and saved",
    DIVERGED: "diverged",
    HUNG: "hung",
    INTERRUPTED: "interrupted",
}
FORMAT = 1
NAME = "outcome.json"
SPARE = "outcome.spare"  # room for an outcome, kept while there is some: a disk that is full takes no new file
ROOM = 4096  # bytes of it


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of the last start of a run."""

    code: int
    step: int  # steps done and known when it ended
    reason: str
    time: float  # seconds since 1970

    @property
    def word(self) -> str:
        return WORDS.get(self.code, f"ended with code {self.code}")

    @property
    def sentence(self) -> str:
        """Word, step and reason; what is refused at once has done no step, whatever starts before it have done."""
        where = "" if self.code == BAD_INPUT and not self.step else f" after step {self.step}"
        return f"{self.word}{where} ({self.reason})"


def write(run_folder: Path, *, code: int, step: int, reason: str) -> None:
    """Replace the run's outcome, whole or not at all. Any rank may: each writes beside under a name of its own."""
    values = {"format": FORMAT, **asdict(Outcome(code=code, step=step, reason=reason, time=time.time()))}
    run_folder.mkdir(parents=True, exist_ok=True)
    beside = run_folder / f"{NAME}.{os.getpid()}.tmp"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, run_folder / NAME)
    except OSError as error:
        if error.errno not in NO_ROOM or not (run_folder / SPARE).exists():
            raise
        _write_spare(run_folder, values)
    finally:
        beside.unlink(missing_ok=True)


def _write_spare(run_folder: Path, values: dict) -> None:
    """The outcome into the room that was kept for it."""
    values |= {"reason": values["reason"][: ROOM // 8]}  # in JSON a character takes up to six bytes
    with open(run_folder / SPARE, "r+b") as file:
        file.write(json.dumps(values).encode().ljust(ROOM - 1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(run_folder / SPARE, run_folder / NAME)


def read(run_folder: Path) -> Outcome | None:
    """None without a readable outcome: the run never ended, or died. InputError for a format of a later version."""
    try:
        values = json.loads((run_folder / NAME).read_text(encoding="utf-8"))
        version = int(values["format"])
        if version <= FORMAT:
            return Outcome(
                code=int(values["code"]),
                step=int(values["step"]),
                reason=str(values["reason"]),
                time=float(values["time"]),
            )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    raise InputError(f"{run_folder / NAME} has format {version}; this version reads format {FORMAT}: use the newer one")


def remove(run_folder: Path) -> None:
    """At a start: from here on a missing file means that the run died before it could say how. Keeps room for the next."""
    with contextlib.suppress(FileNotFoundError):
        os.replace(run_folder / NAME, run_folder / SPARE)
    with contextlib.suppress(OSError):  # a full disk has no room to keep
        spare = os.open(run_folder / SPARE, os.O_WRONLY | os.O_CREAT, 0o666)  # written over: what it has, it keeps
        try:
            os.write(spare, b" " * ROOM)
        finally:
            os.close(spare)

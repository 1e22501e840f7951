"""How a run ended: exit codes, and `outcome.json` in the run folder, since launchers swallow the codes of their ranks."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mezzotint.models.errors import InputError

DONE, CRASHED, STOPPED, DIVERGED, HUNG = 0, 1, 85, 86, 87
BAD_INPUT = 2  # every command's code for what the user can mend
WORDS = {
    DONE: "done",
    CRASHED: "crashed",
    BAD_INPUT: "refused",
    STOPPED: "stopped and saved",
    DIVERGED: "diverged",
    HUNG: "hung",
}
FORMAT = 1
NAME = "outcome.json"


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
    finally:
        beside.unlink(missing_ok=True)


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
    """At a start: from here on a missing file means that the run died before it could say how."""
    (run_folder / NAME).unlink(missing_ok=True)

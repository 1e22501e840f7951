"""What follows the end of a trainer on a cluster: another start of the same job, or an exit code that says why not."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mezzotint.training import lock, outcome
from mezzotint.training.outcome import CRASHED, DIVERGED, DONE, HUNG, STOPPED, Outcome
from mezzotint.training.stop import STOP_FILE

FORMAT = 1
NAME = "restarts.json"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How often a job that crashes is started again."""

    in_a_row: int = (
        1  # starts after a crash without a later checkpoint than at the crash before: 1 is the first crash's
    )
    total: int = 100  # starts after a crash of one run, however far each of them came

    @staticmethod
    def from_environment() -> Bounds:
        """MEZZOTINT_RESTARTS_IN_A_ROW and MEZZOTINT_RESTARTS, where they are set."""
        return Bounds(
            in_a_row=int(os.environ.get("MEZZOTINT_RESTARTS_IN_A_ROW", Bounds.in_a_row)),
            total=int(os.environ.get("MEZZOTINT_RESTARTS", Bounds.total)),
        )


@dataclass(frozen=True, kw_only=True)
class Crashes:
    """The crashes of a run so far, kept in its folder."""

    total: int = 0
    in_a_row: int = 0  # since the newest checkpoint was written
    step: int = -1  # of the newest checkpoint at the last crash; -1: none


@dataclass(frozen=True, kw_only=True)
class Next:
    """What to do now, and the sentence that says it."""

    again: bool
    code: int  # of the job that is not started again
    sentence: str
    crashes: Crashes


def decide(ended: Outcome | None, crashes: Crashes, *, step: int, asked: bool, bounds: Bounds) -> Next:
    """Whether a job whose trainer has ended starts again.

    ended: None when the trainer died before it could say how. step: of the newest checkpoint, -1 for none.
    asked: the batch shell itself was signalled, so that a stop was a preemption and not a person's STOP file.
    """

    def end(code: int, sentence: str, counted: Crashes = crashes) -> Next:
        return Next(again=False, code=code, sentence=sentence, crashes=counted)

    def again(sentence: str, counted: Crashes = crashes) -> Next:
        return Next(again=True, code=STOPPED, sentence=f"{sentence}: starting it again", crashes=counted)

    if ended is not None and ended.code not in (CRASHED, HUNG):
        said = f"the run is {ended.sentence}"
        if ended.code != STOPPED:
            mend = "; look before you start it again" if ended.code == DIVERGED else ""
            return end(ended.code, said if ended.code == DONE else f"{said}: not started again{mend}")
        if asked or f"/{STOP_FILE} was there" not in ended.reason:
            return again(said)
        return end(STOPPED, f"{said}: not started again; the same command goes on from there")
    if ended is None and asked:  # killed while it saved, or while it was starting: no crash of its own
        return again("the trainer was asked to stop and ended before it had saved")
    code = CRASHED if ended is None else ended.code
    why = "the trainer died without a word" if ended is None else f"the run {ended.word} ({ended.reason})"
    row = crashes.in_a_row + 1 if crashes.total and step <= crashes.step else 1
    counted = Crashes(total=crashes.total + 1, in_a_row=row, step=step)
    newest = f"the newest checkpoint is of step {step}" if step >= 0 else "there is no checkpoint"
    if row > bounds.in_a_row:
        return end(code, f"{why}; {newest}, as at the crash before: not started again, see the log above", counted)
    if counted.total > bounds.total:
        return end(code, f"{why}; it is crash {counted.total} of this run: not started again", counted)
    return again(f"{why}; {newest}; crash {counted.total} of at most {bounds.total}", counted)


def begin(run: Path) -> None:
    """Before a trainer starts: forget how the last one ended, so that one that cannot even start has no outcome.

    Makes the run folder: a trainer that refuses its first start removes one of its own, outcome and all, and could not
    be told from one that died. Raises InputError when another trainer is at work there: a script must not stop that one
    with its own STOP file.
    """
    with lock.hold(run):
        outcome.remove(run)


def conclude(run: Path, *, asked: bool, job: str | None) -> tuple[int, str]:
    """After a trainer: decide, keep count, requeue the Slurm job if it comes to that. Exit code and sentence.

    Without a job nothing is started again here, and the sentence says what the caller may do.
    """
    (run / STOP_FILE).unlink(missing_ok=True)  # the batch shell's, which a trainer that had ended did not remove
    ended = outcome.read(run)
    if job is None:
        return _ended_here(run, ended)
    state = job_state(job)
    if state != "RUNNING":  # cancelled, or requeued by Slurm itself: counting or starting it again is not ours
        code = CRASHED if ended is None else ended.code
        return code, f"{run}: job {job} is {state}: not started again from here"
    following = decide(ended, read_crashes(run), step=newest_step(run), asked=asked, bounds=Bounds.from_environment())
    write_crashes(run, following.crashes)
    sentence = f"{run}: {following.sentence}"
    if not following.again:
        return following.code, sentence
    print(sentence, flush=True)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode:
        return following.code, f"{run}: Slurm does not requeue job {job} ({done.stderr.strip()}): submit it again"
    return following.code, f"{run}: job {job} is requeued"


def _ended_here(run: Path, ended: Outcome | None) -> tuple[int, str]:
    if ended is None:
        return CRASHED, f"{run}: the trainer died without a word; the same command goes on from the newest checkpoint"
    return ended.code, f"{run}: {ended.sentence}"


def newest_step(run: Path) -> int:
    """Step of the checkpoint that the run's own pointer names; -1 without one."""
    try:
        return int((run / "latest").read_text(encoding="utf-8").strip().removeprefix("step-"))
    except (OSError, ValueError):
        return -1


def read_crashes(run: Path) -> Crashes:
    """None so far when the file is not there or damaged."""
    try:
        values = json.loads((run / NAME).read_text(encoding="utf-8"))
        if values.pop("format") == FORMAT:
            return replace(Crashes(), **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return Crashes()


def write_crashes(run: Path, crashes: Crashes) -> None:
    if crashes == read_crashes(run):
        return
    run.mkdir(parents=True, exist_ok=True)
    beside = run / f"{NAME}.tmp"
    beside.write_text(json.dumps({"format": FORMAT, **asdict(crashes)}) + "\n", encoding="utf-8")
    os.replace(beside, run / NAME)


def job_state(job: str) -> str:
    """A Slurm job's state by its first word, such as RUNNING or COMPLETING; UNKNOWN when Slurm does not say."""
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True)
    for word in done.stdout.split():
        if word.startswith("JobState="):
            return word.removeprefix("JobState=")
    return "UNKNOWN"

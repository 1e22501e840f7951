"""Teaches a small model to recall: stages of a curriculum in rounds of training, each with a look at the training length.

Every step is one of the project's own commands, and all of them go on where they stopped. A round starts from the
release of the one before, with a learning rate that warms up and decays, so that what is looked at is settled weights. A
stage ends with the first round that answers well enough, or with its last.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mezzotint.data.errors import InputError
from mezzotint.eval.results import read_results

RECIPE = Path(__file__).with_name("teaching.yaml")
ARMS = {
    "attention": ("model.pattern=AA",),
    "attention-nope": ("model.pattern=AA", "model.positions=none"),
    "mamba": ("model.pattern=MM", "model.backbone=mamba"),
    "hybrid": ("model.pattern=MA", "model.backbone=hybrid"),
    "hybrid-nope": ("model.pattern=MA", "model.backbone=hybrid", "model.positions=none"),
}
LOOK_SEED = 1000  # of the samples a round is judged by; the study's own have other seeds


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is taught, and what must be answered before the next stage begins."""

    name: str
    taught: tuple[str, ...]  # as mezzotint-data synthetic reads them
    row: int  # tokens
    rows_per_step: int
    steps: int  # of a round
    rounds: int  # at most
    asked: tuple[tuple[str, int], ...]  # (task, tokens)
    enough: float  # share of right answers, of every task asked
    tokens: str = "4m"  # of training text made
    least: int = 1  # rounds, even if enough is answered: margins go on growing behind a full score
    settings: tuple[str, ...] = ()  # of the recipe that are this stage's own


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where things go, and how much may be spent."""

    out: Path
    block: int
    minutes: float  # core-minutes of training a model may take, all its stages together
    samples: int  # of each look
    dry_run: bool = False


@dataclass(frozen=True)
class Pupil:
    """One model to be taught: an arm, its learning rate, and the seed of weights, noise and order of rows."""

    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.rate:g}-seed{self.seed}"


@dataclass(frozen=True)
class Round:
    """How a round ended: right answers of each task asked, and core-minutes of training since the beginning."""

    stage: str
    number: int
    right: tuple[int, ...]
    samples: int
    minutes: float
    release: Path
    enough: bool

    @property
    def worst(self) -> float:
        return min(self.right) / self.samples


def teach(setting: Setting, pupil: Pupil, stages: tuple[Stage, ...]) -> list[Round]:
    """All rounds of a model, run now or before; ends early where the minutes are spent or a stage is not learned."""
    rounds: list[Round] = []
    before: Path | None = None
    minutes = 0.0
    for stage in stages:
        for number in range(1, stage.rounds + 1):
            if minutes >= setting.minutes:
                return rounds
            done = _round(setting, pupil, stage, number, before=before, minutes=minutes)
            before = done.release
            minutes = done.minutes
            rounds.append(done)
            if (done.enough and number >= stage.least) or setting.dry_run:
                break
        if not rounds[-1].enough and not setting.dry_run:
            return rounds
    return rounds


def _round(setting: Setting, pupil: Pupil, stage: Stage, number: int, *, before: Path | None, minutes: float) -> Round:
    """Train, export and look."""
    name = f"{pupil.name}-{stage.name}-{number}"
    run, release = setting.out / "runs" / name, setting.out / "rounds" / name
    text = _make_text(setting, stage)
    command = train_command(pupil, stage, number, run=run, text=text, before=before)
    train(setting, run, command, steps=stage.steps)
    if not (release / "training.yaml").exists():
        call(setting, "mezzotint.launch.export", str(run), str(release), "--overwrite")
    found = setting.out / "looks" / f"{name}.jsonl"
    right = tuple(_look(setting, release, task, length, found) for task, length in stage.asked)
    spent = minutes + core_minutes(run)
    enough = min(right) >= stage.enough * setting.samples
    return Round(stage.name, number, right, setting.samples, spent, release, enough)


def _make_text(setting: Setting, stage: Stage) -> Path:
    """The prepared folder of a stage, the same for every model."""
    out = setting.out / "data" / stage.name
    tasks = [part for item in stage.taught for part in ("--task", item)]
    shape = ["--row-length", str(stage.row), "--block", str(setting.block), "--tokens", stage.tokens]
    made = ["--tokenizer", "tasks", *tasks, *shape, "--workers", "1", "--seed", "1", "--out", str(out)]
    if not (out / "manifest.json").exists():
        call(setting, "mezzotint.data", "synthetic", *made)
    return out


def train_command(pupil: Pupil, stage: Stage, number: int, *, run: Path, text: Path, before: Path | None) -> list[str]:
    """Arguments of the training command of one round."""
    start = [] if before is None else [f"init_from={before}", "model.preset=null"]
    seed = 1000 * number + pupil.seed  # every round has noise and an order of rows of its own
    own = [f"run={run}", f"steps={stage.steps}", f"optim.lr={pupil.rate:g}", f"seed={seed}", f"data.seed={seed}"]
    shape = [
        f"data.row_length={stage.row}",
        f"rows_per_step={stage.rows_per_step}",
        f"micro_rows={stage.rows_per_step}",
    ]
    return [
        "mezzotint.launch.train",
        str(RECIPE),
        *ARMS[pupil.arm],
        *own,
        *shape,
        *stage.settings,
        f"data.sources=[[{text},1.0]]",
        *start,
    ]


def train(setting: Setting, run: Path, command: list[str], *, steps: int) -> None:
    """Train unless all steps are done; adds the processor time it took to run/minutes.jsonl, sitting after sitting."""
    outcome = run / "outcome.json"  # how a run ended, written by the trainer
    if outcome.exists():
        ended = json.loads(outcome.read_text(encoding="utf-8"))
        if ended["code"] == 0 and ended["step"] == steps:
            return
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        call(setting, *command)
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if not setting.dry_run and run.is_dir():
            with (run / "minutes.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"core_seconds": round(seconds, 1)}) + "\n")


def core_minutes(run: Path) -> float:
    """Processor time of a run's training, all sittings."""
    path = run / "minutes.jsonl"
    if not path.exists():
        return 0.0
    return sum(json.loads(line)["core_seconds"] for line in path.read_text(encoding="utf-8").splitlines()) / 60


def _look(setting: Setting, release: Path, task: str, length: int, found: Path) -> int:
    """Right answers of a release at the training length, on samples that no table shows."""
    asked = ["--tasks", task, "--lengths", str(length), "--samples", str(setting.samples), "--seed", str(LOOK_SEED)]
    how = ["--draws", "2", "--batch", "50", "--out", str(found)]
    call(setting, "mezzotint.eval", "retrieval", str(release), *asked, *how)
    if setting.dry_run:
        return 0
    asked_for = {"task": f"retrieval/{task.partition(':')[0]}", "length": length}
    rows = [
        row
        for row in read_results(found).rows.values()
        if row["status"] == "ok"
        and asked_for.items() <= row["identity"].items()
        and row["identity"]["index"] < setting.samples  # an earlier look may have asked for more
    ]
    return sum(row["values"]["correct"] for row in rows)


def adopt(release: Path, out: Path) -> Path:
    """The release under a name that tables can show; copied once."""
    if not (out / "training.yaml").exists():
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(release, out)
    return out


def call(setting: Setting, *module_and_arguments: str) -> None:
    """Run `python -m ...` on one thread; InputError where it fails."""
    command = [sys.executable, "-m", *module_and_arguments]
    print("$ python " + shlex.join(command[1:]), flush=True)
    if setting.dry_run:
        return
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    if done.returncode:
        raise InputError(f"{' '.join(module_and_arguments[:2])} ended with code {done.returncode}: see above")

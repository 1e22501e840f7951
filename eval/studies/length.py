"""Study of length: models taught to recall at one length are asked at 1, 2, 4, 8 and 16 times that length.

    python eval/studies/length.py                         all of it, the first seed of every model first
    python eval/studies/length.py --tasks passkey --arms mamba --seeds 1  one model
    python eval/studies/length.py --report                the table and the figure of what there is
    python eval/studies/length.py --dry-run               the commands alone

Every model is taught one task by the course of the pilot, until it answers held-out samples at the training length or has
spent its minutes. What a model answers below LEARNED at the training length is "not learned" and not asked any further:
its longer prompts would say nothing about length. Models with rotary positions are asked once more with
scaled ones (NTK, the factor being the multiple), the weights as they are. Everything goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import length_report  # beside this file
from curriculum import ASKED, BLOCK, COURSES, RATES, TRAINED, tasks_of
from teaching import ARMS, Pupil, Round, Setting, Stage, adopt, call, teach

from mezzotint.data.cli import run_command
from mezzotint.data.errors import InputError
from mezzotint.eval.results import Content, read_results

MULTIPLES = (1, 2, 4, 8, 16)
LEARNED = 0.9
SCALED = ("attention", "hybrid")  # arms with rotary positions
SCALING = "ntk"  # leaves the highest frequency, by which neighbours are told apart, as it is
FOLDER = Path(__file__).with_name("length")  # of the table and the figure


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Which models, and how much is asked of them."""

    setting: Setting
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    samples: int  # of a cell
    courses: dict[str, tuple[Stage, ...]]  # by task

    @property
    def answers(self) -> Path:
        """A folder with one results file a model and task: none takes those of another release."""
        return self.setting.out / "answers"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with a sentence where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/study", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--arms", default=",".join(ARMS), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--tasks", default=",".join(COURSES), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--seeds", default="1,2,3", metavar="LIST", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M", help="core-minutes a model (default: 20)")
    parser.add_argument("--samples", type=int, default=200, metavar="N", help="of a cell (default: %(default)s)")
    parser.add_argument("--looks", type=int, default=100, metavar="N", help="samples of each look (default: 100)")
    parser.add_argument("--report", action="store_true", help="write the table and the figure, run nothing")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, metavar="DIR", help="of both (default: beside this file)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    given = parser.parse_args(arguments)
    return run_command(lambda: _main(given))


def _main(given: argparse.Namespace) -> int:
    config = _config(given)
    if not given.report:
        study(config)
    if not config.setting.dry_run:
        print(length_report.write(config.answers, given.folder, learned=LEARNED, trained=TRAINED))
    return 0


def _config(given: argparse.Namespace) -> StudyConfig:
    arms = tuple(given.arms.split(","))
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise InputError(f"no model {unknown[0]!r} in the study; one of {', '.join(ARMS)}")
    try:
        seeds = tuple(int(seed) for seed in given.seeds.split(","))
    except ValueError:
        raise InputError(f"--seeds is {given.seeds!r}; write for example 1,2,3") from None
    if min(given.samples, given.looks) < 1 or given.minutes <= 0:
        raise InputError("give at least one sample and some minutes")
    out = Path(given.out)
    setting = Setting(out=out, block=BLOCK, minutes=given.minutes, samples=given.looks, dry_run=given.dry_run)
    courses = {task: COURSES[task] for task in tasks_of(given.tasks)}
    return StudyConfig(setting=setting, arms=arms, seeds=seeds, samples=given.samples, courses=courses)


def study(config: StudyConfig) -> None:
    """Teach and ask every model, seed after seed, so that a study that is stopped has whole seeds."""
    for seed in config.seeds:
        for task, stages in config.courses.items():
            for arm in config.arms:
                pupil = Pupil(arm, RATES[arm], seed)
                rounds = teach(config.setting, pupil, stages)
                release = config.setting.out / "releases" / task / f"{arm}-seed{seed}"
                if not config.setting.dry_run:
                    adopt(rounds[-1].release, release)
                    print(f"{pupil.name}, {task}: {_words(rounds)}", flush=True)
                ask(config, release, task, scaled=arm in SCALED)


def ask(config: StudyConfig, release: Path, task: str, *, scaled: bool) -> None:
    """The training length, and if the task is learned the longer ones, with scaled positions too where there are some.

    The factor is the multiple: at the training length the scaled model is the model itself.
    """
    _retrieve(config, release, task, MULTIPLES[:1])
    found = _answers(config, release, task)
    if not config.setting.dry_run and share(read_results(found), release.name, task) < LEARNED:
        return
    if not scaled:
        _retrieve(config, release, task, MULTIPLES[1:])
        return
    for multiple in MULTIPLES[1:]:
        _retrieve(config, release, task, (multiple,), "--rope-scaling", f"{SCALING}={multiple}")


def _answers(config: StudyConfig, release: Path, task: str) -> Path:
    return config.answers / f"{task}-{release.name}.jsonl"


def _retrieve(config: StudyConfig, release: Path, task: str, multiples: Sequence[int], *more: str) -> None:
    lengths = ",".join(str(TRAINED * multiple) for multiple in multiples)
    asked = ["--tasks", ASKED[task], "--lengths", lengths, "--training-length", str(TRAINED)]
    how = ["--samples", str(config.samples), "--draws", "2", "--batch", "20", *more]
    out = ["--out", str(_answers(config, release, task))]
    call(config.setting, "mezzotint.eval", "retrieval", str(release), *asked, *how, *out)


def share(found: Content, subject: str, task: str) -> float:
    """Right answers of a subject at the training length."""
    rows = [
        row
        for row in found.rows.values()
        if row["status"] == "ok"
        and row["identity"]["subject"] == subject
        and row["identity"]["task"] == f"retrieval/{task}"
        and row["identity"]["length"] == TRAINED
    ]
    return sum(row["values"]["correct"] for row in rows) / max(1, len(rows))


def _words(rounds: list[Round]) -> str:
    last = rounds[-1]
    right = "/".join(map(str, last.right))
    return f"{last.minutes:.1f} core-minutes, stage {last.stage}, {right} of {last.samples} right"


if __name__ == "__main__":
    raise SystemExit(main())

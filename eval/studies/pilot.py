"""Pilot of the length study: can two layers of attention, and of Mamba, be taught to recall within 20 core-minutes?

    python eval/studies/pilot.py                        both, at every rate: up to 20 core-minutes a model and a rate
    python eval/studies/pilot.py --tasks passkey --arms mamba --rates 3e-3
    python eval/studies/pilot.py --dry-run              the commands alone

Each model goes through a task's course (curriculum.py) at every learning rate as far as its first stage, and on at the
rate that answered best there. A model has learned a task if it answers LEARNED of it at the training length within its
minutes. Every step goes on where it stopped, so the pilot may take several sittings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from curriculum import BLOCK, COURSES, TRAINED, tasks_of
from teaching import ARMS, Pupil, Round, Setting, Stage, teach

from mezzotint.data.cli import run_command
from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes
from mezzotint.eval.intervals import percent

LEARNED = 0.95


@dataclass(frozen=True, kw_only=True)
class PilotConfig:
    """Which models, at which learning rates."""

    setting: Setting
    arms: tuple[str, ...]
    rates: tuple[float, ...]
    seed: int
    courses: dict[str, tuple[Stage, ...]]  # by task


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with a sentence where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/study", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--arms", default="attention,mamba", metavar="LIST", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--rates", default="2e-3,4e-3", metavar="LIST", help="learning rates (default: %(default)s)")
    parser.add_argument("--tasks", default=",".join(COURSES), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M", help="core-minutes a model (default: 20)")
    parser.add_argument("--samples", type=int, default=200, metavar="N", help="of each look (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="of weights, noise and order (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    given = parser.parse_args(arguments)
    return run_command(lambda: pilot(_config(given)))


def _config(given: argparse.Namespace) -> PilotConfig:
    arms = tuple(given.arms.split(","))
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise InputError(f"no model {unknown[0]!r} in the pilot; one of {', '.join(ARMS)}")
    try:
        rates = tuple(float(rate) for rate in given.rates.split(","))
    except ValueError:
        raise InputError(f"--rates is {given.rates!r}; write for example 2e-3,4e-3") from None
    if given.samples < 1 or given.minutes <= 0:
        raise InputError("give at least one sample and some minutes")
    out = Path(given.out)
    setting = Setting(out=out, block=BLOCK, minutes=given.minutes, samples=given.samples, dry_run=given.dry_run)
    courses = {task: COURSES[task] for task in tasks_of(given.tasks)}
    return PilotConfig(setting=setting, arms=arms, rates=rates, seed=given.seed, courses=courses)


def pilot(config: PilotConfig) -> int:
    """Run every model's pilot, or go on with it; prints and writes the table."""
    found: list[Taught] = []
    for task, stages in config.courses.items():
        for arm in config.arms:
            first = [Pupil(arm, rate, config.seed) for rate in config.rates]
            begun = [Taught(task, pupil, teach(config.setting, pupil, stages[:1])) for pupil in first]
            best = max(begun, key=lambda one: (one.rounds[-1].worst, -one.rounds[-1].minutes))
            found += [one for one in begun if one is not best]
            found.append(Taught(task, best.pupil, teach(config.setting, best.pupil, stages)))
    if not config.setting.dry_run:
        text = table(found, config)
        write_bytes(config.setting.out / "pilot.md", text.encode())
        print(text)
    return 0


@dataclass(frozen=True)
class Taught:
    """The rounds of one model in the course of one task."""

    task: str
    pupil: Pupil
    rounds: list[Round]


def table(found: list[Taught], config: PilotConfig) -> str:
    """Markdown: a line a round, then what that says of each model."""
    lines = [
        f"Seed {config.seed}, trained on rows of {TRAINED} tokens at the end. Right: of what is asked after the round, "
        "95% intervals. Core-minutes of training so far.",
        "",
        "| task | model | rate | stage | round | right | core-minutes |",
        "|---|---|---:|---|---:|---|---:|",
    ]
    for one in found:
        for each in one.rounds:
            right = ", ".join(percent(count, each.samples) for count in each.right)
            who = f"| {one.task} | {one.pupil.arm} | {one.pupil.rate:g} "
            lines.append(f"{who}| {each.stage} | {each.number} | {right} | {each.minutes:.1f} |")
    lines.append("")
    for task in config.courses:
        for arm in config.arms:
            own = [one for one in found if (one.task, one.pupil.arm) == (task, arm)]
            verdict = "learned" if any(learned(one, config) for one in own) else "not learned"
            lines.append(f"{arm}, {task}: {verdict} ({LEARNED} within {config.setting.minutes:g} core-minutes)")
    return "\n".join(lines) + "\n"


def learned(one: Taught, config: PilotConfig) -> bool:
    """Whether the last round of the last stage answered enough in time."""
    end = one.rounds[-1]
    in_time = end.minutes <= config.setting.minutes
    return end.stage == config.courses[one.task][-1].name and end.worst >= LEARNED and in_time


if __name__ == "__main__":
    raise SystemExit(main())

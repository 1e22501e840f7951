"""Study of frontiers: of the training FLOPs of `frontiers: one`, which share does `frontiers: all` need for the same bound?

    python eval/studies/frontiers.py                          all of it: 40 core-minutes for every run of `one`
    python eval/studies/frontiers.py --minutes 15             a smaller study; more minutes later go on from it
    python eval/studies/frontiers.py --backbones mamba --seeds 1
    python eval/studies/frontiers.py --pilot                  the pilot of learning rates and rows a step
    python eval/studies/frontiers.py --report                 the table and the figure of what there is
    python eval/studies/frontiers.py --dry-run                the commands alone

A run of `one` trains until it has spent its core-minutes; then `all` trains to half of the FLOPs that `one` came to, and to
all of them where its bound is still above. The rate is constant after its warm-up, so that a curve does not depend on where
it ends. Both take the same rows in the same order; rows a step and the rate are each objective's own, from the pilot.
Validation is of both on the same rows with the same noise. Everything goes on where it stopped, and every run writes its log
to a file of its own.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import frontiers_count  # beside this file
import frontiers_report
from frontiers_curves import curve
from frontiers_sitting import Place, ask, core_minutes, prepare, train

from mezzotint.data.cli import run_command
from mezzotint.data.errors import InputError

BACKBONES = ("mamba", "attention")
FRONTIERS = ("one", "all")
FOLDER = Path(__file__).with_name("frontiers")  # of the table and the figure
ENDLESS = 1_000_000  # steps of a run that ends by its minutes; the rate is constant, so the number means nothing
SHARES = (0.5, 1.0)  # of the FLOPs of `one` that `all` trains to, each if the one before was not enough
MARK = 5e11  # training FLOPs between two bounds of `one`; `all`, which gets there sooner, has twice as many
PILOT = 5.4e11  # training FLOPs of a run of the pilot
SIZES = ("model.d_model=192", "model.n_heads=6", "model.n_kv_heads=6", "model.init_std=0.07")  # about 2M parameters
SAME = (
    *("optim.shape=constant", "optim.warmup_steps=20", "ema_decay=0", "validation.rows=64"),
    # a record a step: a stop or a kill between two records would leave FLOPs uncounted
    *("log.every=1", "log.tensorboard=false", "log.peak_tflops=0.1", "checkpoint.every=50", "checkpoint.keep=1"),
)


@dataclass(frozen=True)
class Choice:
    """What an objective chooses for itself. micro: rows of a pass; at 1 every row of `one` is cut at its own frontier."""

    rows: int
    micro: int
    rate: float


PILOTS = {
    "one": (Choice(4, 1, 3e-3), Choice(4, 1, 1.5e-3), Choice(4, 1, 6e-3)),
    "all": (Choice(2, 2, 3e-3), Choice(2, 2, 6e-3), Choice(1, 1, 3e-3)),
}
CHOSEN = {"one": PILOTS["one"][1], "all": PILOTS["all"][0]}  # the lowest bound of each in the pilot


@dataclass(frozen=True)
class Arm:
    """One run."""

    backbone: str
    frontiers: str
    choice: Choice
    seed: int  # of the weights, the noise and the order of rows

    @property
    def name(self) -> str:
        return f"{self.backbone}-{self.frontiers}-rows{self.choice.rows}-lr{self.choice.rate:g}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Which runs, and how long. overrides: changes of the recipe of all of them."""

    place: Place
    folder: Path
    backbones: tuple[str, ...]
    seeds: tuple[int, ...]
    minutes: float
    pilot: float = PILOT
    overrides: tuple[str, ...] = ()

    def arm(self, backbone: str, frontiers: str, seed: int) -> Arm:
        return Arm(backbone, frontiers, CHOSEN[frontiers], seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with a sentence where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/frontiers", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=40.0, metavar="M", help="core-minutes of `one` (default: 40)")
    parser.add_argument("--seeds", default="1,2", metavar="LIST", help="default: %(default)s")
    parser.add_argument("--backbones", default=",".join(BACKBONES), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--pilot", action="store_true", help="run the pilot instead, on the first backbone and seed")
    parser.add_argument("--report", action="store_true", help="write the table and the figure, run nothing")
    parser.add_argument("--set", action="append", default=[], metavar="key.path=value", help="change the recipe of all")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, metavar="DIR", help="of the tables (default: beside this file)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    given = parser.parse_args(arguments)
    return run_command(lambda: _main(given))


def _main(given: argparse.Namespace) -> int:
    config = _config(given)
    if given.pilot:
        pilot(config)
    elif not given.report:
        study(config)
    if not config.place.dry_run:
        print(report_pilot(config) if given.pilot else report(config))
    return 0


def _config(given: argparse.Namespace) -> StudyConfig:
    backbones = tuple(given.backbones.split(","))
    unknown = [backbone for backbone in backbones if backbone not in BACKBONES]
    if unknown:
        raise InputError(f"no backbone {unknown[0]!r} in the study; one of {', '.join(BACKBONES)}")
    try:
        seeds = tuple(int(seed) for seed in given.seeds.split(","))
    except ValueError:
        raise InputError(f"--seeds is {given.seeds!r}; write for example 1,2") from None
    if given.minutes <= 0:
        raise InputError(f"--minutes is {given.minutes:g}; give some core-minutes")
    return StudyConfig(
        place=Place(Path(given.out), dry_run=given.dry_run),
        folder=given.folder,
        backbones=backbones,
        seeds=seeds,
        minutes=given.minutes,
        overrides=tuple(given.set),
    )


def study(config: StudyConfig) -> None:
    """Train every pair of runs, seed after seed, so that a study that is stopped has whole pairs."""
    prepare(config.place)
    for seed in config.seeds:
        for backbone in config.backbones:
            pair(config, config.arm(backbone, "one", seed), config.arm(backbone, "all", seed))


def pair(config: StudyConfig, one: Arm, all_: Arm) -> None:
    """`one` for its minutes, then `all` as far as it takes to reach the same bound, and to half of the FLOPs at least."""
    place = config.place
    marked = marked_command(config, one, MARK)
    train(place, one.name, [*marked, f"steps={ENDLESS}"], minutes=config.minutes)
    if place.dry_run:
        ask(place, [*command(config, all_), "--dry-run"])
        return
    target = curve(place.run(one.name))
    print(f"{one.name}: {core_minutes(place, one.name):.1f} core-minutes, {target.words()}", flush=True)
    cost = step_flops(config, all_)
    for share in SHARES:
        steps = max(1, round(share * target.flops[-1] / cost))
        train(place, all_.name, [*marked_command(config, all_, MARK / 2), f"steps={steps}"])
        found = curve(place.run(all_.name))
        if found.first_below(target.bounds[-1]) is not None:
            break
    print(f"{all_.name}: {core_minutes(place, all_.name):.1f} core-minutes, {found.words()}", flush=True)


def pilot(config: StudyConfig) -> None:
    """Train every choice of either objective for PILOT FLOPs; those of the study are begun by it."""
    prepare(config.place)
    for frontiers, choices in PILOTS.items():
        for choice in choices:
            arm = Arm(config.backbones[0], frontiers, choice, config.seeds[0])
            marked = marked_command(config, arm, config.pilot)
            steps = 1 if config.place.dry_run else max(1, round(config.pilot / step_flops(config, arm)))
            train(config.place, arm.name, [*marked, f"steps={steps}"])


def command(config: StudyConfig, arm: Arm) -> list[str]:
    """Arguments of the training command of a run, without its steps and its marks."""
    place, choice = config.place, arm.choice
    data = [f"data.sources=[[{place.data / 'train'},1.0]]", f"validation.folder={place.data / 'heldout'}"]
    own = [f"run={place.run(arm.name)}", f"model.backbone={arm.backbone}", f"objective.frontiers={arm.frontiers}"]
    own += [f"rows_per_step={choice.rows}", f"micro_rows={choice.micro}", f"optim.lr={choice.rate:g}"]
    own += [f"seed={arm.seed}", f"data.seed={arm.seed}"]
    return ["mezzotint.launch.train", "demo", *SIZES, *SAME, *data, *own, *config.overrides]


def marked_command(config: StudyConfig, arm: Arm, mark: float) -> list[str]:
    """The command with a bound every `mark` FLOPs, in whole steps."""
    if config.place.dry_run:
        return command(config, arm)
    return [*command(config, arm), f"validation.every={max(1, round(mark / step_flops(config, arm)))}"]


@functools.cache
def step_flops(config: StudyConfig, arm: Arm) -> float:
    """FLOPs of a step on average, forward and backward, of cut rows, by the trainer's own counter."""
    said = ask(config.place, [*command(config, arm), "--dry-run"])
    token = re.search(r"FLOPs per unique token +([\d,]+)", said)
    step = re.search(r"tokens per step +([\d,]+)", said)
    if token is None or step is None:
        raise InputError(f"{arm.name}: the dry run of mezzotint-train does not say what a step costs")
    return float(token[1].replace(",", "")) * float(step[1].replace(",", ""))


def report(config: StudyConfig) -> str:
    """Write frontiers.md, frontiers.csv and frontiers.png of the pairs that have begun; returns the Markdown."""
    pairs = []
    for backbone in config.backbones:
        ratios: tuple[float, float] | None = None
        for seed in config.seeds:
            names = [config.arm(backbone, frontiers, seed).name for frontiers in FRONTIERS]
            runs = [config.place.run(name) for name in names]
            if all(run.is_dir() and curve(run).flops for run in runs):
                one, all_ = (
                    replace(curve(run), minutes=core_minutes(config.place, name)) for run, name in zip(runs, names)
                )
                ratios = ratios or frontiers_count.shares(*frontiers_count.sizes(runs[0]))
                pairs.append(frontiers_report.Pair(backbone, seed, one, all_, ratios))
    if not pairs:
        raise InputError(f"{config.place.root} holds no pair of runs with bounds yet: run the study first")
    return frontiers_report.write(pairs, config.folder)


def report_pilot(config: StudyConfig) -> str:
    """Write pilot.md; returns it."""
    backbone, seed = config.backbones[0], config.seeds[0]
    found = [
        (frontiers, choice.rows, choice.rate, curve(config.place.run(Arm(backbone, frontiers, choice, seed).name)))
        for frontiers, choices in PILOTS.items()
        for choice in choices
    ]
    return frontiers_report.write_pilot(found, config.folder, flops=config.pilot, backbone=backbone, seed=seed)


if __name__ == "__main__":
    raise SystemExit(main())

"""Pilot of the length study: can two layers of attention, and of Mamba, be taught to recall within 20 core-minutes?

    python eval/studies/pilot.py                              all of it: up to 20 core-minutes a model and a rate
    python eval/studies/pilot.py --arms mamba --stages 1      the first stage of one model
    python eval/studies/pilot.py --dry-run                    the commands alone

Each model goes through a curriculum: stage k of n trains on the first k/n of the lists of lengths and numbers of pairs,
from the weights of the stage before. Every stage ends with an evaluation at the training length, by `mezzotint-eval
retrieval`; the first at LEARNED ends the model's pilot. The first stage is run for every learning rate, the others for
the best. Every step is a command that goes on where it stopped, and so does the pilot: it may take several sittings.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mezzotint.data.cli import run_command
from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes
from mezzotint.eval.intervals import percent
from mezzotint.eval.results import read_results

RECIPE = Path(__file__).with_name("pilot.yaml")
ARMS = {
    "attention": ("model.pattern=AA",),
    "attention-nope": ("model.pattern=AA", "model.positions=none"),
    "attention-short": ("model.pattern=AA", "model.rope_theta=100"),
    "mamba": ("model.pattern=MM", "model.backbone=mamba"),
    "hybrid": ("model.pattern=MA", "model.backbone=hybrid"),
    "hybrid-nope": ("model.pattern=MA", "model.backbone=hybrid", "model.positions=none"),
}
ROW, BLOCK, SYMBOLS = 256, 16, 128
TAUGHT = f"mqar:pairs=1/2/4/8:queries=0:symbols={SYMBOLS}:length=64/128/256"
# what each stage reaches: (pairs, tokens), the last of the lists that it trains on
REACHED = {1: (2, 64), 2: (4, 128), 3: (8, 256)}
STAGE_TOKENS = "4m"  # twice what the steps of a stage read
LEARNED = 0.95


@dataclass(frozen=True, kw_only=True)
class PilotConfig:
    """What to run, and where."""

    out: Path
    arms: tuple[str, ...]
    rates: tuple[float, ...] = (1e-3, 3e-3)
    stages: int = 3
    steps: int = 500  # of a stage
    minutes: float = 20.0  # core-minutes of training a model may take at one rate, all stages together
    samples: int = 200
    seed: int = 1
    dry_run: bool = False


@dataclass(frozen=True)
class Outcome:
    """A stage of one model at one rate: right answers among `samples`, of its own kind and of the last stage's."""

    arm: str
    rate: float
    stage: int
    own: int
    right: int
    samples: int
    minutes: float  # core-minutes of training so far

    @property
    def learned(self) -> bool:
        return self.right >= LEARNED * self.samples


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with a sentence where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/pilot", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--arms", default="attention,mamba", metavar="LIST", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--rates", default="1e-3,3e-3", metavar="LIST", help="learning rates (default: %(default)s)")
    parser.add_argument("--stages", type=int, default=3, metavar="N", help="how many of the three (default: all)")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="optimizer steps of a stage (default: 500)")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M", help="core-minutes a model (default: 20)")
    parser.add_argument("--samples", type=int, default=200, metavar="N", help="of each evaluation (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="of weights, noise and data (default: %(default)s)")
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
        raise InputError(f"--rates is {given.rates!r}; write for example 1e-3,3e-3") from None
    if not 1 <= given.stages <= 3 or min(given.steps, given.samples) < 1 or given.minutes <= 0:
        raise InputError("give 1 to 3 stages, and at least one step, one sample and some minutes")
    return PilotConfig(
        out=Path(given.out),
        arms=arms,
        rates=rates,
        stages=given.stages,
        steps=given.steps,
        minutes=given.minutes,
        samples=given.samples,
        seed=given.seed,
        dry_run=given.dry_run,
    )


def pilot(config: PilotConfig) -> int:
    """Run every model's pilot, or go on with it; prints and writes the table."""
    for stage in range(1, config.stages + 1):
        _run(config, *_data_command(config, stage))
    found: list[Outcome] = []
    for arm in config.arms:
        first = [outcome for rate in config.rates if (outcome := _stage(config, arm, rate, 1)) is not None]
        found += first
        best = max(first, key=lambda outcome: outcome.own, default=None)
        rate = config.rates[0] if best is None else best.rate  # a dry run has no outcome
        for stage in range(2, config.stages + 1):
            if best is not None and (best.learned or best.minutes >= config.minutes):
                break
            best = _stage(config, arm, rate, stage)
            found += [] if best is None else [best]
    if not config.dry_run:
        text = table(found, config)
        write_bytes(config.out / "pilot.md", text.encode())
        print(text)
    return 0


def _stage(config: PilotConfig, arm: str, rate: float, stage: int) -> Outcome | None:
    """Train, export and evaluate one stage; None in a dry run."""
    name = f"{arm}-{rate:g}-seed{config.seed}-stage{stage}"
    run, release = config.out / "runs" / name, config.out / "releases" / name
    before = config.out / "releases" / f"{arm}-{rate:g}-seed{config.seed}-stage{stage - 1}"
    _train(config, run, _train_command(config, arm, rate, stage, run=run, before=before if stage > 1 else None))
    exported = release / "training.yaml"
    latest = run / "latest"
    if config.dry_run or not exported.exists() or exported.stat().st_mtime < latest.stat().st_mtime:
        _run(config, "mezzotint.launch.export", str(run), str(release), "--overwrite")
    out = config.out / "results" / f"{name}.jsonl"
    for kind in sorted({stage, 3}):
        asked = ["--tasks", _asked(kind), "--lengths", str(REACHED[kind][1]), "--samples", str(config.samples)]
        _run(config, "mezzotint.eval", "retrieval", str(release), *asked, "--out", str(out))
    if config.dry_run:
        return None
    own, last = (_right(out, kind) for kind in (stage, 3))
    return Outcome(arm, rate, stage, own, last, config.samples, _minutes(config, arm, rate, stage))


def _asked(stage: int) -> str:
    """The task that a stage reaches."""
    return f"mqar:pairs={REACHED[stage][0]}:queries=8:symbols={SYMBOLS}"


def _right(results: Path, stage: int) -> int:
    """Right answers to the task of that stage."""
    pairs, length = REACHED[stage]
    rows = read_results(results).rows.values()
    wanted = [r for r in rows if r["identity"]["length"] == length and r["identity"]["options"]["pairs"] == pairs]
    return sum(row["values"]["correct"] for row in wanted if row["status"] == "ok")


def _data_command(config: PilotConfig, stage: int) -> list[str]:
    made = ["--tokenizer", "tasks", "--task", TAUGHT, "--stage", f"{stage}/3", "--seed", str(config.seed)]
    shape = ["--row-length", str(ROW), "--block", str(BLOCK), "--tokens", STAGE_TOKENS, "--workers", "1"]
    return ["mezzotint.data", "synthetic", *made, *shape, "--out", str(config.out / "data" / f"stage-{stage}")]


def _train_command(
    config: PilotConfig, arm: str, rate: float, stage: int, *, run: Path, before: Path | None
) -> list[str]:
    data = f"data.sources=[[{config.out / 'data' / f'stage-{stage}'},1.0]]"
    start = [] if before is None else [f"init_from={before}", "model.preset=null"]
    own = [f"run={run}", f"steps={config.steps}", f"optim.lr={rate:g}", f"seed={config.seed}", data]
    return ["mezzotint.launch.train", str(RECIPE), *ARMS[arm], *own, *start]


def _train(config: PilotConfig, run: Path, command: list[str]) -> None:
    """Train unless all steps are done; adds the processor time it took to run/minutes.jsonl, sitting after sitting."""
    outcome = run / "outcome.json"  # how a run ended, written by the trainer
    if outcome.exists():
        ended = json.loads(outcome.read_text(encoding="utf-8"))
        if ended["code"] == 0 and ended["step"] == config.steps:
            return
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        _run(config, *command)
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if not config.dry_run and run.is_dir():
            with (run / "minutes.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"core_seconds": round(seconds, 1)}) + "\n")


def _minutes(config: PilotConfig, arm: str, rate: float, stage: int) -> float:
    """Core-minutes of training of all stages up to this one."""
    total = 0.0
    for number in range(1, stage + 1):
        path = config.out / "runs" / f"{arm}-{rate:g}-seed{config.seed}-stage{number}" / "minutes.jsonl"
        total += sum(json.loads(line)["core_seconds"] for line in path.read_text(encoding="utf-8").splitlines())
    return total / 60


def _run(config: PilotConfig, *module_and_arguments: str) -> None:
    """Run `python -m ...` on one thread; InputError where it fails."""
    command = [sys.executable, "-m", *module_and_arguments]
    print("$ python " + shlex.join(command[1:]), flush=True)
    if config.dry_run:
        return
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    if done.returncode:
        raise InputError(f"{' '.join(module_and_arguments[:2])} ended with code {done.returncode}: see above")


def table(found: list[Outcome], config: PilotConfig) -> str:
    """Markdown: one line a stage, and what that says of each model."""
    lines = [
        f"Seed {config.seed}, {config.steps} steps a stage. Right, 95%: of what the stage reaches, and of "
        f"{_asked(3)} at {ROW} tokens. Core-minutes of training so far.",
        "",
        "| model | rate | stage | of its stage | of the last | core-minutes |",
        "|---|---:|---:|---|---|---:|",
    ]
    for one in found:
        shares = " | ".join(percent(right, one.samples) for right in (one.own, one.right))
        lines.append(f"| {one.arm} | {one.rate:g} | {one.stage} | {shares} | {one.minutes:.1f} |")
    lines.append("")
    for arm in config.arms:
        own = [one for one in found if one.arm == arm]
        learned = [one for one in own if one.learned and one.minutes <= config.minutes]
        verdict = "learned" if learned else "not learned"
        lines.append(f"{arm}: {verdict} ({LEARNED} within {config.minutes:g} core-minutes)")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())

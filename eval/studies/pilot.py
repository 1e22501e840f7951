"""Pilot of the length study: can two layers of attention, and of Mamba, be taught to recall within 20 core-minutes?

    python eval/studies/pilot.py                        both, at every rate: up to 20 core-minutes a model and a rate
    python eval/studies/pilot.py --arms mamba --rates 3e-3
    python eval/studies/pilot.py --dry-run              the commands alone

Each model goes through the curriculum (curriculum.py) at every learning rate as far as its first stage, and on at the rate
that answered best there. A model has learned if it answers LEARNED of both tasks at the training length within its
minutes. Every step goes on where it stopped, so the pilot may take several sittings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from curriculum import BLOCK, STAGES, TRAINED
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
    stages: tuple[Stage, ...] = STAGES


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with a sentence where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/study", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--arms", default="attention,mamba", metavar="LIST", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--rates", default="2e-3,4e-3", metavar="LIST", help="learning rates (default: %(default)s)")
    parser.add_argument("--stages", type=int, default=len(STAGES), metavar="N", help="of the curriculum (default: all)")
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
    if min(given.samples, given.stages) < 1 or given.minutes <= 0:
        raise InputError("give at least one stage, one sample and some minutes")
    out = Path(given.out)
    setting = Setting(out=out, block=BLOCK, minutes=given.minutes, samples=given.samples, dry_run=given.dry_run)
    return PilotConfig(setting=setting, arms=arms, rates=rates, seed=given.seed, stages=STAGES[: given.stages])


def pilot(config: PilotConfig) -> int:
    """Run every model's pilot, or go on with it; prints and writes the table."""
    found: list[tuple[Pupil, list[Round]]] = []
    for arm in config.arms:
        first = [Pupil(arm, rate, config.seed) for rate in config.rates]
        begun = [(pupil, teach(config.setting, pupil, config.stages[:1])) for pupil in first]
        best, _ = max(begun, key=lambda one: (one[1][-1].worst, -one[1][-1].minutes))
        found += [one for one in begun if one[0] != best]
        found.append((best, teach(config.setting, best, config.stages)))
    if not config.setting.dry_run:
        text = table(found, config)
        write_bytes(config.setting.out / "pilot.md", text.encode())
        print(text)
    return 0


def table(found: list[tuple[Pupil, list[Round]]], config: PilotConfig) -> str:
    """Markdown: a line a round, then what that says of each model."""
    lines = [
        f"Seed {config.seed}, trained on rows of {TRAINED} tokens at the end. Right: of every task asked after the round, "
        "95% intervals. Core-minutes of training so far.",
        "",
        "| model | rate | stage | round | right | core-minutes |",
        "|---|---:|---|---:|---|---:|",
    ]
    for pupil, rounds in found:
        for one in rounds:
            right = ", ".join(percent(count, one.samples) for count in one.right)
            lines.append(f"| {pupil.arm} | {pupil.rate:g} | {one.stage} | {one.number} | {right} | {one.minutes:.1f} |")
    lines.append("")
    for arm in config.arms:
        ends = [rounds[-1] for pupil, rounds in found if pupil.arm == arm]
        knows = any(learned(end, config) for end in ends)
        verdict = "learned" if knows else "not learned"
        lines.append(f"{arm}: {verdict} ({LEARNED} within {config.setting.minutes:g} core-minutes)")
    return "\n".join(lines) + "\n"


def learned(end: Round, config: PilotConfig) -> bool:
    """Whether the last round of the last stage answered enough in time."""
    in_time = end.minutes <= config.setting.minutes
    return end.stage == config.stages[-1].name and end.worst >= LEARNED and in_time


if __name__ == "__main__":
    raise SystemExit(main())

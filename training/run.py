"""The moving parts of a run on one rank, and how they are put together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mezzotint.models.config import ModelConfig, parameter_count
from mezzotint.training.build import Plan, build_model
from mezzotint.training.config import dump
from mezzotint.training.distributed import Ranks
from mezzotint.training.ema import Ema
from mezzotint.training.engine import Engine
from mezzotint.training.metrics import Work
from mezzotint.training.objective import Objective
from mezzotint.training.optim import make_optimizer
from mezzotint.training.stop import StopSignal


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, summed over ranks."""

    loss: float  # nats per token of the bound's estimate
    gradient_norm: float
    lr: float
    work: Work
    rows_hash: int  # of rows and noise
    stop: bool  # some rank was asked to stop


@dataclass(frozen=True, kw_only=True)
class Run:
    """The moving parts of a run on this rank."""

    plan: Plan
    ranks: Ranks
    engine: Engine
    ema: Ema | None
    stop: StopSignal

    @property
    def folder(self) -> Path:
        return Path(self.plan.config.run)


def write_recipe(run: Run) -> None:
    """The resolved recipe into the run folder, once it is known to belong there; main rank."""
    if run.ranks.main:
        run.folder.mkdir(parents=True, exist_ok=True)
        beside = run.folder / "config.yaml.tmp"
        beside.write_text(dump(run.plan.config), encoding="utf-8")
        os.replace(beside, run.folder / "config.yaml")


def start(plan: Plan, ranks: Ranks, stop: StopSignal) -> Run:
    """Build model, optimizer and engine, and say what is about to happen."""
    config = plan.config
    accumulation = config.accumulation(ranks.world)
    model = build_model(plan).to(ranks.device)
    objective = Objective(model, config.objective.noise_schedule(), loss_chunk=config.objective.loss_chunk)
    ema = Ema(model, config.ema_decay) if config.ema_decay else None
    engine = Engine(
        objective,
        make_optimizer(model, config.optim),
        config=config.engine,
        clip=config.optim.clip,
        micro_rows=config.micro_rows,
        accumulation=accumulation,
        ranks=ranks,
    )
    ranks.say(f"{config.run}: {describe(plan.model)}, {ranks.world} rank(s), accumulation {accumulation}")
    ranks.say(f"arms {plan.arms_hash} (matched arms print the same)")
    return Run(plan=plan, ranks=ranks, engine=engine, ema=ema, stop=stop)


def describe(model: ModelConfig) -> str:
    return f"pattern {model.pattern}, {parameter_count(model):,} parameters, blocks of {model.block_length}"

"""The moving parts of a run on one rank, and how they are put together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from mezzotint.models.config import ModelConfig, parameter_count
from mezzotint.models.denoiser import Denoiser
from mezzotint.training.build import Plan, build_model
from mezzotint.training.checkpoint import write_synced
from mezzotint.training.config import dump
from mezzotint.training.distributed import Ranks
from mezzotint.training.ema import Ema
from mezzotint.training.engine import Engine
from mezzotint.training.fragments import Fragment
from mezzotint.training.guard import History
from mezzotint.training.layer_runs import layer_run
from mezzotint.training.metrics import Work
from mezzotint.training.noise import Noise
from mezzotint.training.objective import BlockSums, Objective
from mezzotint.training.optim import make_optimizer
from mezzotint.training.peak import slow_bfloat16
from mezzotint.training.saver import Saver
from mezzotint.training.stop import StopSignal
from mezzotint.training.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, summed over ranks."""

    loss: float  # nats per token of the bound's estimate
    gradient_norm: float
    lr: float
    work: Work
    rows_hash: int  # of rows and noise
    stop: bool  # some rank was asked to stop
    shares: list[float]  # of a checkpoint that is being written, see Saver.settle
    details: list[tuple[Noise, BlockSums]]  # of this rank's micro-batches, detached
    skipped: bool = False  # loss or gradient not finite: the weights stayed as they were
    bad_rows: tuple[int, ...] = ()  # ids of the rows of those micro-batches, of all ranks
    spike: str = ""  # what is out of line with the steps before, in words


@dataclass(frozen=True, kw_only=True)
class Run:
    """The moving parts of a run on this rank."""

    plan: Plan
    ranks: Ranks
    engine: Engine
    fragments: list[Fragment]  # views of this rank's share of weights and moments
    ema: Ema | None
    history: History
    saver: Saver
    stop: StopSignal
    dog: Watchdog

    @property
    def folder(self) -> Path:
        return Path(self.plan.config.run)

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of every parameter, whole; ZeRO 3 leaves none of them so."""
        with torch.device("meta"):
            return {name: list(p.shape) for name, p in Denoiser(self.plan.model).named_parameters()}


def write_recipe(run: Run) -> None:
    """The resolved recipe into the run folder, once it is known to belong there; collective."""
    beside = run.folder / "config.yaml.tmp"

    def write() -> None:
        write_synced(beside, dump(run.plan.config).encode())
        os.replace(beside, run.folder / "config.yaml")

    try:
        run.ranks.alone(write)
    finally:
        beside.unlink(missing_ok=True)


def start(plan: Plan, ranks: Ranks, stop: StopSignal, dog: Watchdog) -> Run:
    """Build model, optimizer and engine, and say what is about to happen."""
    config = plan.config
    accumulation = config.accumulation(ranks.world)
    model = build_model(plan).to(ranks.device)
    objective = Objective(
        model,
        config.objective.noise_schedule(),
        loss_chunk=config.objective.loss_chunk,
        same_pieces=config.engine.zero_stage == 3,
        run=layer_run(config.engine.activations, compiled=config.engine.compile),
    )
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
    if ranks.main and config.engine.precision != "float32" and (slow := slow_bfloat16(ranks.device)):
        ranks.say(slow)
    fragments = engine.fragments()
    return Run(
        plan=plan,
        ranks=ranks,
        engine=engine,
        fragments=fragments,
        ema=Ema(fragments, config.ema_decay) if config.ema_decay else None,
        history=History(),
        saver=Saver(Path(config.run), config.checkpoint, ranks),
        stop=stop,
        dog=dog,
    )


def describe(model: ModelConfig) -> str:
    return f"pattern {model.pattern}, {parameter_count(model):,} parameters, blocks of {model.block_length}"

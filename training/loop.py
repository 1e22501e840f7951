"""The training loop: batch, noise, loss, step; then log, validate, save and stop."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import closing

import torch
from torch import Tensor

from mezzotint.data.loader import Batch
from mezzotint.training import checkpoint
from mezzotint.training.build import make_plan
from mezzotint.training.config import TrainConfig, dump
from mezzotint.training.distributed import join
from mezzotint.training.engine import MicroBatch, NonFinite
from mezzotint.training.meter import Meter
from mezzotint.training.metrics import Work, count_work
from mezzotint.training.noise import Noise
from mezzotint.training.objective import supervised_tokens
from mezzotint.training.optim import learning_rate
from mezzotint.training.resume import resume
from mezzotint.training.run import Run, Step, start, write_recipe
from mezzotint.training.stop import StopSignal

DONE, STOPPED, DIVERGED = 0, 85, 86  # exit codes


def train(config: TrainConfig) -> int:
    """Train or go on training; returns the exit code. Raises InputError for what the user can mend."""
    ranks = join()
    torch.set_flush_denormal(True)  # saturated softmaxes leave gradients of 1e-40: CPU steps took four times as long
    with StopSignal() as stop:
        run = start(make_plan(config), ranks, stop)
        with closing(run.engine):
            first = resume(run)
            write_recipe(run)
            if first >= run.plan.config.steps:
                ranks.say(f"{config.run} has its {config.steps} steps: nothing to do")
                return DONE
            with closing(Meter(run, first)) as meter, closing(batches(run, first)) as rows:
                code = train_from(run, first, meter, rows)
            ranks.barrier()  # nobody leaves while another still needs the group
            return code


def train_from(run: Run, first: int, meter: Meter, rows: Iterator[Batch]) -> int:
    """Steps `first` to the last; each ends with four plain calls: log, validate, save, stop."""
    config, say = run.plan.config, run.ranks.say
    for index in range(first, config.steps):
        step = index + 1  # steps done after this one
        last = step == config.steps
        try:
            result = take_step(run, index, next(rows))
        except NonFinite as error:
            say(f"step {step}: {error}; stopped before the update; go on from the newest checkpoint in {config.run}")
            return DIVERGED
        meter.add(result)
        if step % config.log.every == 0 or last:
            meter.log(step, result)
        held_out = run.plan.held_out
        if held_out is not None and (step % config.validation.every == 0 or last):
            meter.validate(step, held_out)
        if step % config.checkpoint.every == 0 or last or result.stop:
            save(run, step)
        if result.stop and not last:
            say(f"asked to stop: saved step {step}; the same command goes on from there")
            return STOPPED
    return DONE


def batches(run: Run, first: int) -> Generator[Batch, None, None]:
    """This rank's rows of step `first` and all later ones: a run of neighbours, by its place among the ranks."""
    rows = run.plan.config.rows_per_step
    share = rows // run.ranks.world
    yield from run.plan.loader.iterate(first, rows, run.ranks.rank * share, share)


def take_step(run: Run, index: int, batch: Batch) -> Step:
    """Forward, backward and update on this rank's rows of step `index`; collective."""
    config, ranks = run.plan.config, run.ranks
    noise = run.plan.noise.draw(step=index, first_row=ranks.rank * len(batch.tokens), blocks=batch.blocks)
    count = float(ranks.sum(torch.tensor([float(supervised_tokens(batch.documents))])))
    micro_batches = cut(batch, noise, config.micro_rows, ranks.device)
    loss, details = run.engine.accumulate(micro_batches, count)
    work = Work()
    for micro, sums in zip(micro_batches, details):
        masked = int(sums.masked.sum())
        work += count_work(run.plan.model, micro.noise, row_length=batch.tokens.shape[1], masked=masked)
    mine = [loss, float(run.stop.requested), float(noise.fingerprint(batch.row_ids)), *work.values()]
    loss, stop, rows_hash, *work_values = ranks.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
    if not math.isfinite(loss):
        raise NonFinite(f"the loss is {loss}")
    lr = learning_rate(config.optim, step=index, steps=config.steps)
    norm = run.engine.step(lr)
    if run.ema is not None:
        run.ema.update(run.engine.objective.model)
    return Step(
        loss=loss / count, gradient_norm=norm, lr=lr, work=Work(*work_values), rows_hash=int(rows_hash), stop=stop > 0
    )


def cut(batch: Batch, noise: Noise, micro_rows: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of rows with similar largest frontiers, so that cutting there wastes little; sums do not care."""
    order = noise.frontiers[:, -1].argsort(stable=True)

    def part(rows: Tensor) -> MicroBatch:
        return MicroBatch(batch.tokens[rows].to(device), batch.documents[rows].to(device), noise.select(rows))

    return [part(rows) for rows in order.split(micro_rows)]


def save(run: Run, step: int) -> None:
    """A checkpoint of everything the rest of the run depends on; collective."""
    plan, config = run.plan, run.plan.config
    state = checkpoint.RunState(
        step=step,
        next_row=step * config.rows_per_step,
        seed=config.seed,
        world=run.ranks.world,
        zero_stage=config.engine.zero_stage,
        ema_updates=run.ema.updates if run.ema is not None else 0,
        data_hash=plan.loader.hash,
        tokenizer_hash=plan.tokenizer.sha256,
        arms_hash=plan.arms_hash,
        recipe=dump(config),
        model=plan.model.to_dict(),
    )
    checkpoint.save(
        run.folder, state=state, engine=run.engine, ema=run.ema, ranks=run.ranks, keep=config.checkpoint.keep
    )

"""The training loop: batch, noise, loss, step; then log, validate, save and stop."""

from __future__ import annotations

import math
import shlex
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import Tensor

from mezzotint.data.loader import Batch
from mezzotint.models.errors import InputError
from mezzotint.training.build import make_plan
from mezzotint.training.checkpoint import EMA, RunState, candidates, step_of
from mezzotint.training.config import TrainConfig, dump
from mezzotint.training.distributed import join
from mezzotint.training.ending import Ending, ending
from mezzotint.training.engine import MicroBatch
from mezzotint.training.meter import Meter
from mezzotint.training.metrics import Work, count_work, read_records
from mezzotint.training.noise import Noise
from mezzotint.training.objective import supervised_tokens
from mezzotint.training.optim import learning_rate
from mezzotint.training.outcome import DIVERGED, DONE, STOPPED
from mezzotint.training.pieces import Piece
from mezzotint.training.profile import Steps, profiling
from mezzotint.training.resume import resume
from mezzotint.training.run import Run, Step, start, write_recipe
from mezzotint.training.stop import StopSignal
from mezzotint.training.stopwatch import Stopwatch
from mezzotint.training.watchdog import Watchdog

SPOILED = "weights are not finite"
STARTING = 1800.0  # seconds a rank may at least take to build the model and to read a checkpoint


def train(config: TrainConfig, *, profile: bool = False) -> int:
    """Train or go on training; returns the exit code. Raises InputError for what the user can mend."""
    ranks, folder = join(), Path(config.run)
    torch.set_flush_denormal(True)  # saturated softmaxes leave gradients of 1e-40: CPU steps took four times as long
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal(folder))  # outermost: launchers signal ranks that are only leaving, too
        end = stack.enter_context(ending(folder, ranks))
        limit = config.guard.hang_seconds
        dog = Watchdog(folder, rank=ranks.rank, world=ranks.world, limit=limit)
        plan = make_plan(config)
        config.accumulation(ranks.world)  # what is refused is so before the watchdogs of other ranks make a folder
        with Watchdog(folder, rank=ranks.rank, world=ranks.world, limit=limit and max(limit, STARTING)):
            run = start(plan, ranks, stop, dog)
            stack.enter_context(closing(run.engine))
            state = resume(run)
            write_recipe(run)
        ranks.barrier()  # leaving the first watchdog removes the folder that entering the next one makes
        if ranks.main and stop.clear_old():
            ranks.say(f"removed {folder}/STOP, which was there before this start")
        first = state.step if state is not None else 0
        due = state is not None and state.validation_due and not validated(run, first)
        if first >= run.plan.config.steps and not due:
            ranks.say(f"{config.run} has its {config.steps} steps: nothing to do")
            return end.at(first, DONE, "all steps done")
        stack.enter_context(dog)
        rows = stack.enter_context(closing(batches(run, first)))
        steps = stack.enter_context(profiling(folder, profile, ranks.rank))
        if state is None and run.plan.config.checkpoint.at_start and not (save(run, 0) and run.saver.finish()):
            raise InputError(f"{folder} cannot hold a checkpoint: see the warning above, and mend it before training")
        meter = stack.enter_context(closing(Meter(run, first)))
        if due and not validate(run, meter, first):
            return stopped(run, first, end)
        return train_from(run, first, meter, rows, steps, end)


def train_from(run: Run, first: int, meter: Meter, rows: Iterator[Batch], steps: Steps, end: Ending) -> int:
    """Steps `first` to the last; each ends with four plain calls: log, validate, save, stop."""
    config, beat = run.plan.config, run.dog.beat
    for index in range(first, config.steps):
        step = index + 1  # steps done after this one
        last = step == config.steps
        beat("data", index)
        with meter.watch.split("data"):
            batch = next(rows)
        beat("step")
        result = take_step(run, index, batch, meter.watch)
        meter.add(result)
        run.saver.settle(result.shares)
        run.saver.wait()  # before this step counts: no kill may cost more steps than lie between two checkpoints
        fault = judge(run, step, result)
        if fault:
            return diverged(run, step, fault, end)
        if step % config.log.every == 0 or last:
            beat("log")
            meter.log(step, result)
        stop, validation_due = result.stop, False
        if run.plan.held_out is not None and (step % config.validation.every == 0 or last):
            validation_due = stop and not last  # the next start takes it: a stop must not wait for it
            if not validation_due and not validate(run, meter, step):
                stop = validation_due = True
        if step % config.checkpoint.every == 0 or last or stop:
            beat("save")
            with meter.watch.split("save"):
                save(run, step, validation_due=validation_due)
        end.step = step
        steps.step()
        if stop and (not last or validation_due):
            return stopped(run, step, end)
    if not run.saver.finish():
        if run.saver.spoiled:
            return diverged(run, config.steps, SPOILED, end)
        raise InputError(f"{config.run} has no checkpoint of its last step: see the warning above, then start again")
    return end.at(config.steps, DONE, "all steps done")


def batches(run: Run, first: int) -> Generator[Batch, None, None]:
    """This rank's rows of step `first` and all later ones: a run of neighbours, by its place among the ranks."""
    rows = run.plan.config.rows_per_step
    share = rows // run.ranks.world
    yield from run.plan.loader.iterate(first, rows, run.ranks.rank * share, share)


def take_step(run: Run, index: int, batch: Batch, clock: Stopwatch) -> Step:
    """Forward, backward and update on this rank's rows of step `index`; collective. Waits for the device twice."""
    config, ranks = run.plan.config, run.ranks
    noise = run.plan.noise.draw(step=index, first_row=ranks.rank * len(batch.tokens), blocks=batch.blocks)
    count = ranks.total(supervised_tokens(batch.documents))
    micro_batches = cut(batch, noise, config.micro_rows, ranks.device)
    losses, bad, details = run.engine.accumulate(micro_batches, count, clock)
    masked = torch.stack([sums.masked.sum() for sums in details])
    losses, bad, masked = torch.stack([losses.double(), bad.double(), masked.double()]).cpu()
    work = Work()
    for micro, tokens in zip(micro_batches, masked.tolist()):
        work += count_work(run.plan.model, micro.noise, row_length=batch.tokens.shape[1], masked=int(tokens))
    if ranks.main:
        run.stop.poll()
    mine = [float(losses.sum()), float(bad.any()), float(run.stop.requested), float(noise.fingerprint(batch.row_ids))]
    totals = ranks.sum(torch.tensor([*mine, *run.saver.shares(), *work.values()], dtype=torch.float64)).tolist()
    (loss, any_bad, stop, rows_hash), shares, work_values = totals[:4], totals[4:7], totals[7:]
    lr = learning_rate(config.optim, step=index, steps=config.steps)
    norm = math.inf
    bad_rows: tuple[int, ...] = ()
    with clock.split("step"):
        if any_bad or not math.isfinite(loss):
            run.engine.discard()
            spoiled = [micro.row_ids.tolist() for micro, flag in zip(micro_batches, bad.tolist()) if flag]
            bad_rows = tuple(ranks.collect([row for rows in spoiled for row in rows]))
        else:
            norm = run.engine.step(lr)
    loss = loss / float(count)
    skipped = not math.isfinite(norm)
    spike = ""
    if not skipped:
        spike = run.history.spike(loss, norm, config.guard)
        if run.ema is not None:
            run.ema.update()
    return Step(
        loss=loss,
        gradient_norm=norm,
        lr=lr,
        work=Work(*work_values),
        rows_hash=int(rows_hash),
        stop=stop > 0,
        shares=shares,
        details=[(micro.noise, sums) for micro, sums in zip(micro_batches, details)],
        skipped=skipped,
        bad_rows=bad_rows,
        spike=spike,
    )


def cut(batch: Batch, noise: Noise, micro_rows: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of rows with similar largest frontiers, so that cutting there wastes little; sums do not care."""
    order = noise.frontiers[:, -1].argsort(stable=True)

    def part(rows: Tensor) -> MicroBatch:
        tokens, documents = batch.tokens[rows].to(device), batch.documents[rows].to(device)
        return MicroBatch(tokens, documents, noise.select(rows), batch.row_ids[rows])

    return [part(rows) for rows in order.split(micro_rows)]


def judge(run: Run, step: int, result: Step) -> str:
    """Why the run must not go on, in words, or nothing; says what was out of line."""
    guard = run.plan.config.guard
    if run.saver.spoiled:
        return SPOILED
    if result.spike:
        run.ranks.say(f"warning: step {step}: {result.spike}")
    if not result.skipped:
        return ""
    rows = ", ".join(map(str, result.bad_rows)) or "none alone: a sum over ranks overflowed"
    fault = f"loss or gradient is not finite (rows {rows})"
    if run.history.skip(step, guard):
        run.ranks.say(f"warning: step {step}: {fault}; skipped, {len(run.history.skipped)} of {guard.skip_budget}")
        return ""
    return f"{fault}, more than guard.skip_budget {guard.skip_budget} within {guard.skip_window} steps"


def validate(run: Run, meter: Meter, step: int) -> bool:
    """The bound of `step`; False when somebody asked to stop before it was done."""
    run.dog.beat("validate", step)
    assert run.plan.held_out is not None
    return meter.validate(step, run.plan.held_out)


def validated(run: Run, step: int) -> bool:
    """Whether the bound of `step` stands in the records; collective."""
    records = run.folder / "metrics.jsonl"
    there = run.ranks.main and records.is_file() and ("validation", step) in map(_kind_and_step, read_records(records))
    return bool(run.ranks.total(float(there)))


def _kind_and_step(record: dict) -> tuple[str, int]:
    return record["kind"], record["step"]


def save(run: Run, step: int, *, validation_due: bool = False) -> bool:
    """Begin a checkpoint of everything the rest of the run depends on; collective. False when it could not begin."""
    plan, config = run.plan, run.plan.config
    state = RunState(
        step=step,
        next_row=step * config.rows_per_step,
        seed=config.seed,
        ema_updates=run.ema.updates if run.ema is not None else 0,
        validation_due=validation_due,
        history=run.history.as_dict(),
        data_hash=plan.loader.hash,
        tokenizer_hash=plan.tokenizer.sha256,
        arms_hash=plan.arms_hash,
        recipe=dump(config),
        model=plan.model.to_dict(),
        shapes=run.shapes,
        world=run.ranks.world,
        zero_stage=config.engine.zero_stage,
    )
    pieces = [Piece(kind, f.name, f.start, view) for f in run.fragments for kind, view in f.views.items()]
    if run.ema is not None:
        pieces += [Piece(EMA, f.name, f.start, value) for f, value in zip(run.fragments, run.ema.values)]
    return run.saver.begin(state, pieces)


def diverged(run: Run, step: int, fault: str, end: Ending) -> int:
    """The end of a run that must not go on because of what `step` brought."""
    run.saver.finish()  # what is being written was sound when it was copied
    run.ranks.say(
        f"step {step}: {fault}. The same start comes to the same step: mend the data, raise guard.skip_budget, or go on in "
        f"another run, with half the rate: {way_on(run)}"
    )
    return end.at(step - 1, DIVERGED, fault)


def way_on(run: Run) -> str:
    """One command that starts another run from the newest checkpoint; what it sets must not change on a resume."""
    config, checkpoints = run.plan.config, candidates(run.folder)
    recipe, done = run.folder / "config.yaml", step_of(checkpoints[0]) if checkpoints else 0
    release, other = run.folder / f"step-{done}-release", f"{config.run.rstrip('/')}-from-{done}"
    changes = [f"run={other}", f"steps={config.steps - done}", f"optim.lr={config.optim.lr / 2:g}"]
    words = ["mezzotint-train", str(recipe), *changes]
    if not checkpoints:
        return shlex.join(words)
    export = ["mezzotint-export", config.run, str(release), "--no-ema"]  # the weights of step-N, not their average
    words += [f"init_from={release}", f"data.seed={config.data.seed + 1}"]  # rows that it has not just seen
    return f"{shlex.join(export)} && {shlex.join(words)}"


def stopped(run: Run, step: int, end: Ending) -> int:
    """The end of a run that was asked to stop after `step`, which is saved or being saved."""
    run.dog.beat("save")
    if not run.saver.finish():
        if run.saver.spoiled:
            return diverged(run, step, SPOILED, end)
        raise InputError(f"stopped at step {step}, which could not be saved: see the warning above")
    if run.ranks.main:
        run.stop.clear()
    run.ranks.say(f"asked to stop{_because(run)}: saved step {step}; the same command goes on from there")
    return end.at(step, STOPPED, f"asked to stop{_because(run)}")


def _because(run: Run) -> str:
    return f" ({run.stop.reason})" if run.stop.reason else " (another rank was asked)"

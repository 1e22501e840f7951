"""Where a run goes on, on any number of ranks: the newest complete checkpoint that belongs to its recipe and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mezzotint.models.errors import InputError
from mezzotint.training import checkpoint, strict
from mezzotint.training.append import warn
from mezzotint.training.build import Plan
from mezzotint.training.checkpoint import EMA, RunState
from mezzotint.training.distributed import Ranks
from mezzotint.training.guard import History
from mezzotint.training.metrics import read_records
from mezzotint.training.pieces import Pieces
from mezzotint.training.run import Run

# keys of a recipe (or the first part of one) that may differ from the checkpoint's; sources go by their hash
MAY_CHANGE = (
    *("run", "steps", "micro_rows", "checkpoint", "log", "validation", "guard", "data.sources", "data.prefetch"),
    *("engine.zero_stage", "engine.activations", "engine.compile"),
)


def resume(run: Run) -> RunState | None:
    """Load what the run folder holds; None, said aloud, when it holds nothing. Collective.

    Raises InputError for a checkpoint of another recipe or other data, or when all are damaged.
    """
    ranks, plan = run.ranks, run.plan
    folder = newest(run.folder, ranks)
    if folder is None:
        ranks.alone(lambda: require_fresh(run))
        ranks.say(f"no checkpoint in {run.folder}: starting at step 0")
        return None
    state = checkpoint.read_state(folder)
    require_same(plan, state, folder=folder)
    ranks.alone(lambda: prepare_folder(run, folder, state))
    load(run, folder, state)
    cut = f"{state.world} rank(s), stage {state.zero_stage}"
    ranks.say(f"resuming {run.folder} at step {state.step} from {folder.name} (written by {cut})")
    return state


def require_fresh(run: Run) -> None:
    """InputError where a folder without checkpoints has records of steps, or checkpoints that were set aside."""
    path = run.folder / "metrics.jsonl"
    steps = max((record["step"] for record in read_records(path)), default=0) if path.is_file() else 0
    aside = sorted(checkpoint.damaged(run.folder), key=checkpoint.step_of)
    if aside or (steps and run.plan.config.checkpoint.at_start):
        what = f"{aside[0]} is there" if aside else f"{path} has records up to step {steps}"
        raise InputError(
            f"{run.folder} has no checkpoint, but {what}: restore one, or remove the folder, or give the run another"
        )


def prepare_folder(run: Run, folder: Path, state: RunState) -> None:
    """Set damaged checkpoints aside, mend the pointer, and say aloud when the records do not reach the checkpoint."""
    checkpoint.set_aside(run.folder, state.step, run.ranks.say)
    checkpoint.point(run.folder, folder.name)
    every = strict.parse_yaml(state.recipe, source=str(folder))["log"]["every"]
    expected, path = state.step // every * every, run.folder / "metrics.jsonl"
    steps = [r["step"] for r in read_records(path) if r["kind"] == "train"] if path.is_file() else []
    if expected and expected not in steps:
        warn(f"{path} lacks records: step {expected} is not among them, though the checkpoint is of step {state.step}")


def newest(run: Path, ranks: Ranks) -> Path | None:
    """`checkpoint.newest` for all ranks: each looks into its share of the files, and all come to the same folder."""
    folders = checkpoint.candidates(run) if ranks.main else []
    seen: list[Path] = []
    while True:
        next_step = checkpoint.step_of(folders[len(seen)]) if len(seen) < len(folders) else -1
        step = int(ranks.sum(torch.tensor([float(next_step if ranks.main else 0)])))
        if step < 0:
            checkpoint.require_none(run, seen)
            return None
        folder = run / "checkpoints" / f"step-{step}"
        fault = checkpoint.damage(folder, share=(ranks.rank, ranks.world))
        faulty = torch.zeros(ranks.world)
        faulty[ranks.rank] = fault is not None
        faulty = ranks.sum(faulty)
        if not faulty.any():
            return folder
        if fault is not None and ranks.rank == int(faulty.argmax()):  # one of those who see it speaks
            print(checkpoint.passed_over(folder, fault), flush=True)
        seen.append(folder)


def load(run: Run, folder: Path, state: RunState) -> None:
    """Weights, moments, average and history, whoever wrote which part of them; collective."""
    pieces, engine = Pieces(folder), run.engine
    for fragment in engine.fragments(reading=True):
        for kind, view in fragment.views.items():
            view.copy_(pieces.read(kind, fragment.name, fragment.start, fragment.size))
    run.history.__dict__.update(History(**state.history).__dict__)
    engine.restored(run.history.updates)
    if run.ema is not None:
        for fragment, value in zip(run.ema.fragments, run.ema.values):
            value.copy_(pieces.read(EMA, fragment.name, fragment.start, fragment.size))
        run.ema.updates = state.ema_updates
    run.ranks.barrier()


def require_same(plan: Plan, state: RunState, *, folder: Path) -> None:
    """InputError that names the first thing in which this start and the checkpoint differ, with both values."""
    old, new = strict.parse_yaml(state.recipe, source=str(folder)), _flat(strict.unstructure(plan.config))
    pairs: list[tuple[str, Any, Any]] = [
        (key, value, new.get(key)) for key, value in _flat(old).items() if not _may_change(key)
    ]
    pairs += [
        ("tokenizer (sha256)", state.tokenizer_hash, plan.tokenizer.sha256),
        ("data and its order (sha256)", state.data_hash, plan.loader.hash),
    ]
    for name, before, now in pairs:
        if before != now:
            raise InputError(
                f"{folder} was written with {name} {before}, this start has {now}: use the same, or another run folder"
            )


def _may_change(key: str) -> bool:
    return key in MAY_CHANGE or key.split(".")[0] in MAY_CHANGE


def _flat(values: dict, path: str = "") -> dict:
    """Nested keys joined by dots."""
    flat: dict = {}
    for key, value in values.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat

"""Where a run goes on: the newest complete checkpoint, if it belongs to this recipe, this data and this start."""

from __future__ import annotations

from pathlib import Path

from mezzotint.models.errors import InputError
from mezzotint.training import checkpoint, strict
from mezzotint.training.build import Plan
from mezzotint.training.run import Run

# the first keys of a recipe that may differ from the checkpoint's; `data` is held against its hash instead
MAY_CHANGE = ("run", "steps", "micro_rows", "checkpoint", "log", "validation", "data")


def resume(run: Run) -> int:
    """Load what the run folder holds and return the number of steps done; 0, said aloud, when it holds nothing.

    Raises InputError for a checkpoint of another recipe, other data, another number of ranks, or when all are damaged.
    """
    ranks, plan = run.ranks, run.plan
    folder = checkpoint.newest(run.folder, ranks.say)
    if folder is None:
        ranks.say(f"no checkpoint in {run.folder}: starting at step 0")
        return 0
    state = checkpoint.read_state(folder)
    require_same(plan, state, world=ranks.world, folder=folder)
    ranks.barrier()  # nobody renames while another rank still looks
    if ranks.main:
        checkpoint.set_aside(run.folder, state.step)
    run.engine.load(folder)
    if run.ema is not None:
        run.ema.load(checkpoint.load_ema(folder), state.ema_updates)
    ranks.say(f"resuming {run.folder} at step {state.step} from {folder.name}")
    return state.step


def require_same(plan: Plan, state: checkpoint.RunState, *, world: int, folder: Path) -> None:
    """InputError that names the first thing in which this start and the checkpoint differ, with both values."""
    pairs = [
        ("number of ranks", state.world, world),
        ("engine.zero_stage", state.zero_stage, plan.config.engine.zero_stage),
        ("tokenizer (sha256)", state.tokenizer_hash, plan.tokenizer.sha256),
        ("data and its order (sha256)", state.data_hash, plan.loader.hash),
    ]
    old, new = strict.parse_yaml(state.recipe, source=str(folder)), strict.unstructure(plan.config)
    pairs += [
        (key, value, _flat(new).get(key)) for key, value in _flat(old).items() if key.split(".")[0] not in MAY_CHANGE
    ]
    for name, before, now in pairs:
        if before != now:
            raise InputError(
                f"{folder} was written with {name} {before}, this start has {now}: use the same, or another run folder"
            )


def _flat(values: dict, path: str = "") -> dict:
    """Nested keys joined by dots."""
    flat: dict = {}
    for key, value in values.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat

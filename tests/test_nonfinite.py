"""NaN and infinity on one rank: all ranks skip the step alike, name the rows, and stop with 86 past the budget."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest
import torch
from kill_support import Ended, Harm, start
from test_training_kills import newest_step
from training_support import curve, recipe_file, records

from mezzotint.launch.export import main as export_main
from mezzotint.models.weights import load_model
from mezzotint.training import checkpoint, outcome
from mezzotint.training.build import make_plan
from mezzotint.training.config import load_recipe
from mezzotint.training.gradient_watch import GradientWatch
from mezzotint.training.loop import train
from mezzotint.training.objective import Objective
from mezzotint.training.outcome import DIVERGED
from mezzotint.training.pieces import Pieces

ROWS, MICRO = 8, 2  # rows of a step and of a micro-batch: two ranks have two micro-batches each
BF16 = ("engine.precision=bf16", "model.backbone=attention", "model.pattern=AA")
CASES = [  # engine: the first in every test run
    ("engine.zero_stage=1",),
    *(
        pytest.param((f"engine.zero_stage={stage}", *precision), marks=pytest.mark.slow)
        for stages, precision in (((0, 2, 3), ()), ((1, 2, 3), BF16), ((0, 1, 2, 3), ("engine.precision=autocast",)))
        for stage in stages
    ),
]
KINDS = ("nan loss", "infinite loss", "infinite loss, finite gradients", "nan gradient", "infinite gradient")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a recipe; its runs are subfolders."""
    folder = tmp_path_factory.mktemp("nonfinite")
    recipe_file(
        folder,
        steps=9,
        rows_per_step=ROWS,
        micro_rows=MICRO,
        ema_decay=0.9,
        checkpoint={"every": 1, "keep": 20},
        guard={"skip_budget": 9},
    )
    return folder


# -- called inside the ranks -----------------------------------------------------------------------------------------


def poison(rank: int, *, first: int = 0, steps: dict[str, str], world: int, write_to: str = os.devnull) -> None:
    """On the last rank, what KINDS says happens at each of `steps` (from 1) in the second micro-batch.

    first: step of the checkpoint that this start goes on from. The rows of the micro-batch go to the file `write_to`.
    """
    if rank != world - 1:
        return
    each = ROWS // MICRO // world  # passes of a step
    forward, make, passes, now = Objective.forward, GradientWatch.__init__, [first * each], [""]

    def spoil_gradient(gradient):
        gradient = gradient.clone()
        if now[0].endswith("gradient"):
            gradient.view(-1)[5] = torch.nan if now[0].startswith("nan") else -torch.inf
        return gradient

    def watch(self, module):
        module.model.layers[1].mlp.down_proj.weight.register_hook(spoil_gradient)  # before the watch's own
        make(self, module)

    def wrapped(self, tokens, documents, noise):
        step, place = divmod(passes[0], each)
        passes[0] += 1
        now[0] = steps.get(str(step + 1), "") if place == 1 else ""
        if now[0]:
            with open(write_to, "a") as file:
                file.write(f"{step + 1} {noise_key(noise)}\n")
        loss, sums = forward(self, tokens, documents, noise)
        factor = {"nan loss": torch.nan, "infinite loss": torch.inf}
        if now[0] == "infinite loss, finite gradients":
            loss = loss + torch.inf
        return loss * factor.get(now[0], 1.0), sums

    GradientWatch.__init__ = watch  # type: ignore[method-assign]
    Objective.forward = wrapped  # type: ignore[method-assign]


def noise_key(noise) -> str:
    """Tells rows apart: their draws do."""
    return " ".join(f"{value:.17g}" for value in noise.uniforms[:, 0, 0].tolist())


def rows_of(place: Path, written: Path) -> dict[int, list[int]]:
    """Ids of the rows of the poisoned micro-batches, by step: found again in the loader's order by their draws."""
    plan = make_plan(load_recipe(str(place / "recipe.yaml")))
    found = {}
    for line in written.read_text().splitlines():
        step, *keys = line.split()
        batch = plan.loader.batch((int(step) - 1) * ROWS, ROWS)
        noise = plan.noise.draw(step=int(step) - 1, first_row=0, blocks=batch.blocks)
        ids = dict(zip(noise_key(noise).split(), batch.row_ids.tolist()))
        found[int(step)] = [ids[key] for key in keys]
    return found


def poisoned(world: int, steps: dict[int, str], **values: object) -> Harm:
    return Harm("test_nonfinite", "poison", {"steps": {str(k): v for k, v in steps.items()}, "world": world, **values})


def go(place: Path, run: Path, *overrides: str, steps: dict[int, str], world: int = 2, first: int = 0) -> Ended:
    harms = [poisoned(world, steps, first=first, write_to=str(place / f"{run.name}.txt"))]
    return start(place / "recipe.yaml", f"run={run}", *overrides, world=world, harms=harms)


# -- tests -----------------------------------------------------------------------------------------------------------


def content(run: Path, step: int) -> dict:
    """Weights, moments and average after `step`."""
    folder = run / "checkpoints" / f"step-{step}"
    pieces, shapes = Pieces(folder), checkpoint.read_state(folder).shapes
    kinds = ("weights", "exp_avg", "exp_avg_sq", "ema")
    return {(kind, name): value for kind in kinds for name, value in pieces.whole(kind, shapes).items()}


def name_of(engine: tuple[str, ...]) -> str:
    return "-".join(word.split("=")[1] for word in engine)


def same(a: dict, b: dict) -> bool:
    return all(a[key].equal(b[key]) for key in a.keys() | b.keys())


@pytest.mark.parametrize("engine", CASES)
def test_every_kind_is_skipped_by_all_and_past_the_budget_all_stop(place, engine):
    run = place / f"kinds-{name_of(engine)}"
    bad = dict(zip((2, 3, 5, 7, 8), KINDS))
    ended = go(place, run, *engine, "guard.skip_budget=4", steps=bad)
    assert ended.codes == [DIVERGED, DIVERGED] and "Traceback" not in "".join(ended.output), ended
    skipped = {r["step"]: r["rows"] for r in records(run, "event") if r["event"] == "skipped"}
    assert list(skipped) == list(bad)
    expected = rows_of(place, place / f"{run.name}.txt")
    assert {step: sorted(rows) for step, rows in skipped.items()} == {s: sorted(rows) for s, rows in expected.items()}
    assert all(len(rows) == MICRO for rows in expected.values())
    last = ", ".join(map(str, skipped[8]))
    assert f"step 8: loss or gradient is not finite (rows {last}), more than guard.skip_budget 4" in ended.output[0]
    found = outcome.read(run)
    assert found is not None and found.code == DIVERGED and last in found.reason and found.step == 7
    assert newest_step(run) == 7  # a skipped step is a step done; the one past the budget is not
    contents = [content(run, step) for step in range(8)]
    assert [same(contents[step], contents[step - 1]) for step in range(1, 8)] == [s in bad for s in range(1, 8)]
    history = checkpoint.read_state(run / "checkpoints" / "step-7").history
    assert history["updates"] == 3 and history["skipped"] == [2, 3, 5, 7]


def test_what_is_said_at_the_end_is_a_command_that_goes_on(place):
    """Word by word as it is printed: an export, then a run from it with half the rate."""
    run = place / "said"
    ended = go(place, run, "guard.skip_budget=1", steps={3: "nan loss", 5: "nan loss"})
    assert ended.codes == [DIVERGED, DIVERGED], ended
    said = next(line for line in ended.output[0].splitlines() if line.startswith("step 5: "))
    export, train_on = (shlex.split(part) for part in said.split("half the rate: ")[1].split(" && "))
    assert export == ["mezzotint-export", str(run), f"{run}/step-4-release", "--no-ema"]
    assert train_on == [
        "mezzotint-train", f"{run}/config.yaml", f"run={run}-from-4", "steps=5", "optim.lr=0.0015",
        f"init_from={run}/step-4-release", "data.seed=1",
    ]  # fmt: skip
    assert export_main(export[1:]) == 0
    assert train(load_recipe(train_on[1], train_on[2:])) == 0
    assert [r["step"] for r in records(place / "said-from-4")] == [1, 2, 3, 4, 5]
    found, weights = load_model(export[2]).state_dict(), content(run, 4)
    assert all(value.equal(weights["weights", name]) for name, value in found.items())


def test_a_run_without_a_checkpoint_is_begun_again_with_half_the_rate(place):
    ended = go(
        place, place / "none", "guard.skip_budget=0", "checkpoint.at_start=false", steps={1: "nan loss"}, world=1
    )
    assert ended.codes == [DIVERGED], ended
    command = f"mezzotint-train {place}/none/config.yaml run={place}/none-from-0 steps=9 optim.lr=0.0015"
    assert ended.output[0].rstrip().endswith(f"half the rate: {command}")


def test_budget_0_stops_at_the_first(place):
    run = place / "first"
    ended = go(place, run, "guard.skip_budget=0", steps={4: "nan loss"}, world=1)
    assert ended.codes == [DIVERGED] and newest_step(run) == 3
    assert start(place / "recipe.yaml", f"run={run}").codes == [0]  # and goes on where the fault does not come again
    assert [r["step"] for r in records(run)] == list(range(1, 10))


@pytest.mark.parametrize("engine", CASES)
def test_a_run_killed_after_a_skip_goes_on_to_the_bit_and_still_counts_it(place, engine):
    """AdamW counts its steps for the bias of its moments: a skipped step is none of them, whoever counts."""
    bad = {2: "nan gradient", 4: "nan loss"}
    whole, run = place / f"whole-{name_of(engine)}", place / f"killed-{name_of(engine)}"
    assert go(place, whole, *engine, steps=bad).codes == [0, 0]
    die = Harm("kill_points", "die_after_steps", {"steps": 4, "victim": 0})
    harms = [poisoned(2, {2: "nan gradient"}), die]
    ended = start(place / "recipe.yaml", f"run={run}", *engine, world=2, harms=harms)
    assert -signal.SIGKILL in ended.codes and not ended.hung, ended
    first = newest_step(run)
    assert first == 2
    ended = go(place, run, *engine, steps=bad, first=first)
    assert ended.codes == [0, 0], ended
    assert curve(run) == curve(whole) and same(content(run, 9), content(whole, 9))
    events = [[(r["step"], r["rows"]) for r in records(x, "event")] for x in (run, whole)]
    assert events[0] == events[1] and [step for step, _ in events[0]] == [2, 4]
    assert records(run)[-1]["skipped_steps"] == 2
    history = checkpoint.read_state(run / "checkpoints" / "step-9").history
    assert history["skipped"] == [2, 4] and history["updates"] == 7


def test_skips_of_earlier_starts_count_against_the_budget(place):
    run = place / "counted"
    assert go(place, run, "guard.skip_budget=2", "steps=9", steps={2: "nan loss", 3: "nan loss"}, world=1).codes == [0]
    ended = go(place, run, "guard.skip_budget=2", "steps=14", steps={11: "nan loss"}, world=1, first=9)
    assert ended.codes == [DIVERGED] and "more than guard.skip_budget 2 within" in ended.output[0], ended
    ended = go(
        place, run, "guard.skip_budget=2", "guard.skip_window=9", "steps=14", steps={12: "nan loss"}, world=1, first=10
    )
    assert ended.codes == [0] and "skipped, 1 of 2" in ended.output[0], ended  # those before have left the window

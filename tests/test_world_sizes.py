"""A run goes on, on any number of ranks and under any ZeRO stage, with the same rows; wherever it was interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kill_support import Harm, at_call, start
from test_training_kills import assert_same_run, newest_step
from training_support import corpus, curve, recipe_file, records

from mezzotint.data.manifest import Manifest, read_manifest
from mezzotint.data.shards import ShardWriter
from mezzotint.training import checkpoint, loop, outcome, saver
from mezzotint.training.build import make_plan
from mezzotint.training.meter import Meter
from mezzotint.training.outcome import STOPPED

STEPS, EVERY, ROWS = 24, 4, 4
EPOCH = 24  # rows of the data; an epoch is EPOCH / ROWS = 6 steps, and every second one ends at a checkpoint


def rows_folder(folder: Path, rows: int) -> Path:
    """Prepared data of exactly `rows` rows of 32 tokens, each a document."""
    manifest = read_manifest(corpus() / "train")
    folder.mkdir()
    shutil.copy(corpus() / "train" / manifest.tokenizer, folder)
    writer, random = ShardWriter(folder, "part-00000", manifest.dtype), np.random.default_rng(0)
    for _ in range(rows):
        ids = np.array([*random.integers(manifest.vocab_size // 2, manifest.vocab_size, 31), manifest.eos_id])
        writer.add(ids, np.array([32]), text_bytes=31)
    values = vars(manifest) | {"folder": folder, "source": "test", "shards": (writer.close(),)}
    Manifest(**values).write()
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a recipe; its runs are subfolders."""
    folder = tmp_path_factory.mktemp("worlds")
    recipe_file(
        folder,
        steps=STEPS,
        micro_rows=1,
        ema_decay=0.9,
        data={"sources": [[str(rows_folder(folder / "rows", EPOCH)), 1.0]], "row_length": 32},
        checkpoint={"every": EVERY, "keep": 2},
        validation={"folder": str(corpus() / "heldout"), "every": 8, "rows": 6},
    )
    return folder


@pytest.fixture(scope="module")
def whole(place) -> Path:
    """The run that nothing interrupts: two ranks, stage 1."""
    ended = start(place / "recipe.yaml", f"run={place / 'whole'}", world=2)
    assert ended.codes == [0, 0], ended
    return place / "whole"


# -- called inside the ranks -----------------------------------------------------------------------------------------


def write_rows(rank: int, *, folder: str, start: int) -> None:
    """A line for every step that was done: which rows this rank has had."""
    step, path = loop.take_step, Path(folder) / f"rows-{start}-{rank}.jsonl"

    def wrapped(run, index, batch, clock):
        result = step(run, index, batch, clock)
        with open(path, "a") as file:
            file.write(json.dumps({"start": start, "step": index, "rank": rank, "rows": batch.row_ids.tolist()}) + "\n")
        return result

    loop.take_step = wrapped


def stop_while_validating(rank: int, *, step: int, victim: int) -> None:
    """SIGTERM before the second micro-batch of the bound of `step`."""
    if rank == victim:
        at_call(
            Meter,
            "_stopped",
            lambda: os.kill(os.getpid(), signal.SIGTERM),
            count=2,
            when=lambda meter: meter.step == step,
        )


def stop_after(rank: int, *, step: int, victim: int) -> None:
    if rank == victim:
        at_call(
            Meter, "add", lambda: os.kill(os.getpid(), signal.SIGTERM), when=lambda meter, _: meter.step == step - 2
        )


def write_late(rank: int, *, seconds: float, ranks: list[int]) -> None:
    """Training is some steps further when `ranks` write their part of the second checkpoint."""
    if rank in ranks:
        at_call(saver, "write_pieces", lambda: time.sleep(seconds), count=2)


def harm(function: str, **arguments: object) -> Harm:
    return Harm("test_world_sizes", function, arguments)


def at_point(point: str, save: int) -> Harm:
    return Harm("kill_points", "die_at_point", {"point": point, "save": save, "victim": 0})


# -- other ranks, other stages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "worlds, stages",
    [
        ((2, 1), (1, 2)),
        pytest.param((2, 1, 4, 2), (1, 2, 1, 1), marks=pytest.mark.slow),
        pytest.param((2, 4, 1, 2), (1, 3, 0, 1), marks=pytest.mark.slow),
        pytest.param((4, 2, 2, 1), (3, 2, 0, 3), marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_on_other_ranks_and_stages(place, whole, worlds, stages):
    run = place / "-".join(map(str, (*worlds, *stages)))
    first = 0
    for number, (world, stage) in enumerate(zip(worlds, stages)):
        last = number == len(worlds) - 1
        harms = [harm("write_rows", folder=str(place), start=number)]
        if not last:
            kill = {"steps": 6 + number, "victim": world - 1}  # after a checkpoint, and before the next one
            harms.append(Harm("kill_points", "die_after_steps", kill))
        ended = start(place / "recipe.yaml", f"run={run}", f"engine.zero_stage={stage}", world=world, harms=harms)
        assert (ended.codes == [0] * world) if last else (-signal.SIGKILL in ended.codes and not ended.hung), ended
        words = (
            f"at step {first} from step-{first} (written by {worlds[number - 1]} rank(s), stage {stages[number - 1]})"
        )
        assert (words if number else "starting at step 0") in ended.output[0], ended
        first = newest_step(run)
    assert_same_losses(run, whole)
    assert_every_row_once(place, run, starts=len(worlds))


def assert_same_losses(run: Path, whole: Path) -> None:
    """To 1e-5 relative: sums over rows are added up in another order."""
    pairs = list(zip(records(run), records(whole), strict=True))
    assert len(pairs) == STEPS
    for mine, theirs in pairs:
        assert mine["rows_hash"] == theirs["rows_hash"] and mine["step"] == theirs["step"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
    for mine, theirs in zip(records(run, "validation"), records(whole, "validation"), strict=True):
        assert mine["nats_per_token"] == pytest.approx(theirs["nats_per_token"], rel=1e-5)


def assert_every_row_once(place: Path, run: Path, *, starts: int) -> None:
    """What the ranks had is the loader's order, whoever had it; steps that were done again had the same rows."""
    done: dict[int, dict[int, dict[int, list[int]]]] = {}  # step, start, rank
    for number in range(starts):
        for path in place.glob(f"rows-{number}-*.jsonl"):
            for line in map(json.loads, path.read_text().splitlines()):
                done.setdefault(line["step"], {}).setdefault(number, {})[line["rank"]] = line["rows"]
            path.unlink()
    loader = make_plan(recipe_of(place)).loader
    seen: list[int] = []
    for step in range(STEPS):
        orders = [[row for rank in sorted(parts) for row in parts[rank]] for parts in done[step].values()]
        assert all(order == loader.row_ids(step * ROWS, ROWS) for order in orders if len(order) == ROWS), step
        assert len(orders[-1]) == ROWS and sum(map(len, orders[:-1])) <= ROWS * (len(orders) - 1)
        seen += orders[-1]
    assert sum(len(parts) > 1 for parts in done.values()) >= starts - 1  # steps that were done again
    epochs = [seen[first : first + EPOCH] for first in range(0, len(seen), EPOCH)]
    assert len(epochs) == 4 and all(sorted(epoch) == list(range(EPOCH)) for epoch in epochs)
    assert all(before != after for before, after in pairwise(epochs))


def recipe_of(place: Path):
    from mezzotint.training.config import load_recipe

    return load_recipe(str(place / "recipe.yaml"))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_number_of_ranks_that_cannot_share_the_rows_is_refused(place, whole, fresh):
    def written() -> dict:
        return {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name not in ("lock", outcome.NAME, outcome.SPARE)}

    run = place / "refused"
    if not fresh:
        shutil.copytree(whole, run)
    before = written()
    ended = start(place / "recipe.yaml", f"run={run}", world=3, patience=60)
    assert ended.codes == [2, 2, 2], ended
    assert all("rows_per_step 4 is no multiple of 3 ranks times micro_rows 1" in said for said in ended.output), ended
    assert all("Traceback" not in said for said in ended.output)
    assert run.exists() != fresh and written() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors", "state.json"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_damage_that_any_rank_finds_makes_all_go_back_to_the_one_before(place, whole, name, world):
    """Each rank hashes its share of the files; one of them speaks for all."""
    run = place / f"damaged-{name}-{world}"
    shutil.copytree(whole, run)
    path = run / "checkpoints" / f"step-{STEPS}" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    ended = start(place / "recipe.yaml", f"run={run}", world=world)
    assert ended.codes == [0] * world, ended
    said = "".join(ended.output)
    assert said.count(f"step-{STEPS} is damaged ({name} has changed); trying the one before") == 1, ended
    assert f"at step {STEPS - EVERY} from step-{STEPS - EVERY}" in said, ended
    assert (run / "checkpoints" / f"step-{STEPS}.damaged").is_dir()
    assert_same_losses(run, whole)


def test_two_damaged_checkpoints_in_a_row_take_both_ranks_to_the_one_before_them(place, whole):
    """One file of each, found by another rank."""
    run = place / "damaged-twice"
    assert start(place / "recipe.yaml", f"run={run}", "checkpoint.keep=3", world=2).codes == [0, 0]
    for step, name in ((STEPS, "rank-00000-of-00002.safetensors"), (STEPS - EVERY, "state.json")):
        path = run / "checkpoints" / f"step-{step}" / name
        path.write_bytes(path.read_bytes()[:-1])
    earlier = STEPS - 2 * EVERY
    ended = start(place / "recipe.yaml", f"run={run}", world=2)
    assert ended.codes == [0, 0], ended
    said = "".join(ended.output)
    assert said.count("is damaged (") == 2 and f"at step {earlier} from step-{earlier}" in said, ended
    assert said.count("stays only to be looked at") == 1 and said.count("removing ") == 1, ended
    assert [path.name for path in checkpoint.damaged(run)] == [f"step-{STEPS}.damaged"]
    assert_same_losses(run, whole)


# -- where a run is interrupted --------------------------------------------------------------------------------------


def go_through(place: Path, name: str, starts: Sequence[tuple[list[Harm], int]]) -> Path:
    """Starts of two ranks, each with what happens to it and the exit code of its main rank."""
    run = place / name
    for harms, code in starts:
        ended = start(place / "recipe.yaml", f"run={run}", world=2, harms=harms)
        assert ended.codes[0] == code and not ended.hung, ended
        assert code < 0 or ended.codes[1] == code, ended
        found = outcome.read(run)
        assert (found is None) if code < 0 else (found is not None and found.code == code)
    return run


@pytest.mark.slow
def test_stopped_three_times_and_at_the_ends_of_epochs(place, whole):
    """An epoch is 6 steps: the second ends at step 12, the third at 18."""
    stops = [([harm("stop_after", step=step, victim=step % 2)], STOPPED) for step in (5, 12, 18)]
    assert_same_run(go_through(place, "stops", [*stops, ([], 0)]), whole, "")


@pytest.mark.slow
def test_killed_when_the_checkpoint_at_an_epochs_end_is_in_place(place, whole):
    kills = [([at_point("pointer, nothing removed", save)], -signal.SIGKILL) for save in (4, 3)]
    assert_same_run(go_through(place, "epochs", [*kills, ([], 0)]), whole, "")  # at steps 12 and 24


@pytest.mark.slow
def test_a_checkpoint_is_of_its_step_however_late_it_is_written(place, whole):
    """The second one, of step 4; the run is killed when the third begins to be copied."""
    harms = [harm("write_late", seconds=0.3, ranks=[0, 1]), at_point("before the copy", 3)]
    run = go_through(place, "late", [(harms, -signal.SIGKILL)])
    assert newest_step(run) == 4
    assert_same_run(go_through(place, "late", [([], 0)]), whole, "")


@pytest.mark.parametrize("steps, newest", [(5, 0), pytest.param(6, 4, marks=pytest.mark.slow)])
def test_a_checkpoint_waits_for_its_slowest_rank_and_the_step_after_it_for_the_checkpoint(place, whole, steps, newest):
    """Killed in the step after step 4, which rank 1 has not written yet, or in the one after that: it was waited for."""
    kill = Harm("kill_points", "die_after_steps", {"steps": steps, "victim": 0})
    name = f"slowest-{steps}"
    run = go_through(place, name, [([harm("write_late", seconds=2, ranks=[1]), kill], -signal.SIGKILL)])
    assert newest_step(run) == newest and (run / "checkpoints" / "step-4").exists() == (newest == 4)
    assert records(run)[-1]["step"] == steps - 1  # never more than EVERY steps are lost
    assert_same_run(go_through(place, name, [([], 0)]), whole, "")


@pytest.mark.slow
@pytest.mark.parametrize("point", ["all written", "renamed, no pointer", "half removed"])
def test_killed_in_the_save_of_the_last_step(place, whole, point):
    save = 7 if point != "half removed" else 5
    starts = [([at_point(point, save)], -signal.SIGKILL), ([], 0), ([], 0)]  # a finished run stays as it is
    assert_same_run(go_through(place, f"last-{point.split()[0]}", starts), whole, "")


@pytest.mark.parametrize(
    "step, victim", [(8, 1), pytest.param(8, 0, marks=pytest.mark.slow), pytest.param(STEPS, 1, marks=pytest.mark.slow)]
)
def test_stopped_while_validating_and_again_while_taking_it_up(place, whole, step, victim):
    """The bound is taken at the next start that is left in peace; the last step's too."""
    stop = ([harm("stop_while_validating", step=step, victim=victim)], STOPPED)
    run = go_through(place, f"validating-{step}-{victim}", [stop, stop])
    assert step not in [r["step"] for r in records(run, "validation")] and curve(run) == curve(whole)[:step]
    assert_same_run(go_through(place, run.name, [([], 0), ([], 0)]), whole, "")

"""SIGKILL of any rank at any moment: the next start goes on from the newest complete checkpoint, to the bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from kill_points import MAIN_RANK, POINTS
from kill_support import Ended, Harm, start
from test_distributed import launcher
from training_support import corpus, curve, environment, recipe_file, records

from mezzotint.training import checkpoint
from mezzotint.training.pieces import Pieces

STEPS, EVERY = 24, 4
OUTSIDE = "from outside"  # a kill at a random moment, beside those at POINTS


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a recipe; its runs are subfolders."""
    folder = tmp_path_factory.mktemp("kills")
    recipe_file(
        folder,
        steps=STEPS,
        micro_rows=1,
        ema_decay=0.9,
        checkpoint={"every": EVERY, "keep": 2},
        validation={"folder": str(corpus() / "heldout"), "every": 7, "rows": 6},
    )
    return folder


# -- what a killed run leaves ----------------------------------------------------------------------------------------


def complete(folder: Path) -> bool:
    """Whether a checkpoint has the files of all its ranks, each as its manifest says; not the code's own check."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
        world = json.loads((folder / "state.json").read_text())["world"]
    except (OSError, ValueError):
        return False
    names = {"state.json", *(f"rank-{rank:05d}-of-{world:05d}.safetensors" for rank in range(world))}
    return hashes.keys() == names and all(hashes[name] == entry["sha256"] for name, entry in files.items())


def steps_of(run: Path, suffix: str = "") -> list[int]:
    names = (re.fullmatch(rf"step-(\d+){suffix}", path.name) for path in (run / "checkpoints").glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def newest_step(run: Path) -> int:
    """Of the newest complete checkpoint; -1 for none."""
    return max((s for s in steps_of(run) if complete(run / "checkpoints" / f"step-{s}")), default=-1)


def steps_done(run: Path) -> int:
    return max((r["step"] for r in records(run)), default=0) if (run / "metrics.jsonl").exists() else 0


@dataclass(frozen=True)
class Loss:
    """What one kill cost."""

    how: str
    done: int  # steps recorded
    newest: int  # step of the newest complete checkpoint, -1 for none
    writing: int | None  # step of a newer one, half written

    @property
    def steps(self) -> int:
        return self.done - max(0, self.newest)


def measure(run: Path, how: str) -> Loss:
    """What the kill `how` cost; refuses damage under a final name, and a loss that is too large."""
    newest = newest_step(run)
    for step in steps_of(run):
        folder = run / "checkpoints" / f"step-{step}"  # an old one that was being removed lost its manifest first
        assert complete(folder) or (step < newest and not (folder / "manifest.json").exists()), f"{how}: {folder}"
    writing = max((step for step in steps_of(run, r"\.tmp") if step > newest), default=None)
    loss = Loss(how, steps_done(run), newest, writing)
    assert 0 <= loss.steps <= EVERY, f"{how}: {loss}"
    return loss


def tensors(run: Path) -> dict:
    """All that the last checkpoint holds: weights, both moments, the average."""
    pieces = Pieces(run / "checkpoints" / f"step-{STEPS}")
    shapes = checkpoint.read_state(pieces.folder).shapes
    kinds = ("weights", "exp_avg", "exp_avg_sq", "ema")
    return {(kind, name): value for kind in kinds for name, value in pieces.whole(kind, shapes).items()}


def assert_same_run(run: Path, whole: Path, why: str) -> None:
    assert curve(run) == curve(whole), why
    clocks = ("seconds", "bound_seconds", "time")
    bounds = [[{k: v for k, v in r.items() if k not in clocks} for r in records(x, "validation")] for x in (run, whole)]
    assert bounds[0] == bounds[1], why
    mine, theirs = tensors(run), tensors(whole)
    assert mine.keys() == theirs.keys() and all(mine[key].equal(theirs[key]) for key in theirs), why
    states = [
        vars(checkpoint.read_state(x / "checkpoints" / f"step-{STEPS}")) | {"recipe": "", "validation_due": False}
        for x in (run, whole)
    ]
    assert states[0] == states[1] and not steps_of(run, r"\.tmp"), why


# -- killing ---------------------------------------------------------------------------------------------------------

Start = Callable[[Path, str | None], tuple[Ended, str]]  # run folder, where to kill: how it ended, what was done


def forked(place: Path, draw: random.Random, *, world: int, stage: int, seconds: float) -> Start:
    """Starts of forked ranks; a kill from outside comes within `seconds`."""

    def go(run: Path, point: str | None) -> tuple[Ended, str]:
        victim = 0 if point in MAIN_RANK else draw.randrange(world)
        kill, harms, how = None, [], f"rank {victim}: {point}"
        if point == OUTSIDE:
            kill = (victim, draw.uniform(0, seconds))
            how += f", after {kill[1]:.3f} s"
        elif point is not None:
            values = {"point": point, "save": draw.randint(1, 3), "victim": victim}
            harms, how = [Harm("kill_points", "die_at_point", values)], f"{how}, save {values['save']}"
        overrides = (f"run={run}", f"engine.zero_stage={stage}")
        return start(place / "recipe.yaml", *overrides, world=world, harms=harms, kill=kill), how

    return go


def uninterrupted(place: Path, *, world: int, stage: int) -> tuple[Path, float]:
    """The run that nothing interrupts, and the seconds it took."""
    run = place / f"whole-{world}-{stage}"
    began = time.monotonic()
    ended = start(place / "recipe.yaml", f"run={run}", f"engine.zero_stage={stage}", world=world)
    assert ended.codes == [0] * world, ended
    return run, time.monotonic() - began


def killed_again_and_again(place: Path, whole: Path, go: Start, points: Sequence[str], *, name: str) -> list[Loss]:
    """Starts that die one after the other at `points`. Each goes on where the one before left the run, and says so.

    A run that comes to its end is held against `whole`, and another begun.
    """
    losses: list[Loss] = []
    waiting, runs, newest = list(points), 0, -1
    while True:
        run = place / f"{name}-{runs}"
        ended, how = go(run, waiting[0] if waiting else None)
        why = f"{name}-{runs}, kill {len(losses)}, {how}\n{ended}"
        said = re.search(r"resuming \S+ at step (\d+)|starting at step (0)", ended.output[0])
        if said:  # else it died before
            assert said[1 if newest >= 0 else 2] == str(max(0, newest)), why
        if -signal.SIGKILL in ended.codes:
            # a rank that sets up its engine can but wait for a dead one, until the launcher ends it
            assert said is None or not ended.hung, why
            waiting.pop(0)
            losses.append(measure(run, how))
            newest = losses[-1].newest
            continue
        assert ended.codes == [0] * len(ended.codes), why
        assert_same_run(run, whole, why)
        if not waiting:
            return losses
        runs, newest = runs + 1, -1


def report(losses: Sequence[Loss]) -> None:
    """Shown by `pytest -rP`."""
    beside = sum(loss.writing is not None for loss in losses)
    print(f"{len(losses)} kills, a save every {EVERY} steps, {beside} kills while one was being written")
    print("steps lost:", *sorted(loss.steps for loss in losses))
    for loss in losses:
        print(f"  {loss}")


def kill_forked(place: Path, points: Sequence[str], *, world: int, stage: int, seed: int) -> None:
    whole, seconds = uninterrupted(place, world=world, stage=stage)
    go = forked(place, random.Random(seed), world=world, stage=stage, seconds=seconds)
    losses = killed_again_and_again(place, whole, go, points, name=f"seed-{seed}-world-{world}-stage-{stage}")
    assert len(losses) == len(points)
    report(losses)


def test_two_ranks_killed_inside_a_save_go_on_to_the_bit(place):
    points = ["in the middle of a file", "manifest, not renamed", "half removed"]
    kill_forked(place, points, world=2, stage=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("world, stage, seed", [(2, 1, 2), (2, 3, 3), (2, 2, 4), (1, 0, 5)])
def test_any_rank_killed_at_any_moment_goes_on_to_the_bit(place, world, stage, seed):
    """Four times twelve kills: every point of a save at least twice, the others at random moments."""
    quarters = [[*POINTS][place::2] for place in (0, 1)]
    points = [*quarters[seed % 2], OUTSIDE, OUTSIDE, OUTSIDE]
    random.Random(seed).shuffle(points)
    kill_forked(place, points, world=world, stage=stage, seed=seed)


# -- through the launchers -------------------------------------------------------------------------------------------


def ranks_below(process: psutil.Process) -> dict[int, psutil.Process]:
    """The ranks that a launcher has started, by rank."""
    found = {}
    try:
        for child in process.children(recursive=True):
            if "mezzotint.launch.train" in child.cmdline() and "RANK" in child.environ():
                found[int(child.environ()["RANK"])] = child
    except psutil.Error:  # gone in the meantime
        pass
    return found


def left_behind(folder: Path) -> list[psutil.Process]:
    def is_ours(process: psutil.Process) -> bool:
        try:
            return any(str(folder) in word for word in process.cmdline())
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if is_ours(process)]


def launched(place: Path, draw: random.Random, name: str, *, stage: int) -> Start:
    """Starts through a launcher, two ranks; the kill comes a random while after a random number of steps."""

    def go(run: Path, point: str | None) -> tuple[Ended, str]:
        victim, steps, wait = draw.randrange(2), draw.randint(-1, STEPS // 2), draw.uniform(0, 0.2)
        how = f"{name}, rank {victim} {wait:.3f} s after {steps} more steps" if point else "nothing"
        arguments = [*launcher(name), str(place / "recipe.yaml"), f"run={run}", f"engine.zero_stage={stage}"]
        first, killed, began = steps_done(run), False, time.monotonic()
        with open(place / "output.txt", "w+") as output:
            process = subprocess.Popen(
                arguments, cwd=place, env=environment(place), stdout=output, stderr=output, start_new_session=True
            )
            while process.poll() is None and time.monotonic() < began + 120:
                time.sleep(0.005)
                there = ranks_below(psutil.Process(process.pid)) if point and not killed else {}
                if victim in there and (steps < 0 or min(steps_done(run), first) + steps <= steps_done(run)):
                    time.sleep(wait)
                    there[victim].kill()
                    killed = True
            hung = process.poll() is None
            if hung:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            output.seek(0)
            said = output.read()
        until = time.monotonic() + 10
        while left_behind(run) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left_behind(run), f"{how}: {left_behind(run)}\n{said}"
        assert (code != 0) == killed and not hung, f"{how}: code {code}\n{said}"
        return Ended(codes=[-signal.SIGKILL if killed else code], output=[said], hung=hung), how

    return go


@pytest.mark.slow
@pytest.mark.parametrize("name, stage, kills, seed", [("torchrun", 1, 7, 6), ("deepspeed", 2, 5, 7)])
def test_ranks_of_a_launcher_killed_at_random_moments_go_on_to_the_bit(place, name, stage, kills, seed):
    whole, _ = uninterrupted(place, world=2, stage=stage)
    go = launched(place, random.Random(seed), name, stage=stage)
    losses = killed_again_and_again(place, whole, go, [OUTSIDE] * kills, name=f"{name}-seed-{seed}")
    assert len(losses) == kills
    report(losses)

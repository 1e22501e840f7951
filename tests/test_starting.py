"""What happens to a run that is only starting: a rank is stopped from outside, or somebody asks it to stop."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from kill_support import Harm, at_call, start
from training_support import recipe_file

from mezzotint.training import loop, outcome

LIMIT = 4.0  # guard.hang_seconds


def stop_itself(rank: int, *, victim: int, at: str) -> None:
    """SIGSTOP of one rank when the loop comes to `at`; a start may take no longer than any other silence."""
    loop.STARTING = 0.0
    if rank == victim:
        at_call(loop, at, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def ask(rank: int, *, folder: str) -> None:
    """The file STOP appears while the main rank reads its checkpoint."""
    if rank == 0:
        at_call(loop, "resume", lambda: (Path(folder) / "STOP").touch())


@pytest.mark.parametrize("victim, at", [(1, "start"), pytest.param(0, "resume", marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_while_it_starts_ends_all_within_the_limit(tmp_path, victim, at):
    recipe = recipe_file(tmp_path, micro_rows=1, guard={"hang_seconds": LIMIT})
    began = time.monotonic()
    ended = start(recipe, world=2, harms=[Harm("test_starting", "stop_itself", {"victim": victim, "at": at})], limit=90)
    assert time.monotonic() - began < LIMIT + 40 and not ended.hung, ended
    assert ended.codes[1 - victim] == outcome.HUNG and ended.codes[victim] in (outcome.HUNG, -signal.SIGKILL), ended
    found = outcome.read(tmp_path / "run")
    assert found is not None and found.code == outcome.HUNG and "in phase 'start'" in found.reason
    for rank in range(2):
        assert "most recent call first" in (tmp_path / "run" / "stacks" / f"rank-{rank}.txt").read_text()


def test_a_stop_file_that_appears_during_the_start_ends_the_run_after_its_first_step(tmp_path):
    recipe, run = recipe_file(tmp_path, micro_rows=1, guard={"hang_seconds": LIMIT}), tmp_path / "run"
    ended = start(recipe, world=2, harms=[Harm("test_starting", "ask", {"folder": str(run)})])
    assert ended.codes == [outcome.STOPPED, outcome.STOPPED], ended
    found = outcome.read(run)
    assert found is not None and (found.code, found.step) == (outcome.STOPPED, 1)
    assert (run / "latest").read_text() == "step-1\n" and not (run / "STOP").exists()

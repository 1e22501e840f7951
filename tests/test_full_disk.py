"""A disk that is really full in the midst of a save: training goes on, the old checkpoint stays, the user is told."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_support import Harm, at_call, start
from test_training_kills import newest_step, steps_of
from training_support import curve, recipe_file, records

from mezzotint.training import outcome, saver
from mezzotint.training.meter import Meter

MIB = 1 << 20
SIZE = 70 * MIB  # a save asks for 64 MiB to spare


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert start(recipe_of(folder), world=2).codes == [0, 0]
    return folder / "run"


def recipe_of(folder: Path) -> Path:
    return recipe_file(folder, ema_decay=0.9, micro_rows=1, checkpoint={"every": 5, "keep": 9})


def fill_from(rank: int, *, disk: str, save: int, until: int) -> None:
    """The disk fills up when the `save`-th tensor file of rank 1 is begun, and has room again after step `until`."""
    filler = Path(disk) / "filler"

    def fill() -> None:
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(MIB // 64)):
                pass

    if rank == 1:
        at_call(saver, "write_pieces", fill, count=save)
        at_call(Meter, "add", lambda: filler.unlink(missing_ok=True), when=lambda meter, _: meter.step == until)


def filled(disk: Path, *, save: int, until: int) -> Harm:
    return Harm("test_full_disk", "fill_from", {"disk": str(disk), "save": save, "until": until})


def test_a_disk_that_fills_up_during_a_save_and_has_room_again(small_disk, tmp_path, whole):
    run = small_disk / "run"
    ended = start(recipe_of(tmp_path), f"run={run}", world=2, harms=[filled(small_disk, save=3, until=17)])  # step 10
    assert ended.codes == [0, 0], ended
    said = ended.output[0] + ended.output[1]
    assert "rank 1 could not write" in said and "No space left on device" in said, ended
    assert "no checkpoint of step 10 (a rank could not write its share); the one before stays the newest" in said
    assert "no checkpoint of step 15 (the disk has" in said and "MiB are needed" in said  # seen before it is begun
    assert steps_of(run) == [0, 5, 20] and not steps_of(run, r"\.tmp") and newest_step(run) == 20
    assert curve(run) == curve(whole)
    assert (run / "checkpoints/step-20/rank-00001-of-00002.safetensors").read_bytes() == (
        whole / "checkpoints/step-20/rank-00001-of-00002.safetensors"
    ).read_bytes()


def test_a_disk_that_stays_full_ends_the_run_with_a_sentence_and_it_goes_on_from_the_old_checkpoint(
    small_disk, tmp_path, whole
):
    run = small_disk / "run"
    ended = start(recipe_of(tmp_path), f"run={run}", world=2, harms=[filled(small_disk, save=3, until=99)], patience=60)
    assert ended.codes == [2, 2] and "Traceback" not in "".join(ended.output), ended
    assert f"error: {run} has no checkpoint of its last step: see the warning above" in ended.output[0]
    assert newest_step(run) == 5 and (run / "latest").read_text() == "step-5\n"
    os.unlink(small_disk / "filler")
    ended = start(recipe_of(tmp_path), f"run={run}", world=2)
    assert ended.codes == [0, 0] and "at step 5 from step-5" in ended.output[0], ended
    assert curve(run) == curve(whole) and len(records(run)) == 20
    found = outcome.read(run)
    assert found is not None and found.code == 0


def test_a_start_on_a_full_disk_is_refused_with_an_outcome_and_leaves_nothing_half(small_disk, tmp_path):
    run, filler = small_disk / "run", small_disk / "filler"
    assert start(recipe_of(tmp_path), f"run={run}", "steps=5", world=2).codes == [0, 0]
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while file.write(bytes(MIB // 64)):
            pass
    ended = start(recipe_of(tmp_path), f"run={run}", world=2, patience=60)
    assert ended.codes == [2, 2] and "Traceback" not in "".join(ended.output), ended
    found = outcome.read(run)
    assert found is not None and found.code == 2 and "No space left" in found.reason
    assert not list(run.glob("*.tmp"))
    filler.unlink()
    ended = start(recipe_of(tmp_path), f"run={run}", world=2)
    assert ended.codes == [0, 0] and "at step 5 from step-5" in ended.output[0], ended

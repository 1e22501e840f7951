"""Whatever stops a run, at whatever moment, the next start goes on from the newest complete checkpoint, to the bit."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
from training_support import command, corpus, curve, environment, recipe, recipe_file, records, run_command

from mezzotint.models.errors import InputError
from mezzotint.training import checkpoint, meter, outcome, saver
from mezzotint.training.checkpoint import damage, load_weights, newest
from mezzotint.training.engine import Engine
from mezzotint.training.loop import train
from mezzotint.training.metrics import read_records
from mezzotint.training.outcome import DIVERGED, STOPPED


def options() -> dict:
    """Made on demand: the corpus is prepared at the first test that trains, not when tests are collected."""
    return {
        "ema_decay": 0.9,
        "checkpoint": {"every": 5, "keep": 2},
        "validation": {"folder": str(corpus() / "heldout"), "every": 7, "rows": 6},
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(recipe(folder, **options())) == 0
    return folder / "run"


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of its folder, to be damaged."""
    return shutil.copytree(whole, tmp_path / "copy")


def assert_same_run(run, whole):
    assert curve(run) == curve(whole)
    clocks = ("seconds", "bound_seconds", "time")
    strip = [[{k: v for k, v in r.items() if k not in clocks} for r in records(x, "validation")] for x in (run, whole)]
    assert strip[0] == strip[1]
    for ema in (False, True):
        (config, mine), (other, expected) = load_weights(run, ema=ema), load_weights(whole, ema=ema)
        assert config == other and mine.keys() == expected.keys()
        assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_kill_and_resume_equals_the_uninterrupted_run_to_the_bit(whole, tmp_path):
    path = recipe_file(tmp_path, **options())
    log = tmp_path / "run" / "metrics.jsonl"
    process = subprocess.Popen(command(str(path)), env=environment(tmp_path), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until and (not log.exists() or log.read_text().count('"train"') < 12):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = run_command(tmp_path, command(str(path)))
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stdout and "Traceback" not in done.stderr
    assert_same_run(tmp_path / "run", whole)


def test_a_full_disk_is_told_and_training_goes_on(whole, tmp_path, monkeypatch, capsys):
    write = saver.write_pieces

    def full(path, pieces):
        if "step-10" in str(path):
            path.write_bytes(b"some")
            raise OSError(28, "No space left on device", str(path))
        return write(path, pieces)

    monkeypatch.setattr(saver, "write_pieces", full)
    assert train(recipe(tmp_path, **(options() | {"checkpoint": {"every": 5, "keep": 9}}))) == 0
    printed = capsys.readouterr().out
    assert "No space left on device" in printed and "no checkpoint of step 10" in printed
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-0", "step-15", "step-20", "step-5"]
    assert_same_run(tmp_path / "run", whole)


def test_too_little_room_is_seen_before_anything_is_written(tmp_path, monkeypatch, capsys):
    config = recipe(tmp_path, steps=3, checkpoint={"every": 1, "keep": 9})
    monkeypatch.setattr(saver.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="cannot hold a checkpoint"):
        train(config)
    assert "MiB free and" in capsys.readouterr().out
    assert not list((tmp_path / "run" / "checkpoints").iterdir()) and not (tmp_path / "run" / "latest").exists()
    with pytest.raises(InputError, match="no checkpoint of its last step"):
        train(recipe(tmp_path, steps=3, checkpoint={"every": 1, "at_start": False}))


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch, capsys):
    step = Engine.step

    def spoil(self, lr):
        norm = step(self, lr)
        spoil.steps += 1
        if spoil.steps == 7:
            self.fragments()[0].views["weights"][3] = torch.inf
        return norm

    spoil.steps = 0
    monkeypatch.setattr(Engine, "step", spoil)
    assert train(recipe(tmp_path, **options(), guard={"skip_budget": 100})) == DIVERGED
    assert "weights are not finite" in capsys.readouterr().out
    assert (tmp_path / "run" / "latest").read_text() == "step-5\n"
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-0", "step-5"]
    assert outcome.read(tmp_path / "run").code == DIVERGED


def test_steps_to_keep_stay(tmp_path):
    assert train(recipe(tmp_path, steps=8, checkpoint={"every": 1, "keep": 2, "keep_every": 3})) == 0
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-3",
        "step-6",
        "step-7",
        "step-8",
    ]


def test_damaged_lines_of_the_metrics_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = '{"kind": "train", "step": 1}\n'
    path.write_bytes(good.encode() + b'\xff\n[1]\n{"kind": 3}\n' + good.encode() + b'{"kind": "train", "st')
    assert read_records(path) == [json.loads(good)] * 2


def test_signals_save_the_step_and_exit_with_85_and_every_resume_goes_on(whole, tmp_path, monkeypatch):
    log = meter.Meter.log
    asked = []

    def ask(self, step, result):
        log(self, step, result)
        if step in (3, 10, 14) and step not in asked:
            asked.append(step)
            signal.raise_signal(signal.SIGTERM if step != 10 else signal.SIGINT)

    monkeypatch.setattr(meter.Meter, "log", ask)
    codes = [train(recipe(tmp_path, **options())) for _ in range(4)]
    assert codes == [STOPPED, STOPPED, STOPPED, 0]
    assert_same_run(tmp_path / "run", whole)
    assert train(recipe(tmp_path, **options())) == 0  # finished: a further start does nothing
    assert_same_run(tmp_path / "run", whole)


class Crash(Exception):
    pass


@pytest.mark.parametrize(
    "point",
    ["begin", "_put_in_place", "seal", "sync", "point", "prune", "replace-folder", "replace-pointer"],
)
def test_a_crash_inside_a_save_leaves_the_checkpoint_before_or_the_new_one(whole, copy, monkeypatch, point):
    calls = []

    def crash(*arguments, **options):
        calls.append(point)
        raise Crash

    config = recipe(copy.parent, f"run={copy}", **options())
    shutil.rmtree(copy / "checkpoints" / "step-20")  # as if its save had not begun
    (copy / "latest").write_text("step-15\n")
    with monkeypatch.context() as patch:
        if point in ("begin", "_put_in_place"):
            patch.setattr(saver.Saver, point, crash)
        elif point.startswith("replace"):
            name = {"replace-folder": "step-20", "replace-pointer": "latest"}[point]
            patch.setattr(checkpoint.os, "replace", crash_on(os.replace, lambda target: target.name == name, crash))
        else:
            patch.setattr(checkpoint, point, crash)
        with pytest.raises(Crash):
            train(config)
    assert calls
    found = newest(copy, pytest.fail)
    assert found.name in ("step-15", "step-20") and damage(found) is None
    assert train(config) == 0
    assert_same_run(copy, whole)
    assert not list((copy / "checkpoints").glob("*.tmp"))


def crash_on(replace, when, crash):
    return lambda source, target: crash() if when(target) else replace(source, target)


def files_of(folder) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_every_damage_to_every_file_is_found_by_name(copy):
    folder = copy / "checkpoints" / "step-20"
    assert damage(folder) is None
    for name in files_of(folder):
        path = folder / name
        good = path.read_bytes()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        for bad in (good[:-1], b"", bytes(flipped), None):
            path.unlink() if bad is None else path.write_bytes(bad)
            fault = damage(folder)
            assert fault is not None and name in fault
            path.write_bytes(good)
    assert damage(folder) is None


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(whole, copy, capsys):
    path = copy / "checkpoints" / "step-20" / "rank-00000-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    config = recipe(copy.parent, f"run={copy}", **options())
    assert train(config) == 0
    printed = capsys.readouterr().out
    assert (
        "step-20 is damaged (rank-00000-of-00001.safetensors has" in printed
        and f"resuming {copy} at step 15" in printed
    )
    assert_same_run(copy, whole)
    assert (copy / "checkpoints" / "step-20.damaged").is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over(copy):
    before = (copy / "metrics.jsonl").read_bytes()
    for folder in (copy / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="none is complete"):
        train(recipe(copy.parent, f"run={copy}", **options()))
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(InputError, match="none is complete"):  # `latest` still says there was one
        train(recipe(copy.parent, f"run={copy}", **options()))
    assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=0.5", ["optim.lr 0.003", "has 0.5"]),
        ("seed=9", ["seed 1", "has 9"]),
        ("model.d_ff=64", ["model.d_ff 32", "has 64"]),
        ("objective.frontiers=one", ["objective.frontiers all", "has one"]),
        ("engine.precision=autocast", ["engine.precision float32", "has autocast"]),
        ("data.seed=4", ["data.seed 0", "has 4"]),
    ],
)
def test_another_recipe_or_data_is_refused_with_both_values_and_nothing_written(copy, override, words):
    def written() -> dict:
        return {
            n: (copy / n).stat().st_mtime_ns
            for n in files_of(copy)
            if n not in ("lock", "outcome.json", "outcome.spare")
        }

    before = written()
    with pytest.raises(InputError) as error:
        train(recipe(copy.parent, f"run={copy}", override, **options()))
    assert all(word in str(error.value) for word in words), error.value
    assert written() == before
    assert outcome.read(copy).code == 2


def test_a_refused_start_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="nowhere is no prepared folder"):
        train(recipe(tmp_path, data={"sources": [["nowhere", 1.0]], "row_length": 32}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("override", ["engine.zero_stage=3", "engine.zero_stage=0", "engine.activations=layer"])
def test_a_run_goes_on_under_another_stage(whole, copy, override):
    shutil.rmtree(copy / "checkpoints" / "step-20")
    assert train(recipe(copy.parent, f"run={copy}", override, **options())) == 0
    pairs = list(zip(records(copy), records(whole), strict=True))
    assert all(mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) for mine, theirs in pairs)


def test_a_longer_run_goes_on_from_a_finished_one(copy):
    assert train(recipe(copy.parent, f"run={copy}", "steps=23", **options())) == 0
    assert [r["step"] for r in records(copy)] == list(range(1, 24))


def test_a_newer_format_is_refused(copy):
    path = copy / "checkpoints" / "step-20" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(InputError, match="format 99"):
        checkpoint.read_state(path.parent)


def test_only_the_newest_are_kept_and_the_pointer_names_the_last(whole):
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step-15", "step-20"]
    assert (whole / "latest").read_text() == "step-20\n"


def test_weights_of_a_folder_without_checkpoint_are_refused_in_a_sentence(tmp_path, whole):
    with pytest.raises(InputError, match="holds no checkpoint"):
        load_weights(tmp_path, ema=False)
    assert train(recipe(tmp_path, steps=1)) == 0
    with pytest.raises(InputError, match="ema_decay 0"):
        load_weights(tmp_path / "run", ema=True)


@pytest.mark.parametrize("content", ["null", "[]", '{"files": [], "files_sha256": 1}', '{"files": {"a": 1}}'])
def test_a_manifest_of_another_kind_is_damage(copy, content):
    (copy / "checkpoints" / "step-20" / "manifest.json").write_text(content)
    assert "manifest.json" in damage(copy / "checkpoints" / "step-20")


def test_a_file_that_cannot_be_read_is_passed_over(whole, copy, monkeypatch, capsys):
    sha256 = checkpoint.sha256

    def sick(path):
        if "step-20" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return sha256(path)

    monkeypatch.setattr(checkpoint, "sha256", sick)
    assert newest(copy, print).name == "step-15"
    assert "cannot be read (Input/output error)" in capsys.readouterr().out


def test_records_without_checkpoints_never_start_over(copy):
    before = (copy / "metrics.jsonl").read_bytes()
    shutil.rmtree(copy / "checkpoints")
    (copy / "latest").unlink()
    with pytest.raises(InputError, match=r"has no checkpoint, but .*metrics\.jsonl has records up to step 20"):
        train(recipe(copy.parent, f"run={copy}", **options()))
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_a_pointer_that_cannot_be_written_is_told_truly_and_mended(tmp_path, monkeypatch, capsys):
    point = checkpoint.point

    def full(run, name):
        if name == "step-6":
            raise OSError(28, "No space left on device")
        point(run, name)

    config = recipe(tmp_path, steps=6, checkpoint={"every": 3})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "point", full)
        assert train(config) == 0
    assert "checkpoint step-6 is complete, but" in capsys.readouterr().out
    assert (tmp_path / "run" / "latest").read_text() == "step-3\n"
    assert train(config) == 0
    assert (tmp_path / "run" / "latest").read_text() == "step-6\n"


def test_a_start_with_nothing_to_do_leaves_the_pointer_alone(copy, capsys):
    """By its time the demo knows that what it exported is of this checkpoint."""
    before = (copy / "latest").stat()
    assert train(recipe(copy.parent, f"run={copy}", **options())) == 0
    assert "nothing to do" in capsys.readouterr().out
    after = (copy / "latest").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_lost_records_are_told(copy, capsys):
    (copy / "metrics.jsonl").unlink()
    shutil.rmtree(copy / "checkpoints" / "step-20")
    assert train(recipe(copy.parent, f"run={copy}", **options())) == 0
    assert "metrics.jsonl lacks records: step 15 is not among them" in capsys.readouterr().out


def test_only_names_as_they_are_written_are_checkpoints(tmp_path):
    """A copy called step-0030 is not step 30, and there is no step one and a half."""
    for name in (
        "step-0",
        "step-30",
        "step-0031",
        "step-\u00b2",
        "step-1.5",
        "step-7.tmp",
        "step-8.damaged",
        "step-+9",
    ):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in checkpoint.candidates(tmp_path)] == ["step-30", "step-0"]
    assert [path.name for path in checkpoint.damaged(tmp_path)] == ["step-8.damaged"]


def test_two_damaged_checkpoints_in_a_row_are_named_and_only_the_newest_stays(whole, tmp_path, capsys):
    values, copy = options() | {"checkpoint": {"every": 5, "keep": 4}}, tmp_path / "run"
    assert train(recipe(tmp_path, **values)) == 0
    for step in (20, 15):
        (copy / "checkpoints" / f"step-{step}" / "state.json").write_text("{}")
    (copy / "checkpoints" / "step-5.damaged").mkdir()
    capsys.readouterr()
    assert train(recipe(tmp_path, **values)) == 0
    said = capsys.readouterr().out
    for step in (20, 15):
        assert f"step-{step} is damaged (state.json has 2 bytes" in said
    assert "at step 10 from step-10" in said
    for step in (15, 5):
        assert said.count(f"removing {copy}/checkpoints/step-{step}.damaged (") == 1
    assert re.search(rf"{copy}/checkpoints/step-20.damaged \([\d.]+ MiB\) is damaged and stays only", said)
    assert [path.name for path in checkpoint.damaged(copy)] == ["step-20.damaged"]
    assert_same_run(copy, whole)

"""The pilot of the length study: its commands, its curriculum, and that it goes on where it stopped."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mezzotint.training.build import make_plan
from mezzotint.training.config import load_recipe

PATH = Path(__file__).resolve().parents[1] / "eval" / "studies" / "pilot.py"


@pytest.fixture(scope="module")
def pilot():
    spec = importlib.util.spec_from_file_location("pilot", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pilot"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pilot"]


def test_a_dry_run_prints_commands_and_writes_nothing(pilot, tmp_path, capsys):
    assert pilot.main(["--out", str(tmp_path / "p"), "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum("mezzotint.launch.train" in line for line in said) == 2 * (2 + 2)
    assert sum("mezzotint.data synthetic" in line for line in said) == 3
    assert not (tmp_path / "p").exists()


def test_every_model_of_the_pilot_is_a_recipe_that_can_be_planned(pilot, tmp_path):
    config = pilot.PilotConfig(out=tmp_path, arms=("mamba",))
    command = [sys.executable, "-m", *pilot._data_command(config, 1)]
    command[command.index(pilot.STAGE_TOKENS)] = "20k"
    subprocess.run(command, check=True, capture_output=True)
    shapes = {}
    for arm in pilot.ARMS:
        _, recipe, *overrides = pilot._train_command(config, arm, 1e-3, 1, run=tmp_path / "run", before=None)
        plan = make_plan(load_recipe(recipe, overrides))
        shapes[arm] = (plan.model.pattern, plan.model.positions, plan.model.rope_theta)
        assert plan.model.block_length == pilot.BLOCK and plan.config.data.row_length == pilot.ROW
    assert shapes["mamba"][0] == "MM" and shapes["hybrid"][0] == "MA" and len(set(shapes.values())) == len(shapes)


def test_bad_input_is_one_sentence(pilot, capsys):
    for arguments, words in (
        (["--arms", "mambo"], "no model 'mambo'"),
        (["--rates", "fast"], "--rates is 'fast'"),
        (["--stages", "4"], "1 to 3 stages"),
    ):
        assert pilot.main(arguments) == 2
        assert words in capsys.readouterr().err


def test_the_table_says_learned_only_within_the_minutes(pilot, tmp_path):
    config = pilot.PilotConfig(out=tmp_path, arms=("attention", "mamba"), minutes=20)
    found = [
        pilot.Outcome("attention", 1e-3, 3, 199, 198, 200, 25.0),
        pilot.Outcome("mamba", 1e-3, 2, 200, 191, 200, 12.0),
    ]
    text = pilot.table(found, config)
    assert "attention: not learned" in text and "mamba: learned" in text
    assert "| mamba | 0.001 | 2 | 100.0% [98.1, 100.0] | 95.5% [" in text


@pytest.mark.slow
def test_the_pilot_runs_and_goes_on(tmp_path):
    command = [sys.executable, str(PATH), "--out", str(tmp_path), "--arms", "mamba", "--rates", "3e-3"]
    command += ["--stages", "2", "--steps", "2", "--samples", "3"]
    first = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    table = (tmp_path / "pilot.md").read_text()
    assert table.count("| mamba |") == 2 and table in first
    rows = {path: path.read_text() for path in (tmp_path / "results").iterdir()}
    assert len(rows) == 2
    subprocess.run(command, check=True, capture_output=True)
    assert {path: path.read_text() for path in (tmp_path / "results").iterdir()} == rows
    minutes = (tmp_path / "runs" / "mamba-0.003-seed1-stage1" / "minutes.jsonl").read_text().splitlines()
    assert len(minutes) == 1 and json.loads(minutes[0])["core_seconds"] > 0

"""Two ranks draw the same rows and noise as one and reach the same losses, under both launchers."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_support import corpus, curve, environment, recipe, recipe_file, records, run_command

from mezzotint.models.errors import InputError
from mezzotint.training.checkpoint import load_weights
from mezzotint.training.distributed import VARIABLES, _complete_environment
from mezzotint.training.loop import train


def options() -> dict:
    """Made on demand: the corpus is prepared at the first test that trains, not when tests are collected."""
    return {
        "micro_rows": 1,
        "ema_decay": 0.9,
        "validation": {"folder": str(corpus() / "heldout"), "every": 10, "rows": 6},
    }


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def launcher(name: str) -> list[str]:
    scripts = Path(sys.executable).parent
    if name == "torchrun":
        return [
            str(scripts / "torchrun"),
            "--nproc-per-node=2",
            f"--master-port={free_port()}",
            "-m",
            "mezzotint.launch.train",
        ]
    return [
        str(scripts / "deepspeed"),
        "--num_gpus=2",
        f"--master_port={free_port()}",
        "--module",
        "mezzotint.launch.train",
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    assert train(recipe(folder, **options())) == 0
    return folder / "run"


def assert_same_losses(run, alone):
    pairs = list(zip(records(run), records(alone), strict=True))
    assert len(pairs) == 20
    for mine, theirs in pairs:
        assert mine["rows_hash"] == theirs["rows_hash"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
    for mine, theirs in zip(records(run, "validation"), records(alone, "validation"), strict=True):
        assert mine["nats_per_token"] == pytest.approx(theirs["nats_per_token"], rel=1e-5)
        assert mine["nats_per_token_error"] == pytest.approx(theirs["nats_per_token_error"], rel=1e-4)
    _, weights = load_weights(run, ema=True)
    _, expected = load_weights(alone, ema=True)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["torchrun", "deepspeed"])
def test_two_ranks_equal_one(alone, tmp_path, name):
    done = run_command(tmp_path, [*launcher(name), str(recipe_file(tmp_path, **options()))])
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_losses(tmp_path / "run", alone)
    assert done.stdout.count("step 20/20") == 1  # one rank speaks
    assert not list((tmp_path / "extensions").iterdir())  # nothing was compiled


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["engine.zero_stage=0"], ["engine.zero_stage=2"], ["objective.frontiers=one"]])
def test_two_ranks_equal_one_with_other_stages_and_frontiers(tmp_path, overrides):
    assert train(recipe(tmp_path, f"run={tmp_path / 'alone'}", *overrides, **options())) == 0
    done = run_command(tmp_path, [*launcher("torchrun"), str(recipe_file(tmp_path, **options())), *overrides])
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_losses(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
def test_killing_both_ranks_and_resuming_equals_two_uninterrupted_ranks(tmp_path):
    """SIGKILL of the whole launcher group; then two go on."""
    path = str(recipe_file(tmp_path, **(options() | {"checkpoint": {"every": 3}})))
    whole = [*launcher("torchrun"), path, f"run={tmp_path / 'whole'}"]
    assert run_command(tmp_path, whole).returncode == 0
    log = tmp_path / "run" / "metrics.jsonl"
    process = subprocess.Popen([*launcher("torchrun"), path], env=environment(tmp_path), start_new_session=True)
    until = time.monotonic() + 120
    while time.monotonic() < until and (not log.exists() or log.read_text().count('"train"') < 8):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = run_command(tmp_path, [*launcher("torchrun"), path])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming" in done.stdout
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_at_the_same_step(tmp_path):
    path = str(recipe_file(tmp_path, **(options() | {"steps": 4000, "checkpoint": {"every": 4000}})))
    log = tmp_path / "run" / "metrics.jsonl"
    port = free_port()
    ranks = []
    for rank in range(2):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        arguments = [sys.executable, "-m", "mezzotint.launch.train", path]
        ranks.append(subprocess.Popen(arguments, env=environment(tmp_path) | place, stdout=subprocess.DEVNULL))
    until = time.monotonic() + 120
    while time.monotonic() < until and (not log.exists() or log.read_text().count('"train"') < 5):
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGTERM)
    assert [process.wait(timeout=60) for process in ranks] == [85, 85]
    assert (tmp_path / "run" / "latest").read_text() == f"step-{records(tmp_path / 'run')[-1]['step']}\n"


def test_missing_rendezvous_variables_are_named(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"set RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        _complete_environment()


def test_a_process_alone_needs_no_port():
    """A port that was free a moment ago may be taken: two runs started together met on one."""
    code = (
        "from mezzotint.training.distributed import join; import os; import torch.distributed as dist;"
        "print(join().world, os.environ['MASTER_PORT'], dist.is_initialized())"
    )
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "0", "True"], done.stderr

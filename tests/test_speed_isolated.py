"""Cells in processes of their own: memory that runs out, time that runs out, kill -9, and prompts that are really read."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mezzotint.eval import memory, speed_prefill
from mezzotint.eval import speed as speed_module
from mezzotint.eval.cells import Cell, SpeedConfig, list_cells
from mezzotint.eval.results import ResultsFile, read_results
from mezzotint.eval.speed import sweep
from mezzotint.eval.speed_cell import Rates
from mezzotint.eval.speed_prefill import DECODED_BLOCKS, read_alone, read_prompt
from mezzotint.eval.subjects import preset_subject
from mezzotint.eval.tables_speed import speed_tables

ATTENTION, MAMBA = preset_subject("debug", "attention"), preset_subject("debug", "mamba")
NAMES = {subject.name: subject.fingerprint for subject in (ATTENTION, MAMBA)}


@pytest.fixture(autouse=True)
def no_rates(monkeypatch):
    monkeypatch.setattr(speed_module, "measure_rates", lambda device, dtype: Rates(1e10, 1e11))


def test_a_cell_that_runs_out_of_memory_is_recorded_and_the_sweep_goes_on(tmp_path):
    """A million tokens of keys and values are 2 GiB; the process may map one beyond what a fresh one has."""
    limit = memory.mapped_when_fresh() + 2**30
    config = SpeedConfig(contexts=(64, 2**20), quick=True, isolated=True, memory_limit=limit, try_all=True, timeout=300)
    cells = list_cells([ATTENTION], config)
    for _ in range(2):
        with ResultsFile(tmp_path / "r.jsonl", subjects=NAMES) as results:
            rows = {row["identity"]["context"]: row for row in list(sweep(cells, results))[:-1] if row}
    assert rows[2**20]["status"] == "oom", rows[2**20]["values"]
    assert rows[2**20]["values"]["message"] and rows[2**20]["values"]["needed_bytes"] > 2**31
    small = rows[64]
    assert small["status"] in ("ok", "noisy")
    assert small["values"]["process_decode_peak_bytes"] > small["values"]["process_base_bytes"] > 2**26
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1 + 2 + 1
    predicted = [replace(cell, speed=replace(config, try_all=False)) for cell in cells]
    assert [cell.context for cell in predicted if cell.fits(loaded=False)] == [64], "the limit is known beforehand"


def test_a_cell_that_takes_too_long_is_recorded_and_tried_again_when_asked(tmp_path):
    cells = list_cells([MAMBA], SpeedConfig(contexts=(64,), quick=True, isolated=True, timeout=0.05))
    with ResultsFile(tmp_path / "r.jsonl", subjects=NAMES) as results:
        assert [row["status"] for row in sweep(cells, results)] == ["timeout"]
        assert "0.05 s" in results.rows()[0]["values"]["message"]
    patient = [replace(cells[0], speed=replace(cells[0].speed, timeout=300))]
    with ResultsFile(tmp_path / "r.jsonl", subjects=NAMES, retry_failed=True) as results:
        assert [row["status"] in ("ok", "noisy") for row in sweep(patient, results)] == [True]


@pytest.mark.parametrize("subject", (ATTENTION, MAMBA), ids=lambda subject: subject.name)
def test_a_real_prompt_is_read_and_decoded_behind(tmp_path, subject):
    config = SpeedConfig(contexts=(64, 128, 4096), prefill_chunk=32, quick=True)
    cell = Cell(subject, 256, 1, config)
    for _ in range(2):
        with ResultsFile(tmp_path / "r.jsonl", subjects=NAMES) as results:
            rows = read_prompt(cell, results)
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1 + 3
    assert [row["identity"]["context"] for row in rows] == [64, 128, 256]
    values = [row["values"] for row in rows]
    assert [v["length"] for v in values] == [64, 128, 256 + 8 * DECODED_BLOCKS]
    assert [v["stretch_tokens"] for v in values] == [64, 64, 128] and values[-1]["decoded_tokens"] == 32
    assert len({v["state_bytes"] for v in values}) == 1, "room for the whole prompt is there from the start"
    assert all(v["prefill_tokens_per_s"] > 0 and v["block_s"] > 0 for v in values)
    assert values[0]["prefill_total_s"] < values[1]["prefill_total_s"] < values[2]["prefill_total_s"]
    assert speed_tables(rows, steps=8).count(f"\n| {subject.name} |") == 3
    longer = replace(cell, context=512)
    with ResultsFile(tmp_path / "r.jsonl", subjects=NAMES) as results:
        assert [row["identity"]["context"] for row in read_prompt(longer, results)] == [64, 128, 512]
    assert len(read_results(tmp_path / "r.jsonl").rows) == 4


def test_a_state_of_mamba_is_the_same_to_the_byte_whatever_was_read():
    found = []
    for tokens in (64, 512):
        cell = Cell(MAMBA, tokens, 1, SpeedConfig(contexts=(64,), prefill_chunk=64))
        found += read_alone(cell.to_dict(), [tokens])[1]["checkpoints"]
    assert found[0]["state_bytes"] == found[1]["state_bytes"] == cell.state_bytes


def test_a_prompt_that_does_not_fit_is_one_row(tmp_path, monkeypatch):
    cell = Cell(ATTENTION, 2**40, 1, SpeedConfig(contexts=(64,)))
    for _ in range(2):
        with ResultsFile(tmp_path / "r.jsonl", subjects=NAMES) as results:
            rows = read_prompt(cell, results)
        assert [row["status"] for row in rows] == ["skipped_predicted_oom"]
        monkeypatch.setattr(speed_prefill, "_run", None)  # a second run tries nothing
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_kill_9_of_the_command_and_run_again_gives_every_cell_once(tmp_path):
    out = tmp_path / "r.jsonl"
    command = [sys.executable, "-m", "mezzotint.eval", "speed", "--presets", "debug", "--backbones", "attention,mamba"]
    command += ["--contexts", "64,128,1024m", "--batches", "1,2", "--quick", "--out", str(out)]
    environment, rng, kills = os.environ | {"OMP_NUM_THREADS": "1"}, random.Random(7), 0
    while True:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + rng.uniform(2, 25)
        while child.poll() is None and time.monotonic() < deadline and kills < 12:
            time.sleep(0.05)
        if kills < 12 and child.poll() is None:
            inside = psutil.Process(child.pid).children(recursive=True)
            child.send_signal(signal.SIGKILL)
            child.communicate()
            kills += 1
            psutil.wait_procs(inside, timeout=10)
            assert not any(process.is_running() and process.status() != "zombie" for process in inside)
            continue
        said = child.communicate()
        assert child.returncode == 0, said[1]
        break
    assert kills >= 3
    whole = [json.loads(line) for line in Path(out).read_text().splitlines()]
    rows = [line for line in whole if "key" in line]
    assert len(rows) == len({row["key"] for row in rows}) == 2 * 3 * 2 + 1
    status = {(r["identity"]["subject"], r["identity"]["context"]): r["status"] for r in rows}
    assert status["debug-attention", 2**30] == "skipped_predicted_oom"
    assert {status["debug-mamba", context] for context in (64, 128, 2**30)} <= {"ok", "noisy"}
    before = Path(out).read_text()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout == said[0] and Path(out).read_text() == before

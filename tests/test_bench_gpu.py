"""`make gpu` on the CPU with small models: the same cells, the time budget, and what becomes of cells that fail."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from mezzotint.eval.bench_gpu import Budget, CellPlan, Models, block_rates, decode_rows, run_cells, training_rows
from mezzotint.eval.bench_gpu_ops import OPS, op_rows
from mezzotint.eval.bench_gpu_table import page
from mezzotint.eval.subjects import preset_subject
from mezzotint.launch import gpu, gpu_steps
from mezzotint.models.errors import InputError

BF16 = torch.bfloat16


def cell(call, seconds: float = 0.0) -> CellPlan:
    return CellPlan("decoding", "debug-mamba", seconds, call)


def raising(error: Exception):
    def call() -> list[dict]:
        raise error

    return call


def test_cells_that_do_not_fit_into_the_time_are_named():
    budget = Budget(100.0)
    rows = list(run_cells([cell(lambda: [{}], 99.0), cell(lambda: [{}], 101.0)], budget))
    assert [row["status"] for row in rows] == ["ok", "skipped: 100 s of 100 s are left"]


def test_a_cell_that_fails_ends_nothing_else():
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    calls = [raising(memory), raising(ValueError("a kernel\nand its trace")), lambda: [{"pass": "denoise"}]]
    rows = list(run_cells([cell(call) for call in calls], Budget(100.0)))
    assert [row["status"] for row in rows] == ["out of memory", "error: ValueError: a kernel", "ok"]
    assert [row.get("failed") for row in rows] == [False, True, None]


def test_decoding_and_training_cells_on_the_cpu():
    models = Models("cpu")
    for backbone in ("mamba", "attention_gqa"):
        subject = preset_subject("debug", backbone)
        rows = decode_rows(models, subject, context=64, batch=2, dtype=BF16, bandwidth=1e10)
        assert [(row["pass"], row["mode"]) for row in rows] == [
            ("denoise", "eager"), ("advance", "eager"), ("prefill", "eager")
        ]  # fmt: skip
        for row in rows:
            assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"]) and row["ms"] > 0
        named = [row | {"section": "decoding", "name": subject.name} for row in rows]
        rate = block_rates(named, steps=8, block_length=8)[0]["tokens_per_s"]
        assert rate == pytest.approx(2 * 8 / (7 * rows[0]["ms"] + rows[1]["ms"]) * 1e3)
    (row,) = training_rows(models, preset_subject("debug", "hybrid"), batch=1, row_length=32)
    assert row["ratio"] > 0 and row["tokens_per_s"] == pytest.approx(32 / row["ms"] * 1e3)
    big = preset_subject("3b", "attention")
    assert decode_rows(models, big, context=2**24, batch=64, dtype=BF16, bandwidth=1e10) == [{"status": "does not fit"}]


@pytest.mark.parametrize("op", OPS)
def test_operations_on_the_cpu(op):
    config = preset_subject("debug", "attention" if op == "cached attention" else "mamba").config
    (row,) = op_rows(op, config, context=64, device="cpu", dtype=BF16)
    assert row["mode"] == "torch" and row["ratio"] == 1 and row["difference"] == 0


def test_the_page_names_card_backends_and_statuses():
    row = {"section": "decoding", "name": "3b-mamba", "pass": "denoise", "mode": "graph", "context": 4096, "batch": 1}
    timed = {"ms": 2.5, "floor_ms": 2.0, "ratio": 1.25, "status": "ok"}
    report = {
        "card": "A card", "torch": "2", "python": "3", "seconds": 1.0, "budget": 2.0, "load": 0.1, "read_bytes_per_s": 1e12,
        "products_flops_per_s": 1e14, "backends": [{"op": "conv", "backend": "x", "declined": "it is not there"}],
        "rows": [row | timed, {"section": "training", "name": "3b-hybrid", "status": "does not fit"}], "block_rates": [],
    }  # fmt: skip
    text = page(report)
    assert text.startswith("# A card\n") and "| conv | x | it is not there |" in text
    assert "| 3b-mamba | denoise | graph | 4k | 1 | 2.500 | 2.000 | 1.25 |  | ok |" in text
    assert "| 3b-hybrid |  |  |  |  |  |  |  |  | does not fit |" in text


def test_a_peak_far_from_the_plan_fails():
    found = {
        "steps": 2, "engine": "plain", "activations": "selective", "micro_rows": 1, "row_length": 64, "losses": [6.0, 5.0],
        "seconds": [1.0, 1.0], "planned_bytes": 1e9,
    }  # fmt: skip
    for share, failed in ((1.05, False), (1.2, True), (0.8, True), (None, False)):
        peak = {} if share is None else {"peak_bytes": share * 1e9, "peak_over_plan": share}
        assert gpu._steps(says(f"print({json.dumps(json.dumps(found | peak))})"), timeout=60.0)[0]["failed"] is failed
    broken = says("import sys; sys.exit('trace\\nkilled')")
    assert gpu._steps(broken, timeout=60.0) == [{"status": "error: killed", "failed": True}]
    assert "not done after 0 s" in gpu._steps(says("input(); import time; time.sleep(60)"), timeout=0.1)[0]["status"]


def says(code: str) -> subprocess.Popen:
    """A process in the place of the full steps."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_steps_are_chosen_by_what_fits(monkeypatch):
    """DeepSpeed before plain torch, many rows before few."""
    needs = {"deepspeed": 10, "plain": 5}
    monkeypatch.setattr(
        gpu_steps.Setting, "planned_peak", lambda self, model: 1e9 * (needs[self.engine] + self.micro_rows)
    )
    for free, expected in ((20, ("deepspeed", 4)), (12.9, ("deepspeed", 2)), (10, ("plain", 4)), (7, ("plain", 1))):
        setting = gpu_steps.choose("debug", "mamba", 32, free=free * 1e9)
        assert (setting.engine, setting.micro_rows) == expected
    with pytest.raises(InputError, match=r"needs more than the 6\.0 GB"):
        gpu_steps.choose("debug", "mamba", 32, free=6e9)


@pytest.mark.slow
def test_full_steps_in_plain_torch():
    setting = gpu_steps.choose("debug", "mamba", 32, free=10**9)
    plain = gpu_steps.Setting(**vars(setting) | {"engine": "plain"})
    found = gpu_steps.measure(plain, steps=2, device=torch.device("cpu"))
    assert len(found["losses"]) == 2 and all(4 < loss < 8 for loss in found["losses"])
    assert found["planned_bytes"] > 0 and "peak_bytes" not in found


@pytest.mark.slow
def test_the_whole_command_on_the_cpu(tmp_path):
    words = ["--device", "cpu", "--size", "debug", "--train-sizes", "debug", "--contexts", "32,64", "--batches", "2"]
    words += ["--row-length", "64", "--steps", "2", "--tests", str(tmp_path / "none"), "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "mezzotint.launch.gpu", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["section"] for row in report["rows"]} == {
        "checks", "steps", "decoding", "batches", "training", "operations"
    }  # fmt: skip
    assert [row["status"] for row in report["rows"] if row["status"] != "ok"] == [
        f"skipped: there is no folder {tmp_path / 'none'}"
    ]
    assert (tmp_path / "gpu.md").read_text() in done.stdout


def test_no_card_is_a_sentence(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a card is here")
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err

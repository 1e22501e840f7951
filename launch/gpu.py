"""`make gpu`: are all operations right on this card, how near is each pass to its floor, does memory follow the plan?

One command in a time budget: tests marked gpu, full steps of a 3B model beside the plan, decoding and prefill from 4k to
256k, batches, training steps, single operations. Writes JSON and a Markdown table after every cell.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from mezzotint.data.cli import run_command
from mezzotint.data.files import write_bytes, write_json
from mezzotint.eval.bench_gpu import (
    Budget,
    CellPlan,
    Models,
    block_rates,
    decode_rows,
    run_cells,
    training_rows,
)
from mezzotint.eval.bench_gpu_ops import OPS, op_rows
from mezzotint.eval.bench_gpu_table import page
from mezzotint.eval.doctor import device_name, require_device
from mezzotint.eval.speed_cell import measure_rates
from mezzotint.eval.subjects import preset_subject
from mezzotint.eval.timing import load_average
from mezzotint.models.errors import InputError
from mezzotint.models.ops import backends

DECODED = ("mamba", "hybrid", "attention", "attention_gqa")
TRAINED = ("mamba", "attention", "hybrid")
STEPS = 8  # of a block
NEAR = (0.9, 1.1)  # peak of memory over the planned one


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mezzotint.launch.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=470, help="seconds in all (default: %(default)s)")
    parser.add_argument(
        "--size", default="3b", help="preset that is decoded and trained in full (default: %(default)s)"
    )
    parser.add_argument("--train-sizes", default="3b,1b,125m", help="presets of training steps (default: %(default)s)")
    parser.add_argument("--contexts", default="4096,16384,65536,262144", help="tokens (default: %(default)s)")
    parser.add_argument("--batches", default="4,16,64", help="of the sweep (default: %(default)s)")
    parser.add_argument("--row-length", type=int, default=1024, help="tokens of a training row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="full optimizer steps (default: %(default)s)")
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="folder of the tests (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    return run_command(lambda: run(options), InputError)


def run(options: argparse.Namespace) -> int:
    """All cells; the exit code is 1 where a check failed, an operation raised or the peak is not near the plan."""
    budget = Budget(options.budget)
    require_device(options.device)
    # in processes of their own, before this one takes any of the card's memory
    steps = _start_steps(options)
    try:
        early = list(run_cells(alone(options, budget, steps), budget))
    finally:
        steps.kill()
    rates = measure_rates(options.device, torch.bfloat16)
    table = backends(torch.device(options.device))
    about = {
        "format": 1, "card": device_name(options.device), "torch": torch.__version__, "python": platform.python_version(),
        "budget": options.budget, "read_bytes_per_s": rates.read_bytes, "products_flops_per_s": rates.flops,
        "backends": [{"op": b.op, "backend": b.name, "declined": b.declined} for b in table],
    }  # fmt: skip
    block_length = preset_subject(options.size, "mamba").config.block_length
    rows = list(early)
    _write(options.out, about, rows, budget, block_length)
    for row in run_cells(measured(options, rates.read_bytes), budget):
        rows.append(row)
        words = (row["section"], row["name"], row.get("pass", ""), row.get("mode", ""))
        ratio = f"ratio {row['ratio']:.2f}" if "ratio" in row else row["status"]
        print(*words, ratio, file=sys.stderr, flush=True)
        _write(options.out, about, rows, budget, block_length)
    print(_write(options.out, about, rows, budget, block_length))
    return 1 if any(row.get("failed") for row in rows) else 0


def _write(out: Path, about: dict, rows: list[dict], budget: Budget, block_length: int) -> str:
    rates = block_rates(rows, steps=STEPS, block_length=block_length)
    spent = time.perf_counter() - budget.started
    report = about | {"seconds": spent, "load": load_average(), "rows": rows, "block_rates": rates}
    text = page(report)
    write_json(out / "gpu.json", report)
    write_bytes(out / "gpu.md", text.encode())
    return text


# ---- cells in processes of their own ----


def alone(options: argparse.Namespace, budget: Budget, steps: subprocess.Popen) -> list[CellPlan]:
    """The tests, for at most three tenths of the time, and the full steps, which are planned meanwhile."""
    return [
        CellPlan("checks", "tests marked gpu", 1, lambda: _tests(options, timeout=0.3 * budget.seconds)),
        CellPlan(
            "steps", f"{options.size} mamba", 20, lambda: _steps(steps, timeout=min(budget.left, 0.2 * budget.seconds))
        ),
    ]


def _start_steps(options: argparse.Namespace) -> subprocess.Popen:
    """A process that plans the full steps, which takes a while and no GPU, and waits for a line to run them."""
    command = [sys.executable, "-m", "mezzotint.launch.gpu_steps", "--wait", "--device", options.device]
    command += ["--size", options.size, "--row-length", str(options.row_length), "--steps", str(options.steps)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _tests(options: argparse.Namespace, *, timeout: float) -> list[dict]:
    if not options.tests.is_dir():
        return [{"status": f"skipped: there is no folder {options.tests}"}]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(options.tests)]
    workers = min(4, (os.cpu_count() or 1) // 2)  # kernels are compiled on the CPU, which takes longer than their runs
    if importlib.util.find_spec("xdist") and workers > 1:
        command += ["-n", str(workers), "--dist", "loadscope"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return [{"status": f"skipped: not done after {timeout:.0f} s"}]
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    broken = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return [{"text": "; ".join([last, *broken[:20]]), "failed": done.returncode != 0, "code": done.returncode}]


def _steps(process: subprocess.Popen, *, timeout: float) -> list[dict]:
    try:
        printed, errors = process.communicate("begin\n", timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        return [{"status": f"skipped: not done after {timeout:.0f} s"}]
    if process.returncode:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        return [{"status": f"error: {last[:300]}", "failed": True}]
    found = json.loads(printed.strip().splitlines()[-1])
    later = sorted(found["seconds"][1:]) or found["seconds"]
    rows = found["micro_rows"] * 2
    text = (
        f"{found['steps']} steps of {rows} rows of {found['row_length']} on {found['engine']}, activations "
        f"{found['activations']}: median {later[len(later) // 2]:.3f} s, loss {found['losses'][0]:.3f} to "
        f"{found['losses'][-1]:.3f}, planned {found['planned_bytes'] / 1e9:.2f} GB"
    )
    failed = False
    if "peak_over_plan" in found:
        share = found["peak_over_plan"]
        failed = not NEAR[0] <= share <= NEAR[1]
        text += f", peak {found['peak_bytes'] / 1e9:.2f} GB, {share:.3f} of the plan" + (" (aim: within 10%)" * failed)
    return [found | {"text": text, "failed": failed}]


# ---- cells that are timed here ----


def measured(options: argparse.Namespace, bandwidth: float) -> list[CellPlan]:
    """What the card is compared by comes first, in case time runs out: decoding, training steps, batches, operations."""
    models = Models(options.device)
    contexts, batches = (_numbers(text) for text in (options.contexts, options.batches))
    decode = partial(decode_rows, models, dtype=torch.bfloat16, bandwidth=bandwidth)

    def decoding(section: str, backbone: str, context: int, batch: int) -> CellPlan:
        subject = preset_subject(options.size, backbone)
        return CellPlan(section, subject.name, 8, partial(decode, subject, context=context, batch=batch))

    cells = [decoding("decoding", backbone, context, 1) for backbone in DECODED[:-1] for context in contexts]
    for size in options.train_sizes.split(","):
        for backbone in TRAINED:
            subject = preset_subject(size, backbone)
            call = partial(training_rows, models, subject, batch=2, row_length=options.row_length)
            cells.append(CellPlan("training", subject.name, 15 if backbone == "mamba" else 40, call))
    cells += [decoding("batches", "mamba", contexts[0], batch) for batch in batches]
    cells.append(CellPlan("operations", "", 0, _dropping(models)))
    for op in OPS:
        backbone = "attention" if op == "cached attention" else "mamba"
        subject = preset_subject(options.size, backbone)
        call = partial(op_rows, op, subject.config, context=contexts[-1], device=options.device, dtype=torch.bfloat16)
        cells.append(CellPlan("operations", subject.name, 8, call))
    return cells + [decoding("decoding", DECODED[-1], context, 1) for context in contexts]


def _dropping(models: Models) -> Callable[[], list[dict]]:
    """Lets go of the model before operations are measured; makes no row."""

    def drop() -> list[dict]:
        models.drop()
        return []

    return drop


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise InputError(f"{text!r} is no list of numbers like 4096,16384") from error


if __name__ == "__main__":
    sys.exit(main())

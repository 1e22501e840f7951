"""`make bench`: training and denoising steps of the three 10m models, each beside its floor measured in the same run.

Prints a Markdown table and writes it with all samples' quantiles to runs/bench/. One thread; medians of interleaved
samples, so that load falls on a step and on its floor alike; ten minutes at most.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mezzotint.data.cli import run_command
from mezzotint.data.files import write_bytes, write_json
from mezzotint.eval.bench_training import one_stream_step, training_case, two_stream_step
from mezzotint.eval.doctor import device_name, require_device
from mezzotint.eval.fill import fill_random
from mezzotint.eval.floor import decode_floor, read_bandwidth, state_read_seconds, training_floor
from mezzotint.eval.speed_passes import passes
from mezzotint.eval.subjects import build, preset_subject
from mezzotint.eval.tables import bench_table
from mezzotint.eval.timing import Protocol, Timing, interleave, load_average
from mezzotint.models.allocator import keep_freed_memory
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError

BACKBONES = ("attention", "mamba", "hybrid")
ROW_LENGTH, CONTEXT = 1024, 16_384
DTYPES = (torch.float32, torch.bfloat16)
FULL = Protocol(steps=15, seconds=4.0, least=7, warmups=1, warmup_tolerance=0.05, warmup_seconds=1.5)
QUICK = Protocol(steps=3, seconds=0.1, least=2, warmups=1, warmup_seconds=0.0)

# ratios aimed at: training of attention and of a model with Mamba layers in float32 and bfloat16; denoising
TRAINING_AIMS = {torch.float32: (1.5, 1.8), torch.bfloat16: (2.5, 3.5)}
DENOISING_AIM, LENGTH_AIM, STREAMS_AIM = 1.6, 1.05, 1.9


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mezzotint.eval.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="10m", help="preset (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="rows of a training step (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two samples each: a check that everything runs")
    options = parser.parse_args(arguments)
    return run_command(lambda: run(options), InputError)


def run(options: argparse.Namespace) -> int:
    """Measure, printing every row as it comes; JSON and table are rewritten after each."""
    require_device(options.device)
    torch.set_num_threads(1)
    keep_freed_memory()
    started, rows = time.perf_counter(), []
    bench = Bench(options.size, options.batch, options.device, QUICK if options.quick else FULL)
    about = _about(options)
    for row in bench.rows():
        rows.append(row)
        print(
            f"{row['step']:28} {row['model']:10} {row['dtype']:9} ratio {row['ratio']:.2f}", file=sys.stderr, flush=True
        )
        report = about | {"seconds": time.perf_counter() - started, "rows": rows}
        write_json(options.out / "bench.json", report)
        write_bytes(options.out / "bench.md", bench_table(report).encode())
    print(bench_table(report))
    return 0


@dataclass(frozen=True)
class Bench:
    """What is measured: models of preset `size`, training steps of `batch` rows."""

    size: str
    batch: int
    device: str
    protocol: Protocol

    def rows(self) -> Iterator[dict]:
        """All rows of the table, in its order."""
        for backbone in BACKBONES:
            for dtype in DTYPES:
                yield from self.training(backbone, dtype)
        bandwidth = read_bandwidth(self.device)
        for backbone in BACKBONES:
            for dtype in DTYPES:
                yield self.denoising(backbone, dtype, bandwidth)
        yield self.length()

    def training(self, backbone: str, dtype: torch.dtype) -> Iterator[dict]:
        """A training step over its floor, and over one plain stream of the same model and tokens."""
        subject = preset_subject(self.size, backbone)
        model = build(subject, dtype=torch.float32, device=self.device).train().requires_grad_(True)
        case = training_case(subject.config, batch=self.batch, row_length=ROW_LENGTH, device=self.device)
        floor = training_floor(
            subject.config,
            batch=self.batch,
            row_length=ROW_LENGTH,
            masked=int(case.masked.sum()),
            dtype=dtype,
            device=self.device,
        )
        calls: dict[str, Callable[[], object]] = {
            "step": two_stream_step(model, case, autocast=dtype),
            "floor": floor,
            "one": one_stream_step(model, case, autocast=dtype),
        }
        times = interleave(calls, protocol=self.protocol, device=self.device)
        about = {"step": f"training, {self.batch} x {ROW_LENGTH}", "model": backbone, "dtype": dtype_name(dtype)}
        aim = TRAINING_AIMS[dtype]["M" in subject.config.pattern]
        yield about | _ratio(times["step"], times["floor"], beside="floor", aim=aim)
        yield about | _ratio(times["step"], times["one"], beside="one stream", aim=STREAMS_AIM)

    def denoising(self, backbone: str, dtype: torch.dtype, bandwidth: float) -> dict:
        """A denoising step at CONTEXT over its floor."""
        subject = preset_subject(self.size, backbone)
        config = subject.config
        model = build(subject, dtype=dtype, device=self.device)
        floor = decode_floor(config, batch=1, context=CONTEXT, dtype=dtype, device=self.device)
        calls = {"step": _denoise_at(model, CONTEXT), "floor": floor}
        times = interleave(calls, protocol=self.protocol, device=self.device)
        reading = state_read_seconds(config, batch=1, context=CONTEXT, itemsize=dtype.itemsize, bandwidth=bandwidth)
        about = {"step": f"denoise at {CONTEXT // 1024}k", "model": backbone, "dtype": dtype_name(dtype)}
        parts = {"floor_products_ms": times["floor"].p50 * 1e3, "floor_reading_ms": reading * 1e3}
        return about | _ratio(times["step"], times["floor"], beside="floor", aim=DENOISING_AIM, more=reading) | parts

    def length(self) -> dict:
        """Mamba's denoising step at 256k over the same at 1k."""
        model = build(preset_subject(self.size, "mamba"), dtype=torch.float32, device=self.device)
        calls = {name: _denoise_at(model, length) for name, length in (("long", 262_144), ("short", 1024))}
        longer = replace(self.protocol, steps=100)
        times = interleave(calls, protocol=longer, device=self.device)
        about = {"step": "denoise at 256k", "model": "mamba", "dtype": "float32"}
        return about | _ratio(times["long"], times["short"], beside="at 1k", aim=LENGTH_AIM)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _denoise_at(model: Denoiser, length: int) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    state = fill_random(model.start(1, length + model.config.block_length), length=length, generator=generator)
    return passes(model, state, chunk=model.config.block_length, generator=generator)["denoise"]


def _ratio(timing: Timing, other: Timing, *, beside: str, aim: float, more: float = 0.0) -> dict:
    """One line of the table: `timing` over `other` with `more` seconds, by wall time and by processor time."""
    return {
        "ms": timing.p50 * 1e3,
        "beside": beside,
        "beside_ms": (other.p50 + more) * 1e3,
        "ratio": timing.p50 / (other.p50 + more),
        "cpu_ratio": timing.cpu / (other.cpu + more),
        "aim": aim,
        "spread": timing.p90 / timing.p10,
        "n": timing.n,
        "load": timing.load,
    }


def _about(options: argparse.Namespace) -> dict:
    about = {"format": 1, "size": options.size, "batch": options.batch, "row_length": ROW_LENGTH}
    return about | about_machine(options.device) | {"read_bytes_per_s": read_bandwidth(options.device)}


def about_machine(device: str) -> dict:
    """What a benchmark ran on."""
    return {
        "machine": device_name(device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": load_average(),
    }


if __name__ == "__main__":
    sys.exit(main())

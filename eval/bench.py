"""`make bench`: training and decoding steps of the three 10m models, each beside its floor measured in the same run.

Prints a Markdown table and writes it with all samples' quantiles to runs/bench/. One thread; medians of interleaved
samples, so that load falls on a step and on its floor alike; ten minutes at most. Other rows, contexts and widths:

    python -m mezzotint.eval.bench --row-length 4096 --batch 1 --contexts "" --out runs/bench/long
    python -m mezzotint.eval.bench --size 125m --layers 2 --out runs/bench/wide
    python -m mezzotint.eval.bench --compiled --dtypes float32 --parts decoding --out runs/bench/compiled
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from mezzotint.data.cli import run_command
from mezzotint.data.files import write_bytes, write_json
from mezzotint.eval.bench_rows import DTYPES, FULL, PARTS, QUICK, Bench, about_machine
from mezzotint.eval.cells import parse_counts
from mezzotint.eval.doctor import require_device
from mezzotint.eval.floor import read_bandwidth
from mezzotint.eval.tables import bench_table
from mezzotint.models.allocator import keep_freed_memory
from mezzotint.models.errors import InputError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mezzotint.eval.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="10m", help="preset (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="the first so many layers of the preset (default: all)")
    parser.add_argument("--batch", type=int, default=2, help="rows of a training step (default: %(default)s)")
    parser.add_argument("--row-length", type=int, default=1024, help="tokens of a row (default: %(default)s)")
    parser.add_argument(
        "--contexts", default="1k,16k,64k", help="decoding behind so many tokens (default: %(default)s)"
    )
    parser.add_argument("--dtypes", default="float32,bfloat16", help="default: %(default)s")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument(
        "--compiled", action="store_true", help="decode through compiled layers too (minutes to compile)"
    )
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
    bench = Bench(
        options.size,
        options.batch,
        options.device,
        QUICK if options.quick else FULL,
        row_length=options.row_length,
        contexts=parse_counts(options.contexts) if options.contexts else (),
        layers=options.layers,
        dtypes=tuple(_known(DTYPES, name, "dtype") for name in options.dtypes.split(",")),
        parts=tuple(_known({part: part for part in PARTS}, name, "part") for name in options.parts.split(",")),
        compiled=options.compiled,
    )
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


def _known(known: dict, name: str, kind: str):
    if name not in known:
        raise InputError(f"unknown {kind} {name!r}; one of {', '.join(known)}")
    return known[name]


def _about(options: argparse.Namespace) -> dict:
    about = {"format": 1, "size": options.size, "batch": options.batch, "row_length": options.row_length}
    return about | about_machine(options.device) | {"read_bytes_per_s": read_bandwidth(options.device)}


if __name__ == "__main__":
    sys.exit(main())

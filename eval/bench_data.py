"""`make bench`, data: tokens/s of the loader over every kind of token file, and of tokenizing, on one core.

The rows are read from files of random tokens just written, so the disk is the page cache; decoding parquet is not.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mezzotint.data.adopt import AdoptConfig, adopt
from mezzotint.data.cli import run_command
from mezzotint.data.corpus import corpus_documents
from mezzotint.data.encode import encode_documents
from mezzotint.data.files import write_bytes, write_json
from mezzotint.data.loader import DataConfig, Loader
from mezzotint.data.megatron import index_bytes
from mezzotint.data.order import WINDOW
from mezzotint.data.prepare import PrepareConfig, prepare
from mezzotint.data.sources import SourceConfig
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.data.train_tokenizer import TrainTokenizerConfig, train_tokenizer
from mezzotint.eval.doctor import device_name
from mezzotint.eval.timing import Protocol, Timing, measure
from mezzotint.models.errors import InputError

BLOCK = 32
ROW_LENGTHS = (1024, 32_768)
LOADER_AIM, TOKENIZING_AIM = 1.0e6, 0.8e6  # tokens/s on one core
VOCABULARY = 4096
ROW_GROUP = 1000  # documents, as `datasets` writes them


@dataclass(frozen=True, kw_only=True)
class DataBench:
    """tokens: of each token file; batch: tokens read at once; text: bytes tokenized at once; window: see `order`."""

    tokens: int
    batch: int
    text: int
    sample_mb: float
    protocol: Protocol
    window: int
    windows: Protocol  # for samples of a whole window


FULL = DataBench(
    tokens=50_000_000,  # more than the cache of decoded row groups holds
    batch=1 << 19,
    text=2 << 20,
    sample_mb=4.0,
    protocol=Protocol(steps=25, seconds=6.0, least=9, warmups=2, warmup_seconds=2.0),
    window=WINDOW,
    windows=Protocol(steps=9, seconds=6.0, least=3, warmups=1, warmup_seconds=0.0),
)
QUICK = DataBench(
    tokens=300_000,
    batch=1 << 16,
    text=1 << 16,
    sample_mb=0.3,
    protocol=Protocol(steps=2, seconds=0.0, least=2, warmups=1, warmup_seconds=0.0),
    window=1 << 17,
    windows=Protocol(steps=2, seconds=0.0, least=2, warmups=1, warmup_seconds=0.0),
)


def bench_data(quick: bool) -> list[dict]:
    """One row a measurement: what, source, row_length, tokens_per_s, by CPU time, aim, spread, n, load average."""
    bench, threads = QUICK if quick else FULL, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="mezzotint-bench-") as name:
            folder = Path(name)
            source = SourceConfig()
            tokenizer = train_tokenizer(
                TrainTokenizerConfig(
                    out=str(folder / "tokenizer"), source=source, vocab_size=VOCABULARY, sample_mb=bench.sample_mb
                )
            )
            return [*_tokenizing(bench, tokenizer, folder), *_loading(bench, tokenizer, folder)]
    finally:
        torch.set_num_threads(threads)


def _tokenizing(bench: DataBench, path: Path, folder: Path) -> list[dict]:
    """The default corpus: the tokenizer with the packing of its ids, and the whole of `prepare` with one process."""
    texts, size = [], 0
    for _, text in corpus_documents("stdlib"):
        texts.append(text)
        size += len(text)
        if size >= bench.text:
            break
    tokenizer = load_tokenizer(path)
    tokens = len(encode_documents(tokenizer, texts).tokens)
    timing = measure(lambda: encode_documents(tokenizer, texts), protocol=bench.protocol)
    rows = [_row("tokenizing", "stdlib", None, tokens, timing, TOKENIZING_AIM)]
    (folder / "text").mkdir()
    for n, text in enumerate(texts):
        (folder / "text" / f"{n:05d}.txt").write_text(text, encoding="utf-8")
    runs = iter(range(10**6))

    def run() -> None:
        out = str(folder / f"prepared-{next(runs)}")
        prepare(PrepareConfig(tokenizer=str(path), out=out, source=SourceConfig(input=str(folder / "text")), workers=1))

    return [*rows, _row("prepare, one process", "stdlib", None, tokens, measure(run, protocol=bench.protocol), None)]


def _loading(bench: DataBench, tokenizer: Path, folder: Path) -> list[dict]:
    """The loader over the same random documents as shards of our own, a Megatron pair and a parquet file."""
    documents = _random_documents(bench.tokens, load_tokenizer(tokenizer).eos_id)
    rows = []
    for name, write in (("own shards", _write_pair), ("Megatron int32", _write_pair), ("parquet", _write_parquet)):
        there = folder / name.split()[0]
        there.mkdir()
        path = write(there, *documents, dtype="uint16" if name == "own shards" else "int32")
        adopt(AdoptConfig(inputs=(str(path),), tokenizer=str(tokenizer), out=str(there / "adopted")))
        for row_length in ROW_LENGTHS:
            config = DataConfig(sources=((str(there / "adopted"), 1.0),), row_length=row_length)
            rows.append(_loader_row(name, Loader(config, BLOCK), bench))
        path.unlink()
    return rows


def _loader_row(name: str, loader: Loader, bench: DataBench) -> dict:
    """Batches at successive positions, each made whole: rows, document numbers and fill as tensors.

    A sample of parquet reads all of a window of the order, since its row groups are decoded in its first batches.
    """
    length = loader.config.row_length
    count = max(1, bench.batch // length)
    batches = max(1, bench.window // (count * length)) if name == "parquet" else 1
    starts = iter(range(0, 10**12, count))

    def read() -> None:
        for _ in range(batches):
            loader.batch(next(starts), count)

    timing = measure(read, protocol=bench.windows if name == "parquet" else bench.protocol)
    return _row("loader", name, length, batches * count * length, timing, LOADER_AIM)


def _row(what: str, source: str, row_length: int | None, tokens: int, timing: Timing, aim: float | None) -> dict:
    return {
        "what": what,
        "source": source,
        "row_length": row_length,
        "tokens_per_s": tokens / timing.p50,
        "tokens_per_cpu_s": tokens / timing.cpu,
        "aim": aim,
        "spread": timing.p90 / timing.p10,
        "n": timing.n,
        "load": timing.load,
    }


def _random_documents(tokens: int, eos_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids (tokens,) without control ids but for the ends, and sizes (documents,): lognormal, some 700 on average."""
    generator = np.random.default_rng(0)
    ends = np.unique(np.cumsum(np.maximum(2, generator.lognormal(6.0, 1.0, size=tokens // 100 + 1)).astype(np.int64)))
    ends = np.append(ends[ends < tokens], tokens)
    ids = generator.integers(300, VOCABULARY, size=tokens, dtype=np.int32)  # beyond control ids and bytes
    ids[ends - 1] = eos_id
    return ids, np.diff(ends, prepend=0)


def _write_pair(folder: Path, ids: np.ndarray, sizes: np.ndarray, *, dtype: str) -> Path:
    ids.astype(dtype).tofile(folder / "tokens.bin")
    (folder / "tokens.idx").write_bytes(index_bytes(sizes, dtype))
    return folder / "tokens.bin"


def _write_parquet(folder: Path, ids: np.ndarray, sizes: np.ndarray, *, dtype: str) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    column = pa.LargeListArray.from_arrays(offsets, ids.astype(dtype))
    pq.write_table(pa.table({"input_ids": column}), folder / "tokens.parquet", row_group_size=ROW_GROUP)
    return folder / "tokens.parquet"


def data_table(rows: list[dict]) -> str:
    """Markdown: one line a measurement."""
    lines = [
        "| | source | row | M tokens/s | by CPU time | aim | p90/p10 | load |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        aim = "" if row["aim"] is None else f"{row['aim'] / 1e6:.1f}"
        lines.append(
            f"| {row['what']} | {row['source']} | {row['row_length'] or ''} | {row['tokens_per_s'] / 1e6:.2f} "
            f"| {row['tokens_per_cpu_s'] / 1e6:.2f} | {aim} | {row['spread']:.2f} | {row['load']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mezzotint.eval.bench_data", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small files, two samples: a check that everything runs")
    options = parser.parse_args(arguments)
    return run_command(lambda: _run(options), InputError)


def _run(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    rows = bench_data(options.quick)
    about: dict[str, Any] = {"format": 1, "machine": device_name("cpu"), "python": platform.python_version()}
    write_json(options.out / "data.json", about | {"seconds": time.perf_counter() - started, "rows": rows})
    write_bytes(options.out / "data.md", data_table(rows).encode())
    print(data_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

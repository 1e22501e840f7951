"""The data benchmark runs from end to end, and says of each figure what it is."""

import dataclasses
import json

import pytest

from mezzotint.eval import bench_data
from mezzotint.eval.timing import Timing


def test_the_data_benchmark_runs_and_writes_its_table(tmp_path, monkeypatch):
    small = dataclasses.replace(bench_data.QUICK, tokens=80_000, sample_mb=0.1, text=20_000)
    monkeypatch.setattr(bench_data, "QUICK", small)
    monkeypatch.setattr(bench_data, "VOCABULARY", 400)
    assert bench_data.main(["--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "data.json").read_text())["rows"]
    found = [(row["what"], row["source"], row["row_length"]) for row in rows]
    sources = ("own shards", "Megatron int32", "parquet")
    assert found[2:] == [("loader", source, length) for source in sources for length in (1024, 32_768)]
    assert [what for what, _, _ in found[:2]] == ["tokenizing", "prepare, one process"]
    assert all(row["tokens_per_s"] > 1e3 and row["tokens_per_cpu_s"] > 1e3 and row["n"] >= 2 for row in rows)
    assert (tmp_path / "data.md").read_text().count("\n") == 2 + len(rows)


def test_a_rate_is_tokens_over_the_median():
    timing = Timing(p10=0.5, p50=2.0, p90=3.0, n=3, load=1.5, cpu=1.0)
    row = bench_data._row("loader", "x", 1024, 4_000_000, timing, 1e6)
    assert (row["tokens_per_s"], row["tokens_per_cpu_s"], row["spread"]) == (2e6, 4e6, 6.0)
    assert "| loader | x | 1024 | 2.00 | 4.00 | 1.0 | 6.00 | 1.5 |" in bench_data.data_table([row])


@pytest.mark.parametrize("tokens", [1000, 54_321])
def test_random_documents_end_with_eos_and_fill_the_file(tokens):
    ids, sizes = bench_data._random_documents(tokens, 1)
    assert sizes.sum() == tokens == len(ids) and (sizes > 0).all()
    assert (ids == 1).sum() == len(sizes) and (ids[sizes.cumsum() - 1] == 1).all() and ids.min() >= 1

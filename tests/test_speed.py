"""Speed cells: what they hold, that random states stand for real ones, and that nothing large breaks a sweep."""

import csv
import json

import pytest
import torch
from support import generator, ordinary, tiny_config, tiny_model

from mezzotint.eval import cells as cells_module
from mezzotint.eval import speed as speed_module
from mezzotint.eval.bench import main as bench_main
from mezzotint.eval.bench_training import one_stream_step, training_case, two_stream_step
from mezzotint.eval.cells import SpeedConfig, list_cells, parse_counts
from mezzotint.eval.fill import fill_random, prefill
from mezzotint.eval.floor import decode_tiles, linear_layers, training_tiles
from mezzotint.eval.memory import is_out_of_memory, storage_peak
from mezzotint.eval.plots import plot_curves, write_csv
from mezzotint.eval.products import product_flops
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.speed import passes, sweep
from mezzotint.eval.subjects import Subject, build, preset_subject
from mezzotint.eval.tables import cell_table, speed_table
from mezzotint.eval.timing import Protocol, Sample, Timing, interleave, summarize
from mezzotint.models.config import parameter_count, pass_flops, preset, ssd_flops_per_token, visible_pairs
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.state import KVState, State

ONCE = Protocol(steps=2, seconds=0.0, least=2, warmups=1, warmup_seconds=0.0)


@pytest.fixture
def instant(monkeypatch):
    """Two samples of everything, and no measuring of bandwidth."""
    monkeypatch.setattr(speed_module, "QUICK", ONCE)
    monkeypatch.setattr(speed_module, "read_bandwidth", lambda device: 1e10)


def tiny_subject(pattern: str) -> Subject:
    return Subject(f"tiny-{pattern}", "f", tiny_config(pattern), None)


@pytest.mark.parametrize("pattern", ("A", "M", "MMAM"))
def test_a_random_state_has_the_form_and_bytes_of_a_real_one(pattern):
    config = tiny_config(pattern)
    model = tiny_model(config)
    real = prefill(model, ordinary(config, (2, 16), generator(1)), model.start(2, 24), chunk=8)
    filled = fill_random(model.start(2, 24), length=16, generator=generator(2))
    assert filled.nbytes == real.nbytes and torch.equal(filled.length, real.length)
    assert filled.max_length == real.max_length
    for mine, theirs in zip(filled.layers, real.layers):
        for name, tensor in vars(mine).items():
            other = vars(theirs)[name]
            assert tensor.shape == other.shape and tensor.dtype == other.dtype
            used = tensor[:, :, :16] if isinstance(mine, KVState) else tensor
            assert torch.isfinite(used).all() and 0.02 < used.std() < 3
    canvas = torch.full((2, 4), config.mask_token_id)
    logits = model.denoise(canvas, filled)
    assert torch.isfinite(logits).sum() == 2 * 4 * (config.vocab_size - 2)


def test_a_random_state_leaves_what_lies_behind_its_length_alone():
    model = tiny_model(tiny_config("A"))
    state = fill_random(model.start(1, 12), length=8, generator=generator(3))
    for part in vars(state.layers[0]).values():
        assert part[:, :, :8].all() and not part[:, :, 8:].any()
    with pytest.raises(InputError, match="cannot be filled with 16"):
        fill_random(model.start(1, 12), length=16, generator=generator(3))


@pytest.mark.parametrize("pattern", ("A", "M", "MMAM"))
def test_timed_passes_can_be_repeated_without_the_context_growing(pattern):
    model = tiny_model(tiny_config(pattern))
    state = fill_random(model.start(2, 20), length=16, generator=generator(4))
    calls = passes(model, state, chunk=8, generator=generator(5))
    first = {name: call() for name, call in calls.items()}
    second = {name: call() for name, call in calls.items()}
    for name, length in (("commit", 20), ("prefill", 16)):
        assert first[name].length.tolist() == second[name].length.tolist() == [length, length]
    assert first["advance"][1].length.tolist() == [20, 20]
    if pattern == "M":  # keys and values are written again at the same place
        assert torch.equal(first["denoise"], second["denoise"])
        assert torch.equal(first["advance"][0], second["advance"][0])


def test_cells_of_a_sweep_are_written_resumed_and_reported(tmp_path, instant):
    subjects = [preset_subject("debug", "attention"), preset_subject("debug", "mamba")]
    config = SpeedConfig(contexts=(64, 130), batches=(1, 2), quick=True)
    cells = list_cells(subjects, config)
    assert {cell.context for cell in cells} == {64, 128}, "contexts are whole blocks"
    fingerprints = {subject.name: subject.fingerprint for subject in subjects}
    with ResultsFile(tmp_path / "r.jsonl", subjects=fingerprints) as results:
        stopped = sweep(cells, results)
        next(stopped)
        stopped.close()
        rows = list(sweep(cells, results))
    assert len(rows) == 8 and len((tmp_path / "r.jsonl").read_text().splitlines()) == 9
    for cell, row in zip(cells, rows):
        values = row["values"]
        assert row["status"] in ("ok", "noisy")
        assert values["parameters"] == parameter_count(cell.subject.config)
        assert values["weight_bytes"] == 4 * values["parameters"]
        assert values["state_bytes"] == cell.state_bytes, "what is predicted is what is there"
        assert values["peak_bytes"] > values["weight_bytes"] + values["state_bytes"]
        expected = 8 * cell.batch / (3 * values["denoise_s"] + values["advance_s"])
        assert values["tokens_per_s_4"] == pytest.approx(expected)
        assert values["floor_s"] > values["floor_products_s"] > 0
    by_cell = {(c.subject.name, c.batch, c.context): row["values"] for c, row in zip(cells, rows)}
    mamba = [by_cell["debug-mamba", 1, context]["state_bytes"] for context in (64, 128)]
    assert mamba[0] == mamba[1], "a Mamba state does not grow with the context"
    attention = [by_cell["debug-attention", 1, context]["state_bytes"] for context in (64, 128)]
    assert attention[1] - attention[0] == 64 * 2 * 64 * 4 * 4, "keys and values of 64 tokens in four layers"
    table = speed_table(rows, steps=8)
    assert table.count("\n| debug-") == 8
    write_csv(rows, tmp_path / "r.csv")
    with (tmp_path / "r.csv").open() as file:
        assert [line["context"] for line in csv.DictReader(file)] == [str(cell.context) for cell in cells]
    for path in plot_curves(rows, tmp_path, prefix="r"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_a_row_and_the_sweep_goes_on(tmp_path, monkeypatch, instant):
    subject = preset_subject("debug", "attention")
    config = SpeedConfig(contexts=(64, 128, 2**40), quick=True)
    measure = speed_module.measure_cell

    def memory_runs_out(model, cell, *, bandwidth):
        if cell.context == 128:
            torch.empty(2**62, dtype=torch.uint8)
        return measure(model, cell, bandwidth=bandwidth)

    monkeypatch.setattr(speed_module, "measure_cell", memory_runs_out)
    cells = list_cells([subject], config)
    with ResultsFile(tmp_path / "r.jsonl", subjects={subject.name: "f"}) as results:
        rows = {row["identity"]["context"]: row for row in sweep(cells, results)}
        assert len(list(sweep(cells, results))) == 3
    assert rows[64]["status"] in ("ok", "noisy")
    assert rows[128]["status"] == "oom"
    assert rows[2**40]["status"] == "skipped_predicted_oom"
    assert rows[2**40]["values"]["needed_bytes"] > rows[2**40]["values"]["available_bytes"]
    table = speed_table(list(rows.values()), steps=8)
    assert "skipped_predicted_oom" in table and "| oom |" in table
    plot_curves(list(rows.values()), tmp_path, prefix="r")
    assert "does not fit" in cell_table(cells)


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(found.value) and is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as found:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not is_out_of_memory(found.value)


def test_storage_is_counted_once_and_until_it_is_freed():
    def call():
        a = torch.zeros(1000)
        view = a.view(10, 100)[:5]
        b = view + 1  # 500
        del a, view
        c = torch.zeros(200)
        c.add_(1)
        return b, c

    assert storage_peak(call) == 4 * 1500


@pytest.mark.parametrize("backbone", ("attention", "attention_gqa", "mamba", "hybrid"))
def test_the_products_of_the_floor_are_the_flops_of_the_pass(backbone):
    """The configuration counts FLOPs by formula; the floor by its list of products. SSD's own never count."""
    config = preset("10m", backbone)
    g, blocks, batch, masked = config.block_length, 32, 2, 700
    rows = batch * (2 * blocks - 1) * g
    mine = product_flops(linear_layers(config, rows=rows, logits=masked))
    mine += product_flops(training_tiles(config, batch=batch, blocks=blocks))
    clean, noisy = batch * (blocks - 1) * g, batch * blocks * g
    pairs = batch * visible_pairs(config, clean_blocks=blocks - 1, frontiers=list(range(blocks)))
    counted = pass_flops(config, clean_tokens=clean, noisy_tokens=noisy, pairs=pairs, logits=masked)
    assert mine == counted - rows * ssd_flops_per_token(config)

    decoding = product_flops(linear_layers(config, rows=3 * g, logits=3 * g))
    decoding += product_flops(decode_tiles(config, batch=3, rows=g, context=4096))
    pairs = 3 * visible_pairs(config, clean_blocks=0, frontiers=[0], prefix_tokens=4096)
    counted = pass_flops(config, clean_tokens=0, noisy_tokens=3 * g, pairs=pairs, logits=3 * g)
    assert decoding == counted - 3 * g * ssd_flops_per_token(config)


@pytest.mark.parametrize("pattern", ("A", "M", "AM"))
def test_the_timed_training_step_is_forward_and_backward_of_the_bound(pattern, monkeypatch):
    """Its gradient is that of the plain weighted sum over all masked tokens, in one piece or in several."""
    config = tiny_config(pattern)
    model = tiny_model(config)
    case = training_case(config, batch=2, row_length=16)
    noisy_logits = model(case.clean, case.noisy, case.frontiers)[case.masked]
    targets = case.clean.view(case.masked.shape)[case.masked]
    loss = torch.nn.functional.cross_entropy(noisy_logits, targets, reduction="none").float() @ case.weights
    loss.backward()
    wanted = model.embed.weight.grad.clone()
    model.zero_grad()
    kept = {}
    monkeypatch.setattr(model, "zero_grad", lambda set_to_none: kept.update(grad=model.embed.weight.grad.clone()))
    for rows in (2048, 5):
        monkeypatch.setattr("mezzotint.eval.bench_training.LOSS_ROWS", rows)
        model.embed.weight.grad = None
        two_stream_step(model, case, autocast=torch.float32)()
        torch.testing.assert_close(kept["grad"], wanted, rtol=1e-4, atol=1e-4)
    one_stream_step(model, case, autocast=torch.float32)()
    assert torch.isfinite(kept["grad"]).all()


def test_models_are_built_in_their_dtype_with_time_scales_kept_wide():
    model = build(preset_subject("debug", "hybrid"), dtype=torch.bfloat16)
    kinds = {name.rsplit(".", 1)[-1]: parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds["A_log"] == kinds["D"] == kinds["dt_bias"] == torch.float32
    assert kinds["weight"] == torch.bfloat16
    wide = build(preset_subject("debug", "hybrid"), dtype=torch.float32)
    same = Denoiser(preset("debug", "hybrid"), generator=torch.Generator().manual_seed(0))
    for (name, mine), (_, theirs) in zip(wide.named_parameters(), same.named_parameters()):
        assert torch.equal(mine, theirs), name


def test_quantiles_and_noise():
    timing = summarize([Sample(wall=float(x), cpu=2.0 * x) for x in range(11)])
    assert (timing.p10, timing.p50, timing.p90, timing.n) == pytest.approx((1.0, 5.0, 9.0, 11))
    assert timing.cpu == 10.0
    assert timing.noisy
    assert not Timing(p10=1.0, p50=1.2, p90=1.4, n=5, load=0.0, cpu=1.0).noisy


def test_interleaving_calls_each_equally_often_and_in_varying_order():
    seen: list[str] = []
    calls = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    found = interleave(calls, protocol=Protocol(steps=12, seconds=100.0, least=3, warmups=1, warmup_seconds=0.0))
    assert [timing.n for timing in found.values()] == [12, 12, 12]
    rounds = ["".join(seen[3 + i : 6 + i]) for i in range(0, 36, 3)]
    assert all(sorted(part) == ["a", "b", "c"] for part in rounds) and len(set(rounds)) > 2


def test_counts_of_tokens_are_read_and_wrong_ones_named():
    assert parse_counts("1k,4K, 300,1m") == (1024, 4096, 300, 1048576)
    for text in ("1k,", "x", "-4", "1.5k"):
        with pytest.raises(InputError, match="is no number of tokens"):
            parse_counts(text)


def test_the_order_of_cells_is_drawn_once_and_for_all():
    subjects = [preset_subject("debug", "mamba")]
    config = SpeedConfig(contexts=tuple(64 * n for n in range(1, 20)))
    order = [cell.context for cell in list_cells(subjects, config)]
    assert order == [cell.context for cell in list_cells(subjects, config)]
    assert order != sorted(order)


def test_headroom_decides_what_fits(monkeypatch):
    cell = list_cells([tiny_subject("A")], SpeedConfig(contexts=(64,)))[0]
    for available, fits in ((cell.needed_bytes, False), (int(cell.needed_bytes * 1.1), True)):
        monkeypatch.setattr(cells_module, "available_bytes", lambda device, available=available: available)
        assert cell.fits(loaded=False) is fits


def test_the_benchmark_runs_and_writes_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr("mezzotint.eval.bench.ROW_LENGTH", 32)
    monkeypatch.setattr("mezzotint.eval.bench.CONTEXT", 64)
    monkeypatch.setattr("mezzotint.eval.bench.read_bandwidth", lambda device: 1e10)
    assert bench_main(["--size", "debug", "--quick", "--batch", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    assert len(report["rows"]) == 12 + 6 + 1
    assert all(row["ratio"] == pytest.approx(row["ms"] / row["beside_ms"]) for row in report["rows"])
    assert (tmp_path / "bench.md").read_text().count("\n| ") == 1 + 19


def test_states_are_plain_values():
    """fill_random and the timed passes build states from their fields; a new field must be thought of here."""
    assert list(State.__dataclass_fields__) == ["layers", "length", "max_length", "block_length"]

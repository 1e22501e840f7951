"""Speed cells: what they hold, that random states stand for real ones, and that nothing large breaks a sweep."""

import csv
import json

import pytest
import torch
from support import generator, ordinary, tiny_config, tiny_model

from mezzotint.eval import cells as cells_module
from mezzotint.eval import speed as speed_module
from mezzotint.eval import speed_cell, timing
from mezzotint.eval.bench import main as bench_main
from mezzotint.eval.bench_training import one_stream_step, training_case, two_stream_step
from mezzotint.eval.cells import Cell, SpeedConfig, list_cells, parse_bytes, parse_counts
from mezzotint.eval.fill import fill_random, prefill
from mezzotint.eval.floor import decode_tiles, linear_layers, training_tiles
from mezzotint.eval.memory import is_out_of_memory, storage_peak
from mezzotint.eval.plots import plot_speed
from mezzotint.eval.products import product_flops
from mezzotint.eval.report_files import flat, write_table
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.speed import sweep
from mezzotint.eval.speed_cell import Rates
from mezzotint.eval.speed_passes import block_decoder, passes
from mezzotint.eval.subjects import Subject, build, preset_subject
from mezzotint.eval.tables import cell_table
from mezzotint.eval.tables_reference import reference_table
from mezzotint.eval.tables_speed import speed_tables
from mezzotint.eval.timing import Protocol, Sample, Timing, interleave, summarize
from mezzotint.models.config import parameter_count, pass_flops, preset, ssd_flops_per_token, visible_pairs
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.state import KVState, State

ONCE = Protocol(steps=2, seconds=0.0, least=2, warmups=1, warmup_seconds=0.0)


@pytest.fixture
def instant(monkeypatch):
    """Two samples of everything, and no measuring of rates."""
    monkeypatch.setattr(speed_cell, "QUICK", ONCE)
    monkeypatch.setattr(speed_module, "measure_rates", lambda device, dtype: Rates(1e10, 1e11))


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
    config = SpeedConfig(contexts=(64, 258), batches=(1, 2), quick=True)
    cells = list_cells(subjects, config)
    assert {cell.context for cell in cells} == {64, 256}, "contexts are whole blocks"
    fingerprints = {subject.name: subject.fingerprint for subject in subjects}
    with ResultsFile(tmp_path / "r.jsonl", subjects=fingerprints) as results:
        stopped = sweep(cells, results)
        next(stopped)
        stopped.close()
        rows = list(sweep(cells, results))
    assert len(rows) == 9 and len((tmp_path / "r.jsonl").read_text().splitlines()) == 10
    again = rows.pop()
    assert again["identity"] == cells[0].identity | {"task": "speed/drift"}
    assert again["values"]["drift"] == again["values"]["denoise_s"] / rows[0]["values"]["denoise_s"]
    for cell, row in zip(cells, rows):
        check_cell(cell, row)
    by_cell = {(c.subject.name, c.batch, c.context): row["values"] for c, row in zip(cells, rows)}
    mamba = [by_cell["debug-mamba", 1, context]["state_bytes"] for context in (64, 256)]
    assert mamba[0] == mamba[1], "a Mamba state does not grow with the context"
    attention = [by_cell["debug-attention", 1, context]["state_bytes"] for context in (64, 256)]
    assert attention[1] - attention[0] == 192 * 2 * 64 * 4 * 4, "keys and values of 192 tokens in four layers"
    text = speed_tables([*rows, again], steps=8)
    assert text.count("\n| debug-") == 16 and "measured again last" in text
    write_table(tmp_path / "r.csv", flat(rows))
    with (tmp_path / "r.csv").open() as file:
        assert [line["context"] for line in csv.DictReader(file)] == [str(cell.context) for cell in cells]
    figures = plot_speed(rows, tmp_path, prefix="r")
    assert [path.name for path in figures] == ["r-latency.png", "r-memory.png", "r-batches.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)


def check_cell(cell, row) -> None:
    """Values of a measured cell hang together."""
    values = row["values"]
    assert row["status"] in ("ok", "noisy")
    assert values["parameters"] == parameter_count(cell.subject.config)
    assert values["weight_bytes"] == 4 * values["parameters"]
    assert values["state_bytes"] == cell.state_bytes, "what is predicted is what is there"
    assert values["peak_bytes"] > values["weight_bytes"] + values["state_bytes"]
    assert cell.work_bytes > values["work_bytes"] / 2, "a prediction of the right size"
    denoise, advance, commit = (values[f"{name}_s"] for name in ("denoise", "advance", "commit"))
    assert values["tokens_per_s_4"] == pytest.approx(8 * cell.batch / (3 * denoise + advance))
    assert values["tokens_per_s_apart_4"] == pytest.approx(8 * cell.batch / (4 * denoise + commit))
    assert values["block_steps"] == 8
    assert values["block_tokens_per_s"] == pytest.approx(8 * cell.batch / values["block_s"])
    chunk = values["prefill_s"]
    first = values.get("prefill_first_s", chunk)
    assert ("prefill_first_s" in values) == (cell.context == 256), "at 64 tokens the first chunk is the last"
    prefill = cell.context / min(cell.context, 128) * (first + chunk) / 2
    assert values["prefill_total_s"] == pytest.approx(prefill)
    assert values["first_block_16_s"] == pytest.approx(prefill + 16 * denoise)
    assert values["floor_s"] > values["floor_products_s"] > 0 and values["floor_roofline_s"] > 0
    assert values["floor_h200_s"] < values["floor_h100_s"] and values["floor_h100_fits"]


def test_what_does_not_fit_is_a_row_and_the_sweep_goes_on(tmp_path, monkeypatch, instant):
    subject = preset_subject("debug", "attention")
    config = SpeedConfig(contexts=(64, 128, 192, 2**40), quick=True, seed=1)
    measure = speed_module.measure_cell

    def memory_runs_out(model, cell, *, rates):
        if cell.context >= 128:
            torch.empty(2**62, dtype=torch.uint8)
        return measure(model, cell, rates=rates)

    monkeypatch.setattr(speed_module, "measure_cell", memory_runs_out)
    cells = sorted(list_cells([subject], config), key=lambda cell: cell.context)
    with ResultsFile(tmp_path / "r.jsonl", subjects={subject.name: "f"}) as results:
        rows = {row["identity"]["context"]: row for row in list(sweep(cells, results))[:-1]}
        assert len(list(sweep(cells, results))) == 5
    assert rows[64]["status"] in ("ok", "noisy")
    assert rows[128]["status"] == "oom"
    assert rows[192]["status"] == "skipped_predicted_oom" and "ran out of memory" in rows[192]["values"]["message"]
    assert rows[2**40]["status"] == "skipped_predicted_oom"
    assert rows[2**40]["values"]["needed_bytes"] > rows[2**40]["values"]["available_bytes"]
    assert not rows[2**40]["values"]["floor_h100_fits"]
    text = speed_tables(list(rows.values()), steps=8)
    assert "skipped_predicted_oom" in text and "| oom |" in text
    plot_speed(list(rows.values()), tmp_path, prefix="r")
    dry = cell_table(cells, cells[:1], rate=1e11)
    assert dry.count("does not fit") == 1 and "in all at least" in dry


def test_the_largest_batch_is_found_by_doubling(tmp_path, monkeypatch, instant):
    subject = preset_subject("debug", "mamba")
    config = SpeedConfig(contexts=(64, 128), most_rows=64, quick=True)
    cells = list_cells([subject], config)
    assert [cell.batch for cell in cells[:7]] == [1, 2, 4, 8, 16, 32, 64]
    monkeypatch.setattr(cells_module.Cell, "fits", lambda cell, loaded: cell.batch < 8)
    for _ in range(2):
        with ResultsFile(tmp_path / "r.jsonl", subjects={subject.name: "f"}) as results:
            rows = list(sweep(cells, results))
    found = [(row["identity"]["batch"], row["status"] in ("ok", "noisy")) for row in rows[:-1] if row]
    assert found == [(1, True), (2, True), (4, True), (8, False)] * 2, "the first that does not fit ends the search"
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1 + 8 + 1


def test_a_cell_is_the_same_in_another_process():
    cells = list_cells([tiny_subject("AM")], SpeedConfig(contexts=(64,), batches=(2,), timeout=3, isolated=True))
    again = Cell.from_dict(json.loads(json.dumps(cells[0].to_dict())))
    assert again == cells[0] and again.identity == cells[0].identity


@pytest.mark.parametrize("pattern", ("A", "M", "MMAM"))
def test_a_timed_block_is_what_denoising_step_by_step_gives(pattern):
    """Greedy, the surest first: one token a step of a block of four, the block before it committed in the first pass."""
    config = tiny_config(pattern)
    model = tiny_model(config)
    state = fill_random(model.start(2, 20), length=16, generator=generator(4))
    decode = block_decoder(model, state, steps=8, generator=generator(6))
    assert decode.steps == 4
    found = decode()
    assert torch.equal(found, decode()) and state.length.tolist() == [16, 16]
    _, after = decode.first()
    assert after.length.tolist() == [16, 16], "the committed block ends where the state did"
    canvas = torch.full((2, 4), config.mask_token_id)
    for _ in range(4):
        own = model.denoise(canvas, after).softmax(-1)
        best, tokens = own.max(-1)
        best[canvas != config.mask_token_id] = -1
        rows, places = torch.arange(2), best.argmax(-1)
        canvas[rows, places] = tokens[rows, places]
    assert torch.equal(found, canvas)


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


@pytest.mark.parametrize(
    ("walls", "samples"),
    [
        ([9, 8, 7, 3, 3, 3, 3.01, 3, 3], 9),  # the medians of the second and the third round agree
        ([1, 1, 1, 1, 1, 1], 6),
        ([1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6], 15),  # after five rounds it is timed as it is
        ([1, 20], 2),  # a slow call is warm after one
    ],
)
def test_warm_up_ends_when_two_medians_agree(monkeypatch, walls, samples):
    left = iter(walls)
    monkeypatch.setattr(timing, "_sample", lambda call, device, repeats: Sample(next(left), 0.0))
    found = timing._warm_up(lambda: None, protocol=Protocol(warmup_seconds=10), device="cpu")
    assert found.samples == samples and found.repeats == 1


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


def test_bytes_are_read_in_both_units():
    assert (parse_bytes("8G"), parse_bytes("8Gi"), parse_bytes("1.5GB"), parse_bytes("77")) == (
        8 * 10**9,
        8 * 2**30,
        1_500_000_000,
        77,
    )
    for text in ("8 tons", "", "-1G", "G"):
        with pytest.raises(InputError, match="is no number of bytes"):
            parse_bytes(text)


def test_the_order_of_cells_is_drawn_once_and_for_all():
    subjects = [preset_subject("debug", "mamba")]
    config = SpeedConfig(contexts=tuple(64 * n for n in range(1, 20)))
    order = [cell.context for cell in list_cells(subjects, config)]
    assert order == [cell.context for cell in list_cells(subjects, config)]
    assert order != sorted(order)


def test_headroom_decides_what_fits(monkeypatch):
    cell = list_cells([tiny_subject("A")], SpeedConfig(contexts=(64,)))[0]
    needed = cell.needed_bytes + cell.work_bytes
    for available, fits in ((needed, False), (int(needed * 1.1), True)):
        monkeypatch.setattr(cells_module, "available_bytes", lambda device, limit, available=available: available)
        assert cell.fits(loaded=False) is fits


def test_the_benchmark_runs_and_writes_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr("mezzotint.eval.bench.read_bandwidth", lambda device: 1e10)
    small = ["--size", "debug", "--layers", "2", "--batch", "1", "--row-length", "32", "--contexts", "64,128"]
    assert bench_main([*small, "--quick", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    assert len(report["rows"]) == 12 + 12 + 24 + 6 + 1
    steps = [row["step"] for row in report["rows"]]
    assert {*steps[12:24]} == {"prefill of 1k"}
    assert {*steps[24:-1]} == {"block of 8 steps at 64"} | {
        f"{n} at {c}" for n in ("denoise", "advance") for c in (64, 128)
    }
    assert all(row["ratio"] == pytest.approx(row["ms"] / row["beside_ms"]) for row in report["rows"])
    assert (tmp_path / "bench.md").read_text().count("\n| ") == 1 + 55


def test_states_are_plain_values():
    """fill_random and the timed passes build states from their fields; a new field must be thought of here."""
    assert list(State.__dataclass_fields__) == ["layers", "length", "max_length", "block_length"]


def test_our_3b_models_stand_beside_the_reference():
    def row(backbone: str, *, ms: float, gb: float, tokens: float) -> dict:
        values = {"denoise_s": ms / 1e3, "peak_bytes": gb * 1e9, "block_tokens_per_s": tokens, "needed_bytes": 1}
        identity = {"task": "speed", "subject": f"3b-{backbone}", "context": 262144, "batch": 1, "mode": "eager"}
        return {"identity": identity, "status": "ok", "values": values}

    rows = [row("attention", ms=58.62, gb=80, tokens=57), row("mamba", ms=3.38, gb=8, tokens=594)]
    lost = row("attention_gqa", ms=1, gb=1, tokens=1) | {"values": {"needed_bytes": 20 * 10**9}}
    lines = [line.strip("| ").split(" | ") for line in reference_table([*rows, lost]).splitlines()[2:]]
    found = {(line[0], line[1]): line[2:] for line in lines}
    assert len(found) == 9
    assert found["3b-mamba", "ms a denoising step"] == ["6.76", "3.38", "0.5", "4.336", "17.34"]
    assert found["3b-attention", "tok/s"] == ["114", "57", "0.5", "1", "1"]
    assert found["3b-attention_gqa", "GB"] == ["-", "20", "-", "-", "4"]
    assert found["3b-attention_gqa", "tok/s"] == ["-"] * 5
    for change in ({"context": 1024}, {"batch": 2}, {"mode": "cudagraph"}, {"subject": "mamba"}):
        assert reference_table([rows[1] | {"identity": rows[1]["identity"] | change}]) == ""

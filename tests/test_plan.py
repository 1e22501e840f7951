"""The plan's bytes are those of real passes and engines, its refusals name what really fits, and it allocates nothing."""

import dataclasses
import itertools
import json
import re
import resource
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plan_support import engine_peaks, live_bytes, real_objective, saved_bytes
from test_distributed import free_port
from training_support import command, corpus, recipe, run_command

from mezzotint.models.attention import plan_attention
from mezzotint.models.config import BACKBONES, parameter_count, preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.layout import make_layout, pick
from mezzotint.models.ops import ssd_parts
from mezzotint.models.weights import config_dict, load_config, parameter_dtype
from mezzotint.training import plan_activations
from mezzotint.training.build import make_plan
from mezzotint.training.config import RECIPES, load_recipe
from mezzotint.training.distributed import join
from mezzotint.training.engine import EngineConfig
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import ObjectiveConfig
from mezzotint.training.plan import plan
from mezzotint.training.plan_activations import layer_bytes, pass_bytes
from mezzotint.training.plan_ledger import kernels_of
from mezzotint.training.plan_memory import memory
from mezzotint.training.plan_pass import Pass, Rows, micro_batch
from mezzotint.training.plan_work import known_gpu

LARGE = sorted(path.stem for path in RECIPES.glob("3b*.yaml"))
ARMS = ("3b_attention", "3b_mamba", "3b_hybrid", "3b_attention_gqa")
LONG = "3b_32k"  # starts from a release


def a_pass(
    backbone="hybrid", frontiers="all", precision="autocast", activations="all", *, rows=2, row_length=256, stage=1,
    vocabulary=1024,
) -> Pass:  # fmt: skip
    """Width and layers of the 10m preset."""
    return Pass(
        model=preset("10m", backbone, vocab_size=vocabulary),
        objective=ObjectiveConfig(frontiers=frontiers, loss_chunk=128 if vocabulary == 1024 else 2048),
        engine=EngineConfig(precision=precision, activations=activations, zero_stage=stage),
        rows=rows,
        row_length=row_length,
    )


def large(name: str, folder) -> list[str]:
    """Overrides with which a 3b recipe can be planned: the release of the one that goes on is a config.json here."""
    (folder / "config.json").write_text(json.dumps(config_dict(preset("3b", "mamba"))))
    return [f"init_from={folder}"] if name == LONG else []


# -- activations ---------------------------------------------------------------------------------------------------

CASES = [
    ("cpu", "attention", "all", "autocast", "all", 256),
    ("cpu", "mamba", "one", "float32", "layer", 256, 8192),
    ("cpu", "attention_gqa", "one", "autocast", "selective", 256, 8192),
    ("cuda", "attention", "all", "autocast", "selective", 256),
    ("cuda", "attention_gqa", "one", "float32", "all", 256),
    ("cuda", "mamba", "all", "autocast", "all", 256),
    ("cuda", "hybrid_gqa", "all", "float32", "layer", 512),
    ("cuda", "attention", "all", "bf16", "layer", 256),
]
SETTINGS = itertools.product(
    ("cpu", "cuda"),
    BACKBONES,
    ("one", 5, "all"),
    ("float32", "autocast"),
    ("all", "selective", "layer"),
    (512, 1024),
)
MORE = list(SETTINGS)[::11]  # every value of each, and every pair of most


def check_pass(device, backbone, frontiers, precision, activations, row_length, vocabulary=1024):
    p = a_pass(backbone, frontiers, precision, activations, row_length=row_length, vocabulary=vocabulary)
    planned, rows = pass_bytes(p, device=device), micro_batch(p)
    between, peak = live_bytes(p, rows, device=device)
    assert planned.kept + planned.casts == pytest.approx(between, rel=0.01)
    assert 0.97 * peak <= planned.peak <= 1.03 * peak
    if activations == "all":  # what checkpoints hold on to, autograd's hooks do not see
        assert planned.kept + planned.casts == pytest.approx(saved_bytes(p, rows, device=device), rel=0.1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_bytes_of_a_pass_are_those_of_a_real_one(case):
    check_pass(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: "-".join(map(str, case)))
def test_bytes_of_every_pass(case):
    check_pass(*case)


@pytest.mark.parametrize("frontiers", ["one", 3, "all"])
def test_drawn_noise_and_documents_stay_within_the_plan(frontiers):
    """The planned micro-batch is the one that needs most; ordinary ones come close."""
    p = a_pass(
        "hybrid", frontiers, "float32", activations="all" if frontiers == "all" else "layer", rows=3, row_length=512
    )
    blocks = p.row_length // p.model.block_length
    source = NoiseSource(
        seed=0, rows_per_step=8, row_blocks=blocks, slots=p.objective.slots(blocks), block_length=p.model.block_length
    )
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 1024, (p.rows, p.row_length), generator=draws)
    documents = (torch.rand(p.rows, blocks, generator=draws) < 0.1).long().cumsum(1).repeat_interleave(32, 1)
    rows = Rows(tokens, documents, source.draw(step=0, first_row=0, blocks=torch.full((p.rows,), blocks)))
    between, peak = live_bytes(p, rows, device="cuda")
    planned = pass_bytes(p)
    assert between <= planned.kept + planned.casts and peak <= planned.peak * 1.01
    if frontiers != "one":  # a single frontier may be drawn early, and its row cut there
        assert peak >= 0.8 * planned.peak


@pytest.mark.parametrize("frontiers", ["one", 3, "all"])
def test_the_planned_micro_batch_spares_nothing(frontiers):
    """Every tile has its own mask for every row, and (almost) all keys; no run of frontiers is read without a copy."""
    p = a_pass("attention", frontiers, rows=3, row_length=512)
    rows, size = micro_batch(p), p.model.block_length
    places = rows.noise.frontiers
    layout = make_layout(
        block_length=size, clean_tokens=int(places.max()) * size, frontiers=places, documents=rows.documents
    )
    tiles = plan_attention(p.model, layout, cached=False, device="cpu", dtype=torch.float32)
    assert int(places.max()) == p.row_length // size - 1
    for tile in tiles.clean + tiles.noisy:
        assert tile.mask is not None and len(tile.mask) == p.rows and tile.low <= size
    assert tiles.clean[-1].high == layout.clean_tokens
    alone = micro_batch(dataclasses.replace(p, rows=1))  # documents that start inside a row cost Mamba a copy
    assert alone.documents[0].tolist() == [0] * (p.row_length - size) + [1] * size
    table = torch.zeros(p.rows, p.row_length // size)
    assert (pick(table, places)._base is None) == (frontiers != "all")


@pytest.mark.parametrize(
    ("letter", "frontiers", "last"),
    [
        pytest.param("A", "all", False, marks=pytest.mark.slow),
        ("A", "one", False),
        ("A", "one", True),
        ("M", 40, False),
    ],
)
def test_long_rows_are_extrapolated_from_short_ones(letter, frontiers, last, monkeypatch):
    p = a_pass({"A": "attention", "M": "mamba"}[letter], frontiers, activations="layer", rows=1, row_length=4096)
    with kernels_of("cuda"):
        found = layer_bytes(p, letter, last=last)
        monkeypatch.setattr(plan_activations, "SAMPLES", (0, 0, 128))
        measured = layer_bytes(p, letter, last=last)
    for field in dataclasses.fields(found):
        assert getattr(found, field.name) == pytest.approx(getattr(measured, field.name), rel=0.05), field.name


@pytest.mark.parametrize("precision", ["autocast", "float32"])
def test_a_scan_counts_as_one_that_is_taken_chunk_by_chunk(precision, monkeypatch):
    p = a_pass("mamba", "all", precision)
    real = ssd_parts._StateScan
    with kernels_of("cuda"):
        assert ssd_parts._StateScan is not real
        found = layer_bytes(p, "M", last=False)
        with monkeypatch.context() as patch:
            patch.setattr(ssd_parts, "_StateScan", real)
            measured = layer_bytes(p, "M", last=False)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(measured), rel=1e-3)


# -- engine --------------------------------------------------------------------------------------------------------


def check_engine(p: Pass, ranks) -> None:
    """Parts of the plan, for this rank, against the live bytes of a real engine."""
    found = engine_peaks(p, ranks)
    model = parameter_count(p.model)
    need = memory(p, gpus=ranks.world, average=False)
    need = dataclasses.replace(need, activations=pass_bytes(p, device="cpu"))
    engine = need.engine
    always = engine.held + (engine.buckets if p.engine.zero_stage == 3 else 0)  # there the bucket is never given back
    assert found["held"] == pytest.approx(always, rel=0.02)
    # whole parameters at the edge of a rank's share belong to both neighbours while gradients are added up
    edge = 4 * p.model.vocab_size * p.model.d_model if p.engine.zero_stage == 2 and ranks.world > 1 else 0
    kept = always if p.engine.zero_stage == 3 else engine.held + engine.gradients
    if p.engine.zero_stage in (0, 3) or p.engine.precision == "bf16":
        assert found["behind 0"] == pytest.approx(kept, rel=0.05)
    elif p.engine.zero_stage == 1:
        assert found["behind 0"] == pytest.approx(kept + engine.buckets, rel=0.02)
    else:
        assert kept * 0.98 <= found["behind 0"] <= kept * 1.02 + edge
    most = max(found.values())
    assert 0.95 * most <= need.peak <= 1.12 * most, (need, found, model)


def run_engine(rank: int, world: int, port: str, p: Pass) -> None:
    import os

    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    torch.set_num_threads(1)
    check_engine(p, join())
    dist.barrier()


STAGES = {"float32": (0, 1, 2, 3), "autocast": (0, 1, 2, 3), "bf16": (1, 2, 3)}


@pytest.mark.parametrize("stage", [0, 1])
def test_bytes_of_an_engine_are_those_of_a_real_one(stage):
    check_engine(a_pass("attention", precision="float32", rows=1, stage=stage), join())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("precision", "stage"), [(name, stage) for name, stages in STAGES.items() for stage in stages])
def test_bytes_of_every_engine(world, precision, stage):
    """In processes of their own: with stage 3 DeepSpeed replaces torch's linear for good."""
    p = a_pass("attention", precision=precision, rows=1, stage=stage)
    mp.spawn(run_engine, args=(world, free_port(), p), nprocs=world)


# -- the plan of the large recipes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LARGE)
def test_large_recipes_fit_8_to_64_gpus_and_say_what_they_cost(name, tmp_path):
    config = load_recipe(name, large(name, tmp_path))
    days = []
    for gpus in (8, 32, 64):
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        text = plan(config, gpus=gpus, gpu="h100-80")
        assert time.process_time() - begun < 5
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes; the weights are 13 GB
        assert f"{gpus} x h100-80" in text and "parameters" in text and "is not prepared" in text
        days.append(re.search(r"40% .* ([\d.]+) days", text)[1])
    if name != "3b":
        told = f"By --plan, on H100-80 at 40% of the peak: {days[0]} days on 8, {days[1]} on 32, {days[2]} on 64."
        assert told in (RECIPES / f"{name}.yaml").read_text()


def test_parts_add_up_to_the_total():
    lines = plan(load_recipe("3b_mamba"), gpus=8, gpu="h100-80").splitlines()
    first = lines.index("bytes of one GPU at the worst moment of a step") + 1
    last = next(i for i, line in enumerate(lines) if line.startswith("  total"))
    values = [float(re.search(r"([\d.]+) GB", line)[1]) for line in lines[first : last + 1]]
    assert sum(values[:-1]) == pytest.approx(values[-1], abs=0.5)


def test_numbers_of_the_reference():
    """By hand: two streams cost 2 FLOPs forward and 4 backward for every parameter of the layers and each token."""
    text = plan(load_recipe("3b_attention"), gpus=8, gpu="h100-80")
    model = preset("3b", "attention")
    layers = parameter_count(model) - model.vocab_size * model.d_model
    flops = float(re.search(r"FLOPs of a token, forward and backward +(\S+)", text)[1])
    assert 1 < flops / (2 * 6 * layers) < 1.07  # attention itself, and the head
    assert "300.0 billion" in text and "4,194,304 (4,096 rows of 1,024)" in text
    days = float(re.search(r"50% .* ([\d.]+) days", text)[1])
    assert days == pytest.approx(flops * 71_525 * 4_194_304 / (8 * 989e12 * 0.5) / 86_400, rel=0.01)
    assert f"{parameter_count(model) * 16 / 1e9:,.1f} GB, every 500 steps" in text


def test_data_says_the_vocabulary_where_it_is_prepared(tmp_path):
    text = plan(recipe(tmp_path), gpus=1, gpu="a100-40")
    assert f"(of {corpus() / 'train'})" in text


# -- refusals ------------------------------------------------------------------------------------------------------


def refused(name: str, *overrides: str, gpus: int = 8, gpu: str = "h100-80") -> str:
    with pytest.raises(InputError) as error:
        plan(load_recipe(name, overrides), gpus=gpus, gpu=gpu)
    return str(error.value)


def mended(sentence: str, name: str, *overrides: str, gpus: int, gpu: str) -> list[str]:
    """Plans with each setting that the sentence names."""
    texts = []
    for change in re.findall(r"`([^`]+)`", sentence):
        words = change.split()
        if words[0] == "--gpus":
            gpus, words = int(words[1]), words[2:]
        texts.append(plan(load_recipe(name, [*overrides, *words]), gpus=gpus, gpu=gpu))
    return texts


@pytest.mark.parametrize(
    ("overrides", "gpus", "gpu", "word"),
    [
        (["micro_rows=32"], 8, "h100-80", "`micro_rows="),
        (["micro_rows=8", "engine.activations=all"], 64, "h100-80", "`engine.activations=selective"),
        (["micro_rows=1", "engine.activations=layer"], 8, "a100-40", "`engine.zero_stage="),
        (["micro_rows=1", "engine.activations=layer", "engine.zero_stage=3"], 1, "h100-80", "`--gpus "),
        (
            [
                "micro_rows=1",
                "rows_per_step=8",
                "data.row_length=131072",
                "engine.activations=layer",
                "engine.zero_stage=3",
            ],
            8,
            "a100-80",
            "`data.row_length=",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(overrides, gpus, gpu, word):
    sentence = refused("3b_attention", *overrides, gpus=gpus, gpu=gpu)
    assert word in sentence and "the nearest that fits is" in sentence
    need, over, free = (float(re.search(pattern, sentence)[1].replace(",", "")) for pattern in (
        r"needs ([\d,.]+) GB", r", ([\d,.]+) GB more", r"than the ([\d.]+) GB"))  # fmt: skip
    assert need - over == pytest.approx(free, abs=0.11)
    assert free == pytest.approx(known_gpu(gpu).usable / 1e9, abs=0.06)
    assert mended(sentence, "3b_attention", *overrides, gpus=gpus, gpu=gpu)


@pytest.mark.parametrize("frontiers", ["one", "all"])
def test_many_rows_are_extrapolated_from_few(frontiers, monkeypatch):
    p = a_pass("hybrid", frontiers, activations="selective", rows=24, row_length=256)
    found = pass_bytes(p)
    monkeypatch.setattr(plan_activations, "ROWS", (4, 99))
    measured = plan_activations._measured.__wrapped__(p, "cuda")
    monkeypatch.setattr(plan_activations, "_measured", lambda *_: measured)
    assert found.peak == pytest.approx(pass_bytes(p).peak, rel=0.02)


def test_a_refusal_of_what_is_far_off_is_quick():
    plan_activations._measured.cache_clear()
    begun = time.process_time()
    assert "the nearest that fits is `micro_rows=" in refused("3b_mamba", "micro_rows=512")
    assert time.process_time() - begun < 5


def test_fewer_rows_are_named_before_anything_else():
    """The nearest setting is the largest that fits: twice as many rows are refused."""
    sentence = refused("3b_hybrid", "micro_rows=16")
    rows = int(re.search(r"`micro_rows=(\d+)`", sentence)[1])
    refused("3b_hybrid", f"micro_rows={2 * rows}")


def test_rows_that_cannot_be_shared_out_and_unknown_gpus():
    assert "use --gpus 16 or 32" in refused("3b_mamba", gpus=24)
    assert refused("3b_mamba", gpus=10**9).endswith("use --gpus 1024")  # of 4,096 rows, micro-batches of 4
    assert "use micro_rows=4" in refused("3b_mamba", "micro_rows=6")
    assert "is not known; the nearest of a100-40" in refused("3b_mamba", gpu="h100")
    assert "'h100-80'" in refused("3b_mamba", gpu="h100")
    assert "4097 frontiers" in refused("3b_mamba", "objective.frontiers=4097")


def test_a_run_that_starts_from_a_release_is_planned_before_the_release_is_there(tmp_path):
    """By the preset and backbone that the recipe names; without, the sentence says how to get there."""
    text = plan(load_recipe(LONG), gpus=8, gpu="h100-80")
    assert "the preset 3b, mamba" in text
    there = plan(load_recipe(LONG, large(LONG, tmp_path)), gpus=8, gpu="h100-80")
    assert there.replace(str(tmp_path), "the preset 3b, mamba") == text
    sentence = refused(LONG, "init_from=nowhere", "model.preset=null")
    assert "mezzotint-export RUN nowhere" in sentence and "model.preset=3b model.backbone=mamba" in sentence
    assert "no config.json" in refused(LONG, f"init_from={tmp_path.parent}")


@pytest.mark.parametrize("overrides", [["engine.precision=bf16"], ["model.block=row"]])
def test_layers_that_cannot_are_refused_in_the_words_of_training(tmp_path, overrides):
    config = recipe(tmp_path, *overrides)
    sentences = []
    for start in (make_plan, lambda config: plan(config, gpus=1, gpu="h100-80")):
        with pytest.raises(InputError) as error:
            start(config)
        sentences.append(str(error.value))
    assert sentences[0] == sentences[1]


def test_the_command_prints_a_plan_or_one_sentence(tmp_path):
    done = run_command(tmp_path, command("3b_mamba", "--plan", "--gpus", "64", "--gpu", "h100-80"))
    assert done.returncode == 0 and "tokens/s a GPU" in done.stdout and done.stderr == ""
    done = run_command(tmp_path, command("3b_mamba", "--plan", "--gpus", "24"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: rows_per_step 4096 cannot") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "extensions"]


# -- three billion parameters, for real ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backbone", BACKBONES)
def test_two_layers_at_full_width_run_forward_and_backward(backbone):
    config = preset("3b", backbone)
    pattern = {"attention": "AA", "mamba": "MM", "hybrid": "AM"}[backbone.removesuffix("_gqa")]
    p = Pass(
        model=dataclasses.replace(config, pattern=pattern),
        objective=ObjectiveConfig(),
        engine=EngineConfig(),
        rows=1,
        row_length=64,
    )
    objective, rows = real_objective(p), micro_batch(p)
    loss, sums = objective(rows.tokens, rows.documents, rows.noise)
    loss.backward()
    assert torch.isfinite(loss) and sums.masked.sum() > 0
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("backbone", BACKBONES)
def test_an_exported_configuration_has_the_shapes_of_the_run_on_the_meta_device(backbone, tmp_path):
    """As `save_weights` would write them: names and shapes of the trained model's parameters."""
    config = preset("3b", backbone)
    (tmp_path / "config.json").write_text(json.dumps(config_dict(config, dtype="bfloat16")))
    with torch.device("meta"):
        trained, loaded = Denoiser(config), Denoiser(load_config(tmp_path))
    written = {name: p.to(parameter_dtype(name, torch.bfloat16)) for name, p in trained.named_parameters()}
    loaded.load_state_dict(written, assign=True)
    assert sum(p.numel() for p in loaded.parameters()) == parameter_count(config)
    assert {name: p.shape for name, p in loaded.state_dict().items()} == {n: p.shape for n, p in written.items()}

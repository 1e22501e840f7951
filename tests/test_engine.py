"""The engine computes the plain training step, under every ZeRO stage, precision and way to keep activations."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kill_support import Harm, cut_small_parameters, start
from support import PATTERNS, tiny_config, tiny_model
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from training_support import corpus, curve, recipe, records

from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.schedule import Schedule
from mezzotint.training import engine
from mezzotint.training.build import make_plan
from mezzotint.training.checkpoint import load_weights
from mezzotint.training.config import TrainConfig
from mezzotint.training.layer_runs import ACTIVATIONS, layer_run
from mezzotint.training.loop import train
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import Objective

STEPS, ROWS = 12, 8
SKIPPED = 5  # a step, from 1, whose loss is NaN in some tests
SLOW = pytest.mark.slow
ATTENTION = ("model.backbone=attention", "model.pattern=AA")


def config(folder: Path, *overrides: str) -> TrainConfig:
    changes = {"steps": STEPS, "rows_per_step": ROWS, "checkpoint": {"every": STEPS}}
    return recipe(folder, "optim.shape=constant", f"run={folder / 'run'}", *overrides, **changes)


def plain(config: TrainConfig, *, skip: int = 0) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """The training of `config` in plain torch, all rows at once: (loss, gradient norm) of every step, and the weights."""
    plan, optim = make_plan(config), config.optim
    model = Denoiser(plan.model, generator=torch.Generator().manual_seed(config.seed))
    objective = Objective(model, Schedule())
    decayed = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)}
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    found, updates = [], 0
    for step in range(config.steps):
        batch = plan.loader.batch(step * ROWS, ROWS)
        noise = plan.noise.draw(step=step, first_row=0, blocks=batch.blocks)
        with torch.autocast("cpu", torch.bfloat16) if config.engine.precision == "autocast" else nullcontext():
            total, _ = objective(batch.tokens, batch.documents, noise)
        loss = total / (batch.documents >= 0).sum()
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        found.append((float(loss), norm))
        if step + 1 == skip:
            continue
        updates += 1
        lr = optim.lr * min(1.0, (step + 1) / optim.warmup_steps)
        with torch.no_grad():
            for name, p in model.named_parameters():
                gradient = p.grad * min(1.0, optim.clip / (norm + 1e-6))
                first, second = moments[name]
                first += (1 - optim.beta1) * (gradient - first)
                second += (1 - optim.beta2) * (gradient**2 - second)
                mean, square = first / (1 - optim.beta1**updates), second / (1 - optim.beta2**updates)
                p -= lr * (optim.weight_decay if id(p) in decayed else 0.0) * p
                p -= lr * mean / (square.sqrt() + optim.eps)
    return found, {name: p.detach() for name, p in model.named_parameters()}


def assert_close_curves(run: Path, expected: list[tuple[float, float]], tolerance: float) -> None:
    found = [(record["loss"], record["gradient_norm"]) for record in records(run)]
    assert len(found) == len(expected) == STEPS
    for step, (mine, theirs) in enumerate(zip(found, expected), start=1):
        if mine[1] is not None:  # of a skipped step nothing is known
            assert mine[0] == pytest.approx(theirs[0], rel=tolerance), f"loss of step {step}"
            assert mine[1] == pytest.approx(theirs[1], rel=10 * tolerance), f"gradient norm of step {step}"


@pytest.fixture(autouse=True)
def _small_parameters_are_cut(monkeypatch):
    monkeypatch.setattr(engine, "_settings", engine._settings)
    cut_small_parameters()


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    return plain(config(tmp_path_factory.mktemp("plain")))


# -- stages, accumulation, ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_rows", [2, pytest.param(8, marks=SLOW)])  # accumulation 4 and 1
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_is_the_plain_step(by_hand, tmp_path, stage, micro_rows):
    """To 1e-5: float32 sums over rows and parameters are added up in another order; weights to what AdamW's sign-like
    first steps make of that where a gradient is near 0."""
    assert train(config(tmp_path, f"engine.zero_stage={stage}", f"micro_rows={micro_rows}")) == 0
    curve_by_hand, weights_by_hand = by_hand
    assert_close_curves(tmp_path / "run", curve_by_hand, 1e-5)
    _, weights = load_weights(tmp_path / "run", ema=False)
    for name, value in weights_by_hand.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=5e-5)


@SLOW
@pytest.mark.parametrize("world, micro_rows", [(2, 4), (2, 1), (4, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_is_the_plain_step_on_several_ranks(by_hand, tmp_path, stage, world, micro_rows):
    config(tmp_path)
    overrides = ["optim.shape=constant", f"engine.zero_stage={stage}", f"micro_rows={micro_rows}"]
    ended = start(tmp_path / "recipe.yaml", *overrides, world=world)
    assert ended.codes == [0] * world, ended
    assert_close_curves(tmp_path / "run", by_hand[0], 1e-5)


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_a_skipped_step_leaves_the_plain_steps_around_it(tmp_path, monkeypatch, stage):
    """AdamW's bias correction counts updates, not steps: a wrong count moves the losses after it by percents."""
    forward, passes = Objective.forward, []

    def poisoned(self, *inputs):
        passes.append(1)
        loss, sums = forward(self, *inputs)
        return (loss * torch.nan if len(passes) == SKIPPED else loss), sums

    monkeypatch.setattr(Objective, "forward", poisoned)
    assert train(config(tmp_path, f"engine.zero_stage={stage}", f"micro_rows={ROWS}")) == 0
    monkeypatch.undo()
    found = records(tmp_path / "run")
    assert [r["step"] for r in found if r["gradient_norm"] is None] == [SKIPPED]
    assert_close_curves(tmp_path / "run", plain(config(tmp_path), skip=SKIPPED)[0], 1e-5)


@SLOW
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_may_differ_in_how_many_pieces_the_loss_is_computed(by_hand, tmp_path, stage):
    """Masked tokens differ from rank to rank: under stage 3 none may wait for weights that the other does not gather."""
    config(tmp_path)
    overrides = ["optim.shape=constant", f"engine.zero_stage={stage}", "micro_rows=2", "objective.loss_chunk=16"]
    ended = start(tmp_path / "recipe.yaml", *overrides, "guard.hang_seconds=20", world=2)
    assert ended.codes == [0, 0], ended
    assert_close_curves(tmp_path / "run", by_hand[0], 1e-5)


@SLOW
def test_the_bound_of_cut_weights_is_that_of_whole_ones(tmp_path):
    """Stage 3 without an average: the model that is judged is put together from the fragments of two ranks."""
    config(tmp_path)
    validation = [f"validation.folder={corpus() / 'heldout'}", "validation.every=6", "validation.rows=6"]
    found = []
    for stage in (1, 3):
        run, engine = tmp_path / f"stage-{stage}", f"engine.zero_stage={stage}"
        ended = start(tmp_path / "recipe.yaml", *validation, f"run={run}", engine, world=2)
        assert ended.codes == [0, 0], ended
        found.append([record["nats_per_token"] for record in records(run, "validation")])
    assert len(found[0]) == 2 and found[1] == pytest.approx(found[0], rel=1e-6)


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1, 2, pytest.param(3, marks=SLOW)])
def test_autocast_is_plain_autocast_with_float32_weights(tmp_path, stage):
    """To 1e-3: a product rounded to bfloat16 (2^-9) flips its last bit when a weight differs in the seventh digit."""
    setup = config(tmp_path, "engine.precision=autocast", f"engine.zero_stage={stage}", "micro_rows=8")
    assert train(setup) == 0
    found, _ = plain(setup)
    assert_close_curves(tmp_path / "run", found, 1e-3)
    first, (loss, norm) = records(tmp_path / "run")[0], found[0]
    assert (first["loss"], first["gradient_norm"]) == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-4))
    _, weights = load_weights(tmp_path / "run", ema=False)
    assert not all(value.equal(value.bfloat16().float()) for value in weights.values())


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_bf16_trains_attention_with_float32_masters(tmp_path, stage):
    """Weights are rounded to bfloat16 (2^-9 each) before every pass: losses within 2% of float32, alike to 1e-3 between
    the stages, which add up rounded gradients in float32."""
    assert train(config(tmp_path, *ATTENTION, "engine.precision=bf16", f"engine.zero_stage={stage}")) == 0
    assert_close_curves(tmp_path / "run", plain(config(tmp_path, *ATTENTION))[0], 2e-2)
    other = tmp_path / "other"
    assert train(config(tmp_path, *ATTENTION, "engine.precision=bf16", f"run={other}")) == 0  # stage 1
    for mine, theirs in zip(records(tmp_path / "run"), records(other), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    _, weights = load_weights(tmp_path / "run", ema=False)
    assert not all(value.equal(value.bfloat16().float()) for value in weights.values())


def note_sums(rank: int, *, path: str) -> None:
    """Called inside the ranks: the type and size of every sum over ranks goes to a file."""
    for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
        plain = getattr(dist, name)

        def noted(*arguments, _plain=plain, **options):
            values = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
            with open(f"{path}-{rank}", "a") as file:
                file.writelines(f"{value.dtype} {value.numel()}\n" for value in values)
            return _plain(*arguments, **options)

        setattr(dist, name, noted)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_bf16_sums_gradients_over_ranks_in_float32(tmp_path, stage):
    """By the types of all sums that are larger than those of the loop and of overflow flags."""
    config(tmp_path)
    overrides = [*ATTENTION, "engine.precision=bf16", f"engine.zero_stage={stage}", "micro_rows=2", "steps=2"]
    harms = [Harm("test_engine", "note_sums", {"path": str(tmp_path / "sums")})]
    ended = start(tmp_path / "recipe.yaml", *overrides, world=2, harms=harms)
    assert ended.codes == [0, 0], ended
    for rank in range(2):
        noted = [line.split() for line in (tmp_path / f"sums-{rank}").read_text().splitlines()]
        assert {kind for kind, size in noted if int(size) > 1000} == {"torch.float32"}


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["engine.precision=bf16"], ["would round the time scales", "in AM", "use 'autocast'"]),
        ([*ATTENTION, "engine.precision=bf16", "engine.zero_stage=0"], ["cannot accumulate in float32", "use stage 1"]),
        (["engine.precision=fp16"], ["'fp16'", "float32, autocast, bf16"]),
        (["engine.zero_stage=4"], ["zero_stage is 4", "0, 1, 2 or 3"]),
        (["engine.activations=some"], ["'some'", "all, selective, layer"]),
        (["engine.compile=true", "engine.activations=selective"], ["chooses by itself", "'all' or 'layer'"]),
        (["engine.compile=true", "engine.zero_stage=3"], ["does not work with zero_stage 3", "use stage 1"]),
    ],
)
def test_what_does_not_work_is_refused_with_the_mend(tmp_path, overrides, words):
    with pytest.raises(InputError) as error:
        train(config(tmp_path, *overrides))
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "run").exists()


# -- activations -----------------------------------------------------------------------------------------------------


def loss_and_gradients(pattern: str, activations: str, *, loss_chunk: int) -> tuple[list[torch.Tensor], int, int]:
    """In float64, without DeepSpeed: the loss and its gradients; bytes that autograd was left; FLOPs of the backward."""
    model = tiny_model(tiny_config(pattern))
    size, rows, blocks = model.config.block_length, 3, 5
    tokens = torch.randint(
        4, model.config.vocab_size, (rows, blocks * size), generator=torch.Generator().manual_seed(2)
    )
    documents = torch.arange(blocks * size).expand(rows, -1) // (2 * size)
    source = NoiseSource(seed=3, rows_per_step=rows, row_blocks=blocks, slots=blocks, block_length=size)
    noise = source.draw(step=0, first_row=0, blocks=torch.full((rows,), blocks))
    objective = Objective(model, Schedule(), loss_chunk=loss_chunk, run=layer_run(activations, compiled=False))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = objective(tokens, documents, noise)
    with FlopCounterMode(display=False) as counter:
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [loss, *gradients], sum(kept.values()), counter.get_total_flops()


@pytest.mark.parametrize("loss_chunk", [2048, 7])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_gradients_do_not_depend_on_what_is_kept(pattern, loss_chunk):
    values, kept, flops = zip(*(loss_and_gradients(pattern, mode, loss_chunk=loss_chunk) for mode in ACTIVATIONS))
    for other in values[1:]:
        for mine, theirs in zip(other, values[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    everything, selected, inputs = range(3)  # ACTIVATIONS
    assert kept[everything] > kept[inputs]
    assert flops[everything] == flops[selected] < flops[inputs]  # no matrix product is computed again


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("activations", ["selective", "layer"])
def test_training_does_not_depend_on_what_is_kept(tmp_path, activations, stage):
    """To the bit: what is computed again is computed by the same operations on the same numbers."""
    assert train(config(tmp_path, f"engine.activations={activations}", f"engine.zero_stage={stage}")) == 0
    assert train(config(tmp_path, f"engine.zero_stage={stage}", f"run={tmp_path / 'all'}")) == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "all")


@SLOW
@pytest.mark.parametrize("activations", ["all", "layer"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_compiled_layers_compute_the_same(by_hand, tmp_path, stage, activations):
    """To 1e-5: fused operations round in another order. In a process of its own: a compiled layer outlives its test."""
    config(tmp_path)
    overrides = ["optim.shape=constant", "engine.compile=true", f"engine.zero_stage={stage}"]
    ended = start(tmp_path / "recipe.yaml", *overrides, f"engine.activations={activations}", "micro_rows=8", limit=500)
    assert ended.codes == [0], ended
    assert_close_curves(tmp_path / "run", by_hand[0], 1e-5)


def test_deepspeeds_muon_does_not_import_the_compiler():
    """It is imported at every start; torch's inductor took a quarter of that."""
    code = (
        "import sys; from mezzotint.training.engine import _import_deepspeed; _import_deepspeed()\n"
        "import deepspeed.runtime.zero.muon.original_muon as muon\n"
        "print(callable(muon.zeropower_via_newtonschulz5), 'torch._inductor.lowering' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["True", "False"]

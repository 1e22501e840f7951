"""Twenty steps on a CPU: the same to the bit when repeated, the same sums when cut up otherwise, a falling loss."""

import math

import pytest
import torch
from training_support import corpus, curve, recipe, records

from mezzotint.data.sources import SourceConfig
from mezzotint.data.train_tokenizer import TrainTokenizerConfig, train_tokenizer
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.training.build import make_plan
from mezzotint.training.checkpoint import load_weights
from mezzotint.training.loop import DIVERGED, train


def losses(run) -> list[float]:
    return [record["loss"] for record in records(run)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run that others are held against: 20 steps in float32, EMA, validation."""
    folder = tmp_path_factory.mktemp("plain")
    config = recipe(folder, ema_decay=0.9, validation={"folder": str(corpus() / "heldout"), "every": 10, "rows": 6})
    assert train(config) == 0
    return folder / "run"


def test_the_same_recipe_gives_the_same_curve_to_the_bit(plain, tmp_path):
    assert train(recipe(tmp_path, ema_decay=0.9)) == 0  # validation must not touch training either
    assert curve(tmp_path / "run") == curve(plain)
    assert len(curve(plain)) == 20


def test_loss_falls_from_the_uniform_one(tmp_path):
    assert train(recipe(tmp_path, steps=60, rows_per_step=8, micro_rows=8)) == 0
    values, uniform = losses(tmp_path / "run"), math.log(make_plan(recipe(tmp_path)).model.vocab_size - 2)
    assert sum(values[:5]) / 5 > 0.8 * uniform
    assert sum(values[-20:]) / 20 < 0.85 * uniform


@pytest.mark.parametrize("micro_rows", [1, 4])
def test_accumulation_does_not_change_the_losses(plain, tmp_path, micro_rows):
    assert train(recipe(tmp_path, ema_decay=0.9, micro_rows=micro_rows)) == 0
    assert [r["rows_hash"] for r in records(tmp_path / "run")] == [r["rows_hash"] for r in records(plain)]
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "run")), torch.tensor(losses(plain)), rtol=1e-5, atol=0)
    norms = [[r["gradient_norm"] for r in records(run)] for run in (tmp_path / "run", plain)]
    torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-4, atol=0)


def test_validation_is_recorded_with_its_error_and_is_repeatable(plain):
    found = records(plain, "validation")
    assert [record["step"] for record in found] == [10, 20]
    for record in found:
        assert 0 < record["nats_per_token_error"] < record["nats_per_token"]
        assert record["bits_per_byte"] > 0
        assert sum(name.startswith("nll_level_") for name in record) == 10


def test_bidirectional_rows_train_through_the_same_code(tmp_path):
    # the recipe's chunks, which a model of attention does not have, do not stand in the way
    assert train(recipe(tmp_path, "model.block=row", "model.pattern=AA", "model.chunk_length=8", steps=3)) == 0
    config, _ = load_weights(tmp_path / "run", ema=False)
    assert config.block_length == config.chunk_length == 32
    with pytest.raises(InputError, match="attention alone"):
        train(recipe(tmp_path, "model.block=row", f"run={tmp_path}/other"))


@pytest.mark.parametrize("frontiers", ["one", "2"])
def test_fewer_frontiers_train(tmp_path, frontiers):
    assert train(recipe(tmp_path, f"objective.frontiers={frontiers}", steps=3)) == 0
    supervised = [r["supervised_tokens_per_second"] / r["unique_tokens_per_second"] for r in records(tmp_path / "run")]
    assert all(share <= (1 if frontiers == "one" else 2) * 8 / 32 for share in supervised)


def test_init_from_starts_with_the_weights_of_a_release(plain, tmp_path):
    from mezzotint.models.weights import save_weights

    config, weights = load_weights(plain, ema=False)
    model = Denoiser(config)
    model.load_state_dict(weights)
    save_weights(model, tmp_path / "release")
    section = {"model": {"chunk_length": 16}, "init_from": str(tmp_path / "release"), "optim": {"lr": 1e-9}, "steps": 1}
    assert train(recipe(tmp_path, **section)) == 0
    resolved, found = load_weights(tmp_path / "run", ema=False)
    assert resolved.pattern == config.pattern and resolved.chunk_length == 16
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)
    with pytest.raises(InputError, match=r"mlp\.down_proj\.weight is 32x32 there, 32x64 in this recipe"):
        train(recipe(tmp_path, f"run={tmp_path / 'other'}", "model.d_ff=64", **section))


def test_init_from_refuses_a_release_of_another_tokenizer(plain, tmp_path):
    from mezzotint.models.weights import save_weights

    save_weights(Denoiser(load_weights(plain, ema=False)[0]), tmp_path / "release")
    (tmp_path / "text.txt").write_text("other words than those of the corpus " * 9)
    source = SourceConfig(input=str(tmp_path / "text.txt"))
    train_tokenizer(TrainTokenizerConfig(out=str(tmp_path / "release"), source=source, vocab_size=300))
    with pytest.raises(InputError, match="was trained with another tokenizer"):
        train(recipe(tmp_path, model={}, init_from=str(tmp_path / "release")))


def test_a_loss_that_is_not_finite_past_the_budget_stops_with_code_86_before_the_update(tmp_path, monkeypatch, capsys):
    from mezzotint.training.objective import Objective

    forward, calls = Objective.forward, []

    def poisoned(self, *inputs):
        calls.append(1)
        loss, sums = forward(self, *inputs)
        return (loss * float("nan") if len(calls) == 13 else loss), sums  # the first micro-batch of step 7

    monkeypatch.setattr(Objective, "forward", poisoned)
    overrides = ("checkpoint.every=3", "guard.skip_budget=0")
    assert train(recipe(tmp_path, *overrides)) == DIVERGED
    assert "step 7: loss or gradient is not finite (rows " in capsys.readouterr().out
    assert (tmp_path / "run" / "latest").read_text() == "step-6\n"  # its save was under way
    monkeypatch.undo()
    assert train(recipe(tmp_path, *overrides)) == 0
    assert [r["step"] for r in records(tmp_path / "run")] == list(range(1, 21))

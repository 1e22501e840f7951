"""`mezzotint-train adapters`: what is distilled, that only soft tokens move, resumed runs, refused input."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from support import assert_close, generator, ordinary, tiny_config, tiny_model
from tasks_support import byte_tokenizer

from mezzotint.data.prepare import PrepareConfig, prepare
from mezzotint.data.sources import SourceConfig
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.launch import train as command
from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.policies.adapters import fresh_adapters, load_adapters
from mezzotint.models.policies.bidirectional import decode_canvas
from mezzotint.models.policies.kv_packet import KVPacket
from mezzotint.models.reveal import TopK
from mezzotint.models.weights import load_model, save_weights
from mezzotint.training.adapters import AdaptersConfig
from mezzotint.training.adapters_objective import AdapterObjective, SoftTokens, divergence
from mezzotint.training.noise import NoiseSource

ROW = 48


def release(folder: Path, pattern: str, block: int) -> Path:
    byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    sizes = {"block_length": block, "chunk_length": block, "vocab_size": tokenizer.vocab_size, "init_std": 0.3}
    config = preset("debug", "hybrid", pattern=pattern, **ids, **sizes)
    save_weights(Denoiser(config, generator=generator(1)), folder)
    (folder / "training.yaml").write_text(f"data:\n  row_length: {ROW}\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    release(folder / "row", "AA", ROW)
    release(folder / "causal", "AA", 8)
    release(folder / "hybrid", "MA", 8)
    lines = [f"def area_{i}(width, height):\n    return width * height + {i}\n" for i in range(300)]
    (folder / "text.txt").write_text("".join(lines))
    source = SourceConfig(input=str(folder / "text.txt"))
    prepare(PrepareConfig(tokenizer=str(folder / "row"), out=str(folder / "prepared"), source=source, workers=1))
    return folder


def run(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["mezzotint-train", "adapters", *map(str, arguments)])
    return command.main()


def asked(made: Path, name: str, folder: Path, *more: object) -> tuple:
    sizes = ("--row-length", ROW, "--rows-per-step", 4, "--micro-rows", 2, "--header", 2, "--trailer", 2)
    return (made / name, "--data", made / "prepared", "--run", folder, *sizes, *more)


# -- the objective ---------------------------------------------------------------------------------------------------


def objective_of(bidirectional: bool):
    model = tiny_model(tiny_config("AA", 16 if bidirectional else 4)).eval().requires_grad_(False)
    soft = SoftTokens(fresh_adapters(model, header=2, trailer=1, std=0.5))
    spans = ((0, 4), (4, 8))
    objective = AdapterObjective(model, soft, spans=spans, bidirectional=bidirectional)
    source = NoiseSource(
        seed=3, rows_per_step=6, row_blocks=1 if bidirectional else 2, slots=1, block_length=8 if bidirectional else 4
    )
    noise = source.draw(step=0, first_row=0, blocks=torch.full((6,), source.row_blocks))
    return model, soft, objective, noise, ordinary(model.config, (6, 16), generator(5))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_loss_is_the_divergence_from_the_model_that_sees_everything(bidirectional):
    """Row by row: the teacher is the model's own pass; without soft tokens and one document at the start there is none."""
    model, soft, objective, noise, tokens = objective_of(bidirectional)
    loss, sums = objective(tokens, torch.zeros_like(tokens), noise)
    gradients = torch.autograd.grad(loss, [soft.header, soft.trailer])
    assert float(loss.detach()) > 0 and all(bool((g != 0).all()) for g in gradients)
    assert_close(sums.nll.sum(), loss.detach())
    for row in range(6):
        one, _ = objective(tokens[row : row + 1], tokens[row : row + 1] * 0, noise.select(torch.tensor([row])))
        assert_close(one.detach(), sums.nll[row, 0])
    if not bidirectional:  # a causal document at the very start, alone and bare, is the prefix itself
        bare = SoftTokens(fresh_adapters(model, header=0, trailer=0))
        whole = AdapterObjective(model, bare, spans=((0, 8),), bidirectional=False)
        assert abs(float(whole(tokens, tokens * 0, noise)[0].detach())) < 1e-10


def test_gradients_of_the_soft_tokens_are_those_of_finite_differences():
    for bidirectional in (True, False):
        _, soft, objective, noise, tokens = objective_of(bidirectional)
        loss, _ = objective(tokens, tokens * 0, noise)
        gradient = torch.autograd.grad(loss, soft.header)[0]
        step = 1e-6
        with torch.no_grad():
            around = []
            for sign in (1, -1):
                soft.header[1, 3] += sign * step
                around.append(float(objective(tokens, tokens * 0, noise)[0]))
                soft.header[1, 3] -= sign * step
        assert math.isclose((around[0] - around[1]) / (2 * step), float(gradient[1, 3]), rel_tol=1e-5)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_trained_soft_tokens_bring_the_student_nearer_and_leave_the_denoiser_alone(bidirectional):
    model, _, objective, noise, tokens = objective_of(bidirectional)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(objective.parameters(), lr=0.05, weight_decay=0.0)
    losses = []
    for _ in range(30):
        loss, _ = objective(tokens, tokens * 0, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0], losses
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name for name, _ in objective.named_parameters()} == {"model.header", "model.trailer"}


def test_the_teacher_is_the_models_training_pass():
    model, _, objective, _, tokens = objective_of(True)
    tokens[:, 9:12] = 0
    with torch.no_grad():
        want = model(tokens[:, :0], tokens[:, None], torch.zeros(6, 1, dtype=torch.long))[:, 0, 8:]
        assert_close(objective._teacher(tokens, 8), want)


def test_divergence_against_its_formula():
    teacher, student = (torch.randn(3, 5, generator=generator(s), dtype=torch.float64) for s in (1, 2))
    teacher[:, 0] = student[:, 0] = -torch.inf
    p, q = teacher.softmax(-1), student.softmax(-1)
    want = [sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p[m, 1:], q[m, 1:])) for m in range(3)]
    assert_close(divergence(teacher, student), torch.tensor(want, dtype=torch.float64))


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["row", "causal"])
def test_soft_tokens_are_trained_and_nothing_else(made, tmp_path, monkeypatch, capsys, name):
    before = {path.name: path.read_bytes() for path in (made / name).iterdir()}
    assert run(monkeypatch, *asked(made, name, tmp_path / "run", "--steps", 20, "--lr", 0.05, "--every", 10)) == 0
    printed = capsys.readouterr().out
    assert "step 20 of 20: KL" in printed and "whose weights are unchanged" in printed
    assert {path.name: path.read_bytes() for path in (made / name).iterdir()} == before
    found = load_adapters(tmp_path / "run" / "adapters.safetensors")
    start = fresh_adapters(load_model(made / name), header=2, trailer=2)
    assert found.header.shape == (2, 64) and found.fingerprint != start.fingerprint
    if name == "row":
        model = load_model(made / name)
        prompts = ordinary(model.config, (2, 30), generator(1)).tolist()
        policy = KVPacket(adapters=found)
        got = decode_canvas(
            model, prompts, policy=policy, new_tokens=8, block=4, reveal=TopK(steps=2), spans=((0, 10), (10, 20))
        )
        assert got.cost.effective["soft_tokens"] == 4


def test_a_run_that_stopped_goes_on_to_the_same_adapters(made, tmp_path, monkeypatch, capsys):
    steps = ("--steps", 6, "--every", 3)
    assert run(monkeypatch, *asked(made, "causal", tmp_path / "a", *steps)) == 0
    assert run(monkeypatch, *asked(made, "causal", tmp_path / "b", *steps)) == 0
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-6")
    (tmp_path / "b" / "adapters.safetensors").unlink()
    assert run(monkeypatch, *asked(made, "causal", tmp_path / "b", *steps)) == 0
    assert "at step 3" in capsys.readouterr().out
    a, b = ((tmp_path / name / "adapters.safetensors").read_bytes() for name in "ab")
    assert a == b
    assert run(monkeypatch, *asked(made, "causal", tmp_path / "b", "--steps", 6, "--lr", 0.1)) == 2
    assert "this start has 0.1" in capsys.readouterr().err


def test_what_cannot_be_trained_is_refused_in_a_sentence(made, tmp_path, monkeypatch, capsys):
    for name, more, sentence in (
        ("hybrid", (), "adapters are for attention alone"),
        ("row", ("--share", 1.5), "share is 1.5"),
        ("row", ("--header", 0, "--trailer", 0), "no soft token to train"),
        ("row", ("--documents", 99), "cannot be 99 documents"),
        ("row", ("--lr", 0), "lr is 0"),
        ("row", ("--lr", "nan"), "lr is nan"),
        ("row", ("--lr", "inf"), "lr is inf"),
        ("row", ("--lr", "1e38"), "lr is 1e+38"),
        ("row", ("--run", made / "prepared"), "is prepared data"),
        ("row", ("--seed", 2**70), "seed is 1180591620717411303424"),
        ("row", ("--run", "/proc/x/y"), "the run folder /proc/x/y cannot be written"),
        ("row", ("--run", made / "row" / "training.yaml"), "cannot be written"),
        ("row", ("--run", made / "row"), "is a release"),
        ("row", ("--row-length", 96), "longer than the 48"),
        ("causal", ("--row-length", 50), "no multiple of block_length 8"),
    ):
        assert run(monkeypatch, *asked(made, name, tmp_path / "run", *more)) == 2
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert told.startswith("error: ") and sentence in told, told
        assert not (tmp_path / "run").exists()
    shutil.copytree(made / "row", tmp_path / "row")
    (tmp_path / "row" / "training.yaml").write_text("data: 3\n")
    assert run(monkeypatch, *asked(tmp_path, "row", tmp_path / "run")) == 2
    assert "does not say how long the training rows were" in capsys.readouterr().err
    assert AdaptersConfig(release="r", data="d", run="x", row_length=64).spans(8, bidirectional=False) == (
        (0, 16),
        (16, 32),
    )

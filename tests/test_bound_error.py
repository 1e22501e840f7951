"""The study of the bound's error: its estimators are unbiased, and on a trained model ours is four times as sure."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "eval" / "studies" / "bound_error.py"


def load_study():
    spec = importlib.util.spec_from_file_location("bound_error", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bound_error"] = module
    spec.loader.exec_module(module)
    return module


study = load_study()


@pytest.mark.parametrize("name", list(study.ESTIMATORS))
@pytest.mark.parametrize("draws", [4, 12])
def test_every_estimator_weighs_every_token_once_in_expectation(name, draws):
    """With a loss of its own for each token, whatever the others, the bound is the sum of the losses."""
    rng, tries = random.Random(0), 4000
    carried = np.zeros(8)
    for _ in range(tries):
        for masked, weight in study.ESTIMATORS[name](8, draws, rng):
            carried[list(masked)] += weight / tries
    np.testing.assert_allclose(carried, 1.0, atol=0.15)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_error_at_32_draws_is_at_most_a_quarter_of_the_usual_one():
    model, rows = study.small_model(steps=150, seed=0)
    blocks = study.some_blocks(model, rows, count=6, generator=torch.Generator().manual_seed(0))
    assert model.config.block_length == 32

    def error(name: str) -> float:
        return study.deviation(model, blocks, name, draws=32, repeats=24, rng=random.Random(0))[1]

    assert 0 < error("allocated and balanced (ours)") <= error("uniform mask ratio (usual)") / 4


def test_half_of_a_release_is_refused_in_a_sentence():
    command = [sys.executable, str(SCRIPT), "--release", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--release and --data belong together" in done.stderr
    assert "Traceback" not in done.stderr

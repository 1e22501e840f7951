"""What a denoiser refuses in a sentence, what its state keeps in which dtype, and the noise level as an input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import PATTERNS, assert_close, random_case, state_bytes_of, tiny_config, tiny_model, training_logits

from mezzotint.models.errors import InputError
from mezzotint.models.state import State

every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


def test_what_a_pass_refuses():
    model = tiny_model(tiny_config("AM"))
    case = random_case(model.config, blocks=3)
    with pytest.raises(InputError, match="no multiple of the block length 4"):
        model(case.clean[:, :7], case.noisy, case.frontiers)
    with pytest.raises(InputError, match="beyond the 3 clean blocks"):
        model(case.clean, case.noisy, case.frontiers + 2)
    with pytest.raises(InputError, match="documents name 8 tokens"):
        model(case.clean, case.noisy, case.frontiers, documents=torch.zeros(2, 8, dtype=torch.int64))


def test_what_a_state_refuses():
    model = tiny_model(tiny_config("AM"))
    case = random_case(model.config, blocks=3)
    state = model.start(2, 8)
    with pytest.raises(InputError, match="room for 8 tokens, 12 are needed"):
        model.commit(case.clean, state)
    with pytest.raises(InputError, match="holds 2 rows, but 1"):
        model.denoise(case.noisy[:1, 0], state)
    with pytest.raises(InputError, match="between 0 and the 2 clean blocks"):
        model.commit(case.clean[:, :8], state, blocks=torch.tensor([3, 0]))
    assert state.length.tolist() == [0, 0]
    model.commit(case.clean, state, blocks=torch.tensor([2, 1]))  # only valid blocks need room


def test_what_a_saved_state_refuses(tmp_path: Path):
    path = tmp_path / "state.safetensors"
    with pytest.raises(InputError, match="cannot be read"):
        State.load(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="cannot be read"):
        State.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="no saved state"):
        State.load(path)
    save_file({"length": torch.zeros(1)}, path, metadata={"mezzotint_state": json.dumps({"format": 99})})
    with pytest.raises(InputError, match="format 99"):
        State.load(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("dtype, wide", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_ssm_state_is_wide(dtype: torch.dtype, wide: torch.dtype):
    keys, ssm = tiny_model(tiny_config("AM")).start(2, 8, dtype=dtype).layers
    assert (keys.k.dtype, keys.v.dtype, ssm.ssm.dtype, ssm.conv.dtype) == (dtype, dtype, wide, dtype)


@every_pattern
@torch.no_grad()
def test_float32_agrees(pattern: str):
    """Float32 decoding equals float64 training to float32's precision."""
    model = tiny_model(tiny_config(pattern))
    case = random_case(model.config, blocks=4, documents=False)
    expected = training_logits(model, case)[:, 3].float()
    model.float()
    state = model.commit(case.clean[:, :12], model.start(2, 16))
    assert_close(model.denoise(case.noisy[:, 3], state), expected, 1e-4)


@every_pattern
@torch.no_grad()
def test_a_noise_level_stays_out_of_the_state(pattern: str, tmp_path: Path):
    """With the level as an input training still equals decoding, logits feel it, and the state does not."""
    model = tiny_model(tiny_config(pattern, noise_level_input=True))
    case = random_case(model.config, blocks=3, documents=False)
    trained = training_logits(model, case)
    logits, states = [], []
    for level in (None, torch.full((2, 1), 0.3)):
        state = model.commit(case.clean[:, :4], model.start(2, 16))
        _, state = model.advance(case.clean[:, 4:8], case.noisy[:, 2], state, levels=level)
        logits.append(model.denoise(case.noisy[:, 2], state, levels=level))
        states.append(state_bytes_of(state, tmp_path))
    assert_close(logits[0], trained[:, 2])
    assert states[0] == states[1]
    assert (logits[0] - logits[1])[logits[0].isfinite()].abs().min() > 0

"""A Mamba layer's step in plain torch against token-by-token oracles, and who takes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import assert_close, generator, tiny_config, tiny_model
from test_triton_block_step import CASES, Sizes, inputs, oracle

from mezzotint.models.layout import make_layout
from mezzotint.models.ops import torch_step
from mezzotint.models.ops.torch_step import block_step

SERVED = {name: sizes for name, sizes in CASES.items() if sizes.G >= sizes.W - 1}


def step(s: Sizes, projected, state, tail, weights, *, asked: int):
    """`asked`: tokens whose outputs are wanted, the last ones."""
    z, u, dt = projected.split([s.H * s.P, s.channels, 2 * s.H], dim=-1)
    u, dt = u.unflatten(1, (-1, s.G)), dt.unflatten(1, (-1, s.G)).unflatten(-1, (2, s.H))
    valid = None if s.valid is None else torch.tensor(s.valid)
    return block_step(z[:, z.shape[1] - asked :], u, dt, state, tail, weights, valid, s.clean)


@torch.no_grad()
@pytest.mark.parametrize("name", SERVED)
def test_step_is_the_oracle(name):
    """All outputs, and those of the noisy block alone, as in a last layer."""
    s = SERVED[name]
    arguments = inputs(s)
    y, state, tail = oracle(s, *arguments)
    for asked in {(s.clean + s.noisy) * s.G, s.noisy * s.G}:
        found = step(s, *arguments, asked=asked)
        assert_close(found[0], y[:, y.shape[1] - asked :])
        assert_close(found[1], state)
        assert_close(found[2], tail)


@torch.no_grad()
def test_what_does_not_count_may_be_anything():
    """A clean block of padding that is not even finite moves neither state nor the noisy block."""
    s = replace(SERVED["advance"], valid=(1, 0))
    projected, state, tail, weights = inputs(s)
    y, _, _ = step(s, projected, state, tail, weights, asked=s.G)
    projected[1, : s.G] = torch.inf
    again, after, following = step(s, projected, state, tail, weights, asked=s.G)
    assert torch.equal(again, y)
    assert torch.equal(after[1], state[1]) and torch.equal(following[1], tail[1])


@torch.no_grad()
def test_a_mixer_steps_where_it_can(monkeypatch):
    """One block behind a state goes through the step; several, or blocks below the convolution's reach, the general way."""
    mixer = tiny_model(tiny_config("M")).layers[0].mixer
    monkeypatch.setattr(torch_step, "block_step", lambda *_: pytest.fail("stepped"))
    state = mixer.start(1, 0, torch.float64, torch.device("cpu"))
    x = torch.randn(1, 8, 12, dtype=torch.float64, generator=generator())
    one, two = ({"block_length": 4, "clean_tokens": t, "frontiers": torch.full((1, 1), t // 4)} for t in (4, 8))
    mixer(torch.cat([x, x[:, :4]], dim=1), make_layout(**two), state)
    mixer(x[:, :4], make_layout(block_length=2, clean_tokens=2, frontiers=torch.full((1, 1), 1)), state)
    with torch.enable_grad():
        mixer(x, make_layout(**one), state)
    with pytest.raises(pytest.fail.Exception, match="stepped"):
        mixer(x, make_layout(**one), state)

"""The Triton step of a Mamba layer against token-by-token oracles, in Triton's interpreter or on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from oracles import block_conv_oracle, ssd_oracle
from support import generator
from torch import Tensor
from torch.nn import functional as F
from triton_support import CUDA, DEVICE, DTYPE, MARKS, close, on_device

from mezzotint.models.ops.triton_block_step import StepWeights, block_step

pytestmark = MARKS
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    B: int
    G: int
    H: int
    P: int
    N: int
    W: int = 4
    clean: int = 0
    noisy: int = 1
    valid: tuple[int, ...] | None = None

    @property
    def channels(self) -> int:
        return self.H * self.P + 2 * self.N

    @property
    def width(self) -> int:
        return self.H * self.P + self.channels + 2 * self.H


def inputs(s: Sizes, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, StepWeights]:
    """Random float64 arguments; step sizes around 0.5, decays around exp(-0.5)."""
    g = generator(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=g, dtype=torch.float64)

    weights = StepWeights(
        conv_weight=normal(s.channels, s.W, scale=0.5), conv_bias=normal(s.channels, scale=0.3),
        dt_bias=normal(2, s.H) - 0.5, A_log=normal(s.H, scale=0.3), D=1 + normal(s.H, scale=0.3),
        norm=1 + normal(s.H * s.P, scale=0.3), eps=EPS,
    )  # fmt: skip
    projected = normal(s.B, (s.clean + s.noisy) * s.G, s.width)
    return projected, normal(s.B, s.N, s.H, s.P), normal(s.B, s.W - 1, s.channels), weights


def oracle(s: Sizes, projected: Tensor, state: Tensor, tail: Tensor, w: StepWeights) -> tuple[Tensor, Tensor, Tensor]:
    """The same step row by row from the literal loops of `oracles.py`."""
    inner, outputs, states, tails = s.H * s.P, [], [], []
    for r in range(s.B):
        counts = s.clean if s.valid is None else s.valid[r]
        z, u, dt = projected[r].split([inner, s.channels, 2 * s.H], dim=-1)
        z, u, dt = (t.unflatten(0, (-1, s.G)) for t in (z, u, dt))
        if s.clean and not counts:
            u = torch.cat([torch.zeros_like(u[:1]), u[1:]])
        before = torch.cat([tail[r], *u[:counts]])  # inputs left of the noisy block
        lefts = [tail[r]] * s.clean + [before[-(s.W - 1) :]] * s.noisy
        u = block_conv_oracle(u[None], torch.stack(lefts)[None], w.conv_weight, w.conv_bias)
        steps = F.softplus(dt.unflatten(-1, (2, s.H)) + w.dt_bias)
        if s.clean and not counts:
            steps = torch.cat([torch.zeros_like(steps[:1]), steps[1:]])
        x, B, C = u.split([inner, s.N, s.N], dim=-1)
        x = x.unflatten(-1, (s.H, s.P))
        y, after = ssd_oracle(
            x, steps[None], -w.A_log.exp(), B, C, clean_blocks=s.clean,
            frontiers=torch.full((1, s.noisy), counts), starts=torch.zeros(1, 2, dtype=torch.int64), state=state[r : r + 1],
        )  # fmt: skip
        y = (y + w.D[:, None] * x).flatten(3)[0] * F.silu(z)
        outputs.append((y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * w.norm).flatten(0, 1))
        states.append(after[0])
        tails.append(before[-(s.W - 1) :])
    return torch.stack(outputs), torch.stack(states), torch.stack(tails)


def step(s: Sizes, projected: Tensor, state: Tensor, tail: Tensor, w: StepWeights) -> tuple[Tensor, Tensor, Tensor]:
    values = on_device(w.conv_weight, w.conv_bias, w.dt_bias, w.A_log, w.D, w.norm)
    valid = None if s.valid is None else torch.tensor(s.valid)
    arguments = on_device(projected, state, tail)
    return block_step(*arguments, StepWeights(*values, EPS), block_length=s.G, clean_blocks=s.clean, valid=valid)


CASES = {
    "denoise": Sizes(B=2, G=5, H=3, P=6, N=7),
    "denoise, more than one slice of P and N": Sizes(B=1, G=3, H=1, P=70, N=67),
    "commit": Sizes(B=1, G=5, H=3, P=6, N=7, clean=1, noisy=0),
    "commit of rows that do not all count": Sizes(B=3, G=3, H=2, P=5, N=9, clean=1, noisy=0, valid=(0, 1, 0)),
    "advance": Sizes(B=2, G=5, H=3, P=6, N=7, clean=1),
    "advance of rows that do not all count": Sizes(B=3, G=5, H=2, P=6, N=19, clean=1, valid=(1, 0, 1)),
    "blocks shorter than the convolution": Sizes(B=2, G=2, H=2, P=3, N=5, W=5, clean=1, valid=(1, 0)),
    "blocks of one token": Sizes(B=2, G=1, H=2, P=3, N=5, W=4, clean=1),
    "blocks of 33": Sizes(B=1, G=33, H=2, P=3, N=5, clean=1),
}


@pytest.mark.parametrize("name", CASES)
def test_step_is_the_oracle(name):
    s = CASES[name]
    arguments = inputs(s)
    for found, expected in zip(step(s, *arguments), oracle(s, *arguments)):
        close(found, expected)


def test_small_steps_keep_their_digits():
    """float32: dt near 1e-6, where log(1 + u) alone would be off by 5%; all that the state holds was just written."""
    s = Sizes(B=1, G=4, H=2, P=3, N=5, clean=1)
    projected, state, tail, w = inputs(s)
    projected[..., -2 * s.H :] -= 14.0
    state.zero_()
    narrow = [t.float().to(DEVICE) for t in (projected, state, tail)]
    values = [t.float().to(DEVICE) for t in (w.conv_weight, w.conv_bias, w.dt_bias, w.A_log, w.D, w.norm)]
    _, after, _ = block_step(*narrow, StepWeights(*values, EPS), block_length=s.G, clean_blocks=1)
    expected = oracle(s, projected, state, tail, w)[1]
    assert 0 < expected.abs().max() < 1e-4
    close(after.cpu().double() / expected.abs().max(), expected / expected.abs().max(), 2e-5)


def test_denoise_leaves_its_state_alone():
    s = CASES["denoise"]
    projected, state, tail, w = inputs(s)
    state, tail = (t.to(DEVICE, DTYPE) for t in (state, tail))
    kept = state.clone(), tail.clone()
    values = on_device(w.conv_weight, w.conv_bias, w.dt_bias, w.A_log, w.D, w.norm)
    for _ in range(2):
        _, after, tail_after = block_step(
            projected.to(DEVICE, DTYPE), state, tail, StepWeights(*values, EPS), block_length=s.G, clean_blocks=0
        )
    assert after is state and tail_after is tail
    assert torch.equal(state, kept[0]) and torch.equal(tail, kept[1])


@pytest.fixture
def sparse(tmp_path, monkeypatch):
    """Makes float32 tensors of 2^32 and some elements, holes of a sparse file that only the interpreter can walk over."""
    if CUDA:
        pytest.skip("17 GB of a sparse file stand for a device's memory in the interpreter only")
    from triton.runtime import interpreter

    # the interpreter copies the arguments' whole storage back after a run, holes included
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    return lambda name: torch.from_file(str(tmp_path / name), shared=True, size=2**32 + 64, dtype=torch.float32)


def test_norm_of_rows_beyond_two_to_the_31_elements(sparse):
    """Row 4 begins at 2^32, where 32-bit offsets wrap around to row 0."""
    from mezzotint.models.ops.triton_block_step import _norm_kernel, tl

    gated, out = sparse("gated"), sparse("out")
    gated[:4], gated[2**32 : 2**32 + 4] = torch.tensor([1.0, 2, 3, 4]), torch.tensor([-1.0, 5, -5, 7])
    _norm_kernel[(5,)](gated, torch.ones(16), out, 2**30, 0.0, BLOCK=4, WIDE=tl.float32)
    assert torch.equal(out[2**32 : 2**32 + 4].sign(), torch.tensor([-1.0, 1, -1, 1]))


def test_convolution_of_rows_beyond_two_to_the_31_elements(sparse):
    from mezzotint.models.ops.triton_block_step import _conv_kernel, tl

    tokens, width, channels, rows = 2**15, 2**15, 2, 5
    proj, weight, bias = sparse("proj"), torch.ones(channels, 2), torch.zeros(channels)
    proj[2**32 + 1 : 2**32 + 3] = torch.tensor([3.0, 4.0])  # row 4, token 0, behind one column of z
    out = torch.empty(rows * tokens * channels)
    _conv_kernel[(rows, 1, 1)](
        proj, torch.zeros(rows, 1, channels), proj, weight, bias, out, width, tokens, 1, 1, channels, W=2, CLEAN=0,
        CHECKED=False, BG=16, BC=16, WIDE=tl.float32,
    )  # fmt: skip
    found = out.view(rows, tokens, channels)[:, 0]
    assert torch.equal(found[0], torch.zeros(2))
    close(found[4], F.silu(torch.tensor([3.0, 4.0])), 1e-6)

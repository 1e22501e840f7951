"""SSD against its token-by-token recurrence, outputs and gradients; the recurrence itself against hand figures."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from oracles import (
    backward_double_sum,
    ssd_oracle,
    ssd_row,
)
from support import assert_close, assert_same_gradients, generator, gradients_of, random_lengths, starts_of
from torch import Tensor

from mezzotint.models.ops.ssd import ssd

# ---- the oracles themselves, by hand ------------------------------------------------------------------------------


def test_ssd_oracle_by_hand():
    """One head of size 1, one state, A = -1, a block of three, entering state 10, B = C = 1: figures on paper."""
    x, one = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), torch.ones(1, 3, 1, dtype=torch.float64)
    dt = torch.tensor([[0.1, 0.5], [0.2, 0.6], [0.3, 0.7]], dtype=torch.float64).reshape(1, 3, 2, 1)
    y, state = ssd_row(
        x.reshape(1, 3, 1, 1),
        dt,
        -torch.ones(1, dtype=torch.float64),
        one,
        one,
        clean_blocks=1,
        frontiers=[],
        starts=[0],
        state=torch.full((1, 1, 1), 10.0, dtype=torch.float64),
    )
    e = math.exp
    h0 = 10 * e(-0.1) + 0.1 * 1
    h1 = h0 * e(-0.2) + 0.2 * 2
    h2 = h1 * e(-0.3) + 0.3 * 4
    backward = [e(-0.5) * 0.6 * 2 + e(-0.5 - 0.6) * 0.7 * 4, e(-0.6) * 0.7 * 4, 0.0]
    expected = torch.tensor([h0 + backward[0], h1 + backward[1], h2], dtype=torch.float64)
    assert_close(y.flatten(), expected, 1e-14)
    assert_close(state.flatten(), expected[2:], 1e-14)


def test_backward_recurrence_is_the_double_sum():
    case = SsdCase.random(lengths=[[1]], frontiers=[[]], block_length=6)
    y, _ = ssd_oracle(**case.arguments())
    silent = case.arguments() | {"dt": case.dt * torch.tensor([1.0, 0.0], dtype=torch.float64)[:, None]}
    forward_only, _ = ssd_oracle(**silent)
    expected = backward_double_sum(case.x[0, 0], case.dt[0, 0, :, 1], case.A, case.B[0, 0], case.C[0, 0])
    assert_close((y - forward_only)[0, 0], expected, 1e-14)


# ---- SSD ----------------------------------------------------------------------------------------------------------


@dataclass
class SsdCase:
    """Arguments of `ssd` and its oracle, all leaves that want gradients."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    state: Tensor
    clean_blocks: int
    frontiers: Tensor
    starts: Tensor

    @classmethod
    def random(
        cls,
        *,
        lengths: list[list[int]],
        frontiers: list[list[int]],
        block_length: int,
        entering: bool = True,
        seed: int = 3,
    ):
        """`lengths`: a row's documents in blocks; frontiers may be one beyond the last block."""
        g = generator(seed)
        batch, clean_blocks, heads, p, n = len(lengths), sum(lengths[0]), 2, 3, 4
        m = clean_blocks + len(frontiers[0])

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64)

        starts = starts_of(lengths)
        beyond = starts[:, -1:] if clean_blocks else torch.zeros(batch, 1, dtype=torch.int64)
        case = cls(
            x=normal(batch, m, block_length, heads, p),
            dt=0.4 * torch.rand((batch, m, block_length, 2, heads), generator=g, dtype=torch.float64),
            A=-torch.rand(heads, generator=g, dtype=torch.float64) - 0.1,
            B=normal(batch, m, block_length, n),
            C=normal(batch, m, block_length, n),
            state=normal(batch, n, heads, p) * (1.0 if entering else 0.0),
            clean_blocks=clean_blocks,
            frontiers=torch.tensor(frontiers, dtype=torch.int64).reshape(batch, -1),
            starts=torch.cat([starts.reshape(batch, -1), beyond], dim=1),  # the document goes on beyond the last block
        )
        for leaf in case.leaves().values():
            leaf.requires_grad_()
        return case

    def leaves(self) -> dict[str, Tensor]:
        return {name: vars(self)[name] for name in ("x", "dt", "A", "B", "C", "state")}

    def arguments(self) -> dict:
        return dict(vars(self))


def check_ssd(case: SsdCase, chunk_blocks: int) -> None:
    y, state = ssd(**case.arguments(), chunk_blocks=chunk_blocks)
    expected_y, expected_state = ssd_oracle(**case.arguments())
    assert_close(y, expected_y)
    assert_close(state, expected_state)
    assert_same_gradients(
        gradients_of(case.leaves(), [y, state]), gradients_of(case.leaves(), [expected_y, expected_state])
    )


# a row of 7 blocks is no multiple of a chunk of 2, 3 or 5 blocks
ROWS = {
    "one document": [[7], [7]],
    "documents": [[2, 4, 1], [1, 1, 5]],
    "documents at chunk borders": [[3, 3, 1], [2, 2, 3]],
}
ALL_FRONTIERS = [list(range(8))] * 2


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("rows", ROWS)
def test_ssd(rows: str, chunk_blocks: int):
    check_ssd(SsdCase.random(lengths=ROWS[rows], frontiers=ALL_FRONTIERS, block_length=2), chunk_blocks)


@pytest.mark.parametrize("frontiers", [[[0], [7]], [[3], [2]], [[0, 5, 6], [1, 2, 7]], [[2, 2], [4, 4]]], ids=str)
@pytest.mark.parametrize("chunk_blocks", [1, 2, 7])
def test_ssd_with_few_frontiers(frontiers: list[list[int]], chunk_blocks: int):
    check_ssd(SsdCase.random(lengths=ROWS["documents"], frontiers=frontiers, block_length=3), chunk_blocks)


@pytest.mark.parametrize("block_length", [1, 2, 5, 8])
def test_ssd_block_lengths(block_length: int):
    case = SsdCase.random(lengths=[[2, 1], [1, 2]], frontiers=[[0, 1, 3], [0, 2, 2]], block_length=block_length)
    check_ssd(case, chunk_blocks=2)


@pytest.mark.parametrize(
    "lengths, frontiers", [([[3], [3]], [[], []]), ([[], []], [[0], [0]]), ([[1], [1]], [[1], [0]])], ids=str
)
def test_ssd_of_prefill_denoise_and_advance(lengths: list[list[int]], frontiers: list[list[int]]):
    """The three shapes of decoding: no noisy block, no clean token, one of each with a frontier per row."""
    check_ssd(SsdCase.random(lengths=lengths, frontiers=frontiers, block_length=4), chunk_blocks=1)


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3, 4])
def test_ssd_frontier_of_a_new_document_behind_the_last_block(chunk_blocks: int):
    """A cut row's frontier may open a document that has no clean block in the pass."""
    case = SsdCase.random(lengths=[[3], [1, 2]], frontiers=[[1, 3], [2, 3]], block_length=2)
    case.starts[0, 3] = 3
    check_ssd(case, chunk_blocks)


def test_ssd_with_decays_that_underflow():
    """Long steps: exp of a whole chunk's sum is 0, its inverse infinite; nothing may divide by it."""
    case = SsdCase.random(lengths=[[6]], frontiers=[list(range(7))], block_length=4)
    with torch.no_grad():
        case.dt.mul_(500.0)
    check_ssd(case, chunk_blocks=6)


def test_invalid_tokens_leave_the_state_alone():
    """Tokens with dt = 0 neither decay the state nor write into it, whatever they hold."""
    case = SsdCase.random(lengths=[[3], [3]], frontiers=[[1], [3]], block_length=2)
    with torch.no_grad():
        case.dt[0, 1:3] = 0.0
    _, state = ssd(**case.arguments(), chunk_blocks=3)
    with torch.no_grad():
        case.x[0, 1:3] = 1e9
    y, again = ssd(**case.arguments(), chunk_blocks=3)
    expected_y, expected = ssd_oracle(**case.arguments())
    assert torch.equal(state, again)
    assert_close(again, expected)
    assert_close(y[0, 3], expected_y[0, 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_ssd_grid(seed: int):
    g = generator(seed)
    blocks = int(torch.randint(1, 12, (), generator=g))
    count = int(torch.randint(1, 6, (), generator=g))
    lengths = [random_lengths(blocks, g) for _ in range(3)]
    frontiers = [sorted(torch.randint(0, blocks + 1, (count,), generator=g).tolist()) for _ in range(3)]
    case = SsdCase.random(lengths=lengths, frontiers=frontiers, block_length=1 + seed % 5, seed=seed)
    for chunk_blocks in range(1, blocks + 1):
        check_ssd(case, chunk_blocks)


# ---- the forward direction against other projects' plain-torch references -------------------------------------------


def load_reference(package: str, file: str, stubs: tuple[str, ...] = ()) -> types.ModuleType:
    """One file of an installed package, without importing the package (which wants a GPU); skips when it is absent."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    path = Path(next(iter(spec.submodule_search_locations))) / file
    if not path.exists():
        pytest.skip(f"{package} has no {file}")
    pytest.importorskip("einops", reason="the reference uses einops")
    for stub in stubs:  # imported by the file for its GPU self-test only
        name, _, attribute = stub.rpartition(".")
        module = types.ModuleType(name)
        setattr(module, attribute, None)
        sys.modules[name] = module
    try:
        file_spec = importlib.util.spec_from_file_location(f"reference_{package}", path)
        assert file_spec is not None and file_spec.loader is not None
        module = importlib.util.module_from_spec(file_spec)
        file_spec.loader.exec_module(module)
    finally:
        for stub in stubs:
            del sys.modules[stub.rpartition(".")[0]]
    return module


def forward_only_case() -> tuple[SsdCase, Tensor, Tensor]:
    """One document of 24 tokens whose backward direction is silent; flat x and forward dt beside it."""
    case = SsdCase.random(lengths=[[6], [6]], frontiers=[[], []], block_length=4)
    with torch.no_grad():
        case.dt[:, :, :, 1] = 0.0
    return case, case.x.flatten(1, 2), case.dt[:, :, :, 0].flatten(1, 2)


def test_forward_direction_is_mamba_ssm():
    reference = load_reference(
        "mamba_ssm",
        "modules/ssd_minimal.py",
        stubs=("mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined",),
    )
    case, x, dt = forward_only_case()
    B, C = (t.flatten(1, 2)[:, :, None] for t in (case.B, case.C))
    entering = case.state.permute(0, 2, 3, 1)[:, None]
    heads = x.shape[2]
    expected, state = reference.ssd_minimal_discrete(
        x * dt[..., None], dt * case.A, B.expand(-1, -1, heads, -1), C.expand(-1, -1, heads, -1), 8, entering
    )
    y, mine = ssd(**case.arguments(), chunk_blocks=3)
    assert_close(y.flatten(1, 2), expected)
    assert_close(mine.permute(0, 2, 3, 1), state)


def test_forward_direction_is_fla():
    """fla's reference computes in float32, hence the tolerance."""
    reference = load_reference("fla", "ops/simple_gla/naive.py")
    case, x, dt = forward_only_case()
    heads = x.shape[2]
    B, C = (t.flatten(1, 2)[:, :, None].expand(-1, -1, heads, -1) for t in (case.B, case.C))
    entering = case.state.detach().permute(0, 2, 1, 3).float()
    expected, state = reference.naive_recurrent_simple_gla(
        C, B, x * dt[..., None], dt * case.A, scale=1.0, initial_state=entering
    )
    y, mine = ssd(**case.arguments(), chunk_blocks=3)
    assert_close(y.flatten(1, 2), expected, 1e-5)
    assert_close(mine.permute(0, 2, 1, 3).float(), state, 1e-5)

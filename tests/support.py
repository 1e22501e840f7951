"""Tiny models, random rows with documents, and comparisons that the tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mezzotint.models.config import ModelConfig

PATTERNS = ("A", "M", "AM", "MMAM")
TOLERANCE = 1e-10
# block length, positions, blocks a chunk: every value of each at least once with every pattern
VARIANTS = [(1, "rope", 1), (1, "none", 3), (4, "rope", 2), (4, "none", 4), (16, "rope", 1), (32, "none", 2)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_config(pattern: str = "AM", block_length: int = 4, **overrides: object) -> ModelConfig:
    """A model of a few hundred parameters a layer; grouped-query and untied, so that every path is used."""
    values: dict = dict(
        pattern=pattern,
        vocab_size=40,
        d_model=12,
        d_ff=16,
        block_length=block_length,
        chunk_length=block_length,
        n_heads=4,
        n_kv_heads=2,
        head_dim=4,
        expand=2,
        d_state=5,
        ssm_head_dim=8,
        tie_embeddings=False,
    )
    return ModelConfig.from_dict(values | overrides)


def variant(pattern: str, block_length: int, positions: str, chunk_blocks: int) -> ModelConfig:
    """A tiny model by what the parity tests vary; chunk_blocks is Q / G."""
    return tiny_config(pattern, block_length, positions=positions, chunk_length=block_length * chunk_blocks)


def tiny_model(config: ModelConfig, seed: int = 0):
    """A float64 denoiser whose parameters are all large enough that a dropped term moves logits by far over 1e-10."""
    from mezzotint.models.denoiser import Denoiser

    model = Denoiser(config).double()
    g = generator(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
            if name.endswith("norm.weight") or name.endswith(".D"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(0.3 * noise - 0.5)  # decays around exp(-0.6 dt): a state that is felt some blocks later
            elif name.endswith("dt_bias"):
                parameter.copy_(0.3 * noise - 0.5)
            elif parameter.dim() == 1 or "embed" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    return model


@dataclass(frozen=True)
class Case:
    """Arguments of a training pass."""

    clean: Tensor  # (B, m*G)
    noisy: Tensor  # (B, K, G)
    frontiers: Tensor  # (B, K)
    documents: Tensor | None  # (B, T')


def ordinary(config: ModelConfig, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Random token ids that are neither mask nor pad."""
    allowed = [t for t in range(config.vocab_size) if t not in (config.mask_token_id, config.pad_token_id)]
    return torch.tensor(allowed)[torch.randint(len(allowed), shape, generator=g)]


def noisy_canvas(config: ModelConfig, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Random tokens, about half of them masked."""
    tokens = ordinary(config, shape, g)
    return tokens.masked_fill(torch.rand(shape, generator=g) < 0.5, config.mask_token_id)


def documents_of(lengths: list[list[int]], block_length: int) -> Tensor:
    """Document ids (B, T) from every row's document lengths in blocks."""
    rows = [[d for d, n in enumerate(row) for _ in range(n * block_length)] for row in lengths]
    return torch.tensor(rows)


def random_lengths(blocks: int, g: torch.Generator) -> list[int]:
    """Lengths of documents, in blocks, that fill a row of `blocks`."""
    lengths = []
    while sum(lengths) < blocks:
        lengths.append(min(int(torch.randint(1, 4, (), generator=g)), blocks - sum(lengths)))
    return lengths


def random_case(
    config: ModelConfig,
    *,
    batch: int = 2,
    blocks: int = 4,
    frontiers: list[list[int]] | None = None,
    documents: bool = True,
    seed: int = 1,
) -> Case:
    """Random rows of `blocks` blocks; all frontiers unless given (one list a row)."""
    g = generator(seed)
    places = torch.tensor(frontiers if frontiers is not None else [list(range(blocks))] * batch)
    ids = documents_of([random_lengths(blocks, g) for _ in range(batch)], config.block_length) if documents else None
    return Case(
        clean=ordinary(config, (batch, blocks * config.block_length), g),
        noisy=noisy_canvas(config, (batch, places.shape[1], config.block_length), g),
        frontiers=places,
        documents=ids,
    )


def parameters_of(model) -> dict[str, Tensor]:
    """Parameters by name, as the oracle reads them."""
    return dict(model.named_parameters())


def training_logits(model, case: Case) -> Tensor:
    """The training pass of a case: (B, K, G, V)."""
    return model(case.clean, case.noisy, case.frontiers, documents=case.documents)


def starts_of(lengths: list[list[int]]) -> Tensor:
    """First block of each block's document (B, M), from every row's document lengths in blocks."""
    return torch.tensor([[sum(row[:d]) for d, n in enumerate(row) for _ in range(n)] for row in lengths])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal to `tolerance`, relative to values above 1 and absolute below; infinities must agree; never NaN."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients_of(leaves: dict[str, Tensor], outputs: list[Tensor]) -> dict[str, Tensor | None]:
    """Gradients of a fixed random weighting of the outputs."""
    g = generator(11)
    total = sum((out * torch.randn(out.shape, generator=g, dtype=out.dtype)).sum() for out in outputs)
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()), allow_unused=True)))


def assert_same_gradients(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float = TOLERANCE
) -> None:
    """Every named gradient agrees; a missing one counts as zero."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        mine = actual[name]
        if gradient is None or mine is None:
            present = gradient if mine is None else mine
            assert present is None or not present.any(), f"{name} has a gradient on one side only"
            continue
        try:
            assert_close(mine, gradient, tolerance)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None


def state_bytes_of(state, folder) -> bytes:
    """The saved form of a decoding state."""
    path = folder / "state.safetensors"
    state.save(path)
    return path.read_bytes()

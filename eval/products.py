"""Bare matrix products of given shapes, forward alone or with both gradients, as calls to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

WEIGHT_POOL = 2**28  # bytes of distinct weights that one kind of layer walks through, so that they come from memory


@dataclass(frozen=True)
class Linear:
    """One product (rows, inputs) x (inputs, outputs), `count` times in a pass."""

    rows: int
    inputs: int
    outputs: int
    count: int = 1


@dataclass(frozen=True)
class Tiles:
    """QK^T and PV of `batch` heads: (queries, size) x (size, keys) and (queries, keys) x (keys, size)."""

    batch: int
    queries: int
    keys: int
    size: int
    count: int = 1


def product_flops(products: list[Linear] | list[Tiles]) -> int:
    """Forward FLOPs of the products, 2 for a multiply-add."""
    total = 0
    for p in products:
        if isinstance(p, Linear):
            total += 2 * p.rows * p.inputs * p.outputs * p.count
        else:
            total += 4 * p.batch * p.queries * p.keys * p.size * p.count
    return total


def forward_products(
    linears: list[Linear], tiles: list[Tiles], *, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Callable[[], None]:
    """A call that runs every product once. Weights are distinct from layer to layer, up to WEIGHT_POOL bytes."""
    runs = [_linear_run(product, dtype=dtype, device=device) for product in linears]
    runs += [_tiles_run(product, dtype=dtype, device=device) for product in tiles]

    def call() -> None:
        for run in runs:
            run()

    return call


def training_products(
    linears: list[Linear], tiles: list[Tiles], *, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Callable[[], None]:
    """A call that runs every product forward and for both gradients (three products for each)."""
    runs = [_linear_training_run(product, dtype=dtype, device=device) for product in linears]
    runs += [_tiles_training_run(product, dtype=dtype, device=device) for product in tiles]

    def call() -> None:
        for run in runs:
            run()

    return call


def _random(*shape: int, dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Values of unit scale; made in float32, since bfloat16 has no fast generator on a CPU."""
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _weights(product: Linear, *, dtype: torch.dtype, device: str | torch.device) -> list[torch.Tensor]:
    """Weights (outputs, inputs) of the product's layers; the last ones are used again once the pool is spent."""
    size = product.inputs * product.outputs * dtype.itemsize
    distinct = max(1, min(product.count, WEIGHT_POOL // size))
    held = _random(product.outputs, product.inputs, dtype=dtype, device=device)
    pool = [held] + [held.clone() for _ in range(distinct - 1)]
    return [pool[i % distinct] for i in range(product.count)]


def _linear_run(product: Linear, *, dtype: torch.dtype, device: str | torch.device) -> Callable[[], None]:
    x = _random(product.rows, product.inputs, dtype=dtype, device=device)
    weights = _weights(product, dtype=dtype, device=device)
    out = torch.empty(product.rows, product.outputs, dtype=dtype, device=device)

    def run() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)

    return run


def _tiles_run(product: Tiles, *, dtype: torch.dtype, device: str | torch.device) -> Callable[[], None]:
    q = _random(product.batch, product.queries, product.size, dtype=dtype, device=device)
    k = _random(product.batch, product.keys, product.size, dtype=dtype, device=device)
    v = k.clone()
    scores = torch.empty(product.batch, product.queries, product.keys, dtype=dtype, device=device)
    out = torch.empty_like(q)

    def run() -> None:
        for _ in range(product.count):
            torch.bmm(q, k.transpose(1, 2), out=scores)
            torch.bmm(scores, v, out=out)

    return run


def _linear_training_run(product: Linear, *, dtype: torch.dtype, device: str | torch.device) -> Callable[[], None]:
    x = _random(product.rows, product.inputs, dtype=dtype, device=device)
    weights = _weights(product, dtype=dtype, device=device)
    y = torch.empty(product.rows, product.outputs, dtype=dtype, device=device)
    dy = _random(product.rows, product.outputs, dtype=dtype, device=device)
    dx, dw = torch.empty_like(x), torch.empty_like(weights[0])

    def run() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=y)
            torch.mm(dy, weight, out=dx)
            torch.mm(dy.t(), x, out=dw)

    return run


def _tiles_training_run(product: Tiles, *, dtype: torch.dtype, device: str | torch.device) -> Callable[[], None]:
    q = _random(product.batch, product.queries, product.size, dtype=dtype, device=device)
    k = _random(product.batch, product.keys, product.size, dtype=dtype, device=device)
    v, do = k.clone(), q.clone()
    s = torch.empty(product.batch, product.queries, product.keys, dtype=dtype, device=device)
    ds = _random(product.batch, product.queries, product.keys, dtype=dtype, device=device)
    out, dq, dk = torch.empty_like(q), torch.empty_like(q), torch.empty_like(k)

    def run() -> None:
        for _ in range(product.count):
            torch.bmm(q, k.transpose(1, 2), out=s)
            torch.bmm(s, v, out=out)
            torch.bmm(do, v.transpose(1, 2), out=s)
            torch.bmm(ds.transpose(1, 2), do, out=dk)  # gradient of v
            torch.bmm(ds, k, out=dq)
            torch.bmm(ds.transpose(1, 2), q, out=dk)

    return run

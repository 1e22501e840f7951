"""The floor: what a step costs if only its matrix products ran, and a decoding step also read its state once.

Floor = the linear layers plus QK^T and PV over visible tiles, as bare products at the same shapes, dtype and threads,
plus, for a decoding step, state bytes over the measured read bandwidth. Norms, activations, softmax, convolutions,
the embedding, every copy and cast, and all of SSD (its own products included) are left out: they are what an
implementation can hide or fuse. Projections that share an input are one product (q with k and v; gate with up).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mezzotint.models.config import ModelConfig, state_bytes

TILE_KEYS = 512  # keys of one product of a decoding step: its operands stay in the cache
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


def linear_layers(config: ModelConfig, *, rows: int, logits: int) -> list[Linear]:
    """The linear layers of one pass over `rows` tokens, the head at `logits` rows."""
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    a, m, layers = config.pattern.count("A"), config.pattern.count("M"), len(config.pattern)
    mamba_in = config.d_inner + config.conv_channels + 2 * config.ssm_heads
    products = [
        Linear(rows, d, q + 2 * kv, a),
        Linear(rows, q, d, a),
        Linear(rows, d, mamba_in, m),
        Linear(rows, config.d_inner, d, m),
        Linear(rows, d, 2 * config.d_ff, layers),
        Linear(rows, config.d_ff, d, layers),
        Linear(logits, d, config.vocab_size),
    ]
    return [product for product in products if product.count and product.rows]


def decode_tiles(config: ModelConfig, *, batch: int, rows: int, context: int) -> list[Tiles]:
    """The tiles of a pass of `rows` tokens a batch row: all see the context and each other, TILE_KEYS keys at a time.

    Query heads that share a key head are one product. Products of the same shape run on the same operands, which stay
    in the cache: reading the state from memory is counted by its bytes, once.
    """
    heads, queries = batch * config.n_kv_heads, rows * (config.n_heads // config.n_kv_heads)
    whole, rest = divmod(context + rows, TILE_KEYS)
    layers = config.pattern.count("A")
    sizes = [(TILE_KEYS, whole * layers), (rest, layers)]
    return [Tiles(heads, queries, keys, config.head_dim, count) for keys, count in sizes if keys and count]


def training_tiles(config: ModelConfig, *, batch: int, blocks: int) -> list[Tiles]:
    """The tiles of two streams with all frontiers: clean and noisy block `b` each see `b + 1` blocks.

    The last clean block is cut off: no frontier sees it.
    """
    g, groups, a = config.block_length, config.n_heads // config.n_kv_heads, config.pattern.count("A")
    heads, streams = batch * config.n_kv_heads, [2] * (blocks - 1) + [1]
    return [Tiles(heads, s * g * groups, (b + 1) * g, config.head_dim, a) for b, s in enumerate(streams) if a]


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


def decode_floor(
    config: ModelConfig,
    *,
    batch: int,
    context: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    passes: int = 1,
) -> Callable[[], None]:
    """The products of a denoising step at `context` tokens (`passes` 2: of an advance, G clean and G noisy tokens).

    The head runs at the noisy rows. The state's bytes over the bandwidth come on top (state_read_seconds).
    """
    rows = batch * config.block_length
    linears = linear_layers(config, rows=passes * rows, logits=rows)
    tiles = decode_tiles(config, batch=batch, rows=passes * config.block_length, context=context)
    return forward_products(linears, tiles, dtype=dtype, device=device)


def training_floor(
    config: ModelConfig,
    *,
    batch: int,
    row_length: int,
    masked: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
) -> Callable[[], None]:
    """The products of forward and backward of `batch` rows, two streams, all frontiers, head at `masked` rows only.

    The clean stream is cut at the last frontier. Both streams count in every layer, also in the last one, where a
    model need not finish the clean stream.
    """
    linears = linear_layers(config, rows=batch * (2 * row_length - config.block_length), logits=masked)
    tiles = training_tiles(config, batch=batch, blocks=row_length // config.block_length)
    return training_products(linears, tiles, dtype=dtype, device=device)


def state_read_seconds(config: ModelConfig, *, batch: int, context: int, itemsize: int, bandwidth: float) -> float:
    """Seconds to read the state of `context` tokens once, at `bandwidth` bytes a second."""
    return state_bytes(config, batch=batch, length=context, itemsize=itemsize) / bandwidth


def read_bandwidth(device: str | torch.device = "cpu", *, size: int = 2**30, repeats: int = 5) -> float:
    """Bytes a second of reading `size` bytes once (a sum), the fastest of `repeats`: at the current threads."""
    from mezzotint.eval.timing import synchronize

    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats + 1):
        started = time.perf_counter()
        data.sum()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return size / best


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
